"""Search against best-of-N at equal forwards, and a searched trained model against a searched base, on the playground.

    python -m experiments.trials.search --loras LORA0 LORA1 LORA2 --out assets/results/search.json

For each seed and each reward other prompts are searched on the base and on a trained LoRA (one for each seed, of the
recipe that `--recipe` names), with the same budget of network forwards, and what is not searched for is watched. What
`--out` holds already is not searched again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffrl.prompts import load_prompts
from diffrl_lab.search.run import Settings, search
from experiments import command

METHODS = ("best-of-n", "particles", "evo")
WATCHED = {"playground": ("clip", "artefact"), "clip": ("playground", "artefact")}
MARKS = (10, 20, 40, 80, 160)


def one(reward: str, seed: int, lora: str, budget: int, prompts: int) -> dict[str, Any]:
    """Each arm's means at the budgets of `MARKS` that it reaches."""
    settings = Settings(
        rewards={reward: {}}, watch={name: {} for name in WATCHED[reward]}, budget=budget, methods=METHODS, base=True
    )
    mine = [prompt.text for prompt in load_prompts("playground/all/test")[seed * prompts : (seed + 1) * prompts]]
    drawing: dict[str, Any] = {"model": "playground", "prompts": mine, "batch_size": 128}
    with tempfile.TemporaryDirectory() as folder:
        result = search(settings, out=Path(folder) / "search", lora=lora, seed=seed, **drawing)
    arms = {}
    for arm, found in result["arms"].items():
        points = [[p for p in found["curve"] if p["forwards"] <= mark] for mark in MARKS]
        values = {str(m): {k: round(v, 4) for k, v in p[-1].items()} for m, p in zip(MARKS, points, strict=True) if p}
        arms[arm] = {"forwards": found["forwards_spent"], "images": found["images"], "at": values}
    return arms


def table(result: Mapping[str, Any]) -> str:
    """The reward that is searched for, and the one that is watched, at each budget; means over the seeds."""
    lines = []
    for reward, seeds in result["rewards"].items():
        watched = WATCHED[reward][0]
        marks = [str(mark) for mark in MARKS]
        heads = [f"{mark} forwards" for mark in marks]
        lines += [f"| search for `{reward}` | {' | '.join(heads)} | over best-of-N | `{watched}` at {marks[-1]} |"]
        lines += ["| --- " * (len(marks) + 3) + "|"]
        for arm in seeds[0]["arms"]:
            cells = [_cell([seed["arms"][arm]["at"].get(mark, {}).get(reward) for seed in seeds]) for mark in marks]
            last = _cell([seed["arms"][arm]["at"][marks[-1]][watched] for seed in seeds])
            plain = f"best-of-n {arm.split()[1]}"
            ends = [[seed["arms"][one]["at"][marks[-1]][reward] for one in (arm, plain)] for seed in seeds]
            gain = "" if arm == plain else _cell([one - other for one, other in ends], "+.3f")
            lines.append(f"| {arm} | {' | '.join(cells)} | {gain} | {last} |")
        lines.append("")
    count = len(next(iter(result["rewards"].values())))
    text = f"`{result['command']}`: {count} seeds, {result['prompts']} prompts each, mean ± deviation over the seeds."
    return "\n".join([*lines, text])


def _cell(values: Sequence[float | None], form: str = ".3f") -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    return f"{np.mean(known):{form}} ± {np.std(known, ddof=1) if len(known) > 1 else 0:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loras", nargs="+", required=True, help="one for each seed, from seed 0 on")
    parser.add_argument("--recipe", default="playground/nft", help="what trained them")
    parser.add_argument("--budget", type=int, default=MARKS[-1], help="network forwards for each prompt")
    parser.add_argument("--prompts", type=int, default=8, help="of each seed")
    parser.add_argument("--most", type=int, default=6, help="searches of this call: a seed and a reward each")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"recipe": args.recipe, "prompts": args.prompts, "rewards": {}}
    if args.out and args.out.exists():
        result = json.loads(args.out.read_text(encoding="utf-8"))
    result["command"] = command().replace(f" --most {args.most}", "")
    done = 0
    for reward in WATCHED:
        rows = result["rewards"].setdefault(reward, [])
        for seed, lora in list(enumerate(args.loras))[len(rows) :][: args.most - done]:
            done += 1
            rows.append({"seed": seed, "arms": one(reward, seed, lora, args.budget, args.prompts)})
            print(json.dumps({"reward": reward, **rows[-1]}), flush=True)
            if args.out:
                args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
