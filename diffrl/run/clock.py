"""Where an epoch's seconds go."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from diffrl.policy import Policy
from diffrl.records.progress import PHASES


@dataclass
class Clock:
    """Seconds by phase. On an accelerator the host runs ahead, so only whole phases are meaningful there."""

    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, since: float) -> float:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - since
        return now

    def spent(self, *names: str) -> float:
        return sum(self.seconds.get(name, 0.0) for name in names)

    def take(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return seconds

    def watch(self, policy: Policy) -> None:
        """Add the seconds of the policy's forwards and decodes from now on."""

        def timed(function: Any, name: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                mark = time.perf_counter()
                result = function(*args, **kwargs)
                self.add(name, mark)
                return result

            return call

        policy.predict = timed(policy.predict, "forward")  # type: ignore[method-assign]
        policy.decode = timed(policy.decode, "decode")  # type: ignore[method-assign]


def split_epoch(
    seconds: Mapping[str, float], total: float, *, on_cpu: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """An epoch's phases, from what a `Clock` took and the `total`; and their entries in `metrics.jsonl`.

    On a CPU with two entries more: "model", its forwards and backwards and the VAE, and "overhead", the loop's own
    cost, which is what remains of the total without rewards and waiting.
    """
    parts = {phase: seconds.get(phase, 0.0) for phase in PHASES}
    parts["rollout"] = seconds.get("rollout+reward", 0.0) - parts["reward"]
    waiting = parts["wait"] + parts["reduce"]
    parts["optimise"] -= waiting
    named = {"seconds": total} | {f"seconds/{phase}": parts[phase] for phase in ("rollout", "reward", "optimise")}
    if on_cpu:
        model = sum(seconds.get(part, 0.0) for part in ("forward", "backward", "decode"))
        named |= {"seconds/model": model, "seconds/overhead": total - model - parts["reward"] - waiting}
    return parts, named


def by_process(table: Tensor) -> dict[str, float]:
    """Entries "seconds/process/RANK/PHASE" from the phases of all processes (W, 5), on the CPU."""
    return {
        f"seconds/process/{rank}/{phase}": value
        for rank, row in enumerate(table.tolist())
        for phase, value in zip(PHASES, row, strict=True)
    }
