"""AC-Flow, reconstructed: its critic on a case with a closed form, and what the critic leaves alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffrl.methods.acflow.critic import Values, text_features
from diffrl.methods.acflow.objective import ActorCritic, Scale
from diffrl.objectives.advantages import ScoredBatch
from diffrl.objectives.rows import Rows
from diffrl.policy import Conditioning

MEAN, STD, SLOPE = 0.5, 1.5, 2.0  # x0 ~ N(MEAN, STD^2), reward SLOPE x0


def rows_of(x0: Tensor, t: Tensor, rewards: Tensor, seed: int) -> Rows:
    """One number an image, as latents (b, 1, 1, 1), noised by the linear flow."""
    eps = torch.randn(len(x0), 1, 1, 1, generator=torch.Generator().manual_seed(seed))
    level = t.view(-1, 1, 1, 1)
    cond = Conditioning(torch.ones(len(x0), 2, 3), torch.zeros(len(x0), 0))
    x = x0.view(-1, 1, 1, 1)
    zeros = torch.zeros(len(x0), dtype=torch.int64)
    return Rows(
        x,
        (1 - level) * x + level * eps,
        t,
        cond,
        rewards[:, None],
        zeros,
        True,
        torch.zeros(len(x0), 2, dtype=torch.int64),
        eps=eps,
    )


def expected(rows: Rows) -> Tensor:
    """E[R | x_t] (b,): a Gaussian's regression on its noised form."""
    t, x = rows.t.double(), rows.x_t.flatten().double()
    gain = (1 - t) * STD**2 / ((1 - t).square() * STD**2 + t.square())
    return SLOPE * (MEAN + gain * (x - (1 - t) * MEAN))


def drawn(count: int, seed: int, t: Tensor | float | None = None) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    x0 = MEAN + STD * torch.randn(count, generator=generator)
    levels = torch.rand(count, generator=generator) if t is None else torch.as_tensor(t).expand(count)
    return rows_of(x0, levels, SLOPE * x0, seed + 1)


def learned() -> Values:
    values = Values(3e-3, seed=0)
    for number in range(250):
        rows = drawn(256, 10 * number)
        losses = iter([(values.of(rows) - rows.advantages).square().mean(1).sum()])
        values.step(losses, 256, lambda x: x)
    return values


def test_the_critic_learns_the_reward_that_is_to_be_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, which is enough for that and quicker.

    And weights by what is above it spread less than weights by the reward: most where the image still shows."""
    monkeypatch.setattr("diffrl.methods.acflow.critic._precision", lambda device: torch.float32)
    values = learned()
    spread = []
    for t in (0.1, 0.4, 0.9):
        rows = drawn(4096, 77, t)
        with torch.no_grad():
            found = values.of(rows)[:, 0]
        wanted = expected(rows)
        assert float((found - wanted).square().mean().sqrt()) < 0.1 * SLOPE * STD, t
        rest = rows.advantages[:, 0] - found
        spread.append(float(rest.var() / rows.advantages.var()))
        weights = {name: (x / (SLOPE * STD)).exp() for name, x in (("A", rest), ("R", rows.advantages[:, 0]))}
        relative = {name: float(w.var() / w.mean().square()) for name, w in weights.items()}
        assert relative["A"] < relative["R"], t
    assert spread == sorted(spread)  # at much noise nothing is known of the image
    assert spread[0] < 0.1 and spread[-1] > 0.9


@pytest.mark.parametrize("sizes", [[7] * 5 + [1], [6, 30], [1] * 36])
def test_the_critic_hangs_on_no_micro_batch_and_no_process(sizes: list[int]) -> None:
    """A sum over processes is a sum over parts. Adam steps along what rounding makes of a gradient that is nearly 0:
    in float32 these differ by 0.3 % to 12 %."""

    def values(sizes: list[int]) -> Tensor:
        critic = Values(1e-3, seed=0)
        for number in range(3):
            rows = drawn(36, number)
            rewards = torch.randn(36, 1, generator=torch.Generator().manual_seed(1000 + number))
            rows.advantages = rewards - rewards.mean()  # as shaped scores are
            parts = (rows.select(piece) for piece in torch.arange(36).split(sizes))
            critic.step(((critic.of(part) - part.advantages).square().mean(1).sum() for part in parts), 36, lambda x: x)
        return critic.of(drawn(64, 99)).detach()

    whole = values([36])
    assert whole.std() > 0.01
    assert float((values(sizes) - whole).abs().max()) < 1e-5 * float(whole.std())


def test_the_critic_changes_no_optimum() -> None:
    """Of the states x_t that several images come to: E[W v | x_t] / E[W | x_t], W = exp((r - V(x_t)) / tau)."""
    generator = torch.Generator().manual_seed(3)
    shares = torch.rand(5, 7, generator=generator, dtype=torch.float64)  # P(image | state)
    shares = shares / shares.sum(1, keepdim=True)
    r, v = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(2))
    critic = torch.randn(5, generator=generator, dtype=torch.float64)

    def led_to(weights: Tensor) -> Tensor:
        return (shares * weights * v).sum(1) / (shares * weights).sum(1)

    plain, with_critic = (r / 0.7).exp().expand(5, 7), ((r - critic[:, None]) / 0.7).exp()
    torch.testing.assert_close(led_to(with_critic), led_to(plain), rtol=1e-12, atol=0)
    clipped = ((r - critic[:, None]).clamp(-0.5, 0.5) / 0.7).exp()
    assert float((led_to(clipped) - led_to(plain)).abs().max()) > 1e-2  # the clip does


def test_scores_are_shaped_by_all_so_far() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(40, 2, generator=generator, dtype=torch.float64) * torch.tensor([0.1, 5.0]) + 3
    scores[::3, 1] = torch.nan
    scale = Scale()
    for part in scores.split(7):
        scale.see(part)
    known = scores[~scores[:, 1].isnan(), 1]
    torch.testing.assert_close(
        scale(scores)[:, 0], (scores[:, 0] - scores[:, 0].mean()) / scores[:, 0].std(correction=0)
    )
    shaped = scale(scores)[:, 1]
    torch.testing.assert_close(shaped[~shaped.isnan()], (known - known.mean()) / known.std(correction=0))
    assert shaped.isnan().sum() == 14


def test_advantages_are_shaped_scores_whatever_the_group() -> None:
    objective = ActorCritic()
    scores = torch.tensor([[1.0], [2.0], [torch.nan], [5.0]])
    scored = ScoredBatch(scores, torch.ones(1), torch.tensor([0, 0, 1, 1]), torch.zeros(4, 2), torch.zeros(4, 0))
    known = torch.tensor([1.0, 2.0, 5.0])
    wanted = (known - known.mean()) / known.std(correction=0)
    found = objective.shaped(scored)[:, 0]
    torch.testing.assert_close(found[[0, 1, 3]], wanted)
    assert found[2] == 0 and objective.known.flatten().tolist() == [1, 1, 0, 1]


def test_padding_says_nothing() -> None:
    tokens = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    short = Conditioning(tokens, torch.ones(2, 3), torch.tensor([5, 2]))
    other = Conditioning(tokens.clone(), torch.ones(2, 3), torch.tensor([5, 2]))
    other.embeds[1, 2:] = 9.0
    torch.testing.assert_close(text_features(short), text_features(other))
    torch.testing.assert_close(text_features(short)[1, :4], tokens[1, :2].mean(0))
