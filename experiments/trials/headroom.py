"""Does `diffrl headroom` say, before training, which recipes gain? Against the gains that are in assets/results.

    python -m experiments.trials.headroom      # 20 seconds of a core a recipe; writes assets/results/headroom.json

The expected gain of each recipe's reward, from one epoch of the untrained model, beside the measured one of all seeds
on test prompts. Spearman's rank correlation is over the recipes, once in the rewards' own units, once in standard
deviations of the untrained model's scores: the units differ so much that the first alone would flatter.
"""

from __future__ import annotations

import json
from typing import Any

from scipy.stats import spearmanr

from diffrl_lab.headroom import SURE, headroom
from experiments.listed import RESULTS, ROOT, experiments

RECIPES = ("nft", "grpo", "ocr", "gardo/clip_no_kl", "gardo/preference_no_kl", "crd/clip_crd", "pilots/grpo_preference")
MEASURED = ROOT / "build" / "headroom"  # what `diffrl headroom --out` writes, one file a recipe


def measured(name: str) -> dict[str, Any]:
    """A recipe's headroom, from the folder of those that are there, or measured now."""
    file = MEASURED / f"{name.replace('/', '-')}.json"
    if not file.is_file():
        one = next(one for one in experiments() if one.name == name)
        result = headroom(one.read)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=1) + "\n")
    result = json.loads(file.read_text())
    assert isinstance(result, dict)
    return result


def row_of(name: str) -> dict[str, Any]:
    """Expected and measured gain of a recipe with one reward."""
    (reward, found), *others = measured(name)["rewards"].items()
    assert not others, "recipes with one reward"
    best, gained = list(found["best_of"].values())[-1], read(name, reward)
    return {
        "recipe": name,
        "reward": reward,
        "base_std": found["std"],
        "best_of_group": best["gain"],
        "best_of_group_error": best["error"],
        "reliability": found["reliability"],
        "verdict": found["verdict"],
        "expected": found["expected_gain"],
        "measured": gained,
        "ratio": gained / (best["gain"] * found["reliability"]),
    }


def read(name: str, reward: str) -> float:
    return float(json.loads((RESULTS / f"{name}.json").read_text())["summary"][reward]["gain"])


def held(row: dict[str, Any], others: list[float]) -> bool:
    """Is the measured gain in the interval that the other recipes' ratios give?"""
    best, error = row["best_of_group"], SURE * row["best_of_group_error"]
    low, high = min(others) * max(best - error, 0.0), max(others) * (best + error)
    return bool(row["reliability"] * low <= row["measured"] <= row["reliability"] * high)


def main() -> None:
    rows = [row_of(name) for name in RECIPES]
    expected, gains = [row["expected"]["value"] for row in rows], [row["measured"] for row in rows]
    units = [row["base_std"] for row in rows]
    scaled = ([v / u for v, u in zip(values, units, strict=True)] for values in (expected, gains))
    inside = sum(held(row, [other["ratio"] for other in rows if other is not row]) for row in rows)
    whole = {
        "command": "python -m experiments.trials.headroom",
        "rank_correlation": {
            "own units": float(spearmanr(expected, gains).statistic),
            "standard deviations": float(spearmanr(*scaled).statistic),
        },
        "inside_of_the_others_range": inside,
        "recipes": rows,
    }
    (RESULTS / "headroom.json").write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps({key: whole[key] for key in ("rank_correlation", "inside_of_the_others_range")}, indent=1))


def table(result: dict[str, Any]) -> str:
    """Expected and measured gains, for the page."""
    lines = ["| recipe | reward | best of a group | expected gain | measured gain |", "| --- | --- | --- | --- | --- |"]
    for row in result["recipes"]:
        ends, cells = row["expected"], [f"`{row['recipe']}`", row["reward"], f"{row['best_of_group']:+.3f}"]
        cells += [f"{ends['value']:.3f} [{ends['low']:.3f}, {ends['high']:.3f}]", f"{row['measured']:+.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    ranks, count = result["rank_correlation"], len(result["recipes"])
    text = (
        f"Spearman's correlation of the last two columns over the {count} recipes is {ranks['own units']:.2f} in the "
        f"rewards' own units, and {ranks['standard deviations']:.2f} in standard deviations of the untrained model's "
        f"scores. With the range of the other recipes' ratios in the place of all, "
        f"{result['inside_of_the_others_range']} of the {count} intervals hold the measured gain."
    )
    return "\n".join([*lines, "", text])


if __name__ == "__main__":
    main()
