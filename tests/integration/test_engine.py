"""Attention kernels, compiled blocks, an autoencoder that comes and goes, 8-bit moments: the same run otherwise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_equivalence import lora_of, same_lora
from test_resume import PHASES, final_tensors, run_and_die
from tiny import tiny_flux, tiny_sd, tiny_sd3

from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.policy import LoraSpec, Policy, load_policy
from diffrl.policy.engine import compile_blocks, set_attention
from diffrl.run.train import Run, train


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    folder = tmp_path_factory.mktemp("engine")
    paths = {"sd3": tiny_sd3(folder / "sd3"), "flux": tiny_flux(folder / "flux"), "sd": tiny_sd(folder / "sd")}
    return {name: load_policy(str(path), lora=LoraSpec(rank=2, alpha=4)) for name, path in paths.items()}


def predicted(policy: Policy, seed: int = 0) -> torch.Tensor:
    x_t = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(seed))
    return policy.predict(x_t, torch.tensor([0.9, 0.3]), policy.encode(["red a", "red b"])).v


def test_an_attention_kernel_is_the_networks_or_refused_with_the_reason(policies: dict[str, Policy]) -> None:
    flux = policies["flux"]
    before = predicted(flux)
    set_attention(flux.backbone.network, "native")
    kernels = {str(p._attention_backend) for p in flux.backbone.network.attn_processors.values()}  # type: ignore[operator, union-attr]
    assert len(kernels) == 1 and "native" in kernels.pop().lower()
    torch.testing.assert_close(predicted(flux), before)
    with pytest.raises(UserError, match=r'"natve" is not a kernel of diffusers \(nearest: "native"\); .*flash'):
        set_attention(flux.backbone.network, "natve")
    with pytest.raises(UserError, match=r'"auto" is not a kernel of diffusers.*; there are .*native'):
        set_attention(flux.backbone.network, "auto")
    with pytest.raises(UserError, match=r'engine.attention: "sage" cannot run here \(.*sageattention'):
        set_attention(flux.backbone.network, "sage")
    for name in ("sd3", "sd"):
        network = policies[name].backbone.network
        set_attention(network, "native")
        with pytest.raises(UserError, match=r'^engine.attention: "flash", but .* has older attention'):
            set_attention(network, "flash")
        if not torch.cuda.is_available():
            with pytest.raises(UserError, match=r'"xformers" cannot run here \(.+\)'):
                set_attention(network, "xformers")


@pytest.mark.long
def test_compiled_blocks_predict_the_same_with_every_snapshot(policies: dict[str, Policy]) -> None:
    """Dynamo traces the blocks, and must see a switch of snapshots; the backend does not matter for that."""
    torch.manual_seed(0)
    for policy in policies.values():
        policy.add_snapshot("old")
        with torch.no_grad():
            for _, parameter in policy.trainable:
                parameter.normal_(std=0.3)
        names: list[str | None] = [None, "default", "old"]

        def all_of(policy: Policy = policy, names: list[str | None] = names) -> list[torch.Tensor]:
            found = []
            for name in names:
                with policy.adapter(name):
                    found.append(predicted(policy).detach())
            return found

        expected = all_of()
        # Traced operations may sum in another order; another snapshot is a hundred times further away than that.
        assert min((expected[0] - expected[1]).abs().max(), (expected[1] - expected[2]).abs().max()) > 1e-2
        assert compile_blocks(policy.backbone.network, backend="eager") >= 2
        for ours, theirs in zip(all_of(), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        torch.compiler.reset()


@torch._dynamo.config.patch(recompile_limit=8)
def test_no_graph_of_a_compiled_block_is_given_up() -> None:
    """Torch's own limit is 8, and the ninth would run eager without a word: CRD with an average and evaluations."""
    from torch._dynamo.testing import CompileCounter

    class Block(torch.nn.Module):
        snapshot = ""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + len(self.snapshot)

    class Network(torch.nn.Module):
        _repeated_blocks = ("Block",)

        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

    counter, network = CompileCounter(), Network()
    assert compile_blocks(network, backend=counter) == 1
    for count in range(10):
        network.block.snapshot = "a" * count
        assert float(network.block(torch.zeros(()))) == count
    torch.compiler.reset()
    assert counter.frame_count == 10


@pytest.mark.long
def test_a_compiled_run_is_the_same_run(config_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, compiled = (config_file(name, epochs=2) for name in ("plain", "compiled"))
    train(load_config(plain))
    seen: list[int] = []

    def traced(network: Any) -> None:
        seen.append(compile_blocks(network, backend="aot_eager"))  # as inductor, without its compiler's seconds

    monkeypatch.setattr("diffrl.policy.engine.compile_blocks", traced)
    train(load_config(compiled, ["engine.compile=true", "optimise.gradient_checkpointing=true"]))
    torch.compiler.reset()
    assert seen == [2]
    assert same_lora(lora_of(load_config(compiled).run_dir), lora_of(load_config(plain).run_dir))


@pytest.mark.long
def test_eight_bit_moments_train_and_resume_to_the_bit(config_file: Any) -> None:
    pytest.importorskip("bitsandbytes")
    # Only matrices of at least 4,096 numbers get 8 bits: rank 256 makes some of that size.
    sections = {"lora": {"rank": 256, "alpha": 256}, "engine": {"optimiser": "adamw8bit"}}
    undisturbed, broken = (config_file(name, **sections) for name in ("undisturbed", "broken"))
    train(load_config(undisturbed))
    run = Run(load_config(undisturbed))
    run.restore()
    kinds = {
        value.dtype for state in run.optimiser.state.values() for value in state.values() if torch.is_tensor(value)
    }
    assert torch.uint8 in kinds
    assert run_and_die(broken, *PHASES["optimising"]) == -signal.SIGKILL
    folder = Path(load_config(broken).run_dir)
    train(load_config(broken), resume=folder)
    expected, found = final_tensors(Path(load_config(undisturbed).run_dir)), final_tensors(folder)
    for part, tensors in expected.items():
        assert all(torch.equal(found[part][name], tensor) for name, tensor in tensors.items()), part


def test_what_cannot_run_here_is_one_line(config_file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = config_file("refused")
    assert main(["train", str(path), "engine.attention=flsh"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "engine.attention" in said[0] and "flash" in said[0]
    assert not Path(load_config(path).run_dir).exists()


@pytest.mark.long
def test_what_the_launcher_asks_for_in_vain_is_said(config_file) -> None:
    """accelerate's own mixed precision and compilation act on what it prepares: here the config decides."""
    asked = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DYNAMO_BACKEND": "inductor", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "diffrl", "train", str(config_file("told")), "--dry-run"]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "accelerate's mixed_precision bf16 is not used; optimise.precision is fp32" in done.stderr
    assert "accelerate's dynamo_backend INDUCTOR is not used" in done.stderr
