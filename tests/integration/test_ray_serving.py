"""Rewards served by Ray: the same scores, and a replica that is killed in the middle loses none."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serving import IMAGES, TOKEN

from diffrl.errors import UserError
from diffrl.rewards import load_reward
from diffrl.serving.server import Options

ray = pytest.importorskip("ray", reason="needs the extra ray")
pytest.importorskip("ray.serve", reason="needs the extra ray")
from diffrl.serving.replicas import Wanted, serve_on_ray, stop  # noqa: E402

LEDGER = """
import os, time

class Ledger:
    name, batch_size = "ledger", 8

    def __init__(self):
        self.file = open(f"{os.path.dirname(__file__)}/calls/{os.getpid()}", "a", buffering=1)

    def __call__(self, images, prompts, metadata):
        self.file.write("".join(f"{one['id']}\\n" for one in metadata))
        time.sleep(0.01 * len(images))
        return images.mean((1, 2, 3))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    (folder / "ledger.py").write_text(LEDGER)
    (folder / "calls").mkdir()
    about = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
    ray.init(num_cpus=2, object_store_memory=80 * 2**20, **about)
    wanted = {"ledger": Wanted(f"{folder / 'ledger.py'}:Ledger", {}, least=2, most=2, cpus=0.5)}
    (folder / "mine.py").write_text("def redness(images):\n    return images[:, 0].mean((1, 2))\n")
    wanted["redness"] = Wanted(f"{folder / 'mine.py'}:redness", {}, cpus=0.5)
    urls: list[str] = []
    try:
        serve_on_ray(wanted, "127.0.0.1", 0, Options(token=TOKEN), urls.append)
        yield urls[0]
    finally:
        stop()


@pytest.mark.long
def test_a_replica_killed_in_the_middle_loses_no_score(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert httpx.post(f"{url}/rewards/ledger/score", trust_env=False).status_code == 401
    monkeypatch.setenv("DIFFRL_REWARD_TOKEN", TOKEN)
    total = 400
    images = torch.rand(total, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    scores = torch.full((total,), torch.nan)

    def client(part: range) -> None:
        reward: Any = load_reward("remote", reward="ledger", servers=url, images=2)
        for start in range(part.start, part.stop, 20):
            rows = list(range(start, start + 20))
            scores[rows] = reward(images[rows], ["a"] * 20, [{"id": row} for row in rows])

    threads = [threading.Thread(target=client, args=(range(i, i + total // 2),)) for i in (0, total // 2)]
    for thread in threads:
        thread.start()
    while int((~scores.isnan()).sum()) < total // 5 and all(thread.is_alive() for thread in threads):
        time.sleep(0.02)
    calls = {int(file.name): len(file.read_text().split()) for file in (folder / "calls").iterdir()}
    assert len(calls) == 2 and max(calls.values()) > 0
    os.kill(max(calls, key=lambda process: calls[process]), signal.SIGKILL)
    for thread in threads:
        thread.join(120)
    torch.testing.assert_close(scores, images.mean((1, 2, 3)), rtol=0, atol=1e-6)
    files = folder / "calls"
    end = time.monotonic() + 60
    while len(list(files.iterdir())) < 3:  # another one is started
        assert time.monotonic() < end
        time.sleep(0.2)
    reward: Any = load_reward("remote", reward="ledger", servers=url)
    torch.testing.assert_close(reward(IMAGES, ["a"] * 12, [{"id": 0}] * 12), IMAGES.mean((1, 2, 3)))


@pytest.mark.long
def test_a_function_is_served(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFRL_REWARD_TOKEN", TOKEN)
    reward: Any = load_reward("remote", reward="redness", servers=url)
    assert torch.equal(reward(IMAGES, ["a"] * 12, [{}] * 12), IMAGES[:, 0].mean((1, 2)))


@pytest.mark.long
def test_a_reward_that_does_not_start_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(LEDGER.replace("self.file = ", "raise OSError('no such disk')\n        "))
    wanted = Wanted(f"{tmp_path / 'broken.py'}:Ledger", {}, cpus=0.5)
    with pytest.raises(UserError, match=r'rewards serve: "broken" does not start: .*no such disk'):
        serve_on_ray({"broken": wanted}, "127.0.0.1", 0, Options(), print)
