"""The model card of a published LoRA: what it is, what was measured, how to load it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment, PackageLoader, StrictUndefined

from diffrl.config import Config
from diffrl.config.base import Method, Section
from diffrl.config.loras import told
from diffrl.lora_files import find_lora, weighted
from diffrl.rewards.protocol import Card
from diffrl.sharing.measure import STRENGTHS, Row
from diffrl.version import __version__

LORA, COMFY, GALLERY = "pytorch_lora_weights.safetensors", "comfyui_lora.safetensors", "gallery.png"
TAGS = ("lora", "text-to-image", "reinforcement-learning", "diffrl")
# Between delimiters that neither Markdown nor Python nor BibTeX has.
_TEMPLATES = Environment(
    loader=PackageLoader("diffrl.sharing"),
    undefined=StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
    block_start_string="<%",
    block_end_string="%>",
    variable_start_string="<<",
    variable_end_string=">>",
)
_TEMPLATES.globals.update(version=__version__, COMFY=COMFY, GALLERY=GALLERY, told=told)


@dataclass(frozen=True)
class Facts:
    """Everything that the card tells."""

    name: str
    config: Config
    plain_call: Mapping[str, Any]  # what a plain call must be told to give the same picture
    rows: Sequence[Row]
    prompts: int  # held-out prompts behind the rows
    warnings: Sequence[str]
    cards: Mapping[str, Card | None]  # of every reward, by its name in the config
    epoch: int
    images: int  # that were trained on
    comfyui: bool
    resolution: tuple[int, int]  # width and height in pixels
    absent: Sequence[str]  # components that the pipeline asks for and the model has not, such as a T5
    hub: Mapping[str, str]  # the commits of the hub's repositories that the run read


def homepage() -> str | None:
    """`Homepage` of the installed package's metadata; None as long as pyproject.toml has none."""
    urls = (text.partition(", ") for text in metadata.metadata("diffrl").get_all("Project-URL") or ())
    return next((address for name, _, address in urls if name.lower() == "homepage"), None)


def render(facts: Facts, prompts: Sequence[str]) -> str:
    """The card as Markdown with the hub's header: `templates/card.md.j2`."""
    config, home = facts.config, homepage()
    values = {
        "header": _header(facts).to_yaml(),
        "base": _base(config.model),
        "methods": " + ".join(_cited(method, getattr(config, method.name)) for method in config.methods),
        "home": home,
        "tool": f"[diffrl]({home})" if home else "diffrl",
        "sizes": _sizes(facts),
        "merged": ", ".join(
            f"`{Path(name).name}` at strength {weight:g}" for name, weight in map(weighted, config.lora.merge)
        ),
        "snippet": snippet(facts, prompts[0] if prompts else "a photo"),
        "measured": any(row.low is not None for row in facts.rows),
        "strengths": ", ".join("base model" if s == 0 else f"{s:g}" for s in STRENGTHS),
        # Each paper of what was on, under the name that it has here; arXiv has the rest.
        "papers": {name: at for one in config.methods for name, at in one.cites(getattr(config, one.name)).items()},
        "number": _number,
        "gain": _gain,
        "key": lambda name: re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"),
    }
    return _TEMPLATES.get_template("card.md.j2").render(values, facts=facts, config=config, prompts=prompts)


def snippet(facts: Facts, prompt: str) -> str:
    """Plain Python that loads the folder into diffusers and draws; run in the card's folder, or with the hub's name."""
    config = facts.config
    steps = drawn_steps(config)
    extra = {"num_inference_steps": steps, "guidance_scale": config.rollout.guidance_scale}
    extra |= {"width": facts.resolution[0], "height": facts.resolution[1], **facts.plain_call}
    words = [f"{key}={value!r}" for key, value in extra.items()]
    if config.rollout.shift is not None:  # evenly spaced levels, which the scheduler then shifts
        words.append(f"sigmas=[1 - i / {steps} for i in range({steps})]")
    values = {
        "base": _loaded(facts),
        "dtype": {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[config.optimise.precision],
        "merged": [(_lora_words(name), weight) for name, weight in map(weighted, config.lora.merge)],
        "prompt": repr(prompt),
        "words": ", ".join(words),
    }
    return _TEMPLATES.get_template("snippet.py.j2").render(values, facts=facts, config=config)


def _loaded(facts: Facts) -> str:
    """Arguments of `from_pretrained` that say what the LoRA was trained over."""
    model = facts.config.model
    if model == "playground":
        return 'shipped("assets", "playground", "pipeline")'
    name = model.partition("@")[0] if _hub(model) else model
    return f'"{name}"' + (f', revision="{facts.hub[name]}"' if name in facts.hub else "")


def _lora_words(name: str) -> str:
    """Arguments of `load_lora_weights` for a LoRA that a config names."""
    found = find_lora(name)
    if isinstance(found, Path):
        return f'"{found}"'
    repository, at, revision = found[0].partition("@")
    file = f', weight_name="{found[1]}"' if found[1] else ""
    return f'"{repository}"{file}' + (f', revision="{revision}"' if at else "")


def _sizes(facts: Facts) -> str:
    shown = f"{facts.resolution[0]} x {facts.resolution[1]} pixels"
    if facts.config.evaluate.resolution is None:
        return shown
    given = facts.config.rollout.resolution
    width, height = (given, given) if isinstance(given, int) else given or (0, 0)
    trained = f"{width} x {height}" if given else "the model's own size"
    return f"trained at {trained}, shown and measured here at {shown}"


def drawn_steps(config: Config) -> int:
    """Of the gallery's pictures, and of the plain call that makes them."""
    return config.evaluate.steps or config.rollout.steps


def _header(facts: Facts) -> ModelCardData:
    hub = facts.config.model.partition("@")[0] if _hub(facts.config.model) else None
    return ModelCardData(
        base_model=hub,
        library_name="diffusers",
        pipeline_tag="text-to-image",
        license="other",
        license_name="that-of-the-base-model",
        tags=[*TAGS, *(method.name for method in facts.config.methods)],
        model_name=facts.name,
    )


def _cited(method: Method, section: Section) -> str:
    """The method's title with links to its papers, and to those of the options that are on."""
    links = {name: f"[{name}](https://arxiv.org/abs/{number})" for name, number in method.cites(section).items()}
    link = links.pop(method.title, method.title)
    return f"{link} ({', '.join(links.values())})" if links else link


def _base(model: str) -> str:
    if model == "playground":
        return "diffrl's playground model"
    name, _, revision = model.partition("@")
    link = f"[{model}](https://huggingface.co/{name}{f'/tree/{revision}' * bool(revision)})"
    return link if _hub(model) else f"the model in the folder {Path(model).name}"


def _hub(model: str) -> bool:
    """Is it a name of the hub?"""
    return "/" in model and not Path(model).exists()


def _number(value: float) -> str:
    return "does not apply" if math.isnan(value) else f"{value:.3f}"


def _gain(row: Row) -> str:
    if math.isnan(row.base):
        return ""
    gain = f"{row.trained - row.base:+.3f}"
    return gain if row.low is None or row.high is None else f"{gain} ({row.low:+.3f} to {row.high:+.3f})"
