"""Ctrl-U's confidence in `direct`, in float64: the loss and its gradient by hand, u = 0, neighbours, refusals."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import scramble

from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.methods.direct import Confidence
from diffrl.methods.direct.confidence import trusted_loss, uncertainty
from diffrl.methods.direct.objective import Direct
from diffrl.methods.marble.bank import loss_slopes
from diffrl.objectives.minibatches import sample_pairs
from diffrl.policy import LoraSpec, Policy, load_policy
from diffrl.prompts import Prompt
from diffrl.records.tracking import read_metrics
from diffrl.rollout import Rollout, SamplerSpec, collect
from diffrl.run.train import train

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from warmth import Warmth

DATA, CAP = Path(__file__).parents[1] / "data", 0.9


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    policy = load_policy(str(tiny_model), lora=LoraSpec(rank=4, alpha=8.0))
    scramble(policy)
    return policy


def rows_of(policy: Policy, direct: Direct) -> Any:
    spec = SamplerSpec(sampler="euler", steps=4, guidance_scale=1.0)
    rollout: Rollout = collect(policy, [Prompt("a", {})], spec, seed=1, epoch=0, group_size=4, batch_size=4)
    return direct.rows(rollout, torch.zeros(4, 1), sample_pairs(torch.arange(4), 2), (0,))


def test_the_loss_and_its_gradient_are_those_of_the_paper_by_hand() -> None:
    reward = torch.tensor([[0.2], [0.5], [1.4]], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([[0.5], [0.4], [1.0]], dtype=torch.float64, requires_grad=True)
    u = uncertainty(reward, other, 0.5)
    assert u.flatten().tolist() == pytest.approx([0.6, 0.2, 0.8])
    losses = trusted_loss(torch.cat([reward, u], 1), CAP, 0.3)
    wanted = [0.7 * 2.718281828459045**-0.6 + 0.18, 0.4 * 2.718281828459045**-0.2 + 0.06, 0.24]
    assert losses.flatten().tolist() == pytest.approx(wanted, abs=1e-14)
    losses.sum().backward()
    # d/dR = -e^-u + (price - relu(c - R) e^-u) du/dR, and the second part's opposite for R'
    for row, sign in enumerate((-1.0, 1.0, 1.0)):
        weight = (-u[row, 0]).exp().item()
        gap = max(CAP - reward[row, 0].item(), 0.0)
        through = (0.3 - gap * weight) * sign / 0.5
        assert reward.grad[row, 0].item() == pytest.approx(through - weight * (gap > 0), abs=1e-14)  # type: ignore[index]
        assert other.grad[row, 0].item() == pytest.approx(-through, abs=1e-14)  # type: ignore[index]


def test_without_disagreement_it_is_plain_direct(policy: Policy) -> None:
    """A neighbour that rounds to the level itself: the same loss and the same gradient of the LoRA, to the bit."""
    gradients = []
    for confidence in (None, Confidence(step=1e-12, price=0.0)):
        direct = Direct({"warmth": Warmth()}, [1.0], timesteps=2, cap=CAP, confidence=confidence)
        rows = rows_of(policy, direct)
        loss = direct.loss(direct.scalars(policy, rows), rows).sum()
        parts = torch.autograd.grad(loss, [parameter for _, parameter in policy.trainable])
        gradients.append(torch.cat([loss.detach()[None], *(part.flatten() for part in parts)]))
    assert torch.equal(*gradients)


def test_the_neighbour_has_the_rows_noise_at_a_level_beside_it(policy: Policy) -> None:
    direct = Direct({"warmth": Warmth()}, [2.0], timesteps=2, cap=CAP, confidence=Confidence(step=0.01, scale=0.1))
    rows = rows_of(policy, direct)
    phi = direct.scalars(policy, rows)
    top = float(rows.rollout.schedule[0])
    t = torch.tensor([s - 0.01 if s + 0.01 > top else s + 0.01 for s in rows.t.tolist()], dtype=rows.t.dtype)
    plain = Direct({"warmth": Warmth()}, [2.0], timesteps=2)
    x_t = policy.process.add_noise(rows.x0, rows.eps, t)
    other = plain.scalars(policy, replace(rows, x_t=x_t, t=t))
    first = plain.scalars(policy, rows)
    torch.testing.assert_close(phi, torch.cat([first, (first - other).abs() / 0.1], 1), rtol=1e-4, atol=1e-6)
    assert float(phi[:, 1].detach().min()) > 0


def test_each_reward_has_its_own_disagreement_for_marble(policy: Policy) -> None:
    direct = Direct({"a": Warmth(), "b": Warmth()}, [1.0, 3.0], timesteps=2, cap=CAP, confidence=Confidence(step=0.05))
    direct.rule = replace(direct.rule, columns="each")
    rows = rows_of(policy, direct)
    phi = direct.scalars(policy, rows)
    torch.testing.assert_close(phi[:, 1], 3 * phi[:, 0])
    torch.testing.assert_close(phi[:, 3], 3 * phi[:, 2])
    _, slopes = loss_slopes(direct, phi, rows)
    assert slopes.shape == (2, 8, 4)
    assert not slopes[0, :, [1, 3]].any() and not slopes[1, :, [0, 2]].any()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, r"direct\.confidence: weighs a loss of at least 0: give direct\.cap"),
        ({"cap": 1.0, "path": "all"}, r"direct\.confidence: is of one step .* not of direct\.path: leave one out"),
        ({"cap": 1.0, "align": {}}, r"direct\.confidence: .* direct\.align"),
        (
            {"cap": 1.0, "confidence": {"prise": 1}},
            r'direct\.confidence\.prise: .*nearest: "direct\.confidence\.price"',
        ),
    ],
)
def test_what_cannot_work_is_refused_at_its_key(config_file: Any, keys: dict[str, Any], said: str) -> None:
    given = {"objective": "direct", "rewards": {"redness": {"plugin": f"{DATA}/warmth.py:Warmth"}}}
    with pytest.raises(UserError, match=said) as caught:
        load_config(config_file("mistake", **given, direct={"confidence": {}, **keys}))
    assert "\n" not in str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("marble", [None, {"mode": "fresh"}])
def test_it_trains_and_logs_the_disagreement(tiny_model: Path, config_file: Any, marble: Any) -> None:
    rewards = {name: {"plugin": f"{DATA}/warmth.py:Warmth", "weight": w} for name, w in (("redness", 1.0), ("b", 2.0))}
    config = load_config(
        config_file(
            "run", objective="direct", rewards=rewards, direct={"cap": 9.0, "confidence": {"step": 0.05}}, marble=marble
        )
    )
    train(config)
    line = next(m for m in read_metrics(config.run_dir) if "direct/uncertainty" in m)
    assert line["direct/uncertainty"] > 0
