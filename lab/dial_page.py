"""The page of `diffrl dial`: every value over the strength and over the checkpoints, the healthy point, pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffrl.records.disk import write_text
from diffrl.records.progress import number
from diffrl.report.page import escape, figure, grid, page, section, strip, table
from diffrl.report.plots import Axis, Line, chart

WAYS = {
    "strength": ("strength of the LoRA (%)", "The newest LoRA, from nothing to one and a half times itself."),
    "checkpoints": ("epoch", "The LoRA of each checkpoint, at its full strength."),
}


def write_page(out: Path, result: Mapping[str, Any], prompts: Sequence[str]) -> Path:
    """Write `out/dial.html` from what `dial.json` holds and the pictures beside it; `prompts`: of the pictures."""
    points = result["points"]
    chosen = points[result["chosen"]]
    body = f"<header><h1>{escape(result['run'])}: {escape(chosen['title'])}</h1>"
    body += f'<p class="sub">{escape(sentence(result))}</p></header>'
    for way, (label, note) in WAYS.items():
        on = [i for i, point in enumerate(points) if i == 0 or point["way"] == way]
        if way == "checkpoints":  # which the newest one ends
            on += [i for i, point in enumerate(points) if point["way"] == "strength" and point["strength"] == 1]
        note += " Thin lines: two standard errors over prompts. Dashed: the healthy point."
        body += section(
            f"Along the {way}", _charts(result, sorted(on, key=lambda i: _place(points[i], way)), way, label), note
        )
    body += section("On other prompts", _judged(result), _NOTE)
    rows = []
    for j, prompt in enumerate(prompts):
        files = [(out / "pictures" / f"{i:02d}-{j:02d}.png", point["title"]) for i, point in enumerate(points)]
        rows.append(strip(prompt, [(file, title) for file, title in files if file.is_file()]))
    body += section("Pictures", grid(rows, "strips"), "The same prompt and noise at every point.")
    body += section("Alarms", _alarms(points), f"The rule: {result['rule']}.")
    target = out / "dial.html"
    write_text(target, page(f"{result['run']} · dial · diffrl", body))
    return target


_NOTE = (
    "Chosen on other prompts than these, and judged here once. Difference: the healthy point less the last checkpoint, "
    "with its 95 % interval, paired over prompts."
)


def sentence(result: Mapping[str, Any]) -> str:
    """What came out, in one sentence."""
    chosen, held = result["points"][result["chosen"]], result["held_out"]
    if chosen["way"] == "strength" and chosen["strength"] == 1:
        return "The last checkpoint is the healthy point: no alarm on the way, and nothing gains more."
    verdict = "beats" if held["better"] > held["worse"] else "does not beat"
    return (
        f"{chosen['title']} {verdict} the last checkpoint on held-out values: {held['better']} are better and "
        f"{held['worse']} worse beyond their 95 % intervals; {held['difference']:+.2f} +- {held['error']:.2f} standard "
        "deviations in the mean."
    )


def _place(point: Mapping[str, Any], way: str) -> float:
    if way == "strength":
        return 100 * float(point["strength"])
    return 0.0 if point["strength"] == 0 else float(point["epoch"])


def _charts(result: Mapping[str, Any], on: Sequence[int], way: str, label: str) -> str:
    points, cards = result["points"], []
    if len(on) < 2:
        return ""
    names = [*result["trained"], *(name for name in points[0]["values"] if name not in result["trained"])]
    for i, name in enumerate(names):
        known = [k for k in on if name in points[k]["values"]]
        xs = [_place(points[k], way) for k in known]
        ys = [points[k]["values"][name]["mean"] for k in known]
        color = f"c{i % 7}"
        lines = [Line(xs, ys, color, name, "dots")]
        errors = [points[k]["values"][name]["error"] for k in known]
        if all(error is not None for error in errors):
            for sign in (-2, 2):
                lines.append(Line(xs, [y + sign * e for y, e in zip(ys, errors, strict=True)], color, "", "faint"))
        if (best := result["chosen"]) in known:
            reach = [y for line in lines for y in line.ys]
            lines.append(Line([_place(points[best], way)] * 2, [min(reach), max(reach)], "warn", kind="dashed"))
        tags = ["trained"] * (name in result["trained"]) + ["lower is better"] * (name in result["lower_is_better"])
        axis = Axis(x=label, y="mean over prompts", description=f"{name} against the {way}")
        cards.append(figure(name, chart(lines, axis), ", ".join(tags)))
    return grid(cards)


def _judged(result: Mapping[str, Any]) -> str:
    rows = []
    for row in result["judged"]:
        change = number(row["point"] - row["last"])
        if row["low"] is not None:
            change += f" [{number(row['low'])}, {number(row['high'])}]"
        verdict = {True: "better", False: "worse", None: ""}[row["better"]]
        cells = [row["name"], row["role"], *(number(row[key]) for key in ("base", "last", "point")), change, verdict]
        rows.append([escape(cell) for cell in cells])
    return table(rows, ["", "", "base model", "last checkpoint", "healthy point", "difference", ""], "numbers")


def _alarms(points: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [escape(p["title"]), escape(number(p["gain"])), escape("; ".join(p["alarms"].values()) or "none")]
        for p in points
    ]
    return table(rows, ["", "gain", "alarms"], "numbers")
