"""One reward behind a queue: what several clients ask for at the same time is scored in one batch."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from diffrl.errors import in_one_line
from diffrl.prompts import Prompt
from diffrl.rewards.protocol import Reward, RewardError, ability
from diffrl.rewards.scoring import Scorer
from diffrl.serving.wire import Request

Outcome = list[float | None] | RewardError  # null where the reward does not apply


Job = tuple[Request, asyncio.Future[list[float | None]]]  # a request that waits for its scores


class Batcher:
    """Scores requests in the order in which they came, several in one call where their images have one size.

    A group-wise reward gets every request alone: a request is a group. If a common batch fails, each request is tried
    alone, so that one client's bad input is no other's failure. `most`: images of a common batch (the reward's
    `batch_size` if it has one). `wait`: seconds that a batch with room in it waits for company.
    """

    def __init__(self, name: str, reward: Reward, worker: ThreadPoolExecutor, most: int, wait: float) -> None:
        self.scorer = Scorer({name: reward})
        self.most, self.wait = ability(reward, "batch_size") or most, wait
        self.busy_since: float | None = None
        self._worker = worker
        self._waiting: deque[Job] = deque()
        self._work: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Images that are not scored yet, those of the running call left out."""
        return sum(len(request.prompts) for request, _ in self._waiting)

    async def score(self, request: Request) -> list[float | None]:
        """The request's scores, or its `RewardError`. A cancelled request gives up its place."""
        done: asyncio.Future[list[float | None]] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, done))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._run())
        return await done

    async def _run(self) -> None:
        """Works until nothing waits."""
        if self.wait and not self.scorer.groupwise and self.waiting < self.most:
            await asyncio.sleep(self.wait)
        while jobs := self._take():
            self.busy_since = time.monotonic()
            try:
                outcomes = await asyncio.get_running_loop().run_in_executor(self._worker, self._score, jobs)
            finally:
                self.busy_since = None
            for (_, done), outcome in zip(jobs, outcomes, strict=True):
                if not done.done():  # not given up meanwhile
                    done.set_exception(outcome) if isinstance(outcome, RewardError) else done.set_result(outcome)

    def _take(self) -> list[Job]:
        """The jobs of the next call: the oldest one and, up to `most` images, others of its images' size."""
        jobs: list[Job] = []
        room, left = self.most, deque[Job]()
        for request, done in self._waiting:
            count, alike = len(request.prompts), not jobs or request.images.shape[1:] == jobs[0][0].images.shape[1:]
            if done.done():
                continue
            if jobs and (self.scorer.groupwise or count > room or not alike):
                left.append((request, done))
            else:
                jobs.append((request, done))
                room -= count
        self._waiting = left
        return jobs

    def _score(self, jobs: Sequence[Job]) -> list[Outcome]:
        try:
            return list(self._call(jobs))
        except RewardError as error:
            return [error] if len(jobs) == 1 else [self._score([job])[0] for job in jobs]

    def _call(self, jobs: Sequence[Job]) -> list[list[float | None]]:
        asked = [request for request, _ in jobs]
        prompts = [Prompt(*pair) for one in asked for pair in zip(one.prompts, one.metadata, strict=True)]
        try:
            images = torch.cat([one.images for one in asked])
            column = self.scorer.score(images, prompts, torch.zeros(len(images), dtype=torch.int64))[:, 0]
        except RewardError:
            raise
        except BaseException as error:  # its `applies`, say; and an exit that it asks for must not end this thread
            raise RewardError(in_one_line(error)) from error
        parts = column.split([len(one.prompts) for one in asked])
        return [[None if score != score else score for score in part.tolist()] for part in parts]
