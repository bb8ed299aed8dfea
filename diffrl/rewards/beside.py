"""Rewards that are scored beside what the process does: by its own device, in order, or by other machines at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import Tensor

QUEUED = 8  # batches of images that may wait on the device for their scores, beside the one that was just drawn
CALLS = 32  # at once of other machines' rewards; what each of their servers gets is bounded by the reward itself
FAR = 256  # calls of them that may wait, with their images in main memory


@dataclass(frozen=True)
class Pending:
    """The scores (B, K) to come of a batch, in parts, each of which has NaN in the other ones' columns."""

    parts: list[Future[Tensor]]

    def join(self, part: Future[Tensor]) -> Pending:
        """The same with another part."""
        return Pending([part, *self.parts])

    def done(self) -> bool:
        """Are all of them there?"""
        return all(part.done() for part in self.parts)

    def result(self) -> Tensor:
        """Waits for all of them; raises what one of them failed with."""
        return reduce(lambda one, more: one.where(~one.isnan(), more), [part.result() for part in self.parts])


class Beside:
    """Has rewards asked by `each(images, prompts, names, keys)`, (B, K) with NaN for the others.

    `names`: those of this process, in one thread: batches are scored in the order in which they came, and no reward
    sees two calls at once. `far`: those of other machines, side by side, each for several batches at once; those of one
    list share their calls. `first`: what a thread does before anything else.
    """

    def __init__(
        self,
        names: Sequence[str],
        far: Sequence[Sequence[str]],
        each: Callable[..., Tensor],
        first: Callable[[], None],
    ) -> None:
        self._names, self._far, self._each = list(names), list(far), each
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="diffrl-rewards", initializer=first)
        self._threads = ThreadPoolExecutor(CALLS, thread_name_prefix="diffrl-far", initializer=first)
        self._queued, self._asked = deque[Future[Tensor]](), deque[Future[Tensor]]()

    def put(self, images: Tensor, *more: Any) -> Pending:
        """The scores to come of a batch (B, 3, H, W). More batches than may wait are waited for, and raise here."""
        prompts, *rest = more
        if self._names:
            self._queued.append(self._worker.submit(self._each, images, prompts, self._names, *rest))
        parts = list(self._queued)[-1:] if self._names else []
        while len(self._queued) > QUEUED:
            self._queued.popleft().result()
        if self._far:
            images = images.detach().cpu()  # while they wait they take no room on the device
            parts += [self._threads.submit(self._each, images, prompts, names, *rest) for names in self._far]
            self._asked.extend(parts[-len(self._far) :])
        while len(self._asked) > FAR:
            wait([self._asked.popleft()])
        return Pending(parts)

    def together(self, calls: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """The results of calls of other machines' rewards, made side by side."""
        return [future.result() for future in [self._threads.submit(one) for one in calls]]

    def close(self) -> None:
        """Ends the threads. Batches that wait are dropped."""
        for threads in (self._worker, self._threads):
            threads.shutdown(cancel_futures=True)
