"""The experiments behind the pages' figures, from `listed.yaml`; what one is: `experiments.league.experiments`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from experiments.league.experiments import Experiment, linked
from experiments.league.plan import League, read_league

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("listed.yaml")
RESULTS = ROOT / "assets" / "results"


def experiments(path: Path = LIST) -> list[Experiment]:
    """All of them, in the file's order; defaults of the file are filled in. Raises TypeError for an unknown key.

    An entry of `overrides` may be a list: YAML can refer to one, and not join two. `axes`: an entry for each
    combination of their values, which stand for {AXIS} in name and config; the overrides that they may have come first.
    `like`: config, minutes, image sets and first overrides are those of an entry of the league, TRACK/ENTRY.
    """
    content = yaml.safe_load(path.read_text())
    defaults = content.pop("defaults", {})
    league, found = read_league(), []
    rows = [(name, as_its_entry(row, league) if "like" in row else row) for name, row in content.items()]
    for name, row in (one for entry in rows for one in combinations(*entry)):
        row = defaults | row
        settings = {key: row.pop(key) for key in ("prompts", "per_prompt")}
        row["seeds"] = tuple(row["seeds"])
        parts = [part if isinstance(part, list) else [part] for part in row.get("overrides", [])]
        row["overrides"] = tuple(itertools.chain.from_iterable(parts))
        found.append(Experiment(name=name, out=RESULTS / f"{name}.json", settings=settings, **row))
    return linked(found)


def as_its_entry(row: dict[str, Any], league: League) -> dict[str, Any]:
    """A row with what it has of the entry that it is `like`."""
    track, name = row.pop("like").split("/")
    entry = league.experiment(track, name, RESULTS, seeds=1)
    more = [*entry.overrides, *row.get("overrides", [])]
    return {"config": entry.config, "minutes": entry.minutes, "sets": entry.sets} | row | {"overrides": more}


def combinations(name: str, row: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, row) of an entry for each combination of its axes; itself where it has none."""
    axes = row.pop("axes", {})
    for values in itertools.product(*axes.values()):
        words = dict(zip(axes, values, strict=True))
        more = [axes[axis][value] for axis, value in words.items() if isinstance(axes[axis], dict)]
        more = [*more, *row.get("overrides", [])]
        yield name.format(**words), row | {"config": row["config"].format(**words), "overrides": more}
