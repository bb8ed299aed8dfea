"""The judgement of a seed: once, beside the base model, on prompts and noise kept for that.

Base and trained LoRA are judged on the same prompts with the same noise, so the tests are paired: per prompt, the mean
over its images. The base model is judged once for all experiments of the folder `runs`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffrl.config import Config, load_config
from diffrl.evaluation import Evaluated, Evaluator, summarise
from diffrl.methods.d2align.corrected import Direction
from diffrl.methods.d2align.stage1 import prepare_direction
from diffrl.methods.students import students_of
from diffrl.policy import Policy
from diffrl.prompts import Prompt, load_prompts
from diffrl.records.disk import replacing
from diffrl.rollout import SamplerSpec, generate, initial_noise
from diffrl.run.evaluation import evaluation_spec
from diffrl.run.folder import RunFolder
from diffrl.run.run import Run
from diffrl.samplers import schedule
from diffrl.stats import differences, known, p_value, standard_error
from diffrl.version import __version__

NOISE = 10_000  # seed of the judgement's noise, which no evaluation during training has seen
SHOWN = 4  # prompts of a strip
DRIFT_PROMPTS = 64  # on which the drift is measured


@dataclass(frozen=True)
class Task:
    """What is to be trained and judged. `folder`: of the run; `runs`: of all of them, where bases are kept.

    prompts, per_prompt: of the judgement. search: so many images of the base for each judged one, in the place of a
    training (`experiments.league.search`); 0: train. strip: where pictures of the first prompts go. track: its facts,
    for the checks of the league (`experiments.league.checks`); none: no checks.
    """

    config: str
    overrides: list[str]
    seed: int
    folder: Path
    runs: Path
    prompts: int = 256
    per_prompt: int = 4
    search: int = 0
    strip: Path | None = None
    track: Mapping[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def read(self) -> Config:
        """The seed's config. Raises UserError where it is none."""
        return load_config(self.config, [*self.overrides, f"seed={self.seed}", f"run_dir={self.folder}"])


@dataclass(frozen=True)
class Judged:
    """means: of each value, with diversity and figures, and the students' as `STUDENT/NAME`; by_prompt: (P,) of each
    value that is an image's."""

    means: dict[str, float | None]
    by_prompt: dict[str, Tensor]


def judge(
    run: Run,
    snapshot: str | None,
    prompts: list[Prompt],
    per_prompt: int,
    seed: int = NOISE,
    drawn: Iterable[tuple[Tensor, Tensor]] | None = None,
) -> Judged:
    """Score a snapshot of a run, None being the base model, on `per_prompt` images of each prompt, or these that are
    `drawn` already (see `Evaluator.score`)."""

    def on(policy: Policy, spec: SamplerSpec, snapshot: str | None) -> Evaluated:
        evaluator = Evaluator(policy, run.judges, run.features, spec, per_prompt, run.config.rollout.batch_size)
        return evaluator.score(prompts, snapshot, seed, drawn=drawn)

    def columns(one: Evaluated, prefix: str = "") -> tuple[dict[str, float | None], dict[str, Tensor]]:
        values = summarise(run.judges.names, one.scores) | one.breadth()
        table = one.scores.view(len(prompts), per_prompt, -1).nanmean(dim=1).unbind(1)
        by_prompt = dict(zip(run.judges.names, table, strict=True))
        return {f"{prefix}{k}": v for k, v in values.items()}, {f"{prefix}{k}": v for k, v in by_prompt.items()}

    means, by_prompt = columns(on(run.policy, evaluation_spec(run.config), snapshot))
    for student in students_of(run.hooks):
        with student.with_lora(run.policy.state(snapshot or "default")) as policy:
            more = columns(on(policy, student.spec, None if snapshot is None else "default"), f"{student.name}/")
        means, by_prompt = means | more[0], by_prompt | more[1]
    return Judged(means, by_prompt)


def judge_base(run: Run, direction: Direction | None, task: Task) -> Judged:
    """`judge` of the base model, kept in the runs' folder under everything that it depends on."""
    config = run.config.resolved()
    depends = [config[k] for k in ("model", "rewards", "watch", "prompts", "evaluate")]
    depends += [config["engine"]["base"], [student.name for student in students_of(run.hooks)]]
    depends += [evaluation_spec(run.config).model_dump(), task.prompts, task.per_prompt, __version__]
    if direction is not None:  # each seed has a corrected reward of its own
        depends += [asdict(direction.identity), direction.vector.tolist()]
    if run.scorer.observing:  # and each seed's has learned something else
        depends += [run.config.seed]
    name = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:16]

    def made() -> dict[str, Any]:
        result = judge(run, None, load_prompts(run.config.prompts.test)[: task.prompts], task.per_prompt)
        return {
            "means": result.means,
            "by_prompt": {name: values.tolist() for name, values in result.by_prompt.items()},
        }

    kept = shared(task.runs / f"judged-{name}.json", made)
    return Judged(kept["means"], {key: torch.tensor(values) for key, values in kept["by_prompt"].items()})


def shared(file: Path, make: Callable[[], Any]) -> Any:
    """What is kept in a JSON file of the runs' folder for all that need the same; made where it is not there."""
    if not file.is_file():
        text = json.dumps(make())
        temporary = file.with_suffix(f".{os.getpid()}.tmp")  # its own: two seeds may make it at once
        temporary.write_text(text)
        temporary.replace(file)
    return json.loads(file.read_text())


def opened(task: Task) -> tuple[Run, Direction | None]:
    """A trained run as its newest checkpoint left it, to be judged, and what D2-Align's stage 1 learned in it."""
    run = Run(task.read, RunFolder(task.folder))
    direction = prepare_direction(task.read, task.folder, run.policy, run.scorer.rewards, run.spec, run.accelerator)
    run.restore()
    return run, direction


def known_to_all(run: Run, direction: Direction | None, task: Task) -> tuple[Judged, Judged]:
    """Base and trained model on the test prompts with the judgement's noise."""
    prompts = load_prompts(run.config.prompts.test)[: task.prompts]
    return judge_base(run, direction, task), judge(run, run.judged, prompts, task.per_prompt)


def judgement(run: Run, task: Task, base: Judged, tuned: Judged) -> dict[str, Any]:
    """Before and after, each value's paired test and the standard error of its gain over prompts, and the drift."""
    tests, errors, spreads = {}, {}, {}
    for name, before in base.by_prompt.items():
        pairs, each = differences(before, tuned.by_prompt[name]), known(before)
        p = p_value(pairs)
        tests[name] = 1.0 if p is None else p
        errors[name] = standard_error(pairs)
        spreads[name] = float(each.std(ddof=1)) if len(each) > 1 else None
    return {
        "before": base.means,
        "after": tuned.means,
        "p_value_paired_over_prompts": tests,
        "se_over_prompts": errors,
        "base_std_over_prompts": spreads,
        "drift": drift(run, load_prompts(run.config.prompts.test)[: min(task.prompts, DRIFT_PROMPTS)]),
    }


@torch.no_grad()
def drift(run: Run, prompts: list[Prompt]) -> float:
    """Mean squared difference of the trained velocity from the base's, over all numbers of a latent.

    It is taken at every level of the evaluation's schedule on the base's own Euler path, one image for each prompt, so
    it is the same measure for every method, whatever its own KL is of.
    """
    policy, spec = run.policy, evaluation_spec(run.config)
    texts, levels = [prompt.text for prompt in prompts], schedule(policy, spec)
    cond = policy.encode(texts)
    x = initial_noise(policy.latent_shape, texts, [0] * len(texts), seed=NOISE).to(policy.device)
    total = 0.0
    for level, following in zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True):
        t = torch.full((len(x),), level, device=x.device)
        with policy.adapter(run.judged):
            trained = policy.predict(x, t, cond, spec.guidance_scale).v
        with policy.adapter(None):
            base = policy.predict(x, t, cond, spec.guidance_scale)
        total += float((trained - base.v).square().mean()) / (len(levels) - 1)
        x = policy.process.add_noise(base.x0, base.eps, torch.full_like(t, following))
    return total


def write_strips(run: Run, task: Task, prompts: list[Prompt]) -> None:
    """One picture of each prompt beside each other, as WebP: of the trained model, and of the base from the same noise
    (TRACK-base.webp beside it); by the student, if the track's gold is a student's. 2 to 6 kB at 64 pixels a side."""
    assert task.strip is not None
    name = str(task.track["gold"][0]).rpartition("/")[0]
    student = next((one for one in students_of(run.hooks) if one.name == name), None)
    for snapshot, file in ((run.judged, task.strip), (None, base_strip(task.strip))):
        if student is None:
            _write_strip(run.policy, prompts, evaluation_spec(run.config), snapshot, file)
            continue
        with student.with_lora(run.policy.state(run.judged)) as policy:
            _write_strip(policy, prompts, student.spec, snapshot and "default", file)


def base_strip(strip: Path) -> Path:
    """Where the base's pictures of a track are, beside an entry's TRACK-ENTRY.webp."""
    return strip.with_name(f"{strip.name.partition('-')[0]}-base.webp")


def _write_strip(policy: Policy, prompts: list[Prompt], spec: SamplerSpec, snapshot: str | None, file: Path) -> None:
    amount: Any = {"seed": NOISE, "per_prompt": 1, "batch_size": len(prompts)}
    save_strip(torch.cat([part for _, part in generate(policy, prompts, spec, **amount, snapshot=snapshot)]), file)


def save_strip(images: Tensor, file: Path) -> None:
    """Images (B, 3, H, W) in [0, 1] beside each other, as WebP."""
    from PIL import Image

    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = (torch.cat(list(images), dim=2).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    with replacing(file) as temporary:
        Image.fromarray(pixels).save(temporary, format="webp", quality=90, method=6)
