"""`node.py EVENT FOLDER WORDS`: `diffrl train WORDS` as a node of two; on the second one the event happens."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from children import _find  # noqa: E402

from diffrl.cli.main import main  # noqa: E402

event, folder = sys.argv[1], Path(sys.argv[2])
NUMBER = int(os.environ["GROUP_RANK"])  # torchrun's, of the node


def happens() -> None:
    (folder / "happened").write_text(str(time.time()))


def at(target: str, call: int, act: Callable[[], None]) -> None:
    """The event happens at a function's `call`-th call."""
    owner, name = _find(target)
    function, count = getattr(owner, name), 0

    def disturbed(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            happens()
            act()
        return function(*args, **kwargs)

    setattr(owner, name, disturbed)


def sends(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def full() -> None:
    raise OSError(28, "No space left on device", "/cache")


def broken() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def happen(words: list[str]) -> list[str]:
    """On the second node; the words with which it starts."""
    happens()
    if event == "killed while it starts":
        at("diffrl.api:prepare", 1, sends(signal.SIGKILL))
    elif event == "SIGTERM while it starts":
        at("diffrl.api:prepare", 1, sends(signal.SIGTERM))
    elif event == "disk full while the config is made":
        at("diffrl.api:make_config", 1, full)
    elif event == "no such config":
        words = ["nowhere.yaml", *words[1:]]
    elif event == "an unknown key":
        words = [*words, "optimise.learnig_rate=1"]
    elif event == "another value of a key":
        words = [*words, "optimise.learning_rate=0.5"]
    elif event == "another text in a prompts file":
        Path("prompts.txt").write_text("red a\nred b\nred c\nred x\n")
    elif event == "no prompts file":
        Path("prompts.txt").unlink()
    elif event == "no plugin file":
        Path("reward.py").unlink()
    elif event == "another version of diffrl":
        from diffrl.run import meeting

        meeting.__version__ = "0.0.1"
    elif event == "FSDP on this node alone":
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    elif event == "a store that does not answer":
        os.environ |= {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        words = [*words, "prompts.train=s3://there/prompts.txt"]
    elif event == "killed while the model is loaded":  # as where main memory is too small
        at("diffrl.run.setup:load_policy", 1, sends(signal.SIGKILL))
    elif event == "killed while it trains":
        at("diffrl.run.run:Run.begin_epoch", 1, sends(signal.SIGKILL))
    elif event == "a device fails while it trains":
        at("diffrl.run.run:Run.begin_epoch", 1, broken)
    return words


os.chdir(folder / f"node{NUMBER}")
socket.gethostname = lambda: f"node{NUMBER}"
given = sys.argv[3:]
if NUMBER == 1 and event != "nothing":
    given = happen(given)
sys.exit(main(["train", *given]))
