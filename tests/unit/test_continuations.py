"""Rollouts that score more than the final image: views from kept states, branches of a path, trees."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from diffrl.continuations import subsample_schedule, tail_sigmas
from diffrl.denoising import SamplePlan
from diffrl.methods.branches.plan import BranchPlan, every_kth
from diffrl.methods.dense.plan import PerStepViews
from diffrl.methods.tree.plan import TreePlan
from diffrl.rollout import Rollout, SamplerSpec, collect
from diffrl.samplers import euler_step, gaussian_log_prob, sde_kernel
from tests.unit.test_rollout import PROMPTS, Known, close

SPEC = SamplerSpec("flow_sde", 5, noise_level=0.7, same_noise=True)
LEVELS = [1.0, 0.8, 0.6, 0.4, 0.2, 0.0]


def draw(
    plan: SamplePlan | None, spec: SamplerSpec = SPEC, policy: Known | None = None, **options: Any
) -> tuple[Rollout, Tensor]:
    """The rollout, and its views (n, V, 3, 4, 4) as images."""
    options = {"seed": 1, "epoch": 2, "group_size": 8, "batch_size": 8, "keep_trajectory": True, **options}
    views: dict[int, list[Tensor]] = {}
    final = 0 if plan is None else plan.final(spec)
    found = collect(
        policy or Known(), PROMPTS, spec, plan=plan, **options,  # type: ignore[arg-type]
        on_batch=lambda images, part: views.setdefault(final, []).append(images),
        on_view=lambda images, part, view: views.setdefault(view, []).append(images),
    )  # fmt: skip
    return found, torch.stack([torch.cat(views[v]) for v in sorted(views)], 1)


def walk(found: Rollout, x: Tensor, levels: list[float]) -> Tensor:
    """Euler's steps from x at levels[0] to 0, and the image."""
    cond = found.cond.select(found.prompt_index)
    for level, following in pairwise(levels):
        t, t_next = torch.full((len(x),), level), torch.full((len(x),), following)
        x = euler_step(x, Known().predict(x, t, cond).v.detach(), t, t_next)
    return x.sigmoid()


def test_parts_of_the_schedule() -> None:
    assert every_kth(LEVELS, 1, 1) == LEVELS[1:] and every_kth(LEVELS, 1, 2) == [0.8, 0.6, 0.0]
    assert every_kth(LEVELS, 0, 2) == [1.0, 0.8, 0.4, 0.0] and every_kth(LEVELS, 0, 9) == [1.0, 0.0]
    assert every_kth(LEVELS, 4, 3) == [0.2, 0.0] and every_kth(LEVELS, 5, 1) == [0.0]
    assert tail_sigmas(LEVELS, 1, 0.5) == [0.8, 0.4, 0.0] and tail_sigmas(LEVELS, 0, 1.0) == LEVELS
    assert tail_sigmas(LEVELS, 3, 0.01) == [0.4, 0.0] and tail_sigmas(LEVELS, 5, 0.5) == [0.0]
    assert subsample_schedule(LEVELS, 0, 2) == [1.0, 0.6, 0.0] and subsample_schedule(LEVELS, 2, 9) == LEVELS[2:]


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("k", [0, 1, 3, 7])
def test_strides_are_those_of_g2rpos_code(k: int, stride: int) -> None:
    """After the stochastic step k its code keeps the levels k + 1 and k + 2 and every stride-th, and takes the clean
    prediction of the last step that it makes."""
    shifted = torch.linspace(1, 0, 17, dtype=torch.float64)
    sigma = (3 * shifted / (1 + 2 * shifted)).tolist()

    def velocity(x: float, t: float) -> float:
        return 0.7 * x - math.cos(3 * t)

    kept, literal, clean = [*sigma[: k + 2], *sigma[k + 2 :: stride]], 0.4, math.nan
    for i in range(k + 1, len(kept) - 1):
        v = velocity(literal, kept[i])
        clean, literal = literal - kept[i] * v, literal + (kept[i + 1] - kept[i]) * v
    x = 0.4
    for t, t_next in pairwise(every_kth(sigma, k + 1, stride)):
        x += (t_next - t) * velocity(x, t)
    assert x == pytest.approx(clean, rel=1e-12)


@pytest.mark.parametrize("common", [True, False])
def test_a_view_is_the_ode_from_the_state_and_its_first_forward_is_the_steps_own(common: bool) -> None:
    model = Known()
    found, views = draw(PerStepViews(common), policy=model)
    assert views.shape[:2] == (24, 5 + (not common))
    levels = found.schedule.tolist()
    for v in range(views.shape[1]):
        j = v + common
        state = found.trajectory.states[:, j]
        close(views[:, v], walk(found, state, levels[j:]))
    close(views[:, -1], found.latents.sigmoid())
    assert found.forwards == sum(call["size"] for call in model.calls)
    each = 5 + sum(5 - j - 1 for j in range(int(common), 5))
    assert found.forwards == 24 * each  # 5 + 4 + 3 + 2 + 1 with all steps, not 5 + (5 + 4 + 3 + 2 + 1)
    plain, _ = draw(None)
    assert torch.equal(plain.trajectory.states, found.trajectory.states)  # views change nothing of the rollout


def test_branches_are_single_steps_from_one_path() -> None:
    model, plan = Known(), BranchPlan(seeds=2, steps=(0, 2, 3), strides=(1, 2))
    found, views = draw(plan, policy=model)
    steps, levels = found.trajectory, found.schedule.tolist()
    assert views.shape[:2] == (24, 6) and steps.t[0].tolist() == [levels[0], levels[2], levels[3]]
    paths = steps.x.unflatten(0, (6, 4))  # two paths for each of three prompts
    assert torch.equal(paths, paths[:, :1].expand_as(paths)) and steps.x[:, 0].unique(dim=0).shape[0] == 6
    cond = found.cond.select(found.prompt_index)
    for k, i in enumerate(plan.steps):
        prediction = Known().predict(steps.x[:, k], steps.t[:, k], cond)
        mean, std = sde_kernel("flow_sde", steps.x[:, k], prediction, steps.t[:, k], steps.t_next[:, k], 0.7,
                               found.t_second, found.process)  # fmt: skip
        close(gaussian_log_prob(steps.x_next[:, k], mean, std).detach(), steps.log_prob[:, k])
        for place, stride in enumerate(plan.strides):
            close(views[:, 2 * k + place], walk(found, steps.x_next[:, k], every_kth(levels, i + 1, stride)))
    # 6 paths to step 3, then 4 and 2 forwards from level 1, 2 and 1 from level 3, 1 and 1 from level 4
    assert found.forwards == 6 * 4 + 24 * (4 + 2 + 2 + 1 + 1 + 1) == sum(call["size"] for call in model.calls)


def test_one_step_of_one_path_is_the_plain_rollout_with_that_window() -> None:
    found, views = draw(BranchPlan(1, (1,)))
    plain, image = draw(None, SPEC.model_copy(update={"window": 1, "window_range": (1, 2)}))
    close(views, image)
    close(found.trajectory.x_next, plain.trajectory.x_next)
    close(found.trajectory.log_prob, plain.trajectory.log_prob)
    assert found.forwards == 3 * 2 + 24 * 3 < plain.forwards == 24 * 5


def test_without_noise_a_path_has_one_image() -> None:
    levels = (1e-30,) * 5
    _, views = draw(BranchPlan(1, (0, 1), (1, 2)), SPEC.model_copy(update={"sampler": "dance"}).with_levels(levels))
    groups = views.unflatten(0, (3, 8))
    assert torch.equal(groups, groups[:, :1].expand_as(groups))


def test_a_tree_shares_its_edges() -> None:
    model, plan = Known(), TreePlan((0, 2, 3))
    found, _ = draw(plan, policy=model)
    assert [plan.nodes(i) for i in range(5)] == [2, 2, 4, 8, 8]
    # a split's edges leave from the nodes before it: 1, 2, 2, 4 and 8 forwards a tree
    assert found.forwards == 3 * (1 + 2 + 2 + 4 + 8) == sum(call["size"] for call in model.calls)
    ends = found.trajectory.x_next.unflatten(0, (3, 8))
    assert [ends[:, :, i].flatten(0, 1).unique(dim=0).shape[0] // 3 for i in range(5)] == [2, 2, 4, 8, 8]
    assert torch.equal(found.trajectory.x[:, 1:], found.trajectory.x_next[:, :-1])
    cond = found.cond.select(found.prompt_index)
    for j in range(5):
        x, t, t_next = (getattr(found.trajectory, name)[:, j] for name in ("x", "t", "t_next"))
        mean, std = sde_kernel(
            "flow_sde", x, Known().predict(x, t, cond), t, t_next, 0.7, found.t_second, found.process
        )
        close(gaussian_log_prob(found.trajectory.x_next[:, j], mean, std).detach(), found.trajectory.log_prob[:, j])


def test_a_tree_that_splits_at_once_is_the_plain_rollout() -> None:
    found, _ = draw(TreePlan((0,), branch=8))
    plain, _ = draw(None)
    close(found.trajectory.states, plain.trajectory.states)
    close(found.latents, plain.latents)
    deep, _ = draw(TreePlan((0, 1, 4)))
    close(deep.latents[::8], plain.latents[::8])  # the first member leads all of its edges


@pytest.mark.parametrize("plan", [PerStepViews(False), BranchPlan(2, (0, 3), (1, 2)), TreePlan((0, 2, 3))])
@pytest.mark.parametrize("name", ["flow_sde", "cps"])
def test_views_do_not_depend_on_batches_and_processes(plan: SamplePlan, name: str) -> None:
    spec = SPEC.model_copy(update={"sampler": name})
    whole, views = draw(plan, spec, batch_size=24)
    parts = [draw(plan, spec, batch_size=5, rank=rank, world=2) for rank in range(2)]
    close(torch.cat([part[1] for part in parts]), views)
    for kept in ("x", "x_next", "log_prob", "t", "t_next"):
        close(torch.cat([getattr(p[0].trajectory, kept) for p in parts]), getattr(whole.trajectory, kept))
    close(torch.cat([p[0].latents for p in parts]), whole.latents)
