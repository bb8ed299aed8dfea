"""What is written of an experiment: `result_of` its seeds, one after another, as JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffrl.records.disk import write_text
from diffrl.version import __version__
from experiments.league.experiments import HERE, Experiment, plain, read_result, replaced

ROOT = Path(__file__).resolve().parents[2]  # of a checkout
CODE = ("diffrl", "lab", "playground", "rewards", "configs", "experiments", "pyproject.toml")


def commit() -> str:
    """The checkout's commit, with "+" where code or configs differ from it, and not for results that were added;
    `diffrl VERSION` where the package is installed."""
    if (ROOT / "pyproject.toml").is_file():
        try:
            done = _git("describe", "--always")
            if done.returncode == 0:
                return done.stdout.strip() + "+" * (_git("diff", "--quiet", "HEAD", "--", *CODE).returncode != 0)
        except OSError:  # no git
            pass
    return f"diffrl {__version__}"


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def result_of(
    runs: Sequence[Mapping[str, Any]], command: str, config: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What is written: the runs, and over them the mean before and after, the gain and its deviation."""
    table = {}
    for name in [n for n in runs[0]["after"] if runs[0]["after"][n] is not None]:
        before, after = (np.array([run[side][name] for run in runs]) for side in ("before", "after"))
        gain = after - before
        spread = float(gain.std(ddof=1)) if len(runs) > 1 else None
        row: dict[str, float | None] = {
            "before": float(before.mean()),
            "after": float(after.mean()),
            "gain": float(gain.mean()),
        }
        table[name] = row | {"gain_std": spread}
    return {
        "command": command,
        "diffrl_version": __version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        **settings,  # prompts, per_prompt: of the judgement
        "config": plain(config),
        "summary": table,
        "runs": list(runs),
    }


def write(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(result, indent=1) + "\n")


def merge(experiment: Experiment, part: Path, command: str, names: Mapping[str, str]) -> None:
    """Add the seed of `part` to the experiment's result; `names`: {folder in its config: the word that is kept}."""
    here = {str(experiment.here): HERE} if experiment.here else {}
    result = json.loads(replaced(part.read_text(), {**names, **here}))
    there = read_result(experiment.out) if experiment.kept() else {"runs": []}  # seeds that nobody asks for now, too
    found = {run["seed"]: run for run in [*there["runs"], *result["runs"]]}
    ordered = [found[seed] for seed in sorted(found)]
    write(experiment.out, result_of(ordered, command, result["config"], experiment.settings))
