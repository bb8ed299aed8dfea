"""What a sweep runs: each config, in each variation, with each seed; and how far each of these runs is.

OUT/NAME/config.yaml      a config in one variation, every value: what its runs are started with
OUT/NAME/seed-S/          the folder of a run, OUT/NAME/seed-S.log its output
OUT/sweep.json            the command, and what every run came to
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffrl.config import Config, dump, find_config, load_config
from diffrl.errors import UserError
from diffrl.records import checkpoint
from diffrl.records.changes import Change, show
from diffrl.records.identity import flat
from diffrl.records.tracking import read_metrics
from diffrl.run.start import holds_a_run
from diffrl.sweep.jobs import Job

ITS_OWN = ("seed", "run_dir")  # keys of a run that the sweep sets
Variation = tuple[str, ...]  # texts `section.key=value`


@dataclass(frozen=True)
class Member:
    """One run: a config in one variation, with one seed."""

    name: str  # of config and variation: the group of runs that differ by their seed only
    config: Config
    seed: int
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def job(self) -> Job:
        """The `diffrl train` that begins it, or goes on with it."""
        source = str(self.folder.with_name("config.yaml"))
        words = [source, f"seed={self.seed}", f"run_dir={self.folder}", "--resume", "auto"]
        command = [sys.executable, "-m", "diffrl", "train", *words]
        return Job(f"{self.name}, seed {self.seed}", command, self.log, self.folder)

    @property
    def finished(self) -> bool:
        """Has it trained all its epochs, or been stopped by its guard, with everything written?"""
        rows, code = read_metrics(self.folder), self.folder / "exit_code"
        # The last that a run writes: killed before, it is started again and only writes what is missing.
        if not rows or not code.is_file() or code.read_text() != "0\n":
            return False
        stopped = self.config.guard.stop and any(key.startswith("alarm/") for key in rows[-1])
        if not stopped and rows[-1]["epoch"] < self.config.epochs:
            return False
        saved = checkpoint.latest(self.folder)
        return saved is not None and checkpoint.epoch_of(saved) >= rows[-1]["epoch"]


def plan(
    configs: Sequence[str], overrides: Sequence[str], axes: Mapping[str, Sequence[str]], seeds: int, out: Path
) -> list[Member]:
    """The runs, group by group, seeds innermost.

    Args:
        configs: files, or names of shipped configs.
        overrides: texts `section.key=value`, for all.
        axes: {key: its values}; every combination is a variation.
        seeds: 0 to `seeds` - 1.
        out: the folder of them all.

    Raises:
        UserError: a config that is none, or that an override or variation breaks; names that are taken twice.
    """
    for key in [*axes, *(text.partition("=")[0] for text in overrides)]:
        if key in ITS_OWN:
            raise UserError(f"{key}: a sweep sets it itself: {'--seeds N' if key == 'seed' else '--out FOLDER'}")
    if holds_a_run(out):
        raise UserError(f"--out: {out} holds a run; name a folder of the sweep's own, such as runs/NAME")
    groups: dict[str, Config] = {}
    for config, name in zip(configs, _names(configs), strict=True):
        for label, variation in _variations(axes):
            group = f"{name}{label}"
            if group in groups:
                raise UserError(f'sweep: two variations would have one name, "{group}"; write their values apart')
            groups[group] = load_config(config, [*overrides, *variation])
    return [
        Member(name, config, seed, out / name / f"seed-{seed}")
        for name, config in groups.items()
        for seed in range(seeds)
    ]


def settle(members: Sequence[Member]) -> list[str]:
    """Write each group's config, from which its runs are started; a line for each that got more epochs.

    Raises:
        UserError: one of them has runs of another config. Then nothing is written.
    """
    groups = {member.name: member for member in members}
    lines = [line for member in groups.values() for line in _changed(member)]
    for member in groups.values():
        dump(member.config, member.folder.with_name("config.yaml"))
    return lines


def _changed(member: Member) -> Iterator[str]:
    """A line for a group that goes on with more epochs; UserError for one that has runs of another config."""
    home = member.folder.parent
    source = home / "config.yaml"
    if not source.is_file() or not any(holds_a_run(folder) for folder in home.glob("seed-*/")):
        return
    then, now = (flat(plain(config)) for config in (load_config(source), member.config))
    for key in dict.fromkeys([*then, *now]):
        change = Change(key, then.get(key), now.get(key))
        if change.then == change.now:
            continue
        if key == "epochs" and now[key] > then[key]:
            yield f"{member.name}: {then[key]} epochs before, {now[key]} now: its runs go on"
            continue
        raise UserError(
            f"sweep: {home} has runs with {key} {show(change, then)}, and it is {show(change, now)} now; "
            f"choose another --out, or delete that folder to train it anew"
        )


def plain(config: Config) -> dict[str, Any]:
    """A config's values without those in which its runs differ."""
    return {key: value for key, value in config.resolved().items() if key not in ITS_OWN}


def _names(configs: Sequence[str]) -> list[str]:
    """Of each config, from its file; with the folder's where two files have one name. UserError for one given twice."""
    files = [find_config(config).resolve() for config in configs]
    for i, file in enumerate(files):
        if file in files[:i]:
            raise UserError(f'sweep: the config "{configs[i]}" is given twice')
    stems = [file.stem for file in files]
    return [file.stem if stems.count(file.stem) == 1 else f"{file.parent.name}-{file.stem}" for file in files]


def _variations(axes: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, Variation]]:
    """(what it adds to a group's name, its overrides) of every combination of the axes' values."""
    last = [key.rpartition(".")[2] for key in axes]
    short = [word if last.count(word) == 1 else key for key, word in zip(axes, last, strict=True)]
    for values in itertools.product(*axes.values()):
        label = "".join(f"-{key}={value}" for key, value in zip(short, values, strict=True))
        overrides = tuple(f"{key}={value}" for key, value in zip(axes, values, strict=True))
        yield re.sub(r"[^\w.=+-]+", "_", label)[:120], overrides


def read_axis(text: str) -> tuple[str, list[str]]:
    """(key, values) of `section.key=a,b`; commas inside of brackets and quotes part nothing.

    Raises:
        UserError: not of this form, or a value twice.
    """
    key, equals, rest = (part.strip() for part in text.partition("="))
    values = [value.strip() for value in _parted(rest)]
    if not key or not equals or not all(values):
        raise UserError(f'--vary: "{text[:80]}": write section.key=a,b, for example nft.beta=0.1,1.0')
    if twice := [value for i, value in enumerate(values) if value in values[:i]]:
        raise UserError(f'--vary: "{text[:80]}": {twice[0]} stands there twice')
    return key, values


def _parted(text: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if letter == "," and not depth and not quote:
            parts.append("")
            continue
        if quote or letter in "\"'":
            quote = "" if letter == quote else quote or letter
        else:
            depth += (letter in "[{(") - (letter in ")}]")
        parts[-1] += letter
    return parts
