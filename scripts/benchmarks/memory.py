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
from diffrl.memory import advice
from diffrl.memory.fit import GIB, Fit, estimate
from diffrl.memory.reward_memory import RATE
from diffrl.resources import shipped
from diffrl.rewards.registry import takes

CHECKPOINTING = "optimise.gradient_checkpointing=true"
# label, config, processes, FSDP2, overrides
CASES: list[tuple[str, str, int, bool, list[str]]] = [
    ("SD3.5-Medium, 512 px", "sd35/nft_ocr", 8, False, []),
    ("SD3.5-Medium, checkpointing", "sd35/nft_ocr", 8, False, [CHECKPOINTING]),
    ("FLUX.1-dev, 512 px", "flux/nft_pickscore", 8, False, []),
    ("FLUX.1-dev, FSDP2 over 8", "flux/nft_pickscore", 8, True, []),
    ("FLUX.1-dev, FSDP2 over 64", "flux/nft_pickscore", 64, True, ["optimise.micro_batch=2"]),
]
CARDS, BASES = (16, 24, 32, 48, 80, 141), ("full", "int8", "nf4")  # GiB; weights by size, fp8's being int8's
ONE_ROW = "optimise.micro_batch=1"
MODELS = {  # label -> config
    "SDXL, 768 px": "sdxl/nft_pickscore",
    "SD3.5-Medium": "sd35/nft_ocr",
    "Lumina-Image-2.0": "lumina2/nft_pickscore",
    "FLUX.2-klein-base-4B": "flux2/nft_pickscore",
    "Z-Image": "z_image/nft_pickscore",
    "FLUX.1-dev": "flux/nft_pickscore",
    "Krea-2": "krea2/nft_pickscore",
    "HiDream-I1-Full": "hidream/nft_pickscore",
    "Qwen-Image": "qwen_image/nft_pickscore",
}
WORDS = {f"engine.base={base}": base for base in BASES} | {
    "engine.encoders=apart": "apart",
    "engine.decode=1": "decode 1",
    CHECKPOINTING: "checkpointing",
    "rollout.batch_size=1": "batch 1",
}


def recipes() -> dict[str, int]:
    """The recipes made for one card, and its GiB."""
    root = shipped("configs")
    names = sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*gb.yaml"))
    return {name: int(name.rpartition("_")[2].removesuffix("gb")) for name in names}


def without_rewards(config: str) -> list[str]:
    """Overrides that leave the device to the model."""
    found = load_config(config)
    tables: dict[str, Any] = {"rewards": found.rewards, "watch": found.watch}
    names = [(t, name, one.plugin or name) for t, table in tables.items() for name, one in table.items()]
    return [f"{t}.{name}.device=cpu" for t, name, plugin in names if takes(plugin, "device")]


def loaded(config: str, overrides: list[str], processes: int = 1) -> Config:
    """A recipe on the architecture of its model."""
    prompts = ["prompts.train=ocr/train", "prompts.test=ocr/test"]  # not counted
    source = shipped("assets", "architectures", Path(load_config(config).model).name)
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
    cards = [card for card in CARDS if card <= 80]  # what fits there fits on larger ones
    heads = " | ".join(["model (recipe)", "read, GiB", *(f"{card} GB" for card in cards)])
    lines = [f"| {heads} |", "| --- " * (len(cards) + 2) + "|"]
    for row in result["cards"]:
        cells = []
        for found in (row["fits"][str(card)] for card in cards):
            words = [] if found is None else [WORDS.get(word, word) for word in found["overrides"]]
            cells.append("no" if found is None else f"{', '.join(words)}: {found['gib']}")
        lines.append(f"| {row['label']} (`{row['config']}`) | {row['model_gib']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def by_recipe(result: dict[str, Any]) -> str:
    """The recipes made for one card."""
    lines = ["| recipe | card, GB | GiB on the device | rewards' copies in an epoch, s | waits in main memory, GiB |"]
    lines.append("| --- " * 5 + "|")
    for row in result["recipes"]:
        sizes = f"{row['total_gib']} | {row['copies_s']} | {row['host_gib']}"
        lines.append(f"| `{row['config']}` | {row['card']} | {sizes} |")
    return "\n".join(lines) + "\n"


def fits(config: str) -> tuple[dict[str, dict[str, Any] | None], float]:
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
                advised = advice.advise(loaded(config, [*alone, f"engine.base={base}"]), card * GIB)
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
    for label, config, processes, sharded, overrides in CASES:
        counted = loaded(config, [*overrides, *without_rewards(config)], processes)
        fit = estimate(counted, processes, sharded)
        sizes = {name: round(size / GIB, 2) for name, size in {**fit.parts, **fit.peaks}.items()}
        total, host = round(fit.total / GIB, 1), round(fit.host / GIB, 1)
        how = {"label": label, "config": config, "overrides": overrides, "processes": processes, "fsdp2": sharded}
        petaflop = {name: round(value / 1e15, 3) for name, value in fit.work.items()}
        epoch = {"images": counted.rollout.images, "petaflop_of_a_device": petaflop}
        rows.append(how | {"total_gib": total, "text_encoders_gib": host, "gib": sizes, "epoch": epoch})
        print(f"{label:<32} {processes:>3} processes {total:>7.1f} GiB  {sizes}  {epoch}", flush=True)
    cards = []
    for label, config in MODELS.items():
        found, size = fits(config)
        cards.append({"label": label, "config": config, "model_gib": size, "fits": found})
        print(cards[-1], flush=True)
    made = []
    for config, card in recipes().items():
        fit = estimate(loaded(config, []))
        total, host, seconds = round(fit.total / GIB, 1), round(fit.host / GIB, 1), round(fit.copied / RATE, 2)
        made.append({"config": config, "card": card, "total_gib": total, "host_gib": host, "copies_s": seconds})
        print(made[-1], flush=True)
    command = shlex.join(["python", *sys.argv])
    result = {"command": command, "diffrl_version": __version__, "cases": rows, "cards": cards, "recipes": made}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
