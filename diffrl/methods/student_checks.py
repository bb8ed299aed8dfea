"""Does a student (evaluate.also) take the trained model's LoRA? What the configs of both, if they are here, say."""

from __future__ import annotations

import json
import re
from typing import Any

from diffrl.config import Config
from diffrl.config.base import Problem, at_key
from diffrl.config.checks import check_model
from diffrl.config.measuring import GUIDANCE, STEPS
from diffrl.errors import UserError
from diffrl.lora_files import find_lora, weighted
from diffrl.resources import shipped
from diffrl.worlds import folder_of

# Of a network's config: what the shapes of its attention's projections come from.
SHAPES = re.compile(
    r"(num|n)_\w*(layers|heads|blocks)|attention_head_dim|(joint|cross)_attention_dim|hidden_(size|dim)|dim|"
    r"block_out_channels|transformer_layers_per_block"
)


TAKEN = ("saturation",)  # there is eval/saturation/std


def check_students(config: Config) -> None:
    """Raise Problem for a name or values that a student cannot have, and for what its LoRA would not fit."""
    for name, student in config.evaluate.also.items():
        where = f"evaluate.also.{name}"
        if not re.fullmatch(r"[\w-]+", name):
            raise Problem(where, f'a student\'s name has letters, digits, "_" and "-" only, got "{name}"')
        if name in TAKEN:
            raise Problem(where, f"eval/{name} has a meaning of its own; choose another name, such as turbo")
        if student.same and student.base == config.engine.base:
            text = "not given; name a folder or a hub id of the model's architecture, merge a LoRA, or another base"
            raise Problem(f"{where}.model", text)
        if student.same and (student.steps, student.guidance_scale) != (STEPS, GUIDANCE):
            text = "the same model over another base draws as evaluate and rollout say: no steps, no guidance_scale"
            raise Problem(where, text)
        at_key(f"{where}.model", check_model, student.source(config.model))
        if student.merge is not None:
            at_key(f"{where}.merge", find_lora, at_key(f"{where}.merge", weighted, student.merge)[0])
        _check_shapes(name, config)


def _check_shapes(name: str, config: Config) -> None:
    """Raise Problem where the pipeline's class or the network's shapes are others than the trained model's.

    Configs behind a hub's name are left to the hub: loading the LoRA says it then, before anything is trained.
    """
    where, model = f"evaluate.also.{name}.model", config.evaluate.also[name].source(config.model)
    ours, theirs = _read(config.model), _read(model)
    if ours is None or theirs is None:
        return
    if ours["_class_name"] != theirs["_class_name"]:
        kinds = f"{model} is a {theirs['_class_name']}, {config.model} a {ours['_class_name']}"
        raise Problem(where, f"{kinds}: its LoRA does not fit{_choices(config, ours['_class_name'])}")
    for key, value in ours["network"].items():
        other = theirs["network"].get(key, value)
        if SHAPES.fullmatch(key) and other != value:
            text = f"{model} has {key} {other}, {config.model} {value}: its LoRA does not fit"
            raise Problem(where, text + _choices(config, ours["_class_name"]))


def _read(model: str) -> dict[str, Any] | None:
    """The model_index.json, and under "network" the denoiser's config, if they are on this machine."""
    folder = folder_of(model)
    if not folder.is_dir() and model.count("/") == 1:
        folder = shipped("assets", "architectures", model.partition("@")[0].rpartition("/")[2])
    try:
        index = json.loads((folder / "model_index.json").read_text())
        part = "transformer" if "transformer" in index else "unet"
        return {"_class_name": "", **index, "network": json.loads((folder / part / "config.json").read_text())}
    except (
        OSError,
        ValueError,
        TypeError,
        RecursionError,
    ):  # what is not here, or cannot be read, is said when it is loaded
        return None


def _choices(config: Config, pipeline: str) -> str:
    """Models of the family, for the message."""
    from diffrl.policy.registry import find_family

    try:
        known = getattr(find_family(pipeline, config.family), "known", ())
    except UserError:
        return ""
    names = [one.name for one in known if one.name != config.model]
    return f" (models of its family: {', '.join(names)})" if names else ""
