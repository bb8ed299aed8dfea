"""MARBLE's numbers: gradients of all rewards from m backward passes, the QP, and what they must not depend on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from tiny import scramble, tiny_sd3
from torch import Tensor

from diffrl.methods.crd.objective import CRD
from diffrl.methods.grpo.objective import GRPO
from diffrl.methods.marble.bank import PerRewardGradients, columns_of, loss_slopes
from diffrl.methods.marble.combiner import Marble
from diffrl.methods.marble.gradients import _GRAM_CHUNK, LoraGradients, gram_matrix
from diffrl.methods.marble.simplex import min_norm_weights, residual
from diffrl.methods.nft.objective import NFT, nft_loss
from diffrl.objectives.advantages import ScoredBatch
from diffrl.objectives.gradients import SumOfLosses
from diffrl.objectives.minibatches import sample_pairs
from diffrl.objectives.objective import Objective, OptimiserStep
from diffrl.policy import LoraSpec, Policy, load_policy
from diffrl.prompts import Prompt
from diffrl.rollout import Rollout, SamplerSpec, collect

SCALER = torch.amp.GradScaler("cpu", enabled=False)
GROUP, PROMPTS = 3, [Prompt("a red dog"), Prompt("two cats and a hat")]
ONE = ["nft", "grpo", "dppo", "crd"]
ON_STEPS = ("grpo", "dppo")
CFG = SamplerSpec("flow_sde", 3, guidance_scale=2.0, noise_level=0.7)


# ---- one optimiser step with K rewards, of any objective


@dataclass
class Case:
    """An optimiser step: micro-batches of all (sample, timestep) rows, and K advantages of each sample."""

    policy: Policy
    objective: Objective
    rollout: Rollout
    advantages: Tensor  # (n, K)
    parts: tuple[Tensor, ...]

    @property
    def rows_of_step(self) -> int:
        return sum(map(len, self.parts))

    def begin(self) -> None:
        self.objective.before_step(
            self.policy, OptimiserStep(self.rollout, self.advantages, self.parts, (0,), lambda x: x)
        )

    def rows(self, part: Tensor) -> Any:
        return self.objective.batch(self.rollout, self.advantages, part, (0,))

    def run(self, gradients: Any) -> Tensor:
        """(size,) what the gradients leave in the LoRA."""
        self.begin()
        for part in self.parts:
            gradients.add(self.objective, self.policy, self.rows(part), self.rows_of_step, SCALER)
        parameters = [p for _, p in self.policy.trainable]
        gradients.finish(parameters, None)
        total = torch.cat([p.grad.flatten() for p in parameters])
        for parameter in parameters:
            parameter.grad = None
        return total


def make_objective(name: str, beta: float) -> Objective:
    if name == "grpo":
        return GRPO(CFG, beta=beta, clip=0.02)
    if name == "dppo":  # a mask by row and reward
        return GRPO(CFG, beta=beta, delta=1e-5)
    if name == "crd":
        return CRD(beta=(1e-4, beta) if beta else 0.0, anchor_guidance=2.0)
    return NFT(beta=beta, b=0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_sd3(tmp_path_factory.mktemp("marble") / "sd3", dual_attention=True)


@pytest.fixture(scope="module")
def policy(model: Path) -> Policy:
    """Loaded once; every case sets its LoRAs anew and takes off what captured gradients."""
    policy = load_policy(str(model), lora=LoraSpec(rank=4, alpha=8))
    for snapshot in ("old", "sampling"):
        policy.add_snapshot(snapshot)
    return policy


def plain(policy: Policy) -> None:
    """Take off what a case before has left on the LoRA's matrices."""
    for layer in policy.lora.layers.values():
        for matrix in (layer.lora_A, layer.lora_B):
            vars(matrix["default"]).pop("forward", None)
            matrix["default"].weight.grad = None


@pytest.fixture
def make(policy: Policy) -> Callable[..., Case]:
    """A step with random scores, of which the last reward applies to the first prompt only. One case at a time."""

    def case(name: str = "nft", rewards: int = 2, pieces: int = 1, beta: float = 0.0, on_policy: bool = False) -> Case:
        plain(policy)
        objective = make_objective(name, beta)
        objective.rule = replace(objective.rule, columns=columns_of("fresh", True))
        scramble(policy, std=0.1)
        for snapshot in ("old", "sampling"):
            policy.copy("default", snapshot)
        spec = CFG if name in ON_STEPS else SamplerSpec("dpm2", 3)
        rollout = collect(
            policy, PROMPTS, spec, seed=0, epoch=0, group_size=GROUP, batch_size=6, keep_trajectory=name in ON_STEPS
        )
        if not on_policy:
            if objective.snapshots and name not in ON_STEPS:
                scramble(policy, "old", seed=2, std=0.1)
            else:  # a step that stays near, so that some ratios are clipped and some are not
                state = policy.state()
                policy.load_state("default", {k: v + 0.01 * v.sign() for k, v in state.items()})
            objective.after_step(policy, 1)
        groups = torch.arange(2).repeat_interleave(GROUP)
        scores = torch.rand(2 * GROUP, rewards, generator=torch.Generator().manual_seed(rewards))
        if rewards > 1:
            scores[GROUP:, -1] = torch.nan
        empty = torch.zeros(2 * GROUP, 0)
        advantages = objective.shaped(ScoredBatch(scores, torch.ones(rewards), groups, empty, empty))
        parts = sample_pairs(torch.arange(2 * GROUP), objective.rows_per_sample(rollout)).tensor_split(pieces)
        return Case(policy, objective, rollout, advantages, parts)

    return case


def by_definition(case: Case, masked: bool = True) -> tuple[Tensor, Tensor]:
    """(K, size) gradients by one ordinary backward pass for each reward, and (size,) of the penalty.

    `masked`: rows that a reward does not apply to are left out of its gradient, where the objective says so (NFT);
    under the others they have no part in it.
    """
    plain(case.policy)
    case.begin()
    parameters = [p for _, p in case.policy.trainable]
    total, penalty = 0.0, 0.0
    for part in case.parts:
        rows = case.rows(part)
        rows.known = rows.known if masked else None
        losses = case.objective.loss(case.objective.scalars(case.policy, rows), rows) / case.rows_of_step
        extra = case.objective.penalty(case.policy, rows)
        total = total + torch.stack([flat(loss, parameters) for loss in losses])
        penalty = penalty + (0.0 if extra is None else flat(extra.sum() / case.rows_of_step, parameters))
    return total, penalty  # type: ignore[return-value]


def flat(value: Tensor, parameters: list[Tensor]) -> Tensor:
    grads = torch.autograd.grad(value, parameters, retain_graph=True)
    return torch.cat([g.flatten() for g in grads])


def bank_of(case: Case, marble: Marble | None = None) -> Tensor:
    """(K, size) gradients by the constant-cost path."""
    marble = marble or Marble([str(k) for k in range(case.advantages.shape[1])], mode="fresh")
    case.begin()
    for part in case.parts:
        marble.add(case.objective, case.policy, case.rows(part), case.rows_of_step, SCALER)
    assert marble._bank is not None
    rewards = case.advantages.shape[1]
    gradients = marble._bank.gradients
    shared = gradients[rewards] if len(gradients) > rewards else 0.0
    return gradients[:rewards] + shared


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("rewards", [1, 2, 5, 50])
@pytest.mark.parametrize("name", ONE)
def test_gradients_of_k_rewards_equal_k_backward_passes(make, name: str, rewards: int) -> None:
    expected, penalty = by_definition(make(name, rewards, beta=0.1))
    for pieces in (1, 3) if rewards == 5 else (1,):
        case = make(name, rewards, pieces, beta=0.1)
        ours = bank_of(case)
        for k in range(rewards):
            assert distance(ours[k], expected[k]) < 1e-5
        own = torch.cat([p.grad.flatten() for _, p in case.policy.trainable])
        assert distance(own, penalty) < 1e-5, "the penalty stays outside"


def test_the_shared_pass_is_left_out_only_while_it_is_zero(make, monkeypatch) -> None:
    """While old is theta NFT's L+ + L- pulls nowhere: one pass serves all rewards; afterwards it takes two."""
    passes = []
    into = LoraGradients.into
    monkeypatch.setattr(LoraGradients, "into", lambda self, *args: (passes.append(args), into(self, *args))[1])
    for on_policy, count in ((True, 1), (False, 2)):
        expected, _ = by_definition(make("nft", 5, on_policy=on_policy))
        passes.clear()
        assert max(map(distance, bank_of(make("nft", 5, on_policy=on_policy)), expected)) < 1e-5
        assert len(passes) == count


@pytest.mark.parametrize("name", ONE)
def test_one_reward_steps_as_the_objective_alone_does(make, name: str) -> None:
    plain = make(name, 1, beta=0.1).run(SumOfLosses())
    for mode in ("fresh", "full", "amortised"):
        assert distance(make(name, 1, beta=0.1).run(Marble(["a"], mode=mode)), plain) < 1e-5


@pytest.mark.parametrize("name", ["nft", "grpo", "crd"])
def test_a_step_is_the_papers_direction_in_float64(make, name: str) -> None:
    """d = (sum alpha_k g_k / ||g_k||) mean ||g_k|| with alpha from a general solver, and the penalty added."""
    gradients, penalty = (g.double().numpy() for g in by_definition(make(name, 4, beta=0.1)))
    gradients[-1] *= 2  # the mean over the rows to which it applies: one prompt's of two
    norms = np.linalg.norm(gradients, axis=1)
    unit = gradients / norms[:, None]
    alpha = solve_by_scipy(unit @ unit.T)
    marble = Marble(list("abcd"), mode="fresh", smoothing=0.0)
    step = make(name, 4, beta=0.1).run(marble)
    assert np.allclose(marble.ema, alpha, atol=1e-5)
    assert distance(step.double(), torch.from_numpy((alpha @ unit) * norms.mean() + penalty)) < 1e-4
    metrics = marble.metrics()
    cosines = unit @ (alpha @ unit) / np.linalg.norm(alpha @ unit)
    assert metrics["marble/cos_min"] == pytest.approx(cosines.min(), abs=1e-4) and cosines.min() > 0
    assert metrics["marble/cos_mean"] == pytest.approx(cosines.mean(), abs=1e-4)
    assert metrics["marble/cos_var"] == pytest.approx(cosines.var(), abs=1e-4)
    assert [metrics[f"marble/norm/{k}"] for k in "abcd"] == pytest.approx(list(norms), rel=1e-5)
    assert metrics["marble/conflict"] == 0.0


def test_k_passes_and_constant_cost_take_the_same_step(make) -> None:
    steps = [make("grpo", 4, pieces=2).run(Marble(list("abcd"), mode=mode)) for mode in ("full", "fresh")]
    assert distance(*steps) < 1e-5


def test_permuted_rewards_get_permuted_coefficients(make) -> None:
    order = [2, 0, 3, 1]
    one, other = make("nft", 4), make("nft", 4)
    other.advantages = other.advantages[:, order]
    other.objective.known = other.objective.known[:, order]
    first, second = (Marble(list("abcd"), mode="fresh", smoothing=0.0) for _ in range(2))
    assert distance(other.run(second), one.run(first)) < 1e-5
    assert np.allclose(second.ema, first.ema[order], atol=1e-6)
    assert first.ema.std() > 0.01  # they differ, or permuting would say nothing


def test_a_reward_times_a_thousand_changes_nothing(make) -> None:
    case = make("nft", 3)
    groups = torch.arange(2).repeat_interleave(GROUP)
    scores, empty = torch.rand(2 * GROUP, 3, dtype=torch.float64), torch.zeros(2 * GROUP, 0)
    steps, marbles = [], []
    for factor in (1.0, 1000.0):
        scaled = (scores * torch.tensor([factor, 1.0, 1.0])) * 1e4  # far above the 1e-4 that guards a std of zero
        case.advantages = case.objective.shaped(ScoredBatch(scaled, torch.ones(3), groups, empty, empty)).float()
        marbles.append(Marble(list("abc"), mode="fresh", smoothing=0.0))
        steps.append(case.run(marbles[-1]))
    assert distance(*steps) < 1e-5
    assert np.allclose(marbles[0].ema, marbles[1].ema, atol=1e-5)


def test_between_two_solves_one_pass_mixes_the_losses_by_the_smoothed_coefficients(make) -> None:
    marble = Marble(list("abc"), mode="amortised", every=3, smoothing=0.5)
    case = make("nft", 3, beta=0.1)
    expected, penalty = by_definition(case, masked=False)
    case.run(marble)
    assert not np.allclose(marble.ema, 1 / 3)
    kept = marble.ema.copy()
    for _ in range(2):
        assert distance(case.run(marble), torch.from_numpy(kept).float() @ expected + penalty) < 1e-5
    assert np.array_equal(marble.ema, kept)
    case.advantages, case.objective.known = case.advantages.flip(0), case.objective.known.flip(0)
    case.run(marble)  # the fourth step solves again
    assert not np.array_equal(marble.ema, kept)


def test_the_loss_at_mixed_advantages_is_the_mix_of_losses() -> None:
    """Proposition 1, float64: sum_k alpha_k grad l(A_k) = grad l(sum_k alpha_k A_k) while nothing is clipped."""
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    features = torch.randn(6, 2, 7, generator=generator, dtype=torch.float64)
    advantages = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    alpha = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)

    def gradient(a: Tensor) -> Tensor:
        phi = (features @ theta).square()
        return torch.stack(
            [torch.autograd.grad(v, theta, retain_graph=True)[0] for v in nft_loss(phi, a, 5, 0.1).sum(0)]
        )

    mixed = advantages @ alpha
    assert torch.allclose(alpha @ gradient(advantages), gradient(mixed[:, None])[0], rtol=1e-12)
    clipped = 10 * advantages
    assert not torch.allclose(alpha @ gradient(clipped), gradient(10 * mixed[:, None])[0], rtol=1e-3)


def test_a_reward_without_signal_is_left_out_and_keeps_its_coefficient(make) -> None:
    case = make("nft", 3)
    gradients = by_definition(case)[0][[0, 2]]
    gradients[1] *= 2
    marble = Marble(list("abc"), mode="fresh", smoothing=0.5, smooth="everywhere")
    case.run(marble)
    before = marble.ema.copy()
    case.advantages = case.advantages.clone()
    case.advantages[:, 1] = 0.0
    norms = gradients.norm(dim=1).double()
    step = case.run(marble)
    assert marble.ema[1] == before[1] and marble.ema[0] != before[0]
    assert marble.ema.sum() == pytest.approx(1.0)
    used = torch.from_numpy(marble.ema[[0, 2]] / marble.ema[[0, 2]].sum())
    assert distance(step.double(), (used / norms) @ gradients.double() * norms.mean()) < 1e-4
    first, none, last = json.loads(marble.metrics()["marble/steps"])[-1]["cos"]
    cosines = torch.cosine_similarity(step[None], gradients)
    assert (first, last) == (pytest.approx(float(cosines[0]), abs=1e-3), pytest.approx(float(cosines[1]), abs=1e-3))
    assert none is None

    case.advantages = torch.zeros_like(case.advantages)  # nobody has a signal: the objective's own step
    kept = marble.ema.copy()
    step = case.run(marble)
    each = by_definition(case)[0] * torch.tensor([[1.0], [1.0], [2.0]])
    assert distance(step, each.mean(0)) < 1e-5
    assert np.array_equal(marble.ema, kept)


def test_the_weighted_sum_is_measured_without_being_changed(make) -> None:
    case = make("grpo", 3)
    total = case.advantages.sum(1, keepdim=True)
    expected = replace(case, advantages=total).run(SumOfLosses())
    each, _ = by_definition(case)
    case.advantages = torch.cat([case.advantages, total], dim=1)
    marble = Marble(list("abc"), mode="sum")
    assert distance(case.run(marble), expected) < 1e-5
    cosines = torch.cosine_similarity(each, expected[None])
    metrics = marble.metrics()
    assert metrics["marble/cos_min"] == pytest.approx(float(cosines.min()), abs=1e-4)
    assert metrics["marble/conflict"] == float(cosines.min() < 0)
    assert "marble/alpha/a" not in metrics


def test_uniform_coefficients(make) -> None:
    case = make("nft", 2)
    each, _ = by_definition(case)
    means = each * torch.tensor([[1.0], [2.0]])  # over the rows to which a reward applies
    norms = means.norm(dim=1)
    balanced = (means / norms[:, None]).mean(0) * norms.mean()
    for measure in (True, False):
        assert distance(case.run(Marble(["a", "b"], mode="uniform", measure=measure)), balanced) < 1e-5


def test_the_told_loss_of_a_weighted_sum_is_that_of_the_sum(make) -> None:
    case = make("nft", 2)
    case.objective.rule = replace(case.objective.rule, columns=columns_of("sum", True))
    scores, empty = torch.rand(2 * GROUP, 2, generator=torch.Generator().manual_seed(5)), torch.zeros(2 * GROUP, 0)
    groups = torch.arange(2).repeat_interleave(GROUP)
    case.advantages = case.objective.shaped(ScoredBatch(scores, torch.ones(2), groups, empty, empty))
    assert case.advantages.shape == (2 * GROUP, 3)
    case.begin()
    rows = case.rows(case.parts[0])
    with torch.no_grad():
        losses = case.objective.loss(case.objective.scalars(case.policy, rows), rows)
    told = Marble(["a", "b"], mode="sum").add(case.objective, case.policy, rows, case.rows_of_step, SCALER)
    assert float(told) == pytest.approx(float(losses[-1]) / case.rows_of_step, rel=1e-5)
    assert abs(float(losses[-1] - losses[-2])) > 1e-4


def test_a_solving_step_takes_its_own_coefficients(make) -> None:
    """The paper's Eq. 6 to 8, and the release: smoothed ones only between two solves, from the first optimum on."""
    first, second = make("nft", 3), make("nft", 3)
    second.advantages = second.advantages.flip(0)
    second.objective.known = second.objective.known.flip(0)
    directions, steps = {}, {}
    for smooth in ("between", "everywhere"):
        marble = Marble(list("abc"), mode="fresh", smoothing=0.7, smooth=smooth)
        first.run(marble)
        begun = marble.ema.copy()
        steps[smooth] = second.run(marble)
        ended = marble.ema
        directions[smooth] = np.array(json.loads(marble.metrics()["marble/steps"])[-1]["alpha"])
    alone = Marble(list("abc"), mode="fresh", smoothing=0.0)
    first_alone = Marble(list("abc"), mode="fresh", smoothing=0.0)
    first.run(first_alone)
    assert distance(second.run(alone), steps["between"]) < 1e-6
    assert np.allclose(begun, first_alone.ema, atol=1e-6), "the first optimum, not a mixture with 1 / K"
    assert np.allclose(ended, 0.7 * first_alone.ema + 0.3 * alone.ema, atol=1e-6)
    assert np.allclose(directions["between"], alone.ema, atol=1e-3)
    assert np.allclose(directions["everywhere"], ended, atol=1e-3)
    assert distance(steps["everywhere"], steps["between"]) > 1e-3


def test_slopes_are_the_derivatives_of_each_loss(make) -> None:
    """W by its definition in float64, and the basis of NFT: the first direction weighs the same for every reward."""
    case = make("nft", 3)
    rows = replace(case.rows(case.parts[0]), known=None)
    phi = torch.rand(len(case.parts[0]), 2)
    losses, slopes = loss_slopes(case.objective, phi, rows)
    a, b = rows.advantages.double(), 0.5
    r = a.clamp(-5, 5) / 10 + 0.5
    plus, minus = 5 / b * r, 5 / b * (1 - r)
    assert torch.allclose(slopes.double(), torch.stack([plus.T, minus.T], dim=2), rtol=1e-6)
    assert torch.allclose(losses.double(), (phi.double() @ slopes.double().transpose(1, 2)).diagonal(0, 1, 2).sum(1))
    basis = torch.tensor(case.objective.basis)
    along = slopes @ torch.linalg.inv(basis)
    assert torch.allclose(along @ basis, slopes, atol=1e-6)
    assert float(along[:, :, 0].std(0).max()) < 1e-6 < float(along[:, :, 1].std(0).max())


def test_the_gram_matrix_is_summed_in_float64(monkeypatch) -> None:
    monkeypatch.setitem(_GRAM_CHUNK, "cpu", 7)
    rows = torch.randn(3, 40)  # in pieces of two columns
    rows[1] = rows[0] * (1 + 1e-7)
    assert np.allclose(gram_matrix(rows), rows.double() @ rows.double().T, rtol=1e-14)


# ---- the QP


def solve_by_scipy(gram: np.ndarray) -> np.ndarray:
    k = len(gram)
    found = minimize(
        lambda a: a @ gram @ a,
        np.full(k, 1 / k),
        jac=lambda a: 2 * gram @ a,
        bounds=[(0, 1)] * k,
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    return found.x


def random_points(random: np.random.Generator, trial: int) -> np.ndarray:
    """(K, dim) unit vectors: independent, dependent, duplicated, opposed, nearly equal, or all on one side."""
    k = int(random.integers(2, 65)) if trial % 50 == 0 else int(random.integers(1, 9))
    points = random.normal(size=(k, int(random.integers(1, 2 * k + 2))))
    if trial % 3 == 0:
        points += 2 * random.normal(size=points.shape[1])
    if trial % 4 == 0:
        points[random.integers(k)] = points[random.integers(k)]
    if trial % 5 == 0:
        points[random.integers(k)] = -points[random.integers(k)]
    if trial % 7 == 0:
        points = points[:1] + 1e-6 * points
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def test_the_qp_is_optimal_on_thousands_of_gram_matrices() -> None:
    random = np.random.default_rng(0)
    for trial in range(3000):
        points = random_points(random, trial)
        gram = points @ points.T
        weights = min_norm_weights(gram)
        assert (weights >= 0).all() and weights.sum() == pytest.approx(1.0, abs=1e-12)
        assert residual(gram, weights) < 1e-8
        order = random.permutation(len(gram))
        assert np.allclose(min_norm_weights(gram[np.ix_(order, order)]), weights[order], atol=1e-6)
        if trial % 10 == 0 and len(gram) < 9:
            other = solve_by_scipy(gram)
            assert weights @ gram @ weights <= other @ gram @ other + 1e-8
            if np.linalg.eigvalsh(gram)[0] > 1e-3:  # otherwise many coefficients give the same point
                assert np.allclose(weights, other, atol=1e-4)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([[1, 0], [0, 1]], [0.5, 0.5]),
        ([[1, 0], [-1, 0]], [0.5, 0.5]),
        ([[2, 0], [0, 1]], [0.2, 0.8]),
        ([[1, 0], [2, 0]], [1, 0]),
        ([[0, 0], [1, 0]], [1, 0]),
        ([[0, 0], [0, 0]], [0.5, 0.5]),
        ([[1, 0], [1, 0], [0, 1]], [0.25, 0.25, 0.5]),  # of all solutions for a duplicate the one of least norm
        ([[1, 1], [1, 1], [1, 1]], [1 / 3, 1 / 3, 1 / 3]),
        ([[3, 4]], [1]),
    ],
)
def test_the_qp_on_points_whose_answer_is_known(points, expected) -> None:
    for length in (1e-5, 1.0, 1e5):  # gradients of any size: the ridge is relative
        array = length * np.array(points, dtype=float)
        assert np.allclose(min_norm_weights(array @ array.T), expected, atol=1e-6)


def test_how_far_weights_are_from_optimal_does_not_depend_on_the_points_lengths() -> None:
    """Of (2, 0) and (0, 2) the middle is optimal; at 3/4 and 1/4 the slopes are 3 and 1, and the value is 2.5."""
    for length in (1e-5, 1.0, 1e5):
        gram = np.diag([4.0, 4.0]) * length**2
        assert residual(gram, np.array([0.5, 0.5])) == pytest.approx(0.0, abs=1e-12)
        assert residual(gram, np.array([0.75, 0.25])) == pytest.approx((2.5 - 1) / 4)


def test_gradients_that_cancel_have_no_direction() -> None:
    """Their sum's length is rounding, and its square may be below 0: coefficients are numbers all the same."""
    marble, worst = Marble(list("abc"), mode="uniform"), 0.0
    for turn in np.linspace(0, 1, 50):
        angles = turn + np.arange(3) * 2 * np.pi / 3
        points = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        gram = points @ points.T
        factors = marble._coefficients(gram, np.ones(3, dtype=bool))
        worst = min(worst, float(factors @ gram @ factors))
        assert np.isfinite(factors).all() and not marble._records[-1].cosine.any()
    assert worst < 0


def test_a_reward_that_applies_to_some_rows_has_the_mean_gradient_of_those() -> None:
    """Gradients are means over 5 rows; the second reward applies to 3 of them, so its own mean is 5 / 3 of that."""
    bank = PerRewardGradients(
        torch.ones(2, 4, dtype=torch.float64), torch.ones(2), counts=torch.tensor([[5.0, 5.0], [5.0, 3.0]]).double()
    )
    each, gram, signal = bank.summed([], None)
    torch.testing.assert_close(each, torch.tensor([1.0, 5 / 3]).double()[:, None].expand(2, 4))
    torch.testing.assert_close(torch.from_numpy(gram), 4 * torch.tensor([[1, 5 / 3], [5 / 3, 25 / 9]]).double())
    assert signal.tolist() == [True, True]


def test_a_reward_that_applies_to_no_row_has_no_gradient_and_no_signal() -> None:
    bank = PerRewardGradients(
        torch.tensor([[1.0, 2], [0, 0]]), torch.tensor([1.0, 0]), counts=torch.tensor([[5.0, 5], [5, 0]])
    )
    each, gram, signal = bank.summed([], None)
    assert each.tolist() == [[1, 2], [0, 0]] and gram.tolist() == [[5, 0], [0, 0]] and signal.tolist() == [True, False]


def test_no_parameter_gets_a_gradient_without_a_penalty() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    reduced = []
    PerRewardGradients(torch.ones(2, 4), torch.ones(2)).summed([parameter], lambda x: reduced.append(x) or x)
    assert parameter.grad is None and len(reduced) == 3  # two rows and the signal
    PerRewardGradients(torch.ones(2, 4), torch.ones(2), penalised=True).summed([parameter], lambda x: 2 * x)
    assert parameter.grad is not None and not parameter.grad.any()
