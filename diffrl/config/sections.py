"""The plain sections of every config, from prompts to tracking."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FiniteFloat, PlainSerializer, PlainValidator, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from diffrl.config.base import PAIR, Base, PathText, Problem, PromptSource, Resolution, Section, Share, key, section
from diffrl.config.methods import ForwardProcess
from diffrl.errors import UserError
from diffrl.plugins import load
from diffrl.sampling import SamplerSpec


class Prompts(Section):
    train: PromptSource = key(
        "playground/compositional/train",
        "prompts to train on: playground/SUBSET/SPLIT, a set of `diffrl prompts list`, FILE.txt, FILE.jsonl or "
        "hub:OWNER/NAME[:split[:column]]; or several as {SOURCE: share, ...}, which divide the prompts of every epoch "
        "by their shares",
    )
    test: PromptSource = key("playground/compositional/test", "held-out prompts; needed where train is given")
    overlap: bool = key(False, "allow test prompts that are also trained on; the report says so")


def _told(name: str) -> Callable[[Any], Any]:
    """A validator of `diffrl.config.loras`, loaded where it is needed."""

    def validate(value: Any) -> Any:
        from diffrl.config import loras

        try:
            return getattr(loras, name)(value)
        except UserError as error:
            raise PydanticCustomError("loras", "{text}", {"text": str(error)}) from None

    return validate


def _by_layer(value: Any, check: Callable[[Any], Any]) -> Any:  # {default: number, word in layers' names: number}
    if not isinstance(value, dict):
        return check(value)
    if "default" not in value or not all(isinstance(word, str) for word in value):
        raise PydanticCustomError("loras", "expected a number, or default: NUMBER and WORD: NUMBER for some layers")
    return {word: check(one) for word, one in value.items()}


BY_LAYER = (WrapValidator(_by_layer), PlainSerializer(lambda value: value))


class Lora(Section):
    rank: Annotated[int, *BY_LAYER] = key(
        32, "of the update; rank and alpha by words in layers' names: {default: 16, ff: 4}", ge=1, le=8192
    )
    alpha: Annotated[FiniteFloat, *BY_LAYER] = key(
        64, "the update is scaled by alpha / rank; by layers as `rank`", gt=0, le=10**5
    )
    kind: Annotated[str, BeforeValidator(_told("kind_of"))] = key(
        "lora", "lora, rslora (alpha / sqrt(rank)), dora; + how A begins: gaussian, kaiming, orthogonal"
    )
    targets: Annotated[list[str] | None, BeforeValidator(_told("targets_of"))] = key(
        None, "adapted layers: attention+mlp, or a list of ends of names and patterns; null: attention, and `start`'s"
    )
    start: PathText | None = key(
        None,
        "the LoRA that training begins as, exactly: a run, folder, file or OWNER/NAME[@REVISION][:FILE]; of a larger "
        "`rank` the rest begins without effect",
    )
    merge: Annotated[list[str], BeforeValidator(_told("merged"))] = key(
        [], "LoRAs that become part of the frozen weights first: LORA, LORA=WEIGHT or {file: LORA, weight: NUMBER}"
    )
    reference: Literal["start", "base"] = key(
        "start", "what penalties and references compare with: the model as training begins, or without `start`, `merge`"
    )

    def check(self, config: Any) -> None:
        ranks = self.rank.values() if isinstance(self.rank, dict) else [self.rank]
        if "orthogonal" in self.kind and (config.optimise.precision != "fp32" or any(rank % 2 for rank in ranks)):
            raise Problem("lora.kind", "orthogonal begins without effect at even ranks and in fp32 only; use kaiming")

    def contents(self, config: Any) -> Mapping[str, Path | str]:
        if self.start is None and not self.merge:
            return {}
        from diffrl.lora_files import lora_file, weighted

        named = {f"lora.merge (file {number})": weighted(one)[0] for number, one in enumerate(self.merge, 1)}
        named |= {} if self.start is None else {"lora.start (file)": self.start}
        return {key: lora_file(name) for key, name in named.items()}


class ScoutSection(Section):
    """Sol-RL's scouts (arXiv 2604.06916)."""

    images: int = key(96, "candidates of each prompt; rollout.group_size of them are drawn in full", "images", ge=2)
    steps: int = key(6, "sampling steps of a candidate", "steps", ge=1)

    def check_with(self, config: Any) -> None:
        """Raise Problem where candidates would say nothing of the images, or nothing reads what they say."""
        from diffrl.rewards.registry import declares

        rollout, where = config.rollout, "rollout.scout"
        if rollout.facts.stochastic:
            text = f'"{rollout.sampler}" draws noise on the way, of which the candidates of {where} say nothing'
            raise Problem("rollout.sampler", f"{text}: use dpm2 or euler")
        if config.method.advantages == "none":
            raise Problem(where, f'objective "{config.method.name}" compares no images of a group: leave it out')
        if self.images < rollout.group_size:
            text = f"{self.images} candidates for groups of {rollout.group_size} (rollout.group_size)"
            raise Problem(f"{where}.images", text)
        if self.steps > rollout.steps:
            text = f"{self.steps} steps of a candidate, but an image has {rollout.steps} (rollout.steps)"
            raise Problem(f"{where}.steps", text)
        for name, entry in config.rewards.items():
            if declares(entry.plugin or name, "groupwise"):
                raise Problem(where, f'the reward "{name}" judges whole groups, and scouts are judged one by one')
            if entry.offload == "apart":
                text = "apart: it scores after the sampling, and scouts are scored before it; true"
                raise Problem(f"rewards.{name}.offload", text)


class Rollout(SamplerSpec):
    """With what `SamplerSpec` has: a rollout reads this very section."""

    groups: int = key(48, "prompts per epoch, over all processes", "prompts", ge=1)
    group_size: int = key(24, "images per prompt (the group that advantages compare)", "images", ge=2)
    batch_size: int = key(32, "images per forward, on each process", "images", ge=1)
    resolution: Resolution | None = key(
        None, "side of square images, or [width, height]; null: the model's own", "pixels"
    )
    scout: ScoutSection | None = key(
        None,
        "images are the best and the worst of many that few steps show, drawn again in full (Sol-RL 2604.06916); "
        "present = on",
    )

    @property
    def images(self) -> int:
        """Images of an epoch, over all processes."""
        return self.groups * self.group_size

    @property
    def candidates(self) -> int:
        """Images of an epoch that are drawn by few steps, to choose from."""
        return 0 if self.scout is None else self.groups * self.scout.images

    def check(self, config: Any) -> None:
        self.check_sampling()
        if self.scout is not None:
            self.scout.check_with(config)


class Average(Section):
    decay: Share = key(0.9, "how much of it stays at a step; 0: none, and the trained LoRA itself is evaluated")
    every: int = key(1, "the average takes in every so many-th step (Flow-GRPO: 8)", "optimiser steps", ge=1)
    warmup: bool = key(False, "the decay is at most (1 + step) / (10 + step), as in the released trainers")

    @model_validator(mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        return {"decay": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


def _micro_batch(value: Any) -> Any:
    rows, share = type(value) is int and value >= 1, type(value) is float and 0 < value < 1
    if not (rows or share or value in (None, "auto")):
        text = "a whole number of at least 1, a share between 0 and 1, auto, or null"
        raise PydanticCustomError("micro_batch", text)  # type: ignore[arg-type]
    return value


MicroBatch = Annotated[int | float | Literal["auto"] | None, PlainValidator(_micro_batch)]


class Optimise(Section):
    learning_rate: FiniteFloat = key(3e-4, "AdamW's step size, about how far a weight moves in a step", ge=1e-12, le=1)
    schedule: Literal["constant", "linear", "cosine"] = key(
        "constant", "the learning rate after its warm-up: as it is, or falling to 0 at the last of the run's epochs"
    )
    warmup: int = key(0, "steps over which the learning rate rises to its value", "optimiser steps", ge=0)
    batch_size: int = key(
        576, "images per optimiser step over all processes, each with all its timesteps", "images", ge=1
    )
    micro_batch: MicroBatch = key(
        0.0625,
        "rows (images x trained timesteps) of a micro-batch at most, or a share of a process's in an optimiser step; "
        "auto: what the free memory holds, 64 at most, recorded in the run's config.yaml; null: all at once",
        "rows",
    )
    inner_epochs: int = key(1, "passes over an epoch's images", "passes", ge=1)
    noise: Literal["fresh", "path"] = key(
        "fresh",
        "in images that are noised again: fresh; path: what the sampler's own path implies, so that the states "
        "are those that it passed; of an image set's pictures the path is found by inversion (InPO)",
    )
    max_grad_norm: FiniteFloat = key(1.0, "gradients are scaled down to this norm", ge=1e-6, le=1e6)
    precision: Literal["fp32", "bf16", "fp16"] = key(
        "fp32", "of the frozen weights and the forwards; LoRA stays in fp32"
    )
    gradient_checkpointing: bool = key(
        False, "recompute activations in the backward pass: less memory, one forward more"
    )
    ema: Average = section(Average, "the averaged LoRA that is evaluated; a number is its decay")
    betas: Annotated[tuple[Share, Share], PAIR] = key((0.9, 0.999), "AdamW's decays of the two moments")
    weight_decay: FiniteFloat = key(1e-4, "AdamW's weight decay", ge=0)

    def check(self, config: Any) -> None:
        if self.warmup and self.warmup >= (total := config.epochs * config.optimiser_steps):
            raise Problem("optimise.warmup", f"{self.warmup} optimiser steps, but the whole run has {total}")
        if self.noise == "path":
            self._check_path(config)

    def _check_path(self, config: Any) -> None:
        section, rollout, where = config.objective_section, config.rollout, "optimise.noise"
        if not isinstance(section, ForwardProcess):
            raise Problem(where, f'"path" is for noised images, and objective "{config.method.name}" trains on none')
        if getattr(section, "timestep_sampling", "schedule") != "schedule":
            raise Problem(
                where, f'"path" has the schedule\'s states alone: {config.method.name}.timestep_sampling: schedule'
            )
        if rollout.stochastic_steps or rollout.tail is not None:
            raise Problem(
                where, f'"path" needs the states of an ODE, and "{rollout.sampler}" draws noise: use dpm2 or euler'
            )


class Engine(Section):
    attention: str = key("native", "attention kernel, by diffusers' names: native (torch's own), flash, ...")
    compile: bool = key(False, "torch.compile of the network's repeated blocks: minutes at the start, then faster")
    base: Base = key(
        "full",
        "the frozen weights of the network's blocks: int8 and fp8 take half of bf16's memory, nf4 (bitsandbytes; "
        "extra: diffrl[8bit]) a quarter; the LoRA and the arithmetic stay as they are",
    )
    optimiser: Literal["adamw", "adamw8bit"] = key(
        "adamw", "adamw8bit: moments of large matrices in 8 bits (bitsandbytes; extra: diffrl[8bit])"
    )
    tf32: bool | None = key(
        None,
        "on CUDA compute fp32 products, the autoencoder's too, in TF32: faster, with 10 bits of mantissa instead of "
        "23; null: as Flow-GRPO's code, unless optimise.precision is fp32",
    )
    deterministic: bool = key(
        False, "kernels that give the same bits each time, slower: on a GPU a resume is exact only with them"
    )
    encoders: Literal["beside", "apart"] = key(
        "beside", "apart: the network waits in main memory while the text encoders are on the device: two copies of it"
    )
    decode: int | None = key(None, "images decoded at a time; null: as many as make 2 megapixels", "images", ge=1)
    tile_vae: bool = key(False, "decode in overlapping tiles: less memory above 512 pixels, seams may show")

    def check(self, config: Any) -> None:
        if self.base != "full":
            if self.compile:
                text = f'"{self.base}" with engine.compile: not tried together; leave one of them out'
                raise Problem("engine.base", text)
            if text := self.refusal_of_base(config.optimise.precision):
                raise Problem("engine.base", text)
        if self.optimiser == "adamw8bit" and importlib.util.find_spec("bitsandbytes") is None:
            raise Problem("engine.optimiser", '"adamw8bit" needs bitsandbytes: pip install "diffrl[8bit]"')

    def refusal_of_base(self, precision: str, device: str = "") -> str:
        """What `base` itself says against this precision and type of device; "" where nothing does."""
        refusal = getattr(load("engine.base", self.base), "refusal", None) if self.base != "full" else None
        return str(refusal(precision, device)) if refusal is not None else ""


class Checkpoint(Section):
    every: int = key(1, "save after every so many epochs, and after the last", "epochs", ge=1)
    keep: int = key(2, "how many of the newest are kept", "checkpoints", ge=1)
    push: str | None = key(
        None,
        "OWNER/NAME of a model on the hub, made private if it is not there, to which the run is sent after every "
        "evaluation; or an address (s3://, gs://, ...), after every save. It continues anywhere with --resume "
        "hub:OWNER/NAME, or with the address; a failed push is reported, and the run continues",
    )

    def check(self, config: Any) -> None:
        from diffrl.hub import not_name

        if self.push is None or re.fullmatch(r"(?!https?:)[a-z0-9+.-]+://.+/.+", self.push):
            return
        if wrong := not_name(self.push):
            raise Problem("checkpoint.push", f'"{self.push}": {wrong}, or an address such as s3://BUCKET/NAME')


class Tracking(Section):
    trackers: list[str] = key(
        [],
        "who gets the numbers, too: wandb (WANDB_MODE=offline works) and tensorboard, images with them; trackio, "
        "swanlab, mlflow, aim, comet_ml, clearml, dvclive",
    )
    samples: int = key(8, "test prompts that are drawn with fixed seeds at every evaluation; 0: none", "images", ge=0)
    groups: int = key(
        0, "of the newest epoch's groups, how many RUN_DIR/groups keeps with their scores, for `diffrl watch`", ge=0
    )
