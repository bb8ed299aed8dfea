"""On-policy distillation in float64: targets as distances of velocities, padding, and the merge of the teachers."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from diffrl.errors import UserError
from diffrl.forward import FlowMatching, Process, VariancePreserving
from diffrl.methods.opd import Teacher
from diffrl.methods.opd.objective import OPD, target_weight
from diffrl.policy.lora import LoraSpec
from diffrl.policy.merging import merged, padded
from diffrl.samplers import SamplerSpec, ode_step, sde_kernel

VP = VariancePreserving(torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0))
T, T_NEXT = (torch.tensor(values, dtype=torch.float64) for values in ([1.0, 0.7, 0.3], [0.8, 0.5, 0.1]))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def two_predictions(process: Process) -> tuple:
    x = drawn(3, 4, 5, 5)
    return x, *(process.from_velocity(x, drawn(3, 4, 5, 5, seed=seed), T) for seed in (1, 2))


@pytest.mark.parametrize(
    ("name", "process"),
    [(name, FlowMatching()) for name in ("flow_sde", "dance", "cps", "renoise")] + [("ddim", VP), ("renoise", VP)],
)
def test_kl_is_the_divergence_of_the_two_steps(name: str, process: Process) -> None:
    spec = SamplerSpec(name, 4, noise_level=0.7)
    x, student, teacher = two_predictions(process)
    steps = [sde_kernel(name, x, one, T, T_NEXT, 0.7, 0.8, process) for one in (student, teacher)]
    divergence = kl_divergence(*(Normal(mean, std.expand_as(mean)) for mean, std in steps)).flatten(1).mean(1)
    error = (student.v - teacher.v).square().flatten(1).mean(1)
    weight = target_weight("kl", spec, process, T, T_NEXT, 0.7, 0.8)
    torch.testing.assert_close(weight * error, divergence, rtol=1e-10, atol=0)


@pytest.mark.parametrize(("name", "process"), [("euler", FlowMatching()), ("ddim", VP)])
def test_step_is_half_the_squared_distance_of_the_ode_steps(name: str, process: Process) -> None:
    spec = SamplerSpec(name, 4, noise_level=0.0)
    x, student, teacher = two_predictions(process)
    ends = [ode_step(name, x, one, T, T_NEXT, None, process)[0] for one in (student, teacher)]
    error = (student.v - teacher.v).square().flatten(1).mean(1)
    weight = target_weight("step", spec, process, T, T_NEXT, 0.0, 0.8)
    torch.testing.assert_close(weight * error, (ends[0] - ends[1]).square().flatten(1).mean(1) / 2)
    if isinstance(process, FlowMatching):
        torch.testing.assert_close(weight, (T - T_NEXT).square() / 2)
    assert torch.equal(target_weight("v", spec, process, T, T_NEXT, 0.0, 0.8), torch.ones_like(T))


def test_the_published_weights_of_ten_steps_lie_on_the_last() -> None:
    """Shares of ten steps at shift 3: the three last ones of dt^2 / 2 and of the KL at a = 0.7."""
    even = 1 - torch.arange(11, dtype=torch.float64) / 10
    sigmas = 3 * even / (1 + 2 * even)
    found = {}
    for target in ("step", "kl"):
        spec = SamplerSpec("flow_sde", 10, noise_level=0.7)
        weight = target_weight(target, spec, FlowMatching(), sigmas[:-1], sigmas[1:], 0.7, float(sigmas[1]))
        found[target] = (weight / weight.sum())[-3:].tolist()
    assert found["step"] == pytest.approx([0.125, 0.223, 0.436], abs=2e-3)
    assert found["kl"] == pytest.approx([0.087, 0.198, 0.624], abs=2e-3)


def lora(rank: int, seed: int) -> dict[str, torch.Tensor]:
    return {"q.lora_A.weight": drawn(rank, 7, seed=seed), "q.lora_B.weight": drawn(9, rank, seed=seed + 50)}


def product(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return state["q.lora_B.weight"] @ state["q.lora_A.weight"]


def test_a_smaller_rank_is_padded_with_nothing() -> None:
    state = lora(2, 1)
    wide = padded(state, LoraSpec(2, 6), LoraSpec(4, 4), "it")
    torch.testing.assert_close(product(wide), product(state) * 3.0, rtol=1e-12, atol=1e-14)
    assert wide["q.lora_A.weight"].shape == (4, 7) and wide["q.lora_B.weight"].shape == (9, 4)
    with pytest.raises(UserError, match=r"it: its LoRA has rank 8; set lora.rank to 8 or more \(is 4\)"):
        padded(lora(8, 1), LoraSpec(8, 8), LoraSpec(4, 4), "it")


def test_the_merge_is_the_mean_of_products_where_the_rank_suffices() -> None:
    one, two = (
        padded(lora(2, 1), LoraSpec(2, 2), LoraSpec(4, 4), ""),
        padded(lora(2, 2), LoraSpec(2, 2), LoraSpec(4, 4), ""),
    )
    mean = (product(one) + product(two)) / 2
    found = merged([one, two], start=lora(4, 3))
    torch.testing.assert_close(product(found), mean, rtol=1e-12, atol=1e-12)
    a, b = found["q.lora_A.weight"], found["q.lora_B.weight"]
    torch.testing.assert_close(b.T @ b, a @ a.T, rtol=1e-10, atol=1e-10)  # neither is larger
    factors = {key: (one[key] + two[key]) / 2 for key in one}
    assert (product(factors) - mean).norm() > 0.3 * mean.norm(), "what averages factors is something else"


def test_a_merge_of_more_is_the_nearest_of_its_rank() -> None:
    states = [padded(lora(3, seed), LoraSpec(3, 3), LoraSpec(4, 4), "") for seed in (1, 2)]
    mean = sum(map(product, states)) / 2
    u, s, vh = torch.linalg.svd(mean)
    best = u[:, :4] * s[:4] @ vh[:4]
    torch.testing.assert_close(product(merged(states, start=lora(4, 3))), best, rtol=1e-10, atol=1e-10)


def test_components_that_the_teachers_have_not_can_be_trained() -> None:
    start = lora(4, 3)
    found = merged([padded(lora(2, 1), LoraSpec(2, 2), LoraSpec(4, 4), "")], start)
    assert torch.equal(found["q.lora_A.weight"][2:], start["q.lora_A.weight"][2:])
    assert found["q.lora_B.weight"][:, 2:].eq(0).all()
    nothing = merged([{key: torch.zeros_like(value) for key, value in start.items()}], start)
    assert torch.equal(nothing["q.lora_A.weight"], start["q.lora_A.weight"]) and product(nothing).eq(0).all()


def objective(everywhere: float = 0.0) -> OPD:
    teachers = {"a": Teacher(lora="a"), "b": Teacher(lora="b", prompts=[], everywhere=everywhere)}
    return OPD(SamplerSpec("euler", 4), teachers=teachers, taught={"x": "a"}, shares={"x": 1.0})


def test_a_linear_student_becomes_its_teacher() -> None:
    """v = (W + B A) x, and the teacher's B A of the same rank: the product converges to it."""
    x, goal = drawn(40, 7), product(lora(2, 1)).T
    state = lora(2, 9)
    a, b = (state[f"q.lora_{name}.weight"].mul_(0.3).requires_grad_() for name in "AB")
    optimiser = torch.optim.LBFGS([a, b], max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-14)

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        error = (x @ (b @ a).T - x @ goal).square().mean(1)
        total = objective().plain(error[:, None], error[:, None])[0] / len(x)
        total.backward()
        return total

    optimiser.step(loss)
    torch.testing.assert_close((b @ a).T, goal, rtol=1e-5, atol=1e-5)
    assert loss() < 1e-9 and all(p.grad.abs().max() < 1e-4 for p in (a, b))


def test_an_anchor_adds_its_share_and_two_of_them_hold_to_their_mean() -> None:
    phi = drawn(5, 2).square()
    torch.testing.assert_close(objective(0.04).plain(phi, phi), (phi[:, 0] + 0.04 * phi[:, 1]).sum()[None])
    v, one, two = drawn(6).requires_grad_(), drawn(6, seed=1), drawn(6, seed=2)
    (0.3 * (v - one).square().mean() + 0.1 * (v - two).square().mean()).backward()
    torch.testing.assert_close(v.grad, 0.8 * (v - (0.75 * one + 0.25 * two)).detach() / 6)
