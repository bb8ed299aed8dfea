"""league.json, as `run` writes it, and what follows from it: ranks, Pareto fronts, curves, verdicts.

Values are means over seeds, ± half their 95 % interval. A result that a check has caught takes part in nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffrl.errors import UserError, foreign, nearest
from diffrl.records.progress import finite
from diffrl.report.groups import Value

SCHEMA = 1
NORMAL = 1.96  # standard errors to the side of a 95 % interval: prompts are many
AXES = ("images", "forwards", "seconds")  # by which cost is made equal
HOLDS, OPPOSITE, OPEN = "holds", "the opposite holds", "not parted"


@dataclass(frozen=True)
class Track:
    """What is trained on (`proxy`), what is trusted (`gold`), and for how many images."""

    name: str
    proxy: tuple[str, ...]
    gold: tuple[str, ...]
    images: int | None
    shows: str
    lower: frozenset[str]  # values of which lower is better
    strip: Path | None  # the base model's
    prompts: tuple[str, ...]  # of the strips' pictures

    @property
    def judged(self) -> tuple[str, ...]:
        """Proxies, then golds, each once."""
        return tuple(dict.fromkeys((*self.proxy, *self.gold)))

    def named(self, measure: str) -> str:
        """What a measure beside the rewards is called here: that of the model by which gold is judged."""
        return "/".join([*self.gold[0].split("/")[:-1], measure]) if self.gold else measure

    def sign(self, name: str) -> int:
        return -1 if name in self.lower else 1


@dataclass(frozen=True)
class Entry:
    """A method. `number` is what charts call it; `expects`: its claim in a form that can be tested; `contributed`: it
    came from outside the package."""

    name: str
    number: int
    kind: str
    title: str
    page: str
    claim: str
    trials: int | None
    expects: tuple[Mapping[str, Any], ...]
    contributed: bool


@dataclass(frozen=True)
class Result:
    """An entry on a track. `curve`: ({axis of cost: spent}, {name: value}) of each held-out evaluation."""

    track: Track
    entry: Entry
    seeds: int
    commits: tuple[str, ...]
    gains: Mapping[str, Value]
    over_prompts: Mapping[str, float]  # half the gains' 95 % intervals over prompts instead of seeds
    gap: Value | None
    kept: Value | None  # variety after over before
    drift: float | None
    spread: float | None  # standard deviation of the proxy's gain over the seeds
    collapsed: int | None  # seeds with less than half of the base's variety
    cost: Mapping[str, float | None]  # of one seed, `AXES` and "mib"
    curve: tuple[tuple[Mapping[str, float | None], Mapping[str, Value]], ...]
    strip: Path | None
    checked: bool
    caught: tuple[str, ...]  # why a check caught it


@dataclass(frozen=True)
class League:
    path: Path
    version: str
    command: str
    tracks: Mapping[str, Track]
    entries: Mapping[str, Entry]
    results: tuple[Result, ...]
    paired: tuple[Mapping[str, Any], ...]
    left_out: tuple[str, ...]

    def of(self, track: Track, caught: bool = False) -> list[Result]:
        """A track's results; those that a check has caught only where asked for."""
        return [one for one in self.results if one.track is track and (caught or not one.caught)]


def read_league(path: Path) -> League:
    """Read a league.json.

    Raises:
        UserError: no such file, not JSON, another schema, or not what diffrl writes there.
    """
    if not path.is_file():
        near = nearest(path.name, [one.name for one in path.parent.glob("*.json")]) if path.parent.is_dir() else ""
        raise UserError(f'league report: no file "{path}"{near}; `python -m experiments.league run` writes it')
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of JSON, or of its encoding
        raise UserError(f"{path}: not JSON ({' '.join(str(error).split())[:120]})") from error
    schema = facts.get("schema") if isinstance(facts, dict) else None
    if schema != SCHEMA:
        raise UserError(f"{path}: schema {schema!r:.40}; this diffrl reads schema {SCHEMA}")
    with foreign(path):
        return _league(path, facts)


def _league(path: Path, facts: Mapping[str, Any]) -> League:
    tracks = {name: _track(path, name, one) for name, one in facts["tracks"].items()}
    entries = {name: _entry(i + 1, name, one) for i, (name, one) in enumerate(facts["entries"].items())}
    results = []
    for i, one in enumerate(facts["results"]):
        for key, known in (("track", tracks), ("entry", entries)):
            if one[key] not in known:
                raise UserError(f'{path}: results.{i}: unknown {key} "{one[key]}"{nearest(str(one[key]), known)}')
        results.append(_result(path, tracks[one["track"]], entries[one["entry"]], one))
    places = list(entries)
    results.sort(key=lambda one: (list(tracks).index(one.track.name), places.index(one.entry.name)))
    version, command = (str(facts.get(key) or "") for key in ("diffrl_version", "command"))
    paired, left_out = tuple(facts.get("paired") or ()), tuple(map(str, facts.get("left_out") or ()))
    return League(path, version, command, tracks, entries, tuple(results), paired, left_out)


def _track(path: Path, name: str, one: Mapping[str, Any]) -> Track:
    images, shows = _number(one.get("images")), str(one.get("shows") or "").rstrip(".")
    return Track(
        name=name,
        proxy=tuple(map(str, one["proxy"])),
        gold=tuple(map(str, one.get("gold") or ())),
        images=None if images is None else int(images),
        shows=f"{shows}." if shows else "",
        lower=frozenset(one.get("lower_is_better") or ()),
        strip=_beside(path, one.get("strip")),
        prompts=tuple(map(str, one.get("prompts") or ())),
    )


def _entry(number: int, name: str, one: Mapping[str, Any]) -> Entry:
    texts = {key: str(one.get(key) or "") for key in ("kind", "page", "claim")}
    return Entry(
        name=name,
        number=number,
        title=str(one.get("title") or name),
        trials=one.get("trials"),
        expects=tuple(one.get("expects") or ()),
        contributed=bool(one.get("others")),
        **texts,
    )


def _result(path: Path, track: Track, entry: Entry, one: Mapping[str, Any]) -> Result:
    seeds = len(one["seeds"])
    values = {name: value for name, value in one["values"].items() if value is not None}
    gains = {name: _value({"mean": value["gain"], "half": value.get("half")}, seeds) for name, value in values.items()}
    errors = {name: _number(value.get("se_prompts")) for name, value in values.items()}
    stability, check = one.get("stability") or {}, one.get("check") or {}
    cost = {key: _number((one.get("cost") or {}).get(key)) for key in (*AXES, "mib")}
    collapsed = stability.get("collapsed")
    curve = []
    for point in one.get("curve") or ():
        seen = {name: _value(value, seeds) for name, value in point["values"].items()}
        known = {name: value for name, value in seen.items() if value is not None}
        curve.append(({axis: _number(point.get(axis)) for axis in AXES}, known))
    return Result(
        track=track,
        entry=entry,
        seeds=seeds,
        commits=tuple(map(str, one.get("commit") or ())),
        gains={name: value for name, value in gains.items() if value is not None},
        over_prompts={name: NORMAL * error for name, error in errors.items() if error is not None},
        gap=_value(one.get("gap"), seeds),
        kept=_value(one.get("variety_kept"), seeds),
        drift=_number(one.get("drift")),
        spread=_number(stability.get("std")),
        collapsed=None if collapsed is None else int(collapsed),
        cost=cost,
        curve=tuple(curve),
        strip=_beside(path, one.get("strip")),
        checked=bool(check.get("seeds")),
        caught=() if check.get("passed", True) else tuple(map(str, check.get("lines") or ("no reason given",))),
    )


def _number(value: Any) -> float | None:
    """None for what is missing or not finite; an error for what is no number."""
    if value is None:
        return None
    return float(value) if finite(float(value)) else None


def _value(one: Mapping[str, Any] | None, seeds: int) -> Value | None:
    mean = None if one is None else _number(one["mean"])
    return None if one is None or mean is None else Value(mean, _number(one.get("half")), seeds)


def _beside(path: Path, name: str | None) -> Path | None:
    """A picture in the folder of league.json: what lies elsewhere is not the league's to show."""
    if not name:
        return None
    folder = path.parent.resolve()
    picture = (folder / name).resolve()
    if not picture.is_relative_to(folder):
        raise UserError(f'{path}: strip "{name}" is not in the folder of that file')
    return picture if picture.is_file() else None


def ranks(values: Sequence[Value | None], lower: bool = False) -> list[tuple[int, int] | None]:
    """(best, worst) rank of each: 1 + how many values are better, and the number of values less how many are worse, by
    intervals that part. So values whose intervals meet share ranks, and a wide interval has a wide range.

    None where there is no value, or no interval; such a value is counted nowhere. `lower`: lower is better.
    """
    spans = [None if one is None else one.span for one in values]
    if lower:
        spans = [None if span is None else (-span[1], -span[0]) for span in spans]
    known = [span for span in spans if span is not None]
    return [
        None
        if span is None
        else (1 + sum(a > span[1] for a, _ in known), len(known) - sum(b < span[0] for _, b in known))
        for span in spans
    ]


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The Pareto front of (x, y), more of both being better: the places of those that no other dominates, by x."""

    def dominated(x: float, y: float) -> bool:
        return any(a >= x and b >= y and (a > x or b > y) for a, b in points)

    return sorted((i for i, point in enumerate(points) if not dominated(*point)), key=lambda i: points[i])


def hacking_curve(result: Result, proxy: str, gold: str) -> list[tuple[float, float]]:
    """(gain of the proxy, gain of the gold) since the first of the evaluations that have both, in the order of time."""
    both = [(seen[proxy].mean, seen[gold].mean) for _, seen in result.curve if proxy in seen and gold in seen]
    return [(x - both[0][0], y - both[0][1]) for x, y in both]


def turned(result: Result, gold: str) -> int | None:
    """The evaluation (of those with the gold) from which on it fell: its best, where the last is worse by intervals
    that part. None: it did not, or nobody knows."""
    seen = [values[gold] for _, values in result.curve if gold in values]
    sign = result.track.sign(gold)
    if not seen or seen[-1].half is None:
        return None
    best = max(range(len(seen)), key=lambda i: sign * seen[i].mean)
    return best if sign * (seen[best].mean - seen[-1].mean) > (seen[best].half or 0.0) + seen[-1].half else None


def verdict(league: League, entry: Entry, expected: Mapping[str, Any]) -> tuple[str | None, str]:
    """(what the results say about one expectation of a claim, their figures); None: they say nothing.

    `expected`: on `track`, the entry has `more` (or less) of `name` than the entry `against`; against the base where
    that is None. The 95 % interval of the difference, paired by seed, decides: a claim was there before its test.
    """
    track, name, against = expected["track"], expected["name"], expected.get("against")
    sign = 1 if expected.get("more", True) else -1
    mine = {one.entry.name: one for one in league.results if one.track.name == track}
    if any(one is not None and (one not in mine or mine[one].caught) for one in (entry.name, against)):
        return None, ""
    if against is None:
        gain = mine[entry.name].gains.get(name)
        if gain is None or gain.half is None:
            return None, ""
        return _decided(sign * gain.mean, abs(gain.mean) > gain.half), signed(gain)
    for one in league.paired:
        if one["track"] == track and one["name"] == name and {one["a"], one["b"]} == {entry.name, against}:
            difference, half = _number(one["difference"]), _number(one.get("half"))
            if difference is None or half is None:
                return None, ""
            shown = Value(difference if one["a"] == entry.name else -difference, half, 0)
            return _decided(sign * shown.mean, abs(shown.mean) > half), signed(shown)
    return None, ""


def _decided(gain: float, sure: bool) -> str:
    return OPEN if not sure else HOLDS if gain > 0 else OPPOSITE


def signed(value: Value | None) -> str:
    """`+0.612 ± 0.013`."""
    if value is None:
        return "–"
    return f"{value.mean:+.3f}".replace("-", "−") + ("" if value.half is None else f" ± {value.half:.3f}")
