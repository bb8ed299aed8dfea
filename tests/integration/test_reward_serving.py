"""Rewards behind HTTP: the same scores, batching, restarts, and every bad request answered with the right status."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serving import IMAGES, REDNESS, TOKEN, Light, Rank, running, running_three
from torch import Tensor

from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.prompts import Prompt
from diffrl.rewards import RewardError, load_reward
from diffrl.rewards.scoring import Scorer
from diffrl.run.build import build_scorers
from diffrl.serving.client import RemoteError
from diffrl.serving.server import Served
from diffrl.serving.wire import Limits, encode


@pytest.fixture(scope="module")
def light() -> Light:
    return Light()


@pytest.fixture(scope="module")
def url(light: Light) -> Iterator[str]:
    with running_three(light) as url:
        yield url


@pytest.fixture
def remote(url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("DIFFRL_REWARD_TOKEN", TOKEN)
    return lambda reward, **more: load_reward("remote", reward=reward, servers=url, **more)


def test_remote_scores_are_those_in_process(remote: Callable[..., Any]) -> None:
    prompts = [Prompt("red a"), Prompt("blue b"), Prompt("red c", {"add": 2})] * 4
    local = {"redness": load_reward(REDNESS, power=0.5), "light": Light(), "rank": Rank()}
    far = {"redness": remote("redness", power=0.5), "light": remote("light"), "rank": remote("rank")}
    groups = torch.arange(12) // 4
    expected = Scorer(local).score(IMAGES, prompts, groups)
    torch.testing.assert_close(Scorer(far).score(IMAGES, prompts, groups), expected, rtol=0, atol=1e-6, equal_nan=True)
    assert expected[:, 0].isnan().any() and not expected[:, 0].isnan().all()  # applies() is the server's
    assert far["rank"].groupwise and far["light"].card.range == (0.0, float("inf")) and far["light"].remote


def test_png_rounds_to_eight_bits(remote: Callable[..., Any]) -> None:
    bytes_ = (IMAGES[:5] * 255).round() / 255
    prompts, metadata = ["a"] * 5, [{}] * 5
    scores = remote("light", form="png")(IMAGES[:5], prompts, metadata)
    torch.testing.assert_close(scores, bytes_.mean((1, 2, 3)), rtol=0, atol=1e-6)


def test_what_the_servers_were_started_with_is_compared(url: str, remote: Callable[..., Any]) -> None:
    assert remote("redness", power=0.5, device="cuda:7").name == "redness"  # where it is computed is the server's
    for arguments, said in (({"power": 1.0}, "with power=0.5, not 1.0"), ({"size": 1}, "with size=its default, not 1")):
        with pytest.raises(UserError, match=said):
            remote("redness", **arguments)
    with pytest.raises(UserError, match=f'server {url}: 404: no reward "redess" here \\(nearest: "redness"\\)'):
        remote("redess")


def test_a_wrong_token_and_an_absent_server_are_named(url: str, remote: Callable[..., Any], monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("DIFFRL_REWARD_TOKEN", "another token of some length")
    with pytest.raises(UserError, match=f"server {url}: 401: "):
        remote("light")
    with pytest.raises(UserError, match=r"server http://127.0.0.1:9: ConnectError"):
        load_reward("remote", reward="light", servers=["http://127.0.0.1:9"])
    for odd in (
        "localhost:8000",
        "http://127.0.0.1:9?version=2",
        "http://127.0.0.1:9/v1#a",
        "http://127.0.0.1:9\n",
        "http://a..b",
    ):
        with pytest.raises(UserError, match=f'"{re.escape(odd)}" is not a URL'):
            load_reward("remote", reward="light", servers=odd)
    with pytest.raises(UserError, match="servers: name at least one"):
        load_reward("remote", reward="light", servers=None)


def test_a_failing_reward_is_an_error_with_its_server_and_nobody_elses(
    url: str, light: Light, remote: Callable[..., Any]
) -> None:
    light.gate.clear()
    found: dict[str, Any] = {}
    rewards = {prompt: remote("light") for prompt in ("first", "fail", "fine")}

    def ask(prompt: str, first: int) -> None:
        try:
            found[prompt] = rewards[prompt](IMAGES[first : first + 2], [prompt] * 2, [{}] * 2)
        except RemoteError as error:
            found[prompt] = str(error)

    threads = [threading.Thread(target=ask, args=pair) for pair in (("first", 0), ("fail", 2), ("fine", 4))]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    light.sizes.clear()
    light.gate.set()
    for thread in threads:
        thread.join()
    assert found["fail"].startswith(f'server {url}: 500: reward "light" on the prompt "fail"')
    torch.testing.assert_close(found["fine"], IMAGES[4:6].mean((1, 2, 3)))
    # The first was running alone; the others came together, failed together and were tried apart.
    assert light.sizes == [2, 4, 2, 2]
    with pytest.raises(RewardError, match=f'reward "x" on the prompt "fail".* RemoteError: server {url}: 500'):
        Scorer({"x": rewards["fail"]}).score(IMAGES[:1], [Prompt("fail")])


def test_several_clients_share_batches_of_one_size(light: Light, remote: Callable[..., Any]) -> None:
    light.gate.clear()
    batches = [IMAGES[:1], IMAGES[1:3], torch.rand(3, 3, 8, 8), IMAGES[3:7]]
    rewards = [remote("light") for _ in batches]
    scores: dict[int, Tensor] = {}

    def ask(number: int) -> None:
        count = len(batches[number])
        scores[number] = rewards[number](batches[number], ["a"] * count, [{}] * count)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    light.sizes.clear()
    light.gate.set()
    for thread in threads:
        thread.join()
    for number, images in enumerate(batches):
        torch.testing.assert_close(scores[number], images.mean((1, 2, 3)))
    assert light.sizes == [1, 6, 3]  # the first was alone; of the others those of one size came in one call


def test_a_full_house_is_busy_and_clients_come_again(light: Light) -> None:
    served = {"light": Served(light, REDNESS)}
    with running(served, limits=Limits(images=8, bytes=4_000), pending=4_000) as url:
        light.gate.clear()
        reward = load_reward("remote", reward="light", servers=url, images=1)
        first = threading.Thread(target=reward, args=(IMAGES[:1], ["a"], [{}]))
        first.start()
        time.sleep(0.2)
        content, kind = encode(IMAGES[:1], ["a"], [{}], "tensors")
        answer = httpx.post(url + "/rewards/light/score", content=content, headers={"Content-Type": kind})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        threading.Timer(0.3, light.gate.set).start()
        torch.testing.assert_close(reward(IMAGES[1:2], ["a"], [{}]), IMAGES[1:2].mean((1, 2, 3)))
        first.join()


def test_servers_are_used_in_turn_and_a_dead_one_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    lights = [Light(), Light()]
    with running({"light": Served(lights[0], REDNESS)}) as url:
        with running({"light": Served(lights[1], REDNESS)}) as other:
            reward = load_reward("remote", reward="light", servers=[url, other], images=3, patience=1.0)
            torch.testing.assert_close(reward(IMAGES, ["a"] * 12, [{}] * 12), IMAGES.mean((1, 2, 3)))
            assert [sum(one.sizes) for one in lights] == [6, 6]
        torch.testing.assert_close(reward(IMAGES, ["a"] * 12, [{}] * 12), IMAGES.mean((1, 2, 3)))
        assert sum(lights[0].sizes) == 18
    with pytest.raises(RemoteError, match=r"server http://127.0.0.1:\d+: .*and 1 more.* given up after"):
        reward(IMAGES, ["a"] * 12, [{}] * 12)
    waiting = sorted(line.partition(": ")[0] for line in caplog.messages if "it is asked again for up to 1 s" in line)
    assert waiting == sorted(f"server {one}" for one in (url, other))  # once each


def test_servers_that_differ_are_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFRL_REWARD_TOKEN", TOKEN)
    with (
        running({"redness": Served(load_reward(REDNESS), REDNESS)}) as other,
        pytest.raises(UserError, match="serve different rewards"),
    ):
        load_reward("remote", reward="redness", servers=[url, other])


def test_eight_clients_and_a_server_that_dies_lose_no_image() -> None:
    light = Light()
    images = torch.rand(240, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    found = torch.full((240,), torch.nan)
    answered = threading.Event()
    with running({"light": Served(light, REDNESS)}) as url:
        rewards = [load_reward("remote", reward="light", servers=url, images=3) for _ in range(8)]

        def client(number: int) -> None:
            for start in range(30 * number, 30 * number + 30, 6):
                part = slice(start, start + 6)
                found[part] = rewards[number](images[part], ["a"] * 6, [{}] * 6)
                answered.set()

        threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        answered.wait(20)
    port = int(url.rpartition(":")[2])
    before = int((~found.isnan()).sum())
    with running({"light": Served(light, REDNESS)}, port=port):
        for thread in threads:
            thread.join(60)
    assert 0 < before < 240
    torch.testing.assert_close(found, images.mean((1, 2, 3)), rtol=0, atol=1e-6)


def test_a_recipe_moves_to_a_server_by_overrides(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIFFRL_REWARD_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text("rewards: {redness: {power: 0.5, device: 'cuda:1'}}\n")
    moved = ["rewards.redness.plugin=remote:redness", f"rewards.redness.servers=[{url}]"]
    config = load_config("recipe.yaml", moved)
    scorer, judges = build_scorers(config, torch.device("cpu"))
    assert scorer.rewards["redness"] is judges.rewards["redness"]
    future = scorer.submit(IMAGES, [Prompt("red")] * 12)
    local = load_reward(REDNESS, power=0.5)(IMAGES, [], [])
    torch.testing.assert_close(future.result()[:, 0], local, rtol=0, atol=1e-6)
    scorer.close()
    with pytest.raises(UserError, match=r"with power=0\.5, not 0\.7"):
        build_scorers(load_config("recipe.yaml", [*moved, "rewards.redness.power=0.7"]), torch.device("cpu"))


def test_the_command_serves_until_it_is_interrupted() -> None:
    command = [sys.executable, "-m", "diffrl", "rewards", "serve", REDNESS, "power=0.5", "--port", "0"]
    listen = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, text=True, preexec_fn=listen)
    try:
        assert process.stdout is not None
        found = re.search(r"serving redness on (http://127.0.0.1:\d+) without a token", process.stdout.readline())
        assert found is not None
        reward = load_reward("remote", reward="redness", servers=found[1], power=0.5)
        torch.testing.assert_close(
            reward(IMAGES, ["red"] * 12, [{}] * 12), load_reward(REDNESS, power=0.5)(IMAGES, [], [])
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130 and process.stderr is not None
        assert process.stderr.read() == "diffrl: interrupted\n"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.long
def test_a_call_that_hangs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """Ctrl-C waited for the reward's call; the second one ended in a traceback."""
    file = tmp_path / "slow.py"
    file.write_text("import time\nclass Slow:\n    name = 'slow'\n    def __call__(self, i, p, m): time.sleep(600)\n")
    listen = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-m", "diffrl", "rewards", "serve", f"{file}:Slow", "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, text=True, preexec_fn=listen)
    try:
        assert process.stdout is not None and process.stderr is not None
        url = process.stdout.readline().split(" on ")[1].split()[0]
        body, kind = encode(IMAGES[:1], ["a"], [{}], "tensors")
        score = partial(httpx.post, f"{url}/rewards/slow/score", content=body, headers={"Content-Type": kind})
        with suppress(httpx.ReadTimeout):
            score(timeout=1.0)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130 and process.stderr.read() == "diffrl: interrupted\n"
    finally:
        process.kill()
        process.communicate()
