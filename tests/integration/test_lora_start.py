"""`lora.start`: training begins as a LoRA, whose rank may grow; a resume is exact; references are start or base."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import FSDP2, train_on
from test_equivalence import lora_of, same_lora
from test_resume import PHASES, final_tensors, run_and_die
from test_scale import UNEVEN, same_metrics
from tiny import SPEC, scramble, velocity

from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.model import load
from diffrl.policy import LoraSpec, load_policy
from diffrl.records.tracking import read_metrics
from diffrl.run.train import Run, train


@pytest.fixture
def sft(tiny_model: Path, tmp_path: Path) -> Path:
    """Somebody's LoRA of rank 4."""
    policy = load_policy(str(tiny_model), lora=SPEC)
    scramble(policy, std=0.1)
    policy.save_lora(tmp_path / "sft")
    return tmp_path / "sft"


@pytest.mark.parametrize("rank", [4, 6])
@pytest.mark.parametrize("reference", ["start", "base"])
def test_it_begins_as_the_lora(config_file: Any, tiny_model: Path, sft: Path, rank: int, reference: str) -> None:
    lora = {"rank": rank, "alpha": 8, "start": str(sft), "reference": reference}
    run = Run(load_config(config_file("run", lora=lora)))
    theirs, base = velocity(load_policy(str(tiny_model), start=sft)), velocity(load_policy(str(tiny_model)))
    assert (theirs - base).abs().max() > 1e-2
    torch.testing.assert_close(velocity(run.policy), theirs, rtol=0, atol=1e-6 * theirs.abs().max().item() + 1e-6)
    with run.policy.adapter(None):
        held = velocity(run.policy)
    assert ((held - velocity(run.policy)).square().mean() == 0) == (reference == "start")
    torch.testing.assert_close(held, theirs if reference == "start" else base, rtol=0, atol=1e-5)
    new = run.policy.state()["transformer_blocks.0.attn.to_q.lora_A.weight"][SPEC.rank :]
    assert (new.abs().sum(1) > 0).all(), "what is new can be trained"


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("reference", ["start", "base"])
def test_over_merged_loras(config_file: Any, tiny_model: Path, sft: Path, reference: str, precision: str) -> None:
    """Penalties compare with the merged model, or with that without them; of layers that train and of others."""
    policy = load_policy(str(tiny_model), lora=LoraSpec(2, 3, ["proj_out", "attn.to_q"]))
    scramble(policy, seed=5, std=0.1)
    other = policy.save_lora(sft.parent / "other").rename(sft.parent / "other.safetensors")
    lora = {"merge": [str(sft), {"file": str(other), "weight": 0.5}], "reference": reference}
    optimise = {"precision": precision, "learning_rate": 1e-12, "ema": 0}
    config = load_config(config_file("run", lora=lora, optimise=optimise, nft={"beta": 0.1}, epochs=1))
    assert config.lora.merge == [str(sft), f"{other}=0.5"]
    run = Run(config)
    kind: Any = {"precision": precision}
    merged = load_policy(str(tiny_model), merge=config.lora.merge, **kind)
    base, theirs, mine = (velocity(one) for one in (load_policy(str(tiny_model), **kind), merged, run.policy))
    rounding = 0 if precision == "fp32" else 0.05
    assert (mine - theirs).abs().max() <= rounding and (theirs - base).abs().max() > 0.2
    with run.policy.adapter(None):
        held = velocity(run.policy)
    far = (held - (mine if reference == "start" else base)).abs().max()
    assert far == 0 if reference == "start" else far < rounding + 1e-5
    train(config)
    kl = read_metrics(Path(config.run_dir))[-1]["kl"]
    assert kl > 1e-4 if reference == "base" else kl < 1e-12, "nothing is trained yet"
    model = load(config.run_dir)
    assert model.merge == config.lora.merge, "whoever loads the run has what it was trained over"
    if precision == "fp32":
        torch.testing.assert_close(velocity(model.policy), velocity(run.policy), rtol=0, atol=1e-5)
        again = {"start": config.run_dir, "merge": [str(sft)]}
        with pytest.raises(UserError, match=r"lora\.start: .* was trained over merged LoRAs: set lora\.merge to \["):
            load_config(config_file("again", lora=again))


@pytest.mark.long
@pytest.mark.parametrize("door", ["start", "merge"])
def test_a_resume_is_exact_and_of_the_same_file(config_file: Any, tiny_model: Path, sft: Path, door: str) -> None:
    """After kill -9 in the second epoch."""
    given = {"start": str(sft), "rank": 6, "reference": "start"} if door == "start" else {"merge": str(sft)}

    def config(name: str, epochs: int = 2) -> Any:
        return config_file(name, lora={"alpha": 8, **given}, epochs=epochs, nft={"beta": 0.5})

    train(load_config(config("whole")))
    assert run_and_die(config("broken"), *PHASES["optimising"]) == -signal.SIGKILL
    broken = load_config(config("broken"))
    train(broken, resume=Path(broken.run_dir))
    ends = [final_tensors(sft.parent / name) for name in ("whole", "broken")]
    for part, tensors in ends[0].items():
        assert all(torch.equal(value, ends[1][part][key]) for key, value in tensors.items()), part
    policy = load_policy(str(tiny_model), lora=SPEC)
    scramble(policy, seed=9, std=0.1)
    policy.save_lora(sft)
    with pytest.raises(UserError, match=rf"lora\.{door}"):
        train(load_config(config("broken", 3)), resume=Path(broken.run_dir))


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_merged_before_the_weights_are_converted(config_file: Any, tiny_model: Path, sft: Path, base: str) -> None:
    if base == "nf4":
        pytest.importorskip("bitsandbytes")
    lora = {"merge": [str(sft)], "reference": "base"}
    run = Run(load_config(config_file("run", lora=lora, engine={"base": base})))
    merged = load_policy(str(tiny_model), merge=[str(sft)], base=base)
    assert torch.equal(velocity(run.policy), velocity(merged))
    theirs = load_policy(str(tiny_model), start=sft).state()
    for name, layer in run.policy.lora.layers.items():
        a, b = (theirs[f"{name}.{matrix}.weight"] for matrix in ("lora_A", "lora_B"))
        taken = layer.lora_B["base"].weight @ layer.lora_A["base"].weight
        torch.testing.assert_close(taken, -SPEC.scale * b @ a)
    with run.policy.adapter(None):
        assert (velocity(run.policy) - velocity(merged)).abs().max() > 0.1


@pytest.mark.long
@pytest.mark.parametrize("reference", ["start", "base", "dora"])
def test_spread_over_two_processes_it_is_the_same_run(config_file: Any, sft: Path, reference: str) -> None:
    """By FSDP2; over a merged LoRA, beginning as another; and a DoRA, whose norms are of the whole weights."""
    lora = {"merge": [str(sft)], "start": str(sft), "reference": reference}
    if reference == "dora":
        lora = {"merge": [str(sft)], "kind": "dora"}
    sections = {**UNEVEN, "lora": lora, "epochs": 2, "nft": {"beta": 0.5}}
    alone, shared = (config_file(name, **sections) for name in ("alone", "sharded"))
    train(load_config(alone))
    assert "which share the network (FSDP2)" in train_on(2, shared, **FSDP2)
    one, two = (Path(load_config(path).run_dir) for path in (alone, shared))
    assert same_lora(lora_of(two), lora_of(one))
    same_metrics(one, two)


def test_a_start_that_does_not_fit_is_said(config_file: Any, sft: Path) -> None:
    for lora, message in (
        ({"start": str(sft) + "x"}, 'lora.start: no LoRA .* .nearest: "sft"'),
        ({"start": str(sft), "rank": 2}, "its LoRA has rank 4; set lora.rank to 4"),
        ({"start": str(sft), "targets": ["attn.to_q"]}, "add it to lora.targets"),
    ):
        with pytest.raises(UserError, match=message):
            Run(load_config(config_file("run", lora=lora)))
