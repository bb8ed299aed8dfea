"""`league.json`: what every entry gained and lost on every track, from its results; the page and the docs read it.

Symbols of one entry on one track: b_s, a_s a value before and after seed s; u the base's deviation over prompts.

gap           mean over proxies of (a_s - b_s) / u, minus the same over golds: what the gold did not gain of it
variety_kept  a_s / b_s of the variety
stability     the standard deviation over seeds of the proxies' mean (a_s - b_s) / u, and how many seeds kept less than
              half of the base's variety
paired        of two entries of a track, the differences a_s - a'_s by seed: the seeds share their prompts and noise
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from diffrl.prompts import load_prompts
from diffrl.records.disk import write_text
from diffrl.rewards.protocol import lower_is_better
from diffrl.rewards.registry import load_class
from diffrl.stats import holm, interval, p_value
from diffrl.version import __version__
from experiments.league.experiments import Experiment, read_result
from experiments.league.judge import SHOWN
from experiments.league.plan import FOLDER, PART, Entry, League, Track, title_of

SCHEMA, NAME, COSTS = 1, "league.json", "cost.json"
UNREADABLE = "unreadable"  # of the figures of a judgement, the one of which less is better
COLLAPSED = 0.5  # of the base's variety
Run = dict[str, Any]


def summarise(league: League, every: Sequence[Experiment], out: Path, command: str) -> dict[str, Any]:
    """Write OUT/league.json from all results below OUT that are what is asked today, and return it.

    every: all experiments of the league; those without a result are listed as left out.
    """
    results, left_out = list[dict[str, Any]](), list[str]()
    costs = read_costs(out)
    runs: dict[str, dict[str, list[Run]]] = {track: {} for track in league.tracks}
    for one in every:
        track, name = one.name.split("/")
        entry = league.entries[name]
        if entry.kind == PART:
            continue
        state, found = _result(one)
        if state:
            left_out.append(f"{track}, {title_of(entry, name, one.read)}: {state}")
        if found is not None:
            runs[track][name] = [_renamed(run, entry.plain) for run in found["runs"]]
            results.append(_described(one, found, out))
    units = {track: _units(itertools.chain.from_iterable(table.values())) for track, table in runs.items()}
    for row in results:
        track, name = row["track"], row["entry"]
        one = next(e for e in every if e.name == f"{track}/{name}")
        row |= measures(runs[track][name], league.tracks[track], units[track])
        cost = cost_of(one, costs)
        row["cost"] = {"images": league.tracks[track].images, **cost["whole"]}
        row["curve"] = curve(runs[track][name], cost, sum(spent(e) for e in one.after.values()))
    whole = {
        "schema": SCHEMA,
        "diffrl_version": __version__,
        "command": command,
        "left_out": left_out,
        "tracks": {name: _track(name, track, every, out) for name, track in league.tracks.items()},
        "entries": {name: _entry(league, every, name) for name in _listed(results)},
        "results": results,
        "paired": [pair for name, track in league.tracks.items() for pair in paired(name, track, runs[name])],
    }
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / NAME, json.dumps(whole, separators=(",", ":")).replace('},{"track"', '},\n{"track"') + "\n")
    return whole


def _result(one: Experiment) -> tuple[str, dict[str, Any] | None]:
    """What is missing of it, in words; its result, if that is what is asked today."""
    if not one.out.is_file():
        return "not run", None
    result = read_result(one.out)
    if different := one.differences(result):
        return f"its result is of another {' and '.join(different)}", None
    missing = len(set(one.seeds) - {run["seed"] for run in result["runs"]})
    return f"{missing} of {len(one.seeds)} seeds not run" if missing else "", result


def _renamed(run: Run, plain: Mapping[str, str]) -> Run:
    """The run with a corrected reward's plain form under the reward's name; what was trained is `corrected/NAME`."""
    names = {name: f"corrected/{name}" for name in plain} | {watched: name for name, watched in plain.items()}
    tables = {key: {names.get(k, k): v for k, v in run[key].items()} for key in _TABLES if key in run}
    evals = {f"eval/{old}": f"eval/{new}" for old, new in names.items()}
    return run | tables | {"curve": [{evals.get(k, k): v for k, v in point.items()} for point in run["curve"]]}


_TABLES = ("before", "after", "se_over_prompts", "base_std_over_prompts")


def _described(one: Experiment, result: Mapping[str, Any], out: Path) -> dict[str, Any]:
    track, name = one.name.split("/")
    config = json.dumps(result["config"], sort_keys=True).encode()
    strip = Path(one.league["strip"])
    checks = [run["check"] for run in result["runs"] if "check" in run]
    lines = [f"seed {run['seed']}: {line}" for run in result["runs"] for line in run.get("check", {}).get("caught", [])]
    return {
        "track": track,
        "entry": name,
        "commit": sorted({run["commit"] for run in result["runs"]}),
        "config_sha": hashlib.sha256(config).hexdigest()[:16],
        "result": one.out.relative_to(out).as_posix(),
        "seeds": [run["seed"] for run in result["runs"]],
        "strip": strip.relative_to(out).as_posix() if strip.is_file() else None,
        "check": {"seeds": len(checks), "passed": all(check["passed"] for check in checks), "lines": lines},
    }


def measures(runs: Sequence[Run], track: Track, units: Mapping[str, float]) -> dict[str, Any]:
    """values, gap, variety_kept, drift and stability of one entry's seeds."""
    names = [name for name, value in runs[0]["after"].items() if value is not None]
    values = {name: _value(runs, name) for name in names}
    scaled = {side: _scaled(runs, listed, units) for side, listed in (("proxy", track.proxy), ("gold", track.gold))}
    proxy, gold = scaled["proxy"], scaled["gold"]
    independent = set(track.proxy) - {*track.shared}
    variety = _variety(track)
    kept = [run["after"][variety] / run["before"][variety] for run in runs if run["before"].get(variety)]
    drifts = [run["drift"] for run in runs if run.get("drift") is not None]
    return {
        "values": values,
        "gap": _mean([p - g for p, g in zip(proxy, gold, strict=True)]) if proxy and gold and independent else None,
        "variety_kept": _mean(kept) if kept else None,
        "drift": fmean(drifts) if drifts else None,
        "stability": {
            "std": stdev(proxy) if len(proxy) > 1 else None,
            "collapsed": sum(share < COLLAPSED for share in kept),
        },
    }


def _variety(track: Track) -> str:
    """The name of the variety among a track's values: a student's where the gold is a student's."""
    return f"{track.gold[0].rpartition('/')[0]}/variety".removeprefix("/")


def _value(runs: Sequence[Run], name: str) -> dict[str, Any]:
    before, after = ([run[side][name] for run in runs] for side in ("before", "after"))
    gains = [y - x for x, y in zip(before, after, strict=True)]
    mean, half = interval(gains)
    errors = [error for run in runs if (error := run.get("se_over_prompts", {}).get(name)) is not None]
    error = (fmean([e**2 for e in errors])) ** 0.5 if errors else None  # of one seed's gain
    return {
        "before": fmean(before),
        "after": fmean(after),
        "gain": mean,
        "half": half,
        "se_prompts": error,
        "by_seed": gains,
    }


def _mean(values: Sequence[float]) -> dict[str, float | None]:
    mean, half = interval(values)
    return {"mean": mean, "half": half}


def _units(runs: Iterable[Run]) -> dict[str, float]:
    """The base's standard deviation over prompts of each value, from the runs of a track that know it."""
    units: dict[str, float] = {}
    for run in runs:
        for name, spread in run.get("base_std_over_prompts", {}).items():
            if spread:
                units.setdefault(name, spread)
    return units


def _scaled(runs: Sequence[Run], names: Sequence[str], units: Mapping[str, float]) -> list[float]:
    """By seed the mean gain of the values, each in units of the base; nothing where one has none."""
    if not all(name in units and run["after"].get(name) is not None for name in names for run in runs):
        return []
    return [fmean([(run["after"][name] - run["before"][name]) / units[name] for name in names]) for run in runs]


def curve(runs: Sequence[Run], cost: Mapping[str, Any], before: int) -> list[dict[str, Any]]:
    """The evaluations while training, where all seeds have one; `before`: images of the runs that it builds on."""
    tables = [{point["samples"]: point for point in run["curve"]} for run in runs]
    points = []
    for samples in sorted(set.intersection(*(set(table) for table in tables))):
        there = [table[samples] for table in tables]
        names = [key.removeprefix("eval/") for key in there[0] if key.startswith("eval/")]
        values = {}
        for name in names:
            if all(f"eval/{name}" in point for point in there):
                values[name] = _mean([point[f"eval/{name}"] for point in there])
        forwards, seconds = (
            None if cost["setup"][key] is None else cost["setup"][key] + samples * cost["image"][key]
            for key in ("forwards", "seconds")
        )
        points.append({"images": before + samples, "forwards": forwards, "seconds": seconds, "values": values})
    return points


def spent(one: Experiment) -> int:
    """Images of a whole run."""
    return one.read.epochs * one.read.rollout.images


def read_costs(out: Path) -> dict[str, Any]:
    """OUT/league/cost.json, by experiment; empty where nothing was measured."""
    file = out / FOLDER / COSTS
    return dict(json.loads(file.read_text(encoding="utf-8"))["entries"]) if file.is_file() else {}


def cost_of(one: Experiment, costs: Mapping[str, Any]) -> dict[str, Any]:
    """{setup, image, whole: {forwards, seconds}}: before the first image, of an image, of the run and what it builds
    on; None where it was not measured."""
    parts = [cost_of(other, costs)["whole"] for other in one.after.values()]
    row = costs.get(one.name)
    result: dict[str, Any] = {"setup": {}, "image": {}, "whole": {}}
    for key in ("forwards", "seconds"):
        known = row is not None and all(part[key] is not None for part in parts)
        setup = row["setup"][key] + sum(part[key] for part in parts) if row is not None and known else None
        image = row["image"][key] if row is not None and known else None
        result["setup"][key], result["image"][key] = setup, image
        result["whole"][key] = None if setup is None or image is None else setup + image * spent(one)
    result["whole"]["mib"] = row["mib"] if row is not None else None
    return result


def paired(name: str, track: Track, runs: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """Every two entries of a track on its proxies, golds and variety; p by Holm within the track and the value."""
    rows = []
    for value in (*track.proxy, *track.gold, _variety(track)):
        family = []
        for (a, ones), (b, others) in itertools.combinations(runs.items(), 2):
            first, second = ({run["seed"]: run["after"].get(value) for run in each} for each in (ones, others))
            seeds = [seed for seed in first if first[seed] is not None and second.get(seed) is not None]
            if len(seeds) > 1:
                differences = [first[seed] - second[seed] for seed in seeds]
                mean, half = interval(differences)
                row = {"track": name, "a": a, "b": b, "name": value, "difference": mean, "half": half}
                family.append((row, p_value(differences)))
        for (row, _), p in zip(family, holm([p for _, p in family]), strict=True):
            rows.append(row | {"p": p})
    return rows


def _track(name: str, track: Track, every: Sequence[Experiment], out: Path) -> dict[str, Any]:
    test = next((one.read.prompts.test for one in every if one.name.startswith(f"{name}/")), None)
    strip = out / FOLDER / "strips" / f"{name}-base.webp"
    return {
        **{key: getattr(track, key) for key in ("proxy", "gold", "shared", "images", "shows")},
        "lower_is_better": lower(track),
        "strip": strip.relative_to(out).as_posix() if strip.is_file() else None,
        "prompts": [] if test is None else [prompt.text for prompt in load_prompts(test)[:SHOWN]],
    }


def lower(track: Track) -> list[str]:
    """The values of which less is better, by the rewards' cards, and "unreadable"."""
    named = {name: load_class(str(row.get("plugin") or name)) for name, row in {**track.rewards, **track.watch}.items()}
    prefix = track.gold[0].rpartition("/")[0]
    names = sorted({*lower_is_better(named), UNREADABLE})
    return [*names, *(f"{prefix}/{name}" for name in names if prefix)]


def _listed(results: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["entry"] for row in results))


def _entry(league: League, every: Sequence[Experiment], name: str) -> dict[str, Any]:
    entry: Entry = league.entries[name]
    config = next(one for one in every if one.name.endswith(f"/{name}")).read
    return {
        "kind": entry.kind,
        "title": title_of(entry, name, config),
        "page": entry.page or None,
        "claim": entry.claim,
        "trials": entry.trials,
        "expects": [one.model_dump() for one in entry.expects],
        "others": name in league.homes,
    }
