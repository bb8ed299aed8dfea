"""What an image of an entry costs: network forwards and seconds, two epochs of it alone on one thread.

forwards  rows of images through the network, in rollouts and in training; with gradient they count three (the backward
          costs about two). `diffrl.run.clock` counts them.
setup     what is spent before the first epoch: D2-Align's first stage, DenseGRPO's calibration
image     an epoch's, over its images, and what drawing an offline entry's took; the first epoch only warms up. Of a
          search: a candidate's, drawn and scored
mib       the process's largest resident memory so far; so each entry is measured in a process of its own

Evaluations are the judgement's, not the method's, and are left out.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from diffrl.config import Config, load_config
from diffrl.errors import UserError, say
from diffrl.prompts import load_prompts
from diffrl.run.folder import RunFolder
from diffrl.run.run import Run
from diffrl.sweep.jobs import Job, run_jobs
from diffrl.version import __version__
from experiments.league.experiments import Experiment, replaced
from experiments.league.plan import FOLDER
from experiments.league.results import commit, write
from experiments.league.search import candidates
from experiments.league.summary import COSTS, read_costs

EPOCHS, PROMPTS = 2, 48  # of an image set that is drawn to be measured: an epoch's 24 prompts, twice


def measure_all(chosen: Sequence[Experiment], out: Path, command: str) -> int:
    """Measure what has no cost in OUT/league/cost.json yet, one after another; returns how many failed.

    Seconds compare where one machine measured them: to compare on another, remove the file first.

    Raises:
        Interrupted: a signal; what was measured is kept.
    """
    file, there = out / FOLDER / COSTS, read_costs(out)
    facts = {"command": command, "diffrl_version": __version__, "commit": commit(), "torch": torch.__version__}
    facts["machine"] = f"{platform.machine()}, {os.cpu_count()} CPU cores, 1 thread"

    def keep(one: Experiment, row: dict[str, Any]) -> None:
        write(file, facts | {"entries": read_costs(out) | {one.name: row}})

    with tempfile.TemporaryDirectory() as folder:
        jobs = [_job(one, Path(folder), keep) for one in chosen if one.name not in there]
        return len(run_jobs(jobs, 1, one_thread=True))


def _job(one: Experiment, folder: Path, then: Callable[[Experiment, dict[str, Any]], None]) -> Job:
    """Measure one in a process of its own; `then` gets what `measure` gives of it."""
    name = one.name.replace("/", "-")
    task, part = folder / f"{name}.json", folder / f"{name}-cost.json"
    after = {word: [e.config, e.placed(e.overrides, {})] for word, e in one.after.items()}
    sets = {word: list(words) for word, words in one.sets.items()}
    overrides = one.placed(one.overrides, {})
    values = {
        "search": "search" in one.settings,
        "config": one.config,
        "overrides": overrides,
        "home": str(folder / name),
        "after": after,
        "sets": sets,
    }
    task.write_text(json.dumps(values | {"out": str(part)}), encoding="utf-8")

    def done() -> None:
        then(one, json.loads(part.read_text(encoding="utf-8")))

    words = [sys.executable, "-m", "experiments.league.cost", str(task)]
    return Job(one.name, words, folder / f"{name}.log", None, done)


def measure(config: Config, drawn: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The cost of a config: {setup, image: {forwards, seconds}, mib}. `drawn`: of an image of its image set."""
    run = Run(config.model_copy(update={"epochs": EPOCHS}))  # of an image set no more is encoded
    try:
        mark, clock = time.perf_counter(), run.loop.clock
        clock.forwards = 0
        run.prepare()
        run.begin()
        run.begin_epoch()
        setup = {"forwards": clock.forwards, "seconds": time.perf_counter() - mark}
        run.loop.run_epoch(0)
        clock.forwards, mark = 0, time.perf_counter()
        run.loop.run_epoch(1)
        images = config.rollout.images
        image = {"forwards": clock.forwards / images, "seconds": (time.perf_counter() - mark) / images}
    finally:
        run.close()
    image = {key: spent + (drawn or {}).get(key, 0.0) for key, spent in image.items()}
    return {"setup": setup, "image": image, "mib": _peak()}


def measure_search(config: Config) -> dict[str, Any]:
    """`measure` of a search: candidates of a rollout's images, twice."""
    run = Run(config.model_copy(update={"epochs": EPOCHS}))  # of an image set no more is encoded
    try:
        prompts, clock = load_prompts(config.prompts.test)[: config.rollout.groups], run.loop.clock
        for number in range(2):
            clock.forwards, mark = 0, time.perf_counter()
            images, _ = candidates(run, prompts, config.rollout.group_size, number, 0)
        spent = {"forwards": clock.forwards / len(images), "seconds": (time.perf_counter() - mark) / len(images)}
    finally:
        run.close()
    return {"setup": {"forwards": 0, "seconds": 0.0}, "image": spent, "mib": _peak()}


def _peak() -> int:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10))


def main(file: Path) -> int:
    """`python -m experiments.league.cost TASK.json`: one entry."""
    task = json.loads(file.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    home, places, drawn = Path(task["home"]), dict[str, str](), None
    try:
        for i, (word, (config, overrides)) in enumerate(task["after"].items()):
            places[word] = str(home / f"teacher-{i}")  # untrained: it costs what a trained one costs
            teacher = Run(load_config(config, [*overrides, f"run_dir={places[word]}"]))
            RunFolder(Path(places[word])).save_lora(teacher.policy, teacher.judged)
        for word, words in task["sets"].items():
            places[word] = str(home / "set")
            drawn = _drawing(words, Path(places[word]))
        overrides = [replaced(text, places) for text in task["overrides"]]
        few = [f"epochs={EPOCHS}", f"evaluate.every={EPOCHS}", f"run_dir={home / 'run'}"]
        config = load_config(task["config"], [*overrides, *few])
        cost = measure_search(config) if task["search"] else measure(config, drawn)
        Path(task["out"]).write_text(json.dumps(cost))
    except UserError as error:
        say(f"diffrl: error: {error}")
        return 2
    return 0


def _drawing(words: list[str], folder: Path) -> dict[str, float]:
    """Draw a set of `PROMPTS` prompts; what each image cost, without the start of the process."""
    seconds, counts = [], (PROMPTS // 6, PROMPTS)
    for count, place in zip(counts, (folder.with_name("few"), folder), strict=True):
        options = [
            str(count) if before == "--limit" else word for before, word in zip(["", *words], words, strict=False)
        ]
        mark = time.perf_counter()
        command = [sys.executable, "-m", "diffrl", "draw-set", *options, "--out", str(place)]
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - mark)
    value = {before: int(word) for before, word in itertools.pairwise(words) if before in ("--per-prompt", "--steps")}
    images = (counts[1] - counts[0]) * value["--per-prompt"]
    return {"forwards": float(value["--steps"]), "seconds": (seconds[1] - seconds[0]) / images}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
