"""Students of the trained model (`evaluate.also`): the LoRA is loaded into each of them, and judged there, too.

A LoRA that is trained on a base model is often used on its distilled form, in a few steps, or, where it was trained
over weights in fewer bits, on the full one. Whether it helps there is seen only there. Students draw with the
evaluation's own seeds, keep no state, and leave the training as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from diffrl.config import Config
from diffrl.errors import UserError
from diffrl.lora_files import as_list
from diffrl.policy import Policy, load_policy
from diffrl.rollout import SamplerSpec
from diffrl.run.build import Build
from diffrl.run.device import prepare_engine
from diffrl.run.evaluation import Evaluation, evaluation_spec
from diffrl.run.hooks import Measured, RunHook


@dataclass(frozen=True)
class Student:
    """A model that takes the trained one's LoRA, loaded once; `spec`: how it draws. It waits in main memory."""

    name: str
    policy: Policy
    spec: SamplerSpec

    @contextmanager
    def with_lora(self, lora: Mapping[str, Tensor]) -> Iterator[Policy]:
        """The model on its device, with this LoRA (as `Policy.state` gives it) in the place of its own."""
        policy = self.policy
        self._move(policy.device)
        try:
            policy.load_state("default", dict(lora))
            yield policy
        finally:
            policy.lora.fused.forget()  # merged copies of its weights
            self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        for module in (self.policy.network, self.policy.vae):
            module.to(device)


def load_students(config: Config, trained: Policy) -> list[Student]:
    """The models of `evaluate.also`, each of which has taken the LoRA once. No random number is drawn from `trained`'s.

    Raises:
        UserError: one of them cannot be loaded, or the LoRA does not fit it.
    """
    students = []
    plain = config.model_copy(update={"engine": config.engine.model_copy(update={"compile": False})})
    for name, section in config.evaluate.also.items():
        try:
            with torch.random.fork_rng(devices=[]):
                policy = load_policy(
                    section.source(config.model),
                    lora=trained.lora.spec,
                    precision=config.optimise.precision,
                    device=trained.device,
                    resolution=config.evaluate.resolution or config.rollout.resolution,
                    seed=config.seed,
                    family=config.family,
                    text_length=config.text_length,
                    merge=[*config.lora.merge, *as_list(section.merge)],
                    base=section.base,
                )
            policy.load_state("default", trained.state())
        except UserError as error:
            raise UserError(f"evaluate.also.{name}: {error}") from None
        prepare_engine(plain, policy)
        spec = SamplerSpec(
            sampler=policy.backbone.solver,
            steps=section.steps,
            guidance_scale=section.guidance_scale,
            noise_level=0.0,
        )
        students.append(Student(name, policy, evaluation_spec(config) if section.same else spec))
        students[-1]._move(torch.device("cpu"))
    return students


class Students(RunHook):
    """Judges the students wherever the model is evaluated, as `eval/STUDENT/...`."""

    def __init__(self, students: Sequence[Student], evaluation: Evaluation, lower: frozenset[str]) -> None:
        self.students, self.evaluation, self.lower = students, evaluation, lower

    def on_evaluate(self, epoch: int, evaluated: bool) -> Measured | None:
        if not evaluated:
            return None
        metrics: dict[str, float | None] = {}
        prompts: dict[str, list[float | None]] = {}
        lora = self.evaluation.policy.state(self.evaluation.snapshot)
        for student in self.students:
            with student.with_lora(lora) as policy:
                found = self.evaluation.judge(policy, student.spec, "default")
            values = self.evaluation.measured(found, f"{student.name}/")
            metrics, prompts = {**metrics, **values.metrics}, {**prompts, **values.prompts}
        return Measured(metrics, prompts)


def students_of(hooks: Sequence[RunHook]) -> Sequence[Student]:
    """Of a run with these hooks."""
    return [student for hook in hooks if isinstance(hook, Students) for student in hook.students]


def add_students(build: Build) -> None:
    """`evaluate.also`."""
    config = build.config
    lower = frozenset(f"{student}/{name}" for student in config.evaluate.also for name in build.lower)
    build.add(Students(load_students(config, build.policy), build.evaluation, lower))
