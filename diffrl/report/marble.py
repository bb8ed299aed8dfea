"""MARBLE's section of a run's report: how the rewards were balanced, and whether a step went against one of them."""

from __future__ import annotations

from diffrl.report.data import RunData
from diffrl.report.page import curves, grid, section
from diffrl.report.plots import Axis, Line, spans_decades


def balance(run: RunData) -> str:
    """Coefficients and gradient norms of each reward, and cosines between the step and the rewards' gradients."""
    shares = _by_reward(run, "marble/alpha/", "coefficients", Axis(y="coefficient", floor=0))
    norms = _by_reward(run, "marble/norm/", "gradient norms", Axis(y="norm of the reward's gradient"))
    cosines = _cosines(run)
    if not (shares or norms or cosines):
        return ""
    rate = run.series("marble/conflict")[1]
    run.used.add("marble/steps")
    text = "Cosines are those between a step, without the penalty, and each reward's own gradient: "
    if any(rate):
        text += f"{sum(rate) / len(rate):.0%} of the measured steps went against some reward. "
    elif rate:
        text += "no step went against any reward. "
    else:
        text = "Nothing was measured in this mode. "
    text += "Gradient norms beside a step without signal for a reward are left out."
    return section("Balance of the rewards", grid([shares, norms, cosines]), text)


def _by_reward(run: RunData, prefix: str, title: str, axis: Axis) -> str:
    lines = [Line(*run.series(key), run.color(key[len(prefix) :]), key[len(prefix) :]) for key in run.logged(prefix)]
    lines = [line for line in lines if len(line.xs) > 1]
    logarithmic = axis.floor is None and spans_decades([y for line in lines for y in line.ys])
    axis = Axis(y=axis.y, floor=axis.floor, log=logarithmic, description=f"{title} of each reward")
    return curves(title, lines, axis, "of each reward")


def _cosines(run: RunData) -> str:
    lines = []
    for key, color, label in (("cos_mean", "c0", "mean over the rewards"), ("cos_min", "c1", "least, of any step")):
        xs, ys = run.series(f"marble/{key}")
        if len(xs) > 1:
            lines.append(Line(xs, ys, color, label))
    run.series("marble/cos_var")  # in metrics.jsonl; a curve of its own says little beside mean and least
    axis = Axis(y="cosine", floor=0, description="Cosines of the step to the rewards' gradients")
    return curves("cosines", lines, axis, "to the step")
