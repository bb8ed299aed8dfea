"""Evaluation: group-wise rewards see whole groups, and processes share the prompts."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from diffrl import evaluation
from diffrl.config import load_config
from diffrl.evaluation import score_policy
from diffrl.prompts import Prompt
from diffrl.rewards.scoring import Scorer
from diffrl.rollout import SamplerSpec
from diffrl.run.parts import evaluation_spec

PROMPTS = [Prompt("a"), Prompt("b"), Prompt("c")]


POLICY: Any = SimpleNamespace(together=nullcontext)  # nothing else of it is asked for where `drawn` draws


class Rank:
    """Group-wise: the rank of an image's brightness in its group, divided by the group's size."""

    name, groupwise = "rank", True

    def __call__(self, images: Tensor, prompts: list[str], metadata: Any) -> Tensor:
        assert len(set(prompts)) == 1
        return images.mean((1, 2, 3)).argsort().argsort().float() / len(images)


def drawn(policy: Any, prompts: list[Prompt], spec: Any, *, per_prompt: int, batch_size: int, **_: Any) -> Any:
    """Instead of `generate`: images whose brightness tells prompt and member."""
    total = len(prompts) * per_prompt
    for start in range(0, total, batch_size):
        index = torch.arange(start, min(start + batch_size, total))
        names = torch.tensor([ord(prompts[int(i) // per_prompt].text) - ord("a") for i in index])
        yield index, ((names * 10 + index % per_prompt) / 100)[:, None, None, None].expand(-1, 3, 2, 2)


@pytest.mark.parametrize("batch_size", [1, 3, 12])
def test_a_group_wise_reward_sees_whole_groups(monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
    monkeypatch.setattr(evaluation, "generate", drawn)
    scores, *_ = score_policy(
        POLICY,
        Scorer({"rank": Rank()}),
        lambda images: images.flatten(1)[:, :2],
        PROMPTS,
        SamplerSpec(),
        seed=0,
        per_prompt=4,
        batch_size=batch_size,
    )
    assert scores[:, 0].tolist() == [0.0, 0.25, 0.5, 0.75] * 3


@pytest.mark.parametrize("world", [2, 5])
def test_processes_share_the_prompts_even_if_there_are_more_of_them(
    monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    monkeypatch.setattr(evaluation, "generate", drawn)
    shares: list[Tensor] = []

    def score(rank: int) -> None:
        accelerator = SimpleNamespace(process_index=rank, num_processes=world, device=torch.device("cpu"))
        accelerator.gather = lambda width: torch.tensor([2 + 1 + 1])  # what another process knows
        accelerator.reduce = lambda values, reduction: shares.append(values) or values
        score_policy(
            POLICY,
            Scorer({"rank": Rank()}),
            lambda images: images.flatten(1)[:, :2],
            PROMPTS,
            SamplerSpec(),
            seed=0,
            per_prompt=4,
            batch_size=3,
            accelerator=accelerator,  # type: ignore[arg-type]
        )

    for rank in range(world):
        score(rank)
    assert torch.stack(shares).sum(0)[:, 0].tolist() == [0.0, 0.25, 0.5, 0.75] * 3


@pytest.mark.parametrize("recipe", ["nft", "renoise"])
def test_evaluations_draw_on_the_training_s_shifted_schedule(recipe: str) -> None:
    spec = evaluation_spec(load_config(f"configs/playground/{recipe}.yaml", ["rollout.shift=3", "evaluate.steps=7"]))
    assert (spec.shift, spec.steps) == (3.0, 7)
