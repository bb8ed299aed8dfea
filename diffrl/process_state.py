"""What the process's own state is, and that foreign code leaves it as it found it: torch's switches, folder, signals.

A reward library that enters autocast and never leaves it, or switches gradients off, would train another model, or
none. So where a plugin is imported, built or called, what it changed is put back, and said once.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import locale
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeAlias

from diffrl.switches import DEVICES, FRESH

# Of the environment, what says which process and which devices this is, and where files go.
ENVIRONMENT = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HOME", "TMPDIR", "PATH"),
)
_entered: list[Any] = []  # contexts that stay entered: where a plugin left another one open
_foreign = threading.local()  # `process`: that in which this thread runs foreign code
_leave_at_once = os._exit
Get: TypeAlias = Callable[[], Any]
Put: TypeAlias = Callable[[Any], Any]


@contextlib.contextmanager
def unchanged(tell: Callable[[str], None]) -> Iterator[None]:
    """Inside, foreign code runs; behind it, what it has changed of this process and thread is as it was before.

    Args:
        tell: is called with one line for each kind of change, such as "changes torch's default dtype; it was put back".
    """
    noted, outer = Noted(), getattr(_foreign, "process", None)
    _foreign.process = os.getpid()
    try:
        yield
    finally:
        _foreign.process = outer
        noted.put_back(tell)


def _exit(status: int) -> NoReturn:
    """`os._exit`. In foreign code it is an exception, as `sys.exit`: the process would end with any code, 0 as well,
    without a word. A fork that foreign code makes ends as it asks to."""
    if getattr(_foreign, "process", None) == os.getpid():
        raise SystemExit(f"os._exit({status})")
    _leave_at_once(status)


os._exit = _exit


class Noted:
    """The state of this process and thread, to be put back behind foreign code.

    `elsewhere`: that runs in threads of its own, where its calls are guarded; here only what all threads share is.
    """

    def __init__(self, elsewhere: bool = False) -> None:
        first = "torch" not in sys.modules  # what imports torch itself is compared with torch as it starts
        self._before = None if first else _state(elsewhere)
        self._filters, self._signals = list(warnings.filters), _signals()
        self._path = list(sys.path) if threading.current_thread() is threading.main_thread() else []

    def put_back(self, tell: Callable[[str], None]) -> None:
        """Put back what has changed since, and say so, see `unchanged`."""
        before = self._before
        if before is None and "torch" in sys.modules:
            before = {name: (get, put, FRESH[name]) for name, (get, put, _) in _state().items() if name in FRESH}
        for name, (get, put, value) in (before or {}).items():
            with contextlib.suppress(RuntimeError, OSError, ValueError):  # this build lacks it; a deleted folder
                if get() != value:
                    put(value)
                    tell(f"changes {name}; it was put back")
        for number, handler in self._signals.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
                tell(f"changes what {signal.Signals(number).name} does; it was put back")
        if not set(self._path) <= set(sys.path):  # more of them are a library's own affair
            sys.path[:] = [*self._path, *(folder for folder in sys.path if folder not in self._path)]
            tell("takes folders out of sys.path; they were put back")
        # A library may silence its own warnings for good; one that makes errors of them ends what others do.
        if any(one[0] == "error" and one not in self._filters for one in warnings.filters):
            warnings.resetwarnings()  # tells Python's cache that the list is another
            warnings.filters[:] = self._filters  # type: ignore[index]  # a list; typeshed has a sequence
            tell("makes errors of warnings; it was put back")


def unchanged_by(name: str, kind: str = "reward", when: str = "") -> contextlib.AbstractContextManager[None]:
    """`unchanged` around a call of the reward `name`, or of another plugin, each kind of change said once."""
    return unchanged(functools.partial(_say, f'{kind} "{name}"{when}'))


@functools.cache
def _say(whose: str, what: str) -> None:
    logging.getLogger("diffrl").warning("%s %s", whose, what)


def _state(elsewhere: bool = False) -> dict[str, tuple[Get, Put, Any]]:
    """{what it is called: (how to ask, how to set, its value now)} of everything that can be asked here."""
    table = {} if elsewhere else _of_the_thread()
    if threading.current_thread() is threading.main_thread():  # else the main thread may change them meanwhile
        table |= _of_the_process()
    found = {}
    for name, (get, put) in table.items():
        with contextlib.suppress(RuntimeError, OSError, AttributeError, ImportError):
            found[name] = (get, put, get())
    return found


def _of_the_thread() -> dict[str, tuple[Get, Put]]:
    """What a thread has of its own, and switches of torch's that a run leaves alone."""
    import numpy as np
    import torch
    from torch import overrides
    from torch.nn.modules import module as modules
    from torch.utils import _python_dispatch, deterministic

    c: Any = torch._C
    autograd, mha = c._autograd, torch.backends.mha
    hooks = [name for name in vars(modules) if name.startswith("_global_") and name.endswith("_hooks")]
    table: dict[str, tuple[Get, Put]] = {
        "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "torch's default device or modes": (
            lambda: (str(torch.get_default_device()), len(overrides._get_current_function_mode_stack())),
            _set_device,
        ),
        # Before grad mode and others, which leaving it changes.
        "torch's inference mode": (torch.is_inference_mode_enabled, _enter_inference_mode),
        "torch's dispatch modes": (
            lambda: len(_python_dispatch._get_current_dispatch_mode_stack()),
            lambda depth: _leave(_python_dispatch, len(_python_dispatch._get_current_dispatch_mode_stack()) - depth),
        ),
        "torch's hooks on saved tensors": (
            lambda: autograd._top_saved_tensors_default_hooks(True),
            lambda top: _pop(lambda: autograd._top_saved_tensors_default_hooks(True), top),
        ),
        "torch's hooks on all modules": _together(_table(modules, name) for name in hooks),
        "torch's threads of backward passes": (c._is_multithreading_enabled, c._set_multithreading_enabled),
        "torch's cache of autocast": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        "torch's filling of memory": _attribute(deterministic, "fill_uninitialized_memory"),
        "torch's fast path of attention": (mha.get_fastpath_enabled, mha.set_fastpath_enabled),
        "torch's nnpack": (c._get_nnpack_enabled, torch.backends.nnpack.set_flags),
        "torch's grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
        "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
        "torch's deterministic mode": (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda mode: torch.use_deterministic_algorithms(mode[0], warn_only=mode[1]),
        ),
        "torch's float32 precision": _together(_precisions()),
        "torch's anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        "numpy's errors": (np.geterr, lambda errors: np.seterr(**errors)),
        "the working folder": (os.getcwd, os.chdir),
        "the sockets' default timeout": (socket.getdefaulttimeout, socket.setdefaulttimeout),
    }
    backends = torch.backends
    reduced = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    for switch in (*reduced, "allow_fp16_accumulation"):
        table[f"torch.backends.cuda.matmul.{switch}"] = _attribute(backends.cuda.matmul, switch)
    for switch in ("enabled", "benchmark", "deterministic"):
        table[f"torch.backends.cudnn.{switch}"] = _attribute(torch.backends.cudnn, switch)
    for device in DEVICES:
        table[f"torch's autocast on {device}"] = _autocast(device)
    return table


def _set_device(value: tuple[str, int]) -> None:
    import torch
    from torch import overrides

    device, depth = value
    torch.set_default_device(None if device == "cpu" else device)
    _leave(overrides, len(overrides._get_current_function_mode_stack()) - depth)


def _leave(modes: Any, count: int) -> None:
    """Take away so many of the modes that were entered last; the own exit of `torch.device` needs more than it has."""
    for _ in range(count):
        modes._pop_mode()


def _pop(top: Get, wanted: Any) -> None:
    import torch

    while (found := top()) is not None and found != wanted:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _table(owner: Any, name: str) -> tuple[Get, Put]:
    """What a dict has, asked by its name each time: foreign code may have put another in its place."""

    def put(was: Any) -> None:
        getattr(owner, name).clear()
        getattr(owner, name).update(was)

    return lambda: dict(getattr(owner, name)), put


# Of torch.backends, where a product in float32 may be less precise; the older two switches are views of the same.
PRECISE = ("", "cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")


def _precisions() -> Iterator[tuple[Get, Put]]:
    import torch

    yield torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    yield _attribute(torch.backends.cudnn, "allow_tf32")
    for name in PRECISE:
        yield _attribute(functools.reduce(getattr, filter(None, name.split(".")), torch.backends), "fp32_precision")


def _of_the_process() -> dict[str, tuple[Get, Put]]:
    """What is one for all threads, and what a run sets for a while itself."""
    import torch

    cuda, ours, manager = torch.backends.cuda, logging.getLogger("diffrl"), logging.root.manager
    kernels = ("flash", "mem_efficient", "math", "cudnn")
    switches = {
        f"torch's {name} attention": (getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp"))
        for name in kernels
    }
    return switches | {
        "torch's mkldnn": _attribute(torch.backends.mkldnn, "enabled"),
        "torch's half-precision sums of attention": (
            cuda.fp16_bf16_reduction_math_sdp_allowed,
            cuda.allow_fp16_bf16_reduction_math_sdp,
        ),
        "torch's own functions": (lambda: [there.get(name) for _, there, name in _functions()], _set_functions),
        "sys.argv": (lambda: list(sys.argv), lambda words: setattr(sys, "argv", words)),
        "sys.stdout": _attribute(sys, "stdout"),
        "sys.stderr": _attribute(sys, "stderr"),
        "print": _attribute(builtins, "print"),
        "sys.excepthook": _attribute(sys, "excepthook"),
        "threading.excepthook": _attribute(threading, "excepthook"),
        "logging.disable": (lambda: manager.disable, logging.disable),
        "diffrl's logger": _together(  # `setLevel` forgets as well what it answered at the level that was set meanwhile
            [(lambda: ours.level, ours.setLevel), _attribute(ours, "disabled"), _attribute(ours, "propagate")]
        ),
        "the locale": (functools.partial(locale.setlocale, locale.LC_ALL),) * 2,
        "multiprocessing's start method": (
            lambda: multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0],
            lambda method: multiprocessing.set_start_method(method, force=True),
        ),
        "the garbage collector": (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
        "the garbage collector's thresholds": (gc.get_threshold, lambda values: gc.set_threshold(*values)),
        "the recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
        "the folder of temporary files": (tempfile.gettempdir, _attribute(tempfile, "tempdir")[1]),
        "the timer of SIGALRM": (
            lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0,
            lambda on: None if on else signal.setitimer(signal.ITIMER_REAL, 0),
        ),
        "which signals wait": (
            functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, []),
            functools.partial(signal.pthread_sigmask, signal.SIG_SETMASK),
        ),
        "the processors": (lambda: os.sched_getaffinity(0), lambda those: os.sched_setaffinity(0, those)),
        "the process's limits": _together(_limits()),
        "the environment": (lambda: {name: os.environ.get(name) for name in ENVIRONMENT}, _set_environment),
        "the umask": (_umask, os.umask),
    }


@functools.cache
def _functions() -> list[tuple[Any, Any, str]]:
    """Where torch's functions and layers are, with which networks compute: (module or class, what it has, name)."""
    import torch

    nn = torch.nn
    layers = [one for one in vars(nn).values() if isinstance(one, type) and issubclass(one, nn.Module)]
    owners = [nn.functional, nn.init, *layers]
    made = ("empty", "zeros", "ones", "full")  # which those who make modules without weights replace
    found = [(owner, name) for owner in owners for name, value in vars(owner).items() if callable(value)]
    found += [(torch, name) for name in made] + [(torch.Tensor, name) for name in dir(torch.Tensor)]
    return [(owner, vars(owner), name) for owner, name in found]


def _set_functions(values: list[Any]) -> None:
    for (owner, there, name), value in zip(_functions(), values, strict=True):
        if there.get(name) is value:
            continue
        if value is None:  # it was inherited
            delattr(owner, name)
        else:
            setattr(owner, name, value)


def _limits() -> Iterator[tuple[Get, Put]]:
    import resource

    for kind in (value for name, value in vars(resource).items() if name.startswith("RLIMIT_")):
        yield functools.partial(resource.getrlimit, kind), functools.partial(resource.setrlimit, kind)


def _umask() -> int:
    """Read, not set and set back: another thread may write a file."""
    with open("/proc/self/status") as status:
        return int(next(line.split()[1] for line in status if line.startswith("Umask:")), 8)


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _attribute(owner: Any, name: str) -> tuple[Get, Put]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _together(parts: Iterable[tuple[Get, Put]]) -> tuple[Get, Put]:
    """Several as one; what cannot be said now is None, and is left as it is."""
    pairs = list(parts)

    def value(get: Get) -> Any:
        try:
            return get()
        except RuntimeError:  # a precision that was set in the newer way, which the older names cannot say
            return None

    def put(values: list[Any]) -> None:
        for (_, one), was in zip(pairs, values, strict=True):
            if was is not None:
                one(was)

    return lambda: [value(get) for get, _ in pairs], put


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
    return {int(one): handler for one in signal.Signals if (handler := signal.getsignal(one)) is not None}
