"""Teachers of on-policy distillation: their LoRAs found, read once into frozen slots, and merged into the student."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from diffrl.config import Config
from diffrl.errors import UserError
from diffrl.lora_files import lora_file
from diffrl.loras.reading import read_lora
from diffrl.methods.opd import OPDSection
from diffrl.policy import Policy
from diffrl.policy.lora import TRAINED
from diffrl.policy.merging import fitted, merged

log = logging.getLogger("diffrl")


def teachers_files(config: Config) -> dict[str, Path]:
    """{key of the config: the LoRA's file} of every teacher that has one, from the hub if it is there.

    Raises:
        UserError: there is none, or the run that trained it had another model.
    """
    section: Any = config.objective_section
    if not isinstance(section, OPDSection):
        return {}
    asked = {f"opd.teachers.{name}.lora": one.lora for name, one in section.teachers.items() if one.lora is not None}
    return {key: _find(key, lora, config) for key, lora in asked.items()}


def load_teachers(config: Config, policy: Policy, slots: Sequence[str | None]) -> None:
    """Give the policy a frozen slot for every teacher with a LoRA, of `slots`, which has one for each teacher; the
    student begins as `opd.start` says.

    Raises:
        UserError: a LoRA that is not to be found, or does not fit the model.
    """
    states, nothing = [], {key: torch.zeros_like(value) for key, value in policy.state().items()}
    places = [place for place in slots if place is not None]
    for (key, file), place in zip(teachers_files(config).items(), places, strict=True):
        read, source = read_lora(file, policy.backbone), f"{key}: {file.parent}"
        if read.texts.state:
            log.warning("%s: its part for text encoders is left out: they are the student's", source)
        states.append(fitted(read.state, read.spec, policy.lora.spec, nothing, source))
        policy.add_snapshot(place)
        policy.lora.load_state(place, states[-1], source=source)
    if not states or config.opd.start != "merge":
        return
    policy.load_state(TRAINED, merged(states, policy.state()))
    if dist.is_initialized():  # a decomposition may differ in its last bits from one machine to another
        for _, parameter in policy.trainable:
            dist.broadcast(parameter.data, 0)


def _find(key: str, lora: str, config: Config) -> Path:
    try:
        file = lora_file(lora)
    except UserError as error:
        raise UserError(f"{key}: {error}; train it first: diffrl train CONFIG") from error
    _check_model(key, file.parent.parent, config)
    return file


def _check_model(key: str, run: Path, config: Config) -> None:
    """Raise UserError if the run's config, where there is one, names another model or other merged LoRAs.

    Its LoRA may fit then, and teach rubbish.

    One model may have a hub's name there and a folder here, so the last words of both are compared.
    """
    try:
        values = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        trained_on, over = values["model"], (values.get("lora") or {}).get("merge") or []
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return
    if over != config.lora.merge:
        raise UserError(f"{key}: {run} was trained with lora.merge {over}, and this run has {config.lora.merge}")
    model = config.model
    if _last(str(trained_on)) != _last(model):
        raise UserError(
            f"{key}: {run} was trained on {trained_on}, and this run's model is {model}: a teacher has the same"
        )


def _last(model: str) -> str:
    """A name without folder, owner and revision."""
    return Path(model.partition("@")[0]).name.lower()
