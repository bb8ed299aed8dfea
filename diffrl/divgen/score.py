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
from diffrl.divgen.folders import show
from diffrl.divgen.metrics import FEWEST, REPLICATES, Array
from diffrl.divgen.observe import Seen, Sight
from diffrl.divgen.prompts import DIMENSIONS
from diffrl.divgen.reference import Reference
from diffrl.errors import UserError
from diffrl.records.disk import write_text
from diffrl.seeds import seed_of
from diffrl.version import __version__

FORMAT = 1
FILE = "scores.json"
_VENDI_REPLICATES = 100  # each needs its own eigenvalues
_DIGITS = 7


@dataclass(frozen=True)
class Metric:
    """What a metric is: its title, dimension ("" = all), the kind of extractor, its direction, one line of meaning."""

    title: str
    dimension: str
    kind: str
    meaning: str
    lower: bool = False


METRICS = {
    "ids": Metric("IDS", "id", "identity", "mean cosine of all pairs of faces", lower=True),
    "asc": Metric("ASC", "style", "style", "coverage of real styles, 1 = as real images"),
    "sdi": Metric("SDI", "layout", "layout", "1 - mean overlap of the layouts of one prompt"),
    "pvs": Metric("PVS", "tonal", "tones", "spread of saturation, brightness and contrast"),
    "diversity": Metric("group diversity", "", "features", "mean 1 - cosine of the images of one prompt"),
    "vendi": Metric("Vendi score", "", "features", "effective number of different images"),
    "lpips": Metric("LPIPS diversity", "", "lpips", "mean LPIPS distance of the images of one prompt"),
}
LOWER = frozenset(name for name, metric in METRICS.items() if metric.lower)


@dataclass
class Score:
    """One metric. `value` is None where `why` says so; low, high: interval of 95 %, None with fewer than 8 prompts.

    images: that counted; empty: in which the extractor found nothing; prompts: the units of the interval; units: a
    digest of them, so that two scores on the same prompts can be compared pairwise by their `deviations`.
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
            scores[name] = _over_images(rows, metric.kind, _POOLED[name])
    unreadable = [f"{show(item.path)}: {reason}" for item, reason in sight.unreadable]
    by_prompt = [{"prompt": text, **values} for text, values in groups.items()]
    return Scores(scores, _dimensions(seen, sight, groups), _keywords(seen, groups), by_prompt, unreadable)


def _vendi(features: Array, weights: Array | None = None) -> Array:
    return metrics.vendi(features, None if weights is None else weights[:_VENDI_REPLICATES])


_POOLED: dict[str, Callable[..., Array]] = {  # metrics over all images, whatever their prompt
    "ids": metrics.mean_cosine,
    "pvs": metrics.tonal_variety,
    "vendi": _vendi,
}


def _empty(rows: Sequence[Seen], kind: str) -> int:
    return sum(s.values[kind] is None for s in rows)


def _digest(texts: Sequence[str]) -> str:
    return f"{seed_of(*texts):016x}"


def _subsets(texts: Sequence[str]) -> Array:
    """Subsets of these prompts; the same for the same prompts, whatever their images."""
    return metrics.subsets(len(texts), REPLICATES, seed_of("divgen subsets", *texts))


def _finished(value: float, replicates: Array, texts: Sequence[str], **counts: Any) -> Score:
    deviation = metrics.deviations(replicates, len(texts)) if len(replicates) else replicates
    return _with_interval(value, deviation, prompts=len(texts), units=_digest(texts), **counts)


def _with_interval(value: float, deviation: Array, **counts: Any) -> Score:
    interval = metrics.interval(value, deviation)
    rounded = [float(f"{x:.5g}") for x in deviation] if interval else []
    ends = (round(interval.low, _DIGITS), round(interval.high, _DIGITS)) if interval else (None, None)
    return Score(round(value, _DIGITS), ends[0], ends[1], deviations=rounded, **counts)


def _over_images(rows: Sequence[Seen], kind: str, metric: Callable[..., Array]) -> Score:
    """A metric of all images together; its interval is over prompts, each with all its images."""
    counted = [s for s in rows if s.values[kind] is not None]
    counts: dict[str, Any] = {"images": len(counted), "empty": _empty(rows, kind)}
    if len(counted) < 2:
        return Score(why=f"{len(counted)} images in which something was found; it needs two", **counts)
    texts = sorted({s.item.prompt.text for s in counted})
    place = {text: i for i, text in enumerate(texts)}
    values = np.stack([s.values[kind] for s in counted])  # type: ignore[misc]
    replicates = np.zeros(0)
    if len(texts) >= FEWEST:
        replicates = metric(values, _subsets(texts)[:, [place[s.item.prompt.text] for s in counted]])
    value = float(metric(values)[0])
    return _finished(value, replicates, texts, **counts)


def _over_prompts(groups: Mapping[str, Mapping[str, Any]], name: str, rows: Sequence[Seen], empty: int) -> Score:
    """The mean of a metric that every prompt has; the interval is over prompts."""
    chosen = {text: float(values[name]) for text, values in sorted(groups.items()) if name in values}
    counts: dict[str, Any] = {"images": len(rows) - empty, "empty": empty}
    if not chosen:
        why = "no prompt with two images in which something was found"
        return Score(why=why if any(s.item.known for s in rows) else "of no image a prompt is known", **counts)
    values, texts = np.array(list(chosen.values())), list(chosen)
    replicates = metrics.weighted_mean(values, _subsets(texts)) if len(texts) >= FEWEST else np.zeros(0)
    return _finished(float(values.mean()), replicates, texts, **counts)


def _coverage(rows: Sequence[Seen], reference: Reference | None) -> Score:
    """ASC; with more images than X_test has, as many of them as it has are drawn by a fixed seed."""
    if reference is None:
        return Score(why="no reference of real images: build one with `diffrl divgen reference`")
    values = [s.values["style"] for s in rows if s.values["style"] is not None]
    counts: dict[str, Any] = {"empty": len(rows) - len(values), "prompts": len({s.item.prompt.text for s in rows})}
    n = min(len(values), len(reference.test))
    if n < FEWEST:
        return Score(why=f"{n} images to query with; it needs {FEWEST}", images=n, **counts)
    if values[0].shape != reference.train[0].shape:  # type: ignore[union-attr]
        raise UserError(f"the reference ({reference.source}) has features of another width than the style extractor's")
    order = np.argsort(np.random.PCG64(seed_of("divgen queries")).random_raw(len(values)), kind="stable")[:n]
    neighbours = nearest(reference.train, np.stack(values)[order])  # type: ignore[arg-type]
    real = nearest(reference.train, reference.test[:n])
    return _with_interval(*coverage(neighbours, real, len(reference.train)), images=n, **counts)


def _grouped(seen: Sequence[Seen], distances: Mapping[str, float]) -> dict[str, dict[str, Any]]:
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
            entry["lpips"] = round(distances[text], _DIGITS)
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
