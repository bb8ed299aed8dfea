"""What needs not be on a device at one time: FSDP2 loads block by block, a network makes room for text encoders."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_pretend_processes import FSDP2, on_two
from tiny import tiny_flux

from diffrl.config import load_config
from diffrl.rewards.registry import load_reward
from diffrl.run.run import Run

SCRIPT = Path(__file__).parents[1] / "sharded_gradients.py"
sys.path.insert(0, str(SCRIPT.parent))
from sharded_gradients import gradients_of  # noqa: E402


def large_flux(folder: Path) -> Path:
    """Thirteen blocks of 9 MiB each, beside tiny text encoders and a tiny autoencoder."""
    from diffusers import FluxTransformer2DModel

    tiny_flux(folder)
    config = dict(FluxTransformer2DModel.load_config(folder, subfolder="transformer"))
    config |= {"num_layers": 12, "num_single_layers": 1, "num_attention_heads": 8, "attention_head_dim": 32}
    torch.manual_seed(0)
    FluxTransformer2DModel.from_config(config | {"axes_dims_rope": (8, 12, 12)}).save_pretrained(folder / "transformer")
    return folder


def test_attention_on_cuda_is_not_cudnns(config_file: Any) -> None:
    """Whose backward pass is broken on Hopper, and whose forward on Blackwell: of a model, and of a reward alone."""
    run = Run(load_config(config_file("plain"), []))
    run.close()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    load_reward("jpeg")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_fsdp2_trains_a_network_that_no_device_could_hold(config_file: Any, tmp_path: Path) -> None:
    model = large_flux(tmp_path / "model")
    path = config_file(
        "large",
        model=str(model),
        rollout={"groups": 2, "group_size": 2, "steps": 2, "batch_size": 2, "resolution": 16},
        optimise={"batch_size": 4, "micro_batch": 0.5, "learning_rate": 1e-12, "gradient_checkpointing": True},
        lora={"rank": 2, "alpha": 4.0},
    )
    run = Run(load_config(path))
    network = sum(p.nbytes for p in run.policy.backbone.network.parameters())
    run.close()
    del run
    expected, line = gradients_of(path)
    limit = int(0.8 * network)
    out = tmp_path / "two.pt"
    given = [str(SCRIPT), str(out), str(path)]
    done = on_two(given, **FSDP2, PRETEND_GIB=str(limit / 2**30))
    assert [code for code, _ in done] == [0, 0], "\n".join(text[-2500:] for _, text in done)
    gradients, sharded = torch.load(out, weights_only=True, map_location="cpu")[str(path)]
    assert sharded["sharded"] and sharded["loss"] == pytest.approx(line["loss"], rel=1e-5)
    assert len(gradients) == len(expected) > 0
    for ours, theirs in zip(gradients, expected, strict=True):
        assert theirs.norm() > 0 and float((ours - theirs.cpu()).norm() / theirs.norm()) < 1e-4
    # The network itself does not fit: each process for itself, without sharding, ends.
    alone = on_two(given, PRETEND_GIB=str(limit / 2**30))
    assert all(code != 0 and "out of memory" in text for code, text in alone), alone


def test_the_network_makes_room_for_the_encoders_and_nothing_else_changes(config_file: Any) -> None:
    found: dict[str, tuple[int, int, dict[str, torch.Tensor]]] = {}
    for where in ("beside", "apart"):
        gc.collect()
        run = Run(load_config(config_file(where), [f"engine.encoders={where}"]))
        run.loop.run_epoch(0)  # merged weights and moments are there, too
        network = sum(p.nbytes for p in run.policy.backbone.network.parameters())
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run.policy.texts.learn(["a text that is new"])
        peak = torch.cuda.max_memory_allocated() - before
        assert run.policy.texts.visits == 2
        assert all(not p.is_cuda for encoder in run.policy.backbone.text_encoders for p in encoder.parameters())
        run.loop.run_epoch(1)
        found[where] = peak, network, run.policy.state()
        run.close()
        del run
    (beside, network, one), (apart, _, two) = found["beside"], found["apart"]
    assert beside > 2**15 and apart <= max(beside - network, 0) + 2**12  # on top of what was there before
    assert all(torch.equal(one[name], two[name]) for name in one)
