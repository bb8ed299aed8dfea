"""Where a run's seconds go: those of an epoch, and those before its first image."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diffrl.records.progress import BETWEEN, PARTS, PHASES

if TYPE_CHECKING:
    from diffrl.policy import Policy

INNER = ("decode", "reward", "wait", "reduce")  # lie within the loop's phases, which do not count them


def now(device: torch.device) -> float:
    """`time.perf_counter`, with the device's work done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass
class Clock:
    """Seconds by part. On an accelerator the host runs ahead, so only what waits for it is meaningful there."""

    seconds: dict[str, float] = field(default_factory=dict)
    forwards: int = 0  # since `watch`: of the network, counted in rows of images; see there
    first: float = 0.0  # `time.monotonic()` when the first image was there
    _inner: float = 0.0

    def add(self, name: str, since: float, until: float | None = None) -> float:
        until = time.perf_counter() if until is None else until
        self.seconds[name] = self.seconds.get(name, 0.0) + until - since
        return until

    def lap(self, name: str, since: float, until: float) -> float:
        """A phase of the loop ends; the INNER parts since the one before are taken out of it."""
        before, self._inner = self._inner, self.spent(*INNER)
        return self.add(name, since + self._inner - before, until)

    def spent(self, *names: str) -> float:
        return sum(self.seconds.get(name, 0.0) for name in names)

    def take(self) -> dict[str, float]:
        seconds, self.seconds, self._inner = self.seconds, {}, 0.0
        return seconds

    def watch(self, policy: Policy) -> None:
        """Add the seconds of the policy's forwards and decodes from now on, and count the forwards.

        A row of an image counts one, under guidance that runs the empty prompt beside it two. One with gradient counts
        three times as much: its backward costs about two forwards. What is computed again for it is not counted. On an
        accelerator these are decodes without gradient alone, around which the host waits.
        """
        predict, decode, device = policy.predict, policy.decode, policy.device

        def predicted(*args: Any, **kwargs: Any) -> Any:
            mark = time.perf_counter()
            result = predict(*args, **kwargs)
            self.add("forward", mark)
            guided = kwargs.get("guidance", args[3] if len(args) > 3 else 1.0) != 1.0
            rows = len(result.v) * (2 if guided and policy.backbone.classifier_free else 1)
            self.forwards += rows * (3 if result.v.requires_grad else 1)
            return result

        def decoded(*args: Any, **kwargs: Any) -> Any:
            if device.type != "cpu" and torch.is_grad_enabled():
                return decode(*args, **kwargs)
            mark = now(device)
            result = decode(*args, **kwargs)
            self.add("decode", mark, now(device))
            self.first = self.first or time.monotonic()
            return result

        policy.decode = decoded  # type: ignore[method-assign]
        if device.type == "cpu":
            policy.predict = predicted  # type: ignore[method-assign]

    def first_image(self, begun: list[float], note: Callable[[str], None]) -> dict[str, float]:
        """Once: note what the seconds until the first image went into, and their entry in the metrics. `begun`: the
        `time.monotonic()` of the command, of a loaded run and of its encoded prompts; emptied."""
        if not (begun and self.first):
            return {}
        load, encode, draw = (end - start for start, end in pairwise([*begun, self.first]))
        total = round(load + encode + draw, 2)  # the line and the metrics say one number
        begun.clear()
        note(f"first image after {total:.1f} s: {load:.1f} to load, {encode:.1f} to encode prompts, {draw:.1f} to draw")
        return {"seconds/first_image": total}


def split_epoch(seconds: Mapping[str, float], total: float, *, on_cpu: bool) -> dict[str, float]:
    """An epoch's entries in `metrics.jsonl`, from what a `Clock` took and the `total`.

    On a CPU with two entries more: "model", its forwards and backwards and the VAE, and "overhead", the loop's own
    cost, which is what remains of the total without rewards and waiting.
    """
    parts = {part: seconds.get(part, 0.0) for part in PHASES}
    parts["wait"] += parts["reduce"]
    named = {"seconds": total} | {f"seconds/{part}": parts[part] for part in PARTS}
    if on_cpu:
        model = sum(seconds.get(part, 0.0) for part in ("forward", "backward", "decode"))
        named |= {"seconds/model": model, "seconds/overhead": total - model - parts["reward"] - parts["wait"]}
    return named


def by_process(table: Tensor) -> dict[str, float]:
    """Entries "seconds/process/RANK/PHASE" from the PHASES of all processes (W, 7), on the CPU."""
    return {
        f"seconds/process/{rank}/{phase}": value
        for rank, row in enumerate(table.tolist())
        for phase, value in zip(PHASES, row, strict=True)
    }


def close_line(metrics: dict[str, Any], last: float, saved: float, encoded: float) -> float:
    """Complete an epoch's line with what lay between the `last` line and its training; now, for the next one."""
    now = time.perf_counter()
    between = {"checkpoint": saved - last, "texts": encoded - saved, "wall": now - last}
    metrics |= {f"seconds/{name}": round(value, 4) for name, value in between.items()}
    known = sum(metrics.get(f"seconds/{part}", 0.0) for part in (*PARTS, *BETWEEN))
    metrics["seconds/other"] = round(now - last - known, 4)
    return now
