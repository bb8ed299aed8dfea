"""The page of `diffrl dial`: every value over the strength and over the checkpoints, the healthy point, pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffrl.records.progress import number
from diffrl.report.page import Page
from diffrl.report.plots import Axis, Line

WAYS = {
    "strength": ("strength of the LoRA (%)", "The newest LoRA, from nothing to one and a half times itself."),
    "checkpoints": ("epoch", "The LoRA of each checkpoint, at its full strength."),
}


def write_page(out: Path, result: Mapping[str, Any], prompts: Sequence[str]) -> Path:
    """Write `out/dial.html` from what `dial.json` holds and the pictures beside it; `prompts`: of the pictures."""
    points = result["points"]
    chosen = points[result["chosen"]]
    page = Page(f"{result['run']} · dial", f"{result['run']}: {chosen['title']}").lead(sentence(result), "sub")
    for way, (label, note) in WAYS.items():
        on = [i for i, point in enumerate(points) if i == 0 or point["way"] == way]
        if way == "checkpoints":  # which the newest one ends
            on += [i for i, point in enumerate(points) if point["way"] == "strength" and point["strength"] == 1]
        page.section(
            f"Along the {way}", f"{note} Thin lines: two standard errors over prompts. Dashed: the healthy point."
        )
        _charts(page, result, sorted(on, key=lambda i: _place(points[i], way)), way, label)
    head = ["", "", "base model", "last checkpoint", "healthy point", "difference", ""]
    page.section("On other prompts", _NOTE).table([_judged(row) for row in result["judged"]], head)
    page.section("Pictures", "The same prompt and noise at every point.")
    for j, prompt in enumerate(prompts):
        files = [(out / "pictures" / f"{i:02d}-{j:02d}.png", point["title"]) for i, point in enumerate(points)]
        page.strip(prompt, [(file, title) for file, title in files if file.is_file()])
    rows = [[p["title"], number(p["gain"]), "; ".join(p["alarms"].values()) or "none"] for p in points]
    page.section("Alarms", f"The rule: {result['rule']}.").table(rows, ["", "gain", "alarms"])
    return page.write(out / "dial.html")


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


def _charts(page: Page, result: Mapping[str, Any], on: Sequence[int], way: str, label: str) -> None:
    points = result["points"]
    names = dict.fromkeys([*result["trained"], *points[0]["values"]])
    for i, name in enumerate(names if len(on) > 1 else ()):
        known = [k for k in on if name in points[k]["values"]]
        xs = [_place(points[k], way) for k in known]
        ys = [points[k]["values"][name]["mean"] for k in known]
        color = f"c{i % 7}"
        lines = [Line(xs, ys, color, kind="dots")]
        errors = [points[k]["values"][name]["error"] for k in known]
        if all(error is not None for error in errors):
            for sign in (-2, 2):
                lines.append(Line(xs, [y + sign * e for y, e in zip(ys, errors, strict=True)], color, kind="faint"))
        if (best := result["chosen"]) in known:
            reach = [y for line in lines for y in line.ys]
            lines.append(Line([_place(points[best], way)] * 2, [min(reach), max(reach)], "warn", kind="dashed"))
        tags = ["trained"] * (name in result["trained"]) + ["lower is better"] * (name in result["lower_is_better"])
        axis = Axis(x=label, y="mean over prompts", description=f"{name} against the {way}")
        page.chart(name, lines, axis, ", ".join(tags))


def _judged(row: Mapping[str, Any]) -> list[str]:
    change = number(row["point"] - row["last"])
    if row["low"] is not None:
        change += f" [{number(row['low'])}, {number(row['high'])}]"
    verdict = {True: "better", False: "worse", None: ""}[row["better"]]
    return [row["name"], row["role"], *(number(row[key]) for key in ("base", "last", "point")), change, verdict]
