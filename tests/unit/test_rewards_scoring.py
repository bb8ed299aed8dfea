"""The scorer: columns, not-applicable, batches, groups, and failures that stop the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from diffrl.prompts import Prompt
from diffrl.rewards import RewardError
from diffrl.rewards.scoring import Scorer

PROMPTS = [Prompt("a cat"), Prompt("a dog", {"n": 2}), Prompt("a cow"), Prompt("a cat")]
IMAGES = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Brightness:
    """Mean of the pixels; records its calls."""

    name = "brightness"

    def __init__(self, **attributes: Any) -> None:
        self.calls: list[list[str]] = []
        self.__dict__.update(attributes)

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        self.calls.append(list(prompts))
        return images.mean(dim=(1, 2, 3))


class Scripted:
    """Calls a function instead of judging."""

    name = "scripted"

    def __init__(self, work: Callable[[int], Any]) -> None:
        self.work, self.calls = work, 0

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Any:
        self.calls += 1
        return self.work(self.calls)


def failure(scorer: Scorer, images: Tensor = IMAGES, prompts: list[Prompt] = PROMPTS) -> str:
    with pytest.raises(RewardError) as caught:
        scorer.score(images, prompts)
    return str(caught.value)


def test_a_column_for_each_reward_in_order() -> None:
    scorer = Scorer({"b": Brightness(), "a": Scripted(lambda n: torch.arange(4, dtype=torch.float64))})
    scores = scorer.score(IMAGES, PROMPTS)
    assert scorer.names == ["b", "a"] and scores.dtype == torch.float32 and scores.device.type == "cpu"
    torch.testing.assert_close(scores, torch.stack([IMAGES.mean((1, 2, 3)), torch.arange(4.0)], dim=1))


def test_what_does_not_apply_is_nan_and_not_sent() -> None:
    reward = Brightness(applies=lambda prompt, metadata: prompt == "a cat" or metadata.get("n") == 2)
    scores = Scorer({"r": reward}).score(IMAGES, PROMPTS)[:, 0]
    assert scores.isnan().tolist() == [False, False, True, False]
    torch.testing.assert_close(scores[[0, 1, 3]], IMAGES[[0, 1, 3]].mean((1, 2, 3)))
    assert reward.calls == [["a cat", "a dog", "a cat"]]


def test_nothing_applies_and_no_call() -> None:
    reward = Brightness(applies=lambda prompt, metadata: False)
    assert Scorer({"r": reward}).score(IMAGES, PROMPTS).isnan().all() and reward.calls == []


def test_batch_size_bounds_every_call() -> None:
    reward = Brightness(batch_size=3)
    scores = Scorer({"r": reward}).score(IMAGES, PROMPTS)
    assert [len(call) for call in reward.calls] == [3, 1]
    torch.testing.assert_close(scores[:, 0], IMAGES.mean((1, 2, 3)))


def test_scoring_builds_no_graph() -> None:
    weight = torch.ones((), requires_grad=True)
    seen: list[bool] = []

    class Learnt(Brightness):
        def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
            scores = super().__call__(images, prompts, metadata) * weight
            seen.append(scores.requires_grad)
            return scores

    for overlap in (False, True):
        scorer = Scorer({"r": Learnt()}, overlap=overlap, timeout=5.0)
        assert not scorer.submit(IMAGES.clone().requires_grad_(), PROMPTS).result().requires_grad
        scorer.close()
    assert seen == [False, False]


class Rank:
    """An image's rank by brightness inside its group."""

    name, groupwise = "rank", True

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        assert len(set(prompts)) == 1
        return images.mean((1, 2, 3)).argsort().argsort().float()


def test_groupwise_rewards_see_whole_groups() -> None:
    prompts = [Prompt("a"), Prompt("b"), Prompt("a"), Prompt("b"), Prompt("a")]
    images = torch.tensor([0.3, 0.9, 0.1, 0.2, 0.5])[:, None, None, None].expand(5, 3, 2, 2)
    groups = torch.tensor([7, 2**40, 7, 2**40, 7])
    scorer = Scorer({"rank": Rank(), "light": Brightness()})
    expected = torch.tensor([1.0, 1.0, 0.0, 0.0, 2.0])
    scores = scorer.score(images, prompts, groups)
    torch.testing.assert_close(scores[:, 0], expected)
    torch.testing.assert_close(scores[:, 1], images.mean((1, 2, 3)))
    with pytest.raises(ValueError, match='"rank" is group-wise'):
        scorer.score(images, prompts)
    # While sampling goes on its column stays empty, and is filled at the end.
    parts = torch.cat([scorer.submit(images[i : i + 2], prompts[i : i + 2]).result() for i in (0, 2, 4)])
    assert parts[:, 0].isnan().all()
    torch.testing.assert_close(scorer.finish(parts, [images], prompts, groups), scores)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (torch.tensor([0.0, torch.inf, 0.0, 0.0]), 'reward "x" returned inf for the prompt "a dog"'),
        (torch.tensor([0.0, 0.0, 1e300, 0.0], dtype=torch.float64), 'returned inf for the prompt "a cow"'),
        (torch.zeros(4, 1), "returned the shape (4, 1) instead of (4,)"),
        (torch.zeros(3), "returned the shape (3,) instead of (4,)"),
        (["0.0"] * 3 + ["?"], "returned a list instead of a tensor of shape (4,)"),
        ([0.0] * 3, "returned the shape (3,) instead of (4,)"),
    ],
)
def test_wrong_answers_name_reward_and_prompt_and_are_not_retried(answer: Any, said: str) -> None:
    reward = Scripted(lambda n: answer)
    text = failure(Scorer({"x": reward}, retries=3, backoff=0.0))
    assert said in text and '"x"' in text and '"a ' in text
    assert reward.calls == 1


def test_an_exception_stops_the_run() -> None:
    text = failure(Scorer({"x": Scripted(lambda n: 1 / 0)}))
    assert 'reward "x" on the prompt "a cat" and 3 more failed with ZeroDivisionError: division by zero' in text
    assert "diffrl rewards check x" in text


def test_retries_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)

    def flaky(call: int) -> Tensor:
        if call < 4:
            raise ConnectionError("busy")
        return torch.ones(4)

    assert Scorer({"x": Scripted(flaky)}, retries=3, backoff=0.5).score(IMAGES, PROMPTS).eq(1).all()
    assert pauses == [0.5, 1.0, 2.0]
    reward = Scripted(flaky)
    assert "failed 3 times with ConnectionError: busy" in failure(Scorer({"x": reward}, retries=2))
    assert reward.calls == 3


def test_a_time_out_is_an_error() -> None:
    hung = threading.Event()
    text = failure(Scorer({"x": Scripted(lambda n: hung.wait(5.0))}, timeout=0.05, retries=2))
    hung.set()
    assert 'reward "x" on the prompt "a cat" and 3 more took longer than 0.05 s' in text


def test_a_rewards_own_time_out_is_retried_as_any_exception() -> None:
    def slow(call: int) -> Tensor:
        if call == 1:
            raise TimeoutError("server")
        return torch.ones(4)

    assert Scorer({"x": Scripted(slow)}, timeout=5.0, retries=1, backoff=0.0).score(IMAGES, PROMPTS).eq(1).all()


def test_overlap_works_beside_the_caller_in_order() -> None:
    gate, threads = threading.Event(), []

    class Slow(Brightness):
        def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
            gate.wait(5.0)
            threads.append(threading.current_thread())
            return super().__call__(images, prompts, metadata)

    reward = Slow()
    scorer = Scorer({"r": reward}, overlap=True)
    pending = [scorer.submit(IMAGES[[i]], [PROMPTS[i]]) for i in range(3)]
    assert not any(future.done() for future in pending)  # submit came back while the reward still waits
    gate.set()
    scores = torch.cat([future.result() for future in pending])[:, 0]
    torch.testing.assert_close(scores, IMAGES[:3].mean((1, 2, 3)))
    assert reward.calls == [["a cat"], ["a dog"], ["a cow"]]
    assert threading.main_thread() not in threads
    scorer.close()


def test_rewards_of_other_machines_overlap_and_those_of_this_one_do_not() -> None:
    gate, where = threading.Event(), {}

    class Where(Brightness):
        def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
            if self.remote:
                gate.wait(5.0)
            where[self.remote] = threading.current_thread()
            return super().__call__(images, prompts, metadata)

    here = Where(remote=False, applies=lambda prompt, metadata: prompt == "a cat")
    scorer = Scorer({"far": Where(remote=True), "here": here, "rank": Rank()})
    pending = [scorer.submit(IMAGES, PROMPTS) for _ in range(2)]
    assert len(here.calls) == 2 and not any(future.done() for future in pending)
    gate.set()
    for future in pending:
        scores = future.result()
        torch.testing.assert_close(scores[:, 0], IMAGES.mean((1, 2, 3)))
        assert scores[:, 1].isnan().tolist() == [False, True, True, False] and scores[:, 2].isnan().all()
    assert where[False] is not where[True]
    scorer.close()


def test_rewards_of_other_machines_are_asked_side_by_side_for_several_batches() -> None:
    """Two of them, and of each two batches or both groups: four calls are under way before one of them ends."""
    meeting = threading.Barrier(4, timeout=10)

    class Far(Brightness):
        remote = True

        def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
            meeting.wait()
            return images.mean((1, 2, 3)) + self.more

        def __init__(self, more: float, groupwise: bool = False) -> None:
            super().__init__()
            self.more, self.groupwise = more, groupwise

    scorer = Scorer({"a": Far(0.0), "here": Brightness(), "b": Far(1.0)})
    pending = [scorer.submit(IMAGES[part], PROMPTS[part]) for part in (slice(2), slice(2, 4))]
    expected = IMAGES.mean((1, 2, 3))[:, None] + torch.tensor([0.0, 0.0, 1.0])
    torch.testing.assert_close(torch.cat([one.result() for one in pending]), expected)
    scorer.close()
    meeting = threading.Barrier(2, timeout=10)
    scorer = Scorer({"a": Far(0.0, groupwise=True)})
    scores = scorer.score(IMAGES, PROMPTS, torch.tensor([0, 1, 0, 1]))
    torch.testing.assert_close(scores[:, 0], expected[:, 0])
    scorer.close()


def test_no_thread_outlives_its_call() -> None:
    # An idle one that has computed keeps OpenMP threads, beside which those of the training fall asleep at barriers.
    before = set(threading.enumerate())
    scorer = Scorer({"a": Brightness(), "b": Scripted(lambda _: torch.ones(4))})
    scorer.score(IMAGES, PROMPTS)
    assert set(threading.enumerate()) == before


def test_without_overlap_submit_is_done_at_once_and_raises_there() -> None:
    assert Scorer({"r": Brightness()}).submit(IMAGES, PROMPTS).done()
    with pytest.raises(RewardError):
        Scorer({"x": Scripted(lambda n: 1 / 0)}).submit(IMAGES, PROMPTS)
    overlapped = Scorer({"x": Scripted(lambda n: 1 / 0)}, overlap=True)
    with pytest.raises(RewardError):
        overlapped.submit(IMAGES, PROMPTS).result()
    overlapped.close()


def test_as_many_prompts_as_images() -> None:
    with pytest.raises(ValueError, match="4 images but 3 prompts"):
        Scorer({"r": Brightness()}).score(IMAGES, PROMPTS[:3])
