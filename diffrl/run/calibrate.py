"""DenseGRPO's calibrated noise (arXiv 2601.20218): before training, each step's level is moved until gains balance.

One round draws an epoch's images under the present levels psi(t), scores all views, and moves every step's level by
`CHANGE`: up where about as many images gained as lost, else down. Then psi is frozen; it is in the checkpoint.
"""

from __future__ import annotations

import torch

from diffrl.advantages import weighted_sum
from diffrl.methods.dense.credit import Dense, calibrated, gains_of
from diffrl.run.loop import Loop
from diffrl.samplers import schedule

FLOOR, TOP = 0.01, 5.0
TOLERANCE = 2.0  # e1: gains are balanced up to so many deviations of a fair coin
CHANGE = 0.01  # e2: how far a level moves in a round


def start_levels(schedule: list[float], strength: float) -> list[float]:
    """psi at the start: Flow-GRPO's a sqrt(t / (1 - t)) at each step; the paper does not say where it starts."""
    second = schedule[1]
    return [min(strength * (t / (1 - (second if t >= 1 else t))) ** 0.5, TOP) for t in schedule[:-1]]


def calibrate(loop: Loop, rounds: int) -> None:
    """Set `loop.spec`'s noise levels; every process finds the same ones, since it sees all scores.

    The first view is drawn here also where the group shares its noise: the first step's gain needs it.
    """
    credit = loop.objective.credit
    assert isinstance(credit, Dense)
    sigmas = schedule(loop.policy, loop.spec).tolist()
    levels = start_levels(sigmas, loop.spec.noise_level)
    common, credit.common = credit.common, False
    try:
        for number in range(rounds):
            loop.spec = loop.spec.model_copy(update={"noise_levels": tuple(levels)})
            loop.status(f"calibrating the noise, round {number + 1}/{rounds}")
            rollout, views, _ = loop._rollout(0, key=f"calibration-{number}")
            everything = loop.processes.gather(views.flatten(1)).unflatten(1, views.shape[1:])
            groups = torch.arange(rollout.total) // loop.settings.group_size
            members = groups[:, None] * views.shape[1] + torch.arange(views.shape[1])
            composed = loop.compose(everything.flatten(0, 1), members.flatten())[:, : len(loop.weights)]
            total = weighted_sum(composed, loop.weights).view(len(groups), -1, 1)
            gains = gains_of(total, common=False)[..., 0]
            levels = calibrated(levels, gains[~gains.isnan().any(1)], TOLERANCE, CHANGE, TOP)
    finally:
        credit.common = common
    loop.spec = loop.spec.model_copy(update={"noise_levels": tuple(levels)})
