"""One reward behind a queue: what several clients ask for at the same time is scored in one batch."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from diffrl.errors import in_one_line
from diffrl.prompts import Prompt
from diffrl.rewards.protocol import Reward, RewardError, ability
from diffrl.rewards.scoring import Scorer
from diffrl.serving.wire import Request

Outcome = list[float | None] | RewardError  # null where the reward does not apply


@dataclass
class Job:
    """A request that waits for its scores."""

    request: Request
    done: asyncio.Future[list[float | None]]


class Batcher:
    """Scores jobs in the order in which they came, several in one call where their images have one size.

    A group-wise reward gets every request alone: a request is a group. If a common batch fails, each job is tried
    alone, so that one client's bad input is no other's failure. `most`: images of a common batch (the reward's
    `batch_size` if it has one). `wait`: seconds that a batch with room in it waits for company.
    """

    def __init__(self, name: str, reward: Reward, worker: ThreadPoolExecutor, most: int, wait: float) -> None:
        self.scorer = Scorer({name: reward})
        self.most = ability(reward, "batch_size") or most
        self.wait = wait
        self.calls = 0  # of the reward, for whoever wants to know how well batching works
        self.busy_since: float | None = None
        self._worker = worker
        self._waiting: deque[Job] = deque()
        self._news = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Images that are not scored yet, those of the running call left out."""
        return sum(len(job.request.prompts) for job in self._waiting)

    def put(self, request: Request) -> asyncio.Future[list[float | None]]:
        """A future of the request's scores; its exception is the `RewardError`. Cancel it to give up."""
        job = Job(request, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._news.set()
        return job.done

    async def run(self) -> None:
        """Works until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._news.wait()
            if self.wait and not self.scorer.groupwise and self.waiting < self.most:
                await asyncio.sleep(self.wait)
            self._news.clear()
            while jobs := self._take():
                self.busy_since = time.monotonic()
                try:
                    outcomes = await loop.run_in_executor(self._worker, self._score, jobs)
                finally:
                    self.busy_since = None
                for job, outcome in zip(jobs, outcomes, strict=True):
                    if job.done.done():  # given up meanwhile
                        continue
                    if isinstance(outcome, RewardError):
                        job.done.set_exception(outcome)
                    else:
                        job.done.set_result(outcome)

    def _take(self) -> list[Job]:
        """The jobs of the next call: the oldest one and, up to `most` images, others of its images' size."""
        jobs: list[Job] = []
        images, left = 0, deque[Job]()
        while self._waiting:
            job = self._waiting.popleft()
            if job.done.done():
                continue
            count, size = len(job.request.prompts), job.request.images.shape[1:]
            fits = not jobs or (images + count <= self.most and size == jobs[0].request.images.shape[1:])
            if not fits or (jobs and self.scorer.groupwise):
                left.append(job)
                continue
            jobs.append(job)
            images += count
        self._waiting = left
        return jobs

    def _score(self, jobs: Sequence[Job]) -> list[Outcome]:
        try:
            return list(self._call(jobs))
        except RewardError as error:
            return [error] if len(jobs) == 1 else [self._score([job])[0] for job in jobs]

    def _call(self, jobs: Sequence[Job]) -> list[list[float | None]]:
        self.calls += 1
        prompts = [
            Prompt(text, data)
            for job in jobs
            for text, data in zip(job.request.prompts, job.request.metadata, strict=True)
        ]
        try:
            images = torch.cat([job.request.images for job in jobs])
            column = self.scorer.score(images, prompts, torch.zeros(len(images), dtype=torch.int64))[:, 0]
        except RewardError:
            raise
        except BaseException as error:  # its `applies`, say; and an exit that it asks for must not end this thread
            raise RewardError(in_one_line(error)) from error
        parts = column.split([len(job.request.prompts) for job in jobs])
        return [[None if score != score else score for score in part.tolist()] for part in parts]
