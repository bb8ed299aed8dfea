"""`lora.start`: training begins as a LoRA, whose rank may grow; a resume is exact; references are start or base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import SPEC, scramble, velocity

from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.policy import load_policy
from diffrl.records import checkpoint
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
    with run.policy.using(None):
        held = velocity(run.policy)
    assert ((held - velocity(run.policy)).square().mean() == 0) == (reference == "start")
    torch.testing.assert_close(held, theirs if reference == "start" else base, rtol=0, atol=1e-5)
    new = run.policy.state()["transformer_blocks.0.attn.to_q.lora_A.weight"][SPEC.rank :]
    assert (new.abs().sum(1) > 0).all(), "what is new can be trained"


def test_a_resume_is_exact_and_of_the_same_file(config_file: Any, tiny_model: Path, sft: Path) -> None:
    def config(name: str, epochs: int) -> Any:
        sections = {"lora": {"rank": 6, "alpha": 8, "start": str(sft)}, "epochs": epochs}
        return load_config(config_file(name, **sections))

    train(config("whole", 2))
    broken = config("broken", 1)
    train(broken)
    train(config("broken", 2), resume=Path(broken.run_dir))
    ends = [
        checkpoint.load(Path(config(name, 2).run_dir) / "checkpoints/step-000002")[0] for name in ("whole", "broken")
    ]
    assert all(torch.equal(value, ends[1]["lora"][key]) for key, value in ends[0]["lora"].items())
    policy = load_policy(str(tiny_model), lora=SPEC)
    scramble(policy, seed=9, std=0.1)
    policy.save_lora(sft)
    with pytest.raises(UserError, match=r"lora\.start"):
        train(config("broken", 3), resume=Path(broken.run_dir))


def test_a_start_that_does_not_fit_is_said(config_file: Any, sft: Path) -> None:
    for lora, message in (
        ({"start": str(sft) + "x"}, 'lora.start: no LoRA .* .nearest: "sft"'),
        ({"start": str(sft), "rank": 2}, "its LoRA has rank 4; set lora.rank to 4"),
        ({"start": str(sft), "targets": ["attn.to_q"]}, "add it to lora.targets"),
    ):
        with pytest.raises(UserError, match=message):
            Run(load_config(config_file("run", lora=lora)))
