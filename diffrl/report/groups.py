"""Runs that differ by their seed only, as one: means over seeds with intervals, and tests between such groups.

A value of a group is the mean over its seeds, ± half its 95 % interval (Student's t over the seeds). Two groups are
compared by pairs: the same seed begins with the same LoRA, and its evaluations draw the same prompts from the same
noise. So a difference has an interval over seeds (of the paired differences), and a p-value over prompts: the paired
t-test on each prompt's difference, averaged over the seeds that both have, corrected by Holm for the number of groups
that are compared in the same value.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diffrl.errors import UserError, foreign
from diffrl.loras.recorded import evaluation_of
from diffrl.records.held_out import PROMPTS, SOLVER
from diffrl.records.progress import count, finite
from diffrl.report.data import BREADTH, RunData, differing, read_run
from diffrl.stats import differences as changes_of
from diffrl.stats import holm, interval, p_value

SHOWN = ("diversity", "variety")  # of what is measured beside the rewards
_SEED = re.compile(r"[-_./=]*(seed[-_=]?)?\d*$")


@dataclass(frozen=True)
class Value:
    """A mean over seeds, half its 95 % interval (None for one seed), and how many seeds it is of."""

    mean: float
    half: float | None
    seeds: int

    @property
    def span(self) -> tuple[float, float] | None:
        return None if self.half is None else (self.mean - self.half, self.mean + self.half)


@dataclass(frozen=True)
class Difference:
    """One group's value minus another's. `p` over prompts, None where no prompt's own scores are known."""

    value: Value
    p: float | None


@dataclass
class Group:
    """Runs by seed. Their values are those of `epoch`, the last one that all of them have evaluated."""

    name: str
    runs: dict[int, RunData]

    @property
    def first(self) -> RunData:
        return next(iter(self.runs.values()))

    @property
    def epochs(self) -> list[int]:
        """Those that all runs have evaluated; the first run's last where there is none."""
        each = [{row["epoch"] for row in run.metrics if "eval/diversity" in row} for run in self.runs.values()]
        return sorted(set.intersection(*each)) or [self.first.last["epoch"]]

    @property
    def epoch(self) -> int:
        return self.epochs[-1]

    def at(self, key: str, epoch: int) -> dict[int, float]:
        """{seed: a metric} of an epoch; without the seeds that have none."""
        rows = {seed: row for seed, run in self.runs.items() for row in run.metrics if row["epoch"] == epoch}
        return {seed: float(row[key]) for seed, row in rows.items() if finite(row.get(key))}

    def value(self, name: str, epoch: int | None = None) -> Value | None:
        """Of a held-out value, at the last epoch or at another."""
        return _value(list(self.at(f"eval/{name}", self.epoch if epoch is None else epoch).values()))

    def gain(self, name: str) -> Difference | None:
        """From the first evaluation to the last; None with fewer than two."""
        if len(self.epochs) < 2:
            return None
        before, after = (self.at(f"eval/{name}", epoch) for epoch in (self.epochs[0], self.epoch))
        value = _value([after[seed] - before[seed] for seed in after if seed in before])
        pairs = [(run, self.epoch, run, self.epochs[0]) for run in self.runs.values()]
        return None if value is None else Difference(value, _over_prompts(name, pairs))

    def against(self, other: Group, name: str) -> Difference | None:
        """This group's value minus another's, over the seeds that both have; None where there is none."""
        ours, theirs = self.at(f"eval/{name}", self.epoch), other.at(f"eval/{name}", other.epoch)
        shared = [seed for seed in ours if seed in theirs]
        value = _value([ours[seed] - theirs[seed] for seed in shared]) if self.pairs_with(other) else None
        pairs = [(self.runs[seed], self.epoch, other.runs[seed], other.epoch) for seed in shared]
        return None if value is None else Difference(value, _over_prompts(name, pairs))

    def pairs_with(self, other: Group) -> bool:
        """Do evaluations of one seed draw the same prompts from the same noise in both?"""
        newest = [run.measured[-1] for run in (self.first, other.first) if run.measured]
        return _drawn(self.first) == _drawn(other.first) and PROMPTS not in differing(newest)

    @property
    def names(self) -> list[str]:
        """The values that a table has: what is trained, what is watched, diversity, and variety where it is known."""
        known = {*self.first.trained, *(self.first.config.get("watch") or {}), *SHOWN}
        names = [name for name in [*self.first.trained, *self.first.watched] if name in known]
        return [name for name in names if self.at(f"eval/{name}", self.epoch)]

    def seconds(self, epoch: int) -> Value | None:
        """Of training until the end of an epoch, without evaluation."""
        each = [[row for row in run.metrics if row["epoch"] <= epoch] for run in self.runs.values()]
        return _value([sum(row.get("seconds") or 0.0 for row in rows) for rows in each])


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The folders of runs among these and, of those that are none, up to two folders below (a sweep's).

    Raises:
        UserError: a folder that is not there, or that has no run.
    """
    runs: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: there is no such run folder")
        below = [folder] if _is_run(folder) else [path.parent for path in folder.glob("*/metrics.jsonl")]
        below += [] if _is_run(folder) else [path.parent for path in folder.glob("*/*/metrics.jsonl")]
        if not (found := sorted(path for path in below if _is_run(path))):
            raise UserError(f"{folder} is not a run's folder: it has no epoch in metrics.jsonl, and no runs in it")
        order = _order(folder)
        runs += sorted(found, key=lambda run: order.get(run.resolve(), len(order)))
    return runs


def _order(folder: Path) -> dict[Path, int]:
    """{a run of a sweep: its place}, so that the first config is what the others are compared with."""
    path = folder / "sweep.json"
    if not path.is_file():
        return {}
    with foreign(path):
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
        return {(folder / run["name"] / f"seed-{run['seed']}").resolve(): i for i, run in enumerate(runs)}


def _is_run(folder: Path) -> bool:
    path = folder / "metrics.jsonl"
    return path.is_file() and path.stat().st_size > 0


def group(folders: Sequence[Path]) -> list[Group]:
    """The runs of these folders, those that differ by their seed only as one group, in the order of their first.

    A run with config and seed of an earlier one begins a group of its own.

    Raises:
        UserError: a folder that cannot be read, or is given twice.
    """
    groups: dict[tuple[str, int], dict[int, RunData]] = {}
    places = [folder.resolve() for folder in folders]
    for i, folder in enumerate(folders):
        if places[i] in places[:i]:
            raise UserError(f"{folder}: this run is given twice")
        run = read_run(folder)
        seed, kind = int(run.config.get("seed") or 0), _kind(run)
        again = next(n for n in itertools.count() if seed not in groups.get((kind, n), {}))
        groups.setdefault((kind, again), {})[seed] = run
    names = apart([_place(list(members.values())) for members in groups.values()])
    return [Group(name, dict(sorted(members.items()))) for name, members in zip(names, groups.values(), strict=True)]


def apart(places: Sequence[Path]) -> list[str]:
    """What each place is called: the shortest end of its path that no other has."""
    parts, depth = [place.parts for place in places], 1
    while len({part[-depth:] for part in parts}) < len({*parts}):
        depth += 1
    return ["/".join(part[-depth:]) for part in parts]


def _kind(run: RunData) -> str:
    """The config without what seeds differ in."""
    config = {key: value for key, value in run.config.items() if key not in ("seed", "run_dir")}
    return json.dumps(config or str(run.folder), sort_keys=True, default=str)


def _place(runs: Sequence[RunData]) -> Path:
    """A path that stands for runs that differ by their seed: what theirs share, without the seed."""
    paths = [str(run.folder.resolve()) for run in runs]
    if len(paths) > 1:
        shared = itertools.takewhile(lambda letters: len({*letters}) == 1, zip(*paths, strict=False))
        return Path(_SEED.sub("", "".join(letters[0] for letters in shared)))
    return runs[0].folder.resolve().parent if re.fullmatch(r"seed-\d+", runs[0].folder.name) else Path(paths[0])


def _value(values: Sequence[float]) -> Value | None:
    return Value(*interval(values), len(values)) if values else None


def _drawn(run: RunData) -> tuple[object, ...]:
    """What an evaluation's prompts and noise follow from, beside the seed."""
    evaluate = run.config.get("evaluate") or {}
    test = (run.config.get("prompts") or {}).get("test")
    return run.config.get("model"), str(test), *(evaluate.get(key) for key in ("prompts", "per_prompt", "resolution"))


def _over_prompts(name: str, pairs: Sequence[tuple[RunData, int, RunData, int]]) -> float | None:
    """The p-value over prompts of the paired differences of (run, epoch) and (run, epoch), averaged over the pairs."""
    each = [
        changes_of(other.held.values(name, then), run.held.values(name, epoch)) for run, epoch, other, then in pairs
    ]
    if len({len(row) for row in each}) != 1:
        return None
    return p_value(np.ma.masked_invalid(each).mean(0).filled(np.nan))


def drawn_apart(runs: Sequence[RunData]) -> list[str]:
    """A sentence for each key in which the runs' evaluations draw differently: that is part of every difference."""
    each = {run.name: evaluation_of(run.config) for run in runs}
    lines = []
    for key in ("sampler", "steps", "guidance_scale", "shift", "resolution", "text_length"):
        if listed := _where_apart({name: str(own.get(key)) for name, own in each.items() if own}):
            lines.append(f"Evaluations draw with another {key} ({listed}): part of a difference is the drawing's.")
    if listed := _where_apart({run.name: count(run.last.get("samples")) for run in runs}):
        lines.append(f"The numbers of images differ ({listed}): read the values beside them.")
    differ = [key for key in differing(run.measured[-1] for run in runs if run.measured) if key != SOLVER]
    return lines + [f"Evaluations have another {key}: part of a difference is the measuring's." for key in differ]


def _where_apart(values: Mapping[str, str]) -> str:
    """Each run's value by the run's name; nothing where all are alike."""
    return ", ".join(f"{name} {value}" for name, value in values.items()) if len(set(values.values())) > 1 else ""


def names_of(groups: Sequence[Group]) -> list[str]:
    """The values of any group: rewards first, then what is measured beside them."""
    names = dict.fromkeys(name for one in groups for name in one.names)
    return sorted(names, key=lambda name: BREADTH.index(name) + 1 if name in BREADTH else 0)


def best(groups: Sequence[Group], name: str) -> Group | None:
    """The group that is significantly better than all others (disjoint 95 % intervals); None where none is, or where
    the direction is not known."""
    values = [(one, one.value(name)) for one in groups]
    spans = [(one, value.span) for one, value in values if value is not None]
    if len(spans) < 2 or name in BREADTH[2:] or any(span is None for _, span in spans):
        return None
    sign = -1 if any(name in run.lower for one in groups for run in one.runs.values()) else 1
    ranges = [(min(sign * a, sign * b), max(sign * a, sign * b)) for _, span in spans if span for a, b in [span]]
    top = max(range(len(ranges)), key=lambda i: ranges[i][0])
    return spans[top][0] if all(ranges[top][0] > high for i, (_, high) in enumerate(ranges) if i != top) else None


def differences(groups: Sequence[Group]) -> dict[str, list[Difference | None]]:
    """{value: what each group but the first has more than the first}, the p-values of a value corrected by Holm."""
    result = {}
    for name in names_of(groups):
        each = [one.against(groups[0], name) for one in groups[1:]]
        corrected = holm([None if one is None else one.p for one in each])
        result[name] = [
            None if one is None else Difference(one.value, p) for one, p in zip(each, corrected, strict=True)
        ]
    return result
