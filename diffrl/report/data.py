"""A run's folder, read for its report: metrics, config, sample images, and the warnings that follow from them."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from diffrl.additions.verdict import Change, Guard, breadth, change
from diffrl.errors import UserError, foreign, in_one_line
from diffrl.records.held_out import HeldOut, read_held_out
from diffrl.records.progress import BETWEEN, PARTS, finite, wall
from diffrl.records.tracking import read_metrics

log = logging.getLogger("diffrl")
BREADTH = ("diversity", "variety", "unreadable")  # how much the images of one prompt differ
UNITS = {"diversity": "mean pairwise distance", "variety": "1: as the world", "unreadable": "share of free facts"}
PALETTE = 8  # the style sheet's series colours --c0 ... --c7; the last one is kept for diversity
MUST_BE_FINITE = ("loss", "kl", "grad_norm")


@dataclass(frozen=True)
class Sample:
    """One sample image: `(index, prompt, seed)` is the same over the epochs."""

    epoch: int
    index: int
    prompt: str
    seed: str
    path: Path
    scores: Mapping[str, float] = field(default_factory=dict)


@dataclass
class RunData:
    """One run. `used` collects the metrics that a section has drawn, so that the last section can draw the others."""

    folder: Path
    name: str
    metrics: list[dict[str, Any]]
    config: dict[str, Any] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)  # of environment.json: command, versions, machine
    samples: list[Sample] = field(default_factory=list)
    lower: frozenset[str] = frozenset()  # values of which lower is better, by their reward's card
    held: HeldOut = field(default_factory=HeldOut)  # what each held-out prompt scored
    used: set[str] = field(default_factory=set)

    @property
    def last(self) -> dict[str, Any]:
        return self.metrics[-1]

    @property
    def trained(self) -> list[str]:
        """Names of the optimised rewards."""
        named = self.config.get("rewards") or {}
        return list(named) or [key[7:] for key in self.logged("reward/") if not key.endswith("/std")]

    @property
    def watched(self) -> list[str]:
        """Names that are evaluated but not optimised, diversity, variety and what was unreadable last."""
        names = [key[5:] for key in self.logged("eval/") if key[5:] not in self.trained and not key.endswith("/std")]
        return sorted(names, key=lambda name: BREADTH.index(name) + 1 if name in BREADTH else 0)

    @property
    def measured(self) -> list[Mapping[str, Any]]:
        """Of each start that recorded them, digests of what evaluations draw and of their judges."""
        return [facts for start in self.starts if isinstance(facts := start.get("evaluations"), dict)]

    @property
    def students(self) -> list[str]:
        """Names of the models beside the trained one that wear its LoRA in evaluations; their values are `NAME/...`."""
        return list((self.config.get("evaluate") or {}).get("also") or {})

    @property
    def base(self) -> str:
        """What the frozen weights were kept as."""
        return str((self.config.get("engine") or {}).get("base", "full"))

    def logged(self, prefix: str = "") -> list[str]:
        """The metrics that begin with `prefix`, in the order in which they first appear."""
        return list(dict.fromkeys(key for row in self.metrics for key in row if key.startswith(prefix)))

    def series(self, key: str, x: str = "samples") -> tuple[list[float], list[float]]:
        """The epochs in which `key` and `x` are finite, as two lists; x may be "samples", "epoch" or "elapsed"."""
        self.used.add(key)
        elapsed, xs, ys = 0.0, [], []
        for row in self.metrics:
            elapsed += row["seconds"] if finite(row.get("seconds")) else 0.0
            at = elapsed if x == "elapsed" else row.get(x)
            if finite(at) and finite(row.get(key)):
                xs.append(float(at))  # type: ignore[arg-type]
                ys.append(float(row[key]))
        return xs, ys

    def ends(self, key: str) -> tuple[float, float] | None:
        """First and last finite value; None with fewer than two."""
        ys = self.series(key)[1]
        return (ys[0], ys[-1]) if len(ys) > 1 else None

    def error(self, name: str) -> float | None:
        """The standard error over prompts of a held-out value at the last evaluation, None where it is not known."""
        epochs = self.series(f"eval/{name}", "epoch")[0]
        return self.held.error(name, int(epochs[-1])) if epochs else None

    def change(self, name: str) -> Change | None:
        """Of a held-out value from the first evaluation to the last; None with fewer than two."""
        rows = [row for row in self.metrics if finite(row.get(f"eval/{name}"))]
        return change(name, rows[0], rows[-1], self.held, self.lower) if len(rows) > 1 else None

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The lines of the metrics that have held-out values, oldest first."""
        return [row for row in self.metrics if any(k.startswith("eval/") for k in row)]

    def limit(self, name: str) -> tuple[float, str] | None:
        """Below which value the guard rails call it a collapse, and in words; None for what they do not judge by."""
        past, share = self.evaluations, self.guard.diversity
        first = past[0].get(f"eval/{name}") if past and name == breadth(past) else None
        if share is None or not isinstance(first, int | float) or not finite(first):
            return None
        return share * first, f"{share:.0%} of the first value"

    @property
    def guard(self) -> Guard:
        """The run's own, with all that is not trained watched where the config does not say."""
        measured = [*BREADTH, "saturation"]
        watched = [name for name in self.watched if name.rpartition("/")[2] not in measured]
        named = {"rewards": dict.fromkeys(self.trained), "watch": dict.fromkeys(watched)}
        return Guard.of(named | self.config, self.lower)

    def color(self, name: str) -> str:
        """The style sheet's colour of a metric: the same in every chart."""
        names = [*self.trained, *self.watched]
        student, _, metric = name.rpartition("/")
        if student in self.students:  # drawn beside the trained model's: in another colour
            away = 2 * (1 + self.students.index(student))
            return f"c{(names.index(metric) + away if metric in names else away) % (PALETTE - 1)}"
        if name == "diversity" or name not in names:
            return f"c{PALETTE - 1}"
        return f"c{names.index(name) % (PALETTE - 1)}"

    def elapsed(self) -> float:
        """Seconds of training and evaluation so far."""
        return sum(map(wall, self.metrics))

    def shares(self) -> dict[str, float]:
        """Seconds of the whole run by part, and those of none ("other")."""
        parts = {part: sum(self.series(f"seconds/{part}")[1]) for part in (*PARTS, *BETWEEN)}
        return parts | {"other": max(self.elapsed() - sum(parts.values()), 0.0)}


def read_run(folder: str | Path) -> RunData:
    """Read a run's folder.

    Raises:
        UserError: it is no run's folder, or its metrics, config or environment file cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such run folder")
    metrics = read_metrics(folder)
    if not metrics:
        raise UserError(f"{folder} is not a run's folder: it has no epoch in metrics.jsonl")
    config = _read(folder / "config.yaml", yaml.safe_load, dict)
    # A hand may have been at it: what is no section is none.
    for name in ("rewards", "watch", "evaluate", "prompts", "engine"):
        if not isinstance(config.get(name, {}), dict):
            del config[name]
    starts = [start for start in _read(folder / "environment.json", json.loads, list) if isinstance(start, dict)]
    recorded = starts[-1].get("lower_is_better") if starts else None  # by the run itself, which had the rewards at hand
    if recorded is None:
        from diffrl.report.cards import lower_by_config

        with foreign(folder / "config.yaml"):
            recorded = lower_by_config(config)
    return RunData(
        folder=folder,
        name=folder.resolve().name,
        metrics=metrics,
        config=config,
        starts=starts,
        samples=list(_samples(folder / "samples")),
        lower=frozenset(recorded),
        held=read_held_out(folder),
    )


def warnings_of(run: RunData) -> list[str]:
    """What a reader must know before trusting the run, one sentence each."""
    return [*_overlap(run), *_measured_anew(run), *_judged(run), *_not_finite(run), *_unscored(run)]


def _unscored(run: RunData) -> Iterable[str]:
    """Rewards that had no score for some images, which then taught nothing by that reward."""
    totals: Counter[str] = Counter()
    for row in run.metrics:
        totals.update({key: count for key, count in row.items() if key.startswith("unscored/")})
    for key, count in totals.items():
        yield f"{key.removeprefix('unscored/')} had no score for {count} images: they are not judged by it."


def overlaps(run: RunData) -> bool:
    """Did the config allow test prompts that are trained on?"""
    prompts = run.config.get("prompts", {})
    return isinstance(prompts, dict) and bool(prompts.get("overlap"))


def _overlap(run: RunData) -> Iterable[str]:
    """What is called held out below is not."""
    if overlaps(run):
        yield "prompts.overlap is on: test prompts may be training prompts, so no value here is of held-out prompts."


def differing(facts: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is not the same in all of these, as far as it is known."""
    known = list(facts)
    keys = dict.fromkeys(key for one in known for key in one)
    return [key for key in keys if len({str(one[key]) for one in known if key in one}) > 1]


def _measured_anew(run: RunData) -> Iterable[str]:
    """First and last value are of other images, or of another judge."""
    for key in differing(run.measured):
        yield f"A resume changed {key}: changes of held-out values since before it are not training's alone."


def _judged(run: RunData) -> Iterable[str]:
    """What the guard rails find in the last evaluation, also what is no alarm yet."""
    for finding in run.guard.judge(run.evaluations, run.held):
        sign = "Possible reward hacking" if finding.kind == "parted" else "Guard rail"
        yield f"{sign}: {finding.text}.{' Look at the samples.' if finding.kind == 'parted' else ''}"


def _not_finite(run: RunData) -> Iterable[str]:
    for key in run.logged():
        if key in MUST_BE_FINITE or (key.startswith(("reward/", "eval/")) and not key.endswith("/std")):
            epochs = [row["epoch"] for row in run.metrics if key in row and row[key] is None]
            if epochs:
                shown = ", ".join(map(str, epochs[:5])) + (f" and {len(epochs) - 5} more" if len(epochs) > 5 else "")
                why = "was not finite" if key in MUST_BE_FINITE else "applied to no image, or was not finite,"
                yield f"{key} {why} in epoch{'s' if len(epochs) > 1 else ''} {shown}."


def _samples(folder: Path) -> Iterable[Sample]:
    for path in sorted(folder.glob("epoch-*/*.png")):
        digits, number = path.parent.name.removeprefix("epoch-"), path.name.split("-", 1)[0]
        if not (digits.isdecimal() and number.isdecimal() and within(path, folder.parent)):
            continue
        try:
            with Image.open(path) as image:
                text = dict(image.info)
        except Exception as error:  # torn by a crash; what it raises depends on where
            log.warning("%s: not a readable picture (%s); it is left out", path, in_one_line(error, most=120))
            continue
        prompt = str(text.get("prompt", path.stem))
        yield Sample(int(digits), int(number), prompt, str(text.get("seed", "")), path, _scores(text.get("scores")))


def _scores(text: object) -> dict[str, float]:
    """A picture's scores by their names; none where another program wrote something else."""
    try:
        found = json.loads(str(text))
    except (ValueError, RecursionError):
        return {}
    return {str(key): float(v) for key, v in found.items() if isinstance(v, float)} if isinstance(found, dict) else {}


def within(path: Path, folder: Path) -> bool:
    """Does the file lie in the folder, wherever its links lead?"""
    return path.resolve().is_relative_to(folder.resolve())


def parsed(path: Path, parse: Callable[[str], Any]) -> Any:
    """A file's content; UserError where it cannot be parsed."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from error


def _read(path: Path, parse: Callable[[str], Any], kind: type) -> Any:
    """A file's content, empty when there is no file."""
    try:
        value = parsed(path, parse)
    except FileNotFoundError:
        return kind()
    if value is None:
        raise UserError(f"{path}: the file is empty")
    if not isinstance(value, kind):
        raise UserError(f"{path}: expected a {kind.__name__}, found a {type(value).__name__}")
    return value
