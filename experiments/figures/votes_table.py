"""Tables of people's votes, of heads that are fitted on preferences, and of preference models that learn."""

from __future__ import annotations

from typing import Any

NAMES = {"right": "a stated fact that is right", "style": "a striped picture", "tone": "a pale picture"}


def voting(result: dict[str, Any] | None) -> str:
    """What `tests/stress/voting.py` found."""
    if result is None:
        return ""
    red = f"{result['redness before']:.4f}, {result['redness after']:.4f}"
    if (error := result.get("redness, error of the change")) is not None:
        red += f" ({result['redness after'] - result['redness before']:+.4f} ± {error:.4f})"
    rows = {
        "votes that the page called saved": result["votes that the page said it saved"],
        "votes in the file": result["votes"],
        "votes that are there twice": result["votes twice"],
        "votes that were trained on": result["votes trained on"],
        "redness on held-out prompts, before and after": red,
        "half of a score's 95 % interval, mean": f"{result['half of a 95 % interval, mean']:.1f}",
        "seconds that an epoch waited, mean": f"{result['seconds waited, mean']:.0f}",
    }
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())])


def bias(result: dict[str, Any] | None) -> str:
    """What `experiments/trials/fitted_bias.py` found."""
    if result is None:
        return ""
    lines = ["| one more | the raters' points | fitted head | correlation | CLIP itself |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for name, text in NAMES.items():
        value, error = result["fitted"]["coefficients"][name]
        plain, its_error = result["clip"]["coefficients"][name]
        correlation = result["fitted"]["correlation with the terms"][name]
        lines.append(
            f"| {text} | {result['planted'][name]:.1f} | {value:.2f} ± {error:.2f} | {correlation:.2f} | "
            f"{plain:.3f} ± {its_error:.3f} |"
        )
    return "\n".join(lines)


def learned(result: dict[str, Any] | None, *models: str) -> str:
    """What `experiments/trials/learned_bias.py` found, means over seeds; `models`: LABEL=NAME, a name of the result."""
    if result is None:
        return ""
    lines = [f"| points for | {' | '.join(NAMES.values())} |", "| --- | --- | --- | --- |"]
    for label, _, name in (model.partition("=") for model in models):
        cells = [[seed[term][0] for seed in result[name]] for term in NAMES]
        lines.append(f"| {label} | {' | '.join(f'{sum(cell) / len(cell):.2f}' for cell in cells)} |")
    return "\n".join(lines)
