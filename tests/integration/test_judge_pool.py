"""Several judges as one: side by side, least busy first, patience with who is busy or gone, and nothing lost."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from judges import SlowJudge

from diffrl.errors import UserError
from diffrl.rewards import RewardError, load_reward

IMAGES = torch.rand(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@contextmanager
def judges(*several: SlowJudge) -> Iterator[list[str]]:
    try:
        yield [one.url for one in several]
    finally:
        for one in several:
            if one.there:
                one.stop()


def ask(server: Any, count: int = 64, **more: Any) -> float:
    """Seconds in which a reward has its scores, all of them right."""
    reward = load_reward("vlm", server=server, **more)
    begun = time.monotonic()
    scores = reward(IMAGES[:count], ["a"] * count, [{}] * count)
    assert scores.tolist() == pytest.approx([0.75] * count)
    return time.monotonic() - begun


@pytest.mark.parametrize(("busy", "after"), [(None, None), (429, "0"), (503, "1"), (429, None)])
def test_a_judges_slots_are_filled_however_it_says_that_it_is_busy(busy: int | None, after: str | None) -> None:
    """64 images, 8 slots of 0.25 s: 2 s is the least."""
    judge = SlowJudge(0.25, 8, busy, after)
    with judges(judge):
        assert ask(judge.url) < 5.0
        assert judge.answered == 64 and judge.peak == 8


def test_retry_after_is_honoured() -> None:
    judge = SlowJudge(0.0, after="1")
    judge.faults = [503]
    with judges(judge):
        ask(judge.url, 1)
        assert judge.arrivals[1] - judge.arrivals[0] >= 1.0


def test_the_faster_judge_does_more_and_the_bound_holds_for_each() -> None:
    fast, slow = SlowJudge(0.02, 64), SlowJudge(0.5, 64)
    with judges(fast, slow) as urls:
        ask(urls, concurrency=4)
        assert fast.answered + slow.answered == 64 and fast.answered > 3 * slow.answered > 0
        assert fast.peak <= 4 and slow.peak <= 4


def test_who_is_gone_is_passed_over_and_comes_back() -> None:
    gone, there = SlowJudge(0.05), SlowJudge(0.05)
    with judges(gone, there) as urls:
        reward = load_reward("vlm", server=urls, concurrency=4)
        timer = threading.Timer(0.1, gone.stop)
        timer.start()
        assert len(reward(IMAGES, ["a"] * 64, [{}] * 64)) == 64
        timer.join()
        before = gone.answered
        gone.begin()
        time.sleep(0.5)
        assert len(reward(IMAGES, ["a"] * 64, [{}] * 64)) == 64
        assert gone.answered > before and gone.answered + there.answered <= 128 + 4


def test_many_threads_may_be_the_first_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffrl.reward_kinds.coroutines._loops", {})
    judge, found = SlowJudge(0.0, 64), []
    with judges(judge):
        monkeypatch.setattr(
            "diffrl.serving.client.Servers.each", lambda *_, **__: {judge.url: {"data": [{"id": "judge"}]}}
        )
        reward = load_reward("vlm", server=judge.url)
        work = lambda: found.extend(reward(IMAGES[:4], ["a"] * 4, [{}] * 4).tolist())  # noqa: E731
        threads = [threading.Thread(target=work) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert found == pytest.approx([0.75] * 64)


def test_a_judge_that_is_away_for_a_while_costs_that_while() -> None:
    judge = SlowJudge(0.02)
    with judges(judge):
        reward = load_reward("vlm", server=judge.url)
        judge.stop()
        threading.Timer(1.0, judge.begin).start()
        begun = time.monotonic()
        assert len(reward(IMAGES, ["a"] * 64, [{}] * 64)) == 64
        assert 1.0 <= time.monotonic() - begun < 4.0 and judge.answered == 64


@pytest.mark.parametrize("fault", [0, 429, 503])
def test_patience_ends(fault: int) -> None:
    judge = SlowJudge()
    judge.faults = [fault] * 99
    with judges(judge):
        reward, begun = load_reward("vlm", server=judge.url, patience=0.5), time.monotonic()
        with pytest.raises(RewardError, match=rf'on the prompt "a": server {judge.url}: .*given up after \d s'):
            reward(IMAGES[:2], ["a"] * 2, [{}] * 2)
        assert time.monotonic() - begun < 3.0 and len(judge.arrivals) >= 2


def test_a_name_with_several_addresses_is_several_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, usual = SlowJudge(0.1, 64), socket.getaddrinfo

    def look_up(host: Any, *args: Any, **more: Any) -> Any:
        if host != "judges.example":
            return usual(host, *args, **more)
        return [entry for address in ("127.0.0.1", "127.0.0.2") for entry in usual(address, *args, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setenv("NO_PROXY", "localhost")  # which is no proxy
    with judges(judge):
        reward = load_reward("vlm", server=judge.url.replace("127.0.0.1", "judges.example"), concurrency=2)
        urls = [one.url for one in reward.backend.servers._servers]
        assert urls == [f"http://{address}:{judge.port}/v1" for address in ("127.0.0.1", "127.0.0.2")]
        # Nobody listens at the second address: the first one does all.
        assert len(reward(IMAGES[:8], ["a"] * 8, [{}] * 8)) == 8 and judge.answered == 8


def test_one_judge_of_several_must_be_there() -> None:
    judge = SlowJudge()
    with judges(judge):
        ask(["http://127.0.0.1:9/v1", judge.url], 8)
    with pytest.raises(UserError, match=r"no server is there: server http://127.0.0.1:9/v1: ConnectError.*:8/v1"):
        load_reward("vlm", server=["http://127.0.0.1:9/v1", "http://127.0.0.1:8/v1"], model="judge")
