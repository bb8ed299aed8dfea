"""Where an epoch's seconds go."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from diffrl.policy import Policy


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
