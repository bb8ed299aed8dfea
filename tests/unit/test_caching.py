"""`rollout.cache`: diffusers' caches in rollouts and nowhere else, on tiny networks of the true classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import scramble, tiny_flux, tiny_sd, tiny_sd3

from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.policy import LoraSpec, Policy, load_policy
from diffrl.policy.caching import CacheSpec
from diffrl.prompts import Prompt
from diffrl.rollout import SamplerSpec, collect, generate
from diffrl.run.train import Run

PROMPTS = [Prompt("red a"), Prompt("red b")]
SPEC = SamplerSpec("euler", 6)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    folder = tmp_path_factory.mktemp("caching")
    paths = {"sd3": tiny_sd3(folder / "sd3"), "flux": tiny_flux(folder / "flux"), "sd": tiny_sd(folder / "sd")}
    found = {name: load_policy(str(path), lora=LoraSpec(rank=2, alpha=4)) for name, path in paths.items()}
    for policy in found.values():
        scramble(policy)
    found["flux"].latent_shape = (4, 4, 4)  # its own pictures are large
    found["flux"].backbone._image_ids = found["flux"].backbone._image_ids[:4]
    return found


def latents(policy: Policy) -> torch.Tensor:
    size: dict[str, Any] = {"seed": 0, "epoch": 0, "group_size": 2, "batch_size": 2, "keep_images": False}
    return collect(policy, PROMPTS, SPEC, **size, caching=policy.cached).latents


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("flux", CacheSpec("taylorseer", interval=3)),
        ("sd3", CacheSpec("taylorseer", interval=3)),
        ("sd3", CacheSpec("pyramid", interval=3)),
    ],
    ids=lambda value: getattr(value, "kind", value),
)
def test_a_cache_leaves_attention_out_in_rollouts_alone(policies, monkeypatch, name: str, spec: CacheSpec) -> None:
    policy, calls = policies[name], [0]
    attention = torch.nn.functional.scaled_dot_product_attention

    def counted(*given: Any, **more: Any) -> torch.Tensor:
        calls[0] += 1
        return attention(*given, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)

    def count(work: Any) -> tuple[int, torch.Tensor]:
        calls[0] = 0
        made = work()
        return calls[0], made

    def evaluated() -> torch.Tensor:
        batches = generate(policy, PROMPTS, SPEC, seed=0, per_prompt=1, batch_size=2)
        return torch.cat([images for _, images in batches])

    full, exact = count(lambda: latents(policy))
    all_of_it, images = count(evaluated)
    policy.cache_rollouts(spec, policy.timesteps(SPEC.steps).tolist())
    try:
        fewer, cheaper = count(lambda: latents(policy))
        again, _ = count(lambda: latents(policy))
        assert 0 < fewer < full and again == fewer  # a batch begins anew
        assert cheaper.isfinite().all() and not torch.equal(cheaper, exact)
        after, unchanged = count(evaluated)
        assert after == all_of_it and torch.equal(unchanged, images)
        x = torch.zeros(1, *policy.latent_shape)
        policy.predict(x, torch.ones(1), policy.encode(["red a"])).v.sum().backward()  # training sees none of it
    finally:
        policy._rollouts = None
    torch.testing.assert_close(latents(policy), exact, rtol=0, atol=0)


def test_a_cache_that_leaves_nothing_out_changes_nothing(policies) -> None:
    policy = policies["sd3"]
    exact = latents(policy)
    for kind in ("taylorseer", "pyramid"):
        policy.cache_rollouts(CacheSpec(kind, interval=1), policy.timesteps(SPEC.steps).tolist())
        assert torch.equal(latents(policy), exact)
    policy._rollouts = None


def test_networks_without_what_a_cache_needs_are_refused(policies) -> None:
    with pytest.raises(UserError, match=r'rollout.cache: "taylorseer" does not work with UNet2DConditionModel'):
        policies["sd"].cache_rollouts(CacheSpec("taylorseer"), policies["sd"].timesteps(4).tolist())
    assert all(policy._rollouts is None for policy in policies.values())


def test_a_run_samples_with_its_cache_and_grpo_has_none(config_file) -> None:
    path: Path = config_file("cached", rollout={"steps": 4, "cache": {"kind": "taylorseer"}})
    run = Run(load_config(path))
    assert run.policy._rollouts is not None and run.loop.run_epoch(0)["loss"] is not None
    run.close()
    grpo = ["objective=grpo", "rollout.sampler=flow_sde"]
    for overrides, text in (
        (grpo, r'rollout.cache: objective "grpo" trains on the exact log-probabilities'),
        (["engine.compile=true"], "rollout.cache: engine.compile compiles the blocks"),
        (["rollout.cache.warmup=4"], "rollout.cache.warmup: 4 steps are computed whole, and there are 4"),
    ):
        with pytest.raises(UserError, match=text):
            load_config(path, overrides)
