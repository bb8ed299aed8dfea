"""The learning rate's warm-up and decay: values, and what resumes with another length or an older checkpoint do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import get_scheduler

from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.records.tracking import read_metrics
from diffrl.run.rate import LearningRate
from diffrl.run.train import train

TOTAL, WARMUP = 12, 3


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_values_are_those_of_transformers_but_for_a_first_step_of_nothing(schedule: str) -> None:
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.5)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    theirs = get_scheduler(name, optimiser, num_warmup_steps=WARMUP, num_training_steps=TOTAL)
    expected = []
    for _ in range(TOTAL):
        expected.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        theirs.step()
    ours = [LearningRate(0.5, schedule, WARMUP, TOTAL).at(step) for step in range(TOTAL)]  # type: ignore[arg-type]
    assert ours[:WARMUP] == pytest.approx([*expected[1:WARMUP], 0.5])
    assert ours[WARMUP:] == pytest.approx(expected[WARMUP:], rel=1e-12)
    assert min(ours) > 0


def test_a_constant_rate_touches_nothing() -> None:
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.3)
    LearningRate(0.5, "constant", 0, 9).set(optimiser, 4)
    assert optimiser.param_groups[0]["lr"] == 0.3 and LearningRate(0.5).metrics(4) == {}


@pytest.mark.long
def test_a_longer_resume_goes_on_along_the_longer_curve(config_file) -> None:
    path = config_file("run", epochs=1, optimise={"schedule": "linear", "warmup": 1})
    train(load_config(path))
    folder = Path(load_config(path).run_dir)
    train(load_config(path, ["epochs=3"]), resume=folder)
    short, long = (LearningRate(1e-3, "linear", 1, total) for total in (2, 6))
    rates = [row["lr"] for row in read_metrics(folder) if row["epoch"]]
    assert rates == [short.at(1), long.at(3), long.at(5)]
    assert rates[2] == pytest.approx(1e-3 / 5)


def test_a_warmup_that_is_longer_than_the_run_is_refused(config_file) -> None:
    with pytest.raises(UserError, match=r"optimise.warmup: 6 optimiser steps, but the whole run has 6"):
        load_config(config_file("run", optimise={"warmup": 6}))
