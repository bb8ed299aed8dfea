"""LoRA gradients that are told apart by row: with checkpointing, autocast, compiling, and what must not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import SPEC, inputs, scramble, tiny_sd3, velocity
from tiny_models.recent import TINY, make
from torch import Tensor, nn

from diffrl.errors import UserError
from diffrl.methods.marble.gradients import LoraGradients, Passes
from diffrl.policy import LoraSpec, Policy, fused, load_policy
from diffrl.policy.lora import Adapters

ONE = torch.ones(())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_sd3(tmp_path_factory.mktemp("gradients") / "sd3", dual_attention=True)


def load(model: Path, **kind: Any) -> Policy:
    policy = load_policy(str(model), lora=SPEC, **kind)
    scramble(policy, std=0.1)
    return policy


def phi_of(policy: Policy, rows: int = 3, guidance: float = 1.0) -> Tensor:
    """(rows, 2) scalars of the prediction."""
    v = policy.predict(*inputs(policy, rows), guidance).v.flatten(1)
    return torch.stack([v.square().mean(1), v[:, ::2].mean(1)], dim=1)


def row_gradients(policy: Policy, guidance: float = 1.0) -> Tensor:
    """(2, rows, size) by an ordinary backward pass for each number of phi."""
    phi, parameters = phi_of(policy, guidance=guidance), [p for _, p in policy.trainable]

    def one(value: Tensor) -> Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters, retain_graph=True)])

    return torch.stack([torch.stack([one(value) for value in column]) for column in phi.unbind(1)])


def combined(policy: Policy, slopes: Tensor, guidance: float = 1.0, **options: Any) -> Tensor:
    """(K, size) from the constant-cost path; slopes (K, rows, 2)."""
    capture, passes = LoraGradients(policy.lora, policy.backbone.folded), Passes(None, torch.device("cpu"))
    bank = torch.zeros(len(slopes), capture.size)
    passes.run(capture, phi_of(policy, guidance=guidance), slopes, bank, ONE, **options)
    return bank


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


SLOPES = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_rows_are_told_apart_in_two_passes(model, monkeypatch, guidance: float, checkpointing: bool) -> None:
    calls = []
    monkeypatch.setattr(fused, "_merge", lambda *args: (calls.append(1), fused._Merged.apply(*args))[1])
    expected = torch.einsum("kij,jip->kp", SLOPES, row_gradients(load(model), guidance))
    policy = load(model)
    if checkpointing:
        policy.enable_gradient_checkpointing()
    assert distance(combined(policy, SLOPES, guidance), expected) < 1e-5
    assert (len(calls) > 2 * len(policy.lora.fused.groups)) == checkpointing, "each pass recomputes"
    assert all(p.grad is None for _, p in policy.trainable)


def test_layers_without_tokens_and_every_other_linear_layer_work_too(model) -> None:
    """Layers that see (rows, width), as the modulation does, and all that a user may name."""
    spec = LoraSpec(4, 8, ["norm1.linear", "ff.net.2", "context_embedder", "proj_out", "timestep_embedder.linear_1"])
    plain, ours = (load_policy(str(model), lora=spec) for _ in range(2))
    for policy in (plain, ours):
        scramble(policy, std=0.1)
    expected = torch.einsum("kij,jip->kp", SLOPES, row_gradients(plain))
    assert distance(combined(ours, SLOPES), expected) < 1e-5


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_layers_with_a_row_for_each_token_are_told_apart_by_sample(tmp_path: Path, guidance: float) -> None:
    """Krea 2's text layers see (rows x tokens, stack, width); texts have different lengths."""
    model = make("krea2", tmp_path / "krea2")
    plain, ours = (load(model, resolution=TINY["krea2"].resolution) for _ in range(2))
    expected = torch.einsum("kij,jip->kp", SLOPES, row_gradients(plain, guidance))
    assert distance(combined(ours, SLOPES, guidance), expected) < 1e-5
    text = [name for name in ours.lora.layers if name.startswith(ours.backbone.folded)]
    assert len(text) == 4 * len(ours.network.text_fusion.layerwise_blocks)
    ours.backbone.folded = ()
    with pytest.raises(UserError, match=r"sees \d+ rows in a micro-batch of 3, so its gradients cannot be told apart"):
        combined(ours, SLOPES, guidance)


def test_a_basis_makes_one_pass_for_what_all_rewards_share(model) -> None:
    slopes = torch.stack([1 + SLOPES[..., 0], 1 - SLOPES[..., 0]], dim=2)
    expected = torch.einsum("kij,jip->kp", slopes, row_gradients(load(model)))
    policy = load(model)
    capture, passes = LoraGradients(policy.lora), Passes(((1.0, 1.0), (1.0, -1.0)), torch.device("cpu"))
    bank = torch.zeros(5, capture.size)
    passes.run(capture, phi_of(policy), slopes, bank, ONE)
    assert bank[4].norm() > 0
    assert distance(bank[:4] + bank[4], expected) < 1e-5


def test_outside_nothing_changes(model) -> None:
    """Predictions and ordinary gradients to the bit, also after passes that were captured; snapshots are left alone."""
    plain, ours = load(model), load(model)
    ours.add_snapshot("old")
    capture = LoraGradients(ours.lora)
    assert torch.equal(velocity(ours), velocity(plain))
    bank = torch.zeros(1, capture.size)
    phi = phi_of(ours)
    with capture.into(bank, torch.ones(3, 1)):
        phi.sum().backward(retain_graph=True)
    for policy, value in ((plain, phi_of(plain)), (ours, phi)):
        value.sum().backward()
        assert all(p.grad is not None for _, p in policy.trainable)
    for (name, one), (_, other) in zip(plain.trainable, ours.trainable, strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-5, atol=1e-8), name
    together = torch.cat([p.grad.flatten() for _, p in ours.trainable])
    assert distance(bank[0], together) < 1e-5


def test_bf16_contracts_in_float32(model) -> None:
    """Under autocast activations are bf16; a row's gradient is not rounded to that again, as an ordinary one is."""
    exact = row_gradients(load(model)).sum(0)
    policy = load(model, precision="bf16")
    slopes = torch.eye(3)[:, :, None].expand(3, 3, 2).contiguous()
    bank = combined(policy, slopes)
    assert bank.dtype == torch.float32
    plain = row_gradients(load(model, precision="bf16")).sum(0)
    assert distance(bank, plain) < 0.02
    assert distance(bank, exact) < 0.1
    assert any((p != p.bfloat16()).any() for p in bank.split(1000, dim=1))


def test_a_scale_goes_through_the_pass(model) -> None:
    """fp16 scales losses before the backward pass: the bank is scaled with everything else."""
    policy = load(model)
    plain = combined(policy, SLOPES)
    capture, passes = LoraGradients(policy.lora), Passes(None, torch.device("cpu"))
    bank = torch.zeros(4, capture.size)
    passes.run(capture, phi_of(policy), SLOPES, bank, torch.tensor(1024.0))
    assert distance(bank / 1024, plain) < 1e-5


def test_direct_passes_are_the_definition(model) -> None:
    assert distance(combined(load(model), SLOPES, direct=True), combined(load(model), SLOPES)) < 1e-5


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)) * 2)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_network_gives_the_same() -> None:
    """Each group of LoRA layers breaks the compiled graph; every gradient arrives, in both passes over it."""
    x, banks = torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(0)), []
    for compiled in (False, True):
        torch.manual_seed(0)
        network = _Two()
        adapters = Adapters(network, LoraSpec(2, 4), ["a", "b"])
        with torch.no_grad():
            for _, parameter in adapters.trainable:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
        capture, passes = LoraGradients(adapters), Passes(None, torch.device("cpu"))
        out = (torch.compile(network, backend="aot_eager") if compiled else network)(x)
        banks.append(torch.zeros(4, capture.size))
        passes.run(capture, torch.stack([out.square().mean((1, 2)), out.mean((1, 2))], dim=1), SLOPES, banks[-1], ONE)
    assert distance(banks[1], banks[0]) < 1e-6


def test_a_layer_whose_rows_are_not_samples_is_named(model) -> None:
    policy = load(model)
    capture = LoraGradients(policy.lora)
    phi = phi_of(policy)
    with pytest.raises(UserError, match=r"transformer_blocks.*lora_[AB] sees 3 rows in a micro-batch of 2"):  # noqa: SIM117
        with capture.into(torch.zeros(1, capture.size), torch.ones(2, 1)):
            phi.sum().backward()
