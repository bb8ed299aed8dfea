"""SRPO and Direct-Align in float64: the released code's levels and discounts, limits, D2-Align at the other place."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats
from test_guided_reward import SHAPE, fixed, in_float64, row_of, unit
from tiny import SPEC, averages
from torch import Tensor

from diffrl.forward import FlowMatching, Prediction, VariancePreserving
from diffrl.methods.d2align.corrected import Corrected
from diffrl.methods.direct import Align, Pair
from diffrl.methods.direct.objective import Direct
from diffrl.methods.direct.rows import DirectRows
from diffrl.methods.direct.srpo import Contrast, drawn_words, factors, step_levels
from diffrl.objectives.minibatches import sample_pairs
from diffrl.objectives.rows import Rows
from diffrl.policy import load_policy
from diffrl.prompts import Prompt
from diffrl.rollout import SamplerSpec, collect, initial_noise
from diffrl.samplers import one_step

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from embedder import Embedder

D, FINE = 12, 1000  # fine levels between the two ends of the range


def by_the_code(j: int, inversion: bool) -> tuple[float, float, float]:
    """t, t' and the discount k of the fine level j (0: clean end), in the released code's own indices."""
    width = min(FINE - j, 100, j)
    lower = max(j - width, 1) if inversion else j  # its `mid_timestep`, that of the discount
    base, start = FINE - lower, FINE - min(lower + width, FINE)
    level = [0.964 + (0.75 - 0.964) * i / (FINE - 1) for i in range(FINE)]
    ends = (0.3, 0.01) if inversion else (0.1, 0.25)
    k = ends[0] + (ends[1] - ends[0]) * lower / (FINE - 1)
    return (level[base], level[start], k) if inversion else (level[start], level[base], k)


@pytest.mark.parametrize("inversion", [False, True])
def test_levels_and_discounts_are_the_released_codes_to_a_fine_level(inversion: bool) -> None:
    for j in (5, 40, 99, 100, 101, 350, 500, 777, 900, 960, 995):
        u = torch.tensor([(j - 5) / 990], dtype=torch.float64)
        branch = torch.tensor([inversion])
        t, t_next, place = step_levels(Align(), u, branch)
        k = factors(place, branch)[0]
        wanted = by_the_code(j, inversion)
        found = float(t), float(t_next), float(k[1] if inversion else k[0]) - 1
        assert found == pytest.approx(wanted, abs=3 * 0.214 / FINE), j
        assert float(k[0] if inversion else k[1]) == -1.0
        assert 0.75 <= min(found[:2]) < max(found[:2]) <= 0.964 and (t > t_next) == (not inversion)


def test_both_branches_go_to_one_level_with_one_gain() -> None:
    u = torch.linspace(0, 1, 101, dtype=torch.float64)
    down, up = (step_levels(Align(), u, torch.full((101,), kind)) for kind in (False, True))
    assert torch.equal(down[1], up[1])
    torch.testing.assert_close(down[0] - down[1], up[1] - up[0], rtol=1e-9, atol=1e-12)
    assert float((down[0] - down[1]).max()) == pytest.approx(0.02145)
    assert float(up[2].min()) > -1e-12 and float(down[2].max()) < 1


# ---- one step, down or up

PROCESSES = [FlowMatching(), VariancePreserving(torch.linspace(0.999, 0.01, 50).double())]


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("inversion", [False, True])
def test_a_perfect_velocity_gives_x0_back_whatever_the_step(process: Any, inversion: bool) -> None:
    x0, eps = fixed(0, 5, *SHAPE), fixed(1, 5, *SHAPE)
    width = torch.tensor([1e-4, 0.0125, 0.02145, 0.1, 0.2], dtype=torch.float64)
    t_next = torch.tensor([0.76, 0.8, 0.9, 0.7, 0.6], dtype=torch.float64)
    t = t_next - width if inversion else t_next + width
    perfect = Prediction(x0=x0, eps=eps, v=process.velocity(x0, eps, t))
    found = one_step(process.add_noise(x0, eps, t), perfect, t, t_next, eps, process)
    torch.testing.assert_close(found, x0, rtol=1e-9, atol=1e-10)


def aligned(wrong: Tensor, inversion: bool, place: float) -> tuple[Tensor, float]:
    """x0^ (1, ...) where the velocity is wrong by `wrong`, on a line of fixed ends; and c."""
    x0, eps, process = fixed(0, 1, *SHAPE), fixed(1, 1, *SHAPE), FlowMatching()
    t, t_next, _ = step_levels(Align(), torch.tensor([place], dtype=torch.float64), torch.tensor([inversion]))
    x_t = process.add_noise(x0, eps, t)
    prediction = process.from_velocity(x_t, eps - x0 + wrong, t)
    return one_step(x_t, prediction, t, t_next, eps, process), float((t - t_next).abs() / (1 - t_next))


@pytest.mark.parametrize("place", [0.0, 0.3, 0.9])
def test_an_error_of_the_velocity_moves_the_image_by_minus_and_plus_c(place: float) -> None:
    wrong = fixed(2, 1, *SHAPE)
    for inversion, sign in ((False, -1.0), (True, 1.0)):
        far, c = aligned(1e-3 * wrong, inversion, place)
        near, _ = aligned(-1e-3 * wrong, inversion, place)
        torch.testing.assert_close((far - near) / 2e-3, sign * c * wrong, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_two_branches_add_up_to_a_relative_and_a_small_common_part(place: float) -> None:
    """Of linear rewards: c ((2 + k1) R+' - (2 + k2) R-'); with R+ = R- it is (k1 - k2) R' alone."""
    wanted, unwanted = fixed(3, *SHAPE), fixed(4, *SHAPE)

    def gradient(plus: Tensor, minus: Tensor) -> tuple[Tensor, float, float, float]:
        wrong = torch.zeros(1, *SHAPE, dtype=torch.float64, requires_grad=True)
        total, ks = torch.zeros((), dtype=torch.float64), []
        for inversion in (False, True):
            u, branch = torch.tensor([place], dtype=torch.float64), torch.tensor([inversion])
            image, c = aligned(wrong, inversion, place)
            counted = factors(step_levels(Align(), u, branch)[2], branch)[0]
            ks.append(float(counted.sum()))
            total = total - counted[0] * (image * plus).sum() - counted[1] * (image * minus).sum()
        return torch.autograd.grad(total, wrong)[0][0], c, *ks  # type: ignore[return-value]

    found, c, k1, k2 = gradient(wanted, unwanted)
    torch.testing.assert_close(found, c * ((2 + k1) * wanted - (2 + k2) * unwanted), rtol=1e-9, atol=1e-12)
    common, c, k1, k2 = gradient(wanted, wanted)
    torch.testing.assert_close(common, c * (k1 - k2) * wanted, rtol=1e-9, atol=1e-12)
    if place != 0.5:
        assert (k1 > k2) == (place == 1.0), "punished near the image, rewarded near the noise"


def test_without_a_discount_one_branch_is_the_plain_difference() -> None:
    counted = factors(fixed(0, 4).sigmoid(), torch.zeros(4, dtype=torch.bool), ((0.0, 0.0), (0.0, 0.0)))
    assert torch.equal(counted, torch.tensor([[1.0, -1.0]] * 4, dtype=torch.float64))


# ---- the same combination at two places: D2-Align's, within the embedding, and SRPO's, of two rewards


class Worded(Embedder):
    """A text that begins with + or - has an embedding of its own, and the plain prompt is their middle."""

    def embed_text(self, prompts: Any) -> Tensor:
        plus, minus = (unit(fixed(seed, D)) for seed in (21, 22))
        which = {"+": plus, "-": minus, "r": unit(plus + minus)}
        return torch.stack([which[prompt[0]] for prompt in prompts])


class Squared(Worded):
    """A score that is not linear in the text's embedding."""

    def score(self, image_embeddings: Tensor, text_embeddings: Tensor) -> Tensor:
        return super().score(image_embeddings, text_embeddings).square()


B_V = (unit(fixed(21, D)) - unit(fixed(22, D))) / (unit(fixed(21, D)) + unit(fixed(22, D))).norm()


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Any:
    return load_policy(str(tiny_model), lora=SPEC)


@pytest.fixture
def double(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    return in_float64(tiny, monkeypatch)


def words_of(rows: Rows, k: float, inversion: bool) -> Rows:
    """The rows as `Direct.rows` leaves them, of one branch and with the only words."""
    count, rows = len(rows.t), DirectRows(**vars(rows))
    rows.prompts = [Prompt("red a")] * 2
    rows.words = torch.zeros(count, 2, dtype=torch.int64)
    rows.factors = factors(torch.rand(count).double(), torch.full((count,), inversion), ((k, k), (k, k)))
    return rows


def gradient_of(policy: Any, objective: Direct, rows: Rows) -> Tensor:
    loss = objective.loss(objective.scalars(policy, rows), rows).sum()
    found = torch.autograd.grad(loss, [parameter for _, parameter in policy.trainable])
    assert found[0].dtype == torch.float64
    return torch.cat([part.flatten() for part in found])


def both_places(policy: Any, kind: type, k: float, inversion: bool, hinge: float | None) -> tuple[Tensor, Tensor]:
    """The LoRA's gradient of SRPO's reward, and k times that of D2-Align's with w = (1 + k) / k."""
    pair = Pair(positive=["+"], negative=["-"], form="{word}{prompt}")
    rows = words_of(row_of(policy, torch.float64), k, inversion)
    srpo = gradient_of(policy, Direct({"r": kind()}, [1.0], align=Align(), pair=pair, cap=hinge), rows)
    corrected: Any = Corrected(kind(), omega=(1 + k) / k)
    corrected.direction = SimpleNamespace(norm=1.0)
    corrected._vector = -B_V if inversion else B_V
    return srpo, k * gradient_of(policy, Direct({"r": corrected}, [1.0]), rows)


@pytest.mark.parametrize(("k", "inversion"), [(0.1, False), (0.25, False), (0.3, True), (0.01, True)])
def test_srpo_and_d2_align_have_one_gradient_where_the_score_is_linear_in_the_text(
    double: Any, k: float, inversion: bool
) -> None:
    """k (e- + w (e+ - e-)) = (1 + k) e+ - e-: w = 11 at k = 0.1, where D2-Align has 1.5."""
    ours, theirs = both_places(double, Worded, k, inversion, None)
    assert ours.norm() > 1e-4
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12 * float(ours.norm()))
    held, _ = both_places(double, Worded, k, inversion, 5.0)  # a hinge above every reward changes nothing
    torch.testing.assert_close(held, ours, rtol=1e-12, atol=0)
    silent, _ = both_places(double, Worded, k, inversion, -5.0)
    assert not silent.any()


def test_their_gradients_part_where_the_score_is_not_linear_in_the_text(double: Any) -> None:
    ours, theirs = both_places(double, Squared, 0.1, False, None)
    assert (ours - theirs).norm() > 0.1 * theirs.norm()


# ---- rows, words, hinge


PROMPTS = [Prompt("red a"), Prompt("blue b")]
ALIGN, PAIR = Align(), Pair()


def rows_of(policy: Any, objective: Direct, order: Tensor | None = None) -> tuple[Any, Rows]:
    spec = SamplerSpec("euler", 3)
    rollout = collect(policy, PROMPTS, spec, seed=5, epoch=2, group_size=2, batch_size=4)
    pairs = sample_pairs(torch.arange(4), objective.rows_per_sample(rollout))
    return rollout, objective.rows(rollout, torch.zeros(4, 1), pairs if order is None else pairs[order], (5, 2, 0))


def test_rows_lie_between_an_image_and_the_noise_that_it_was_drawn_from(tiny: Any) -> None:
    objective = Direct({"r": Embedder()}, [1.0], timesteps=3, align=ALIGN, pair=PAIR)
    rollout, rows = rows_of(tiny, objective)
    assert len(rows.t) == 4 * 6 and rows.eps is not None and rows.t_next is not None
    began = initial_noise(tiny.latent_shape, ["red a"] * 2 + ["blue b"] * 2, [0, 1, 0, 1], seed=5, epoch=2)
    assert all(torch.equal(row, began[i % 4]) for i, row in enumerate(rows.eps))
    t = rows.t[:, None, None, None]
    torch.testing.assert_close(rows.x_t, (1 - t) * rollout.latents.repeat(6, 1, 1, 1) + t * rows.eps)
    # Row number 2 j is denoised, 2 j + 1 inverted; they share target, noise and words, and are apart in the discount.
    assert rows.words is not None and rows.factors is not None
    for level in range(3):
        down, up = slice(8 * level, 8 * level + 4), slice(8 * level + 4, 8 * level + 8)
        assert (rows.t[down] > rows.t_next[down]).all() and (rows.t[up] < rows.t_next[up]).all()
        for part in (rows.t_next, rows.eps, rows.words):
            assert torch.equal(part[down], part[up])
        assert (rows.factors[down, 1] == -1).all() and (rows.factors[up, 0] == -1).all()
    assert len(rows.t_next.unique()) == 12, "every image has levels of its own"
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    _, shuffled = rows_of(tiny, objective, order)
    for name in ("t", "t_next", "eps", "words", "factors", "x_t"):
        assert torch.equal(getattr(shuffled, name), getattr(rows, name)[order]), f"{name} is by its micro-batch"


def test_every_two_words_are_as_likely() -> None:
    words = drawn_words(PAIR, [(0, "a prompt", i) for i in range(4000)])
    counts = torch.bincount(words[:, 0] * 5 + words[:, 1], minlength=20)
    assert len(counts) == 20 and stats.chisquare(counts.tolist()).pvalue > 0.01


def test_the_reward_of_a_row_is_the_papers_and_the_hinge_stops_what_is_above(tiny: Any) -> None:
    rewards = {"a": Embedder(seed=1), "b": Embedder(seed=2, only="blue")}
    pair = Pair()
    objective = Direct(rewards, [1.0, 0.5], decode_chunk=3, align=ALIGN, pair=pair, cap=0.1)
    _, rows = rows_of(tiny, objective)
    phi = objective.scalars(tiny, rows)
    values = phi[:, 0].tolist()
    assert rows.words is not None and rows.factors is not None and rows.prediction is not None
    with torch.no_grad():
        images = tiny.decode(one_step(rows.x_t, rows.prediction, rows.t, rows.t_next, rows.eps, tiny.process))  # type: ignore[arg-type]
    for i in range(8):
        prompt, inverted = PROMPTS[(i % 4) // 2].text, i >= 4
        texts = [f"{pair.positive[rows.words[i, 0]]}. {prompt}", f"{pair.negative[rows.words[i, 1]]}. {prompt}"]
        plus, minus = ([reward(images[i : i + 1], [text], [{}]) for reward in rewards.values()] for text in texts)
        k = float(rows.factors[i].sum())
        each = [(1 + k) * m - p if inverted else (1 + k) * p - m for p, m in zip(plus, minus, strict=True)]
        wanted = float(each[0]) + (0.5 * float(each[1]) if "blue" in prompt else 0)
        assert values[i] == pytest.approx(wanted, abs=2e-6), i
    losses = objective.loss(phi, rows)
    by_hand = sum(max(0.1 - value, 0.0) for value in values)
    assert losses.item() == pytest.approx(by_hand, rel=1e-5)
    told = averages(objective.means)
    silenced = float((phi >= 0.1).float().mean())
    assert 0 < silenced < 1 and told["direct/silenced"] == pytest.approx(silenced)
    assert told["direct/denoised"] == pytest.approx(sum(values[:4]) / 4)
    assert told["direct/inverted"] == pytest.approx(sum(values[4:]) / 4)
    (slope,) = torch.autograd.grad(losses.sum(), phi)
    assert torch.equal(slope, -(phi < 0.1).float())


def test_a_contrast_of_some_rows_is_those_rows() -> None:
    whole = Contrast.of(PAIR, ["a", "b", "c"], torch.tensor([[0, 1], [1, 2], [3, 4]]), fixed(0, 3, 2))
    some = whole.take([2, 0])
    assert some.positive == ["Real. c", "Natural-lighting. a"] and some.negative == ["Oil. c", "Painting. a"]
    assert torch.equal(some.factors, whole.factors[[2, 0]])
