"""Experiments side by side: what is left of them, seed by seed, each a process of its own (`seed`)."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from diffrl.sweep.jobs import Job, run_jobs
from experiments.league.experiments import Experiment
from experiments.league.judge import Task
from experiments.league.results import merge


def show(chosen: Sequence[Experiment]) -> None:
    """A line for each: how far it is, the minutes of one core that are left, and what it shows."""
    rows = [(experiment, *experiment.state()) for experiment in chosen]
    for experiment, state, left in rows:
        print(f"{experiment.name:<28} {state:<14} {left:6.0f} min  {experiment.shows}")
    print(f"{sum(left for *_, left in rows) / 60:.1f} hours of one core are left")


def run_all(
    chosen: Sequence[Experiment],
    jobs: int,
    runs: Path,
    command: Callable[[Experiment], str],
    after: Callable[[], object] = lambda: None,
) -> int:
    """Run what is left, `jobs` seeds at a time with one thread each; returns how many failed.

    Args:
        runs: the folder of all runs, absolute. It is made.
        command: what a result says it was made by.
        after: called after each seed that was added to its result.

    Raises:
        Interrupted: a signal; what had begun is saved, and the same call goes on.
    """
    runs.mkdir(parents=True, exist_ok=True)
    waiting = [(e, seed) for e in chosen for seed in sorted({*e.seeds} - e.kept().keys())]
    missing = {  # a result that was trained elsewhere is no LoRA to go on from
        one.folder(seed, runs): (one, seed) for e, seed in waiting for one in e.after.values()
    }
    there = {e.folder(seed, runs) for e, seed in waiting}
    waiting += [pair for f, pair in missing.items() if f not in there and not (f / "lora").is_dir()]
    drawn = {set_folder(word, words, runs): words for e, _ in waiting for word, words in e.sets.items()}
    draw = [_drawing(folder, words) for folder, words in drawn.items() if not (folder / "images.jsonl").is_file()]
    failed = len(run_jobs(draw, jobs, one_thread=True))
    for later in (False, True):  # what builds on others waits for all of them
        part = [job_of(e, seed, runs, command(e), after) for e, seed in waiting if bool(e.after) == later]
        failed += len(run_jobs(part, jobs, one_thread=True))
    return failed


def job_of(
    experiment: Experiment, seed: int, runs: Path, command: str, after: Callable[[], object] = lambda: None
) -> Job:
    """Train and judge a seed in a process of its own, and add it to the experiment's result."""
    # One folder for all: a base model that several of them share is judged once.
    tag = f"{experiment.name_of(seed)}-{seed}"
    task = task_of(experiment, seed, runs)
    places = places_of(experiment, seed, runs)
    task_file, part = runs / f"task-{tag}.json", runs / f"part-{tag}.json"
    task_file.write_text(json.dumps(asdict(task) | {"out": part}, default=str), encoding="utf-8")

    def done() -> None:
        merge(experiment, part, command, {place: word for word, place in places.items()})
        after()

    words = [sys.executable, "-m", "experiments.league.seed", str(task_file)]
    return Job(f"{experiment.name}, seed {seed}", words, runs / f"log-{tag}.txt", task.folder, done)


def task_of(experiment: Experiment, seed: int, runs: Path) -> Task:
    """What a seed's process is to do."""
    league = dict(experiment.league)
    strip = league.pop("strip", None)  # one seed's pictures are enough
    strip = strip if seed == min(experiment.seeds) else None
    overrides = experiment.placed(experiment.overrides, places_of(experiment, seed, runs))
    folder = experiment.folder(seed, runs)
    return Task(experiment.config, overrides, seed, folder, runs, strip=strip, track=league, **experiment.settings)


def places_of(experiment: Experiment, seed: int, runs: Path) -> dict[str, str]:
    """{RUN(NAME) or SET(NAME): its folder} of a seed."""
    places = {word: str(one.folder(seed, runs)) for word, one in experiment.after.items()}
    return places | {word: str(set_folder(word, words, runs)) for word, words in experiment.sets.items()}


def set_folder(word: str, words: Sequence[str], runs: Path) -> Path:
    """Where an image set is drawn, in the folder of all runs."""
    name = word.partition("(")[2].rstrip(")").replace("/", "-")
    return runs / f"set-{name}-{hashlib.sha256(' '.join(words).encode()).hexdigest()[:8]}"


def _drawing(folder: Path, words: Sequence[str]) -> Job:
    command = [sys.executable, "-m", "diffrl", "draw-set", *words, "--out", str(folder)]
    return Job(f"image set {folder.name}", command, folder.with_name(f"log-{folder.name}.txt"))
