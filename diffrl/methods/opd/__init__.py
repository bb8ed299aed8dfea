"""On-policy distillation of several teachers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import FiniteFloat

from diffrl.config.base import STOCHASTIC, Method, PathText, Problem, Sampling, Section, key
from diffrl.errors import nearest


class Teacher(Section):
    """A frozen model that says what the student's steps should have been."""

    lora: PathText | None = key(
        None,
        "its LoRA: a run's folder, a folder with a LoRA, or OWNER/NAME on the hub; null: the pretrained model itself",
    )
    prompts: list[str] | None = key(
        None, "the sources of prompts.train that it teaches, each of which has one teacher; []: none; null: all"
    )
    guidance: FiniteFloat | None = key(None, "guidance of its prediction; null: rollout.guidance_scale", ge=1, le=1000)
    everywhere: FiniteFloat = key(
        0.0, "weight of the distance from it on the rows of all prompts: an anchor (Flow-OPD: 0.04)", ge=0
    )

    def taught(self, sources: Iterable[str]) -> list[str]:
        """The sources that it teaches, of all `sources` of prompts.train."""
        return list(sources) if self.prompts is None else self.prompts


class OPDSection(Section):
    method = Method(
        "opd",
        "DiffusionOPD",
        {"DiffusionOPD": "2605.15055", "Flow-OPD": "2605.08063"},
        about="on-policy distillation of teachers, each for its prompts",
        trainer="diffrl.methods.opd.objective:OPD",
        advantages="none",
        rewards="unused",
        needs={"opd": {"teachers": {"guided": {"guidance": 4.5}}}},
    )
    teachers: dict[str, Teacher] = key(
        {}, "NAME: {lora: runs/NAME, prompts: [SOURCE]}; they are read once, and a checkpoint has their digests"
    )
    target: Literal["v", "step", "kl"] = key(
        "v",
        "the distance, as a weight on mean (v - v_teacher)^2. v: 1; step: dt^2 / 2, of the ODE's steps (DiffusionOPD); "
        "kl: of a stochastic sampler's steps, the two means' over 2 std^2",
    )
    start: Literal["pretrained", "merge"] = key(
        "pretrained", "merge: the student begins as the mean of the teachers' products B A, brought to lora.rank by SVD"
    )
    timesteps: int | None = key(
        None, "how many of a path's steps are trained, drawn anew for each image and epoch; null: all", "steps", ge=1
    )

    def contents(self, config: Any) -> dict[str, Path | str]:
        """The teachers' LoRAs."""
        from diffrl.methods.opd.teachers import teachers_files  # imports torch

        return {f"{key} (file)": file for key, file in teachers_files(config).items()}

    def steps(self, rollout: Sampling) -> int:
        """How many of a path's steps have a target."""
        return rollout.stochastic_steps if self.target == "kl" else rollout.steps

    def trained_steps(self, rollout: Sampling) -> int:
        return self.timesteps or self.steps(rollout)

    def check(self, config: Any) -> None:
        if not self.teachers:
            raise Problem("opd.teachers", "empty; name at least one, NAME: {lora: runs/NAME, prompts: [SOURCE]}")
        train = config.prompts.train
        self._check_sources([train] if isinstance(train, str) else list(train))
        if self.start == "merge" and all(one.lora is None for one in self.teachers.values()):
            raise Problem("opd.start", '"merge", but no teacher has a LoRA')
        self._check_path(config)

    def _check_sources(self, sources: list[str]) -> None:
        owners: dict[str, str] = {}
        for name, one in self.teachers.items():
            where = f"opd.teachers.{name}"
            if not re.fullmatch(r"[\w-]+", name):
                raise Problem(where, f'a teacher\'s name has letters, digits, "_" and "-" only, got "{name}"')
            for source in one.taught(sources):
                if source not in sources:
                    raise Problem(f"{where}.prompts", f'"{source}" is not in prompts.train{nearest(source, sources)}')
                if source in owners:
                    text = f'"{source}" is taught by {owners[source]}, too; a source has one teacher'
                    raise Problem(f"{where}.prompts", f"{text} (others: prompts: [], with everywhere)")
                owners[source] = name
            if not one.everywhere and not one.taught(sources):
                raise Problem(f"{where}.prompts", "empty, and everywhere is 0: it teaches nothing")
        missing = [source for source in sources if source not in owners]
        if owners and missing:
            raise Problem("opd.teachers", f'"{missing[0]}" of prompts.train has no teacher; name it under prompts')

    def _check_path(self, config: Any) -> None:
        rollout, there = config.rollout, self.steps(config.rollout)
        if self.target == "kl" and not there:
            text = f'no step of "{rollout.sampler}" is stochastic, but opd.target "kl" compares their Gaussians'
            raise Problem("rollout.sampler", f"{text}: use one of {', '.join(STOCHASTIC)}, or target v or step")
        if self.target != "kl" and rollout.tail is not None:
            raise Problem("rollout.tail", f'opd.target "{self.target}" trains all steps of a path; leave it out')
        if (self.timesteps or 0) > there:
            raise Problem("opd.timesteps", f"{self.timesteps} steps, but only {there} have a target")
