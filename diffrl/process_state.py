"""What the process's own state is, and that foreign code leaves it as it found it: torch's switches, folder, signals.

A reward library that enters autocast and never leaves it, or switches gradients off, would train another model, or
none. So where a plugin is imported, built or called, what it changed is put back, and said once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

DEVICES = ("cpu", "cuda", "mps", "xpu")  # of autocast
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_entered: list[Any] = []  # contexts that stay entered: where a plugin left another one open
Get: TypeAlias = Callable[[], Any]
Put: TypeAlias = Callable[[Any], Any]


@contextlib.contextmanager
def unchanged(tell: Callable[[str], None]) -> Iterator[None]:
    """Inside, foreign code runs; behind it, what it has changed of this process and thread is as it was before.

    Args:
        tell: is called with one line for each kind of change, such as "changes torch's default dtype; it was put back".
    """
    first = "torch" not in sys.modules  # what imports torch itself is compared with torch as it starts
    before = None if first else _state()
    filters, signals = list(warnings.filters), _signals()
    try:
        yield
    finally:
        if before is None and "torch" in sys.modules:
            before = {name: (get, put, FRESH[name]) for name, (get, put, _) in _state().items() if name in FRESH}
        for name, (get, put, value) in (before or {}).items():
            with contextlib.suppress(RuntimeError, OSError):  # a switch that this build lacks; a deleted folder
                if get() != value:
                    put(value)
                    tell(f"changes {name}; it was put back")
        for number, handler in signals.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
                tell(f"changes what {signal.Signals(number).name} does; it was put back")
        # A library may silence its own warnings for good; one that makes errors of them ends what others do.
        if any(one[0] == "error" and one not in filters for one in warnings.filters):
            warnings.resetwarnings()  # tells Python's cache that the list is another
            warnings.filters[:] = filters  # type: ignore[index]  # a list; typeshed has a sequence
            tell("makes errors of warnings; it was put back")


# Of torch as it starts, for the first module that imports it.
FRESH: dict[str, Any] = {
    "torch's default device": "cpu",
    "torch's grad mode": True,
    "torch's inference mode": False,
    "torch's deterministic mode": (False, False),
    **{f"torch's autocast on {device}": (False, 0) for device in DEVICES},
}


def _state() -> dict[str, tuple[Get, Put, Any]]:
    """{what it is called: (how to ask, how to set, its value now)} of everything that can be asked here."""
    import torch

    table: dict[str, tuple[Get, Put]] = {
        "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "torch's default device": (
            lambda: str(torch.get_default_device()),
            lambda device: torch.set_default_device(None if device == "cpu" else device),
        ),
        # Before grad mode, which leaving it changes.
        "torch's inference mode": (torch.is_inference_mode_enabled, _enter_inference_mode),
        "torch's grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
        "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
        "torch's deterministic mode": (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda mode: torch.use_deterministic_algorithms(mode[0], warn_only=mode[1]),
        ),
        "torch's float32 matmul precision": (
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        ),
        "the working folder": (os.getcwd, os.chdir),
        "the sockets' default timeout": (socket.getdefaulttimeout, socket.setdefaulttimeout),
    }
    for switch in ("enabled", "benchmark", "deterministic", "allow_tf32"):
        table[f"torch.backends.cudnn.{switch}"] = _attribute(torch.backends.cudnn, switch)
    for device in DEVICES:
        table[f"torch's autocast on {device}"] = _autocast(device)
    found = {}
    for name, (get, put) in table.items():
        with contextlib.suppress(RuntimeError, OSError):
            found[name] = (get, put, get())
    return found


def _attribute(owner: Any, name: str) -> tuple[Get, Put]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _autocast(device: str) -> tuple[Get, Put]:
    """Whether it is on, how many contexts deep (at none its cache of weights is emptied), and to which dtype."""
    import torch

    def nesting() -> int:
        torch.autocast_increment_nesting()
        return int(torch.autocast_decrement_nesting())

    def get() -> tuple[Any, ...]:
        depth = nesting()
        on = torch.is_autocast_enabled(device)
        return (on, depth, torch.get_autocast_dtype(device)) if on else (on, depth)

    def put(value: tuple[Any, ...]) -> None:
        on, depth, *dtype = value
        if dtype:
            torch.set_autocast_dtype(device, dtype[0])
        torch.set_autocast_enabled(device, on)
        while nesting() > depth:
            torch.autocast_decrement_nesting()
        while nesting() < depth:
            torch.autocast_increment_nesting()
        if depth == 0:
            torch.clear_autocast_cache()

    return get, put


def _enter_inference_mode(mode: bool) -> None:
    import torch

    context = torch.inference_mode(mode)
    context.__enter__()
    _entered.append(context)


def _signals() -> dict[int, Any]:
    """The handlers that Python knows, where they can be set: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    numbers = [int(getattr(signal, name)) for name in SIGNALS if hasattr(signal, name)]
    return {number: handler for number in numbers if (handler := signal.getsignal(number)) is not None}
