"""What pages say of measurements: functions that read assets/results, and assets/playground/training.json.

Each marked with `@page_function` may be called in a page (`scripts/docs/hooks.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "assets" / "results"
sys.path[:0] = [str(ROOT / "scripts" / "figures")]

from divgen_table import COLUMNS as DIVGEN  # noqa: E402
from results_table import cell, half_width, table  # noqa: E402

FUNCTIONS: dict[str, Callable[..., Any]] = {}


def page_function(function: Callable[..., Any]) -> Callable[..., Any]:
    FUNCTIONS[function.__name__] = function
    return function


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def _training() -> dict[str, Any]:
    """What was recorded of the playground's own models."""
    return json.loads((ROOT / "assets" / "playground" / "training.json").read_text())


def _sides(runs: list[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """A measured value before and after, each (seeds,)."""
    return np.array([run["before"][name] for run in runs]), np.array([run["after"][name] for run in runs])


@page_function
def results(folder: str, *variants: str, columns: str = "playground strict clip aesthetic artefact variety") -> str:
    """The table of `scripts/figures/results_table.py`: variants are LABEL=FILE below assets/results/FOLDER."""
    pairs = [text.rpartition("=")[::2] for text in variants]
    found = {label: read(f"{folder}/{file}" if folder else file) for label, file in pairs}
    for result in found.values():
        for side in (run[side] for run in result["runs"] for side in ("before", "after")):
            side.update({"clip": side["plain"]} if "plain" in side else {})  # `clip` may be trained in a corrected form
    return table(found, columns.split()) + _origin(found, HALF)


HALF = "half the width of the mean's 95 % interval"


def _origin(found: dict[str, dict[str, Any]], spread: str, prompts: str = "held-out") -> str:
    runs = [len(one["runs"]) for one in found.values()]
    seeds = f"{min(runs)}" if min(runs) == max(runs) else f"{min(runs)} to {max(runs)}"
    return f"\n\nMean over {seeds} seeds and {spread}; {prompts} prompts. {_machines(found)}\n"


def _machines(found: dict[str, dict[str, Any]]) -> str:
    machine = ", ".join(sorted({one.get("machine", "") for one in found.values()} - {""}))
    return f"Machine: {machine}; diffrl {', '.join(sorted({one['diffrl_version'] for one in found.values()}))}."


@page_function
def gains(*variants: str) -> str:
    """Base, trained, gain and the largest p of each measured value: variants are LABEL=FILE."""
    lines = ["| recipe | images | on unseen prompts | base | trained | gain | p |", "| --- " * 7 + "|"]
    found = {}
    for text in variants:
        label, _, file = text.rpartition("=")
        found[label] = read(file)
        runs = found[label]["runs"]
        for i, name in enumerate(runs[0]["before"]):
            before, after = _sides(runs, name)
            spread = f" ± {np.std(after - before, ddof=1):.3f}" if len(runs) > 1 else ""
            chances = [run.get("p_value_paired_over_prompts", {}).get(name) for run in runs]
            p = "" if None in chances else "< 1e-6" if max(chances) < 1e-6 else f"{max(chances):.2g}"
            head = f"{label} | {runs[0]['images']:,}" if i == 0 else " | "
            row = f"{before.mean():.3f} | {after.mean():.3f} | {(after - before).mean():+.3f}{spread} | {p}"
            lines.append(f"| {head} | {name} | {row} |")
    return "\n".join(lines) + _origin(found, "the standard deviation between them")


HELD_OUT = {"facts right": "strict", "all right": "all_right", "variety": "variety", "artefact": "artefact"}


@page_function
def pilots(*names: str) -> str:
    """What ten epochs of recipes do to validation prompts, one seed each: `pilots/*` of scripts/experiments.yaml."""
    lines = [f"| recipe | images | trained | p | {' | '.join(HELD_OUT)} |", "| --- " * (len(HELD_OUT) + 4) + "|"]
    found = {name: read(f"pilots/{name}.json") for name in names}
    for name, result in found.items():
        (run,) = result["runs"]
        before, after = run["before"], run["after"]

        def both(key: str, before: dict[str, Any] = before, after: dict[str, Any] = after) -> str:
            return f"{before[key]:.3f} > {after[key]:.3f}" if after.get(key) is not None else ""

        trained = list(result["config"]["rewards"])
        chances = [run["p_value_paired_over_prompts"][reward] for reward in trained]
        p = "<br>".join("< 1e-6" if chance < 1e-6 else f"{chance:.1g}" for chance in chances)
        rewards = "<br>".join(f"{reward} {both(reward)}" for reward in trained)
        cells = " | ".join(both(key) for key in HELD_OUT.values())
        lines.append(f"| `playground/{name}` | {run['images']:,} | {rewards} | {p} | {cells} |")
    told = "One seed, 96 validation prompts x 4 images with one noise before and after; p is paired over prompts."
    return "\n".join(lines) + f"\n\n{told} {_machines(found)}\n"


@page_function
def together(*files: str) -> str:
    """The chance of so large a gain on the verifier without any effect, over each file's seeds together.

    Stouffer's one-sided sum of the seeds' tests, each paired over prompts; the largest of the files.
    """
    normal, chances = NormalDist(), []
    for runs in (read(file)["runs"] for file in files):
        tests = [
            (run["p_value_paired_over_prompts"]["playground"], run["after"]["playground"] - run["before"]["playground"])
            for run in runs
        ]
        signed = [np.sign(gain) * normal.inv_cdf(1 - max(p, 1e-15) / 2) for p, gain in tests]
        chances.append(1 - normal.cdf(sum(signed) / len(signed) ** 0.5))
    return f"{max(chances):.1g}"


@page_function
def ring(base: str, *names: str) -> str:
    """Recipes beside their base after ten epochs, each with its seeds: `pilots/*` of scripts/experiments.yaml.

    More epochs of the base itself (`grpo_27`) cost what their images cost.
    """
    heads = ["recipe", "images", "forwards", "seconds, of the base's", "verifier", "against the base", *HELD_OUT]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    found = {name: read(f"pilots/{name}.json") for name in (base, *names)}
    costs = read("ring_cost.json")["methods"]  # of one run: trainings ran beside other work
    reached = {run["seed"]: run["after"]["playground"] for run in found[base]["runs"]}
    first = found[base]["runs"][0]["before"]
    cells = [f"{first[key]:.3f}" for key in ("playground", *HELD_OUT.values())]
    lines.append(f"| the model before | | | | {cells[0]} | | {' | '.join(cells[1:])} |")
    for name, result in found.items():
        runs = result["runs"]
        if any(abs(run["before"]["playground"] - first["playground"]) > 1e-4 for run in runs):
            raise ValueError(f"pilots/{name}.json is judged on other prompts, or on another model, than {base}'s")
        against = ""
        if name != base:
            further = np.array([run["after"]["playground"] - reached[run["seed"]] for run in runs])
            against = f"{further.mean():+.3f}" + (f" ± {half_width(further):.3f}" if len(runs) > 1 else "")
        counted = [run["forwards"] for run in runs if "forwards" in run]
        longer = runs[0]["images"] / found[base]["runs"][0]["images"]
        recipe = base if name.startswith(f"{base}_") else name
        cells = [
            f"`{name}`" + ("" if len(runs) > 1 else " (one seed)"),
            f"{runs[0]['images']:,}",
            f"{np.mean(counted):,.0f}" if counted else "",
            f"{costs[recipe]['epoch'] * longer:.2f}",
            cell(runs, "playground"),
            against,
            *(cell(runs, key) for key in HELD_OUT.values()),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + _origin(found, HALF, "validation")


@page_function
def divgen(file: str) -> str:
    """DivGenBench's scores of several methods (`scripts/figures/divgen_table.py`), and the exact variety."""
    told = read(file)
    agreed = told.pop("agreement with the variety", None)
    extra = {"variety": "**variety** (exact)", "facts right": "facts right"} if agreed else {}
    columns = DIVGEN | extra
    lines = [f"| method | {' | '.join(columns.values())} |", "| --- " * (len(columns) + 1) + "|"]
    for label, runs in told.items():
        if isinstance(runs, list):
            cells = []
            for name in columns:
                values = np.array([run[name] for run in runs if name in run])
                spread = f" ± {values.std(ddof=1):.3f}" if len(values) > 1 else ""
                cells.append(f"{values.mean():.3f}{spread}" if len(values) else "")
            lines.append(f"| {label} | {' | '.join(cells)} |")
    if agreed:
        cells = [f"{agreed[name]['correlation']:+.2f}" for name in DIVGEN]
        lines.append(f"| rank correlation with the variety, {agreed['folders']} models | {' | '.join(cells)} | | |")
    return "\n".join(lines) + "\n"


def _at(found: Any, path: str) -> Any:
    """What a dotted path leads to; a number chooses from a list."""
    for part in path.split("."):
        found = found[int(part)] if isinstance(found, list) else found[part]
    return found


@page_function
def value(file: str, path: str, form: str = "{}") -> str:
    """One number of a results file: `path` is dotted."""
    return form.format(_at(read(file), path))


@page_function
def gain(file: str, name: str) -> str:
    """`base > trained` of a measured value, mean over the seeds, with half the width of the gain's 95 % interval."""
    runs = read(file)["runs"]
    before, after = _sides(runs, name)
    spread = f" ± {half_width(after - before):.3f}" if len(runs) > 1 else ""
    return f"{before.mean():.3f} > {after.mean():.3f}{spread}"


@page_function
def difference(file: str, other: str, name: str, form: str = "{:+.3f} ± {:.3f}") -> str:
    """How far two results end from each other, seed by seed, and half the 95 % interval's width."""
    own, others = (
        np.array([run["after"][name] for run in sorted(read(one)["runs"], key=lambda run: run["seed"])])
        for one in (file, other)
    )
    return form.format((own - others).mean(), half_width(own - others))


@page_function
def share_of_gain(file: str, of: str, name: str) -> str:
    """The gain of a measured value as a share of another result's, seed by seed, and half the 95 % interval's width."""
    own, others = (after - before for before, after in (_sides(read(one)["runs"], name) for one in (file, of)))
    shares = own / others
    return f"{shares.mean():.0%} ± {half_width(shares):.0%}"


@page_function
def mean(file: str, listed: str, path: str, form: str = "{:.2f}") -> str:
    """The mean of a number over the entries of a list of a results file; `listed` and `path` are dotted."""
    return form.format(np.mean([_at(entry, path) for entry in _at(read(file), listed)]))


@page_function
def drawing() -> str:
    """How well the playground's generator draws, before and after its last stage (`playground_facts.py`)."""
    told = _training()
    now, before = told["figures"], told["figures before wrong captions"]
    columns = {
        "through the autoencoder": now["autoencoder"],
        "before the last stage": before["guidance 1"],
        "... guidance 3": before["guidance 3"],
        "as shipped": now["guidance 1"],
        "... guidance 3 ": now["guidance 3"],
    }
    lines = [f"| | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    rows = {"facts right": "facts", "all facts right": "all_right"}
    rows |= {f"of {n}": f"by_fact.{n}" for n in ("shape", "color", "count", "relation", "background", "word")}
    for name, path in (rows | {"variety": "variety", "artefact": "artefact"}).items():
        outer, _, inner = path.rpartition(".")
        found = [(column[outer] if outer else column).get(inner) for column in columns.values()]
        cells = ["" if x is None else f"{x:.3f}" for x in found]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@page_function
def designs() -> str:
    """Designs of the playground's generator at equal CPU time (`scripts/trials/generator_designs.py`)."""
    told = _training()["designs"]["designs"]
    heads = ["error on unseen scenes", "facts right, guidance 1", "facts right, guidance 3"]
    lines = [f"| design | parameters | images in {next(iter(told.values()))['seconds']} s | {' | '.join(heads)} |"]
    lines += ["| --- " * (len(heads) + 3) + "|"]
    for name, row in told.items():
        cells = [f"{row['parameters'] / 1e6:.1f} M", f"{row['images']:,}", *(f"{row[key]:.3f}" for key in heads)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@page_function
def turbo() -> str:
    """The distilled sibling beside the generator (`playground_facts.py`), and a trained LoRA on both (nft.json)."""
    told = _training()["turbo"]
    lines = ["| | facts right | all facts right | variety | artefact |", "| --- | --- | --- | --- | --- |"]
    for name, row in told["figures"].items():
        cells = [f"{row[key]:.3f}" for key in ("facts", "all_right", "variety", "artefact")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    curves = [run["curve"] for run in read("nft.json")["runs"]]
    lines += ["", "| held-out reward, mean of three seeds | before | after NFT on the model |", "| --- | --- | --- |"]
    for name, key in (("the model", "eval/playground"), ("its turbo sibling", "eval/turbo/playground")):
        ends = [np.mean([curve[i][key] for curve in curves]) for i in (0, -1)]
        lines.append(f"| {name} | {ends[0]:.3f} | {ends[1]:.3f} |")
    return "\n".join(lines) + "\n"


@page_function
def planted_direction() -> str:
    """What D2-Align's direction does to the preference model's planted bias (`scripts/trials/planted_direction.py`)."""
    told = read("planted_direction.json")
    seeds = told["seeds"]
    ways = list(seeds[0]["corrected reward, by length"])
    length = np.mean([seed["length"] for seed in seeds])
    heads = [way.replace("times", "x the direction") for way in ways]
    lines = [
        f"| points for | plain reward | {' | '.join(heads)} |",
        "| --- " * (len(ways) + 2) + "|",
    ]
    for name, plain in told["plain reward"].items():
        means = [np.mean([seed["corrected reward, by length"][way][name] for seed in seeds]) for way in ways]
        lines.append(f"| {name} | {plain:.2f} | {' | '.join(f'{mean:.2f}' for mean in means)} |")
    cosines = {
        name: [seed["cosines"][name] for seed in seeds]
        for name in ("image planted", "image style striped", "image tone pale", "image style filled", "image tone dark")
    }
    lines += ["", "| axis of rendered pictures | cosine of the direction with it |", "| --- | --- |"]
    lines += [f"| {name.removeprefix('image ')} | {np.mean(found):+.2f} |" for name, found in cosines.items()]
    chance = told["deviation of a random direction's cosine"]
    told_by = f"`{told['command']}`: {len(seeds)} seeds, {told['prompts']} prompts; the learned length is {length:.2f}."
    return "\n".join(lines) + f"\n\n{told_by} A random direction's cosine has a deviation of {chance}.\n"


@page_function
def drift(file: str = "planted_drift.json") -> str:
    """Which styles and tones trained models draw where they are free (`scripts/trials/planted_drift.py`)."""
    told = read(file)
    keys = list(next(iter(told["methods"].values()))[0])
    liked = set(told["liked"].values())
    head = [f"{key} (liked)" if key in liked else key for key in keys]
    lines = [f"| trained by | {' | '.join(head)} |", "| --- " * (len(keys) + 1) + "|"]
    for label, seeds in told["methods"].items():
        lines.append(f"| {label} | {' | '.join(f'{np.mean([seed[key] for seed in seeds]):.2f}' for key in keys)} |")
    return "\n".join(lines) + "\n"


@page_function
def cosines(file: str) -> str:
    """How often a step went against one of the rewards (`scripts/figures/marble_cosines.py`)."""
    lines = ["| | measured steps | lowest cosine | mean of the lowest | steps against a reward |", "| --- " * 5 + "|"]
    for label, row in read(file).items():
        if isinstance(row, dict):
            lines.append(
                f"| {label} | {row['steps']:.0f} | {row['lowest']:+.2f} | {row['mean']:+.2f} | {row['conflicts']:.0%} |"
            )
    return "\n".join(lines) + "\n"


@page_function
def cost(file: str, *variants: str) -> str:
    """Speed of ways to balance K rewards against the weighted sum (`scripts/benchmarks/marble.py`)."""
    lines = [f"| rewards | {' | '.join(variants)} |", "| --- " * (len(variants) + 1) + "|"]
    for number, ways in read(file)["rewards"].items():
        cells = [f"{ways[name]['speed']:.2f}" if name in ways else "not run" for name in variants]
        lines.append(f"| {number} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@page_function
def mutations() -> str:
    """How many changes of the mathematics the tests noticed, sample by sample (`scripts/trials/mutations.py`)."""
    lines = ["| sample | changes tried | noticed | harmless | noticed of those that matter |", "| --- " * 5 + "|"]
    for name, sample in read("mutations.json").items():
        cells = f"{sample['tried']} | {sample['killed']} | {sample['harmless']} | {sample['share']:.1%}"
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines) + "\n"


@page_function
def floor() -> str:
    """The time of the package's LoRA path against plain diffusers and peft (`scripts/benchmarks/floor.py`)."""
    told = read("floor.json")
    lines = ["| rows of a micro-batch | phase | diffrl | the network without a LoRA |", "| --- | --- | --- | --- |"]
    for rows, phases in told["rows"].items():
        for name in ("sampling", "nft", "grpo", "crd"):
            phase = phases[name]
            lines.append(f"| {rows} | {name} | {phase['ratio']:.2f} | {phase['ratio without']:.2f} |")
    worst = max(phases["gradients"] for phases in told["rows"].values())
    told_by = f"`{told['command']}`, {told['device']}, torch {told['torch']}, {told['threads']} thread"
    memory = ", ".join(f"{phases['memory']['ratio']:.2f} ({rows} rows)" for rows, phases in told["rows"].items())
    said = f"gradients differ by at most {worst:.0e} of their norm. For the backward pass a forward keeps {memory}"
    return "\n".join(lines) + f"\n\n{told_by}; {said} of what the bare loop's does, with the merged weights.\n"


@page_function
def compiling() -> str:
    """What compiled blocks cost at the start and gain later (`scripts/benchmarks/compiling.py`)."""
    told = read("compiling.json")
    lines = ["| | seconds to compile | forward, step | epochs until it has paid | graphs, breaks |", "| --- " * 5 + "|"]
    for mode, own in told["modes"].items():
        if "graphs" in own:
            paid = own["epochs until it has paid"]
            breaks = sum(own["breaks"].values())
            speed = f"{own['speed of a forward']:.2f}, {own['speed of a step']:.2f}"
            cells = (own["seconds to compile"], speed, "never" if paid is None else paid, f"{own['graphs']}, {breaks}")
            lines.append(f"| {mode} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + f"\n\n`{told['command']}`, {told['device']}, torch {told['torch']}.\n"


@page_function
def options() -> str:
    """What each option gives beside the plain run (`scripts/benchmarks/options.py`)."""
    told = read("options.json")
    lines = ["| option | sampling | optimising | MiB of a training micro-batch, counted |", "| --- " * 4 + "|"]
    plain = f"{told['base']['training_micro_batch_mib']:g}"
    lines.append(f"| none | 1 | 1 | {plain} |")
    for name, own in told["options"].items():
        if "relative" in own:
            speeds = " | ".join(f"{own['relative'][phase]:.2f}" for phase in ("sampling", "optimising"))
            lines.append(f"| {name} | {speeds} | {own['training_micro_batch_mib']:g} |")
    return "\n".join(lines) + f"\n\n`{told['command']}`, {told['device']}, torch {told['torch']}.\n"


@page_function
def caches() -> str:
    """What caches of diffusers save in a rollout, and what they do to its rewards (`scripts/benchmarks/caches.py`)."""
    told, rewards = read("caches.json"), ("playground", "clip", "aesthetic")
    heads = [f"{name}: correlation in groups, mean" for name in rewards]
    lines = [f"| cache | speed | {' | '.join(heads)} |", "| --- " * (len(rewards) + 2) + "|"]
    for name, own in told["caches"].items():
        cells = [f"{own[key]['within']:.2f}, {own[key]['exact']:.3f} > {own[key]['cached']:.3f}" for key in rewards]
        lines.append(f"| {name} | {own['speed']:.2f} | {' | '.join(cells)} |")
    said = f"{told['images']} images, {told['steps']} steps, {told['machine']}"
    return "\n".join(lines) + f"\n\n`{told['command']}`, {said}.\n"


@page_function
def memory() -> str:
    """The counted memory of shipped recipes (`scripts/benchmarks/memory.py`)."""
    lines = [
        "| recipe | processes | sharded | GiB on each device | text encoders in main memory, GiB |",
        "| --- " * 5 + "|",
    ]
    for case in read("memory.json")["cases"]:
        words = f"{case['label']} (`{case['config']}`)"
        sharded = "FSDP2" if case["fsdp2"] else ""
        lines.append(
            f"| {words} | {case['processes']} | {sharded} | {case['total_gib']} | {case['text_encoders_gib']} |"
        )
    return "\n".join(lines) + "\n"


@page_function
def gpu_proof(file: str = "gpu_proof.json") -> str:
    """What `scripts/gpu_proof.py` found on a GPU; that nothing was measured yet where its file is not there."""
    found: dict[str, Any] = read(file) if (RESULTS / file).exists() else {"tiny": True}
    parts = {name: part for name, part in found.get("parts", {}).items() if part["status"] == "done"}
    if found["tiny"] or not parts:
        return "**Not measured**: nobody has run `scripts/gpu_proof.py` on a GPU and committed its figures yet.\n"
    keys = ("images_per_second_rollout", "rows_per_second_optimise", "share_of_bare_loop", "peak_gib", "counted_gib")
    lines = [f"| part | {' | '.join(key.replace('_', ' ') for key in keys)} |", "| --- " * (len(keys) + 1) + "|"]
    for name, part in parts.items():
        cells = [f"{part[key]:g}" if key in part else "" for key in keys]
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    gains = [
        f"| {name.split('/')[1]} | {', '.join(f'{key} {value:g}' for key, value in part['relative'].items())} |"
        for name, part in parts.items()
        if "relative" in part
    ]
    options = ["", "| option | beside the plain run |", "| --- | --- |", *gains] if gains else []
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in ("diffrl", "torch", "diffusers"))
    return "\n".join([*lines, *options]) + f"\n\nDevice: {found['machine']['gpu']}; {versions}.\n"


@page_function
def world(*files: str) -> str:
    """A note where results were measured on the playground's first world, before version 0.2."""
    if all(read(file).get("diffrl_version") == "0.1.0" for file in files):
        return (
            '!!! note "Measured on the first world"\n    These figures are from the playground of version 0.1, whose '
            "generator drew blobs for most shapes. They are kept because they compare methods under equal terms; the "
            "world of version 0.2 is another one, so do not compare across versions.\n"
        )
    return ""
