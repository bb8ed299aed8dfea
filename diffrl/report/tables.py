"""Groups of runs as a table for a paper or a page: Markdown, LaTeX (booktabs), or plain text for a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from diffrl.records.progress import count, duration
from diffrl.report.groups import Difference, Group, Value, best, differences, drawn_apart, names_of

BEFORE = "before training"
SAME = 1e-4  # between evaluations of the same model on another number of threads
_LATEX = str.maketrans(
    {c: f"\\{c}" for c in "_%&#${}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)


def as_file(groups: Sequence[Group], suffix: str) -> str:
    """The groups' values, and their differences from the first, as LaTeX (".tex") or Markdown."""
    return _latex(groups) if suffix == ".tex" else _markdown(groups)


def notes(groups: Sequence[Group]) -> list[str]:
    """What the numbers of the tables are, a sentence each."""
    seeds = sorted({len(one.runs) for one in groups})
    many = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    lines = [
        f"Means over {many} seed{'s' * (seeds[-1] > 1)} on held-out prompts at the last evaluation, ± half the 95 % "
        "interval (Student's t over seeds).",
        "Bold: significantly better than every other (disjoint 95 % intervals).",
    ]
    if len(groups) > 1:
        lines.append(
            f"Differences from {groups[0].name} are paired by seed; p: paired t-test over the prompts, each prompt's "
            "difference being its mean over the seeds both have, from the same noise, corrected by Holm for the groups."
        )
    lines += [f"{one.name}: other prompts or another model than {groups[0].name}, so no difference is given."
              for one in groups[1:] if not one.pairs_with(groups[0])]  # fmt: skip
    return lines + drawn_apart([one.first for one in groups])


def cells(groups: Sequence[Group]) -> tuple[list[str], list[list[str]], list[list[bool]]]:
    """(heads, rows, which cells are bold) of the table of values; what stands before training comes first."""
    names = names_of(groups)
    heads = ["run", "seeds", "images", "time", *(_headed(groups, name) for name in names)]
    winners = {name: best(groups, name) for name in names}
    rows = [
        [BEFORE if i == 0 else f"{BEFORE}: {one.name}", "", "0", "", *(shown(one.value(name, first)) for name in names)]
        for i, one in enumerate(groups)
        for first in one.epochs[:1]
        if i == 0 or not _begins_alike(one, groups[0], names)
    ]
    bold = [[False] * len(heads) for _ in rows]
    for one in groups:
        spent = one.seconds(one.epoch)
        facts = [one.name, str(len(one.runs)), count(_images(one)), "-" if spent is None else duration(spent.mean)]
        rows.append([*facts, *(shown(one.value(name)) for name in names)])
        bold.append([False] * len(facts) + [winners[name] is one for name in names])
    return heads, rows, bold


def _begins_alike(one: Group, other: Group, names: Sequence[str]) -> bool:
    """Do two groups begin with the same model, as far as the seeds and values that both have show?"""
    for name in names:
        ours, theirs = (each.at(f"eval/{name}", each.epochs[0]) for each in (one, other))
        if any(abs(ours[seed] - theirs[seed]) > SAME for seed in ours if seed in theirs):
            return False
    return True


def differing(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    """(heads, rows) of the table of differences from the first group; no rows with one group."""
    table = differences(groups)
    heads = [f"minus {groups[0].name}", *(_headed(groups, name) for name in table)]
    return heads, [[one.name, *(_differs(table[name][i]) for name in table)] for i, one in enumerate(groups[1:])]


def changes(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    """(heads, rows) of what each group changed since before training."""
    names = names_of(groups)
    heads = ["change", *(_headed(groups, name) for name in names)]
    return heads, [[one.name, *(_differs(one.gain(name)) for name in names)] for one in groups]


def as_text(groups: Sequence[Group]) -> str:
    """For the terminal: a line for each group and value."""
    width = max(len(one.name) for one in groups)
    lines = []
    for name in names_of(groups):
        lines.append(f"{name}:")
        lines += [f"  {one.name:<{width}}  {shown(one.value(name))}, {_differs(one.gain(name))}" for one in groups]
    return "\n".join(lines)


def shown(value: Value | None) -> str:
    """`0.612 ± 0.013`; without the interval where there is one seed."""
    if value is None:
        return "-"
    return f"{value.mean:.3f}" if value.half is None else f"{value.mean:.3f} ± {value.half:.3f}"


def _differs(one: Difference | None) -> str:
    if one is None:
        return "-"
    text = f"{one.value.mean:+.3f}" + ("" if one.value.half is None else f" ± {one.value.half:.3f}")
    if one.p is None:
        return text
    return f"{text} (p < 1e-6)" if one.p < 1e-6 else f"{text} (p = {one.p:.2g})"


def _headed(groups: Sequence[Group], name: str) -> str:
    return f"{name} (lower is better)" if any(name in one.first.lower for one in groups) else name


def _images(one: Group) -> float | None:
    return next((row.get("samples") for row in one.first.metrics if row["epoch"] == one.epoch), None)


def _markdown(groups: Sequence[Group]) -> str:
    heads, rows, bold = cells(groups)
    parts = [pipes(heads, marked(rows, bold, "**{}**".format))]
    if len(groups) > 1:
        parts.append(pipes(*differing(groups)))
    return "\n\n".join([*parts, "\n".join(notes(groups))]) + "\n"


def marked(
    rows: Sequence[Sequence[str]], bold: Sequence[Sequence[bool]], mark: Callable[[str], str]
) -> list[list[str]]:
    """The rows, with `mark` around the cells that are bold."""
    return [
        [mark(cell) if is_bold else cell for cell, is_bold in zip(*both, strict=True)]
        for both in zip(rows, bold, strict=True)
    ]


def pipes(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def _latex(groups: Sequence[Group]) -> str:
    """Tables to \\input; the preamble needs \\usepackage{booktabs}."""
    heads, rows, bold = cells(groups)
    values = marked([[tex(cell) for cell in row] for row in rows], bold, r"\textbf{{{}}}".format)
    parts = [f"% {note}" for note in notes(groups)] + [r"% \usepackage{booktabs}", tabular(heads, values, after=1)]
    if len(groups) > 1:
        more, changes = differing(groups)
        parts += ["", tabular(more, [[tex(cell) for cell in row] for row in changes])]
    return "\n".join(parts) + "\n"


def tabular(heads: Sequence[str], rows: Sequence[Sequence[str]], after: int = 0) -> str:
    """A LaTeX table (booktabs) of cells that are LaTeX. `after`: a line below so many rows, if any."""
    lines = [" & ".join(row) + r" \\" for row in rows]
    if after:
        lines.insert(after, r"\midrule")
    columns = "l" + "r" * (len(heads) - 1)
    top = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", " & ".join(map(tex, heads)) + r" \\", r"\midrule"]
    return "\n".join([*top, *lines, r"\bottomrule", r"\end{tabular}"])


def tex(text: str) -> str:
    """Text as LaTeX."""
    signed = re.sub(r"(?<!\S)-(?=\d)", "$-$", text.translate(_LATEX))
    return signed.replace(" ± ", r" $\pm$ ").replace("<", "$<$")
