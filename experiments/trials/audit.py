"""Audits of the playground's rewards on the same prompts: which exploits fool which reward, and how often.

    python -m experiments.trials.audit --out assets/results/audit.json

The verifier judges the others; of itself there is no judge, so a model's images are left out. What `--out` holds
already is not audited again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from diffrl_lab.audit.run import Audit, audit

REWARDS = ("playground", "preference", "clip")
JUDGE = "playground"
KEYS = ("score", "worst", "score_without_gradients", "worst_without_gradients", "exploits", "looks")


def table(result: Mapping[str, Any]) -> str:
    """Each exploit's share of outranked prompts, the worst of any reward first; below, the best-paid looks."""
    rewards: Mapping[str, Any] = result["rewards"]
    shares = {name: {one["name"]: one["share"] for one in found["exploits"]} for name, found in rewards.items()}
    names = {exploit for column in shares.values() for exploit in column}
    order = sorted(names, key=lambda name: (-max(column.get(name, 0) for column in shares.values()), name))
    lines = [f"| wrong image | {' | '.join(f'`{name}`' for name in shares)} |", "| --- " * (len(shares) + 1) + "|"]
    worst = [f"**{found['score']:.2f}**" for found in rewards.values()]
    lines += [f"| **score: the worst** | {' | '.join(worst)} |"]
    plain = [f"**{found['score_without_gradients']:.2f}**" for found in rewards.values()]
    lines += [f"| **without gradients** | {' | '.join(plain)} |"]
    for name in order:
        cells = [f"{column[name]:.2f}" if name in column else "–" for column in shares.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| reward | looks that it prefers, as a share of a stated fact that is right |", "| --- | --- |"]
    for name, found in rewards.items():
        paid = [f"{look['fact']} {look['value']} {look['share']:.2f}" for look in found["looks"][:3]]
        lines.append(f"| `{name}` | {', '.join(paid)} |")
    return "\n".join([*lines, "", f"`{result['command']}`: {result['prompts']} prompts of each reward."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rewards", nargs="+", default=REWARDS)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"rewards": {}}
    if args.out.exists():
        result = json.loads(args.out.read_text(encoding="utf-8"))
    result |= {
        "command": f"python -m experiments.trials.audit --prompts {args.prompts} --out {args.out}",
        "prompts": args.prompts,
    }
    for reward in args.rewards:
        if reward in result["rewards"]:
            continue
        judge = None if reward == JUDGE else JUDGE
        with tempfile.TemporaryDirectory() as folder:
            found = audit(Audit(reward, {}, judge=judge, limit=args.prompts), Path(folder))
        result["rewards"][reward] = {key: found[key] for key in KEYS}
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
