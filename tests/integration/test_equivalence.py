"""What must not change the result: how a step is split, and on how many processes it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launching import launch, train_on_two

from diffrl.config import load_config
from diffrl.records import checkpoint
from diffrl.records.tracking import read_metrics
from diffrl.run.train import train


def lora_of(run_dir: str | Path) -> dict[str, torch.Tensor]:
    path = checkpoint.latest(Path(run_dir))
    assert path is not None
    return checkpoint.load(path)[0]["lora"]


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Relative distance of two LoRAs, over all their numbers together."""
    difference = sum(float((a[k] - b[k]).double().square().sum()) for k in a)
    return (difference / sum(float(v.double().square().sum()) for v in b.values())) ** 0.5


def same_lora(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], whole: float = 1e-5) -> bool:
    """Equal to `whole`, and in what was learned to 1e-3: A hardly leaves its start, B starts at zero.

    Early steps of Adam divide small gradients by themselves, and so their rounding, too: an element of A whose gradient
    is all rounding moves by up to a learning rate, whichever way.
    """
    learned = [{k: v for k, v in lora.items() if k.endswith("lora_B.weight")} for lora in (a, b)]
    assert distance(a, b) < whole
    assert distance(*learned) < 1e-3
    return True


@pytest.mark.parametrize("objective", ["nft", *(pytest.param(o, marks=pytest.mark.long) for o in ("grpo", "crd"))])
def test_accumulation_of_one_by_eight_equals_eight_by_one(config_file, objective: str) -> None:
    sampler = {"sampler": "flow_sde"} if objective == "grpo" else {}
    loras = []
    for pieces in (1, 8):
        optimise = {"batch_size": 8, "micro_batch": None if pieces == 1 else 1 / pieces, "learning_rate": 1e-3}
        path = config_file(f"pieces{pieces}", objective=objective, rollout=sampler, optimise=optimise, epochs=2)
        config = load_config(path)
        train(config)
        loras.append(lora_of(config.run_dir))
    assert same_lora(*loras)


@pytest.mark.parametrize("objective", ["crd", *(pytest.param(o, marks=pytest.mark.long) for o in ("nft", "grpo"))])
def test_one_process_equals_two(config_file, tiny_model: Path, objective: str) -> None:
    """Same images, and the LoRA after 3 epochs equal to 1e-5 relative.

    With NFT launched as a user would, and also judged on a student, whose pictures they share like the model's.
    """
    sections: dict = {"objective": objective, "optimise": {"inner_epochs": 2 if objective == "grpo" else 1}}
    if objective == "grpo":
        # A clip of 1e-4 turns rounding between batch sizes into a gradient that is there or not: that is the method's.
        sections |= {"rollout": {"sampler": "flow_sde"}, "grpo": {"beta": 0.04, "clip": 0.2}}
    if objective == "nft":
        sections |= {"evaluate": {"also": {"turbo": {"model": str(tiny_model), "steps": 2}}}}
    alone, shared = (config_file(name, **sections) for name in ("alone", "shared"))
    train(load_config(alone))
    if objective == "nft":
        done = launch(2, shared)
        assert done.returncode == 0, done.stderr[-2000:]
    else:
        train_on_two(shared)
    one, two = (Path(load_config(path).run_dir) for path in (alone, shared))
    assert same_lora(lora_of(two), lora_of(one))
    own = ("reward/redness", "reward/redness/std", "diversity", "eval/redness", "eval/diversity", "loss")
    there = ("eval/turbo/redness", "eval/turbo/diversity")
    assert set(there) <= set(read_metrics(two)[-1]) or objective != "nft"
    for a, b in zip(read_metrics(one), read_metrics(two), strict=True):
        for key in (*own, *there):
            assert (key in a) == (key in b)
            if key in a:
                assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-7), key
