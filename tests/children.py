"""Children for tests that kill a training: forked from a clean server, never from the process that runs the tests.

torch.compile (and an accelerator) starts autograd's threads; from then on, no forked child of that process can run a
backward pass, so whether a fork works would depend on which tests the worker happened to run before.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.process import BaseProcess
from typing import Any

import charts
from garbage import keep_frozen

# Nothing imports this module of the standard library: what is before it in a child's sys.modules came of the first one.
MARK = "tabnanny"
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(  # what a small run imports, which took longer in each child than the run itself
    [
        "diffrl.run.train",
        MARK,
        "diffrl.run.preflight",
        "diffrl.families.sd3",
        "diffrl.policy.files",
        "diffrl.methods.nft.objective",
        "diffrl.report.hook",
        "diffusers.guiders",
        "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",  # the package alone loads nothing
    ]
)


def in_child(function: Callable[..., Any], *arguments: Any) -> int:
    """The exit code of a process that calls the function: 1 after an exception (it is on stderr), -N by signal N."""
    started = child(function, *arguments)
    started.join()
    assert started.exitcode is not None
    return started.exitcode


def child(function: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """A process that calls the function, started."""
    started = _SERVER.Process(target=_quietly, args=(charts.are_blank(), function, *arguments))
    started.start()
    return started


def on_two(function: Callable[..., Any], *arguments: Any) -> None:
    """`function(rank, *arguments)` in two children. AssertionError where one fails: it is on stderr."""
    assert ended(child(function, rank, *arguments) for rank in range(2)) == [0, 0]


def ended(processes: Iterable[BaseProcess], limit: float = 300) -> list[int | None]:
    """Their exit codes; one that has not ended within `limit` seconds is killed."""
    started = list(processes)
    for one in started:
        one.join(limit)
        one.kill()  # does nothing to one that has ended
        one.join()
    return [one.exitcode for one in started]


def _quietly(blank: bool, function: Callable[..., Any], *arguments: Any) -> None:
    import torch

    keep_frozen()
    torch.set_num_threads(1)  # as in conftest
    if blank:
        charts.leave_blank()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    function(*arguments)


def replace(values: Mapping[str, Any]) -> None:
    """Set attributes, named "package.module:Class.attribute": a child sees nothing of pytest's monkeypatch."""
    for target, value in values.items():
        owner, name = _find(target)
        setattr(owner, name, value)


def signal_at(target: str, call: int, number: int = signal.SIGKILL) -> None:
    """Let a function send a signal to its own process at its `call`-th call, before it does its work.

    A function of a module is replaced in the modules, too, that have imported it by its name.
    """
    owner, name = _find(target)
    function, count = getattr(owner, name), 0

    def disturbed(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    setattr(owner, name, disturbed)
    for module in [one for key, one in sys.modules.items() if key.startswith("diffrl.")]:
        if vars(module).get(name) is function:
            setattr(module, name, disturbed)


def _find(target: str) -> tuple[Any, str]:
    module, path = target.split(":")
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name
