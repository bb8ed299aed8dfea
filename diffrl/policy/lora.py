"""LoRA snapshots: several peft adapters on one network, one of them trained; their files in diffusers' format.

Symbols: r rank, A (r, in) and B (out, r) of one layer; the layer computes `W x + alpha / r * B A x` (LoRA, 2106.09685).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from diffrl.errors import UserError, nearest
from diffrl.policy.fused import Fused

TRAINED, BASE = "default", "base"
PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")  # of a layer
LARGEST_ALPHA = 1e6  # far beyond any that trains, and far from where its products overflow
# Feed-forward layers of a block, and of FLUX's single blocks, whose last projection is also the attention's. Not
# HiDream's routed experts, which its network runs without gradient.
MLP = re.compile(
    r"^(?!.*\.experts\.).*\.\d+\.(block\.)?(ff(_\w+)?|feed_forward|\w*mlp)(\.|$)|"
    r"^single_transformer_blocks\.\d+\.proj_out$"
)


@dataclass(frozen=True)
class LoraSpec:
    """Which layers get a LoRA, and of what size; the defaults are Flow-GRPO's (2505.05470)."""

    rank: int = 32
    alpha: float = 64.0
    targets: Sequence[str] | None = None  # see `find_layers`; None = the family's attention projections
    dora: bool = False  # W + s B A with its rows brought to trained norms (2402.09353)
    rslora: bool = False  # s = alpha / sqrt(r) (2312.03732)
    init: str | bool = "gaussian"  # peft's init_lora_weights
    ranks: Mapping[str, int] = field(default_factory=dict)  # of layers with this word between the dots of their names
    alphas: Mapping[str, float] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        return self.of("")[1]

    def of(self, layer: str) -> tuple[int, float]:
        """A layer's rank, and its s."""
        rank, alpha = own(self.ranks, layer, self.rank), own(self.alphas, layer, self.alpha)
        return int(rank), alpha / (rank**0.5 if self.rslora else rank)


class Adapters:
    """Named LoRAs of one frozen network. Only "default" has gradients; the others are snapshots that it is copied to.

    All of them live in fp32 whatever the network's own type: a step of 1e-4 drowns in bf16's rounding.

    Args:
        network: the denoiser; frozen here, its target layers are replaced by peft's LoRA layers.
        spec: rank, alpha and targets.
        targets: the family's attention, used when `spec` names none.
        dead: full names of layers whose output the network never uses; they get no LoRA.
        seed: of A's gaussian start (standard deviation 1 / r; B starts at 0, so every snapshot starts as the identity).
        cast_input: let peft cast the input of A to fp32. Off under autocast, which would cast it back at once.
        convert: what changes the frozen weights once the LoRA is in, if anything does.
        without: called with the adapters and `cast_input` before weights are converted: makes a snapshot that takes
            merged LoRAs off again, and names it the `reference`.

    Raises:
        UserError: if a target names no linear layer, or `convert` refuses the network.
    """

    def __init__(
        self,
        network: nn.Module,
        spec: LoraSpec,
        targets: Sequence[str],
        dead: Sequence[str] = (),
        seed: int = 0,
        cast_input: bool = True,
        convert: Callable[[nn.Module], None] | None = None,
        without: Callable[[Adapters, bool], None] | None = None,
    ) -> None:
        self.network, self.spec, self.seed = network, spec, seed
        self.layers: dict[str, LoraLayer] = {}  # by the name of the layer that was replaced
        self.parameters: dict[str, tuple[nn.Parameter, ...]] = {}  # of each adapter, in the order of `keys`
        self.keys: list[str] = []  # "<layer>.lora_A.weight", "<layer>.lora_B.weight", ...
        # The one list of active adapters that *all* layers hold. Switching changes its only entry: no walk over the
        # layers, no copy of parameters, and, unlike peft's set_adapter() and disable_adapters(), no change of
        # requires_grad, which would take "default" out of a graph that is waiting for its backward pass. Empty means
        # the pretrained network.
        self._active: list[str] = [TRAINED]
        self.reference: str | None = None  # the snapshot that stands for the pretrained network
        self._fields = fields(spec, find_layers(network, spec.targets, targets, dead))
        network.requires_grad_(False)
        self._inject(TRAINED, cast_input)
        if without is not None:
            without(self, cast_input)
        if convert is not None:
            convert(network)
        self.fused = Fused(network, self.layers, self._active)

    @property
    def names(self) -> list[str]:
        return list(self.parameters)

    @property
    def active(self) -> bool:
        """Does the network run with a LoRA now?"""
        return bool(self._active)

    @property
    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return list(zip(self.keys, self.parameters[TRAINED], strict=True))

    def metadata(self) -> dict[str, Any]:
        """The fields of peft's LoraConfig that are not defaults: what a plain pipeline needs beside the tensors."""
        return self._fields

    def _inject(self, name: str, cast_input: bool) -> None:
        config = LoraConfig(**self.metadata(), init_lora_weights=self.spec.init)  # type: ignore[arg-type]
        # The start depends on the seed alone, and no random stream is moved on.
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several adapters are the point
            torch.manual_seed(self.seed)
            inject_adapter_in_model(config, self.network, adapter_name=name)
        found = {n: m for n, m in self.network.named_modules() if isinstance(m, LoraLayer)}
        self.layers = {n: m for n, m in found.items() if TRAINED in m.lora_A}
        parts = PARTS[: 2 + self.spec.dora]
        self.keys = [f"{n}.{part}.weight" for n in self.layers for part in parts]
        for layer in found.values():
            layer._active_adapter = self._active
            layer.cast_input_dtype_enabled = cast_input
        made: list[Any] = [getattr(layer, part)[name].float() for layer in self.layers.values() for part in parts]
        self.parameters[name] = tuple(cast(nn.Parameter, part.weight) for part in made)
        for adapter, parameters in self.parameters.items():  # peft has set them by what was active
            for parameter in parameters:
                parameter.requires_grad_(adapter == TRAINED)

    def add(self, name: str) -> None:
        """A new snapshot, equal to the trained LoRA as it is now. ValueError if there is one of that name."""
        if name in self.parameters:
            raise ValueError(f'there is a LoRA snapshot "{name}" already')
        first = next(iter(self.layers.values()))
        self._inject(name, first.cast_input_dtype_enabled)
        self.copy(TRAINED, name)

    def hold_start(self) -> None:
        """From now on the trained LoRA as it is now is what counts as pretrained, in `adapter(None)`."""
        self.add("start")
        self.reference = "start"

    @contextmanager
    def adapter(self, name: str | None) -> Iterator[None]:
        """Inside the context the network runs with this LoRA, or with none (the pretrained network)."""
        if name is not None:
            self._known(name)
        name = self.reference if name is None else name
        before = list(self._active)
        self._active[:] = [] if name is None else [name]
        try:
            yield
        finally:
            self._active[:] = before

    @torch.no_grad()
    def copy(self, source: str, destination: str) -> None:
        """destination <- source, in place."""
        torch._foreach_copy_(self._known(destination), self._known(source))

    @torch.no_grad()
    def ema_update(self, name: str, decay: float | Tensor) -> None:
        """name <- decay * name + (1 - decay) * default, in place; decay in [0, 1], 0 copies and 1 keeps, both exactly.

        A decay that was computed on the device, a tensor (), is used there: the host does not wait for it.
        """
        snapshot, weight = self._known(name), 1 - decay
        weights = [weight] * len(snapshot) if isinstance(weight, Tensor) else weight
        torch._foreach_lerp_(snapshot, self._known(TRAINED), weights)

    def state(self, name: str) -> dict[str, Tensor]:
        """Copies of A and B on the CPU, fp32, keyed by layer; the snapshot's name is in no key."""
        tensors = (p.detach().to("cpu", copy=True) for p in self._known(name))
        return dict(zip(self.keys, tensors, strict=True))

    @torch.no_grad()
    def load_state(self, name: str, state: Mapping[str, Tensor], source: str = "LoRA state") -> None:
        """Set a snapshot, in place, to what `state` returned; nothing is changed unless everything fits.

        Raises:
            UserError: naming `source`, if layers or ranks differ.
        """
        parameters = self._known(name)
        if odd := sorted(set(self.keys) ^ set(state)):
            side = "is missing" if odd[0] in self.keys else "has no place in this model"
            raise UserError(f"{source}: {odd[0]} {side} ({len(odd)} such tensors); check lora.targets and the model")
        for key, parameter in zip(self.keys, parameters, strict=True):
            if state[key].shape != parameter.shape:
                saved, here = list(state[key].shape), list(parameter.shape)
                raise UserError(f"{source}: {key} has shape {saved}, here {here}; check lora.rank and the model")
        for key, parameter in zip(self.keys, parameters, strict=True):
            parameter.copy_(state[key])

    def _known(self, name: str) -> tuple[nn.Parameter, ...]:
        if name not in self.parameters:
            raise ValueError(f'no LoRA snapshot "{name}"{nearest(name, self.parameters)}')
        return self.parameters[name]


def own(table: Mapping[str, float], layer: str, default: float) -> float:
    """Of the words in the layer's name the longest has it."""
    return table[max(found, key=len)] if (found := [w for w in table if f".{w}." in f".{layer}."]) else default


def fields(spec: LoraSpec, layers: Sequence[str]) -> dict[str, Any]:
    """The fields of peft's LoraConfig that are not its defaults, beside init_lora_weights."""
    made: dict[str, Any] = {"r": spec.rank, "lora_alpha": spec.alpha, "target_modules": list(layers)}
    made |= {"use_dora": True} if spec.dora else {}
    made |= {"use_rslora": True} if spec.rslora else {}
    for name, table, default in (("rank", spec.ranks, spec.rank), ("alpha", spec.alphas, spec.alpha)):
        if odd := [word for word in table if not any(f".{word}." in f".{layer}." for layer in layers)]:
            raise UserError(f'lora.{name}: no layer with a LoRA has "{odd[0]}" in its name, such as {layers[0]}')
        if table:
            made[f"{name}_pattern"] = {f"^{layer}": own(table, layer, default) for layer in layers}
    return made


def _matches(name: str, target: str) -> bool:
    """Peft's rule for a name among target modules; a pattern with * is of the whole name; "mlp": see MLP."""
    if target == "mlp":
        return MLP.search(name) is not None
    return fnmatchcase(name, target) if "*" in target else name == target or name.endswith(f".{target}")


def find_layers(
    network: nn.Module, targets: Sequence[str] | None, attention: Sequence[str], dead: Sequence[str]
) -> list[str]:
    """Full names of the linear layers that one of `targets` means, without the `dead` ones; of convolutions those that
    it names in full, as a file does. "attention", and None, are the family's projections."""
    targets = [name for one in targets or ["attention"] for name in (attention if one == "attention" else [one])]
    modules, named = dict(network.named_modules()), set(targets)
    linear = [n for n, m in modules.items() if isinstance(m, nn.Linear) or (n in named and isinstance(m, nn.Conv2d))]
    for target in targets:
        if not any(_matches(name, target) for name in linear):
            ends = {re.sub(r"^.*?\.\d+\.", "", name) for name in linear}  # without "transformer_blocks.0."
            choices = ["attention", "mlp", *ends]
            raise UserError(f'lora.targets: no linear layer\'s name ends in "{target}"{nearest(target, choices)}')
    return [name for name in linear if name not in dead and any(_matches(name, target) for target in targets)]
