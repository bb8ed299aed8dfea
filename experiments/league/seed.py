"""One seed of an experiment: trained or searched, then judged, then checked.

`python -m experiments.league.seed TASK.json` does it in a process of its own; see `running`.

The file has the keys of a `Task`, and `out`: where the seed's part of a result goes. Exit codes as of `diffrl`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffrl.config import load_config
from diffrl.errors import UserError, say
from diffrl.prompts import load_prompts
from diffrl.records.tracking import read_metrics
from diffrl.run.interrupt import EXIT_CODE, Interrupted
from diffrl.run.train import train
from experiments.league.checks import verdict
from experiments.league.judge import SHOWN, Task, judgement, known_to_all, opened, write_strips
from experiments.league.results import commit, result_of, write
from experiments.league.search import searched

LOGGED = re.compile("/stopped|/divergence/|/critic_error")  # of a method's own numbers, what goes into a result


def one_seed(task: Task) -> dict[str, Any]:
    """Train a seed, or go on with it, and judge it: its part of a result. Where images are searched for, nothing is
    trained.

    Raises:
        what `diffrl.run.train.train` raises.
    """
    if task.search:
        return searched(task)
    if [row["epoch"] for row in read_metrics(task.folder)][-1:] != [task.read.epochs]:
        train(task.read, resume=task.folder if task.folder.exists() else None)
    history = read_metrics(task.folder)
    run, direction = opened(task)
    try:
        judged = known_to_all(run, direction, task)
        if task.strip is not None:
            write_strips(run, task, load_prompts(run.config.prompts.test)[:SHOWN])
        part = {"seed": task.seed, "commit": commit(), **judgement(run, task, *judged), **of_training(history)}
        if task.track:
            part["check"] = verdict(run, task, judged).as_json()
    finally:
        run.close()
    return part


def of_training(history: list[dict[str, Any]]) -> dict[str, Any]:
    """What the training cost, what its method logged, and the evaluations on the way."""
    seconds = sum(row.get("seconds", 0.0) for row in history)
    overhead = sum(row.get("seconds/overhead", 0.0) for row in history)
    return {
        "images": history[-1]["samples"],
        "forwards": sum(row.get("rollout/forwards", 0) for row in history),  # of the network in rollouts, by images
        "optimiser_steps": history[-1]["step"],
        "training_seconds": round(seconds, 1),
        "evaluation_seconds": round(sum(row.get("seconds/evaluate", 0.0) for row in history), 1),
        "overhead_share": round(overhead / seconds, 4) if seconds else None,
        "logged": {name: over_epochs(history, name) for name in history[-1] if LOGGED.search(name)},
        "curve": [
            {
                "samples": row["samples"],
                **{k: round(v, 5) for k, v in row.items() if k.startswith("eval/") and v is not None},
            }
            for row in history
            if "eval/diversity" in row
        ],
    }


def over_epochs(history: list[dict[str, Any]], name: str) -> float | None:
    """The mean of what a method logs; None: in no epoch."""
    values = [row[name] for row in history if row.get(name) is not None]
    return float(np.mean(values)) if values else None


def main(file: Path) -> int:
    values = json.loads(file.read_text(encoding="utf-8"))
    out, strip = Path(values.pop("out")), values.pop("strip")
    for key in ("folder", "runs"):
        values[key] = Path(values[key])
    task = Task(**values, strip=None if strip is None else Path(strip))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        part = one_seed(task)
    except Interrupted as ended:
        say(f"diffrl: {ended}: saved")
        return EXIT_CODE
    except UserError as error:
        say(f"diffrl: error: {error}")
        return 2
    settings = {"prompts": task.prompts, "per_prompt": task.per_prompt}
    config = load_config(task.config, task.overrides).resolved()
    write(out, result_of([part], "", config, settings))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
