"""What the recipes need on each GPU, memory and arithmetic, as `diffrl doctor` counts it on fake tensors: true sizes,
no weights, any machine.

    python scripts/benchmarks/memory.py --out assets/results/memory.json

The models are `assets/architectures`: configs without weights. Rewards come on top, but in the recipes made for one
card, where their weights are counted.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffrl import __version__
from diffrl.config import Config, load_config
from diffrl.errors import UserError
from diffrl.resources import shipped
from diffrl.rewards.registry import takes
from diffrl.run import advice
from diffrl.run.fit import GIB, Fit, estimate
from diffrl.run.judges import RATE

SD35, CHECKPOINTING = "stable-diffusion-3.5-medium", "optimise.gradient_checkpointing=true"
# label, config, model, processes, FSDP2, overrides
CASES: list[tuple[str, str, str, int, bool, list[str]]] = [
    ("SD3.5-Medium, 512 px", "sd35/nft_ocr", SD35, 8, False, []),
    ("SD3.5-Medium, checkpointing", "sd35/nft_ocr", SD35, 8, False, [CHECKPOINTING]),
    ("FLUX.1-dev, 512 px", "flux/nft_pickscore", "FLUX.1-dev", 8, False, []),
    ("FLUX.1-dev, FSDP2 over 8", "flux/nft_pickscore", "FLUX.1-dev", 8, True, []),
    ("FLUX.1-dev, FSDP2 over 64", "flux/nft_pickscore", "FLUX.1-dev", 64, True, ["optimise.micro_batch=2"]),
]
CARDS, BASES = (16, 24, 32, 48, 80, 141), ("full", "int8", "nf4")  # GiB; weights by size, fp8's being int8's
ONE_ROW = "optimise.micro_batch=1"
MODELS = {  # label -> config, model
    "SDXL, 768 px": ("sdxl/nft_pickscore", "stable-diffusion-xl-base-1.0"),
    "SD3.5-Medium": ("sd35/nft_ocr", SD35),
    "Lumina-Image-2.0": ("lumina2/nft_pickscore", "Lumina-Image-2.0"),
    "FLUX.2-klein-base-4B": ("flux2/nft_pickscore", "FLUX.2-klein-base-4B"),
    "Z-Image": ("z_image/nft_pickscore", "Z-Image"),
    "FLUX.1-dev": ("flux/nft_pickscore", "FLUX.1-dev"),
    "Krea-2": ("krea2/nft_pickscore", "Krea-2"),
    "HiDream-I1-Full": ("hidream/nft_pickscore", "HiDream-I1-Full"),
    "Qwen-Image": ("qwen_image/nft_pickscore", "Qwen-Image"),
}
RECIPES = {  # made for one card -> its GiB, model
    "sd35/nft_ocr_16gb": (16, SD35),
    "sd35/grpo_ocr_16gb": (16, SD35),
    "z_image/nft_pickscore_16gb": (16, "Z-Image"),
    "z_image/grpo_pickscore_16gb": (16, "Z-Image"),
    "flux/nft_pickscore_16gb": (16, "FLUX.1-dev"),
    "flux/grpo_pickscore_16gb": (16, "FLUX.1-dev"),
    "flux/nft_pickscore_24gb": (24, "FLUX.1-dev"),
    "flux/grpo_pickscore_24gb": (24, "FLUX.1-dev"),
    "qwen_image/nft_pickscore_24gb": (24, "Qwen-Image"),
    "qwen_image/grpo_pickscore_24gb": (24, "Qwen-Image"),
}
WORDS = {f"engine.base={base}": base for base in BASES} | {
    "engine.encoders=apart": "apart",
    "engine.decode=1": "decode 1",
    CHECKPOINTING: "checkpointing",
    "rollout.batch_size=1": "batch 1",
}


NOT_COUNTED = "**Not counted yet**: assets/results/memory.json is of an earlier version of the command.\n"


def without_rewards(config: str) -> list[str]:
    """Overrides that leave the device to the model."""
    found = load_config(config)
    tables: dict[str, Any] = {"rewards": found.rewards, "watch": found.watch}
    names = [(t, name, one.plugin or name) for t, table in tables.items() for name, one in table.items()]
    return [f"{t}.{name}.device=cpu" for t, name, plugin in names if takes(plugin, "device")]


def loaded(config: str, model: str, overrides: list[str], processes: int = 1) -> Config:
    """A recipe on a shipped architecture."""
    prompts = ["prompts.train=playground/words/train", "prompts.test=playground/words/test"]  # not counted
    source = shipped("assets", "architectures", model)
    return load_config(config, [*overrides, *prompts, f"model={source}"], world=processes)


def table(result: dict[str, Any]) -> str:
    """The counted memory of shipped recipes."""
    heads = "| recipe | processes | sharded | GiB on each device | text encoders in main memory, GiB |"
    lines = [heads, "| --- " * 5 + "|"]
    for case in result["cases"]:
        head = f"| {case['label']} (`{case['config']}`) | {case['processes']} | {'FSDP2' if case['fsdp2'] else ''} |"
        lines.append(f"{head} {case['total_gib']} | {case['text_encoders_gib']} |")
    return "\n".join(lines) + "\n"


def by_card(result: dict[str, Any]) -> str:
    """For each model and size of card the fastest setting that fits."""
    lines = [f"| model (recipe) | {' | '.join(f'{card} GB' for card in CARDS)} |", "| --- " * (len(CARDS) + 1) + "|"]
    for row in result["cards"]:
        cells = []
        for found in row["fits"].values():
            words = [] if found is None else [WORDS.get(word, word) for word in found["overrides"]]
            cells.append("no" if found is None else f"{', '.join(words)}: {found['gib']}")
        lines.append(f"| {row['label']} (`{row['config']}`) | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def by_recipe(result: dict[str, Any]) -> str:
    """The recipes made for one card."""
    if "recipes" not in result:
        return NOT_COUNTED
    lines = ["| recipe | card, GB | GiB on the device | rewards' copies in an epoch, s | waits in main memory, GiB |"]
    lines.append("| --- " * 5 + "|")
    for row in result["recipes"]:
        sizes = f"{row['total_gib']} | {row['copies_s']} | {row['host_gib']}"
        lines.append(f"| `{row['config']}` | {row['card']} | {sizes} |")
    return "\n".join(lines) + "\n"


def reading(result: dict[str, Any]) -> str:
    """What reading a model takes of disk and main memory."""
    if "model_gib" not in result["cards"][0]:
        return NOT_COUNTED
    heads = "| model | disk, GiB | main memory, GiB, one process | 8 processes, types agree | 8 processes, converted |"
    lines = [heads, "| --- " * 5 + "|"]
    for row in result["cards"]:
        size = row["model_gib"]
        lines.append(f"| {row['label'].split(',')[0]} | {size} | {size} | {size} | {8 * size:.1f} |")
    return "\n".join(lines) + "\n"


def fits(config: str, model: str) -> tuple[dict[str, dict[str, Any] | None], float]:
    """By size of card: the first of `BASES` that `advise` makes fit, its overrides and GiB; None: none does. And the
    model's own GiB."""
    made: dict[str, Fit] = {}  # what is alike in all cards is counted once
    exact: dict[str, Fit] = {}

    def once(config: Config, *how: Any, **named: Any) -> Fit:
        whole = config.model_dump_json()
        if whole not in exact:
            exact[whole] = nearly_once(config, *how, **named)
        return exact[whole]

    def nearly_once(config: Config, *how: Any, **named: Any) -> Fit:
        key = config.model_dump_json(exclude={"engine": {"encoders", "decode"}})
        if (before := made.get(key)) is not None:
            alike = {name: size for name, size in before.peaks.items() if name != advice.DECODING}
            return estimate(config, known=replace(before, peaks=alike))
        return made.setdefault(key, estimate(config, *how, **named))

    advice.estimate = once
    found: dict[str, dict[str, Any] | None] = {}
    alone = [ONE_ROW, *without_rewards(config)]
    for card in CARDS:
        found[str(card)] = None
        for base in BASES:
            try:
                advised = advice.advise(loaded(config, model, [*alone, f"engine.base={base}"]), card * GIB)
            except UserError as error:
                print(error)
                continue
            if advised is not None:
                overrides = [f"engine.base={base}", *advised[1]]
                found[str(card)] = {"overrides": overrides, "gib": round(advised[0].total / GIB, 1)}
                break
    return found, round(next(iter(made.values())).read / GIB, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for label, config, model, processes, sharded, overrides in CASES:
        counted = loaded(config, model, [*overrides, *without_rewards(config)], processes)
        fit = estimate(counted, processes, sharded)
        sizes = {name: round(size / GIB, 2) for name, size in {**fit.parts, **fit.peaks}.items()}
        total, host = round(fit.total / GIB, 1), round(fit.host / GIB, 1)
        how = {"label": label, "config": config, "overrides": overrides, "processes": processes, "fsdp2": sharded}
        petaflop = {name: round(value / 1e15, 3) for name, value in fit.work.items()}
        epoch = {"images": counted.rollout.images, "petaflop_of_a_device": petaflop}
        rows.append(how | {"total_gib": total, "text_encoders_gib": host, "gib": sizes, "epoch": epoch})
        print(f"{label:<32} {processes:>3} processes {total:>7.1f} GiB  {sizes}  {epoch}", flush=True)
    cards = []
    for label, (config, model) in MODELS.items():
        found, size = fits(config, model)
        cards.append({"label": label, "config": config, "model": model, "model_gib": size, "fits": found})
        print(cards[-1], flush=True)
    recipes = []
    for config, (card, model) in RECIPES.items():
        fit = estimate(loaded(config, model, []))
        total, host = round(fit.total / GIB, 1), round(fit.host / GIB, 1)
        seconds = round(fit.copied / RATE, 2)
        row = {"config": config, "model": model, "card": card}
        recipes.append(row | {"total_gib": total, "host_gib": host, "copies_s": seconds})
        print(recipes[-1], flush=True)
    command = shlex.join(["python", *sys.argv])
    result = {"command": command, "diffrl_version": __version__, "cases": rows, "cards": cards, "recipes": recipes}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
