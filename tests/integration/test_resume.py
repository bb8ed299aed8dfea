"""Killed at any moment and resumed, a run ends with the weights of one that was never stopped, to the bit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from children import in_child, replace, signal_at
from covering import some

from diffrl.config import load_config
from diffrl.records import checkpoint
from diffrl.records.tracking import read_metrics
from diffrl.run.train import train

# Where the process kills itself: (module or class path, attribute, number of the call at which it dies).
PHASES = {
    "sampling": ("diffrl.policy.base:Policy.decode", 8),
    "scoring": ("diffrl.rewards.scoring:Scorer.submit", 4),
    "optimising": ("diffrl.run.loop:Loop._step", 4),
    "between line and checkpoint": ("diffrl.run.train:Run.save", 2),
    "writing the checkpoint": ("diffrl.records.saving:_write", 10),  # 7 files each: in the middle of the second one
    "publishing the checkpoint": ("diffrl.records.saving:_publish", 2),
}


def run_and_die(config_path: Path, target: str, call: int, **replaced: Any) -> int:
    """Train in a child that kills itself at a function's `call`-th call; its exit code (0: it was never killed)."""
    return in_child(_train_to_death, config_path, target, call, replaced)


def _train_to_death(config_path: Path, target: str, call: int, replaced: dict[str, Any]) -> None:
    replace(replaced)
    signal_at(target, call)
    train(load_config(config_path))


def final_tensors(run_dir: Path) -> dict[str, dict[str, torch.Tensor]]:
    path = checkpoint.latest(run_dir)
    assert path is not None
    return checkpoint.load(path)[0]


SOME = [("writing the checkpoint", "nft"), ("optimising", "grpo")]
ALL = [*((phase, "nft") for phase in PHASES), ("sampling", "grpo"), ("optimising", "grpo")]  # only these two differ


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, dict[str, dict[str, torch.Tensor]]]:
    """What a run that was never stopped ends with, by objective: `final_tensors`."""
    return {}


@pytest.mark.parametrize(("phase", "objective"), some(ALL, *SOME))
def test_resume_is_exact(config_file, undisturbed, phase: str, objective: str) -> None:
    sampler = {"sampler": "flow_sde"} if objective == "grpo" else {}
    whole, broken = (config_file(name, objective=objective, rollout=sampler) for name in ("whole", "broken"))
    if objective not in undisturbed:
        train(load_config(whole))
        undisturbed[objective] = final_tensors(Path(load_config(whole).run_dir))
    target, call = PHASES[phase]
    assert run_and_die(broken, target, call) == -signal.SIGKILL
    config = load_config(broken)
    folder = Path(config.run_dir)
    train(config, resume=folder)
    expected, ours = undisturbed[objective], final_tensors(folder)
    assert ours.keys() == expected.keys() and {"lora", "ema", "optimiser"} <= ours.keys()
    for part, tensors in expected.items():
        for name, tensor in tensors.items():
            assert torch.equal(ours[part][name], tensor), f"{part}/{name} differs after a resume"
    assert [m["epoch"] for m in read_metrics(folder)] == [0, 1, 2, 3]
    assert not list((folder / "checkpoints").glob(".tmp*"))


@pytest.mark.long
def test_resume_is_exact_in_the_middle_of_a_schedule(config_file) -> None:
    optimise = {"schedule": "cosine", "warmup": 3}
    whole, broken = (config_file(name, optimise=optimise) for name in ("whole", "broken"))
    train(load_config(whole))
    assert run_and_die(broken, *PHASES["optimising"]) == -signal.SIGKILL
    folders = [Path(load_config(path).run_dir) for path in (whole, broken)]
    train(load_config(broken), resume=folders[1])
    expected, ours = (final_tensors(folder)["lora"] for folder in folders)
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())
    rates = [[row.get("lr") for row in read_metrics(folder)] for folder in folders]
    assert rates[0] == rates[1] and len(set(rates[0])) == 4


def test_seeds_matter_and_lora_moves(config_file) -> None:
    """The comparison above could pass on a run that never changes anything: it does not."""
    for name, seed in (("one", 0), ("two", 1)):
        train(load_config(config_file(name, seed=seed, epochs=1)))
    one, two = (final_tensors(Path(load_config(config_file(n)).run_dir))["lora"] for n in ("one", "two"))
    assert any(not torch.equal(one[k], two[k]) for k in one)
    assert all(value.abs().sum() > 0 for key, value in one.items() if "lora_B" in key)  # B starts at 0: all moved
