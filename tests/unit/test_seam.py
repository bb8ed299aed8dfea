"""The objectives' seam: a new method says only what differs, and GARDO and MARBLE wrap it as they wrap the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diffrl.config import load_config
from diffrl.objectives.objective import Decay, Objective
from diffrl.objectives.rows import Rows, row_advantages
from diffrl.policy import Policy
from diffrl.run import build as building
from diffrl.run.train import Run

WARMTH, BRIGHTNESS = (str(Path(__file__).parents[1] / "data" / f"warmth.py:{n}") for n in ("Warmth", "Brightness"))


class Regression(Objective):
    """Reward-weighted regression to the generated images: all that a method of this kind has to say."""

    samples_from = "old"

    def __init__(self, keys: Any) -> None:
        super().__init__(beta=0.1, decays={"old": Decay(value=0.5)})

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        rows.prediction = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance)
        return (rows.prediction.v - rows.velocity(policy.process)).square().flatten(1).mean(1, keepdim=True)

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        return (phi * rows.advantages.exp()).sum(0)


GARDO = {"gardo": {"auxiliary": ["brightness"], "share": 0.2}, "watch": {"brightness": {"plugin": BRIGHTNESS}}}
MARBLE = {
    "marble": {"mode": "fresh"},
    "rewards": {"redness": {"plugin": WARMTH}, "bright": {"plugin": BRIGHTNESS}},
}


@pytest.mark.parametrize(("sections", "logged"), [({}, "kl"), (GARDO, "gardo/kl_gated"), (MARBLE, "marble/cos_min")])
def test_a_new_method_trains_alone_and_wrapped(
    config_file: Any, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], logged: str
) -> None:
    monkeypatch.setattr(building, "load_value", lambda *_: Regression)
    run = Run(load_config(config_file("seam", **sections)))
    start = run.policy.state()
    run.loop.run_epoch(0)
    metrics = run.loop.run_epoch(1)
    theta, old = run.policy.state(), run.policy.state("old")
    assert metrics[logged] is not None and metrics["step"] == 4
    assert all(not torch.equal(theta[k], start[k]) for k in theta if "lora_B" in k)
    assert any(not torch.equal(theta[k], old[k]) for k in theta)  # old lags by its decay
    assert run.loop.objective.state_dict() == {"old_is_theta": False}


def test_advantages_may_differ_between_the_rows_of_an_image() -> None:
    each, rows = torch.arange(6.0).view(3, 2), torch.arange(12.0).view(3, 2, 2)
    sample, number = torch.tensor([2, 0]), torch.tensor([1, 0])
    assert row_advantages(each, sample, number).tolist() == [[4, 5], [0, 1]]
    assert row_advantages(rows, sample, number).tolist() == [[10, 11], [0, 1]]
