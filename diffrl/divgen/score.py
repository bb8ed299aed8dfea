"""From what was seen to scores: every metric with its interval and counts, or with the reason why it has no value."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from diffrl.divgen import metrics
from diffrl.divgen.asc import coverage, nearest
from diffrl.divgen.listings import show
from diffrl.divgen.metrics import FEWEST, Array
from diffrl.divgen.observe import Seen, Sight
from diffrl.divgen.prompts import DIMENSIONS
from diffrl.divgen.reference import Reference
from diffrl.errors import UserError
from diffrl.records.disk import write_text
from diffrl.seeds import seed_of
from diffrl.stats import LEVEL
from diffrl.version import __version__

FORMAT = 2
FILE = "scores.json"
SUBSETS = 8  # of images, over which a score of unequal sets is averaged
_ASC_FEWEST = 32  # queries below which how many styles they meet says next to nothing
_DIGITS = 7


@dataclass(frozen=True)
class Metric:
    """What a metric is: its title, dimension ("" = all), kind of extractor, meaning, direction, least value."""

    title: str
    dimension: str
    kind: str
    meaning: str
    lower: bool = False
    least: float = 0.0

    @property
    def direction(self) -> str:
        return f"{'lower' if self.lower else 'higher'} is more diverse"


METRICS = {
    "ids": Metric("IDS", "id", "identity", "mean cosine of all pairs of faces", lower=True, least=-1.0),
    "asc": Metric("ASC", "style", "style", "coverage of real styles, 1 = as real images"),
    "sdi": Metric("SDI", "layout", "layout", "1 - mean overlap of the layouts of one prompt"),
    "pvs": Metric("PVS", "tonal", "tones", "spread of saturation, brightness and contrast"),
    "diversity": Metric("group diversity", "", "features", "mean 1 - cosine of the images of one prompt"),
    "vendi": Metric("Vendi score", "", "features", "effective number of different images", least=1.0),
    "lpips": Metric("LPIPS diversity", "", "lpips", "mean LPIPS distance of the images of one prompt"),
}


@dataclass
class Score:
    """One metric. `value` is None where `why` says so; low, high: interval of 95 %, None with fewer than 8 prompts.

    images: that counted; empty: in which the extractor found nothing; prompts: the units of the interval; units: a
    digest of them, so that two scores on the same prompts can be compared pairwise by their `deviations`.
    cut: of prompts with more images than another set has, as many were drawn `SUBSETS` times.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    images: int = 0
    empty: int = 0
    prompts: int = 0
    why: str = ""
    units: str = ""
    deviations: list[float] = field(default_factory=list)
    cut: bool = False


@dataclass
class Scores:
    """All metrics of a set of images, with the counts and values behind them; see `score`."""

    metrics: dict[str, Score]
    dimensions: dict[str, dict[str, Any]]
    keywords: dict[str, dict[str, float]]
    prompts: list[dict[str, Any]]
    unreadable: list[str]
    about: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write a JSON file, at once."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, "diffrl_version": __version__, **asdict(self)}
        write_text(path, json.dumps(content, allow_nan=False) + "\n")

    def values(self) -> dict[str, float]:
        """The metrics that have a value."""
        return {name: score.value for name, score in self.metrics.items() if score.value is not None}


def load_scores(path: Path) -> Scores:
    """Read what `Scores.save` wrote; UserError for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise UserError(f"{path}: written by another version of diffrl ({content['diffrl_version']}); score again")
        content.pop("diffrl_version")
        content["metrics"] = {name: Score(**score) for name, score in content["metrics"].items()}
        return Scores(**content)
    except FileNotFoundError:
        raise UserError(f"{path}: not scored yet; run `diffrl divgen score {path.parent}`") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not scores that `diffrl divgen score` wrote ({error!r})") from error


def score(sight: Sight, reference: Reference | None = None, missing: Mapping[str, str] | None = None) -> Scores:
    """All metrics. The order of the images does not matter.

    Args:
        sight: what `observe` saw.
        reference: real images for ASC, in the space of the same style extractor.
        missing: kinds of extractors that could not be loaded, with the reason.
    """
    missing = dict(missing or {})
    rank = {name: i for i, name in enumerate(DIMENSIONS)}
    seen = sorted(sight.seen, key=lambda s: (rank.get(s.item.dimension, -1), s.item.prompt.text, s.item.member))
    groups = _grouped(seen, sight.distances)
    scores: dict[str, Score] = {}
    for name, metric in METRICS.items():
        rows = [s for s in seen if metric.kind in s.values]
        if metric.kind in missing:
            scores[name] = Score(why=missing[metric.kind])
        elif metric.kind == "lpips":
            scores[name] = _over_prompts(groups, name, seen, 0)
        elif not rows:
            scores[name] = Score(why=f"no image of the dimension {metric.dimension}" if seen else "no readable image")
        elif name in ("sdi", "diversity"):
            scores[name] = _over_prompts(groups, name, rows, _empty(rows, metric.kind))
        elif name == "asc":
            scores[name] = _coverage(rows, reference)
        else:
            scores[name] = _over_images(name, rows)
    unreadable = [f"{show(item.path)}: {reason}" for item, reason in sight.unreadable]
    by_prompt = [{"prompt": text, **values} for text, values in groups.items()]
    return Scores(scores, _dimensions(seen, sight, groups), _keywords(seen, groups), by_prompt, unreadable)


_POOLED: dict[str, Callable[..., Array]] = {  # metrics over all images, whatever their prompt
    "ids": metrics.mean_cosine,
    "pvs": metrics.tonal_variety,
    "vendi": metrics.vendi,
}


def _empty(rows: Sequence[Seen], kind: str) -> int:
    return sum(s.values[kind] is None for s in rows)


def _finished(name: str, value: float, deviation: Array, texts: Sequence[str], **counts: Any) -> Score:
    found = metrics.interval(value, deviation) if len(texts) >= FEWEST else None
    rounded = [float(f"{x:.5g}") for x in deviation] if found else []
    low, high = _ends(name, found.low, found.high) if found else (None, None)
    counts |= {"prompts": len(texts), "units": f"{seed_of(*texts):016x}", "deviations": rounded}
    return Score(round(value, _DIGITS), low, high, **counts)


def _ends(name: str, low: float, high: float) -> tuple[float, float]:
    return round(max(float(low), METRICS[name].least), _DIGITS), round(float(high), _DIGITS)


Drawn = list[list[Seen]]  # subsets of a set's images, each sorted; one where all count


def _over_images(name: str, rows: Sequence[Seen], subsets: Drawn | None = None) -> Score:
    """A metric of all images together, mean over `subsets` of them; its interval is over prompts."""
    kind = METRICS[name].kind
    counted = [s for s in rows if s.values[kind] is not None]
    chosen = [counted] if subsets is None else subsets
    counts: dict[str, Any] = {"images": len(chosen[0]), "empty": _empty(rows, kind), "cut": len(chosen) > 1}
    if len(chosen[0]) < 2:
        return Score(why=f"{len(chosen[0])} images in which something was found; it needs two", **counts)
    texts = sorted({s.item.prompt.text for s in chosen[0]})
    values: list[float] = []
    parts: list[Array] = []
    for part in chosen:
        features = np.stack([s.values[kind] for s in part])  # type: ignore[misc]
        value = float(_POOLED[name](features)[0])
        values.append(value)
        place = {text: i for i, text in enumerate(sorted({s.item.prompt.text for s in part}))}
        if len(place) >= FEWEST and (not parts or list(place) == texts):  # others are other images, without prompts
            kept = metrics.left_out(len(place))
            replicates = _POOLED[name](features, kept[:, [place[s.item.prompt.text] for s in part]])
            parts.append(metrics.deviations(value, replicates, kept))
    deviation = np.mean(parts, axis=0) if parts else np.zeros(0)
    return _finished(name, float(np.mean(values)), deviation, texts, **counts)


def _over_prompts(groups: Mapping[str, Mapping[str, Any]], name: str, rows: Sequence[Seen], empty: int) -> Score:
    """The mean of a metric that every prompt has; the interval is over prompts."""
    chosen = {text: float(values[name]) for text, values in sorted(groups.items()) if name in values}
    images = sum(groups[text]["compared"] for text in chosen) if name == "lpips" else len(rows) - empty
    counts: dict[str, Any] = {"images": images, "empty": empty}
    if not chosen:
        why = "no prompt with two images in which something was found"
        return Score(why=why if any(s.item.known for s in rows) else "of no image a prompt is known", **counts)
    values, texts = np.array(list(chosen.values())), list(chosen)
    deviation = (values - values.mean()) / max(len(values) - 1, 1) ** 0.5  # the jackknife of a mean, prompt by prompt
    return _finished(name, float(values.mean()), deviation, texts, **counts)


def _coverage(rows: Sequence[Seen], reference: Reference | None, subsets: Drawn | None = None) -> Score:
    """ASC; with more images than X_test has, as many of them as it has are drawn by a fixed seed."""
    if reference is None:
        return Score(why="no reference of real images: build one with `diffrl divgen reference`")
    counted = [s for s in rows if s.values["style"] is not None]
    chosen = [counted] if subsets is None else subsets
    texts = sorted({s.item.prompt.text for s in chosen[0]})
    counts: dict[str, Any] = {"empty": len(rows) - len(counted), "prompts": len(texts), "cut": len(chosen) > 1}
    n = min(len(chosen[0]), len(reference.test))
    if n < FEWEST:
        return Score(why=f"{n} images to query with; it needs {FEWEST}", images=n, **counts)
    if counted[0].values["style"].shape != reference.train[0].shape:  # type: ignore[union-attr]
        raise UserError(f"the reference ({reference.source}) has features of another width than the style extractor's")
    real = nearest(reference.train, reference.test[:n])
    order = np.argsort(np.random.PCG64(seed_of("divgen queries")).random_raw(len(chosen[0])), kind="stable")[:n]
    found = []
    for part in chosen:
        features = np.stack([s.values["style"] for s in part])[order]  # type: ignore[misc]
        found.append(coverage(nearest(reference.train, features), real, len(reference.train)))
    value, deviation = float(np.mean([x for x, _ in found])), found[0][1]
    if n < _ASC_FEWEST:
        return Score(round(value, _DIGITS), images=n, **counts)
    low, high = _ends("asc", *(value + np.quantile(deviation, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])))
    rounded = [float(f"{x:.5g}") for x in deviation]
    return Score(round(value, _DIGITS), low, high, images=n, deviations=rounded, **counts)


def _grouped(seen: Sequence[Seen], distances: Mapping[str, tuple[float, int]]) -> dict[str, dict[str, Any]]:
    """By prompt: dimension, keyword, number of images, and the metrics of its images where it has two."""
    members: dict[str, list[Seen]] = {}
    for s in seen:
        members.setdefault(s.item.prompt.text, []).append(s)
    groups = {}
    for text, rows in members.items():
        item = rows[0].item
        entry: dict[str, Any] = {"dimension": item.dimension, "keyword": item.keyword, "images": len(rows)}
        features = [e for s in rows if (e := s.values.get("features")) is not None]
        if len(features) > 1:
            entry["diversity"] = round(1.0 - float(metrics.mean_cosine(np.stack(features))[0]), _DIGITS)
        layouts = [boxes for s in rows if (boxes := s.values.get("layout")) is not None]
        if len(layouts) > 1:
            entry["sdi"] = round(metrics.layout_diversity(layouts), _DIGITS)
        if text in distances:
            entry["lpips"], entry["compared"] = round(distances[text][0], _DIGITS), distances[text][1]
        groups[text] = entry
    return groups


def _dimensions(seen: Sequence[Seen], sight: Sight, groups: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Counts of each dimension, and the diversity of its own images."""
    images = Counter(s.item.dimension for s in seen)
    unreadable = Counter(item.dimension for item, _ in sight.unreadable)
    table = {}
    for name in [*DIMENSIONS, ""]:
        if not images[name] + unreadable[name]:
            continue
        chosen = [values for values in groups.values() if values["dimension"] == name]
        counts = {"images": images[name], "unreadable": unreadable[name], "prompts": len(chosen)}
        features = [e for s in seen if s.item.dimension == name and (e := s.values.get("features")) is not None]
        diverse = [values["diversity"] for values in chosen if "diversity" in values]
        table[name] = {
            **counts,
            "diversity": round(float(np.mean(diverse)), _DIGITS) if diverse else None,
            "vendi": round(float(metrics.vendi(np.stack(features))[0]), _DIGITS) if len(features) > 1 else None,
        }
    return table


def _keywords(seen: Sequence[Seen], groups: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Within each keyword of a dimension: IDS, spread of style (1 - mean cosine), SDI, PVS."""
    pooled: dict[str, tuple[str, Callable[[Array], float]]] = {
        "id": ("identity", lambda x: float(metrics.mean_cosine(x)[0])),
        "style": ("style", lambda x: 1.0 - float(metrics.mean_cosine(x)[0])),
        "tonal": ("tones", lambda x: float(metrics.tonal_variety(x)[0])),
    }
    table: dict[str, dict[str, float]] = {}
    for dimension, (kind, metric) in pooled.items():
        values: dict[str, list[Array]] = {}
        for s in seen:
            if s.item.dimension == dimension and s.item.keyword and (e := s.values.get(kind)) is not None:
                values.setdefault(s.item.keyword, []).append(e)
        table[dimension] = {word: round(metric(np.stack(x)), _DIGITS) for word, x in values.items() if len(x) > 1}
    layouts: dict[str, list[float]] = {}
    for entry in groups.values():
        if entry["dimension"] == "layout" and "sdi" in entry:
            layouts.setdefault(entry["keyword"], []).append(entry["sdi"])
    table["layout"] = {word: round(float(np.mean(x)), _DIGITS) for word, x in layouts.items()}
    return {dimension: table[dimension] for dimension in DIMENSIONS if table[dimension]}
