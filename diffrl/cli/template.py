"""The text of a config that `diffrl init` writes: what was asked for, and every other key as a comment."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from diffrl.cli.config_help import default_of
from diffrl.config import door
from diffrl.config.base import Method
from diffrl.config.presets import preset
from diffrl.config.schema import Config, config_class, section_type
from diffrl.errors import UserError, nearest
from diffrl.plugins import installed
from diffrl.prompts import check_source
from diffrl.tools.stand_ins import PROMPTS, check_reward
from diffrl.worlds import owner, worlds

# The playground's model is small and its runs take minutes: configs/playground/nft.yaml says where these come from.
SMALL: dict[str, dict[str, Any]] = {
    "rollout": {"groups": 24, "group_size": 16, "steps": 6, "batch_size": 128},
    "optimise": {"learning_rate": 1e-3, "batch_size": 384, "micro_batch": 128},
}
LARGE: dict[str, dict[str, Any]] = {
    "rollout": {"groups": 48, "group_size": 24, "resolution": 512, "batch_size": 12},
    "optimise": {"precision": "bf16", "micro_batch": 12},
}
OWN: dict[str, dict[str, Any]] = {  # on the playground
    "nft": {"beta": 0.1, "timesteps": 0.34},
    "awm": {"timesteps": 0.34},
    "dgpo": {"timesteps": 0.34},
    "tree": {"splits": [0, 1, 2, 3]},
}
WIDTH = 118


def methods_named(text: str) -> tuple[str, list[Method]]:
    """What `--method` names: the objective, by default the one that the others are put around, and all methods."""
    words, known = text.split("+"), door.methods()
    for word in words:
        if not (".py" in word or door.is_method(word)):
            raise UserError(f'init: --method: unknown "{word}"{nearest(word, installed("method"))}')
    around = [known[word] for word in words if word in known and known[word].kind != "objective"]
    objectives = [word for word in words if word not in known or known[word].kind == "objective"]
    if len(objectives) > 1:
        raise UserError(f"init: --method: {' and '.join(objectives)} are both objectives; name one")
    if not objectives:  # credit is a part of those that take it
        credit = any(method.kind == "credit" for method in around)
        objectives = [name for name in ("nft", *known) if known[name].takes_credit or not credit]
    return objectives[0], [door.method_of(objectives[0]), *around]


def default_rewards(model: str, methods: Sequence[Method]) -> list[str]:
    """Rewards that the methods work with."""
    wanted, own = {method.rewards for method in methods}, model == "playground"
    first = "clip" if wanted & {"differentiable", "embeds"} else "playground" if own else "pickscore"
    second = "clip" if first != "clip" else "preference" if own else "aesthetic"
    return [first, *([second] if "several" in wanted else [])]


def template(
    model: str, rewards: Sequence[str], objective: str, methods: Sequence[Method], train: str | None, test: str | None
) -> str:
    """YAML that `load_config` reads, or whose one fault it names (a reward that needs an argument, say)."""
    small = model == "playground"
    if not small and (train is None or test is None):
        raise UserError(f"init: --train and --test: not given; for {model} give {PROMPTS}, such as ocr/train, ocr/test")
    for name in rewards:
        check_reward(model, name, _arguments(model, name))
    values = {name: dict(keys) for name, keys in (SMALL if small else LARGE).items()}
    for name, ours in preset(model).items():
        values[name] = {**values.get(name, {}), **ours}
    innermost, *around = methods
    wrappers = [method.name for method in around]
    values |= {method.name: dict(OWN.get(method.name, {})) if small else {} for method in methods}
    for method in methods:
        for section, keys in method.needs.items():
            values[section] = {**keys, **values.get(section, {})} if small else {**values.get(section, {}), **keys}
    rollout = values["rollout"]
    count = check_source(train) if train is not None else None
    rollout["groups"] = min(rollout["groups"], count or rollout["groups"])
    steps = 1 if small or rollout["groups"] % 2 else 2  # of the optimiser, an epoch
    values["optimise"]["batch_size"] = rollout["groups"] // steps * rollout["group_size"]
    judges = ("artefact", "clip") if small else ("pickscore", "aesthetic", "clip")
    watched = [name for name in judges if name not in rewards][: 1 if small else 2]
    if "gardo" in wrappers:
        values[innermost.name].pop("beta", None)  # gardo's takes its place
        values["gardo"] = {"auxiliary": watched[:1]} | ({} if innermost.advantages == "any" else {"diversity": "off"})
    sources = {"train": train or "playground/compositional/train", "test": test or "playground/compositional/test"}
    lines = [
        *_comment(f"{objective} on {model}. Written by `diffrl init`; what is commented out is at its default."),
        *_comment(
            "`diffrl train --help-config all` explains every key; `diffrl configs` lists recipes of published values."
        ),
        f"model: {_plain(model)}",
        f"prompts: {_flow(sources)}",
    ]
    lines.append(f"epochs: {40 if small else 300}  # {Config.model_fields['epochs'].description}")
    lines += [*_section("lora", {}), *_section("rollout", values.pop("rollout"))]
    lines += [
        "# What is optimised; `diffrl rewards list` shows them all, and rewards/README.md what they take.",
        "rewards:",
    ]
    lines += [f"  {_name(name)}: {_flow(_entry(name) | _arguments(model, name))}" for name in rewards]
    lines += ["# What is only watched: held out, it shows when the rewards above are cheated.", "watch:"]
    lines += [f"  {name}: {_flow(_arguments(model, name))}" for name in watched]
    lines.append(f"objective: {_plain(objective)}")
    for name in (innermost.name, *wrappers):
        lines += _section(name, values.pop(name), config_class({"objective": objective, name: {}}))
    for name in ("optimise", "evaluate", "guard", "checkpoint", "tracking"):
        lines += _section(name, values.pop(name, {}))
    return "\n".join(lines) + "\n"


def _entry(name: str) -> dict[str, Any]:
    return {"weight": 1.0} | ({"plugin": name} if _name(name) != name else {})


def _arguments(model: str, name: str) -> dict[str, Any]:
    """What a reward needs with this model, so that it is none of a world's stand-ins."""
    mine = owner(model)
    stand_ins = [world.stand_ins[name] for world in worlds().values() if world is not mine and name in world.stand_ins]
    return dict(stand_ins[0].arguments) if stand_ins else {}


def _name(name: str) -> str:
    """`path/to/file.py:Class` and `package:reward` by their last word."""
    return name.rpartition(":")[2].lower()


def _section(name: str, given: dict[str, Any], config: type[Config] = Config) -> list[str]:
    """A section with what is given, the rest of its keys as comments."""
    field = config.model_fields[name]
    kind = section_type(field.annotation)
    assert kind is not None
    meaning = field.description or name
    lines = ["", *_comment(f"{meaning[0].upper()}{meaning[1:]}.")]
    if not given and field.default is not None:
        return [*lines, *_rest(kind, given, name)]
    return [*lines, f"{name}:", *(f"  {key}: {_flow(value)}" for key, value in given.items()), *_rest(kind, given)]


def _rest(kind: type[BaseModel], given: dict[str, Any], name: str = "") -> list[str]:
    lines = [f"# {name}:"] if name else []
    for key, field in kind.model_fields.items():
        if key in given or section_type(field.annotation) is not None:
            continue
        meaning = textwrap.shorten(field.description or "", WIDTH - 44, placeholder=" ...")
        lines.append(f"{'#   ' if name else '  # '}{f'{key}: {default_of(field)}':<36} # {meaning}")
    return lines


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, WIDTH - 2)]


def _plain(value: str) -> str:
    """As it is, where it is letters, digits and `/ - . _`; else in quotes."""
    return value if re.fullmatch(r"[./_-]*[^\W_][\w./-]*", value) else json.dumps(value)


def _flow(value: Any) -> str:
    """A value on one line of YAML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(inner) for inner in value) + "]"
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    return _plain(value) if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
