"""`diffrl dial`: at which strength, or at which checkpoint, is a run's LoRA still healthy?

The LoRA's strength is turned from 0 (the base model) to 1.5, and the checkpoints that the run has kept are gone along;
each point draws the same held-out prompts from the same noise, so differences are paired. Both are ways that begin at
the base model, and they are read as the run's guard rails read a training.

**The rule.** A point is healthy if strict guard rails raise no alarm on the way to it: no held-out value is worse than
its best so far by more than 5 % and beyond the difference's 95 % interval, paired over prompts, while what is trained
has risen, diversity (on the playground: variety) is above the limit of the run's guard rails, and so on.
Of the points up to the first alarm of their way the one with the largest gain of what is trained is taken; none of them
gains: the base model. It is chosen on one set of prompts and judged once, beside the last checkpoint, on another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffrl.additions.verdict import Guard
from diffrl.config import Config, load_config
from diffrl.drawing import Drawing
from diffrl.errors import UserError
from diffrl.evaluation import Evaluated, Evaluator, summarise
from diffrl.features import load_features
from diffrl.launched import join_processes
from diffrl.methods.d2align.stage1 import prepare_direction
from diffrl.policy import Policy
from diffrl.prompts import Prompt, load_prompts
from diffrl.records import checkpoint
from diffrl.records.disk import write_json
from diffrl.records.held_out import HeldOut, gain
from diffrl.records.progress import number
from diffrl.records.tracking import save_image
from diffrl.report.built_page import Page
from diffrl.report.plots import Axis, Line
from diffrl.report.sections import pick
from diffrl.resources import file_of_run
from diffrl.reward_kinds import learning
from diffrl.rewards.protocol import lower_is_better
from diffrl.rewards.scoring import Scorer
from diffrl.run.build import build_scorers, features_name
from diffrl.run.evaluation import evaluation_spec
from diffrl.sharing.card import LORA
from diffrl.sharing.measure import Row, paired, strength
from diffrl.stats import LEVEL, differences, interval, known, p_value, standard_error

STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
CHECKPOINTS = 8  # of those kept, at most, evenly from the first to the last
SHOWN = 6  # prompts of the page's pictures
RULE = "largest gain before the first alarm of strict guard rails on the way from the base model"
WAYS = {
    "strength": ("strength of the LoRA (%)", "The newest LoRA, from nothing to one and a half times itself."),
    "checkpoints": ("epoch", "The LoRA of each checkpoint, at its full strength."),
}
NOTE = (
    "Chosen on other prompts than these, and judged here once. Difference: the healthy point less the last checkpoint, "
    "with its 95 % interval, paired over prompts."
)


@dataclass(frozen=True)
class Point:
    """A LoRA: `state`, None for the base model; `strength` that its B counts; of which epoch."""

    way: str  # "strength" or "checkpoints"
    strength: float
    epoch: int
    state: Mapping[str, Tensor] | None = field(repr=False, compare=False)

    @property
    def title(self) -> str:
        if self.state is None:
            return "base model"
        return f"strength {self.strength:g}" if self.way == "strength" else f"epoch {self.epoch}"


def dial(
    folder: Path,
    out: Path | None = None,
    *,
    judge: str | None = None,
    prompts: int | None = None,
    diversity: float | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Find a run's healthy point and write its LoRA, `dial.json` and `dial.html` to `out` (default: RUN/dial).

    Args:
        judge: the prompts that the point is judged on; None: those of `prompts.test` behind the ones it is chosen on.
        prompts: how many the point is chosen on, and judged on; None: the config's `evaluate.prompts`.
        diversity: share of the base model's below which a point has collapsed; None: the run's `guard.diversity`.
        report: told each point when it has been drawn.

    Raises:
        UserError: this is no run's folder, it has no checkpoint, or too few prompts are left to judge on.
    """
    config = load_config(file_of_run(folder, "config.yaml", "dial"))
    if diversity is not None:
        guard = config.guard.model_copy(update={"diversity": diversity})
        config = config.model_copy(update={"guard": guard})
    chosen_on, judged_on = split_prompts(config, judge, prompts)
    points, last = points_of(folder, config)
    bench = Bench(config, folder)
    try:
        results = []
        for point in points:
            results.append(bench.measure(point, chosen_on, keep=SHOWN))
            report(point.title)
        entries, best = choose(points, results, bench, config)
        report(f"judging {points[best].title}")
        judged = _judge(bench, [points[0], last, points[best]], judged_on)
    finally:
        bench.judges.close()
    on = {"chosen_on": {"prompts": config.prompts.test, "count": len(chosen_on)},
          "judged_on": {"prompts": judge or config.prompts.test, "count": len(judged_on)}}  # fmt: skip
    about = {"per_prompt": config.evaluate.per_prompt, "trained": list(config.rewards)}
    about |= {"lower_is_better": sorted(bench.lower), "points": entries, "chosen": best}
    result = {"run": folder.resolve().name, "rule": RULE, **on, **about, **judged}
    target = folder / "dial" if out is None else out
    _write(target, result, results, bench, points[best])
    return result


def split_prompts(config: Config, judge: str | None, count: int | None) -> tuple[list[Prompt], list[Prompt]]:
    """Those that the point is chosen on, the run's own held-out ones, and others that it is judged on."""
    count = count or config.evaluate.prompts
    known = load_prompts(config.prompts.test)
    chosen = known[:count]
    seen = {prompt.text for prompt in chosen}
    others = load_prompts(judge) if judge is not None else known[count:]
    judged = [prompt for prompt in others if prompt.text not in seen][:count]
    if len(judged) < 2:
        where = f'"{judge}" has {len(judged)}' if judge is not None else f"prompts.test has {len(known)}"
        text = "name others with --judge FILE|SET, or choose on fewer with --prompts N"
        raise UserError(f"--judge: {where}, and none of those that the point is chosen on is judged on; {text}")
    return chosen, judged


def points_of(folder: Path, config: Config) -> tuple[list[Point], Point]:
    """Both ways, each from the base model on, and the newest checkpoint's LoRA at its full strength."""
    name = "ema" if config.optimise.ema.decay else "lora"
    paths = sorted(checkpoint.intact(folder), key=checkpoint.epoch_of)
    if not paths:
        raise UserError(f"dial: {folder} has no intact checkpoint")
    states = {checkpoint.epoch_of(path): checkpoint.load(path)[0][name] for path in pick(paths, CHECKPOINTS)}
    end = max(states)
    turned = [Point("strength", s, end, states[end] if s else None) for s in STRENGTHS]
    passed = [Point("checkpoints", 1.0, epoch, state) for epoch, state in states.items() if epoch != end]
    return [*turned, *passed], next(point for point in turned if point.strength == 1.0)


class Bench:
    """The run's model and judges, and how the run evaluates. `policy` carries the point that is measured."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        kind: dict[str, Any] = {"resolution": config.rollout.resolution, "family": config.family}
        self.policy: Policy = Drawing(config.model, lora=str(folder / "lora"), **kind).policy()
        self.judges: Scorer = build_scorers(config, self.policy.device)[1]
        spec = evaluation_spec(config)
        prepare_direction(config, folder, self.policy, self.judges.rewards, spec, join_processes())
        newest = checkpoint.load(next(checkpoint.intact(folder)))[0]
        learning.restore(learning.of(self.judges.rewards), newest.get("learning", {}))  # one yardstick for all points
        features = load_features(features_name(config), self.policy.device)
        amount = config.evaluate.per_prompt, config.rollout.batch_size
        self.evaluator = Evaluator(self.policy, self.judges, features, spec, *amount)
        self.lower = lower_is_better(self.judges.rewards)

    def measure(self, point: Point, prompts: Sequence[Prompt], keep: int = 0) -> Evaluated:
        """The point's images of the prompts, from the evaluation's noise, scored."""
        if point.state is not None:
            self.policy.load_state("default", dict(point.state))
        snapshot = None if point.state is None else "default"
        with strength(self.policy, point.strength):
            return self.evaluator.score(prompts, snapshot, self.config.seed, keep=keep)

    def means(self, result: Evaluated) -> dict[str, float | None]:
        """Of all images, by the names of an evaluation in metrics.jsonl, without "eval/"."""
        light = result.saturation
        spread = {"saturation": float(light.mean()), "saturation/std": float(light.std(correction=0))}
        return summarise(self.judges.names, result.scores) | result.breadth() | spread


def choose(
    points: Sequence[Point], results: Sequence[Evaluated], bench: Bench, config: Config
) -> tuple[list[dict[str, Any]], int]:
    """What is known of each point, and the number of the one that the rule takes."""
    each, held = config.evaluate.per_prompt, HeldOut()
    for i, result in enumerate(results):
        held.add(i, result.by_prompt(bench.judges.names, each))
    guard = Guard.of(_strict(config).resolved(), bench.lower)
    means = [bench.means(result) for result in results]
    lines = [{"epoch": i} | {f"eval/{name}": mean for name, mean in one.items()} for i, one in enumerate(means)]
    entries: list[dict[str, Any]] = []
    for i, point in enumerate(points):
        before = [0, *(j for j in range(1, i + 1) if points[j].way == point.way)]
        shown = {name: mean for name, mean in means[i].items() if mean is not None and not name.endswith("/std")}
        values = {name: {"mean": mean, "error": held.error(name, i)} for name, mean in shown.items()}
        alarms = {one.key: one.text for one in guard.alarms([lines[j] for j in before], held)}
        where = {"title": point.title, "way": point.way, "strength": point.strength, "epoch": point.epoch}
        entries.append({**where, "gain": _gain(config, held, i), "values": values, "alarms": alarms})
    return entries, healthiest(entries)


def _strict(config: Config) -> Config:
    """The run's guard rails for something that is to be shipped: an alarm counts at once."""
    guard = config.guard.model_copy(update={"evaluations": 1})
    alone = config.evaluate.model_copy(update={"also": {}})
    return config.model_copy(update={"guard": guard, "evaluate": alone})


def healthiest(entries: Sequence[Mapping[str, Any]]) -> int:
    """The rule: of the points before the first alarm of their way the one with the largest gain; 0 is the base."""
    healthy = [0]
    for way in dict.fromkeys(entry["way"] for entry in entries):
        on = [i for i, entry in enumerate(entries) if entry["way"] == way]
        healthy += itertools.takewhile(lambda i: not entries[i]["alarms"], on)
    return max(healthy, key=lambda i: entries[i]["gain"])


def _gain(config: Config, held: HeldOut, number: int) -> float:
    """Of what is trained, the rewards' weighted sum, over the base model; mean over prompts."""
    pairs = {name: known(held.differences(name, 0, number)) for name in config.rewards}
    return sum((config.rewards[name].weight * float(one.mean()) for name, one in pairs.items() if len(one)), 0.0)


def _judge(bench: Bench, three: Sequence[Point], prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Base model, last checkpoint and chosen point on other prompts; the last against the one before, value by value.

    "held_out": how many held-out values are better, and worse, by more than their 95 % interval; and the mean over
    them of the paired differences, each in units of the base model's standard deviation between prompts, better being
    positive, with its standard error over prompts.
    """
    each = bench.config.evaluate.per_prompt
    base, last, point = (bench.measure(one, prompts) for one in three)
    columns = [one.by_prompt(bench.judges.names, each) for one in (base, last, point)]
    rows, standardised = [], []
    for name in columns[0]:
        tables = [torch.tensor(np.array(one[name], dtype=np.float64)) for one in columns]
        role = "trained" if name in bench.config.rewards else "held out"
        row = paired(name, role, tables[1], tables[2], name in bench.lower)
        rows.append(_entry(row, float(tables[0].nanmean())))
        if role == "held out" and name != "saturation" and len(values := known(tables[0])) > 1:
            spread = max(float(values.std(ddof=1)), 1e-9)
            standardised.append(differences(tables[1], tables[2]) / spread * (-1 if name in bench.lower else 1))
    for name in base.figures:
        row = Row(name, "held out", last.figures.get(name, float("nan")), point.figures.get(name, float("nan")))
        rows.append(_entry(row, base.figures[name]))
    mean = np.ma.masked_invalid(standardised).mean(0).filled(np.nan) if standardised else np.empty(0)
    sure = [row for row in rows if row["role"] == "held out" and row["better"] is not None]
    counts = {"better": sum(row["better"] for row in sure), "worse": sum(not row["better"] for row in sure)}
    held = {"difference": interval(mean)[0], "error": standard_error(mean), "p": p_value(mean), **counts}
    return {"judged": rows, "held_out": held}


def _entry(row: Row, base: float) -> dict[str, Any]:
    """One value on the judging prompts; `better`: is the point's better than the last checkpoint's? None: not sure."""
    difference = gain(row.name, row.trained - row.base, {row.name} if row.lower_is_better else ())
    sure = row.low is not None and row.high is not None and (row.low > 0 or row.high < 0)
    return {"name": row.name, "role": row.role, "base": base, "last": row.base, "point": row.trained,
            "low": row.low, "high": row.high, "better": (difference > 0) if sure and difference else None}  # fmt: skip


def _write(out: Path, result: Mapping[str, Any], results: Sequence[Evaluated], bench: Bench, point: Point) -> None:
    """LoRA, pictures, JSON and page; the strength is part of the LoRA's B, so that any program reads it at 1."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "lora" / LORA).unlink(missing_ok=True)  # of an earlier time: the base model has none
    if point.state is not None:
        bench.policy.load_state("default", dict(point.state))
        with strength(bench.policy, point.strength):
            bench.policy.save_lora(out / "lora", "default")
    pictures = out / "pictures"
    pictures.mkdir(exist_ok=True)
    for file in pictures.glob("[0-9][0-9]-[0-9][0-9].png"):  # of an earlier time, of other points
        file.unlink()
    prompts = load_prompts(bench.config.prompts.test)
    for i, one in enumerate(results):
        for j, image in enumerate(one.pictures):
            save_image(image, pictures / f"{i:02d}-{j:02d}.png", {"prompt": prompts[j].text})
    write_json(out / "dial.json", result)
    write_page(out, result, [prompt.text for prompt in prompts[:SHOWN]])


def write_page(out: Path, result: Mapping[str, Any], prompts: Sequence[str]) -> Path:
    """Write `out/dial.html` from what `dial.json` holds and the pictures beside it; `prompts`: of the pictures."""
    points = result["points"]
    chosen = points[result["chosen"]]
    page = Page(f"{result['run']} · dial", f"{result['run']}: {chosen['title']}").lead(sentence(result), "sub")
    for way, (label, note) in WAYS.items():
        on = [i for i, point in enumerate(points) if i == 0 or point["way"] == way]
        if way == "checkpoints":  # which the newest one ends
            on += [i for i, point in enumerate(points) if point["way"] == "strength" and point["strength"] == 1]
        note += " Thin lines: two standard errors over prompts. Dashed: the healthy point."
        page.section(f"Along the {way}", note)
        _charts(page, result, sorted(on, key=lambda i: _place(points[i], way)), way, label)
    head = ["", "", "base model", "last checkpoint", "healthy point", "difference", ""]
    page.section("On other prompts", NOTE).table([_judged(row) for row in result["judged"]], head)
    page.section("Pictures", "The same prompt and noise at every point.")
    for j, prompt in enumerate(prompts):
        files = [(out / "pictures" / f"{i:02d}-{j:02d}.png", point["title"]) for i, point in enumerate(points)]
        page.strip(prompt, [(file, title) for file, title in files if file.is_file()])
    rows = [[p["title"], number(p["gain"]), "; ".join(p["alarms"].values()) or "none"] for p in points]
    page.section("Alarms", f"The rule: {result['rule']}.").table(rows, ["", "gain", "alarms"])
    return page.write(out / "dial.html")


def sentence(result: Mapping[str, Any]) -> str:
    """What came out, in one sentence."""
    chosen, held = result["points"][result["chosen"]], result["held_out"]
    if chosen["way"] == "strength" and chosen["strength"] == 1:
        return "The last checkpoint is the healthy point: no alarm on the way, and nothing gains more."
    error = "" if held["error"] is None else f" +- {held['error']:.2f}"
    word = "not more than noise"
    if held["p"] is not None and held["p"] < 1 - LEVEL:  # a paired test over prompts supports it
        word = "better" if held["difference"] > 0 else "worse"
    return (
        f"Beside the last checkpoint {chosen['title']} is better in {held['better']} held-out values and worse in "
        f"{held['worse']}, beyond their 95 % intervals; over all of them it is {held['difference']:+.2f}{error} "
        f"standard deviations: {word}."
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
