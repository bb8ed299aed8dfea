"""Every key of a config: its type, default, meaning and unit; the methods' sections are in `diffrl.config.methods`.

The class `Config` is the one table of sections. A new objective is a section with `trained_steps`, and one line in the
table; a method that wraps objectives is a section, and one line `name: Name | None = key(None, ...)` (present = on).
What a section needs of the rest of the config, it says in its own `check`.
"""

from __future__ import annotations

import importlib.util
import math
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, FiniteFloat, ValidationError
from pydantic.fields import FieldInfo

from diffrl.config.base import (
    PAIR,
    QUIET_STEPS,
    PathText,
    Problem,
    PromptSource,
    Resolution,
    Section,
    Share,
    key,
    section,
)
from diffrl.config.caching import CacheSection
from diffrl.config.credit import BranchesSection, DenseSection, TreeSection
from diffrl.config.estimates import Advantages
from diffrl.config.explain import explain
from diffrl.config.measuring import Evaluate, GuardRails
from diffrl.config.methods import CRD, GARDO, GRPO, NFT, D2Align, Direct, Marble, Objective
from diffrl.config.preferences import DPO, GDRO, PRDP, RWR, SFT
from diffrl.config.rehearsal import RehearsalSection
from diffrl.config.reward import Reward
from diffrl.errors import UserError

UP_TO_ONE = ("cps", "renoise", "ddim")  # whose noise level is a share


class Prompts(Section):
    train: PromptSource = key(
        "playground/compositional/train",
        "prompts to train on: playground/SUBSET/SPLIT, a set of `diffrl prompts list`, FILE.txt, FILE.jsonl or "
        "hub:OWNER/NAME[:split[:column]]; or several as {SOURCE: share, ...}, which divide the prompts of every epoch "
        "by their shares",
    )
    test: PromptSource = key("playground/compositional/test", "held-out prompts; needed where train is given")
    overlap: bool = key(False, "allow test prompts that are also trained on; the report says so")


class Lora(Section):
    rank: int = key(32, "rank of the update, at most the width of a large network", ge=1, le=8192)
    alpha: FiniteFloat = key(64, "the update is scaled by alpha / rank", gt=0, le=10**5)
    targets: list[str] | None = key(None, "names of the adapted modules; null: the family's attention projections")


class Rollout(Section):
    groups: int = key(48, "prompts per epoch, over all processes", "prompts", ge=1)
    group_size: int = key(24, "images per prompt (the group that advantages compare)", "images", ge=2)
    steps: int = key(10, "sampling steps", "steps", ge=1)
    sampler: Literal["euler", "dpm2", "flow_sde", "dance", "cps", "renoise", "ddim"] = key(
        "dpm2",
        "euler and dpm2 are deterministic; the others are stochastic, as grpo needs; ddim is for models of DDPM type; "
        "renoise, with noise_level 1 (RLCM), for models of few steps",
    )
    guidance_scale: FiniteFloat = key(1.0, "classifier-free guidance; 1 is none, at half the cost", ge=1, le=1000)
    noise_level: FiniteFloat = key(
        0.7, "noise of a stochastic sampler: a of flow_sde, dance, cps and renoise, eta of ddim", ge=0, le=100
    )
    noise_levels: Annotated[tuple[FiniteFloat, ...], PAIR] | None = key(
        None, "one for each step in place of noise_level, the noisiest step first; null: noise_level for all"
    )
    noise_decay: FiniteFloat | None = key(
        None,
        "the noise level falls as a cosine from noise_level at t = 1 to this at t = 0 (HiCoGen); null: it stays",
        ge=0,
    )
    window: int | None = key(
        None, "number of consecutive stochastic steps, the others are Euler's; null: all", "steps", ge=1
    )
    window_range: Annotated[tuple[int, int], PAIR] | None = key(
        None, "[first, end]: drawn anew each epoch, within the steps first to end - 1; null: from step 0", "steps"
    )
    window_move: Annotated[tuple[int, int], PAIR] | None = key(
        None,
        "[every, stride]: not drawn, but after so many epochs so many steps towards clean, then from the start again "
        "(MixGRPO); null: it does not move",
    )
    window_by: Literal["epoch", "group"] = key("epoch", "group: each prompt draws its own window in the range")
    tail: FiniteFloat | None = key(
        None,
        "share of the steps behind the window that are taken (MixGRPO, Flash: 0.4); null: all, Euler's",
        gt=0,
        le=1,
    )
    tail_solver: Literal["dpm2", "euler"] = key("dpm2", "what takes them")
    same_noise: bool = key(False, "the images of a group start from one initial noise")
    batch_size: int = key(32, "images per forward, on each process", "images", ge=1)
    resolution: Resolution | None = key(
        None, "side of square images, or [width, height]; null: the model's own", "pixels"
    )
    cache: CacheSection = section(CacheSection, "parts of its forwards that may be left out")

    @property
    def images(self) -> int:
        """Images of an epoch, over all processes."""
        return self.groups * self.group_size

    @property
    def stochastic_steps(self) -> int:
        """Steps of the window, which draw fresh noise; 0 if the sampler or the noise level is deterministic."""
        return (self.window or self.noisy_steps) if self.noise_level or self.noise_levels else 0

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
                text = f"[{first}, {end}] is not within [0, {self.noisy_steps}]: {limit}"
                raise Problem("rollout.window_range", text)
            if end - first < self.stochastic_steps:
                text = f"[{first}, {end}] is too short for a window of {self.stochastic_steps} steps (rollout.window)"
                raise Problem("rollout.window_range", text)
        self._check_levels()
        self._check_window_moves()
        self.cache.check_with(config)
        if self.same_noise and not self.stochastic_steps:
            text = f"with {self.sampler} at noise level {self.noise_level:g} all images of a group would be the same"
            raise Problem("rollout.same_noise", text)

    def _check_levels(self) -> None:
        if self.noise_levels is None and self.noise_decay is None:
            return
        name = "rollout.noise_decay" if self.noise_levels is None else "rollout.noise_levels"
        if self.sampler not in QUIET_STEPS:
            raise Problem(name, f'the sampler "{self.sampler}" draws no noise: use one of {", ".join(QUIET_STEPS)}')
        if self.noise_levels is not None and self.noise_decay is not None:
            raise Problem("rollout.noise_decay", "rollout.noise_levels says the level of every step already; give one")
        if self.noise_levels is not None and len(self.noise_levels) != self.steps:
            text = f"{len(self.noise_levels)} levels for {self.steps} steps (rollout.steps); give one for each"
            raise Problem(name, text)
        top = 1.0 if self.sampler in UP_TO_ONE else math.inf
        if self.noise_levels is not None and not all(0 < level <= top for level in self.noise_levels):
            raise Problem(name, f"{list(self.noise_levels)}: each must be above 0 and at most {top:g} ({self.sampler})")
        if self.noise_decay is not None and not 0 <= self.noise_decay <= self.noise_level:
            text = f"{self.noise_decay:g} is not within [0, {self.noise_level:g}] (rollout.noise_level)"
            raise Problem(name, text)

    def _check_window_moves(self) -> None:
        if self.window_move is not None:
            every, stride = self.window_move
            if every < 1 or stride < 1:
                raise Problem("rollout.window_move", f"[{every}, {stride}]: both must be at least 1")
            if self.window_by == "group":
                raise Problem("rollout.window_by", '"group" draws the window, and rollout.window_move moves it; choose')
        for name, given in (("window_move", self.window_move), ("tail", self.tail)):
            if given is not None and not self.stochastic_steps:
                raise Problem(f"rollout.{name}", f'the sampler "{self.sampler}" has no stochastic steps, so no window')
        if self.tail is not None and self.window_by == "group":
            raise Problem("rollout.tail", 'needs one window for all images, but rollout.window_by is "group"')
        if self.window_by == "group" and self.stochastic_steps == self.noisy_steps:
            raise Problem("rollout.window_by", '"group" draws a window, but all steps are stochastic (rollout.window)')


class Optimise(Section):
    learning_rate: FiniteFloat = key(3e-4, "AdamW's step size, about how far a weight moves in a step", ge=1e-12, le=1)
    batch_size: int = key(
        576, "images per optimiser step over all processes, each with all its timesteps", "images", ge=1
    )
    accumulation: int = key(
        16, "micro-batches that a process's share of an optimiser step is split into", "micro-batches", ge=1
    )
    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] | None = key(
        None,
        "rows (images x trained timesteps) of a micro-batch at most, instead of accumulation; auto: what the free "
        "memory holds, 64 at most, recorded in the run's config.yaml; null: as accumulation says",
        "rows",
    )
    inner_epochs: int = key(1, "passes over an epoch's images", "passes", ge=1)
    max_grad_norm: FiniteFloat = key(1.0, "gradients are scaled down to this norm", ge=1e-6, le=1e6)
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
    ema: Share = key(0.9, "decay of the averaged LoRA that is evaluated; 0: the trained one itself")
    ema_every: int = key(1, "the average takes in every so many-th step (Flow-GRPO: 8)", "optimiser steps", ge=1)
    ema_warmup: bool = key(False, "the decay is at most (1 + step) / (10 + step), as in the released trainers")
    betas: Annotated[tuple[Share, Share], PAIR] = key((0.9, 0.999), "AdamW's decays of the two moments")
    weight_decay: FiniteFloat = key(1e-4, "AdamW's weight decay", ge=0)


class Engine(Section):
    attention: str = key(
        "native", "attention kernel, by diffusers' names: native (torch's own), flash, ...; auto: the fastest on CUDA"
    )
    compile: bool = key(False, "torch.compile of the network's repeated blocks: minutes at the start, then faster")
    optimiser: Literal["adamw", "adamw8bit"] = key(
        "adamw", "adamw8bit: moments of large matrices in 8 bits (bitsandbytes; extra: diffrl[8bit])"
    )
    tf32: bool = key(False, "on CUDA compute fp32 products in TF32: faster, with 10 bits of mantissa instead of 23")
    deterministic: bool = key(
        False, "kernels that give the same bits each time, slower: on a GPU a resume is exact only with them"
    )
    merge: Literal["exact", "all", "off"] = key(
        "exact",
        "compute with weights that the LoRA is merged into, copies that take the adapted weights' memory twice: exact: "
        "in fp32 only; all: in bf16 and fp16, too, in forwards without gradient, with 1.75 times their rounding error; "
        "off: never",
    )
    offload_vae: bool = key(False, "the autoencoder leaves the device while the LoRA is optimised")
    tile_vae: bool = key(False, "decode in overlapping tiles: less memory above 512 pixels, seams may show")

    def check(self, config: Config) -> None:
        if self.offload_vae and config.objective == "direct":
            raise Problem("engine.offload_vae", 'true, but objective "direct" decodes while it optimises')
        if self.merge == "all" and config.objective == "grpo" and config.optimise.precision != "fp32":
            text = '"all" rounds what is sampled, and the ratios of objective "grpo" would show it; use exact'
            raise Problem("engine.merge", text)
        if self.optimiser == "adamw8bit" and importlib.util.find_spec("bitsandbytes") is None:
            raise Problem("engine.optimiser", '"adamw8bit" needs bitsandbytes: pip install "diffrl[8bit]"')


class Checkpoint(Section):
    every: int = key(1, "save after every so many epochs, and after the last", "epochs", ge=1)
    keep: int = key(2, "how many of the newest are kept", "checkpoints", ge=1)


class Tracking(Section):
    wandb: bool = key(False, "also log to Weights & Biases (extra: diffrl[wandb]); WANDB_MODE=offline works")
    tensorboard: bool = key(False, "also write TensorBoard files to RUN_DIR (extra: diffrl[tensorboard])")
    trackers: list[str] = key(
        [],
        "also through accelerate: trackio, swanlab, mlflow, aim, comet_ml, clearml, dvclive (extra: diffrl[trackers])",
    )
    samples: int = key(8, "test prompts that are drawn with fixed seeds at every evaluation; 0: none", "images", ge=0)


class _OneLine(type(BaseModel)):  # type: ignore[misc]
    """`Config(...)` in a program: a mistake is the same one line as in a file."""

    if not typing.TYPE_CHECKING:  # type checkers read the keys from the class

        def __call__(cls, **values: Any) -> Config:
            try:
                return super().__call__(**values)
            except ValidationError as error:
                text = explain(error, lambda path: "Config", [key for key, _, _ in walk()], [*TABLES, *INNER_TABLES])
                raise UserError(text) from error


class Config(Section, metaclass=_OneLine):
    """A whole run. Made by `load_config`, which checks that the values work together, or in a program by its keys.

    Sections may be given as tables: `Config(epochs=5, rollout={"groups": 8}, rewards={"clip": {"weight": 2.0}})`.
    """

    model: PathText = key("playground", '"playground", a folder in diffusers\' format, or a hub id such as org/name')
    family: PathText | None = key(
        None, "path/to/file.py:Class of a model family of your own; null: by the pipeline's class"
    )
    prompts: Prompts = section(Prompts, "what to draw")
    seed: int = key(0, "seed of everything random", ge=0, le=2**63 - 1)
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
    dpo: DPO = section(DPO, "pairs of a group's best and worst (Diffusion-DPO, arXiv 2311.12908; Flow-DPO, 2501.13918)")
    rwr: RWR = section(RWR, "reward-weighted regression (Flow-RWR, arXiv 2501.13918)")
    sft: SFT = section(SFT, "fine-tuning on the best image of each group")
    gdro: GDRO = section(GDRO, "group-level direct reward optimisation (arXiv 2601.02036)")
    prdp: PRDP = section(PRDP, "proximal reward difference prediction (arXiv 2402.08714)")
    dense: DenseSection | None = key(None, "DenseGRPO: each step's own gain (arXiv 2601.20218); present = on")
    branches: BranchesSection | None = key(
        None, "single steps from one path: G2RPO (arXiv 2510.01982), TempFlow-GRPO (2508.04324); present = on"
    )
    tree: TreeSection | None = key(None, "BranchGRPO: a group is a tree (arXiv 2509.06040); present = on")
    gardo: GARDO | None = key(None, "GARDO around the objective (arXiv 2512.24138); present = on")
    direct: Direct = section(Direct, "back-propagation of a differentiable reward (D2-Align, arXiv 2512.24146)")
    d2align: D2Align | None = key(
        None, "D2-Align: correct a reward by a direction in its text space (arXiv 2512.24146); present = on"
    )
    marble: Marble | None = key(None, "MARBLE, rewards balanced by their gradients (arXiv 2605.06507); present = on")
    advantages: Advantages | None = key(None, "what groups that agree give, and other estimates; present = on")
    penalty: Literal["kl", "chi2", "js"] = key(
        "kl",
        "form of the penalty that beta weighs: kl; chi2 = exp(2 kl) - 1, which holds back what has gone far; js, which "
        "is at most ln 2 and lets it go",
    )
    rehearsal: RehearsalSection | None = key(
        None, "the pretrained model's own images are trained on, too, so that what it knew stays; present = on"
    )
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
        """Every value that has an effect, as plain YAML types: without methods that are off and other objectives.

        Reading this again gives the same config.
        """
        values = self.model_dump(mode="json")
        others = [name for name in OBJECTIVES if name != self.objective]  # whose sections have no effect
        return {name: value for name, value in values.items() if value is not None and name not in others}


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
            named = typing.get_origin(field.annotation) is dict
            yield from walk(inner, f"{prefix}{name}.NAME." if named else f"{prefix}{name}.")


INNER_TABLES = [  # whose keys are names of the user's, too, but not at the top
    key
    for key, field, inner in walk()
    if inner is not None and "." in key and typing.get_origin(field.annotation) is dict
]


def is_section(path: tuple[str, ...]) -> bool:
    """Whether a key holds keys of its own: `rollout`, `nft.old`, `rewards`, `rewards.clip`, `rewards.clip.params`."""
    kind: type[BaseModel] | None = Config
    annotation: Any = None
    for name in path:
        if typing.get_origin(annotation) is dict and kind is not None:  # of a table: a name of the user's
            annotation = kind
            continue
        field = kind.model_fields.get(name) if kind else None
        if field is None:
            return False
        annotation = field.annotation
        kind = section_type(annotation)
    return kind is not None or typing.get_origin(annotation) is dict
