"""Figures inside of the pages' sentences: which they are stands in `sentences.yaml`, a page's own text has them.

    python -m experiments.figures.sentences         # exit code 1 and what a page should say and does not

An entry is a function of this module and its words, below a page of docs/: what it gives must stand in the page.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import yaml

from experiments.figures.results_table import half_width, sides
from experiments.figures.tables import ROOT, read


def value(file: str, path: str, form: str = "{}") -> str:
    """One number of a results file; `path` is dotted."""
    return form.format(_at(read(file), path))


def mean(file: str, listed: str, path: str, form: str = "{:.2f}") -> str:
    """The mean of a number over the entries of a list of a results file; `listed` and `path` are dotted."""
    return form.format(np.mean([_at(entry, path) for entry in _at(read(file), listed)]))


def _at(value: Any, path: str) -> Any:
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def gain(file: str, name: str) -> str:
    """`base → trained` of a measured value, mean over the seeds, with half the width of the gain's 95 % interval."""
    before, after = sides(read(file)["runs"], name)
    spread = f" ± {half_width(after - before):.3f}" if len(before) > 1 else ""
    return f"{before.mean():.3f} → {after.mean():.3f}{spread}"


def difference(file: str, other: str, name: str, form: str = "{:+.3f} ± {:.3f}") -> str:
    """How far two results end from each other, seed by seed, and half the 95 % interval's width.

    `base` in the place of one of them is where the other began.
    """
    runs = {one: sorted(read(one)["runs"], key=lambda run: run["seed"]) for one in (file, other) if one != "base"}
    began = sides(next(iter(runs.values())), name)[0]
    ends = [sides(runs[one], name)[1] if one != "base" else began for one in (file, other)]
    return form.format((ends[0] - ends[1]).mean(), half_width(ends[0] - ends[1]))


def ahead(file: str, other: str, name: str) -> str:
    """`difference` without a sign, for a sentence that says which is ahead."""
    return difference(file, other, name, "{:.3f} ± {:.3f}")


def end(file: str, name: str, form: str = "{:.3f} ± {:.3f}") -> str:
    """A measured value after training, mean over the seeds, and half the 95 % interval's width."""
    after = sides(read(file)["runs"], name)[1]
    return form.format(after.mean(), half_width(after))


def kept(file: str, name: str, form: str = "{:.2f} ± {:.2f}") -> str:
    """The share of a measured value that training left, mean over the seeds, and half the 95 % interval's width."""
    before, after = sides(read(file)["runs"], name)
    return form.format((after / before).mean(), half_width(after / before))


def share_of_gain(file: str, of: str, name: str) -> str:
    """The gain of a measured value as a share of another result's, seed by seed, and half the 95 % interval's width."""
    gains = [after - before for before, after in (sides(read(one)["runs"], name) for one in (file, of))]
    shares = gains[0] / gains[1]
    return f"{shares.mean():.0%} ± {half_width(shares):.0%}"


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


FUNCTIONS: dict[str, Callable[..., str]] = {
    each.__name__: each for each in (value, mean, gain, difference, ahead, end, kept, share_of_gain, together)
}


def missing() -> list[str]:
    """What pages should say and do not, a line each."""
    lines = []
    listed = yaml.safe_load(Path(__file__).with_name("sentences.yaml").read_text(encoding="utf-8"))
    for page, entries in listed.items():
        text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
        for entry in entries:
            name, *words = shlex.split(entry)
            figure = FUNCTIONS[name](*words)
            if figure not in text:
                lines.append(f'docs/{page}: "{figure}" is not in it ({entry})')
    return lines


if __name__ == "__main__":
    raise SystemExit("\n".join(missing()) or 0)
