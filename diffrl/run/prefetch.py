"""The prompts of the epochs to come, encoded together before they are needed, each of them by one process.

Text encoders are most of a model's bytes, and every visit of theirs costs seconds of an idle device. So they come once
for as many epochs as main memory has room for, mostly for the whole run. Which prompts these are is a function of seed
and epoch. With several processes, or more prompts than fit, rows are files in the run's folder until it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate import Accelerator

from diffrl.policy import Policy
from diffrl.policy import text_cache as texts_of_policy
from diffrl.prompts import MixedStream, PromptStream
from diffrl.records.disk import DiskError, inside

if TYPE_CHECKING:
    from diffrl.policy.textfiles import TextFiles

FOLDER = "texts"


class TextPrefetcher:
    """Encodes for `policy` the prompts of `stream` in `epochs` epochs, and `tests` before the first of them.

    run_dir: of the run, on a disk that its processes share. key: what files must agree in to be read, see `TextFiles`.
    """

    def __init__(
        self,
        policy: Policy,
        stream: PromptStream | MixedStream,
        tests: Sequence[str],
        epochs: int,
        accelerator: Accelerator,
        run_dir: Path,
        key: str,
    ) -> None:
        self.policy, self.stream, self.tests, self.epochs = policy, stream, tests, epochs
        self.accelerator, self.run_dir = accelerator, run_dir
        self._key = f"{policy.device.type} {key}"
        self._until: int | None = None  # the first epoch whose prompts are not encoded

    @cached_property
    def files(self) -> TextFiles:
        """The rows that main memory has no room for, or that other processes encode."""
        from diffrl.policy.textfiles import TextFiles

        return TextFiles(self.run_dir / FOLDER, self._key)

    def ensure(self, epoch: int, check: Callable[[], None] = lambda: None) -> None:
        """Encode what this epoch and as many more as possible need; all processes call it.

        `check`, which may raise, is called before each encoding.
        """
        if self._until is not None and epoch < self._until:
            return
        known = [] if self._until is not None else [self.policy.backbone.empty, *self.tests]
        row = self.policy.backbone.blank(1, self.policy.precision).nbytes
        prompts, self._until = self._stretch(epoch, known, max(texts_of_policy.CACHE_BYTES // 2 // row, 1))
        world, texts = self.accelerator.num_processes, self.policy.texts
        if world == 1 and self._until == self.epochs and texts.files is None:
            texts.learn(prompts, check)
            return
        if self.accelerator.is_main_process:
            self._evict(prompts, row)
        self.accelerator.wait_for_everyone()
        texts.files = self.files
        mine = prompts[self.accelerator.process_index :: world]
        texts.learn([prompt for prompt in mine if prompt not in self.files], check)
        self.accelerator.wait_for_everyone()
        if not all(prompt in self.files for prompt in prompts):
            texts.pin()  # the disk has no room: they are encoded as they come

    def _stretch(self, epoch: int, known: Sequence[str | None], most: int) -> tuple[list[str | None], int]:
        """Prompts of the epochs from this one on, after those `known`, at most so many of them (but one epoch's); and
        the first epoch of which not all are among them."""
        found: dict[str | None, None] = dict.fromkeys(known)
        every = {prompt.text for prompt in self.stream.prompts}
        for later in range(epoch, self.epochs):
            batch = self.stream.batch(later)
            added: dict[str | None, None] = dict.fromkeys(self.stream.prompts[index].text for index in batch)
            if later > epoch and len(found | added) > most:
                return list(found), later
            found |= added
            if every <= found.keys():
                break
        return list(found), self.epochs

    def _evict(self, prompts: Sequence[str | None], row: int) -> None:
        try:
            inside(self.run_dir, FOLDER)
        except DiskError:
            return
        self.files.evict(prompts, row)

    def end(self) -> None:
        """The run is complete: its files go."""
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process and (self.run_dir / FOLDER).is_dir():
            self.files.remove()
