"""The check of frozen weights in fewer bits (`engine.base`): the family trains over each format as over any weights."""

from __future__ import annotations

import importlib.util
import tempfile

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from diffrl.additions.quantised import ROUND, Quantised
from diffrl.conformance.subject import PROMPTS, Failed, Subject, gradients, ratios, scramble
from diffrl.policy import Policy


def over_bases(subject: Subject) -> str:
    """Each format is its dequantised self, every LoRA matrix moves, the ratio is exactly 1, the LoRA the full one's."""
    if type(subject.fp32.network).__name__.startswith("UNet"):
        return "not offered: a UNet is mostly convolutions"
    results = []
    for base in ROUND:
        if base == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
            results.append("nf4 not tried: bitsandbytes is missing")
            continue
        policy = subject.policy(base=base)
        scramble(policy)
        off, steps = ratios(policy)
        if off:
            raise Failed(f"{base}: log-probability ratio on policy is off 1 by {off:.2g} in {steps} steps")
        _same_lora(subject, policy, base)
        bits = _bits(policy)
        mine = {"the prediction": _predict(policy, subject), **gradients(policy, subject)}
        dequantise(policy)
        theirs = {"the prediction": _predict(policy, subject), **gradients(policy, subject)}
        for name, value in mine.items():
            other = theirs[name]
            if value is None or other is None or not value.any():
                raise Failed(f"{base}: no gradient of {name}")
            if not (away := float((value - other).norm() / other.norm())) < 1e-5:
                raise Failed(f"{base}: {name} is {away:.2g} of its size from the dequantised model's, at most 1e-5")
        results.append(f"{base} {bits:.2f} bits")
    return f"{', '.join(results)} a weight; as the dequantised model"


def dequantise(policy: Policy) -> None:
    """Put plain layers, with the weights that they compute with, into the place of the quantised ones."""
    for name, layer in list(policy.network.named_modules()):
        if isinstance(layer, Quantised):
            plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
            plain.weight, plain.bias = nn.Parameter(layer.weight, requires_grad=False), layer.bias
            parent, _, own = name.rpartition(".")
            setattr(policy.network.get_submodule(parent), own, plain)


def _bits(policy: Policy) -> float:
    """Of a weight of the converted layers, with its share of the scales."""
    layers = [layer for layer in policy.network.modules() if isinstance(layer, Quantised)]
    count = sum(layer.in_features * layer.out_features for layer in layers)
    return 8 * sum(layer.codes.nbytes + layer.scales.nbytes for layer in layers) / count


@torch.no_grad()
def _predict(policy: Policy, subject: Subject) -> Tensor:
    return policy.predict(subject.noise(2), torch.tensor([0.9, 0.4]), policy.encode(PROMPTS[:2])).v


def _same_lora(subject: Subject, policy: Policy, base: str) -> None:
    """Failed unless the plain pipeline has the LoRA, as it was saved over this base, to the bit."""
    pipe, state = subject.plain, policy.state()
    with tempfile.TemporaryDirectory() as folder:
        policy.save_lora(folder)
        pipe.load_lora_weights(folder, adapter_name=base)
    network = getattr(pipe, policy.backbone.denoiser)  # type: ignore[attr-defined]
    layers = {name: part for name, part in network.named_modules() if isinstance(part, LoraLayer)}
    there = {
        f"{n}.{m}.weight": getattr(part, m)[base].weight for n, part in layers.items() for m in ("lora_A", "lora_B")
    }
    pipe.unload_lora_weights()
    if there.keys() != state.keys() or not all(torch.equal(there[key], value) for key, value in state.items()):
        raise Failed(f"{base}: the plain pipeline does not have the saved LoRA to the bit")
