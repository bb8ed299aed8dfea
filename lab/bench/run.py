"""`diffrl bench`: one benchmark on a model, and on the model with a LoRA from the same noise.

A folder has a folder for each of them (`base`, `lora`), with the images and the judges' answers, and what they add up
to: `bench.json`. What is there already is kept: a call that was killed goes on where it stopped.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from diffrl.divgen.run import Job, generate_images, image_file
from diffrl.divgen.scoring import read_job
from diffrl.drawing import Drawing
from diffrl.errors import UserError, foreign
from diffrl.launched import join_processes
from diffrl.prompts import Prompt
from diffrl.records.disk import write_json
from diffrl.rewards.building import Entry, build_rewards
from diffrl.rewards.protocol import RewardError, Unscored, ability, lower_is_better
from diffrl.rewards.registry import load_class
from diffrl.version import __version__

from .facts import BENCHES
from .items import Bench, Item
from .judging import FOLDER, Shot, answers_of, judge_all, read_answers
from .table import Key, Line, change, lines_of

FILE, JUDGES = "bench.json", "judges.json"
CHANGE = "change"  # the name of its column


@dataclass(frozen=True)
class Result:
    """A benchmark's table: lines of each model by its name ("base", "lora"), what was left out and why, the texts of
    the prompts."""

    name: str
    bench: Bench
    lines: Mapping[str, Mapping[Key, Line]]
    left_out: Sequence[str]
    about: Mapping[str, Any]
    texts: Sequence[str]

    def columns(self) -> dict[str, Mapping[Key, Line]]:
        """The lines of each model, and where there are both, the change of the LoRA against the base."""
        if len(self.lines) < 2:
            return dict(self.lines)
        first, second = self.lines.values()
        return {**self.lines, CHANGE: {key: change(first[key], one) for key, one in second.items() if key in first}}

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for column, lines in self.columns().items():
            for (section, line), one in lines.items():
                row = {"value": one.value, "standard_error": one.error}
                row |= {} if column == CHANGE else {"values": one.count, "prompts": one.prompts}
                found.setdefault(section, {}).setdefault(line, {})[column] = row
        return {**self.about, "left_out": list(self.left_out), "results": found}


def run_bench(name: str, data: Path, drawing: Drawing, judges: Mapping[str, Entry], out: Path) -> Result:
    """Draw, judge and add up; writes `out`/bench.json on the main process.

    Args:
        data: the folder of the official files.
        drawing: the model, and a LoRA if there is one; its prompts are the benchmark's.
        judges: the reward that stands for each judge; prompts that owe answers to others are left out.

    Raises:
        UserError: for the files, the judges, and a folder of another job.
    """
    started, bench, accelerator = time.perf_counter(), BENCHES[name], join_processes()
    judged, left_out = _judged(bench.read(data), judges)
    items = judged[: drawing.limit]
    if len(items) < len(judged):
        left_out.append(f"{len(judged) - len(items)} of {len(judged)} prompts (--limit {drawing.limit})")
    prompts = [Prompt(item.text) for item in items]
    loras = {"base": None} | ({"lora": drawing.lora} if drawing.lora is not None else {})
    drawings = {model: replace(drawing, lora=lora, limit=None) for model, lora in loras.items()}
    shots = {model: _shots(out / model, items, drawing.per_prompt) for model in drawings}
    if not all(shot.path.is_file() for rows in shots.values() for prompt in rows for shot in prompt):
        for judge, entry in judges.items():
            _look_at(judge, entry, items)
    used = {judge: {"reward": entry.plugin, **entry.arguments} for judge, entry in judges.items()}
    if accelerator.is_main_process:
        _same_judges(out, used)
    accelerator.wait_for_everyone()
    # The LoRA first: that it fits is better known before hours of work.
    drawn = {model: generate_images(Job(one), prompts, out / model) for model, one in reversed(drawings.items())}
    drawing_took = time.perf_counter() - started
    asked = _judge(judges, shots, out)
    lines, job = dict[str, Mapping[Key, Line]](), read_job(out / "base")
    for model, rows in shots.items():
        known = {judge: read_answers(out / model, judge) for judge in judges}
        marks = [list(bench.marks(prompt[0].item, answers_of(prompt, known))) for prompt in rows]
        lines[model] = lines_of(marks, bench.overall)
    about = {
        "diffrl_version": __version__,
        "benchmark": name,
        "title": bench.title,
        "citation": bench.citation,
        **asdict(drawing),
        **{key: job[key] for key in ("sampler", "steps", "guidance_scale")},  # what the drawing left to the model
        "prompts": len(items),
        "official": {"prompts": bench.prompts, "per_prompt": bench.images, "seed": bench.seed},
        "judges": used,
        "lower_is_better": sorted(lower_is_better({j: load_class(entry.plugin) for j, entry in judges.items()})),
        "images_drawn": drawn,
        "seconds": {"drawing": round(drawing_took, 1)} | {judge: round(took, 1) for judge, (_, took) in asked.items()},
    }
    done = {"drawing": (sum(drawn.values()), drawing_took), **asked}
    if len(items) < len(judged):
        about["whole"] = _whole(judged, judges, drawing.per_prompt * len(drawings), done)
    result = Result(name, bench, lines, left_out, about, [item.text for item in items])
    if accelerator.is_main_process:
        write_json(out / FILE, result.to_json(), ensure_ascii=False)
    accelerator.wait_for_everyone()
    return result


def _whole(
    items: Sequence[Item], judges: Mapping[str, Entry], images: int, done: Mapping[str, tuple[int, float]]
) -> dict[str, float]:
    """Minutes that all prompts take, of which `images` each are drawn, at the rate of what was done: {"drawing" or a
    judge: (images drawn or answers given, seconds with loading)}; without what this call found done already."""
    amounts = {judge: sum(item.owes(judge) for item in items) for judge in judges}
    amounts["drawing"] = len(items)
    return {name: round(amounts[name] * images * took / count / 60, 1) for name, (count, took) in done.items() if count}


def _judged(items: Sequence[Item], judges: Mapping[str, Entry]) -> tuple[list[Item], list[str]]:
    """The prompts whose judges are all there, each once, and in words which are not."""
    kept = [item for item in items if item.owed.keys() <= judges.keys()]
    lacking = Counter(tuple(judge for judge in item.owed if judge not in judges) for item in items)
    del lacking[()]
    left_out = [f"{count} prompts, without a judge {' and '.join(names)}" for names, count in lacking.items()]
    if not kept:
        raise UserError(f"--judge: no prompt can be judged: {'; '.join(left_out) or 'the files have none'}")
    text, count = Counter(item.text for item in kept).most_common(1)[0]
    if count > 1:
        raise UserError(f'--data: the prompt "{text}" comes twice; are these the official files?')
    return kept, left_out


def _same_judges(out: Path, judges: Mapping[str, Mapping[str, Any]]) -> None:
    """Answers of one judge are not continued by another."""
    path = out / JUDGES
    here = json.loads(json.dumps(judges, default=str))
    if path.is_file():
        with foreign(path):
            before: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
        for name in here:
            if before.get(name, here[name]) != here[name] and any(out.glob(f"*/{FOLDER}/{name}-*.jsonl")):
                text = f'answers of "{name}" as {before[name]}, not {here[name]}'
                raise UserError(f"--out: {out} has {text}; choose another folder, or delete its {FOLDER}/{name}-*")
        here = before | here
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, here)


def _shots(folder: Path, items: Sequence[Item], each: int) -> list[list[Shot]]:
    """The images of each prompt, as `generate_images` writes them."""
    return [
        [Shot(item, image_file(folder, i, Prompt(item.text), m)) for m in range(each)] for i, item in enumerate(items)
    ]


def _look_at(judge: str, entry: Entry, items: Sequence[Item]) -> None:
    """Build a judge before anything is drawn, and ask one of another machine about noise.

    UserError if it is not there.
    """
    try:
        reward = build_rewards({judge: entry}, join_processes().device)[judge]
        item = next((item for item in items if item.owes(judge)), None)
        if item is not None and ability(reward, "remote"):
            several = getattr(reward, "answers", None) if item.owes(judge) > 1 else None
            (several or reward)(torch.rand(1, 3, 64, 64), [item.text], [dict(item.metadata)])
    except Unscored:  # of noise
        pass
    except RewardError as error:
        raise UserError(f"--judge: {error}") from error


def _judge(
    judges: Mapping[str, Entry], shots: Mapping[str, Sequence[Sequence[Shot]]], out: Path
) -> dict[str, tuple[int, float]]:
    """One judge after another, so that only one's weights are there at a time: {judge: (answers given, seconds)}."""
    accelerator = join_processes()
    rank, world = accelerator.process_index, accelerator.num_processes
    done = {}
    for judge, entry in judges.items():
        started, left = time.perf_counter(), dict[str, list[Shot]]()
        for model, rows in shots.items():
            known = read_answers(out / model, judge)
            left[model] = [s for prompt in rows for s in prompt if s.item.owes(judge) and s.path.name not in known]
        accelerator.wait_for_everyone()  # all have read what is left before anyone adds to it
        if any(left.values()):
            reward = build_rewards({judge: entry}, accelerator.device)[judge]
            try:
                for model, some in left.items():
                    judge_all(judge, reward, some, out / model, rank, world)
            except RewardError as error:
                if world > 1:  # one process's alone
                    raise
                raise UserError(f"--judge: {error}") from error
        accelerator.wait_for_everyone()
        answers = sum(shot.item.owes(judge) for some in left.values() for shot in some)
        done[judge] = (answers, time.perf_counter() - started)
    return done
