"""Evaluation: group-wise rewards see whole groups, and processes share the prompts."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diffrl import evaluation
from diffrl.config import load_config
from diffrl.evaluation import Evaluated, Evaluator
from diffrl.prompts import Prompt
from diffrl.rewards.kinds import Reported
from diffrl.rewards.protocol import RewardError
from diffrl.rewards.scoring import Scorer
from diffrl.rollout import SamplerSpec
from diffrl.run.evaluation import evaluation_spec
from diffrl.worlds import worlds
from diffrl_playground.renderer import draw
from diffrl_playground.variety import FIGURES
from experiments.variety import variety

PROMPTS = [Prompt("a"), Prompt("b"), Prompt("c")]


# Nothing else of it is asked for where `drawn` draws pictures of 2 x 2 pixels.
BACKBONE = SimpleNamespace(scale=2)
POLICY: Any = SimpleNamespace(uneven_forwards=nullcontext, latent_shape=(4, 1, 1), backbone=BACKBONE, world=None)


def evaluator(judge: Any, per_prompt: int = 4, batch_size: int = 3, accelerator: Any = None) -> Evaluator:
    features = lambda images: images.flatten(1)[:, :2]  # noqa: E731
    return Evaluator(POLICY, Scorer({"judge": judge}), features, SamplerSpec(), per_prompt, batch_size, accelerator)


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
    scores, *_ = evaluator(Rank(), batch_size=batch_size).score(PROMPTS, "default", 0)
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
        evaluator(Rank(), accelerator=accelerator).score(PROMPTS, "default", 0)

    for rank in range(world):
        score(rank)
    assert torch.stack(shares).sum(0)[:, 0].tolist() == [0.0, 0.25, 0.5, 0.75] * 3


@pytest.mark.parametrize("world", [1, 2, 5])
def test_each_first_image_of_the_first_prompts_is_kept(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    monkeypatch.setattr(evaluation, "generate", drawn)

    def kept(rank: int, keep: int) -> Tensor:
        accelerator = SimpleNamespace(process_index=rank, num_processes=world, device=torch.device("cpu"))
        accelerator.gather = lambda width: torch.tensor([2 + 1 + 1])
        accelerator.reduce = lambda values, reduction: values
        return evaluator(Rank(), accelerator=accelerator).score(PROMPTS, "default", 0, keep=keep).pictures

    pictures = sum(kept(rank, 2) for rank in range(world))
    assert pictures.shape == (2, 3, 2, 2)
    assert [f"{value:.2f}" for value in pictures[:, 0, 0, 0].tolist()] == ["0.00", "0.10"]
    assert len(kept(0, 0)) == 0 and len(kept(0, 9)) == len(PROMPTS)


@pytest.mark.parametrize("recipe", ["nft", "renoise"])
def test_evaluations_draw_on_the_training_s_shifted_schedule(recipe: str) -> None:
    spec = evaluation_spec(load_config(f"configs/playground/{recipe}.yaml", ["rollout.shift=3", "evaluate.steps=7"]))
    assert (spec.shift, spec.steps) == (3.0, 7)


class Thirds:
    """Figures of a stranger's: the mean over prompts of a third of their images' mean brightness, which rounds."""

    size = 2

    def applies(self, prompt: str, metadata: Any) -> bool:
        return prompt != "x"

    def read(self, images: Tensor, prompts: list[str], metadata: Any) -> list[float]:
        assert len(images) == len(prompts) == len(metadata)
        return images.double().mean((1, 2, 3)).tolist()

    def sums(self, prompt: str, readings: list[float]) -> tuple[float, float]:
        assert len(readings) == 4
        return sum(readings) / 3, 1

    def figures(self, sums: list[float]) -> dict[str, float | None]:
        return {"thirds": sums[0] / sums[1], "unknown": None}


class Parts:
    """The brightness of prompts but "a", under one of two names that some prompt states."""

    names: tuple[str, ...] = ("light", "unstated")

    def __call__(self, images: Tensor, prompts: list[str], metadata: Any) -> Tensor:
        light = images.mean((1, 2, 3))
        stated = torch.tensor([prompt != "a" for prompt in prompts])
        return torch.stack([torch.where(stated, light, torch.nan), torch.full_like(light, torch.nan)], 1)


class Judge:
    name = "judge"

    def __init__(self, figures: Any = None, breakdown: Any = None) -> None:
        self.figures, self.breakdown = figures, breakdown

    def __call__(self, images: Tensor, prompts: list[str], metadata: Any) -> Tensor:
        return images.mean((1, 2, 3))


def measured(judge: Any, prompts: list[Prompt], per_prompt: int = 4, accelerator: Any = None) -> Evaluated:
    return evaluator(judge, per_prompt, accelerator=accelerator).score(prompts, "default", 0)


def on_processes(world: int, judge: Any, prompts: list[Prompt]) -> list[Evaluated]:
    """The same on several processes, as threads that really exchange their tensors."""
    barrier, given, found = Barrier(world), [torch.empty(0)] * world, [None] * world

    def work(rank: int) -> None:
        def exchange(value: Tensor) -> list[Tensor]:
            given[rank] = value
            barrier.wait(60)
            everything = list(given)
            barrier.wait(60)
            return everything

        accelerator = SimpleNamespace(process_index=rank, num_processes=world, device=torch.device("cpu"))
        accelerator.gather = lambda value: torch.cat(exchange(value))
        accelerator.reduce = lambda value, reduction: torch.stack(exchange(value)).sum(0)
        found[rank] = measured(judge, prompts, accelerator=accelerator)  # type: ignore[call-overload]

    threads = [Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found  # type: ignore[return-value]


def test_a_judges_own_figures_are_reported_beside_the_diversity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "generate", drawn)
    breadth = measured(Judge(Thirds()), PROMPTS).breadth()
    brightness = torch.tensor([[(10 * p + m) / 100 for m in range(4)] for p in range(3)])
    assert list(breadth) == ["diversity", "thirds"]
    assert breadth["thirds"] == pytest.approx(float(brightness.sum(1).mean() / 3), rel=1e-6)
    assert list(measured(Judge(), PROMPTS).breadth()) == ["diversity"]
    assert list(measured(Judge(Thirds()), [*PROMPTS, Prompt("x")]).breadth()) == ["diversity"]  # not of all prompts
    assert list(measured(Judge(Thirds()), PROMPTS, per_prompt=1).breadth()) == ["diversity"]  # there are no groups


@pytest.mark.parametrize("world", [2, 3, 5])
def test_processes_find_the_same_figures_to_the_bit(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    """With fewer prompts than processes, too."""
    monkeypatch.setattr(evaluation, "generate", drawn)
    alone = measured(Judge(Thirds()), PROMPTS).breadth()
    assert [one.breadth() for one in on_processes(world, Judge(Thirds()), PROMPTS)] == [alone] * world


def test_figures_that_cannot_read_an_image_say_whose_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "generate", drawn)
    source = Thirds()
    source.read = lambda *given: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(RewardError, match='reward "judge": its figures failed to read images with ZeroDivisionError'):
        measured(Judge(source), PROMPTS)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_scores_by_parts_are_kept_by_prompt(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    monkeypatch.setattr(evaluation, "generate", drawn)
    judge = Judge(breakdown=Parts())
    found = measured(judge, PROMPTS) if world == 1 else on_processes(world, judge, PROMPTS)[1]
    assert list(found.parts) == ["judge[light]"]
    by_prompt = found.by_prompt(["judge"], 4)
    assert by_prompt["judge[light]"] == [None, *by_prompt["judge"][1:]]
    judge.breakdown.names = ("light",)
    with pytest.raises(RewardError, match=r'reward "judge": its breakdown has shape \(3, 2\), not \(3, 1\)'):
        measured(judge, PROMPTS)


@pytest.mark.parametrize("judge", [Judge(), Judge(FIGURES)], ids=["no judge of the world", "the world's own"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_world_s_model_has_its_variety(monkeypatch: pytest.MonkeyPatch, judge: Any, world: int) -> None:
    """Whatever the rewards are, once, and equal to that of the images and to the bit on two processes. For another
    model's images, of prompts that happen to be in the world's language, nothing is said."""
    rng = np.random.default_rng(3)
    prompts = [
        Prompt(text) for text in ("a red circle", "two blue squares on white", "a green star left of a red circle")
    ]
    pictures = {p.text: np.stack([draw(p.text, rng) for _ in range(4)]) for p in prompts}
    images = {text: torch.from_numpy(one).permute(0, 3, 1, 2).float() / 255 for text, one in pictures.items()}

    def rendered(policy: Any, prompts: list[Prompt], spec: Any, *, per_prompt: int, batch_size: int, **_: Any) -> Any:
        everything = torch.cat([images[prompt.text] for prompt in prompts])
        for index in torch.arange(len(everything)).split(batch_size):
            yield index, everything[index]

    monkeypatch.setattr(evaluation, "generate", rendered)
    assert measured(Judge(), prompts).figures == {}
    monkeypatch.setattr(POLICY, "world", worlds()["playground"])
    found = measured(judge, prompts) if world == 1 else on_processes(2, judge, prompts)[1]
    truth = variety(torch.cat(list(images.values())), [p.text for p in prompts for _ in range(4)])
    assert set(found.figures) == {"variety", "unreadable"} and truth.readings > 0
    assert found.figures["unreadable"] == truth.unreadable
    assert found.figures["variety"] == pytest.approx(truth.value, rel=1e-7)
    assert found.figures == measured(Judge(), prompts).figures


class Palest(Reported):
    """What a stranger reports: how pale each image is, and the palest of all."""

    names = ("paleness",)

    def __init__(self, judges: Any, prompts: Any, world: Any, per_prompt: int) -> None:
        self.most, self.per_prompt = torch.zeros(()), per_prompt

    def __call__(self, images: Tensor, prompts: Any) -> Tensor:
        self.most = torch.maximum(self.most, images.mean((1, 2, 3)).max())
        return images.mean((1, 2, 3))[:, None]

    def figures(self, prompts: Any, first: int, total: int, together: Any) -> dict[str, float]:
        return {"palest": float(self.most)} if self.per_prompt > 1 else {}


def test_a_package_reports_what_rewards_declare(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "generate", drawn)
    monkeypatch.setitem(sys.modules, "of_a_stranger", SimpleNamespace(Palest=Palest))
    judge = Judge()
    judge.pale = True  # type: ignore[attr-defined]
    assert not measured(judge, PROMPTS).parts
    installed("pale", "of_a_stranger:Palest", "diffrl.reported")
    found = measured(judge, PROMPTS)
    assert found.figures["palest"] == pytest.approx(0.23) and list(found.parts) == ["paleness"]
    assert "palest" not in measured(Judge(), PROMPTS).figures
