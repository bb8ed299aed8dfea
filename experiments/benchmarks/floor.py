"""The LoRA's arithmetic against the bare model loop: plain diffusers + peft, and the same network under diffrl's path.

python -m experiments.benchmarks.floor --out assets/results/floor.json

One SD3 transformer of 6 layers of width 192 with random weights, 16 image and 78 text tokens, LoRA of rank 32, fp32.
`sampling` is a forward without gradient; `nft` a forward of the trained LoRA, one of the lagging snapshot without
gradient, and the backward pass; `grpo` the same without the snapshot, `crd` with the guided reference of its anchor
beside it: the network without a LoRA, on twice the rows. Both sides take turns, so that a machine that slows down
slows both; a figure is the median over the pairs of diffrl's time over the bare loop's, with one thread and with two,
after a reward was called, as in a training: what it leaves in the process must not slow the network down. `without` is
the same network without a LoRA (its backward pass goes through to the input), over the bare loop: nothing that a
framework does with the LoRA alone can be faster than that. `compiled` is the bare loop whose blocks torch.compile made,
after it has seen every case once; `roofline` the bare loop's floating-point operations over the rate of the best
product of the same threads, or the weights read once in each pass over the rate of their copies, whichever is longer.
`profile`: the operators that take most of `nft` on the most rows, by their own seconds. `gradients` is the largest
relative difference (by norm) of a matrix's gradient, without the snapshot: the loss of `nft` is a small difference of
two outputs, whose gradient enlarges the rounding of both. `memory`: MiB that a forward with gradient keeps for its
backward pass, weights that are made for it among them, but not the network's own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from diffrl.policy.engine import compile_blocks
from diffrl.policy.lora import Adapters, LoraSpec
from diffrl.policy.pipelines import JOINT_ATTENTION
from diffrl.prompts import Prompt
from diffrl.rewards.scoring import Scorer
from experiments import command

SIZES = {"sample_size": 8, "patch_size": 2, "in_channels": 8, "out_channels": 8, "num_layers": 6}
SIZES |= {"attention_head_dim": 32, "num_attention_heads": 6, "caption_projection_dim": 192}
SIZES |= {"joint_attention_dim": 128, "pooled_projection_dim": 128, "pos_embed_max_size": 8}
TOKENS = 78
PASSES = {"sampling": 1, "nft": 3, "grpo": 2, "crd": 4}  # through the weights, the backward pass as one


def build(bare: bool, compiled: bool = False) -> Adapters:
    """The network with the trained LoRA and a snapshot that lags; `bare`: with peft's own layers, `compiled` or not."""
    torch.manual_seed(0)
    network: Any = SD3Transformer2DModel(**SIZES)  # type: ignore[arg-type]
    adapters = Adapters(network, LoraSpec(), JOINT_ATTENTION, dead=["transformer_blocks.5.attn.add_q_proj"])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapters.parameters["default"]:
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    adapters.add("old")
    with torch.no_grad():
        for parameter in adapters.parameters["old"]:
            parameter.mul_(0.9)
    if bare:
        for layer in adapters.layers.values():
            vars(layer).pop("forward")
    if compiled:
        compile_blocks(network)
    return adapters


def inputs(rows: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    names = "hidden_states", "encoder_hidden_states", "pooled_projections"
    shapes = dict(zip(names, ((rows, 8, 8, 8), (rows, TOKENS, 128), (rows, 128)), strict=True))
    made: dict[str, Any] = {k: torch.randn(s, generator=generator) for k, s in shapes.items()}
    return made | {"timestep": torch.linspace(900, 100, rows), "return_dict": False}


def sampling(adapters: Adapters, given: dict[str, Any]) -> None:
    with torch.no_grad(), adapters.adapter("old"):
        adapters.network(**given)


def optimise(adapters: Adapters, given: dict[str, Any], old: bool = False, reference: bool = False) -> list[Tensor]:
    """The gradients of one micro-batch."""
    output = adapters.network(**given)[0]
    target: Any = 0.0
    if old:
        with torch.no_grad(), adapters.adapter("old"):
            target = adapters.network(**given)[0]
    if reference:
        with adapters.adapter(None):
            target = target + guided(adapters.network, given)
    (output - target).square().mean().backward()
    gradients = [parameter.grad for _, parameter in adapters.trainable]
    for _, parameter in adapters.trainable:
        parameter.grad = None
    return [gradient for gradient in gradients if gradient is not None]


@torch.no_grad()
def forward(network: Any, given: dict[str, Any]) -> Tensor:
    return network(**given)[0]


def guided(network: Any, given: dict[str, Any]) -> Tensor:
    """Without gradient, as CRD's anchor: each row twice, mixed."""
    twice = {k: torch.cat([v, v]) if isinstance(v, Tensor) else v for k, v in given.items()}
    empty, full = forward(network, twice).chunk(2)
    return empty + 4.5 * (full - empty)


def without(network: Any, given: dict[str, Any], old: bool = False, reference: bool = False) -> None:
    """The forwards and the backward pass of `optimise` where there is no LoRA."""
    given = given | {"hidden_states": given["hidden_states"].clone().requires_grad_()}
    output = network(**given)[0]
    target: Any = forward(network, given) if old else 0.0
    target = target + guided(network, given) if reference else target
    (output - target).square().mean().backward()


def saved_mib(adapters: Adapters, given: dict[str, Any]) -> float:
    """MiB that a forward keeps for its backward pass."""
    weights = {part.untyped_storage().data_ptr() for part in adapters.network.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = adapters.network(**given)[0]  # alive, so that no storage takes another's place
    del output
    return sum(saved.values()) / 2**20


class Heavy:
    """A reward that computes with all threads."""

    name = "heavy"

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> Tensor:
        return (images[:, 0] @ images[:, 1]).mean((1, 2))


def seconds(work: Callable[[], Any]) -> float:
    mark = time.perf_counter()
    work()
    return time.perf_counter() - mark


def rates() -> tuple[float, float]:
    """Floating-point operations a second of the best product of three, and bytes a second of a copy's reads."""
    products = []
    for size in (512, 1024, 2048):
        left, right = torch.randn(size, size), torch.randn(size, size)
        products.append(2 * size**3 / min(seconds(partial(torch.mm, left, right)) for _ in range(5)))
    block = torch.empty(2**26)
    target = torch.empty_like(block)
    return max(products), 4 * block.numel() / min(seconds(lambda: target.copy_(block)) for _ in range(5))


def operations(work: Callable[[], Any]) -> float:
    with FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops())


def profile(work: Callable[[], Any], repeats: int = 5) -> dict[str, dict[str, float]]:
    """Of the ten operators that take most: milliseconds and calls of one run of `work`, without their callees'."""
    work()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as taken:
        for _ in range(repeats):
            work()
    events = sorted(taken.key_averages(), key=lambda event: -event.self_cpu_time_total)
    return {
        event.key: {"ms": round(event.self_cpu_time_total / 1e3 / repeats, 2), "calls": event.count / repeats}
        for event in events[:10]
    }


def measure(sides: dict[str, Adapters], plain: Any, rows: int, repeats: int) -> dict[str, Any]:
    given = inputs(rows)
    floors: dict[str, Callable[[], Any]] = {
        "sampling": lambda: forward(plain, given),
        "nft": lambda: without(plain, given, old=True),
        "grpo": lambda: without(plain, given),
        "crd": lambda: without(plain, given, old=True, reference=True),
    }
    phases: dict[str, Callable[[Adapters], Any]] = {
        "sampling": lambda side: sampling(side, given),
        "nft": lambda side: optimise(side, given, old=True),
        "grpo": lambda side: optimise(side, given),
        "crd": lambda side: optimise(side, given, old=True, reference=True),
    }
    gradients = zip(*(optimise(sides[name], given) for name in ("bare", "diffrl")), strict=True)
    result: dict[str, Any] = {"gradients": max(float((ours - bare).norm() / bare.norm()) for bare, ours in gradients)}
    result["memory"] = {name: round(saved_mib(sides[name], given), 1) for name in ("bare", "diffrl")}
    result["memory"]["ratio"] = round(result["memory"]["diffrl"] / result["memory"]["bare"], 3)
    product, copy = rates()
    weights = sum(part.numel() * part.element_size() for part in plain.parameters())
    for name, phase in phases.items():
        phase(sides["compiled"])  # its blocks are made now
        taken: dict[str, list[float]] = {side: [] for side in (*sides, "without")}
        for _ in range(repeats):
            for side, adapters in sides.items():
                taken[side].append(seconds(lambda p=phase, a=adapters: p(a)))  # type: ignore[misc]
            taken["without"].append(seconds(floors[name]))
        result[name] = {side: round(statistics.median(values), 4) for side, values in taken.items()}
        lowest = max(operations(partial(phase, sides["bare"])) / product, PASSES[name] * weights / copy)
        result[name] |= {"roofline": round(lowest, 4), "ratio roofline": round(lowest / result[name]["bare"], 3)}
        for key, side in (("ratio", "diffrl"), ("ratio without", "without"), ("ratio compiled", "compiled")):
            pairs = zip(taken["bare"], taken[side], strict=True)
            result[name][key] = round(statistics.median(ours / bare for bare, ours in pairs), 3)
    return result


def table(result: dict[str, Any]) -> str:
    """The time of the package's LoRA path against plain diffusers and peft."""
    head = ["threads, rows", "phase", "diffrl", "compiled", "without a LoRA", "roofline", "bare loop, seconds"]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    cases = [(threads, *case) for threads, by_rows in result["threads"].items() for case in by_rows.items()]
    for threads, rows, phases in cases:
        for name in ("sampling", "nft", "grpo", "crd"):
            phase = phases[name]
            ratios = [f"{phase[key]:.2f}" for key in ("ratio", "ratio compiled", "ratio without", "ratio roofline")]
            lines.append(f"| {threads}, {rows} | {name} | {' | '.join(ratios)} | {phase['bare']:.3f} |")
    worst = max(phases["gradients"] for _, _, phases in cases)
    ratios_of = {rows: phases["memory"]["ratio"] for _, rows, phases in cases}
    memory = ", ".join(f"{ratio:.2f} ({rows} rows)" for rows, ratio in ratios_of.items())
    text = f"`{result['command']}`, {result['device']}, torch {result['torch']}; "
    text += f"gradients differ by at most {worst:.0e} of "
    text += f"their norm. For the backward pass a forward keeps {memory} of what the bare loop's does, with the merged "
    threads, rows, phases = cases[-1]
    bare, ours = (phases["profile"][side] for side in ("bare", "diffrl"))
    parts = [
        f"{name.removeprefix('aten::')} {bare[name]['ms']:.0f} -> {ours[name]['ms']:.0f}"
        for name in bare
        if name in ours
    ]
    text += f"weights. Milliseconds of the operators of `nft` with {threads} threads and {rows} rows, bare -> diffrl: "
    return "\n".join(lines) + f"\n\n{text}{', '.join(parts)}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 36], help="rows of a micro-batch")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of the CPU")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    result: dict[str, Any] = {"command": command(), "device": f"{platform.machine()} CPU"}
    result |= {"repeats": args.repeats, "load": os.getloadavg()[0], "torch": torch.__version__, "threads": {}}
    sides = {"bare": build(True), "diffrl": build(False), "compiled": build(True, compiled=True)}
    network: Any = SD3Transformer2DModel(**SIZES)  # type: ignore[arg-type]
    plain = network.requires_grad_(False)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for threads in args.threads:
        torch.set_num_threads(threads)
        Scorer({"heavy": Heavy()}).score(torch.rand(2, 3, 512, 512), [Prompt("a cat")] * 2)
        by_rows = result["threads"][str(threads)] = {}
        for rows in args.rows:
            by_rows[str(rows)] = measure(sides, plain, rows, args.repeats)
            if rows == max(args.rows):
                by_rows[str(rows)]["profile"] = {
                    name: profile(partial(optimise, sides[name], inputs(rows), old=True)) for name in ("bare", "diffrl")
                }
            args.out.write_text(json.dumps(result, indent=1) + "\n")
            print(threads, rows, json.dumps(by_rows[str(rows)]), flush=True)


if __name__ == "__main__":
    main()
