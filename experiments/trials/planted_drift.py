"""Which styles and tones a trained model draws where the prompt leaves them free: has it followed the planted bias?

    python -m experiments.trials.planted_drift base= plain=runs/a-0,runs/a-1 D2-Align=runs/b-0 --out planted_drift.json

Run folders of one method are its seeds; no folder is the model before training. Drawn are unseen test prompts that say
neither style nor tone, and the gold reading says which each picture shows; in the world, and without bias, each value
has a third. What the raters of the preference model like is `diffrl_playground.taste.BIAS`. Variety is of all facts.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

import diffrl
from diffrl_playground import grammar
from diffrl_playground.scenes import prompt_set
from diffrl_playground.taste import BIAS
from diffrl_playground.variety import shown
from diffrl_playground.verifier import verify
from experiments import command
from experiments.variety import variety

FACTS = {"style": grammar.STYLES, "tone": grammar.TONES}


def measured(folder: str | None, prompts: list[str], per_prompt: int) -> dict[str, Any]:
    """Shares of styles and tones among the pictures in which they can be read, variety, and what is right."""
    lora = None if folder is None else Path(folder) / "lora"
    drawn = diffrl.load("playground", lora=lora).draw(
        prompts, seed=10_000, per_prompt=per_prompt, steps=10, sampler="dpm2", batch_size=64
    )
    images = np.stack([np.asarray(image) for image in drawn])
    texts = [prompt for prompt in prompts for _ in range(per_prompt)]
    read = shown(images, texts)
    result: dict[str, Any] = {}
    for fact, values in FACTS.items():
        # "style", or "style/1" and "style/2" where a prompt has two things
        seen = Counter(value for one in read for name, value in one.items() if grammar.kind_of(name) == fact and value)
        result |= {value: round(seen[value] / max(seen.total(), 1), 4) for value in values}
    verdicts = verify(images, texts)
    result["facts right"] = round(float(np.mean([np.mean(list(v.strict.values())) for v in verdicts])), 4)
    result["all facts right"] = round(float(np.mean([v.all_right for v in verdicts])), 4)
    return result | {"variety": round(variety(images, texts).value or 0.0, 4)}


def table(result: dict[str, Any]) -> str:
    """Which styles and tones trained models draw where they are free."""
    keys = list(next(iter(result["methods"].values()))[0])
    liked = set(result["liked"].values())
    head = [f"{key} (liked)" if key in liked else key for key in keys]
    lines = [f"| trained by | {' | '.join(head)} |", "| --- " * (len(keys) + 1) + "|"]
    for label, seeds in result["methods"].items():
        lines.append(f"| {label} | {' | '.join(f'{np.mean([seed[key] for seed in seeds]):.2f}' for key in keys)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", metavar="LABEL=[DIR[,DIR...]]")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--per-prompt", type=int, default=4)
    parser.add_argument("--out", type=Path, help="JSON file of the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [
        prompt
        for prompt in prompt_set("compositional", "test")
        if not {"style", "tone"} & {grammar.kind_of(name) for name in grammar.parse(prompt).attributes}
    ][: args.prompts]
    methods: dict[str, list[dict[str, Any]]] = {}
    for text in args.methods:
        label, _, folders = text.partition("=")
        methods[label] = [measured(folder or None, chosen, args.per_prompt) for folder in folders.split(",")]
        means = {key: round(float(np.mean([one[key] for one in methods[label]])), 3) for key in methods[label][0]}
        print(label, means, flush=True)
    result = {
        "command": command(),
        "prompts": len(chosen),
        "per_prompt": args.per_prompt,
        "liked": {fact: value for fact, (value, _) in BIAS.items()},
        "methods": methods,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
