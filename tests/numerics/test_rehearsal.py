"""Rehearsal: which base images a step sees, and that its gradient is the one of the mean error on them."""

from __future__ import annotations

import pytest
import torch
from test_mathematics import GROUP, PROMPTS, STEPS, drawn
from test_mean_over_rows import IMAGES, SCORES, gradient, gradient_of_the_loop, policy, same  # noqa: F401

from diffrl.rollout import SamplerSpec
from diffrl.seeds import noise, seed_of
from diffrl.trainers.nft import NFT
from diffrl.trainers.rehearsal import Rehearsal

SPEC = SamplerSpec("dpm2", STEPS)


@pytest.fixture(scope="module")
def pool(policy) -> Rehearsal:  # noqa: F811
    found = Rehearsal(pool=5, weight=0.7, every=2, micro_batch=2)
    found.draw(policy, PROMPTS, SPEC, seed=0, batch_size=4)
    return found


def test_the_pool_is_the_pretrained_models_whatever_has_been_trained(policy, pool: Rehearsal) -> None:  # noqa: F811
    assert pool.latents.shape == (5, *policy.latent_shape) and set(pool.texts) == {p.text for p in PROMPTS}
    before = policy.state()
    try:
        policy.load_state("default", {key: value + 0.1 for key, value in before.items()})
        again = Rehearsal(pool=5, weight=0.7, every=2)
        again.draw(policy, PROMPTS, SPEC, seed=0, batch_size=4)
    finally:
        policy.load_state("default", before)
    assert torch.equal(again.latents, pool.latents), "so a resumed run has the same one"
    shares = []  # two processes: each its part, and zeros for the other's, which are summed
    for rank in (0, 1):
        part = Rehearsal(pool=5, weight=0.7, every=2)
        part.draw(policy, PROMPTS, SPEC, seed=0, batch_size=4, rank=rank, world=2)
        shares.append(part.latents)
    torch.testing.assert_close(sum(shares), pool.latents, rtol=1e-4, atol=1e-5)


def test_a_step_adds_the_mean_error_on_every_second_images_base_image(policy, pool: Rehearsal) -> None:  # noqa: F811
    rollout, total = drawn(policy, SPEC), 0.0
    for i in (0, 2, 4):
        name = (0, 0, 0, PROMPTS[i // GROUP].text, i % GROUP, "rehearsal")
        which = seed_of(*name, "image") % 5
        t = rollout.schedule[seed_of(*name, "level") % STEPS]
        x0, eps = pool.latents[which][None], noise(tuple(policy.latent_shape), [(*name, "eps")])
        v = policy.predict((1 - t) * x0 + t * eps, t[None], policy.encode([pool.texts[which]]), 1.0).v
        total = total + (v - (eps - x0)).square().mean()
    by_hand = gradient(policy, 0.7 * total / 3)
    plain, loss = gradient_of_the_loop(policy, NFT(), rollout, SCORES)
    both, more = gradient_of_the_loop(policy, NFT(), rollout, SCORES, rehearsal=pool)
    same(both - plain, by_hand)
    assert more - loss == pytest.approx(0.7 * float(total.detach()) / 3, rel=1e-4)
    assert IMAGES == 6
