"""What the text encoders say about prompts, each of them encoded once; the encoders visit the device for it.

Encoders are 2 to 27 GB that work for a second. So they live in main memory, often as the pages of their files, and what
goes to the device is a copy that is dropped afterwards: nothing is carried back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from diffrl.policy.conditioning import Conditioning

if TYPE_CHECKING:
    from diffrl.policy.textfiles import TextFiles

log = logging.getLogger("diffrl")
# Encoded prompts kept on the CPU, in bytes. With a T5 one prompt takes 2.7 MB, so tens of thousands need a limit.
CACHE_BYTES = 4 << 30


class Texts:
    """Rows of encoded prompts on the CPU, by prompt, the oldest first; `backbone` encodes those that are missing.

    `room`: entered while the encoders are on the device, to make room there. `files`: where rows are kept beyond main
    memory, and for other processes; None: nowhere. `visits`: how often the encoders went to the device.
    """

    def __init__(self, backbone: Any, device: torch.device) -> None:
        self.backbone, self.device = backbone, device
        self.room: Callable[[], AbstractContextManager[None]] = nullcontext
        self.files: TextFiles | None = None
        self.visits = 0
        self._rows: dict[str | None, Conditioning] = {}  # one row each, on the CPU

    def __call__(self, prompts: Sequence[str]) -> list[Conditioning]:
        """One row for each of the prompts."""
        self.learn([self.backbone.empty, *prompts])
        found = [self._rows[prompt] for prompt in prompts]
        self._forget_oldest()
        return found

    def empty(self) -> Conditioning:
        """The row that guidance contrasts with."""
        self.learn([self.backbone.empty])
        return self._rows[self.backbone.empty]

    @torch.no_grad()
    def learn(self, prompts: Iterable[str | None], check: Callable[[], None] = lambda: None) -> None:
        """Have the rows of all of them in main memory; `check`, which may raise, is called before each encoding."""
        missing = []
        for prompt in dict.fromkeys(prompts):
            found = None if prompt in self._rows or self.files is None else self.files.read(prompt)
            if found is not None:
                self._rows[prompt] = found
            elif prompt not in self._rows:
                missing.append(prompt)
        if not missing:
            return
        with self.room(), visiting(self.backbone.text_encoders, self.device), quiet():
            self.visits += 1
            for prompt in missing:
                check()
                self._say_cut(prompt)
                self._rows[prompt] = self.backbone.encode(prompt, self.device).to("cpu")
                if self.files is not None:
                    self.files.write(prompt, self._rows[prompt])

    @property
    def bytes(self) -> int:
        """Of the encoders' weights."""
        return sum(p.nbytes for encoder in self.backbone.text_encoders for p in encoder.parameters())

    def _say_cut(self, prompt: str | None) -> None:
        """Once for each prompt of which the text encoders read a part only."""
        reader = self.backbone.reader()
        if reader is None or not prompt:
            return
        tokenizer, most = reader
        tokens = len(tokenizer(prompt).input_ids)
        if tokens > most:
            start = " ".join(prompt.split())[:60]
            log.warning('prompt "%s ...": %d tokens, of which the model reads %d: the rest is cut', start, tokens, most)

    def pin(self) -> None:
        """Hold the encoders where the device reads them fastest, if there is such memory for them: they travel again
        and again."""
        if self.device.type == "cuda":
            from diffrl.policy.exchange import exchange

            try:
                exchange(self.backbone.text_encoders, lambda tensor: tensor.pin_memory())
            except RuntimeError:  # so much of it cannot be locked here
                return

    def forget(self) -> None:
        """All that main memory has."""
        self._rows.clear()

    def _forget_oldest(self) -> None:
        total = sum(row.nbytes for row in self._rows.values())
        for prompt in [prompt for prompt in self._rows if prompt != self.backbone.empty]:
            if total <= CACHE_BYTES:
                break
            total -= self._rows.pop(prompt).nbytes


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' and diffusers' warnings, which repeat a long prompt as a whole at each encoding of it."""
    loggers = [logging.getLogger(name) for name in ("transformers", "diffusers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def visiting(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Inside, copies of their weights on the device take the place of those in main memory, which stay there."""
    if device.type == "cpu":
        yield
        return
    from diffrl.policy.exchange import exchange

    homes: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        exchange(modules, lambda tensor: tensor.to(device, non_blocking=True), homes)
        yield
    finally:
        for table, name, tensor in homes:
            table[name] = tensor
