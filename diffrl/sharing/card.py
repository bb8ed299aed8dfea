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

from diffrl.config import Config
from diffrl.config.base import Method, Section
from diffrl.config.loras import told
from diffrl.lora_files import find_lora, weighted
from diffrl.rewards.protocol import Card
from diffrl.sharing.measure import STRENGTHS, Row
from diffrl.version import __version__

LORA, COMFY, GALLERY = "pytorch_lora_weights.safetensors", "comfyui_lora.safetensors", "gallery.png"
TAGS = ("lora", "text-to-image", "reinforcement-learning", "diffrl")


@dataclass(frozen=True)
class Facts:
    """Everything that the card tells."""

    name: str
    config: Config
    family: str  # the pipeline's class
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
    """The card as Markdown with the hub's header."""
    config, home = facts.config, homepage()
    tool = f"[diffrl]({home})" if home else "diffrl"
    methods = [_cited(method, getattr(config, method.name)) for method in config.methods]
    read = ", ".join(f"{name} at commit {commit}" for name, commit in facts.hub.items())
    parts = [
        f"---\n{_header(facts).to_yaml()}\n---\n",
        f"# {facts.name}",
        f"A LoRA for {_base(config.model)}, trained by reinforcement learning with {' + '.join(methods)} and "
        f"{tool} {__version__}: {facts.epoch} epochs, {facts.images:,} images of the model's own. "
        f"{config.lora.kind.replace('lora', 'LoRA')} rank {told(config.lora.rank)}, alpha {told(config.lora.alpha)}, "
        f"{_sizes(facts)}, "
        f"{config.rollout.steps} sampling steps, guidance {config.rollout.guidance_scale:g}"
        + ("." if config.rollout.shift is None else f", schedule shift {config.rollout.shift:g}."),
        *([_merged(config)] if config.lora.merge else []),
        *([f"Its training began as the LoRA `{config.lora.start}`."] if config.lora.start else []),
        *_over(config),
        *([f"Weights of the hub: {read}."] if read else []),
        "## How to load it",
        f"```python\n{snippet(facts, prompts[0] if prompts else 'a photo')}```",
    ]
    if facts.comfyui:
        parts.append(f"ComfyUI: put `{COMFY}` into `models/loras` and load it with a LoRA loader, model strength 1.")
    parts += ["## What was measured", *([_table(facts)] if facts.rows else []), _reading(facts)]
    alarms = [f"- {text}" for text in facts.warnings] or [
        "- None of the guard rails spoke, and no sign of reward hacking."
    ]
    parts += ["## Alarms of the training", "\n".join(alarms)]
    if prompts:
        steps = ", ".join("base model" if s == 0 else f"{s:g}" for s in STRENGTHS)
        parts += [
            "## Gallery",
            "The first held-out prompts, not chosen; one noise for each row; strength of the LoRA from left to right: "
            f"{steps}.",
            f"![Samples at several strengths]({GALLERY})",
        ]
    parts += [
        "## Rewards",
        _rewards(facts),
        "## Config",
        "Every value is in [config.yaml](config.yaml). Train it again with `diffrl train config.yaml run_dir=again`.",
        "## Citation",
        f"```bibtex\n{_bibtex(config)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _bibtex(config: Config) -> str:
    """The tool, and each paper of what was on, under the name that it has here; arXiv has the rest."""
    papers = {name: number for one in config.methods for name, number in one.cites(getattr(config, one.name)).items()}
    tool = "{diffrl}: reinforcement learning for diffusion and flow text-to-image models "
    tool += "that shows reward hacking while it happens"
    url = f",\n  url = {{{home}}}" if (home := homepage()) else ""
    entries = [
        f"@software{{diffrl,\n  title = {{{tool}}},\n  author = {{{{The diffrl developers}}}},\n  version = "
        f"{{{__version__}}}{url}\n}}"
    ]
    for name, number in papers.items():
        fields = {"title": f"{{{name}}}", "eprint": number, "archivePrefix": "arXiv"}
        fields["url"] = f"https://arxiv.org/abs/{number}"
        lines = ",\n".join(f"  {key} = {{{value}}}" for key, value in fields.items())
        entries.append(f"@misc{{{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')},\n{lines}\n}}")
    return "\n".join(entries)


def _sizes(facts: Facts) -> str:
    shown = f"{facts.resolution[0]} x {facts.resolution[1]} pixels"
    if facts.config.evaluate.resolution is None:
        return shown
    given = facts.config.rollout.resolution
    width, height = (given, given) if isinstance(given, int) else given or (0, 0)
    trained = f"{width} x {height}" if given else "the model's own size"
    return f"trained at {trained}, shown and measured here at {shown}"


def _over(config: Config) -> list[str]:
    base = config.engine.base
    text = (
        f"It was trained over the model's weights in {base}. It is a LoRA of the full model, on which it is shown here."
    )
    return [] if base == "full" else [text]


def _merged(config: Config) -> str:
    names = ", ".join(
        f"`{Path(name).name}` at strength {weight:g}" for name, weight in map(weighted, config.lora.merge)
    )
    return f"**It needs {names} in the model's weights first**, over which it was trained."


def drawn_steps(config: Config) -> int:
    """Of the gallery's pictures, and of the plain call that makes them."""
    return config.evaluate.steps or config.rollout.steps


def snippet(facts: Facts, prompt: str) -> str:
    """Plain Python that loads the folder into diffusers and draws; run in the card's folder, or with the hub's name."""
    config = facts.config
    lines = ["import torch", "from diffusers import DiffusionPipeline", ""]
    kind = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[config.optimise.precision]
    name = config.model.partition("@")[0] if _hub(config.model) else config.model
    base = f'"{name}"' + (f', revision="{facts.hub[name]}"' if name in facts.hub else "")
    if config.model == "playground":
        lines[1:2] = ["from diffrl.resources import shipped", "from diffusers import DiffusionPipeline"]
        base = 'shipped("assets", "playground", "pipeline")'
    steps = drawn_steps(config)
    extra = {"num_inference_steps": steps, "guidance_scale": config.rollout.guidance_scale}
    extra |= {"width": facts.resolution[0], "height": facts.resolution[1], **facts.plain_call}
    load = "".join(f", {name}=None" for name in facts.absent)
    words = ", ".join(f"{key}={value!r}" for key, value in extra.items())
    scheduler = []
    if config.rollout.shift is not None:  # evenly spaced levels, which the scheduler then shifts
        lines[lines.index("from diffusers import DiffusionPipeline")] += ", FlowMatchEulerDiscreteScheduler"
        scheduler = [f"pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift={config.rollout.shift!r})"]
        words += f", sigmas=[1 - i / {steps} for i in range({steps})]"
    lines += [
        f"pipe = DiffusionPipeline.from_pretrained({base}, torch_dtype=torch.{kind}{load})",
        *_fused(config),
        'pipe.load_lora_weights(".", adapter_name="rl")  # this folder, or its name on the hub',
        'pipe.set_adapters("rl", 1.0)  # the strength',
        *scheduler,
        f"image = pipe({prompt!r}, {words}).images[0]",
    ]
    return "\n".join(lines) + "\n"


def _fused(config: Config) -> list[str]:
    lines = []
    for name, weight in map(weighted, config.lora.merge):
        found = find_lora(name)
        where = f'"{found}"' if isinstance(found, Path) else f'"{found[0].partition("@")[0]}"'
        if not isinstance(found, Path) and found[1]:
            where += f', weight_name="{found[1]}"'
        if not isinstance(found, Path) and "@" in found[0]:
            where += f', revision="{found[0].partition("@")[2]}"'
        lines += [f"pipe.load_lora_weights({where})", f"pipe.fuse_lora(lora_scale={weight!r})"]
        lines.append("pipe.unload_lora_weights()")
    return lines


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


def _table(facts: Facts) -> str:
    lines = ["| on held-out prompts | | base | trained | gain (95 % interval) |", "| --- | --- | --- | --- | --- |"]
    for row in facts.rows:
        arrow = ", lower is better" if row.lower_is_better else ""
        values = [_number(row.base), _number(row.trained), _gain(row)]
        lines.append(f"| {row.name} | {row.role}{arrow} | {' | '.join(values)} |")
    return "\n".join(lines)


def _reading(facts: Facts) -> str:
    if any(row.low is not None for row in facts.rows):
        return (
            f"{facts.prompts} held-out prompts with {facts.config.evaluate.per_prompt} images each, the same noise for "
            "both models; the interval is Student's over prompts. Only what is marked as trained was optimised."
        )
    if not facts.rows:
        return "Nothing: neither when this folder was written, nor of this LoRA while it was trained."
    return (
        "From the run's own evaluations, without intervals: nothing was measured when this folder was written. "
        "Only what is marked as trained was optimised."
    )


def _number(value: float) -> str:
    return "does not apply" if math.isnan(value) else f"{value:.3f}"


def _gain(row: Row) -> str:
    if math.isnan(row.base):
        return ""
    gain = f"{row.trained - row.base:+.3f}"
    return gain if row.low is None or row.high is None else f"{gain} ({row.low:+.3f} to {row.high:+.3f})"


def _rewards(facts: Facts) -> str:
    lines = ["| reward | | weight | licence | known exploits |", "| --- | --- | --- | --- | --- |"]
    for name, card in facts.cards.items():
        entry = facts.config.rewards.get(name)
        role, weight = ("trained", f"{entry.weight:g}") if entry else ("held out", "")
        licence, exploits = (card.licence, card.exploits) if card else ("not declared", "not declared")
        lines.append(f"| {name} | {role} | {weight} | {licence} | {exploits} |")
    return "\n".join(lines)
