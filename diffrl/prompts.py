"""Prompts: where they come from, and which of them an epoch uses.

A *source* is a set, a file or a data set of the hub, or a table {source: share} of several with the parts that they
have in every epoch.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from diffrl.errors import UserError, in_one_line, nearest, read_text
from diffrl.plugins import here, installed, load
from diffrl.resources import shipped
from diffrl.seeds import seed_of
from diffrl.worlds import World, world_of

FORMS = (
    "a set playground/SUBSET/SPLIT, a set NAME/SPLIT (`diffrl prompts list`), a .txt or .jsonl file, or "
    "hub:OWNER/NAME[:split[:column]]"
)

Source = str | Mapping[str, float]

log = logging.getLogger("diffrl")


@dataclass(frozen=True)
class Prompt:
    """A text, and what else its file says about it (handed to the rewards). `source`: of a stream, where it is from."""

    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    source: str = field(default="", compare=False)


def load_prompts(source: Source) -> list[Prompt]:
    """The prompts of a set or a file, in their order, each text once; of several in a table, mixed by their shares, so
    that every beginning of the list has about these shares, while all of them last.

    `playground/SUBSET/SPLIT`: a world's set. `NAME/SPLIT`, `hub:OWNER/NAME[:split[:column]]`: see `set_of`.
    `FILE.txt`: one prompt per line, without blank lines and lines that start with `#`. `FILE.jsonl`: one object per
    line, its "prompt" is the text and the rest the metadata. A file `assets/...` that does not exist here is looked for
    among the shipped ones.

    Raises UserError, with the file and the line where there is one, and for a prompt that is in two sources of a table.
    """
    if not isinstance(source, str):
        return _mixed(source)
    if (known := set_of(source)) is not None:
        return [one if isinstance(one, Prompt) else Prompt(one) for one in known.prompts(source)]
    prompts, repeats = _read(*_version(find_file(source)))
    if repeats:
        lines = ", ".join(str(number) for number in repeats[:3]) + ", ..." * (len(repeats) > 3)
        log.warning("%s: %d repeated (line %s); each prompt is used once", source, len(repeats), lines)
    return list(prompts)


def _mixed(sources: Mapping[str, float]) -> list[Prompt]:
    places: list[tuple[float, Prompt]] = []
    origin: dict[str, str] = {}
    for source, share in sources.items():
        for position, prompt in enumerate(load_prompts(source)):
            other = origin.setdefault(prompt.text, source)
            if other != source:
                both = f"{other} and in {source}; sources that are mixed may not share a prompt"
                raise UserError(f'"{prompt.text}" is in {both}')
            places.append(((position + 0.5) / share, prompt))
    return [prompt for _, prompt in sorted(places, key=lambda place: place[0])]  # stable: ties in the table's order


def split_groups(source: Source, groups: int) -> dict[str, int]:
    """How many of an epoch's `groups` prompts each set or file gives; UserError unless the shares divide them exactly.

    Shares are relative: {a: 1, b: 2} gives a third and two thirds.
    """
    if isinstance(source, str):
        return {source: groups}
    total = sum(source.values())
    counts = {name: groups * share / total for name, share in source.items()}
    for name, count in counts.items():
        if abs(count - round(count)) > 1e-6 * groups or round(count) < 1:
            text = f"its share gives {name} {count:g} of the {groups} prompts of an epoch (rollout.groups)"
            raise UserError(f"{text}: choose shares that give every source a whole number of them")
    return {name: round(count) for name, count in counts.items()}


def check_source(source: str) -> int | None:
    """Raise UserError unless `source` can be loaded. Returns a file's number of prompts; None for a set, which is not
    built, and for a data set of the hub, which is not read."""
    if (known := set_of(source)) is not None:
        known.split(source)
        return None
    return len(_read(*_version(find_file(source)))[0])


def set_of(source: str) -> Any:
    """Whose prompts these are: installed under the word before the first "/" or ":" (`diffrl.prompts`), or a world's.

    Either has `prompts(source)`, and `split(source)`, which raises UserError where it has none. None for a file's name.
    """
    word, mark = re.match("([^/:]*)(.?)", source).groups()  # type: ignore[union-attr]
    if word in installed("prompt set") and (mark == ":" or not source.endswith((".txt", ".jsonl"))):
        return load("prompt set", word)
    return world_of_set(source)


def world_of_set(source: str) -> World | None:
    """Whose prompt set this is; None for a file's name, and for what is no world's."""
    return None if Path(source).suffix else world_of(source)


def find_file(source: str) -> Path:
    """Path of a prompt file, shipped ones (`assets/...`) included; UserError if there is none, or of another kind."""
    path = Path(here(source))
    if not path.exists() and path.parts[:1] == ("assets",):
        path = shipped("assets", *path.parts[1:])
    if path.is_file() and path.suffix in (".txt", ".jsonl"):
        return path
    if path.exists() or not path.suffix:
        sets = [one for name in installed("prompt set") for one in getattr(load("prompt set", name), "sources", ())]
        raise UserError(f'prompts "{source}": expected {FORMS}{"" if path.exists() else nearest(source, sets)}')
    folder = path.parent
    if not folder.is_dir():
        raise UserError(f'prompts "{source}": no such file, and no folder "{folder}"')
    names = [file.name for file in folder.iterdir() if file.suffix in (".txt", ".jsonl")]
    raise UserError(f'prompts "{source}": no such file{nearest(path.name, names)}')


def _version(path: Path) -> tuple[Path, int, int]:
    stat = path.stat()
    return path, stat.st_mtime_ns, stat.st_size


@functools.lru_cache(maxsize=8)  # a config's check and its run read the same file: parse it once
def _read(path: Path, mtime_ns: int, size: int) -> tuple[tuple[Prompt, ...], list[int]]:
    """Distinct prompts, and the lines that repeat one."""
    prompts: dict[str, tuple[int, Prompt]] = {}
    repeats: list[int] = []
    for number, line in enumerate(map(str.strip, read_text(path).split("\n")), start=1):
        if not line or (path.suffix == ".txt" and line.startswith("#")):
            continue
        prompt = _parse_json(line, f"{path}:{number}") if path.suffix == ".jsonl" else Prompt(line)
        first, known = prompts.setdefault(prompt.text, (number, prompt))
        if known != prompt:
            text = f"the prompt of line {first} again, with other metadata; a prompt may occur once"
            raise UserError(f"{path}:{number}: {text}")
        if first != number:
            repeats.append(number)
    if not prompts:
        raise UserError(f"{path}: no prompts in this file")
    return tuple(prompt for _, prompt in prompts.values()), repeats


def _parse_json(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise UserError(f"{where}: not valid JSON ({in_one_line(error, most=80)})") from error
    if not isinstance(entry, dict):
        raise UserError(f'{where}: expected an object like {{"prompt": "a red circle"}}')
    return prompt_of(entry, where)


def prompt_of(entry: dict[str, Any], where: str) -> Prompt:
    """The prompt of a line's values, of which it takes "prompt"; UserError, beginning with `where`, for none."""
    text = entry.pop("prompt", None)
    if not isinstance(text, str) or not text.strip():
        hint = nearest("prompt", entry) if text is None and entry else ""
        raise UserError(f'{where}: expected text under "prompt"{hint}')
    check_text([text, entry], where)
    return Prompt(text.strip(), entry)


def check_text(value: Any, where: str) -> None:
    """UserError, beginning with `where`, for a value of JSON with a text that cannot be written."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = repr(error.object[error.start])
        raise UserError(f"{where}: half of a surrogate pair, which is not text ({half})") from error


class PromptStream:
    """Which prompts an epoch uses: seeded permutations of all P prompts, one after another, cut in pieces of `groups`.

    So every prompt comes once before any comes again, and a batch is a pure function of (seed, epoch): a resumed run
    has no position to restore.

    A batch that spans two permutations may not repeat a prompt: those first entries of the later permutation that the
    batch already has change places with the next entries that it has not. If P >= 2 groups, these places never reach
    the permutation's end, so that only its raw predecessor matters; with fewer prompts the swaps depend on one another
    back to the last permutation that began with a batch, fewer than `groups` before.
    """

    def __init__(self, prompts: Sequence[Prompt], groups: int, seed: int) -> None:
        """`groups`: prompts per epoch, at least 1 and at most P (else UserError)."""
        if groups > len(prompts):
            raise UserError(
                f"rollout.groups: {groups} different prompts an epoch, but there are only {len(prompts)} prompts: set "
                f"rollout.groups to {len(prompts)} or less, and optimise.batch_size to divide groups x group_size"
            )
        if groups < 1:
            raise UserError(f"rollout.groups: expected at least 1, got {groups}")
        self.prompts, self.groups, self.seed = prompts, groups, seed
        self.size = len(prompts)

    def batch(self, epoch: int) -> list[int]:
        """Indices (each in [0, P), all different) of the `groups` prompts of this epoch (from 0)."""
        number, first = divmod(epoch * self.groups, self.size)
        permutation = self._permutation(number)
        indices = permutation[first : first + self.groups]
        if len(indices) < self.groups:
            following = self._resolved(number + 1, permutation)
            indices = np.concatenate([indices, following[: self.groups - len(indices)]])
        return [int(index) for index in indices]

    def _permutation(self, number: int) -> np.ndarray:
        period = self.groups // math.gcd(self.groups, self.size)  # every period-th permutation begins with a batch
        start = number - number % period
        if self.size >= 2 * self.groups:
            start = max(start, number - 1)
        permutation = self._raw(start)
        for later in range(start + 1, number + 1):
            permutation = self._resolved(later, permutation)
        return permutation

    def _raw(self, number: int) -> np.ndarray:
        """The permutation before swaps; from raw bits, whose stream numpy keeps the same in all versions."""
        bits = np.random.PCG64(seed_of(self.seed, "prompts", number)).random_raw(self.size)
        return np.argsort(bits, kind="stable")

    def _resolved(self, number: int, previous: np.ndarray) -> np.ndarray:
        permutation = self._raw(number)
        head = -number * self.size % self.groups  # its first entries that complete the batch begun by `previous`
        if head:
            taken = np.isin(permutation, previous[head - self.groups :])
            clash = np.flatnonzero(taken[:head])
            free = head + np.flatnonzero(~taken[head:])[: len(clash)]
            permutation[clash], permutation[free] = permutation[free], permutation[clash]
        return permutation


class MixedStream:
    """Several streams side by side: in every epoch each source gives its share of the prompts, exactly.

    A source's prompts stand together in a batch. So an optimiser step gets a part of each one of them (see
    `optimiser_steps`), and every batch carries every reward.
    """

    def __init__(self, streams: Sequence[PromptStream | MixedStream]) -> None:
        self.prompts: list[Prompt] = []
        self._streams: list[tuple[int, PromptStream | MixedStream]] = []  # with the place of its first prompt
        for stream in streams:
            self._streams.append((len(self.prompts), stream))
            self.prompts += stream.prompts

    def batch(self, epoch: int) -> list[int]:
        """Indices of the prompts of this epoch (from 0) in `prompts`, a pure function of seed and epoch."""
        return [first + index for first, stream in self._streams for index in stream.batch(epoch)]


def _of(source: str) -> list[Prompt]:
    """A source's prompts, which say that they are its."""
    return [replace(prompt, source=source) for prompt in load_prompts(source)]


def stream_of(source: Source, groups: int, seed: int) -> PromptStream | MixedStream:
    """The stream of a set, a file, or a table of several, with `groups` prompts of an epoch.

    Raises UserError for shares that do not divide `groups`, and for a source that gives more than it has.
    """
    if isinstance(source, str):
        return PromptStream(_of(source), groups, seed)
    streams: list[PromptStream | MixedStream] = []
    for name, count in split_groups(source, groups).items():
        prompts = _of(name)
        if count > len(prompts):
            text = f"rollout.groups takes {count} different prompts an epoch from {name}, which has {len(prompts)}"
            raise UserError(text)
        streams.append(PromptStream(prompts, count, seed_of(seed, "source", name)))
    return MixedStream(streams)
