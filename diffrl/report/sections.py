"""The sections of a run's report: each takes the run and gives HTML, or nothing when the run has no such data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import yaml

from diffrl.additions.verdict import Change, places
from diffrl.config.schema import method_of
from diffrl.records.lock import renewed
from diffrl.records.progress import PARTS, duration, number
from diffrl.report.data import UNITS, RunData, overlaps, warnings_of
from diffrl.report.page import Markup, bar, escape, figure, grid, legend, section, strip, table, tile
from diffrl.report.page import curves as curves_of
from diffrl.report.plots import Axis, Line, spans_decades, stack

T = TypeVar("T")
_CODE = Markup("<code>{}</code>")
STRIP = 9  # images of one prompt at most: the first, the last and some between
MOST_SCORES = 3  # under a sample
KNOWN = {
    "loss": ("loss of the objective", "loss"),
    "kl": ("KL to the reference model", "KL divergence"),
    "grad_norm": ("gradient norm before clipping", "norm"),
}
TITLES = {
    "eval/saturation/std": "saturation: spread over the held-out images",
    "lr": "learning rate",
}  # others: their keys


def headline(run: RunData) -> str:
    """Name, what improved by how much, and the warnings."""
    last, config = run.last, run.config
    title = method_of(config).replace("+", " + ")
    parts = [f"{title} on {config.get('model', 'a model')}" if title else "", f"{last['epoch']} epochs"]
    if (planned := config.get("epochs")) and last["epoch"] < planned:
        parts[1] = f"{'running' if renewed(run.folder) else 'stopped'}: {last['epoch']} of {planned} epochs"
    parts += [f"{last.get('samples') or 0:,} images", f"{duration(run.elapsed())} of training and evaluation"]
    heading = Markup('<h1>{}</h1><p class="sub">{}</p>').format(run.name, " · ".join(part for part in parts if part))
    tagged = [*((name, "trained") for name in run.trained), *((name, "watched") for name in run.watched)]
    tiles = [_tile(run, name, tag) for name, tag in tagged]
    alarms = "".join(f'<p class="warning">{escape(text)}</p>' for text in warnings_of(run))
    return f"<header>{heading}{_verdict(run)}{alarms}</header>{grid(tiles, 'tiles')}"


def curves(run: RunData) -> str:
    """One chart for each reward and watched value, and one for diversity."""
    cards = []
    for name in [*run.trained, *run.watched]:
        student, _, metric = name.rpartition("/")
        beside = student in run.students and metric in (*run.trained, *run.watched)  # drawn in that one's chart
        if name != "diversity" and not beside:
            cards.append(_value_chart(run, name))
    cards.append(_value_chart(run, "diversity"))
    note = "Each value has its own axis. Lines with dots: means over the held-out prompts, with fixed seeds. "
    note += "Thin lines: means over the images that the epoch was trained on. "
    note += "Diversity, a distance of features, can also fall because mistakes go away: read it beside the scores"
    note += ", and variety, which counts only what the prompts leave free." if run.series("eval/variety")[0] else "."
    if run.base != "full":
        note += f" The images are of the model in {run.base}, but for those of students."
    return section("Rewards and watched values", grid(cards), note)


def samples(run: RunData) -> str:
    """A row of images for each fixed prompt and seed."""
    epochs = pick(sorted({sample.epoch for sample in run.samples}), STRIP)
    rows: dict[tuple[int, str, str], list] = {}
    for sample in run.samples:
        if sample.epoch in epochs:
            caption = "untrained" if sample.epoch == 0 else f"epoch {sample.epoch}"
            shown = [(name, sample.scores[name]) for name in run.trained if name in sample.scores][:MOST_SCORES]
            caption += "".join(
                f" · {name if len(shown) > 1 else ''} {value:.3g}".replace("  ", " ") for name, value in shown
            )
            rows.setdefault((sample.index, sample.prompt, sample.seed), []).append((sample.path, caption))
    body = "".join(strip(prompt, images, seed) for (_, prompt, seed), images in sorted(rows.items()))
    note = "Each row is one held-out prompt with one seed; the numbers are its scores by the trained rewards."
    if run.base != "full":
        note += f" Drawn over the model's weights in {run.base}."
    return section("Samples over time", body, note)


def optimisation(run: RunData) -> str:
    """Loss, KL, gradient norm, and how far the scores of an epoch are apart."""
    cards = [metric_chart(run, key, *labels) for key, labels in KNOWN.items()]
    spread = [(name, *run.series(f"reward/{name}/std")) for name in run.trained]
    lines = [Line(xs, ys, run.color(name), name) for name, xs, ys in spread if len(xs) > 1]
    if lines:
        axis = Axis(y="standard deviation", floor=0, description="Standard deviation of the rewards")
        cards.append(curves_of("spread of scores", lines, axis, "of an epoch's images"))
    note = (
        "Where the spread of scores goes to 0, every image of a prompt scores the same, and nothing is left to learn."
    )
    return section("Optimisation", grid(cards), note if lines else "")


def others(run: RunData) -> str:
    """Every metric that no section before has drawn, so that nothing logged stays unseen."""
    aside = {"epoch", "step", "samples", *run.logged("seconds")}
    left = [key for key in run.logged() if key not in run.used | aside]
    return section("Other metrics", grid([metric_chart(run, key, TITLES.get(key, key), "value") for key in left]))


def time_split(run: RunData) -> str:
    """Where the seconds went: over the whole run, and epoch by epoch."""
    shares = {part: value for part, value in run.shares().items() if value > 0}
    total = sum(shares.values())
    if not total:
        return ""
    keys = [(part, "block", f"{part} {value / total:.0%} ({duration(value)})") for part, value in shares.items()]
    parts_of_it = [(value / total, part, part) for part, value in shares.items()]
    text = f'{bar(parts_of_it, "Shares of the time")}<p class="legend">{legend(keys)}</p>'
    if any(key.startswith("seconds/process/") for key in run.last):  # of several
        from diffrl.report.processes import processes

        text += processes(run)
    rows = [row for row in run.metrics if row.get("seconds") is not None]
    overhead, seconds = sum(run.series("seconds/overhead")[1]), sum(run.series("seconds")[1])
    note = "What lies between the epochs (evaluation, checkpoint, texts) counts in the bar, not in the chart."
    if overhead:
        note += (
            f" The loop itself, beside model, autoencoder and rewards, took {overhead / seconds:.1%} of the training."
        )
    if len(rows) > 1:
        parts = {part: [row.get(f"seconds/{part}") or 0.0 for row in rows] for part in PARTS if shares.get(part)}
        sums = [sum(values) for values in zip(*parts.values(), strict=True)]
        parts["other"] = [max(row["seconds"] - done, 0.0) for row, done in zip(rows, sums, strict=True)]
        axis = Axis(x="epoch", y="seconds", floor=0, description="Seconds of each epoch by part")
        epochs = [float(row["epoch"]) for row in rows]
        keys = [(part, "block", part) for part in parts]
        text += grid([figure("seconds per epoch", stack(epochs, parts, axis), legend=keys)])
    return section("Time", text, note)


def facts(run: RunData) -> str:
    """Command, versions, machine, the size of the run and the whole config."""
    rows = []
    if run.starts:
        last = run.starts[-1]
        shown = ("command", "started", "machine")
        rows += [[key, _CODE.format(last[key])] for key in shown if key in last]
        versions = ", ".join(f"{name} {value}" for name, value in last.get("versions", {}).items())
        rows.append(["versions", versions])
        others_known = {"versions", "lower_is_better", *shown}  # the last is said at each value
        rows += [[key, value] for key, value in last.items() if key not in others_known and value not in ({}, [], None)]
        if len(run.starts) > 1:
            rows.append(["resumed", f"{len(run.starts) - 1} times; first started {run.starts[0]['started']}"])
    rows.append(["optimiser steps", f"{run.last.get('step', 0):,}"])
    rows.append(["folder", _CODE.format(run.folder)])
    body = table(rows)
    if run.config:
        text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True, width=100)
        body += f"<details><summary>Config, every value</summary><pre>{escape(text)}</pre></details>"
    return section("Run", body)


def pick(values: Sequence[T], most: int) -> list[T]:
    """At most `most` of `values`, the first and the last among them, evenly spread."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def signed(change: Change | None) -> Markup:
    """A change with its error, coloured for the better or the worse where it is more than noise."""
    if change is None:
        return Markup("–")
    kind = {1: "good", 0: "", -1: "bad"}[change.sign]
    return Markup('<b class="{}">{}</b>{}').format(kind, change.text.replace("-", "−"), within(change.error))


def within(error: float | None) -> Markup:
    """A standard error behind its value; nothing where it is not known."""
    return Markup("" if error is None else f' <span class="error">± {error:.{places(error)}f}</span>')


def _verdict(run: RunData) -> str:
    """One sentence on the trained rewards, judged on the held-out prompts."""
    clauses = []
    for name in run.trained:
        if ends := run.ends(f"eval/{name}"):
            clauses.append(f"<b>{escape(name)}</b> {number(ends[0])} → {number(ends[1])} ({signed(run.change(name))})")
    if not clauses:
        return ""
    on = "test prompts" if overlaps(run) else "prompts that were not trained on"
    return f'<p class="lead">On {on}: {"; ".join(clauses)}.</p>'


def _tile(run: RunData, name: str, tag: str) -> str:
    xs, ys = run.series(f"eval/{name}")
    if not ys:
        return ""
    delta = Markup("from {}, {}").format(number(ys[0]), signed(run.change(name)))
    delta = delta if len(ys) > 1 else Markup("one evaluation so far")
    delta += "; lower is better" if name in run.lower else ""
    value = Markup("{}{}").format(number(ys[-1]), within(run.error(name)))
    return tile(name, tag, value, delta, _spark(xs, ys), run.color(name))


def _spark(xs: Sequence[float], ys: Sequence[float]) -> str:
    """Points of a curve without axes, in 100 x 20 units; none for a single value."""
    if len(xs) < 2:
        return ""
    width, low, height = (xs[-1] - xs[0]) or 1.0, min(ys), (max(ys) - min(ys)) or 1.0
    return " ".join(
        f"{100 * (x - xs[0]) / width:.1f},{18 - 16 * (y - low) / height:.1f}" for x, y in zip(xs, ys, strict=True)
    )


def _value_chart(run: RunData, name: str) -> str:
    """What is trained, watched or the diversity, on training images and held-out prompts, and of students."""
    color, diversity = run.color(name), name == "diversity"
    lines = []
    for key, kind, label in (
        (name if diversity else f"reward/{name}", "faint", "training images"),
        (f"eval/{name}", "dots", "held-out prompts"),
    ):
        xs, ys = run.series(key)
        # People's votes have the mean 0 in every group: their curve would say nothing.
        if xs and (kind == "dots" or diversity or max(map(abs, ys)) > 1e-6):
            lines.append(Line(xs, ys, color, label, kind))
    for student in run.students:  # the same value where they wear the LoRA
        key = f"{student}/{name}"
        xs, ys = run.series(f"eval/{key}")
        if xs:
            lines.append(Line(xs, ys, run.color(key), f"on {student}", "dots"))
    tag = "trained" if name in run.trained else "watched"
    tag += ", lower is better" if name in run.lower else ""
    text = "Diversity inside prompt groups" if diversity else f"{name} against images generated"
    axis = Axis(y=UNITS.get(name, "mean score"), level=run.limit(name), description=text)
    return curves_of(name, lines, axis, "inside prompt groups" if diversity else tag)


def metric_chart(run: RunData, key: str, title: str, label: str, name: str = "") -> str:
    """A metric's curve in a card; nothing of fewer than two epochs. `name`: what its description calls it."""
    xs, ys = run.series(key)
    if len(xs) < 2:
        return ""
    axis = Axis(y=label, log=spans_decades(ys), description=f"{name or key} against images generated")
    return curves_of(title, [Line(xs, ys, "c0")], axis)
