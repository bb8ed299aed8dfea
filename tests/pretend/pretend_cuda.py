"""A pretend CUDA device: import it before torch, with PRETEND_CUDA naming the library that `build.py` makes.

Tensors of device "cuda" lie in host memory and kernels are the CPU's; torch.cuda's functions answer as on an H100. What
CUDA refuses is refused, and `waits()` tells where the host would wait for the device. No streams, no kernels' own
limits (alignment, masks, Triton), no speed, no torch.compile; attention runs the math path, so memory is indicative.

Environment: PRETEND_DEVICES (1), PRETEND_GIB (78; more raises OutOfMemoryError), PRETEND_PEAK (a file that the peak's
bytes are written into at exit). With RANK set, collectives follow NCCL's rules (`pretend_nccl`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

assert "torch" not in sys.modules, "the pretend device must be there before torch is imported"
_library = ctypes.CDLL(os.environ["PRETEND_CUDA"])

import torch  # noqa: E402

for _name in ("p_live", "p_peak", "p_kernels", "p_install"):
    getattr(_library, _name).restype = ctypes.c_int64
_library.p_seed.argtypes = [ctypes.c_uint64]
_library.p_set_limit.argtypes = [ctypes.c_int64]
_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)

DEVICES = int(os.environ.get("PRETEND_DEVICES", "1"))
TOTAL = int(float(os.environ.get("PRETEND_GIB", "78")) * 2**30)
PACKAGE = f"{os.sep}diffrl{os.sep}"
H100 = types.SimpleNamespace(
    name="Pretend H100", total_memory=TOTAL, major=9, minor=0, multi_processor_count=132, is_integrated=False,
    warp_size=32, gcnArchName="", uuid="0", L2_cache_size=50 << 20, max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
)  # fmt: skip

# ---- where the host waits

seen: Counter[tuple[str, str, str]] = Counter()  # (kind, operator, place); kind: read, copy, race or sync


def place() -> str:
    """The innermost line of diffrl on the stack, "run/loop.py:_step"; "outside" without one."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if PACKAGE in file and "site-packages" not in file:
            return f"{file.rpartition(PACKAGE)[2]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "outside" if threading.current_thread() is threading.main_thread() else "outside, in a thread"


def _told(kind: bytes, operator: bytes) -> None:
    seen[kind.decode(), operator.decode(), place()] += 1


def _synchronised(what: str) -> None:
    if _library.p_sync_mode() == 1:
        seen["sync", what, place()] += 1


_kept = _LISTENER(_told)  # C holds the pointer only
_library.p_set_listener(_kept)


@contextlib.contextmanager
def waits() -> Iterator[Counter[tuple[str, str, str]]]:
    """Counts inside, afresh."""
    seen.clear()
    _library.p_set_sync_mode(1)
    try:
        yield seen
    finally:
        _library.p_set_sync_mode(0)


# ---- torch.cuda's functions


def peak() -> int:
    return int(_library.p_peak())


def live() -> int:
    return int(_library.p_live())


def kernels() -> int:
    """How many were run on the device so far."""
    return int(_library.p_kernels())


def _index(device: Any = None) -> int:
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return int(_library.p_current()) if index is None else index


def _set_device(device: Any) -> None:
    if _index(device) >= 0 and _library.p_set_current(_index(device)):
        raise RuntimeError("CUDA error: invalid device ordinal")


class Stream:
    cuda_stream = stream_id = 0

    def __init__(self, device: Any = None, priority: int = 0, **more: Any) -> None:
        self.device = torch.device("cuda", _index(device))

    def synchronize(self) -> None:
        _synchronised("stream.synchronize")

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None: ...


class Event:
    def __init__(self, *given: Any, **more: Any) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _synchronised("event.synchronize")

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.at - self.at)


class Device:
    """torch.cuda.device."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = _index()
        _set_device(self.index)

    def __exit__(self, *error: Any) -> None:
        _set_device(self.before)


def _seed(seed: int) -> None:
    _library.p_seed(int(seed) & (2**64 - 1))


def _states() -> list[Any]:
    return [torch.ops.pretend.get_rng() for _ in range(DEVICES)]


def _set_state(state: Any, device: Any = None) -> None:
    torch.ops.pretend.set_rng(state.cpu())


def _statistics(device: Any = None) -> dict[str, int]:
    own = {"allocated_bytes.all.current": live(), "allocated_bytes.all.peak": peak()}
    return own | {"num_alloc_retries": 0, "num_ooms": 0}


MODES = {"default": 0, "warn": 1, "error": 2}
NOTHING = ("init", "_lazy_init", "empty_cache", "ipc_collect", "seed", "seed_all", "set_stream")
ANSWERS: dict[str, Any] = {
    **{name: lambda *given: None for name in NOTHING},
    **{name: lambda *given, **more: True for name in ("is_available", "is_initialized", "_is_compiled")},
    **{name: lambda *given, **more: True for name in ("is_bf16_supported", "can_device_access_peer")},
    **{name: lambda device=None: live() for name in ("memory_allocated", "memory_reserved")},
    **{name: lambda device=None: peak() for name in ("max_memory_allocated", "max_memory_reserved")},
    **{name: lambda device=None: _library.p_reset_peak() for name in ("reset_peak_memory_stats",)},
    **{name: lambda device=None: 0 for name in ("utilization", "memory_usage", "initial_seed")},
    **{name: lambda device=None: Stream(device) for name in ("current_stream", "default_stream")},
    **{name: lambda seed: _seed(seed) for name in ("manual_seed", "manual_seed_all")},
    "Stream": Stream,
    "device_count": lambda: DEVICES,
    "current_device": _index,
    "set_device": _set_device,
    "synchronize": lambda device=None: _synchronised("synchronize"),
    "get_device_properties": lambda device=None: H100,
    "get_device_capability": lambda device=None: (H100.major, H100.minor),
    "get_device_name": lambda device=None: H100.name,
    "get_arch_list": lambda: ["sm_90"],
    "mem_get_info": lambda device=None: (TOTAL - live(), TOTAL),
    "memory_stats": _statistics,
    "get_rng_state": lambda device=None: torch.ops.pretend.get_rng(),
    "get_rng_state_all": _states,
    "set_rng_state": _set_state,
    "set_rng_state_all": lambda states: [_set_state(state) for state in states],
    "stream": lambda stream: contextlib.nullcontext(stream),
    "Event": Event,
    "device": Device,
    "set_sync_debug_mode": lambda mode: _library.p_set_sync_mode(MODES.get(mode, mode)),
    "get_sync_debug_mode": lambda: _library.p_sync_mode(),
    "is_current_stream_capturing": lambda: False,
}


def _answer() -> None:
    for module in ("torch.cuda", "torch.cuda.random", "torch.cuda.memory", "torch.cuda.streams"):
        known = importlib.import_module(module)
        for name, value in ANSWERS.items():
            if module == "torch.cuda" or hasattr(known, name):
                setattr(known, name, value)
    torch.cuda._initialized = True
    lower: Any = torch._C
    lower._cuda_getDeviceCount = lambda: DEVICES
    # Each a function of its own: torch's compiler keeps a table of them, and refuses one under two names.
    lower._cuda_getDevice = lambda: _index()
    lower._cuda_setDevice = lambda index: _set_device(index)
    lower._cuda_isInBadFork = lambda: False
    lower._cuda_synchronize = lambda: _synchronised("synchronize")
    lower._cuda_getCurrentRawStream = lambda index: 0
    lower._cuda_exchangeDevice = lambda index: _index()
    lower._cuda_maybeExchangeDevice = lambda index: _index()
    general: Any = torch.accelerator
    general.is_available = lambda: True
    general.device_count = lambda: DEVICES
    general.current_accelerator = lambda check_available=False: torch.device("cuda")
    general.current_device_index = lambda: _index()
    general.current_device_idx = lambda: _index()
    general.set_device_index = lambda device: _set_device(device)
    general.synchronize = lambda device=None: _synchronised("synchronize")
    general.current_stream = lambda device=None: Stream(device)


# ---- what has no CPU form


def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """CUDA's is one fused kernel; this is its definition."""
    if not input.is_cuda:
        return _plain_rms_norm(input, normalized_shape, weight, eps)
    wide, dims = input.float(), list(range(-len(normalized_shape), 0))
    small = torch.finfo(input.dtype).eps if eps is None else eps
    made = (wide * torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + small)).to(input.dtype)
    return made if weight is None else made * weight


def _resize_storages() -> None:
    """FSDP2 frees gathered weights by resizing their storage to nothing."""
    importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param")

    def alloc_storage(tensor: Any) -> None:
        size = tensor.numel() * tensor.itemsize
        if tensor.untyped_storage().size() != size:
            torch.ops.pretend.resize(tensor, size)

    def free_storage(tensor: Any) -> None:
        if tensor.untyped_storage().size() != 0:
            torch.ops.pretend.resize(tensor, 0)

    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.fsdp._fully_shard"):
            for function in (alloc_storage, free_storage):
                if hasattr(module, function.__name__):
                    setattr(module, function.__name__, function)


def _note_peak(path: str) -> None:
    Path(path).write_text(str(peak()))


_answer()
_library.p_set_devices(DEVICES)
_library.p_set_limit(TOTAL)
KERNELS = int(_library.p_install())
assert KERNELS > 0, "no kernel was replaced"
for _kind in ("flash", "mem_efficient", "cudnn"):
    getattr(torch.backends.cuda, f"enable_{_kind}_sdp")(False)
torch.backends.cudnn.enabled = False
import torch.nn.functional as functional  # noqa: E402

_plain_rms_norm, functional.rms_norm = functional.rms_norm, _rms_norm
if "RANK" in os.environ:
    _resize_storages()
    import pretend_nccl

    pretend_nccl.install()
if "PRETEND_PEAK" in os.environ:
    atexit.register(_note_peak, os.environ["PRETEND_PEAK"])
