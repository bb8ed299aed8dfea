"""Scores images with several rewards: batching, "not applicable", retries, time-outs, and failure that stops the run.

Shapes: B images, K rewards, H x W pixels. A score is a finite number, or NaN where the reward does not apply: a
failure is never a number.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor

from diffrl.errors import in_one_line
from diffrl.rewards.answers import checked, judged, subject
from diffrl.rewards.kinds import Asked, Everyone, Phase, kind_of
from diffrl.rewards.protocol import Reward, RewardError, Unscored, ability, find_offloaded
from diffrl.rewards.timeouts import TooLong, call

if TYPE_CHECKING:
    from diffrl.process_state import Noted
    from diffrl.prompts import Prompt
    from diffrl.rewards.beside import Beside

log = logging.getLogger("diffrl")


class Scorer:
    """Scores images with `rewards`, whose order is the order of the columns (`names`).

    `retries`: further attempts after an exception of a reward, the first after `backoff` seconds and each of the next
    after twice the wait before; wrong answers and time-outs are not tried again. `timeout`: seconds that one call may
    last (None: no limit). `overlap`: `submit` works in a thread, which pays only where a device, not these CPU cores,
    does the work meanwhile; for rewards of other machines it always does (`diffrl.rewards.beside`). `unscored`: the
    share of images that each may leave without a score. `plugins`: what `diffrl rewards check` knows the rewards by,
    where that is not their name, for messages.

    Rewards get copies, so that one that writes into its images harms no other, until the first `finish`; those that did
    not write get the images themselves from then on. They are called in a thread that can be left behind: `check` is
    asked meanwhile and may raise.
    """

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        *,
        retries: int | Mapping[str, int] = 0,
        timeout: float | Mapping[str, float | None] | None = None,
        backoff: float = 1.0,
        overlap: bool = False,
        plugins: Mapping[str, str] | None = None,
        unscored: Mapping[str, float] | None = None,
    ) -> None:
        from diffrl.rewards.unscored import Tally

        self.rewards = dict(rewards)
        self.names = list(self.rewards)
        self.asked = {n: one if isinstance(one, Asked) else kind_of(one)(one) for n, one in rewards.items()}
        self.retries = dict(retries) if isinstance(retries, Mapping) else dict.fromkeys(self.names, retries)
        self.timeout = dict(timeout) if isinstance(timeout, Mapping) else dict.fromkeys(self.names, timeout)
        self.backoff = backoff
        self.plugins, self.unscored = plugins or {}, Tally(self.names, unscored)
        self.check: Callable[[], object] = lambda: None
        self.growth, self._size = dict.fromkeys(self.names, 0), _memory()
        self._warned: set[tuple[str, str]] = set()  # rewards, and what they were warned of
        self._writes: dict[str, bool] = {}  # whether a reward has written into its images
        self._trusted: set[str] = set()
        self._noted: Noted | None = None  # the process's state before the calls of a phase, which other threads make
        self._offloaded = {name: one for name, reward in rewards.items() if (one := find_offloaded(reward)) is not None}
        self._apart = [name for name, one in self._offloaded.items() if one.apart]
        self._making_room = 0.0  # seconds
        self._remote = [name for name, reward in self.rewards.items() if ability(reward, "remote")]
        queued = [n for n in self.names if overlap and n not in {*self.later, *self._remote}]
        self._here = [n for n in self.names if n not in {*queued, *self._remote, *self._apart}]
        self._beside: Beside | None = None
        if queued or self._remote:
            from diffrl.rewards.beside import Beside

            sources: dict[int, list[str]] = {}
            for name in self._remote:
                if self.asked[name].when == "drawn":  # a batch alone says nothing to others
                    sources.setdefault(id(self.asked[name].source), []).append(name)
            self._beside = Beside(queued, list(sources.values()), self._each, _same_device())

    @property
    def groupwise(self) -> list[str]:
        """Names of the rewards that have to see whole groups."""
        return [name for name, asked in self.asked.items() if asked.whole]

    @property
    def asking(self) -> list[str]:
        """Names of the rewards that people answer: the run asks them, and here their scores are NaN."""
        return [name for name, asked in self.asked.items() if asked.when == "never"]

    @property
    def later(self) -> list[str]:
        """Rewards scored in `finish()`: those that compare images, or that the network makes room for."""
        return [name for name in self.names if self.asked[name].when == "finished" or name in self._apart]

    @property
    def collective(self) -> list[str]:
        """Names of the rewards for which all processes come to `finish`, with images or without."""
        return [name for name, asked in self.asked.items() if asked.collective]

    @property
    def observing(self) -> list[str]:
        """Names of the rewards that `submit` shows the images that it is given with `keys`."""
        return [name for name, asked in self.asked.items() if asked.observes]

    @property
    def writing(self) -> list[str]:
        """Names of the rewards that have written into the images that they were given."""
        return [name for name, writes in self._writes.items() if writes]

    @property
    def figures(self) -> dict[str, float]:
        """What the rewards say of the last phase as a whole, by their names."""
        return {name: asked.figure for name, asked in self.asked.items() if asked.figure is not None}

    def score(self, images: Tensor, prompts: Sequence[Prompt], groups: Tensor | None = None) -> Tensor:
        """Scores (B, K), float32 on the CPU, of `images` (B, 3, H, W) in [0, 1].

        `groups`: (B,) group ids, int64, needed by group-wise rewards (`ValueError` otherwise), whose groups must be
        whole. To batch-wise ones these images are the batch. Raises `RewardError` if a reward raises, takes too long,
        or returns what is not a finite number per image.
        """
        if groups is None and self.groupwise:
            raise ValueError(f'reward "{self.groupwise[0]}" is group-wise: score() needs the group ids of the images')
        self._note()
        try:
            own = self._begin([*self._here, *self._apart], images, prompts).result()
            return self._finished(self.names, own, images, prompts, groups)
        finally:
            self._put_back()

    def take_kept(self) -> dict[str, Tensor]:
        """What rewards keep of images beside their scores, (N, ...) by name, since this was last asked."""
        kept = {name: asked.take() for name, asked in self.asked.items()}
        return {name: tensor for name, tensor in kept.items() if tensor is not None}

    def submit(self, images: Tensor, prompts: Sequence[Prompt], keys: Sequence[int] | None = None) -> Any:
        """Starts to score a batch: `.result()` is (B, K), NaN for the rewards of `later` until `finish` fills them.

        `keys`: the images' own numbers (B), where rewards are to observe them (`Asked.observe`).
        What `overlap` leaves out is done at once, and its `RewardError` is raised here instead of by `.result()`.
        """
        self._note()
        return self._begin(self._here, images, prompts, keys)

    def _begin(self, names: Sequence[str], images: Tensor, prompts: Sequence[Prompt], keys: Any = None) -> Any:
        waiting = self._beside and self._beside.put(images, prompts, keys)
        here: Future[Tensor] = Future()
        here.set_result(self._each(images, prompts, names, keys))
        return waiting.join(here) if waiting else here

    def finish(
        self,
        scores: Tensor,
        images: Sequence[Tensor],
        prompts: Sequence[Prompt],
        groups: Tensor,
        room: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        everyone: Everyone = None,
    ) -> Tensor:
        """Ends a phase: `scores` (B, K) with the columns of `later` filled, and no offloaded reward on its device.

        `images`: parts (b, 3, H, W) of all B, needed where there is a reward for `later`; `groups` (B,) int64: images
        of one group need not be neighbours. `room`: entered while those score that stand apart, one after another.
        `everyone`: of several processes, `diffrl.rewards.kinds.Everyone`; all of them come to it.
        """
        apart = self._apart
        self._trusted = {name for name, writes in self._writes.items() if not writes}
        if self.later:
            whole = torch.cat(list(images)) if len(images) else torch.zeros(0, 3, 1, 1)
            beside = [name for name in self.later if name not in apart]
            scores = self._finished(beside, scores, whole, prompts, groups, everyone)
        self.leave()
        if not apart:
            self._put_back()
            return scores
        mark = time.perf_counter()
        with room():
            self._making_room += time.perf_counter() - mark
            for one in dict.fromkeys(self._offloaded[name] for name in apart):
                names = [name for name in apart if self._offloaded[name] is one]
                own = self._each(whole, prompts, names)
                scores = self._finished(names, scores.where(own.isnan(), own), whole, prompts, groups)
                self.leave()
            mark = time.perf_counter()
        self._making_room += time.perf_counter() - mark
        self._put_back()
        return scores

    def _finished(
        self,
        names: Sequence[str],
        scores: Tensor,
        images: Tensor,
        prompts: Sequence[Prompt],
        groups: Tensor | None,
        everyone: Everyone = None,
    ) -> Tensor:
        """`scores` (N, K) with the columns of those of `names` filled that are asked of a phase's images."""
        scores = scores.clone()
        for name in names:
            if (asked := self.asked[name]).when == "finished":
                each, calls = partial(self._fill, name, images, prompts), partial(self._calls, name, images, prompts)
                phase = Phase(name, images, prompts, groups, everyone, each, calls, partial(self._guarded, name))
                scores[:, self.names.index(name)] = asked.finish(phase)
        return scores

    def _calls(
        self, name: str, images: Tensor, prompts: Sequence[Prompt], parts: Sequence[Sequence[int]]
    ) -> Iterable[Tensor]:
        """The answers to parts of the images, one call each; other machines are asked side by side."""
        calls = [partial(self._call, name, images[rows], [prompts[i] for i in rows]) for rows in parts]
        return self._beside.together(calls) if self._beside and name in self._remote else (call() for call in calls)

    def leave(self) -> None:
        """Offloaded rewards leave their device; called when scoring has ended."""
        for one in self._offloaded.values():
            one.leave()

    def take_copying(self) -> float | None:
        """Seconds of copying weights, for offloaded rewards, since this was last asked; None: there are none."""
        if not self._offloaded:
            return None
        total, self._making_room = self._making_room, 0.0
        for one in dict.fromkeys(self._offloaded.values()):
            total, one.seconds = total + one.seconds, 0.0
        return total

    def take_growth(self) -> dict[str, int]:
        """Bytes by which the process grew in each reward's calls since this was last asked, as far as it kept them:
        what a call takes and gives back after it is no growth."""
        growth, self.growth = self.growth, dict.fromkeys(self.names, 0)
        before, self._size = self._size, _memory()
        return {name: min(size, max(self._size - before, 0)) for name, size in growth.items()}

    def close(self) -> None:
        """Ends the threads, if there are some. Batches that wait are dropped."""
        if self._beside is not None:
            self._beside.close()

    def _each(
        self, images: Tensor, prompts: Sequence[Prompt], names: Sequence[str], keys: Sequence[int] | None = None
    ) -> Tensor:
        """(B, K): those of the rewards `names` that judge images one by one, in batches of their own size; else NaN."""
        if len(images) != len(prompts):
            raise ValueError(f"{len(images)} images but {len(prompts)} prompts")
        images = images.detach()
        scores = torch.full((len(images), len(self.names)), torch.nan)
        answers: dict[int, Tensor] = {}
        for k, (name, asked) in enumerate(self.asked.items()):
            if name in names and asked.when == "drawn":
                source = id(asked.source)
                if source not in answers:
                    answers[source] = self._fill(name, images, prompts, keys)
                scores[:, k] = asked.scores(answers[source])
        return scores

    def _fill(self, name: str, images: Tensor, prompts: Sequence[Prompt], keys: Sequence[int] | None = None) -> Tensor:
        """The reward's answers (B,) or (B, W), NaN for those of the images to which it does not apply."""
        asked = self.asked[name]
        out = torch.full((len(images),) if asked.width is None else (len(images), asked.width), torch.nan)
        rows = judged(asked.reward, prompts)
        size = ability(asked.reward, "batch_size") or max(len(rows), 1)
        for start in range(0, len(rows), size):
            batch = rows[start : start + size]
            # Indexing copies; whole batches, the usual case, are handed over as they are.
            part, owners = images if len(batch) == len(images) else images[batch], [prompts[i] for i in batch]
            out[batch] = self._call(name, part, owners)
            if keys is not None and asked.observes:
                context = [p.text for p in owners], [dict(p.metadata) for p in owners], [keys[i] for i in batch]
                with self._guarded(name):
                    asked.observe(part.clone(), *context)
        return out

    def _call(self, name: str, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """One call of one reward with retries and time-out: (b,) float32 on the CPU, or (b, W), NaN where there is no
        score, or `RewardError`."""
        asked = self.asked[name]
        width = asked.width
        images = _placed(name, asked.reward, images)
        texts = [p.text for p in prompts]
        on = subject(name, texts)

        def attempt() -> object:
            given = images if name in self._trusted else images.clone()
            with torch.no_grad(), self._guarded(name):  # here: the mode belongs to the thread
                scores = asked.ask(given, list(texts), [copy.deepcopy(dict(p.metadata)) for p in prompts])
            if given is not images:
                self._look_for_writes(name, given, images)
            return scores

        retries, limit = self.retries[name], self.timeout[name]
        for trial in range(retries + 1):
            before = _memory()
            try:
                answer = call(attempt, limit, self.check, _same_device())
            except TooLong as error:
                todo = f"raise the time limit (rewards.{name}.timeout) or lower the reward's batch_size"
                raise RewardError(f"{on} took longer than {limit:g} s; {todo}") from error
            try:
                scores = checked(answer.result(), name, texts, self.plugins.get(name), width)
                self.growth[name] += _memory() - before
                self.unscored.count(name, scores)
                return scores
            except Unscored as error:
                if len(texts) > 1 and not asked.whole:
                    return torch.cat([self._call(name, images[[i]], [one]) for i, one in enumerate(prompts)])
                scores = torch.full((len(texts),) if width is None else (len(texts), width), torch.nan)
                self.unscored.count(name, scores, str(error))
                return scores
            except BaseException as error:  # also what asks for an exit: it ended the call's thread, not the run
                by_person = isinstance(error, KeyboardInterrupt) and error is not answer.exception()
                if isinstance(error, RewardError) or by_person:
                    raise
                failure: BaseException = error
            if trial < retries:
                time.sleep(self.backoff * 2**trial)
        tried = f"{on} failed{f' {retries + 1} times' * bool(retries)} with {in_one_line(failure)}"
        alone = f'try it alone with "diffrl rewards check {self.plugins.get(name, name)}"'
        raise RewardError(f"{tried}; {alone}, or allow retries if the failure passes") from failure

    def _guarded(self, name: str) -> AbstractContextManager[None]:
        """Around a call of the reward: what it changes of this thread and process is put back, and said."""
        from diffrl.process_state import unchanged

        return unchanged(partial(self._tell, name))

    def _note(self) -> None:
        """Until `_put_back`, rewards are called in threads of their own, which guard what is a thread's alone."""
        from diffrl.process_state import Noted

        self._noted = self._noted or Noted(elsewhere=True)

    def _put_back(self) -> None:
        noted, self._noted = self._noted, None
        if noted is not None:
            noted.put_back(partial(self._tell, ", ".join(self.names)))

    def _look_for_writes(self, name: str, given: Tensor, images: Tensor) -> None:
        """Say so if a reward has written into its images."""
        writes = not (torch.equal(given, images) or torch.equal(given.nan_to_num(), images.nan_to_num()))
        self._writes[name] = self._writes.get(name, False) or writes
        if writes:
            self._tell(name, "writes into the images that it is given; it had a copy, so nothing else saw it")

    def _tell(self, name: str, what: str) -> None:
        """Say it of a reward once: its authors share it with others elsewhere."""
        if (name, what) not in self._warned:
            self._warned.add((name, what))
            log.warning('reward "%s" %s', name, what)


def _memory() -> int:
    return int(psutil.Process().memory_info().rss)


def _placed(name: str, reward: Reward, images: Tensor) -> Tensor:
    """The images where the reward wants them."""
    device = ability(reward, "device")
    try:
        return images if device is None else images.to(device=device)
    except Exception as error:
        raise RewardError(f'reward "{name}": its device, {device!r}, cannot be used: {in_one_line(error)}') from error


def _same_device() -> Callable[[], None]:
    """What a thread calls first: a new thread's current CUDA device is 0, whatever this process's is."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return lambda: None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)
