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

sys.path.insert(0, str(Path(__file__).parents[1]))
from children import _find

from diffrl.cli.main import main

event, folder, words = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
NUMBER = int(os.environ["GROUP_RANK"])  # torchrun's, of the node
STORE = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}


def happens() -> None:
    (folder / "happened").write_text(str(time.clock_gettime(time.CLOCK_REALTIME)))


def at(target: str, act: Callable[[], object]) -> None:
    """The event happens where a function is first called."""
    owner, name = _find(target)
    function = getattr(owner, name)

    def disturbed(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, function)
        happens()
        act()
        return function(*args, **kwargs)

    setattr(owner, name, disturbed)


def sends(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def fails(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def replaced(target: str, value: object) -> None:
    owner, name = _find(target)
    setattr(owner, name, value)


class Reading:
    """Something happens when a package is read."""

    def __init__(self, package: str, act: Callable[[], object]) -> None:
        self.package, self.act = package, act

    def find_spec(self, name: str, *given: object) -> None:
        if name == self.package:
            happens()
            self.act()


START, MODEL, EPOCH = "diffrl.prepare:prepare", "diffrl.run.setup:load_policy", "diffrl.run.run:Run.begin_epoch"
FULL = OSError(28, "No space left on device", "/cache")
BROKEN = RuntimeError("CUDA error: an illegal memory access was encountered")


def read(package: str, act: Callable[[], object]) -> None:
    sys.meta_path.insert(0, Reading(package, act))  # type: ignore[arg-type]


def otherwise(target: str, value: object) -> None:
    replaced(target, value)
    at("diffrl.ranks.meeting:check_agreement", lambda: None)


def fsdp() -> None:
    os.environ.update({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"})
    at("diffrl.ranks.meeting:check_agreement", lambda: None)


def no_store() -> None:
    os.environ.update(STORE)
    words.append("prompts.train=s3://there/prompts.txt")


HAPPENING: dict[str, Callable[[], object]] = {
    "killed while it reads packages": lambda: read("accelerate", sends(signal.SIGKILL)),
    "a package is missing": lambda: read("accelerate", fails(ImportError("no accelerate"))),
    "another version of diffrl": lambda: otherwise("diffrl.ranks.meeting:__version__", "0.0.1"),
    "another build of torch": lambda: otherwise("torch:__version__", "2.0.0+other"),
    "FSDP on this node alone": fsdp,
    "killed while it starts": lambda: at(START, sends(signal.SIGKILL)),
    "SIGTERM while it starts": lambda: at(START, sends(signal.SIGTERM)),
    "disk full while the config is made": lambda: at("diffrl.prepare:make_config", fails(FULL)),
    "no such config": lambda: words.__setitem__(0, "nowhere.yaml"),
    "an unknown key": lambda: words.append("optimise.learnig_rate=1"),
    "no prompts file": lambda: Path("prompts.txt").unlink(),
    "no plugin file": lambda: Path("reward.py").unlink(),
    "a store that does not answer": no_store,
    "another value of a key": lambda: words.append("optimise.learning_rate=0.5"),
    "another text in a prompts file": lambda: Path("prompts.txt").write_text("red a\nred b\nred c\nred x\n"),
    "killed while the model is loaded": lambda: at(MODEL, sends(signal.SIGKILL)),
    "SIGTERM while the model is loaded": lambda: at(MODEL, sends(signal.SIGTERM)),
    "killed while it trains": lambda: at(EPOCH, sends(signal.SIGKILL)),
    "SIGTERM while it trains": lambda: at(EPOCH, sends(signal.SIGTERM)),
    "a device fails while it trains": lambda: at(EPOCH, fails(BROKEN)),
    "stopped while it trains": lambda: at(EPOCH, sends(signal.SIGSTOP)),
    "a clock of tomorrow": lambda: replaced("time:time", lambda now=time.time: now() + 86_400),
    "another umask": lambda: os.umask(0o777),
    "slow by 40 s": lambda: time.sleep(40),
}

os.chdir(folder / f"node{NUMBER}")
socket.gethostname = lambda: f"node{NUMBER}"  # which resolves nowhere
if NUMBER == 1:
    at(START, lambda: None)  # what the event changed is met from there on, where it is not earlier
    HAPPENING.get(event, lambda: None)()
sys.exit(main(["train", *words]))
