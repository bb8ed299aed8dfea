"""Tables of results of `experiments/reproduce.py`, for `tables.py`, which says how a page calls them.

A cell is the mean over the seeds and half the width of its 95 % interval (Student's t over the seeds), on held-out
prompts; seconds are those of a training, one core each. Variants are LABEL=FILE, below assets/results.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats

from diffrl.stats import interval
from experiments.figures.tables import read

HALF = "half the width of the mean's 95 % interval"
HELD_OUT = {"facts right": "strict", "all right": "all_right", "variety": "variety", "artefact": "artefact"}
README = {"nft": "playground", "grpo": "playground", "ocr": "ocr"}  # result, and the reward that it trains
Result = dict[str, Any]


def half_width(values: np.ndarray) -> float:
    """Half the width of the 95 % interval of the mean of two or more seeds' values."""
    half = interval(values.tolist())[1]
    assert half is not None, "one seed has no interval"
    return half


def sides(runs: list[Result], name: str) -> tuple[np.ndarray, np.ndarray]:
    """A measured value before and after, each (seeds,)."""
    return np.array([run["before"][name] for run in runs]), np.array([run["after"][name] for run in runs])


def mean(values: np.ndarray) -> str:
    if 0 < abs(values.mean()) < 5e-4:
        return f"{values.mean():.0e}"
    return f"{values.mean():.3f} ± {half_width(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"


def chance(p: float, digits: int) -> str:
    return "< 1e-6" if p < 1e-6 else f"{p:.{digits}g}"


def rows(heads: list[str], cells: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *cells))


def origin(results: dict[str, Result], spread: str, prompts: str = "held-out") -> str:
    runs = [len(one["runs"]) for one in results.values()]
    seeds = f"{min(runs)}" if min(runs) == max(runs) else f"{min(runs)} to {max(runs)}"
    return f"\n\nMean over {seeds} seeds and {spread}; {prompts} prompts. {machines(results)}"


def machines(results: dict[str, Result]) -> str:
    machine = ", ".join(sorted({one.get("machine", "") for one in results.values()} - {""}))
    return f"Machine: {machine}; diffrl {', '.join(sorted({one['diffrl_version'] for one in results.values()}))}."


def read_all(folder: str, variants: tuple[str, ...]) -> tuple[dict[str, Result], str]:
    """The results of LABEL=FILE below a folder, and a line about those that are not there yet."""
    asked = {label: read(f"{folder}/{file}") for label, _, file in (text.rpartition("=") for text in variants)}
    missing = ", ".join(label for label, result in asked.items() if not result)
    return {label: result for label, result in asked.items() if result}, f"\n\nNot run yet: {missing}." * bool(missing)


def table(folder: str, columns: str, *variants: str) -> str:
    """Variants below a folder side by side, one row each, the base model first, from which all must have started.

    `clip` may be trained in a corrected form: then the plain one is shown. A logged value is a mean over epochs.
    `full/NAME`: on the full base, over which most variants are trained anyway.
    """
    names, (results, missing) = columns.split(), read_all(folder, variants)
    if not results:
        return "Not run yet."
    for side in (run[key] for one in results.values() for run in one["runs"] for key in ("before", "after")):
        side.update({"clip": side["plain"]} if "plain" in side else {})
        side.update({name: side[name[5:]] for name in names if name.startswith("full/") and name not in side})
    first = next(iter(results.values()))["runs"][0]["before"]
    measured = [name for name in names if "/stopped" not in name and "/divergence/" not in name]
    cells = [["base", "", "", *(f"{first[name]:.3f}" if name in measured else "" for name in names)]]
    for label, result in results.items():
        runs = result["runs"]
        shared = [name for name in measured if name in runs[0]["before"]]  # each may have measured something else
        before = [[run["before"][name] for name in shared] for run in runs]
        if not np.allclose(before, [first[name] for name in shared], atol=1e-4):
            raise SystemExit(f"results_table: {label} started from another base model, or was judged on other prompts")
        seconds = np.mean([run["training_seconds"] for run in runs])
        values = [[(run.get("logged", {}) | run["after"]).get(name) for run in runs] for name in names]
        after = ["" if None in column else mean(np.array(column)) for column in values]
        cells.append([label, f"{runs[0]['images']:,}", f"{seconds:.0f}", *after])
    return rows(["variant", "images", "seconds", *names], cells) + origin(results, HALF) + missing


def held(folder: str, proxy: str, gold: str, *variants: str) -> str:
    """How far a proxy rises before the gold reward falls: of the evaluations during training, paired by seed.

    It falls at the first evaluation that is below its best so far by more than half the difference's 95 % interval,
    with the seeds' deviation pooled over evaluations and variants: of three seeds alone it would be known too badly.
    "at equal gain": at the first one with the proxy gain that all variants reach.
    """
    results, missing = read_all(folder, variants)
    if not results:
        return "Not run yet."
    changes = {}  # (2, evaluations, seeds): of proxy and gold since the start
    for label, result in results.items():
        curves = np.array(
            [[[run[f"eval/{k}"] for run in one["curve"]] for one in result["runs"]] for k in (proxy, gold)]
        )
        changes[label] = (curves - curves[:, :, :1]).swapaxes(1, 2)
    common, cells = min(gain.mean(1).max() for gain, _ in changes.values()), []
    falls = {
        label: [true[k] - true[true[: k + 1].mean(1).argmax()] for k in range(len(true))]
        for label, (_, true) in changes.items()
    }
    pooled = [(fall.var(ddof=1), len(fall)) for each in falls.values() for fall in each if fall.any()] or [(0.0, 2)]
    variance, seeds = np.mean(pooled, axis=0)
    half = stats.t.ppf(0.975, len(pooled) * (seeds - 1)) * (variance / seeds) ** 0.5
    for label, (gain, true) in changes.items():
        fallen = next((k for k, fall in enumerate(falls[label]) if fall.mean() + half < 0), None)
        until = f"all of {mean(gain[-1])}" if fallen is None else mean(gain[fallen - 1])
        equal = (gain.mean(1) >= common).argmax()
        cells.append([label, until, *(mean(values) for values in (true[equal], gain[-1], true[-1]))])
    heads = [f"{proxy} until {gold} fell", f"{gold} at equal gain, {common:.3f}", f"{proxy} at the end", f"{gold} then"]
    return rows(["variant", *heads], cells) + origin(results, HALF) + missing


def readme() -> str:
    """What training does on the playground: base → trained ± deviation between the seeds."""

    def cell(runs: list[Result], name: str) -> str:
        if name not in runs[0]["after"]:
            return ""
        before, after = sides(runs, name)
        return f"{before.mean():.3f} → {after.mean():.3f} ± {after.std(ddof=1):.3f}"

    names = {"facts right": "strict", "all facts right": "all_right", "variety": "variety"}
    cells = []
    for name, reward in README.items():
        runs = read(f"{name}.json")["runs"]
        minutes = np.mean([run["training_seconds"] for run in runs]) / 60
        row = [f"`playground/{name}`", f"{runs[0]['images']:,}", f"{minutes:.0f}", f"{reward} {cell(runs, reward)}"]
        cells.append(row + [cell(runs, column) for column in names.values()])
    return rows(["recipe", "images", "minutes", "reward", *names], cells)


def gains(*variants: str) -> str:
    """Base, trained, gain and the largest p of each measured value."""
    cells, results = [], {}
    for label, _, file in (text.rpartition("=") for text in variants):
        results[label] = read(file)
        runs = results[label]["runs"]
        for i, name in enumerate(runs[0]["before"]):
            before, after = sides(runs, name)
            spread = f" ± {np.std(after - before, ddof=1):.3f}" if len(runs) > 1 else ""
            chances = [run.get("p_value_paired_over_prompts", {}).get(name) for run in runs]
            p = "" if None in chances else chance(max(chances), 2)
            head = [label, f"{runs[0]['images']:,}"] if i == 0 else ["", ""]
            gain = f"{(after - before).mean():+.3f}{spread}"
            cells.append([*head, name, f"{before.mean():.3f}", f"{after.mean():.3f}", gain, p])
    heads = ["recipe", "images", "on unseen prompts", "base", "trained", "gain", "p"]
    return rows(heads, cells) + origin(results, "the standard deviation between them")


def pilots(*names: str) -> str:
    """What ten epochs of recipes do to validation prompts, one seed each: `pilots/*` of experiments/listed.yaml."""
    cells = []
    results = {name: read(f"pilots/{name}.json") for name in names}
    for name, result in results.items():
        (run,) = result["runs"]
        both = {
            key: f"{run['before'][key]:.3f} → {value:.3f}" for key, value in run["after"].items() if value is not None
        }
        trained = list(result["config"]["rewards"])
        p = "<br>".join(chance(run["p_value_paired_over_prompts"][reward], 1) for reward in trained)
        rewards = "<br>".join(f"{reward} {both.get(reward, '')}" for reward in trained)
        held_out = [both.get(key, "") for key in HELD_OUT.values()]
        cells.append([f"`playground/{name}`", f"{run['images']:,}", rewards, p, *held_out])
    judged = "One seed, 96 validation prompts x 4 images with one noise before and after; p is paired over prompts."
    return rows(["recipe", "images", "trained", "p", *HELD_OUT], cells) + f"\n\n{judged} {machines(results)}"


def beside(base: str, *names: str) -> str:
    """Recipes beside their base after ten epochs, each with its seeds: `pilots/*` of experiments/listed.yaml.

    More epochs of the base itself (`grpo_27`) cost what their images cost.
    """
    results = {name: read(f"pilots/{name}.json") for name in (base, *names)}
    costs = read("method_cost.json")["methods"]  # of one run: trainings ran beside other work
    reached = {run["seed"]: run["after"]["playground"] for run in results[base]["runs"]}
    first = results[base]["runs"][0]["before"]
    before = [f"{first[key]:.3f}" for key in ("playground", *HELD_OUT.values())]
    cells = [["the model before", "", "", "", before[0], "", *before[1:]]]
    for name, result in results.items():
        runs = result["runs"]
        if any(abs(run["before"]["playground"] - first["playground"]) > 1e-4 for run in runs):
            raise ValueError(f"pilots/{name}.json is judged on other prompts, or on another model, than {base}'s")
        against = ""
        if name != base:
            further = np.array([run["after"]["playground"] - reached[run["seed"]] for run in runs])
            against = f"{further.mean():+.3f}" + (f" ± {half_width(further):.3f}" if len(runs) > 1 else "")
        counted = [run["forwards"] for run in runs if "forwards" in run]
        longer = runs[0]["images"] / results[base]["runs"][0]["images"]
        cost = costs[base if name.startswith(f"{base}_") else name]["epoch"] * longer
        after = [mean(sides(runs, key)[1]) for key in ("playground", *HELD_OUT.values())]
        head = [f"`{name}`" + ("" if len(runs) > 1 else " (one seed)"), f"{runs[0]['images']:,}"]
        head += [f"{np.mean(counted):,.0f}" if counted else "", f"{cost:.2f}"]
        cells.append([*head, after[0], against, *after[1:]])
    heads = ["recipe", "images", "forwards", "seconds, of the base's", "verifier", "against the base", *HELD_OUT]
    return rows(heads, cells) + origin(results, HALF, "validation")
