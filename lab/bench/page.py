"""A benchmark's table as text, and its page: the table with standard errors, charts, images side by side."""

from __future__ import annotations

from pathlib import Path

from diffrl.divgen.run import image_file
from diffrl.prompts import Prompt
from diffrl.report.built_page import Page
from diffrl.report.dot_plots import Dots, dots
from diffrl.report.page import Markup, figure
from diffrl.report.sections import pick

from .run import CHANGE, Result
from .table import Line

PAGE = "report.html"
SHOWN = 24  # prompts with images
ROWS = 30  # lines of one chart
_COLOURS = ("c0", "c1")


def _sections(result: Result) -> dict[str, list[str]]:
    """{section: its lines} of all models, the mean of everything first."""
    keys = list(dict.fromkeys(key for lines in result.lines.values() for key in lines))
    keys.sort(key=lambda key: key[0] != "Overall")  # stable
    found: dict[str, list[str]] = {}
    for name, line in keys:
        found.setdefault(name, []).append(line)
    return {name: sorted(lines, key=int) if all(map(str.isdigit, lines)) else lines for name, lines in found.items()}


def _value(line: Line | None, decimals: int, column: str) -> str:
    if line is None:
        return "-"
    error = "" if line.error is None else f" +- {line.error:.{decimals}f}"
    return f"{line.value:{'+' if column == CHANGE else ''}.{decimals}f}{error}"


def as_text(result: Result) -> str:
    """The table for a terminal, at most 80 columns wide where the names allow it."""
    columns, decimals = result.columns(), result.bench.decimals
    rows = [[f"{result.bench.title}, {result.about['prompts']} prompts", *columns]]
    for name, lines in _sections(result).items():
        rows.append([name, *[""] * len(columns)])
        for line in lines:
            cells = [_value(known.get((name, line)), decimals, column) for column, known in columns.items()]
            rows.append([f"  {line}", *cells])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    text += [f"left out: {one}" for one in result.left_out]
    if minutes := result.about.get("whole"):
        parts = ", ".join(f"{name} {value:,.1f} min" for name, value in minutes.items())
        text.append(f"all prompts at this call's pace, loading included: {parts}")
    return "\n".join(line.rstrip() for line in text)


def write_bench_report(result: Result, folder: Path) -> Path:
    """Write one self-contained page to `folder`, where the images lie, and return its path."""
    page = Page(result.bench.title)
    _head(page, result)
    _tables(page, result)
    _charts(page.section("Charts", "Bars: 95 % intervals over prompts."), result)
    _images(page.section("Images", "The first image of prompts spread evenly over the benchmark."), result, folder)
    _facts(page.section("Facts"), result)
    return page.write(folder / PAGE)


def _head(page: Page, result: Result) -> None:
    bench, about, official = result.bench, result.about, result.about["official"]
    each, published = (f"{one['per_prompt']} image{'s' * (one['per_prompt'] > 1)} of each" for one in (about, official))
    model = about["model"] + (f" and with the LoRA {about['lora']}" if about["lora"] else "")
    page.lead(f"{model}; {about['prompts']:,} prompts, {each}", "sub")
    if (about["prompts"], about["per_prompt"]) != (official["prompts"], official["per_prompt"]):
        text = f"Not the official number: that is {official['prompts']:,} prompts with {published}."
        page.lead(text, "warning")
    for one in result.left_out:
        page.lead(f"Left out: {one}.", "warning")
    page.section("How it is judged")
    for name, used in about["judges"].items():
        if name in bench.judges:
            by = f"the reward {used['reward']}{', ' + str(used['model']) if used.get('model') else ''}"
            page.lead(Markup("Judge <b>{}</b>: {}; officially {}.").format(name, by, bench.judges[name].official))
    for one in bench.remarks:
        page.lead(one)


def _tables(page: Page, result: Result) -> None:
    columns, decimals = result.columns(), result.bench.decimals
    note = "After ±: one standard error, over prompts."
    if CHANGE in columns:
        note += " Change: LoRA minus base on the same noise; in colour where its 95 % interval leaves 0 out."
    for name, lines in _sections(result).items():
        lower = name.partition(",")[0] in result.about["lower_is_better"]  # a section of a reward has its name first
        rows = []
        for line in lines:
            known = {column: values.get((name, line)) for column, values in columns.items()}
            count = next(one.count for one in known.values() if one is not None)
            rows.append([line, *(_cell(one, decimals, column, lower) for column, one in known.items()), f"{count:,}"])
        page.section(name, note).table(rows, ["", *columns, "values"])
        note = ""


def _cell(line: Line | None, decimals: int, column: str, lower: bool) -> Markup:
    """A value and its error, which a narrow page may put below it, but not break."""
    kind = ""
    if column == CHANGE and line is not None:
        kind = ("good" if (line.value < 0) == lower else "bad") if line.sure else "tag"
    value, _, error = _value(line, decimals, column).replace(" +- ", " ± ").replace("-", "−").partition(" ")
    spans = [Markup('<span class="{}">{}</span>').format(kind, part) for part in (value, error) if part]
    return Markup(" ").join(spans)


def _charts(page: Page, result: Result) -> None:
    for name, lines in _sections(result).items():
        if not 1 < len(lines) <= ROWS:
            continue
        series = []
        for colour, one in zip(_COLOURS, result.lines.values(), strict=False):
            known = [one.get((name, line)) for line in lines]
            spans = [k.span if k else None for k in known]
            series.append(Dots([k.value if k else None for k in known], colour, spans))
        legend = [(colour, "block", model) for colour, model in zip(_COLOURS, result.lines, strict=False)]
        page.add(figure(name, dots(lines, series, "value", f"{name}: every line's value"), "", legend), "loose")


def _images(page: Page, result: Result, folder: Path) -> None:
    """The first image of prompts spread over all, of each model from the same noise."""
    texts = result.texts
    for i in pick(range(len(texts)), SHOWN):
        files = [(image_file(folder / model, i, Prompt(texts[i]), 0), model) for model in result.lines]
        page.strip(texts[i], files)


def _facts(page: Page, result: Result) -> None:
    about, bench = result.about, result.bench
    heads = ("model", "lora", "merge", "seed", "per_prompt", "steps", "sampler", "guidance_scale", "resolution")
    rows = [[key, about[key]] for key in heads if about.get(key) is not None]
    for judge, used in about["judges"].items():
        rows.append([f"judge {judge}", ", ".join(f"{key}: {value}" for key, value in used.items())])
    rows += [["files", f"{bench.source} ({bench.licence})"], ["paper", bench.citation]]
    page.table([*rows, ["diffrl", about["diffrl_version"]]], kind="facts")
