"""`check`: the checks of an entry before it is trained, and of a result that is there."""

from __future__ import annotations

import tempfile
from pathlib import Path

from diffrl.errors import UserError, nearest
from diffrl.run.folder import RunFolder
from diffrl.run.run import Run
from experiments.league.checks import Verdict, alike, before_training, verdict
from experiments.league.experiments import Experiment, read_result
from experiments.league.judge import known_to_all, opened
from experiments.league.plan import League
from experiments.league.running import task_of


def of_entry(league: League, name: str, runs: Path) -> Verdict:
    """What its config says, and how gold and proxy rank the base's images. Raises UserError for no such entry."""
    one = experiment_of(league, name, Path("assets/results"))
    task = task_of(one, 0, runs)
    result = before_training(one.read, task.track, task.prompts)
    if one.after or one.sets:  # what it builds on is not there yet
        result.facts["left_out"] = "gold and proxy were not compared: the entry builds on runs or images to be made"
        return result
    runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(one.read, RunFolder(Path(folder)))
        try:
            alike(run, task, result)
        finally:
            run.close()
    return result


def of_result(league: League, file: Path, runs: Path) -> dict[str, Verdict]:
    """{"seed S": its verdict} of a result; fresh prompts are judged where the seed's run is in the folder `runs`.

    Raises:
        UserError: it is of no entry of the league, or of another config than the entry's.
    """
    result = read_result(file)
    one = experiment_of(league, f"{file.parent.name}/{file.stem}", file.parents[2])
    if different := one.differences(result):
        raise UserError(f"league check: {file} is of another {' and '.join(different)} than {one.name} is today")
    return {f"seed {run['seed']}": _of_seed(one, run, runs) for run in result["runs"]}


def _of_seed(one: Experiment, part: dict[str, object], runs: Path) -> Verdict:
    task = task_of(one, int(str(part["seed"])), runs)
    if not (task.folder / "lora").is_dir():
        result = before_training(one.read, task.track, task.prompts)
        result.facts["left_out"] = f"fresh prompts were not judged: the run is not at {task.folder}"
        return result
    run, direction = opened(task)
    try:
        result = verdict(run, task, known_to_all(run, direction, task))
    finally:
        run.close()
    return result


def experiment_of(league: League, name: str, out: Path) -> Experiment:
    """TRACK/NAME. Raises UserError, with the nearest, for what is none."""
    names = [f"{track}/{entry}" for entry, row in league.entries.items() for track in row.tracks]
    if name not in names:
        raise UserError(f'league check: no entry "{name}"{nearest(name, names)}')
    track, _, entry = name.partition("/")
    return next(one for one in league.experiments(out, [entry], [track]) if one.name == name)
