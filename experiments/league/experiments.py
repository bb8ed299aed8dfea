"""An experiment: a config, trained with a few seeds and judged once; what it asks for, and what of it has been run.

A result has the config and the number of its judgement's prompts; a seed is run again when one of them has changed. No
change of the code, nor of a run that it builds on, outdates a result: each seed has its commit, and whoever wants it
again removes the file. `RUN(NAME)` in an override is the folder of the same seed's run of another experiment, which
goes first; `SET(NAME)` is an image set that is drawn before; `HERE` is the folder of an entry that is somebody else's.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diffrl.config import load_config
from diffrl.config.schema import Config, config_class
from diffrl.errors import UserError, nearest

RUN = re.compile(r"RUN\(([\w/]+)\)")
HERE = "HERE"


@dataclass(frozen=True)
class Experiment:
    """One row of a results table: a config with overrides, trained with several seeds. `minutes`: of a core, a seed.

    settings: prompts, per_prompt: of the judgement. after: {RUN(NAME): the experiment} of those whose runs it builds
    on. sets: {SET(NAME): the words behind `diffrl draw-set`} of the image sets. here: the folder that `HERE` stands
    for. league: what a judgement is told of the track (`judge.Task`); none: not of the league.
    """

    name: str
    config: str
    out: Path
    overrides: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    minutes: float = 10.0
    shows: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Experiment] = field(default_factory=dict)
    sets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    here: Path | None = None
    league: Mapping[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def read(self) -> Config:
        """The config of any seed. Raises UserError where it is none."""
        return load_config(self.config, self.placed(self.overrides, {}))

    def placed(self, texts: tuple[str, ...], places: Mapping[str, str]) -> list[str]:
        """The texts with folders in the place of the words that stand for them."""
        words = dict(places) | ({HERE: str(self.here)} if self.here else {})
        return [replaced(text, words) for text in texts]

    def asked(self) -> dict[str, Any]:
        """What a result must be of: the config of any seed and the judgement's prompts."""
        return {"config": self._of(self.read.resolved()), **self.settings}

    def _of(self, config: dict[str, Any]) -> dict[str, Any]:
        """A config of any seed, and of any machine."""
        text = json.dumps(plain(config))
        return dict(json.loads(replaced(text, {str(self.here): HERE}) if self.here else text))

    def folder(self, seed: int, runs: Path) -> Path:
        """Where a seed is trained, in the folder of all runs."""
        return runs / f"{Path(self.config).stem}-{self.name_of(seed)}-{seed}"

    def name_of(self, seed: int) -> str:
        """What a seed's folder of runs is called: another one for whatever is asked otherwise.

        Values that are defaults do not count: a key that the schema gets later changes no name.
        """
        config = self._of(self.read.model_dump(mode="json", exclude_defaults=True))
        asked = json.dumps([self.asked() | {"config": config}, seed], sort_keys=True, default=str)
        return f"{self.name.replace('/', '-')}-{hashlib.sha256(asked.encode()).hexdigest()[:8]}"

    def needs(self) -> set[str]:
        """The names of the experiments whose runs it builds on."""
        return set(RUN.findall(" ".join(self.overrides)))

    def differences(self, result: Mapping[str, Any]) -> list[str]:
        """In what a result is of something else than is asked today: "config" or a setting."""
        asked = self.asked()
        try:
            config = read_today(result["config"], self.here)
        except (UserError, ValueError):
            config = {}
        return [name for name, value in asked.items() if (config if name == "config" else result.get(name)) != value]

    def kept(self) -> dict[int, dict[str, Any]]:
        """The finished seeds of a result that is what is asked today: {seed: its part}.

        Raises:
            UserError: the file of the result is none.
        """
        if not self.out.is_file():
            return {}
        result = read_result(self.out)
        runs = {run["seed"]: run for run in result["runs"] if run["seed"] in self.seeds}
        return {} if self.differences(result) else runs

    def state(self) -> tuple[str, float]:
        """In a word how far it is, and the minutes of one core that are left."""
        done = self.kept()
        left = self.minutes * (len(self.seeds) - len(done))
        if not left:
            return "done", 0.0
        if done:
            return f"{len(done)} of {len(self.seeds)}", left
        if not self.out.is_file():
            return "not run", left
        return f"other {' and '.join(self.differences(read_result(self.out)))}", left


def linked(found: Sequence[Experiment]) -> list[Experiment]:
    """The experiments, each with those that its overrides name. Raises UserError for a name that is none."""
    by_name = {one.name: one for one in found}
    for one in found:
        if wrong := sorted(one.needs() - by_name.keys()):
            raise UserError(f"{one.name}: RUN({wrong[0]}) is none of the experiments{nearest(wrong[0], by_name)}")
    return [replace(one, after={f"RUN({n})": by_name[n] for n in sorted(one.needs())}) for one in found]


def read_result(path: Path) -> dict[str, Any]:
    """A result's file. Raises UserError for one that is none."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if {"config", "runs"} <= result.keys() and all("seed" in run for run in result["runs"]):
            return dict(result)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(f'"{path}" is not a result: {" ".join(str(error).split())[:120]}') from error
    raise UserError(f'"{path}" is not a result: it has no "config" and "runs"')


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved config without what its seeds differ in."""
    return {key: value for key, value in config.items() if key not in ("seed", "run_dir")}


def replaced(text: str, words: Mapping[str, str]) -> str:
    for word, other in words.items():
        text = text.replace(word, other)
    return text


def read_today(config: Mapping[str, Any], here: Path | None = None) -> dict[str, Any]:
    """A result's config as today's schema reads it: a key that it lacks has its default.

    Raises:
        UserError, ValueError: today's schema refuses it, as it does a key that is gone.
    """
    if here is not None:  # an objective of its own has a section that only its file knows
        return dict(config)
    return plain(config_class(config).model_validate(config).resolved())
