"""The experiments behind the pages' figures: what is to be run, what has been, and whether it still stands.

`scripts/experiments.yaml` names them. Every seed has a digest of what its figures depend on: the resolved config, the
prompts of the judgement, the shipped weights, and the code that it ran. The code is that of the modules of this package
which the run imported, without comments and docstrings, but for those that only look on; so a change elsewhere repeats
nothing.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from diffrl.config import load_config
from diffrl.resources import shipped

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "scripts" / "experiments.yaml"
RESULTS = ROOT / "assets" / "results"
# What a run imports and no figure depends on: the page that shows it, and the estimate of its memory, which decides
# nothing but micro-batches where a config leaves them to it (`optimise.micro_batch: auto`).
ONLOOKERS = ("diffrl/report/", "diffrl/run/fit.py")


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

    @property
    def out(self) -> Path:
        """Where the result of all seeds is kept."""
        return RESULTS / f"{self.name}.json"

    def digest(self, seed: int, code: str) -> str:
        """Of everything that the figures of one seed depend on, 16 hexadecimal digits."""
        config = load_config(ROOT / self.config, [*self.overrides, f"seed={seed}"]).resolved()
        depends = [{k: v for k, v in config.items() if k != "run_dir"}, self.settings, weights(), code]
        return hashlib.sha256(json.dumps(depends, sort_keys=True, default=str).encode()).hexdigest()[:16]


def experiments(path: Path = LIST) -> list[Experiment]:
    """All of them, in the file's order; defaults of the file are filled in. Raises TypeError for an unknown key.

    An entry of `overrides` may be a list: YAML can refer to one, and not join two.
    """
    told = yaml.safe_load(path.read_text())
    defaults = told.pop("defaults", {})
    found = []
    for name, row in told.items():
        row = defaults | row
        settings = {key: row.pop(key) for key in ("prompts", "per_prompt")}
        row["seeds"] = tuple(row["seeds"])
        parts = [part if isinstance(part, list) else [part] for part in row.get("overrides", [])]
        row["overrides"] = tuple(itertools.chain.from_iterable(parts))
        found.append(Experiment(name=name, settings=settings, **row))
    return found


@functools.cache
def weights() -> str:
    """A digest of the playground's shipped models."""
    total = hashlib.sha256()
    for path in sorted(shipped("assets", "playground").rglob("*.safetensors")):
        total.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def loaded() -> list[str]:
    """The package's source files that this process has imported, relative to the checkout, sorted; no `ONLOOKERS`."""
    files = {Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    ours = (ROOT / "diffrl", ROOT / "rewards")
    names = sorted(str(file.relative_to(ROOT)) for file in files if any(map(file.is_relative_to, ours)))
    return [name for name in names if not name.startswith(ONLOOKERS)]


@functools.cache
def meaning(path: str) -> str:
    """A digest of a source file's code without comments, docstrings and layout; "" if the file is gone."""
    file = ROOT / path
    if not file.is_file():
        return ""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        parts = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, parts) and ast.get_docstring(node, clean=False) is not None:
            node.body[0] = ast.Pass()
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def code_of(files: list[str]) -> str:
    """One digest for the meaning of several source files."""
    return hashlib.sha256("".join(f"{file}:{meaning(file)}\n" for file in files).encode()).hexdigest()


def kept(experiment: Experiment) -> dict[int, dict[str, Any]]:
    """The finished seeds whose digest is still what it was when they were run: seed -> part."""
    if not experiment.out.is_file():
        return {}
    return {
        run["seed"]: run
        for run in json.loads(experiment.out.read_text())["runs"]
        if run["seed"] in experiment.seeds
        and "code" in run  # it was not yet written in the first world's time
        and run["digest"] == experiment.digest(run["seed"], code_of(run["code"]))
    }


FIGURES = ("before", "after", "images", "optimiser_steps", "curve")


def figures_that_differ(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Which figures of a seed are not equal to the last digit."""
    return [name for name in FIGURES if before.get(name) != now.get(name)]


def of_today(experiment: Experiment, runs: list[dict[str, Any]], files: list[str]) -> list[dict[str, Any]]:
    """The seeds of a result as of today's code, which is that of `files`."""
    return [run | {"code": files, "digest": experiment.digest(run["seed"], code_of(files))} for run in runs]


def differing(told: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """In which figures two runs of one seed differ, and whether in their configs; nothing: equal to the last digit."""
    (run,) = found["runs"]
    (before,) = (one for one in told["runs"] if one["seed"] == run["seed"])
    configs = ({k: v for k, v in one["config"].items() if k not in ("seed", "run_dir")} for one in (told, found))
    return figures_that_differ(before, run) + (["config"] if next(configs) != next(configs) else [])


def confirmed(experiment: Experiment, told: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The result `told` as of today's code, after `found`, its first seed run again, gave the same figures.

    Raises:
        ValueError: they differ; the message says in what.
    """
    if names := differing(told, found):
        raise ValueError(f"{experiment.name}: not as before: {', '.join(names)}")
    runs = of_today(experiment, told["runs"], found["runs"][0]["code"])
    return told | {"runs": runs, "confirmed_by_seed": found["runs"][0]["seed"]}
