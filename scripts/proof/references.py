"""What an epoch's forwards and backwards would take elsewhere: with plain peft, with torch.compile, and at the least.

An epoch's calls are sorted by what they cost (rows, guidance, LoRA, gradient). Of each sort a few are run again, and
their mean counts for all of them. Three references:

- `peft`: the same network with peft's own LoRA layers, as diffusers' `add_adapter` and a loop of one's own have them;
- `peft_compiled`: the same with torch.compile of the network's blocks, in the parts that compile;
- `roofline`: the floating-point operations over the rate of the device's best product, or the weights read once in
  each pass over the rate of its copies, whichever is longer.

Utilisation (`mfu`) is the operations of the model over the seconds and the measured rate of the product. What is
computed twice (gradient checkpointing) counts once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from diffrl.run.train import Run

REPEATS = 2  # timed calls of each sort


class Sort(NamedTuple):
    """Calls that cost the same."""

    name: str  # "predict" or "decode"
    rows: int
    tokens: int
    guided: bool
    lora: str | None
    grad: bool
    optimising: bool


class Calls:
    """How many there are of a sort, and the arguments of the first few: all of them would fill the device."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def add(self, arguments: tuple[Any, ...], words: dict[str, Any]) -> None:
        self.count += 1
        if len(self.first) < REPEATS:
            self.first.append((tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments), words))


class Recorder:
    """While it is entered: an epoch's calls of the network and the autoencoder, and its seconds.

    `seconds`: `rollout` up to the optimiser's first micro-batch (rewards and advantages with it), `optimise`, and
    `after`, with the device's work done at each border.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.policy = run, run.policy
        self.sorts: dict[Sort, Calls] = {}
        self.seconds: dict[str, float] = {}
        self._optimising = False
        self._mark = 0.0

    def __enter__(self) -> Recorder:
        self.sorts.clear()
        self._mark = _now(self.policy.device)
        loop: Any = self.run.loop
        optimise = loop._optimise

        def timed(*arguments: Any) -> Any:
            self._lap("rollout")
            self._optimising = True
            made = optimise(*arguments)
            self._optimising = False
            self._lap("optimise")
            return made

        loop._optimise = timed
        self._before = {name: vars(self.policy).get(name) for name in ("predict", "decode")}
        for name in self._before:
            setattr(self.policy, name, self._noting(name, getattr(self.policy, name)))
        return self

    def __exit__(self, *ignored: object) -> None:
        for name, before in self._before.items():
            delattr(self.policy, name)  # the class's own again, or the clock's
            if before is not None:
                setattr(self.policy, name, before)
        del self.run.loop._optimise
        self._lap("after")

    def _lap(self, name: str) -> None:
        now = _now(self.policy.device)
        self.seconds[name], self._mark = now - self._mark, now

    def _noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **words: Any) -> Any:
            active = self.policy.lora._active
            rows, predicts = len(arguments[0]), name == "predict"
            guidance = words.get("guidance", arguments[3] if predicts and len(arguments) > 3 else 1.0)
            grad = torch.is_grad_enabled() if predicts else words.get("grad", len(arguments) > 2 and arguments[2])
            tokens = arguments[2].embeds.shape[1] if predicts else 0
            guided = predicts and guidance != 1.0
            sort = Sort(name, rows, tokens, guided, active[0] if active else None, bool(grad), self._optimising)
            self.sorts.setdefault(sort, Calls()).add(arguments, words)
            return call(*arguments, **words)

        return noted


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _now(device: torch.device) -> float:
    wait(device)
    return time.perf_counter()


def references(
    run: Run, recorder: Recorder, rates: Mapping[str, float], tell: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Seconds of an epoch's calls in each of the three, by phase, and the utilisation beside them.

    `rates`: "operations" and "bytes" a second, at the most.
    """
    sorts, taken = recorder.sorts, recorder.seconds
    found: dict[str, Any] = {}
    compiled = run.config.engine.compile
    if not compiled:  # the counter sees none of the operations of a compiled block
        lowest, operations = _lowest(run, sorts, rates)
        found["roofline"] = _by_phase(sorts, lowest)
        for phase, late in (("rollout", False), ("optimise", True)):
            share = sum(operations[sort] * calls.count for sort, calls in sorts.items() if sort.optimising == late)
            found |= {f"tflop_{phase}": round(share / 1e12, 4)}
            found |= {f"mfu_{phase}": round(share / taken[phase] / rates["operations"], 4)}
        tell(found)
    each = _seconds(run, sorts)
    found["calls"] = _by_phase(sorts, each)
    found["calls"]["decode"] = round(sum(each[s] * c.count for s, c in sorts.items() if s.name == "decode"), 3)
    tell(found)
    if compiled:  # then diffrl has left its layers to peft and the compiler already
        found["peft_compiled"] = found["calls"]
    else:
        network = {sort: calls for sort, calls in sorts.items() if sort.name == "predict"}
        with plain_peft(run):
            for sort in network:  # kernels that have not run yet are chosen now
                _call(run, sort, *sorts[sort].first[0])
            found["peft"] = _by_phase(sorts, each | _seconds(run, network))
    names = sorted({"peft", "peft_compiled", "roofline", "calls"} & found.keys())
    return found | {"of_the_epoch": {name: round(found[name]["seconds"] / sum(taken.values()), 3) for name in names}}


@contextmanager
def plain_peft(run: Run) -> Iterator[None]:
    """Inside, the layers compute as peft's own, with its defaults."""
    adapters = run.policy.lora
    before = [layer.cast_input_dtype_enabled for layer in adapters.layers.values()]
    for layer in adapters.layers.values():
        vars(layer).pop("forward", None)
        layer.cast_input_dtype_enabled = True
    try:
        yield
    finally:
        for layer, cast in zip(adapters.layers.values(), before, strict=True):
            layer.cast_input_dtype_enabled = cast
        adapters.fused.install()


def _by_phase(sorts: Mapping[Sort, Calls], each: Mapping[Sort, float]) -> dict[str, float]:
    """Of seconds of one call of each sort: those of the epoch's, together and of both phases."""
    phases = {False: 0.0, True: 0.0}
    for sort, calls in sorts.items():
        phases[sort.optimising] += each[sort] * calls.count
    rollout, optimise = phases[False], phases[True]
    return {"seconds": round(rollout + optimise, 4), "rollout": round(rollout, 4), "optimise": round(optimise, 4)}


def _seconds(run: Run, sorts: Mapping[Sort, Calls]) -> dict[Sort, float]:
    """Mean seconds of a call of each sort."""
    found = {}
    for sort, calls in sorts.items():
        mark = _now(run.policy.device)
        for arguments, words in calls.first:
            _call(run, sort, arguments, words)
        found[sort] = (_now(run.policy.device) - mark) / len(calls.first)
    return found


def _call(run: Run, sort: Sort, arguments: tuple[Any, ...], words: Mapping[str, Any]) -> None:
    """The call, and its backward pass if it has a gradient."""
    policy = run.policy
    if sort.name == "decode" and sort.grad:
        arguments = (arguments[0].requires_grad_(), *arguments[1:])
    with torch.set_grad_enabled(sort.grad), policy.adapter(sort.lora):
        made = getattr(policy, sort.name)(*arguments, **words)
        if sort.grad:
            (made.v if sort.name == "predict" else made).square().mean().backward()
    for _, parameter in policy.trainable:
        parameter.grad = None


def _lowest(
    run: Run, sorts: Mapping[Sort, Calls], rates: Mapping[str, float]
) -> tuple[dict[Sort, float], dict[Sort, float]]:
    """For a call of each sort: seconds at the least, and floating-point operations, counted on one row."""
    network: Any = run.policy.backbone.network
    bytes_of = {"predict": _bytes(network), "decode": _bytes(run.policy.vae)}
    seconds: dict[Sort, float] = {}
    operations: dict[Sort, float] = {}
    saved = run.config.optimise.gradient_checkpointing
    if saved:
        network.disable_gradient_checkpointing()
    try:
        for sort, calls in sorts.items():
            with FlopCounterMode(display=False) as counter:
                arguments, words = calls.first[0]
                _call(run, sort, tuple(_first_row(one) for one in arguments), words)
            operations[sort] = float(counter.get_total_flops() * sort.rows)
            read = bytes_of[sort.name] * (2 if sort.grad else 1)
            seconds[sort] = max(operations[sort] / rates["operations"], read / rates["bytes"])
    finally:
        if saved:
            network.enable_gradient_checkpointing()
    return seconds, operations


def _bytes(module: torch.nn.Module) -> int:
    return sum(part.numel() * part.element_size() for part in module.parameters())


def _first_row(argument: Any) -> Any:
    """Of a batch of anything."""
    if isinstance(argument, Tensor):
        return argument[:1] if argument.ndim else argument
    return argument.select(torch.zeros(1, dtype=torch.int64)) if hasattr(argument, "select") else argument
