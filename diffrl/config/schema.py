"""Every key of a config: its type, default, meaning and unit; the methods' sections are in `diffrl.config.methods`.

The class `Config` is the one table of sections. A new objective is a section with `trained_steps`, and one line in the
table; a method that wraps objectives is a section, and one line `name: Name | None = key(None, ...)` (present = on).
What a section needs of the rest of the config, it says in its own `check`.
"""

from __future__ import annotations

import importlib.util
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, FiniteFloat
from pydantic.fields import FieldInfo

from diffrl.config.base import PAIR, QUIET_STEPS, PathText, Problem, PromptSource, Section, Share, key, section
from diffrl.config.methods import CRD, GARDO, GRPO, NFT, D2Align, Direct, Marble, Objective
from diffrl.config.reward import Reward

UP_TO_ONE = ("cps", "ddim")  # whose noise level is a share


class Prompts(Section):
    train: PromptSource = key(
        "playground/compositional/train",
        "prompts to train on: playground/SUBSET/SPLIT, FILE.txt or FILE.jsonl; or several as {SOURCE: share, ...}, "
        "which divide the prompts of every epoch by their shares",
    )
    test: PromptSource = key(
        "playground/compositional/test", "held-out prompts to evaluate on; needed where train is given"
    )


class Lora(Section):
    rank: int = key(32, "rank of the update", ge=1)
    alpha: FiniteFloat = key(64, "the update is scaled by alpha / rank", gt=0)
    targets: list[str] | None = key(
        None, "names of the adapted modules; null: the model family's attention projections"
    )


class Rollout(Section):
    groups: int = key(48, "prompts per epoch, over all processes", "prompts", ge=1)
    group_size: int = key(24, "images per prompt (the group that advantages compare)", "images", ge=2)
    steps: int = key(10, "sampling steps", "steps", ge=1)
    sampler: Literal["euler", "dpm2", "flow_sde", "dance", "cps", "ddim"] = key(
        "dpm2",
        "euler and dpm2 are deterministic; the others are stochastic, as grpo needs; ddim is for models of DDPM type",
    )
    guidance_scale: FiniteFloat = key(1.0, "classifier-free guidance; 1 is none, at half the cost", ge=1)
    noise_level: FiniteFloat = key(
        0.7, "noise of a stochastic sampler: a of flow_sde, dance and cps, eta of ddim", ge=0
    )
    window: int | None = key(
        None, "number of consecutive stochastic steps, the others are Euler's; null: all", "steps", ge=1
    )
    window_range: Annotated[tuple[int, int], PAIR] | None = key(
        None, "[first, end]: drawn anew each epoch, within the steps first to end - 1; null: from step 0", "steps"
    )
    same_noise: bool = key(False, "the images of a group start from one initial noise")
    batch_size: int = key(32, "images per forward, on each process", "images", ge=1)
    resolution: int | None = key(None, "side of the square images; null: the model's own", "pixels", ge=8)

    @property
    def images(self) -> int:
        """Images of an epoch, over all processes."""
        return self.groups * self.group_size

    @property
    def stochastic_steps(self) -> int:
        """Steps of the window, which draw fresh noise; 0 if the sampler or the noise level is deterministic."""
        return (self.window or self.noisy_steps) if self.noise_level else 0

    @property
    def noisy_steps(self) -> int:
        """Steps that could draw fresh noise."""
        return self.steps - QUIET_STEPS.get(self.sampler, self.steps)

    def check(self, config: Config) -> None:
        if self.sampler in UP_TO_ONE and self.noise_level > 1:
            raise Problem("rollout.noise_level", f"expected at most 1 with {self.sampler}, got {self.noise_level:g}")
        limit = f"{self.noisy_steps} of the {self.steps} steps (rollout.steps) of {self.sampler} can be stochastic"
        if (self.window or 0) > self.noisy_steps:
            raise Problem("rollout.window", f"{self.window} stochastic steps, but {limit}")
        if self.window_range is not None:
            first, end = self.window_range
            if not 0 <= first < end <= self.noisy_steps:
                raise Problem(
                    "rollout.window_range", f"[{first}, {end}] is not within [0, {self.noisy_steps}]: {limit}"
                )
            if end - first < self.stochastic_steps:
                text = f"[{first}, {end}] is too short for a window of {self.stochastic_steps} steps (rollout.window)"
                raise Problem("rollout.window_range", text)
        if self.same_noise and not self.stochastic_steps:
            text = f"with {self.sampler} at noise level {self.noise_level:g} all images of a group would be the same"
            raise Problem("rollout.same_noise", text)


class Optimise(Section):
    learning_rate: FiniteFloat = key(3e-4, "AdamW's step size", gt=0)
    batch_size: int = key(
        576, "images per optimiser step over all processes, each with all its timesteps", "images", ge=1
    )
    accumulation: int = key(
        16, "micro-batches that a process's share of an optimiser step is split into", "micro-batches", ge=1
    )
    inner_epochs: int = key(1, "passes over an epoch's images", "passes", ge=1)
    max_grad_norm: FiniteFloat = key(1.0, "gradients are scaled down to this norm", gt=0)
    max_skipped: int = key(
        2,
        "steps in a row that may be left out for a gradient that is not finite; one more ends it",
        "optimiser steps",
        ge=0,
    )
    precision: Literal["fp32", "bf16", "fp16"] = key(
        "fp32", "of the frozen weights and the forwards; LoRA stays in fp32"
    )
    gradient_checkpointing: bool = key(
        False, "recompute activations in the backward pass: less memory, one forward more"
    )
    ema: Share = key(0.9, "decay per optimiser step of the averaged LoRA that is evaluated; 0: the trained one itself")
    betas: Annotated[tuple[Share, Share], PAIR] = key((0.9, 0.999), "AdamW's decays of the two moments")
    weight_decay: FiniteFloat = key(1e-4, "AdamW's weight decay", ge=0)


class Engine(Section):
    attention: str = key(
        "native", "attention kernel, by diffusers' names: native (torch's own), xformers, flash, sage, ..."
    )
    compile: bool = key(False, "torch.compile of the network's repeated blocks: minutes at the start, then faster")
    optimiser: Literal["adamw", "adamw8bit"] = key(
        "adamw", "adamw8bit: moments of large matrices in 8 bits (bitsandbytes; extra: diffrl[8bit])"
    )
    offload_vae: bool = key(False, "the autoencoder leaves the device while the LoRA is optimised")
    tile_vae: bool = key(False, "decode in overlapping tiles: less memory above 512 pixels, seams may show")

    def check(self, config: Config) -> None:
        if self.offload_vae and config.objective == "direct":
            raise Problem("engine.offload_vae", 'true, but objective "direct" decodes while it optimises')
        if self.optimiser == "adamw8bit" and importlib.util.find_spec("bitsandbytes") is None:
            raise Problem("engine.optimiser", '"adamw8bit" needs bitsandbytes: pip install "diffrl[8bit]"')


class Evaluate(Section):
    every: int = key(10, "evaluate after every so many epochs, and before the first and after the last", "epochs", ge=1)
    prompts: int = key(64, "how many of the test prompts are used, at most", "prompts", ge=1)
    per_prompt: int = key(4, "images per prompt; diversity needs two", "images", ge=2)
    steps: int | None = key(None, "sampling steps; null: rollout.steps", "steps", ge=1)
    features: str = key(
        "auto", "feature space of diversity: pixels, clip (the playground's) or a vision model's hub id"
    )
    divgen: int | None = key(
        None,
        "DivGenBench's small version (64 prompts) after every so many epochs, and before the first and after the last; "
        "null: never",
        "epochs",
        ge=1,
    )


class GuardRails(Section):
    evaluations: int | None = key(
        3,
        "alarm when what is trained rises and a watched value is worse than its best in so many evaluations in a row; "
        "null: never",
        "evaluations",
        ge=1,
    )
    diversity: Share | None = key(0.5, "alarm below this share of the base model's diversity; null: never")
    saturation: bool = key(True, "alarm when the mean saturation leaves what the base model's images have")
    stop: bool = key(False, "end the run at an alarm; RUN_DIR/healthy is the LoRA of the last evaluation without one")


class Checkpoint(Section):
    every: int = key(1, "save after every so many epochs, and after the last", "epochs", ge=1)
    keep: int = key(2, "how many of the newest are kept", "checkpoints", ge=1)


class Tracking(Section):
    wandb: bool = key(False, "also log to Weights & Biases (extra: diffrl[wandb]); WANDB_MODE=offline works")
    tensorboard: bool = key(False, "also write TensorBoard files to RUN_DIR (extra: diffrl[tensorboard])")
    samples: int = key(8, "test prompts that are drawn with fixed seeds at every evaluation; 0: none", "images", ge=0)


class Config(Section):
    """A whole run. Made by `load_config`, which checks that the values work together."""

    model: PathText = key("playground", '"playground", a folder in diffusers\' format, or a hub id such as org/name')
    prompts: Prompts = section(Prompts, "what to draw")
    seed: int = key(0, "seed of everything random", ge=0)
    epochs: int = key(40, "rounds of sampling, scoring and optimising", "epochs", ge=1)
    run_dir: PathText = key("", "folder of the run; the default is runs/NAME, NAME being the config file's")
    lora: Lora = section(Lora, "the trained low-rank update")
    rollout: Rollout = section(Rollout, "how an epoch's images are drawn")
    rewards: dict[str, Reward] = key({}, "what is optimised: NAME: {weight, ...}; at least one")
    watch: dict[str, Reward] = key({}, "what is scored in evaluations and never optimised: NAME: {...}")
    objective: str = key("nft", "how scores become a loss; its section below has its keys")
    nft: NFT = section(NFT, "DiffusionNFT (arXiv 2509.16117)")
    grpo: GRPO = section(GRPO, "Flow-GRPO (arXiv 2505.05470)")
    crd: CRD = section(CRD, "centered reward distillation (arXiv 2603.14128)")
    gardo: GARDO | None = key(None, "GARDO around the objective (arXiv 2512.24138); present = on")
    direct: Direct = section(Direct, "back-propagation of a differentiable reward (D2-Align, arXiv 2512.24146)")
    d2align: D2Align | None = key(
        None, "D2-Align: correct a reward by a direction in its text space (arXiv 2512.24146); present = on"
    )
    marble: Marble | None = key(None, "MARBLE, rewards balanced by their gradients (arXiv 2605.06507); present = on")
    optimise: Optimise = section(Optimise, "the optimiser")
    engine: Engine = section(Engine, "faster or smaller forms of the same computation")
    evaluate: Evaluate = section(Evaluate, "measuring on held-out prompts")
    guard: GuardRails = section(GuardRails, "alarms against reward hacking, in every evaluation")
    checkpoint: Checkpoint = section(Checkpoint, "what a killed run continues from")
    tracking: Tracking = section(Tracking, "logs beside metrics.jsonl")

    @property
    def objective_section(self) -> Objective:
        """The section of the chosen objective."""
        return getattr(self, self.objective)

    def resolved(self) -> dict[str, Any]:
        """Every value as plain YAML types, methods that are off left out: reading this again gives the same config."""
        values = self.model_dump(mode="json")
        return {name: value for name, value in values.items() if value is not None}


def section_type(annotation: Any) -> type[BaseModel] | None:
    """The class behind `Name`, `Name | None` or a table of `Name`; None for a plain value."""
    for kind in (annotation, *typing.get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


OBJECTIVES = [
    name for name, field in Config.model_fields.items() if hasattr(section_type(field.annotation), "trained_steps")
]
TABLES = [name for name, field in Config.model_fields.items() if typing.get_origin(field.annotation) is dict]


def walk(
    kind: type[BaseModel] | None = None, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo, type[BaseModel] | None]]:
    """(dotted key, field, its section's class or None) of all sections and keys; a table's are under `rewards.NAME`."""
    for name, field in (kind or Config).model_fields.items():
        inner = section_type(field.annotation)
        yield prefix + name, field, inner
        if inner is not None:
            yield from walk(inner, f"{prefix}{name}.NAME." if name in TABLES else f"{prefix}{name}.")


def is_section(path: tuple[str, ...]) -> bool:
    """Whether a key holds keys of its own: `rollout`, `nft.old`, `rewards`, `rewards.clip`, `rewards.clip.params`."""
    kind: type[BaseModel] | None = Config
    annotation: Any = None
    for name in path[:1] + path[2:] if path[0] in TABLES else path:
        field = kind.model_fields.get(name) if kind else None
        if field is None:
            return False
        annotation = field.annotation
        kind = section_type(annotation)
    return kind is not None or typing.get_origin(annotation) is dict
