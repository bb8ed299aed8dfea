"""Several sets of images, made comparable: the prompts that all have, equally many images of each, the same extractors.

Scores within a prompt are means over pairs, whose expectation does not depend on how many images a prompt has: they
need the common prompts alone. Scores over all images do depend on it: where a set has more images of a prompt than
another, as many are drawn, `SUBSETS` times by fixed seeds, and the score is the mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from diffrl.divgen.observe import Seen, Sight
from diffrl.divgen.reference import Reference
from diffrl.divgen.score import METRICS, SUBSETS, Drawn, Score, Scores, _coverage, _over_images, _over_prompts
from diffrl.errors import listed
from diffrl.seeds import seed_of


@dataclass
class SetOf:
    """One set: its name, its own scores, what was seen, and the real images of its ASC."""

    name: str
    scores: Scores
    sight: Sight
    reference: Reference | None = None
    fair: dict[str, Score] = field(default_factory=dict)


def make_fair(sets: Sequence[SetOf]) -> list[str]:
    """Fill every set's `fair`, its scores on what all have; returns what differs between the sets, a line each."""
    lines = list(_differences(sets))
    for name, metric in METRICS.items():
        usable = [one for one in sets if one.scores.metrics[name].value is not None]
        refused = _refused(name, usable)
        for one in sets:
            if one not in usable:
                one.fair[name] = one.scores.metrics[name]
            elif refused:
                one.fair[name] = Score(why=refused)
        if not usable or refused:
            continue
        if metric.kind in ("layout", "lpips") or name == "diversity":
            _within(name, usable)
        else:
            _pooled(name, usable)
    return lines


def _refused(name: str, sets: Sequence[SetOf]) -> str:
    """Why a score cannot be compared between these sets: another extractor, another reference."""
    kind = METRICS[name].kind
    used = {one.scores.about.get("extractors", {}).get(kind) for one in sets}
    if len(used) > 1:
        return f"scored with {' and '.join(sorted(map(str, used)))}"
    real = {str(one.scores.about.get("reference")) for one in sets}
    return "by other references" if name == "asc" and len(real) > 1 else ""


def _rows(one: SetOf, kind: str) -> dict[str, list[Seen]]:
    """By prompt, the images in which something was found, in their order."""
    rows: dict[str, list[Seen]] = {}
    for s in sorted(one.sight.seen, key=lambda s: (s.item.prompt.text, s.item.member)):
        if s.values.get(kind) is not None:
            rows.setdefault(s.item.prompt.text if s.item.known else "", []).append(s)
    return rows


def _within(name: str, sets: Sequence[SetOf]) -> None:
    groups = [{p["prompt"]: p for p in one.scores.prompts if name in p} for one in sets]
    common = set.intersection(*(set(group) for group in groups))
    for one, group in zip(sets, groups, strict=True):
        rows = [s for s in one.sight.seen if s.item.prompt.text in common and METRICS[name].kind in s.values]
        empty = 0 if name == "lpips" else sum(s.values[METRICS[name].kind] is None for s in rows)
        one.fair[name] = (
            _over_prompts({text: group[text] for text in common}, name, rows, empty)
            if common
            else Score(why="no prompt in common")
        )


def _pooled(name: str, sets: Sequence[SetOf]) -> None:
    kind = METRICS[name].kind
    rows = [_rows(one, kind) for one in sets]
    common = sorted(set.intersection(*(set(group) for group in rows)))
    counts = {text: min(len(group[text]) for group in rows) for text in common}
    for one, group in zip(sets, rows, strict=True):
        if not common:
            one.fair[name] = Score(why="no prompt in common")
            continue
        chosen = _subsets(group, counts)
        seen = [s for s in one.sight.seen if kind in s.values]
        seen = [s for s in seen if (s.item.prompt.text if s.item.known else "") in counts]
        one.fair[name] = _coverage(seen, one.reference, chosen) if name == "asc" else _over_images(name, seen, chosen)


def _subsets(group: Mapping[str, Sequence[Seen]], counts: Mapping[str, int]) -> Drawn:
    """As many images of each prompt as `counts` says: all, or `SUBSETS` draws."""
    cut = any(len(group[text]) > count for text, count in counts.items())
    chosen = []
    for draw in range(SUBSETS if cut else 1):
        part: list[Seen] = []
        for text, count in counts.items():
            bits = np.random.PCG64(seed_of("divgen images", draw, text)).random_raw(len(group[text]))
            part += [group[text][i] for i in sorted(np.argsort(bits, kind="stable")[:count])]
        chosen.append(part)
    return chosen


# --- what differs ----------------------------------------------------------------------------------------------------


def drawn_with(sight: Sight, job: Mapping[str, Any]) -> dict[str, list[str]]:
    """What is known of how a set was drawn: each setting's values, the most frequent first, sizes and seeds."""
    found: dict[str, Counter[str]] = {}
    for s in sight.seen:
        size = s.values.get("size")
        facts = dict(s.item.settings) | ({} if size is None else {"size": f"{size[0]} x {size[1]}"})
        for key, value in facts.items():
            found.setdefault(key, Counter())[_plain(value)] += 1
    for key in ("model", "lora", "checkpoint", "steps", "sampler", "guidance_scale", "shift"):
        if job.get(key) is not None:
            found[key] = Counter([_plain(job[key])])
    seeds = sorted({s.item.seed for s in sight.seen if s.item.seed is not None})
    result = {key: [value for value, _ in values.most_common(5)] for key, values in found.items()}
    if job.get("seed") is not None:
        result["seeds"] = [_plain(job["seed"])]
    elif seeds:
        result["seeds"] = [f"{len(seeds)} from {seeds[0]} to {seeds[-1]}"]
    return result


def _plain(value: Any) -> str:
    try:
        return f"{float(value):g}"
    except (TypeError, ValueError):
        return str(value)


def _differences(sets: Sequence[SetOf]) -> Iterable[str]:
    """One line for each thing, besides the model, in which the sets are not alike."""
    abouts = [one.scores.about for one in sets]
    for kind in METRICS.values():
        used = [str(about.get("extractors", {}).get(kind.kind, "none")) for about in abouts]
        if len(set(used) - {"none"}) > 1 and kind is next(m for m in METRICS.values() if m.kind == kind.kind):
            yield _differ(f"the {kind.kind} extractor", sets, used) + "; what rests on it is not compared"
    if len({str(about.get("reference")) for about in abouts if about.get("reference")}) > 1:
        shown = [str((about.get("reference") or {}).get("source")) for about in abouts]
        yield _differ("the reference of ASC", sets, shown) + "; ASC is not compared"
    for key in ("size", "steps", "sampler", "guidance_scale", "shift", "seeds"):
        shown = [", ".join(about.get("drawn", {}).get(key, [])) for about in abouts]
        if len(set(shown) - {""}) > 1:
            yield _differ(key.replace("_", " "), sets, [text or "not known" for text in shown])
    prompts = [{s.item.prompt.text for s in one.sight.seen if s.item.known} for one in sets]
    if all(prompts):
        common, all_of_them = set.intersection(*prompts), set.union(*prompts)
        if len(common) < len(all_of_them):
            counts = [f"{len(own)}" for own in prompts]
            yield (
                f"{len(common)} of {len(all_of_them)} prompts are in all sets; only these are compared "
                + _differ("prompts", sets, counts, "(")
                + ")"
            )
    elif any(prompts):
        yield "of some sets no prompts are known"
    else:
        yield "no prompts are known: the sets are compared as samples of images, as if drawn for the same prompts"
    per = [Counter(s.item.prompt.text for s in one.sight.seen if s.item.known) for one in sets]
    ends = [(min(counts.values()), max(counts.values())) for counts in per if counts]
    shown = [str(low) if low == high else f"{low} to {high}" for low, high in ends]
    if len(shown) == len(sets) and len(set(shown)) > 1:
        yield _differ("images of a prompt", sets, shown) + "; scores over all images are means over equally many"
    for one in sets:
        if one.sight.copies:
            yield f"{one.name}: {one.sight.copies} images are there twice, and count once"


def _differ(what: str, sets: Sequence[SetOf], values: Sequence[str], before: str = "") -> str:
    """`steps: 20 (a, b), 30 (c)`; many sets are counted."""
    by: dict[str, list[str]] = {}
    for one, value in zip(sets, values, strict=True):
        by.setdefault(value, []).append(one.name)
    parts = [f"{value} ({listed(names) if len(names) < 4 else f'{len(names)} sets'})" for value, names in by.items()]
    return f"{before}{what}: {', '.join(parts)}"
