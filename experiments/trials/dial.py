"""Is `diffrl dial`'s point better on held-out values than the last checkpoint? Three runs hack.

    python -m experiments.trials.dial                  # trains and dials four runs in build/dial, 45 minutes of a core
    python -m experiments.trials.dial --seeds 1 2      # other seeds, beside what is in the result

The point is chosen on 64 validation prompts, which the runs were evaluated on, and judged once on 64 test prompts,
beside the last checkpoint. The measure was settled after seed 0 had been seen, and stood before seeds 1 and 2 were
trained: at dial's point more held-out values are better than worse, beyond their 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from diffrl.api import train
from diffrl_lab.dial import dial

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "dial"
VALIDATION, TEST = "playground/compositional/validation", "playground/compositional/test"
PREFERENCE = ("rewards.preference.weight=1.0", "watch.playground.plugin=playground")
RUNS = {
    "gradients on preference": ("d2align", ("d2align=null", "rewards.clip=null", PREFERENCE[0], "checkpoint.every=2")),
    "GRPO on preference": (
        "grpo",
        (*PREFERENCE, "rewards.playground=null", "epochs=32", "optimise.batch_size=96", "evaluate.also={}",
         "checkpoint.every=2"),
    ),
    "NFT on preference": (
        "gardo_ocr",
        (*PREFERENCE, "gardo=null", "rewards.ocr=null", "epochs=20", "prompts.train=playground/compositional/train"),
    ),
    "GRPO on CLIP": ("gardo", ("gardo=null", "checkpoint.every=2")),
}  # fmt: skip


def dialled(name: str, seed: int) -> dict[str, Any]:
    """What dial says of a run, which is trained if it is not there."""
    config, overrides = RUNS[name]
    folder = FOLDER / f"{name.replace(' ', '_')}_{seed}"
    if not (folder / "metrics.jsonl").is_file():
        kept = (f"prompts.test={VALIDATION}", "checkpoint.keep=99", f"seed={seed}", f"run_dir={folder}")
        train(f"playground/{config}", *overrides, *kept)
    if not (folder / "dial" / "dial.json").is_file():
        dial(folder, judge=TEST, diversity=0.75)
    result = json.loads((folder / "dial" / "dial.json").read_text())
    assert isinstance(result, dict)
    return result | {"run": name, "seed": seed, "config": f"playground/{config}", "overrides": list(overrides)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    given = parser.parse_args()
    path = ROOT / "assets" / "results" / "dial.json"
    new = {(name, seed): dialled(name, seed) for name in given.runs for seed in given.seeds}
    kept = json.loads(path.read_text())["runs"] if path.is_file() else []
    both = {(run["run"], run["seed"]): run for run in kept} | new
    order = sorted(both, key=lambda key: (list(RUNS).index(key[0]), key[1]))
    whole = {"command": "python -m experiments.trials.dial --seeds 0 1 2", "runs": [both[key] for key in order]}
    path.write_text(json.dumps(whole, indent=1) + "\n")
    print(table(whole))


def table(result: dict[str, Any]) -> str:
    """The point of each run beside its last checkpoint, on the judging prompts."""
    names = ("strict", "variety", "aesthetic")
    head = ["run", "seed", "point", "trained", *names, "better, worse", "mean"]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for run in result["runs"]:
        rows, held = {row["name"]: row for row in run["judged"]}, run["held_out"]
        cells = [run["run"], str(run["seed"]), run["points"][run["chosen"]]["title"]]
        trained = rows[run["trained"][0]]
        cells += [f"{row['last']:.3f} → {row['point']:.3f}" for row in (trained, *(rows[name] for name in names))]
        cells += [f"{held['better']}, {held['worse']}", f"{held['difference']:+.2f} ± {held['error']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
