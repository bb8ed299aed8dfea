"""LoRA snapshots of the policy: what trains, what follows, what is saved; on a tiny random SD3 of the true classes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import SPEC, inputs, scramble, tiny_sd3, velocity
from torch import Tensor

from diffrl.errors import UserError
from diffrl.loras.reading import read_lora
from diffrl.policy import LoraSpec, Policy, load_policy


def test_a_step_moves_every_trained_matrix_and_nothing_else(policy: Policy) -> None:
    policy.add_snapshot("old")
    scramble(policy)
    before = {name: p.detach().clone() for name, p in policy.network.named_parameters()}
    trained = {id(p) for _, p in policy.trainable}
    assert {id(p) for p in policy.network.parameters() if p.requires_grad} == trained
    optimiser = torch.optim.SGD([p for _, p in policy.trainable], lr=0.1)
    policy.predict(*inputs(policy), guidance=2.0).v.square().mean().backward()
    optimiser.step()
    moved = {name for name, p in policy.network.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in policy.network.named_parameters() if id(p) in trained}
    assert all(".default." in name for name in moved) and len(moved) == len(policy.trainable) == 28
    assert not any(p.requires_grad for p in (*policy.vae.parameters(), *policy.backbone.text_encoders[0].parameters()))
    assert not policy.network.training and not policy.vae.training


def test_sd35_medium_kind(tmp_path: Path) -> None:
    policy = load_policy(str(tiny_sd3(tmp_path, dual_attention=True)), lora=SPEC)
    assert policy.network.config.qk_norm == "rms_norm" and hasattr(policy.network.transformer_blocks[0], "attn2")
    scramble(policy)
    policy.predict(*inputs(policy)).v.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for _, p in policy.trainable)
    assert len(policy.trainable) == 28 and not any("attn2" in name for name, _ in policy.trainable)


def test_using_a_snapshot_and_restoring(policy: Policy) -> None:
    scramble(policy)
    old = velocity(policy)
    policy.add_snapshot("old")
    scramble(policy, seed=5)
    new = velocity(policy)
    assert (old - new).abs().max() > 0.05
    with policy.adapter("old"):
        assert torch.equal(velocity(policy), old)
        with policy.adapter(None):
            assert not torch.equal(velocity(policy), old)
        with policy.adapter("default"):
            assert torch.equal(velocity(policy), new)
        assert torch.equal(velocity(policy), old)
    with pytest.raises(RuntimeError, match="boom"), policy.adapter("old"):
        raise RuntimeError("boom")
    assert torch.equal(velocity(policy), new)
    with pytest.raises(ValueError, match=r'no LoRA snapshot "odl" \(nearest: "old"\)'), policy.adapter("odl"):
        pass


def test_switching_neither_copies_nor_touches_requires_grad(policy: Policy) -> None:
    policy.add_snapshot("old")

    def picture() -> list[tuple[str, int, bool]]:
        return [(n, p.data_ptr(), p.requires_grad) for n, p in policy.network.named_parameters()]

    before = picture()
    for name in ("old", None, "default"):
        with policy.adapter(name):
            assert picture() == before
    assert picture() == before


def test_backward_after_switching_has_the_same_gradients(policy: Policy) -> None:
    scramble(policy)
    policy.add_snapshot("old")
    scramble(policy, seed=5)
    arguments = inputs(policy)

    def gradients(switch: bool) -> list[Tensor]:
        v = policy.predict(*arguments).v
        if switch:
            with torch.no_grad(), policy.adapter("old"):
                policy.predict(*arguments)
        return list(torch.autograd.grad(v.square().mean(), [p for _, p in policy.trainable]))

    plain = gradients(False)
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(True), strict=True))
    policy.enable_gradient_checkpointing()
    for a, b in zip(plain, gradients(True), strict=True):
        torch.testing.assert_close(a, b)


def test_follow_copy_and_state(policy: Policy, tmp_path: Path) -> None:
    scramble(policy, seed=1)
    policy.add_snapshot("old")
    assert all(torch.equal(v, policy.state("old")[k]) for k, v in policy.state("default").items())
    old = policy.state("old")
    scramble(policy, seed=2)
    new = policy.state("default")
    policy.ema_update("old", 1.0)
    assert all(torch.equal(v, old[k]) for k, v in policy.state("old").items())
    policy.ema_update("old", 0.9)
    for key, value in policy.state("old").items():
        torch.testing.assert_close(value, 0.9 * old[key] + 0.1 * new[key])
    policy.ema_update("old", 0.0)
    assert all(torch.equal(v, new[k]) for k, v in policy.state("old").items())
    save_file(old, tmp_path / "old.safetensors")
    policy.load_state("old", load_file(tmp_path / "old.safetensors"))
    policy.copy("old", "default")
    assert all(torch.equal(v, old[k]) for k, v in policy.state("default").items())
    assert policy.adapters == ["default", "old"]
    with pytest.raises(ValueError, match='snapshot "old" already'):
        policy.add_snapshot("old")


def test_state_is_a_copy_keyed_by_layer(policy: Policy) -> None:
    state = policy.state()
    assert list(state) == [name for name, _ in policy.trainable]
    assert {"transformer_blocks.0.attn.to_q.lora_A.weight", "transformer_blocks.1.attn.to_out.0.lora_B.weight"} <= set(
        state
    )
    # The last block's text queries reach nothing, so they get no LoRA.
    assert not any("transformer_blocks.1.attn.add_q_proj" in key for key in state)
    key = next(iter(state))
    state[key].zero_()
    assert policy.state()[key].abs().sum() > 0


def test_a_state_that_does_not_fit_changes_nothing(policy: Policy, model: str) -> None:
    scramble(policy)
    before = policy.state()
    wider = load_policy(model, lora=LoraSpec(rank=8)).state()
    with pytest.raises(UserError, match=r"lora_A.weight has shape \[8, 16\], here \[4, 16\]; check lora.rank"):
        policy.load_state("default", wider)
    with pytest.raises(UserError, match=r"LoRA state: transformer_blocks.0.* is missing \(27 such tensors\)"):
        policy.load_state("default", dict(list(before.items())[-1:]))
    assert all(torch.equal(v, before[k]) for k, v in policy.state().items())


def test_the_start_depends_on_the_seed_alone(model: str) -> None:
    torch.manual_seed(1)
    first = load_policy(model, lora=SPEC, seed=7)
    stream = torch.get_rng_state()
    first.add_snapshot("old")
    assert torch.equal(torch.get_rng_state(), stream)
    torch.manual_seed(2)
    again, other = load_policy(model, lora=SPEC, seed=7).state(), load_policy(model, lora=SPEC, seed=8).state()
    assert all(torch.equal(v, again[k]) for k, v in first.state().items())
    a = torch.cat([v.flatten() for k, v in again.items() if "lora_A" in k])
    assert not torch.equal(a, torch.cat([v.flatten() for k, v in other.items() if "lora_A" in k]))
    assert a.std().item() == pytest.approx(1 / SPEC.rank, rel=0.1), "gaussian start"


def test_targets(model: str) -> None:
    policy = load_policy(model, lora=LoraSpec(rank=2, alpha=2, targets=["attn.to_q", "proj_out"]))
    assert list(policy.lora.layers) == ["transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_q", "proj_out"]
    with pytest.raises(UserError, match=r'lora.targets: .* ends in "attn.to_qq" \(nearest: "attn.to_q"\)'):
        load_policy(model, lora=LoraSpec(targets=["attn.to_k", "attn.to_qq"]))


def test_loading_a_lora_folder(policy: Policy, model: str, tmp_path: Path) -> None:
    scramble(policy)
    policy.save_lora(tmp_path)
    read = read_lora(tmp_path, policy.backbone)
    spec = read.spec
    assert (spec.rank, spec.alpha, list(spec.targets or [])) == (4, 8, list(policy.lora.layers))
    assert all(torch.equal(v, read.state[k]) for k, v in policy.state().items())
    same = load_policy(model, start=tmp_path)
    assert same.lora.spec == spec and torch.equal(velocity(same), velocity(policy))
    for other in (LoraSpec(rank=4, alpha=2), LoraSpec(rank=8)):
        folded = load_policy(model, lora=other)
        folded.load_lora(tmp_path)
        torch.testing.assert_close(velocity(folded), velocity(policy), rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match=r"its LoRA has rank 4; set lora.rank to 4"):
        load_policy(model, lora=LoraSpec(rank=2)).load_lora(tmp_path)
    with pytest.raises(UserError, match=r"its layer .*attn.to_k gets no LoRA here; add it to lora.targets"):
        load_policy(model, lora=LoraSpec(targets=["attn.to_q"])).load_lora(tmp_path)
    with pytest.raises(UserError, match=r'no LoRA ".*nowhere"'):
        policy.load_lora(tmp_path / "nowhere")
    (tmp_path / "pytorch_lora_weights.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match=r"is cut off, or no safetensors file \(4 bytes\)"):
        policy.load_lora(tmp_path)


@pytest.mark.parametrize(
    "metadata",
    [
        '{"transformer.lora_alpha": 1e308}',
        '{"transformer.lora_alpha": NaN}',
        '{"transformer.lora_alpha": null}',
        '{"transformer.r": "many"}',
        '{"transformer.r": -1}',
        '{"transformer.r": 1e999}',
        '{"transformer.target_modules": 3}',
        '{"transformer.target_modules": [3]}',
        "[]",
        "null",
        "[" * 100_000,
        "{",
    ],
)
def test_odd_metadata_of_a_lora_are_one_line(policy: Policy, tmp_path: Path, metadata: str) -> None:
    path, layer = tmp_path / "pytorch_lora_weights.safetensors", "transformer.transformer_blocks.0.attn.to_q"
    matrices = {f"{layer}.lora_{matrix}.weight": torch.ones(2, 2) for matrix in "AB"}
    save_file(matrices, path, metadata={"lora_adapter_metadata": metadata})
    with pytest.raises(UserError, match=f"{path}: ") as caught:
        policy.load_lora(tmp_path)
    assert len(str(caught.value).splitlines()) == 1
    save_file({f"{layer}.lora_B.weight": torch.ones(2, 2)}, path)
    with pytest.raises(UserError, match=f"{path}: "):
        policy.load_lora(tmp_path)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_have_the_mode_that_the_umask_gives(umask: int, tmp_path: Path) -> None:
    """A colleague, or a service of another user, reads a LoRA where the umask lets them."""
    policy = load_policy(str(tiny_sd3(tmp_path / "model")), lora=LoraSpec(rank=2, alpha=2))
    before = os.umask(umask)
    try:
        file = policy.save_lora(tmp_path / "lora")
        policy.save_lora(tmp_path / "lora")  # over the first
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o666 & ~umask
