"""Carry results over a change of the code that changed no figure, where a short training proves it.

    python scripts/carry.py REV                              # all results that were of the code of REV, a commit
    python scripts/carry.py HEAD~3 --only nft gardo --epochs 5 --jobs 2

`reproduce.py` calls a result outdated as soon as code has changed that its runs imported: a new column of the metrics
does that, too. `--confirm` runs one seed again, which takes minutes for each result and needs the kind of CPU that made
it. Here the first epochs (`--epochs`) of one seed are trained with the code of REV and with today's, both here and now,
from each result's own config. If the LoRA, the judged scores and every logged figure but times are equal to the last
bit, the result is of today's code, and says from where and how far it was compared: what only later epochs do is not
covered by that. Else nothing is written, and what differs is named.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from experiments import RESULTS, ROOT, Experiment, experiments, figures_that_differ, kept, of_today
from reproduce import write
from safetensors.numpy import load_file

from diffrl.records.tracking import read_metrics

# Which seeds of which result are of the code of the checkout that this is run in.
STANDING = (
    "import sys, json; sys.path.insert(0, 'scripts'); from experiments import experiments, kept; "
    "print(json.dumps({e.name: sorted(kept(e)) for e in experiments()}))"
)


@dataclass(frozen=True)
class Trained:
    """What a short training left: its result, the digest of its LoRA, and its metrics without times."""

    result: dict[str, Any]
    lora: str
    metrics: list[dict[str, Any]]


def environment(tree: Path) -> dict[str, str]:
    """Of a process that imports the package from `tree`, with one thread."""
    return os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}


def standing(tree: Path) -> dict[str, list[int]]:
    """The seeds of today's results that are of the code of `tree`, by name."""
    shutil.copytree(RESULTS, tree / RESULTS.relative_to(ROOT), dirs_exist_ok=True)
    command = [sys.executable, "-c", STANDING]
    told = subprocess.run(command, cwd=tree, env=environment(tree), check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, list[int]] = json.loads(told.stdout)
    return found


def outdated(experiment: Experiment, before: Sequence[int]) -> bool:
    """Is no seed of the result of today's code, but was every one of the code whose seeds are `before`?"""
    if not experiment.out.is_file() or kept(experiment):
        return False
    return all(run["seed"] in before for run in json.loads(experiment.out.read_text())["runs"])


def trained(experiment: Experiment, tree: Path, folder: Path, epochs: int) -> Trained:
    """Train and judge the experiment's first seed with the code of `tree`.

    Raises:
        ValueError: it failed; the message says where its log is.
    """
    folder.mkdir(parents=True)
    shorter = [f"epochs={epochs}", f"evaluate.every={epochs}", "evaluate.prompts=8"]
    command = [sys.executable, "scripts/reproduce.py", experiment.config, *experiment.overrides, *shorter]
    command += ["--seeds", str(experiment.seeds[0]), "--prompts", "8", "--per-prompt", "4", "--threads", "1"]
    command += ["--runs", str(folder / "runs"), "--out", str(folder / "result.json")]
    with (folder / "log.txt").open("w") as log:
        if subprocess.run(command, cwd=tree, env=environment(tree), stdout=log, stderr=log).returncode:
            raise ValueError(f"{experiment.name}: failed, see {folder / 'log.txt'}")
    (run,) = [path.parent for path in (folder / "runs").glob("*/metrics.jsonl")]
    lora = hashlib.sha256()
    for path in sorted((run / "lora").rglob("*.safetensors")):  # by tensor: the header's order is not told
        for name, tensor in sorted(load_file(path).items()):
            lora.update(name.encode() + tensor.tobytes())
    result = json.loads((folder / "result.json").read_text())
    return Trained(result, lora.hexdigest(), [timeless(metrics) for metrics in read_metrics(run)])


def timeless(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics without what two equal runs differ in."""
    return {key: value for key, value in metrics.items() if key.partition("/")[0] != "seconds"}


def differences(before: Trained, now: Trained) -> list[str]:
    """What differs between two short trainings, by name; a figure that only today's code logs does not count."""
    names = figures_that_differ(before.result["runs"][0], now.result["runs"][0])
    if before.lora != now.lora:
        names.append("LoRA")
    if len(before.metrics) != len(now.metrics):
        names.append("epochs")
    for old, new in zip(before.metrics, now.metrics, strict=False):
        names += [key for key in old if old[key] != new.get(key) and key not in names]
    return names


def carried(experiment: Experiment, now: Trained, revision: str, epochs: int) -> dict[str, Any]:
    """The experiment's result as of today's code."""
    told = json.loads(experiment.out.read_text())
    runs = of_today(experiment, told["runs"], now.result["runs"][0]["code"])
    return told | {"runs": runs, "carried": {"from": revision, "epochs": epochs, "seed": experiment.seeds[0]}}


def carry(experiment: Experiment, tree: Path, folder: Path, revision: str, epochs: int) -> bool:
    """Compare both codes; write the result as of today's, or say what differs."""
    try:
        before = trained(experiment, tree, folder / experiment.name / "before", epochs)
        now = trained(experiment, ROOT, folder / experiment.name / "now", epochs)
        if names := differences(before, now):
            raise ValueError(f"{experiment.name}: not as before: {', '.join(names)}")
    except ValueError as error:
        print(error, flush=True)
        return False
    write(experiment.out, carried(experiment, now, revision, epochs))
    print(f"{experiment.name}: equal", flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", metavar="REV", help="the commit whose code the results are of")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="names' beginnings")
    parser.add_argument("--epochs", type=int, default=3, help="that are compared")
    parser.add_argument("--jobs", type=int, default=1, help="results at a time, one thread each")
    args = parser.parse_args()

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    revision = git("rev-parse", "--short", args.revision)
    folder = Path(tempfile.mkdtemp(prefix="carry-"))
    tree = folder / "tree"
    git("worktree", "add", "--detach", str(tree), revision)
    try:
        before = standing(tree)
        chosen = [
            e for e in experiments() if e.name.startswith(tuple(args.only)) and outdated(e, before.get(e.name, ()))
        ]
        with ThreadPool(args.jobs) as pool:
            good = pool.map(lambda e: carry(e, tree, folder, revision, args.epochs), chosen, chunksize=1)
    finally:
        git("worktree", "remove", "--force", str(tree))
    print(f"{sum(good)} of {len(good)} outdated results are of today's code, too; logs: {folder}")
    if not all(good):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
