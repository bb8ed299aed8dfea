"""A frozen base in fewer bits: gradients, what is kept for them, the groups, the saved LoRA, what is refused."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_models.classic import tiny_flux, tiny_sd, tiny_sd3
from tiny_models.recent import make
from torch import Tensor, nn

from diffrl.additions.quantised import Quantised, block_layers, quantise
from diffrl.config import Config, load_config
from diffrl.conformance.bases import dequantise
from diffrl.conformance.check import scramble
from diffrl.errors import UserError
from diffrl.memory import fit
from diffrl.policy import LoraSpec, Policy, load_policy
from diffrl.records.changes import compare
from diffrl.records.identity import identity_of_config
from diffrl.run.device import check_device

MAKERS = {"sd3": tiny_sd3, "flux": tiny_flux, "qwen": partial(make, "qwen-image")}
BASES = {"int8": 1, "fp8": 1, "nf4": 0.5}  # bytes of a weight's code


@pytest.fixture(
    scope="module", params=["sd3", *(pytest.param(name, marks=pytest.mark.long) for name in MAKERS if name != "sd3")]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(MAKERS[request.param](tmp_path_factory.mktemp(request.param)))


def load(model: str, base: str, precision: str = "fp32") -> Policy:
    policy = load_policy(model, lora=LoraSpec(rank=4, alpha=8), precision=precision, resolution=16, base=base)
    scramble(policy)
    return policy


def gradients(policy: Policy) -> tuple[Tensor, list[Tensor]]:
    """A prediction, and the gradient of every LoRA matrix."""
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(3))
    v = policy.predict(x, torch.tensor([0.9, 0.4]), policy.encode(["a red dog", "two cats"]), 3.0).v
    v.square().mean().backward()
    found = [parameter.grad for _, parameter in policy.trainable]
    for _, parameter in policy.trainable:
        parameter.grad = None
    assert all(gradient is not None for gradient in found)
    return v.detach(), found  # type: ignore[return-value]


def layers(policy: Policy) -> dict[str, Quantised]:
    return {name: part for name, part in policy.network.named_modules() if isinstance(part, Quantised)}


@pytest.mark.parametrize("base", BASES)
def test_gradients_are_those_of_the_dequantised_model(model: str, base: str) -> None:
    full, policy = load(model, "full"), load(model, base)
    policy.add_snapshot("old")
    v, found = gradients(policy)
    away = float((v - gradients(full)[0]).norm() / v.norm())
    assert 1e-4 < away < 1  # it is another base, and near
    assert all(bool(gradient.any()) for gradient in found)  # every LoRA matrix moves
    assert [group.names for group in policy.lora.fused.groups] == [group.names for group in full.lora.fused.groups]
    assert all(torch.equal(a, b) for a, b in zip(policy.state("old").values(), full.state().values(), strict=True))
    dequantise(policy)
    expected, theirs = gradients(policy)
    assert float((v - expected).norm() / expected.norm()) < 1e-5
    for mine, other in zip(found, theirs, strict=True):
        assert float((mine - other).norm() / other.norm()) < 1e-5


def kept_for_backward(policy: Policy) -> Counter[tuple[int, ...]]:
    """Shapes of what a graph keeps, but for the network's own parameters, which are there anyway."""
    own = {parameter.data_ptr() for parameter in policy.network.parameters()}
    seen: Counter[tuple[int, ...]] = Counter()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            seen[tuple(tensor.shape)] += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        v, found = gradients(policy)
    assert v.dtype == torch.float32 and all(g.dtype == torch.float32 and g.isfinite().all() for g in found)
    return seen


@pytest.mark.parametrize("base", BASES)
def test_nothing_of_a_weights_size_is_kept_for_the_backward_pass(model: str, base: str) -> None:
    policy = load(model, base, "bf16")
    kept = kept_for_backward(policy)
    dequantise(policy)
    assert kept == kept_for_backward(policy)  # whose weights are parameters, and not counted


@pytest.mark.parametrize("base", BASES)
def test_bytes_are_those_of_the_codes_and_the_ends_stay_full(model: str, base: str) -> None:
    full, policy = load(model, "full"), load(model, base)
    assert list(layers(policy)) == block_layers(full.network)
    for layer in layers(policy).values():
        size = layer.in_features * layer.out_features
        assert layer.codes.nbytes == -(-int(size * BASES[base] * 2) // 2)
        assert layer.scales.nbytes <= 4 * max(layer.out_features, size // 64 + 1)
    there = {name for name, part in policy.network.named_modules() if type(part) is nn.Linear and "lora_" not in name}
    assert there and not any("blocks." in name for name in there)


def test_a_saved_lora_is_the_full_models(model: str, tmp_path: Path) -> None:
    policy, full = load(model, "int8"), load(model, "full")
    policy.save_lora(tmp_path)
    before = full.state()
    full.load_lora(tmp_path)
    assert all(torch.equal(value, before[key]) for key, value in full.state().items())
    assert all(torch.equal(value, before[key]) for key, value in policy.state().items())


def test_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(128, 64)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(64, 128, generator=generator))
        layer.weight[3] = 0
    found = {base: Quantised(layer, base) for base in BASES}
    expected = layer.weight.detach()
    for base, most in (("int8", 0.01), ("fp8", 0.03), ("nf4", 0.1)):
        weight = found[base].weight
        assert 0 < float((weight - expected).norm() / expected.norm()) < most
        assert not weight[3].any() and found[base].bias is layer.bias
    steps = found["int8"].codes
    assert steps.dtype == torch.int8 and int(steps.abs().amax(1)[0]) >= 127  # the scale is each output's own
    assert found["fp8"].codes.dtype == torch.float8_e4m3fn
    assert found["nf4"].codes.numel() == 64 * 128 // 2 and found["nf4"].scales.numel() == 64 * 128 // 64


def test_what_is_refused(tmp_path: Path) -> None:
    unet = str(tiny_sd(tmp_path / "sd"))
    with pytest.raises(UserError, match="UNet2DConditionModel is mostly convolutions"):
        load_policy(unet, base="int8")
    with pytest.raises(UserError, match=r'unknown engine\.base "int9".*int8'):
        load_policy(unet, base="int9")
    with pytest.raises(UserError, match="no lists of blocks"):
        quantise(nn.Linear(2, 2), "int8")
    recipe = "configs/playground/nft.yaml"
    for overrides, said in (
        (["engine.compile=true"], "engine.compile"),
        (["optimise.precision=fp16"], "fp16"),
        (["engine.base=int4"], "engine.base"),
        (["evaluate.also={own: {base: fp8}}"], "or another base"),
        (["evaluate.also={full: {steps: 3}}"], "no steps"),
    ):
        with pytest.raises(UserError, match=said):
            load_config(recipe, ["engine.base=fp8", *overrides])
    load_config(recipe, ["engine.base=fp8", "evaluate.also={full: {base: full}}"])


def halve(network: nn.Module, device: torch.device | None = None) -> None:
    """A base of another package."""
    for name in block_layers(network):
        layer: nn.Linear = network.get_submodule(name)  # type: ignore[assignment]
        layer.weight = nn.Parameter(layer.weight.detach().to(device) / 2, requires_grad=False)


def test_a_base_of_another_package_has_its_name(model: str, installed, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = "configs/playground/nft.yaml"
    with pytest.raises(UserError, match=r"engine\.base: expected one of full, fp8, int8, nf4, got \"halved\""):
        load_config(recipe, ["engine.base=halved"])
    installed("halved", f"{__name__}:halve", "diffrl.bases")
    config = load_config(recipe, ["engine.base=halved", "evaluate.also={full: {base: full}}"])
    check_device(config, torch.device("mps"))  # it says nothing against it
    policy, full = load(model, "halved"), load(model, "full")
    names = block_layers(full.network)
    halved, before = (dict(one.network.named_parameters()) for one in (policy, full))
    assert names and all(torch.equal(halved[f"{n}.weight"] * 2, before[f"{n}.weight"]) for n in names)
    monkeypatch.setattr(halve, "refusal", lambda precision, device: f"not in {precision}{device}", raising=False)
    with pytest.raises(UserError, match=r"engine\.base: not in fp32$"):
        load_config(recipe, ["engine.base=halved", "optimise.precision=fp32"])
    with pytest.raises(UserError, match=r"engine\.base: not in \w+mps$"):
        check_device(config, torch.device("mps"))


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(UserError, match=r'"nf4" needs bitsandbytes .*pip install "diffrl\[8bit\]"'):
        Quantised(nn.Linear(8, 8), "nf4")


def test_a_model_in_fewer_bits_is_refused(tmp_path: Path) -> None:
    folder = tiny_flux(tmp_path / "flux")
    file = folder / "transformer" / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "bitsandbytes"}})
    )
    with pytest.raises(
        UserError, match=r"transformer of .* is quantised already \(bitsandbytes\); give the full model"
    ):
        load_policy(str(folder), resolution=16)


@pytest.mark.parametrize("base", BASES)
def test_doctor_counts_true_bytes(model: str, base: str) -> None:
    rows = {"groups": 1, "group_size": 2, "batch_size": 2, "resolution": 16}
    settings = {
        "model": model,
        "objective": "rwr",
        "rwr": {"weights": "best"},
        "lora": {"rank": 4, "alpha": 8},
        "rollout": rows,
    }
    settings |= {"optimise": {"batch_size": 2, "micro_batch": None}, "engine": {"base": base}}
    estimate = fit.estimate(Config.model_validate(settings))
    policy = load(model, base)
    assert estimate.parts["network"] == sum(p.nbytes for n, p in policy.network.named_parameters() if "lora_" not in n)


def test_a_resume_over_another_base_is_refused() -> None:
    then, now = ({"engine.base": base} for base in ("int8", "full"))
    with pytest.raises(UserError, match=r'engine\.base: "full", but step-1 was trained with "int8"'):
        compare(then, now, "step-1")
    values = load_config("configs/playground/nft.yaml", ["engine.base=int8"]).resolved()
    assert identity_of_config(values)["engine.base"] == "int8"


REFUSED = {  # on an Apple device, and what to use
    "engine.base=fp8": r'engine\.base: "fp8" is not available on an Apple device \(MPS\); use int8',
    "engine.base=nf4": r'engine\.base: "nf4" is not available on an Apple device \(MPS\); use int8',
    "engine.optimiser=adamw8bit": r'engine\.optimiser: "adamw8bit" is not available on an Apple .*; use adamw',
}


@pytest.mark.parametrize("override", REFUSED)
def test_an_apple_device_is_told_what_it_cannot_do(config_file, override: str) -> None:
    """By its name alone: there is none here. Other devices take the same config."""
    path, mps = config_file("run"), torch.device("mps")
    for base in ("full", "int8"):
        check_device(load_config(path, [f"engine.base={base}"]), mps)
    asked = load_config(path, [override])
    for other in ("cpu", "cuda"):
        check_device(asked, torch.device(other))
    with pytest.raises(UserError, match=REFUSED[override]) as refused:
        check_device(asked, mps)
    assert len(str(refused.value).splitlines()) == 1
