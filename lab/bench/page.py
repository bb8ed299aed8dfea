"""A benchmark's table as text, and its page: the table with standard errors, charts, images side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from diffrl.divgen.run import image_file
from diffrl.prompts import Prompt
from diffrl.records.disk import write_text
from diffrl.report.page import escape, figure, grid, page, picture, section, table
from diffrl.report.plots import Dots, dots

from .run import Result
from .table import Change, Key, Line

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
    return {name: sorted(lines, key=_order) if _numbers(lines) else lines for name, lines in found.items()}


def _numbers(lines: Sequence[str]) -> bool:
    return all(line.isdigit() for line in lines)


def _order(line: str) -> int:
    return int(line)


def _value(line: Line | Change | None, decimals: int, sign: str = "") -> str:
    if line is None:
        return "-"
    error = "" if line.error is None else f" +- {line.error:.{decimals}f}"
    return f"{line.value:{sign}.{decimals}f}{error}"


def as_text(result: Result) -> str:
    """The table for a terminal, at most 80 columns wide where the names allow it."""
    changes, decimals = result.changes(), result.bench.decimals
    head = [*result.lines, *(["change"] if changes else [])]
    rows = [[f"{result.bench.title}, {result.about['prompts']} prompts", *head]]
    for name, lines in _sections(result).items():
        rows.append([name, *[""] * len(head)])
        for line in lines:
            cells = [_value(one.get((name, line)), decimals) for one in result.lines.values()]
            cells += [_value(changes.get((name, line)), decimals, "+")] if changes else []
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
    parts = [_head(result), *_tables(result), _charts(result), _images(result, folder), _facts(result)]
    out = folder / PAGE
    write_text(out, page(f"{result.bench.title} · diffrl", "\n".join(parts)))
    return out


def _head(result: Result) -> str:
    bench, about = result.bench, result.about
    each, published = (
        f"{n} image{'s' * (n > 1)} of each" for n in (about["per_prompt"], about["official"]["per_prompt"])
    )
    drawn = f"{about['prompts']:,} prompts, {each}"
    official = about["official"]
    as_published = (about["prompts"], about["per_prompt"]) == (official["prompts"], official["per_prompt"])
    text = f"Not the official number: that is {official['prompts']:,} prompts with {published}."
    note = "" if as_published else f'<p class="warning">{escape(text)}</p>'
    left = "".join(f'<p class="warning">Left out: {escape(one)}.</p>' for one in result.left_out)
    judges = [
        f"<p>Judge <b>{escape(name)}</b>: the reward {escape(used['reward'])}"
        f"{escape(', ' + str(used['model'])) if used.get('model') else ''}; officially "
        f"{escape(bench.judges[name].official)}.</p>"
        for name, used in about["judges"].items()
        if name in bench.judges
    ]
    remarks = "".join(f"<p>{escape(one)}</p>" for one in bench.remarks)
    model = escape(about["model"]) + (f" and with the LoRA {escape(about['lora'])}" if about["lora"] else "")
    heading = f'<h1>{escape(bench.title)}</h1><p class="sub">{model}; {drawn}</p>'
    return f"<header>{heading}{note}{left}</header>{section('How it is judged', ''.join(judges) + remarks)}"


def _tables(result: Result) -> list[str]:
    changes, decimals = result.changes(), result.bench.decimals
    head = ["", *result.lines, *(["change"] if changes else []), "values"]
    parts: list[str] = []
    for name, lines in _sections(result).items():
        lower = name.partition(",")[0] in result.about["lower_is_better"]  # a section of a reward has its name first
        rows = []
        for line in lines:
            key = (name, line)
            known = [one.get(key) for one in result.lines.values()]
            count = next(one.count for one in known if one is not None)
            cells = [_cell(one, decimals) for one in known] + (
                [_changed(changes, key, decimals, lower)] if changes else []
            )
            rows.append([escape(line), *cells, f"{count:,}"])
        note = "After ±: one standard error, over prompts." if not parts else ""
        if changes and not parts:
            note += " Change: LoRA minus base on the same noise; in colour where its 95 % interval leaves 0 out."
        parts.append(section(name, table(rows, head, "numbers"), note))
    return parts


def _cell(line: Line | None, decimals: int) -> str:
    return _spans(_value(line, decimals))


def _spans(text: str) -> str:
    """A value and its error, which a narrow page may put below it, but not break."""
    value, _, error = text.replace(" +- ", " ± ").replace("-", "−").partition(" ")
    return f"<span>{escape(value)}</span>" + (f" <span>{escape(error)}</span>" if error else "")


def _changed(changes: dict[Key, Change], key: Key, decimals: int, lower: bool) -> str:
    gap = changes.get(key)
    if gap is None:
        return "-"
    kind = ("good" if (gap.value < 0) == lower else "bad") if gap.sure else "tag"
    return _spans(_value(gap, decimals, "+")).replace("<span>", f'<span class="{kind}">')


def _charts(result: Result) -> str:
    cards = []
    for name, lines in _sections(result).items():
        if not 1 < len(lines) <= ROWS:
            continue
        series = []
        for colour, one in zip(_COLOURS, result.lines.values(), strict=False):
            known = [one.get((name, line)) for line in lines]
            series.append(Dots([k.value if k else None for k in known], colour, [k.span if k else None for k in known]))
        legend = [(colour, "block", model) for colour, model in zip(_COLOURS, result.lines, strict=False)]
        cards.append(figure(name, dots(lines, series, "value", f"{name}: every line's value"), "", legend))
    body = f'<div class="grid" style="align-items: start">{"".join(cards)}</div>' if cards else ""
    return section("Charts", body, "Bars: 95 % intervals over prompts.")


def _images(result: Result, folder: Path) -> str:
    """The first image of prompts spread over all, of each model from the same noise."""
    texts, cards = result.texts, []
    for i in sorted({round(k * (len(texts) - 1) / (SHOWN - 1)) for k in range(SHOWN)}):
        cells = []
        for model in result.lines:
            path = image_file(folder / model, i, Prompt(texts[i]), 0)
            style = "display: block; max-width: 100%; height: auto; border-radius: 4px"
            cells.append(
                f'<figure style="margin: 0"><img {picture(path)} alt="{escape(texts[i])}, {model}" style="{style}">'
                f'<figcaption class="tag">{model}</figcaption></figure>'
            )
        row = f'<div style="display: flex; gap: 6px">{"".join(cells)}</div>'
        cards.append(
            f'<div class="card">{row}<p style="margin: 6px 0 0; font-size: 13.5px">{escape(texts[i])}</p></div>'
        )
    return section("Images", grid(cards, "tiles"), "The first image of prompts spread evenly over the benchmark.")


def _facts(result: Result) -> str:
    about, bench = result.about, result.bench
    heads = ("model", "lora", "merge", "seed", "per_prompt", "steps", "sampler", "guidance_scale", "resolution")
    rows = [[escape(key), escape(about[key])] for key in heads if about.get(key) is not None]
    for judge, used in about["judges"].items():
        rows.append([f"judge {escape(judge)}", escape(", ".join(f"{key}: {value}" for key, value in used.items()))])
    rows += [["files", f"{escape(bench.source)} ({escape(bench.licence)})"], ["paper", escape(bench.citation)]]
    rows.append(["diffrl", escape(about["diffrl_version"])])
    return section("Facts", table(rows))
