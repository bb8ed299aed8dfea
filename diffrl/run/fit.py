"""Does a config fit into memory? The real modules run on fake tensors: shapes flow, nothing is computed or stored.

So every family, resolution, LoRA and option is counted as it is, on any machine: the largest sum of bytes that are
alive at one time in a rollout's forward, a decoding and a training micro-batch. What is not seen: the allocator's gaps,
the device's own context, and the rewards. The arithmetic of an epoch is counted in the same way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import psutil
import torch
import transformers
from accelerate import Accelerator
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from diffrl.config import Config
from diffrl.errors import UserError
from diffrl.policy import PRECISIONS, find_family, find_model
from diffrl.policy.base import decoded_at_once
from diffrl.policy.fused import Fused
from diffrl.policy.lora import find_layers
from diffrl.policy.merged import KEPT
from diffrl.policy.pipelines import settings_of
from diffrl.resources import shipped
from diffrl.run.buffers import Alive, held
from diffrl.run.layout import Layout, pretend
from diffrl.run.parts import build_objective
from diffrl.trainers.algorithm import Objective
from diffrl.trainers.microbatches import AUTO_ROWS, holds_groups, part_sizes

GIB = 2**30
CONTEXT = GIB // 2  # of a CUDA process before its first tensor, roughly
SLACK = 1.1  # the allocator's gaps
EPOCH = "the epoch's latents, steps and texts"
MERGED = f"merged weights, {KEPT} of them"
TOKENS = 77  # CLIP's, unless a tokenizer's config says otherwise


@dataclass(frozen=True)
class Fit:
    """Bytes. `parts` are on the device all the time; `peaks` come on top of them, one at a time."""

    parts: Mapping[str, int]
    peaks: Mapping[str, int]
    rows: int  # of a training micro-batch
    host: int  # of main memory: text encoders, what else waits there; as pages of files processes share it
    work: Mapping[str, float]  # floating-point operations of an epoch by phase, text encoders and rewards left out

    @property
    def total(self) -> int:
        """What a device should have free."""
        return CONTEXT + int(SLACK * (sum(self.parts.values()) + max(self.peaks.values())))


def advise(
    config: Config, free: int, world: int = 1, fit: Fit | None = None, sharded: bool = False
) -> tuple[Fit, list[str]] | None:
    """What to change so that the config fits into `free` bytes, as overrides (none if it fits); None: nothing helps.

    Nothing of it changes what is learned: activations recomputed, more and smaller micro-batches, smaller forwards.
    `fit`: the config's estimate, if it is known.
    """
    changed: dict[str, Any] = {}
    fit = estimate(config, world, sharded) if fit is None else fit
    while fit.total > free:
        optimise, worst = config.optimise, max(fit.peaks, key=fit.peaks.__getitem__)
        key: str = ""
        value: int | str = 0
        if worst.startswith("training") and not optimise.gradient_checkpointing:
            key, value = "optimise.gradient_checkpointing", True
        elif worst.startswith("training") and fit.rows > 1:
            key, value = "optimise.accumulation", optimise.accumulation * (2 if fit.rows % 2 == 0 else fit.rows)
            if optimise.micro_batch is not None:
                key, value = "optimise.micro_batch", fit.rows // 2
        elif worst == "encoding" and config.engine.encoders == "beside" and not sharded:
            key, value = "engine.encoders", "apart"
        elif worst == "decoding" and config.engine.decode != 1:
            key, value = "engine.decode", 1
        elif worst.startswith("sampling") and config.rollout.batch_size > 1:  # on a student, too
            key, value = "rollout.batch_size", config.rollout.batch_size // 2
        if not key:
            return None
        section, name = key.split(".")
        update = getattr(config, section).model_copy(update={name: value})
        config, changed[key] = config.model_copy(update={section: update}), value
        touched = {"optimise": "training", "rollout": "sampling", "engine": "decoding"}[section]
        known = {phase: peak for phase, peak in fit.peaks.items() if not phase.startswith(touched)}
        fit = estimate(config, world, sharded, known)
    return fit, [f"{key}={str(value).lower()}" for key, value in changed.items()]


def estimate(config: Config, world: int = 1, sharded: bool = False, known: Mapping[str, int] | None = None) -> Fit:
    """What one process of `world` needs for this config. Only configs of the model are read, no weights.

    `sharded`: FSDP2 spreads the network over them; the block that runs is whole, and so is the next one on its way.
    `known`: peaks of phases that are not to be measured again; then only memory is counted, and `work` is empty.

    Raises UserError as loading the model would.
    """
    backbone = hollow_backbone(config)
    lora, fused = _with_lora(backbone, config)
    compiled, merge = config.engine.compile, config.engine.merge  # what is compiled does not merge
    fused.merging, fused.lossy = merge != "off" and not (compiled or (sharded and world > 1)), merge == "all"
    objective = build_objective(config, config.rollout, {})
    copies = 1 + len(objective.snapshots) + len(objective.frozen) + bool(config.optimise.ema)
    frozen, whole = _bytes(backbone.network) - lora, 0
    if sharded and world > 1:
        kinds = getattr(backbone.network, "_no_split_modules", None) or ()
        whole = 2 * max((_bytes(m) for m in backbone.network.modules() if type(m).__name__ in kinds), default=0)
    parts = {
        "network": frozen if not whole else frozen // world + whole,
        "autoencoder": _bytes(backbone.vae),
        f"LoRA, {copies} of them": copies * lora,
        "gradient and Adam's moments": 3 * lora,
    }
    steps = config.objective_section.trained_steps(config.rollout)
    sizes = micro_batches(config, world, objective.whole_groups)
    rows = max(sizes)
    guided = backbone.classifier_free and config.rollout.guidance_scale != 1
    batch = config.rollout.batch_size * (2 if guided else 1)
    trained = rows * (2 if backbone.classifier_free and objective.guidance_scale != 1 else 1)
    epoch = config.rollout.images // config.optimise.batch_size * config.optimise.inner_epochs
    split = any(size % config.rollout.group_size for size in sizes)
    forwards = silent_forwards(objective, backbone.classifier_free, split, epoch)
    # Forwards of the snapshot and the reference come while the graph waits; before it come GARDO's gated ones, and
    # those that measure a coupled objective's step.
    gated = config.gardo is not None and config.gardo.gate != "all"
    beside = objective.penalty.beta if hasattr(objective, "coupling") else forwards
    silent_too = beside > 0 and not gated
    if config.optimise.gradient_checkpointing:
        backbone.network.enable_gradient_checkpointing()
    with _counting(backbone):
        kept = fused.prepare(PRECISIONS[config.optimise.precision]) if fused.merging else []
        if kept:
            parts[MERGED] = KEPT * sum(tensor.nbytes for tensor in kept)
        phases: dict[str, Callable[[], None]] = {
            f"sampling {batch} rows": partial(_forward, backbone, config, batch, train=False),
            "decoding": partial(_decode, backbone, config),
            f"training {trained} rows": partial(_forward, backbone, config, trained, train=True, silent=silent_too),
        }
        old = known or {}
        peaks = {name: old[name] if name in old else _peak(backbone, phase, kept) for name, phase in phases.items()}
        alone = partial(_forward, backbone, config, trained, train=True)
        plain: list[Callable[[], None]] = [*list(phases.values())[:2], alone]
        sampling, decoding, training = (0 if known else _operations(phase) for phase in plain)
    # What an epoch keeps, beside what a phase needs itself: known peaks have it already.
    text = backbone.blank(1, PRECISIONS[config.optimise.precision]).nbytes
    kept_by_epoch = held(config, backbone, objective, lora, text, world)
    parts[EPOCH] = kept_by_epoch.always
    for name in peaks.keys() - old.keys():
        peaks[name] += getattr(kept_by_epoch, name.split()[0])
    waits = parts["network"] + parts.get(MERGED, 0) if config.engine.encoders == "apart" else 0
    peaks["encoding"] = sum(_bytes(encoder) for encoder in backbone.text_encoders) - waits
    images, passes = config.rollout.images / world, config.optimise.inner_epochs * steps
    silent = sampling / batch * forwards
    if config.method.decodes:  # every row is decoded, too, and its gradient comes back through the decoder
        silent += 2 * decoding / _chunk(backbone, config)
    work = {
        "sampling": images * config.rollout.steps * sampling / config.rollout.batch_size,
        "decoding": images * decoding / _chunk(backbone, config),
        "training": images * passes * objective.share(config.rollout.group_size) * (training / rows + silent),
    }
    # The network lies there before it is spread over devices, and while encoders take its place.
    below = frozen if whole or waits else 0
    host = below + sum(_bytes(encoder) for encoder in backbone.text_encoders) + _add_students(config, peaks)
    return Fit(parts, peaks, rows, host, {} if known else work)


def _add_students(config: Config, peaks: dict[str, int]) -> int:
    """What the models of `evaluate.also` need, put into `peaks`; what of them is in main memory."""
    host = 0
    for name, section in config.evaluate.also.items():
        rollout = config.rollout.model_copy(update={"guidance_scale": section.guidance_scale})
        update = {"model": section.base(config.model), "rollout": rollout}
        own = config.model_copy(update=update)
        backbone = hollow_backbone(own)
        _, fused = _with_lora(backbone, own)
        weights = _bytes(backbone.network) + _bytes(backbone.vae)
        fused.merging, fused.lossy = config.engine.merge != "off", config.engine.merge == "all"
        rows = config.rollout.batch_size * (2 if backbone.classifier_free and section.guidance_scale != 1 else 1)
        with _counting(backbone):
            kept = fused.prepare(PRECISIONS[config.optimise.precision]) if fused.merging else []
            phases = (partial(_forward, backbone, own, rows, train=False), partial(_decode, backbone, config))
            peak = max(_peak(backbone, phase, kept) for phase in phases) + KEPT * sum(tensor.nbytes for tensor in kept)
        peaks[f"sampling {rows} rows on {name}"] = peak + weights
        host += sum(_bytes(encoder) for encoder in backbone.text_encoders) + weights
    return host


def micro_batches(config: Config, world: int, whole_groups: bool) -> list[int]:
    """Rows of the micro-batches of an optimiser step on each of `world` processes."""
    optimise, group = config.optimise, config.rollout.group_size
    here = optimise.batch_size // world
    most = AUTO_ROWS if optimise.micro_batch == "auto" else optimise.micro_batch
    rows = here * config.objective_section.trained_steps(config.rollout)
    return part_sizes(rows, optimise.accumulation, most, holds_groups(here, group, whole_groups))


def auto_micro_batch(config: Config, device: torch.device, accelerator: Accelerator, sharded: bool = False) -> Config:
    """The config with a number in the place of `optimise.micro_batch: auto`, the same on all processes.

    As many rows as four fifths of the free memory hold by the estimate, beside what is loaded already.
    """
    if config.optimise.micro_batch != "auto":
        return config
    free, world = 0.8 * free_bytes(device), accelerator.num_processes

    def training(rows: int) -> tuple[Config, float]:
        optimise = config.optimise.model_copy(update={"micro_batch": rows})
        tried = config.model_copy(update={"optimise": optimise})
        fit = estimate(tried, world, sharded)
        peak = max(size for name, size in fit.peaks.items() if name.startswith("training"))
        to_come = fit.parts["network"] if sharded and world > 1 else 0  # it is shared out later
        return tried, SLACK * (peak + fit.parts[EPOCH] + to_come)

    found, needed = training(AUTO_ROWS)
    rows = AUTO_ROWS if needed <= free else max(int(AUTO_ROWS * free / needed), 1)
    rows = int(accelerator.gather(torch.tensor([rows], device=accelerator.device)).min())
    return found if rows == AUTO_ROWS else training(rows)[0]


def free_bytes(device: torch.device) -> int:
    """Of the device; of the machine for the CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def silent_forwards(objective: Objective, classifier_free: bool, split: bool, steps: int) -> float:
    """Forwards without gradient for each training row: the objective's own, and those of what its penalty refers to."""
    penalty, passes = objective.penalty, list(objective.silent(split, steps))
    if penalty.beta:
        own = None if penalty.reference is not None else penalty.guidance
        passes.append((penalty.share, objective.guidance_scale if own is None else own))
    return sum(count * (2 if classifier_free and guidance != 1 else 1) for count, guidance in passes)


def architecture(model: str) -> Path | None:
    """The shipped configs of a hub's model (`assets/architectures`), which need no hub; None for other models."""
    folder = shipped("assets", "architectures", model.rpartition("/")[2])
    hub = model.count("/") == 1 and not Path(model).expanduser().is_dir()
    return folder if hub and (folder / "model_index.json").is_file() else None


def hollow_backbone(config: Config) -> Any:
    """The family's backbone over modules without weights (on the meta device), from the model's configs."""
    shape = architecture(config.model)
    source, index = find_model(config.model if shape is None else str(shape))
    pipe = made_pipeline(source, index, PRECISIONS[config.optimise.precision])
    family = find_family(str(index["_class_name"]), config.family)
    length = settings_of(source).get("max_sequence_length")
    backbone = family(pipe, config.rollout.resolution, length)
    for module in (backbone.network, backbone.vae, *backbone.text_encoders):
        module.requires_grad_(False).eval()  # as a policy does: the layout of some depends on it
    return backbone


def made_pipeline(
    source: str, index: Mapping[str, Any], dtype: torch.dtype, device: torch.device | str = "meta", texts: bool = True
) -> Any:
    """What stands for a pipeline: modules made from a folder's configs, `index` being its model_index.json.

    On the meta device they have no weights, on another one random ones. `texts`: with the text encoders.
    """
    entries = {name: entry for name, entry in index.items() if isinstance(entry, list)}
    wanted = {name: entry for name, entry in entries.items() if texts or not name.startswith("text_encoder")}
    return SimpleNamespace(
        **{name: _component(source, name, entry, dtype, device) for name, entry in wanted.items()},
        config=SimpleNamespace(**{name: value for name, value in index.items() if name not in entries}),
        tokenizer_max_length=get_tokenizer_config(source, subfolder="tokenizer").get("model_max_length", TOKENS),
    )


def _component(source: str, name: str, entry: list[str | None], dtype: torch.dtype, device: torch.device | str) -> Any:
    """One entry of model_index.json, made from its config; None for what has no weights."""
    library, kind = entry
    if library == "diffusers" and kind is not None:
        made: Any = getattr(diffusers, kind)
        config = made.load_config(source, subfolder=name)
        if name == "scheduler":
            return made.from_config(config)
        upcast = name == "vae" and config.get("force_upcast", kind == "AutoencoderKL")
        with _made_on(device, torch.float32 if upcast else dtype):
            return made.from_config(config)
    if library == "transformers" and kind is not None and name.startswith("text_encoder"):
        made = getattr(transformers, kind)
        with _made_on(device, dtype):
            return made(made.config_class.from_pretrained(source, subfolder=name))
    return None


@contextmanager
def _made_on(device: torch.device | str, dtype: torch.dtype) -> Iterator[None]:
    """Modules that are made inside have weights of this type there; on the meta device none of them exist."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _counting(backbone: Any) -> Iterator[None]:
    """Inside, network and autoencoder are of fake tensors, and whatever is made of floats is fake, too.

    Raises UserError for a network that its family says cannot be counted so.
    """
    if not backbone.counted:
        name = type(backbone.network).__name__
        raise UserError(f"model: {name} cannot be counted without weights: its shapes depend on values")
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True), Layout(), backbone.counting():
        warnings.filterwarnings("ignore", "(?i).*data pointer")  # merged weights ask where a tensor lies: nowhere
        for module in (backbone.network, backbone.vae):
            pretend(module)
        yield


def _with_lora(backbone: Any, config: Config) -> tuple[int, Fused]:
    """Give the network its trained LoRA; the LoRA's bytes, and the path that computes with it."""
    targets = backbone.targets if config.lora.targets is None else config.lora.targets
    names = find_layers(backbone.network, targets, backbone.dead_targets)
    spec = LoraConfig(r=config.lora.rank, lora_alpha=int(config.lora.alpha), target_modules=names)
    before = _bytes(backbone.network)
    inject_adapter_in_model(spec, backbone.network)
    layers = {name: layer for name, layer in backbone.network.named_modules() if isinstance(layer, LoraLayer)}
    for layer in layers.values():  # a LoRA is trained in float32, whatever the network's precision
        layer.lora_A.float()
        layer.lora_B.float()
    return _bytes(backbone.network) - before, Fused(backbone.network, layers, ["default"])


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _peak(backbone: Any, phase: Callable[[], None], kept: Sequence[Tensor]) -> int:
    """The most bytes that it needs on top of the modules and of what is kept."""
    with Alive([*backbone.network.parameters(), *backbone.vae.parameters(), *kept]) as alive:
        phase()
    return alive.peak


def _operations(phase: Callable[[], None]) -> int:
    """Its floating-point operations, as torch counts them: those of products and attention, all else is little.

    In a pass of its own: the counter's hooks on modules keep tensors alive, which `Alive` would count.
    """
    with FlopCounterMode(display=False) as counter:
        phase()
    return counter.get_total_flops()


def _forward(backbone: Any, config: Config, rows: int, train: bool, silent: bool = False) -> None:
    """A forward (and its backward) of so many rows; `silent`: with one without gradient in between."""
    dtype = PRECISIONS[config.optimise.precision]
    narrow = nullcontext() if dtype == torch.float32 else torch.autocast("cpu", dtype=dtype)
    with torch.set_grad_enabled(train):
        x, t = torch.empty(rows, *backbone.latent_shape), torch.empty(rows)
        cond = backbone.blank(rows, dtype)
        with narrow:
            output = backbone.forward(backbone.network, x, t, cond, config.rollout.guidance_scale).float()
        prediction = backbone.prediction(x, t, output)
        if silent:
            with torch.no_grad(), narrow:
                output = backbone.forward(backbone.network, x, t, cond, config.rollout.guidance_scale).float()
        if train:
            prediction.v.square().mean().backward()
    for parameter in backbone.network.parameters():
        parameter.grad = None


def _chunk(backbone: Any, config: Config) -> int:
    """How many latents are decoded at a time."""
    _, height, width = backbone.latent_shape
    most = config.engine.decode or decoded_at_once(height, width, backbone.scale)
    return min(most, config.rollout.batch_size)


def _decode(backbone: Any, config: Config) -> None:
    """A chunk of latents decoded."""
    dtype = next(backbone.vae.parameters()).dtype
    with torch.no_grad():
        rows = _chunk(backbone, config)
        latents = backbone.to_vae(torch.empty(rows, *backbone.latent_shape)).to(dtype)
        backbone.from_vae(backbone.vae.decode(latents, return_dict=False)[0])
