"""The experiments behind the pages' figures: what is to be run, what has been, and whether it is what is asked today.

`scripts/experiments.yaml` names them. A result has the config, the number of its judgement's prompts, the digest of the
shipped weights and the last correction of the code that it is of; a seed is run again when one of them has changed.
Each seed also says which commit trained it. Any other change of code changes no figure, which the golden values of the
tests answer for. `RUN(NAME)` in an override is the folder of that experiment's run of the same seed, which goes first.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from diffrl.config import load_config
from diffrl.config.removed import without_removed
from diffrl.config.schema import Config
from diffrl.errors import UserError
from diffrl.resources import shipped

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "scripts" / "experiments.yaml"
RESULTS = ROOT / "assets" / "results"
RUN = re.compile(r"RUN\(([\w/]+)\)")


@dataclass(frozen=True)
class Experiment:
    """One row of a results table: a config with overrides, trained with several seeds. `minutes`: of a core, a seed."""

    name: str
    config: str
    overrides: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    minutes: float = 10.0
    shows: str = ""
    settings: dict[str, Any] = field(default_factory=dict)  # prompts, per_prompt: of the judgement
    code: str | None = None  # what was corrected in the code that it runs; None: nothing since its first result

    @property
    def out(self) -> Path:
        """Where the result of all seeds is kept."""
        return RESULTS / f"{self.name}.json"

    @property
    def after(self) -> dict[str, Experiment]:
        """{RUN(NAME): the experiment} of those whose runs it builds on."""
        names = set(RUN.findall(" ".join(self.overrides)))
        return {f"RUN({one.name})": one for one in (experiments() if names else []) if one.name in names}

    def asked(self) -> dict[str, Any]:
        """What a result must be of: the config of any seed, the judgement's prompts, shipped weights and correction."""
        config = plain(load_config(ROOT / self.config, list(self.overrides)).resolved())
        return {"config": config, **self.settings, "weights": weights(), **self.corrected()}

    def corrected(self) -> dict[str, Any]:
        """The last correction, and what is asked of the runs that it builds on."""
        runs = {one.name: one.name_of(0) for one in self.after.values()}
        return {"code": self.code, **({"after": runs} if runs else {})}

    def folder(self, seed: int, runs: Path) -> Path:
        """Where a seed is trained, in the folder of all runs."""
        return runs / f"{Path(self.config).stem}-{self.name_of(seed)}-{seed}"

    def name_of(self, seed: int) -> str:
        """What a seed's folder of runs is called: another one for whatever is asked otherwise."""
        asked = json.dumps([self.asked(), seed], sort_keys=True, default=str)
        return f"{self.name.replace('/', '-')}-{hashlib.sha256(asked.encode()).hexdigest()[:8]}"


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """A resolved config without what its seeds differ in."""
    return {key: value for key, value in config.items() if key not in ("seed", "run_dir")}


def experiments(path: Path = LIST) -> list[Experiment]:
    """All of them, in the file's order; defaults of the file are filled in. Raises TypeError for an unknown key.

    An entry of `overrides` may be a list: YAML can refer to one, and not join two. `axes`: an entry for each
    combination of their values, which stand for {AXIS} in name and config; the overrides that they may have come first.
    """
    told = yaml.safe_load(path.read_text())
    defaults = told.pop("defaults", {})
    found = []
    for name, row in (one for entry in told.items() for one in combinations(*entry)):
        row = defaults | row
        settings = {key: row.pop(key) for key in ("prompts", "per_prompt")}
        row["seeds"] = tuple(row["seeds"])
        parts = [part if isinstance(part, list) else [part] for part in row.get("overrides", [])]
        row["overrides"] = tuple(itertools.chain.from_iterable(parts))
        found.append(Experiment(name=name, settings=settings, **row))
    return found


def combinations(name: str, row: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, row) of an entry for each combination of its axes; itself where it has none."""
    axes = row.pop("axes", {})
    for values in itertools.product(*axes.values()):
        words = dict(zip(axes, values, strict=True))
        more = [axes[axis][value] for axis, value in words.items() if isinstance(axes[axis], dict)]
        more = [*more, *row.get("overrides", [])]
        yield name.format(**words), row | {"config": row["config"].format(**words), "overrides": more}


@functools.cache
def weights() -> str:
    """A digest of the playground's shipped models."""
    total = hashlib.sha256()
    for path in sorted(shipped("assets", "playground").rglob("*.safetensors")):
        total.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def read_today(config: dict[str, Any]) -> dict[str, Any]:
    """A result's config as today's schema reads it: a key that it lacks has its default, and a removed key that said
    nothing is left out.

    Raises:
        UserError, ValueError: today's schema refuses it, as it does a removed key that said something.
    """
    return plain(Config.model_validate(without_removed(config)).resolved())


def differences(experiment: Experiment, told: dict[str, Any]) -> list[str]:
    """In what a result is of something else than is asked today: "config", a setting, "weights" or "code"."""
    asked = experiment.asked()
    try:
        config = read_today(told["config"])
    except (UserError, ValueError):
        config = {}
    return [name for name, value in asked.items() if (config if name == "config" else told.get(name)) != value]


def kept(experiment: Experiment) -> dict[int, dict[str, Any]]:
    """The finished seeds of a result that is what is asked today: seed -> part."""
    if not experiment.out.is_file():
        return {}
    told = json.loads(experiment.out.read_text())
    runs = {run["seed"]: run for run in told["runs"] if run["seed"] in experiment.seeds}
    return {} if differences(experiment, told) else runs
