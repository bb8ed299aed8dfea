"""Of a run of several processes: who waited for whom."""

from __future__ import annotations

from statistics import fmean, mode

from diffrl.records.progress import PHASES
from diffrl.report.data import RunData
from diffrl.report.page import bar, table


def processes(run: RunData) -> str:
    """A mean epoch of each process on one time line, and who waited for whom; empty for a run of one process."""
    ranks = sum(key.endswith("/rollout") for key in run.last if key.startswith("seconds/process/"))
    keys = [[f"seconds/process/{rank}/{phase}" for phase in PHASES] for rank in range(ranks)]
    rows = [row for row in run.metrics if ranks and keys[-1][0] in row]  # a resume may have changed how many they are
    if not rows:
        return ""
    means = [[fmean(row[key] for row in rows) for key in keys_of] for keys_of in keys]
    longest = max(map(sum, means))
    colors = [("wait" if phase == "reduce" else phase) for phase in PHASES]
    lines = []
    for rank, own in enumerate(means):
        rows_of = zip(PHASES, colors, own, strict=True)
        parts = [(value / longest, color, f"{phase} {value:.2f} s") for phase, color, value in rows_of]
        lines.append([f"process {rank}", bar(parts), f"{sum(own):.1f} s"])
    # seconds until it has its images
    ready = [[sum(row[key] for key in keys_of[: PHASES.index("wait")]) for keys_of in keys] for row in rows]
    last = [each.index(max(each)) for each in ready]
    slowest = mode(last)
    waited = sum(phases[PHASES.index("wait")] for phases in means) / sum(map(sum, means))
    sentence = (
        "A mean epoch of each process, in its order: sampling, decoding, scoring, waiting for the others' images, "
        f"advantages, optimising, waiting in optimiser steps. Process {slowest} had its images last in "
        f"{last.count(slowest)} of {len(rows)} epochs; {waited:.1%} of all processes' time went into waiting for "
        "images."
    )
    return f'<p class="note">{sentence}</p>{table(lines, kind="facts lines")}'
