"""What the pages of several runs have: a value's chart, and images of the same prompt and seed."""

from __future__ import annotations

from collections.abc import Sequence

from diffrl.report.built_page import Page
from diffrl.report.data import UNITS, RunData, Sample
from diffrl.report.page import grid, section, strip
from diffrl.report.plots import Axis, Line

_PROMPTS = 16  # rows of images at most


def chart(page: Page, name: str, lines: Sequence[Line], runs: Sequence[RunData], label: str, text: str) -> None:
    """A held-out value of several runs against "images generated" or "training time"."""
    axis = Axis(x=label, y=UNITS.get(name, "mean score"), time=label == "training time", description=text)
    page.chart(name, lines, axis, "lower is better" if any(name in run.lower for run in runs) else "")


def images(runs: Sequence[RunData]) -> str:
    """For every prompt and seed that two runs share: the first run's first image, then every run's last."""
    ends = [_first_and_last(run) for run in runs]
    shared = [key for key in dict.fromkeys(key for end in ends for key in end) if sum(key in end for end in ends) > 1]
    rows = []
    for key in shared[:_PROMPTS]:
        first = next(end[key][0] for end in ends if key in end)
        images = [(first.path, "untrained" if first.epoch == 0 else f"epoch {first.epoch}")]
        for run, end in zip(runs, ends, strict=True):
            if key in end:
                images.append((end[key][1].path, f"{run.name}, epoch {end[key][1].epoch}"))
        rows.append(strip(key[0], images, key[1]))
    return section(
        "Samples", grid(rows, "strips"), "The same prompt and seed: at the start, and the last image of every run."
    )


def _first_and_last(run: RunData) -> dict[tuple[str, str], tuple[Sample, Sample]]:
    samples: dict[tuple[str, str], tuple[Sample, Sample]] = {}
    for sample in run.samples:  # oldest first
        key = (sample.prompt, sample.seed)
        samples[key] = (samples[key][0] if key in samples else sample, sample)
    return samples
