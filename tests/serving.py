"""Reward servers in the tests' own process: two small rewards, and a server in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffrl.rewards import Card, load_reward
from diffrl.serving.limits import bind, server_of
from diffrl.serving.server import Options, Served, make_app
from diffrl.serving.wire import Limits

REDNESS = f"{Path(__file__).parent / 'data' / 'redness.py'}:Redness"
IMAGES = torch.rand(12, 3, 16, 16, generator=torch.Generator().manual_seed(0))
TOKEN = "a token of some length"


class Light:
    """Mean of the pixels; holds its calls while `gate` is closed, and refuses prompts that say so."""

    name = "light"
    batch_size = 64
    card = Card("light", (0.0, float("inf")), *"cwloe")

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        self.gate.wait(30)
        self.sizes.append(len(images))
        if "fail" in prompts:
            raise ValueError("no such word")
        return images.mean((1, 2, 3)) + torch.tensor([float(one.get("add", 0)) for one in metadata])


class Rank:
    """Rank by brightness in the group."""

    name, groupwise = "rank", True

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        return images.mean((1, 2, 3)).argsort().argsort().float()


@contextmanager
def in_thread(server: Any, port: int = 0) -> Iterator[str]:
    """A uvicorn server in a thread, at its URL."""
    listener = bind("127.0.0.1", port)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


def running(served: dict[str, Served], port: int = 0, **options: Any) -> AbstractContextManager[str]:
    """The reward server in a thread, at its URL."""
    return in_thread(server_of(make_app(served, Options(**options))), port)


@contextmanager
def running_three(light: Light) -> Iterator[str]:
    """`light`, Rank and Redness behind tight limits and a token."""
    redness = load_reward(REDNESS, power=0.5)
    served = {
        "redness": Served(redness, REDNESS, {"power": 0.5}),
        "light": Served(light, REDNESS),
        "rank": Served(Rank(), REDNESS),
    }
    limits = Limits(images=8, bytes=100_000)
    with running(served, token=TOKEN, limits=limits, wait=0.0, read_limit=1.0, time_limit=1.5) as url:
        yield url
