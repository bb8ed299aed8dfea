"""What the recipes need on each GPU, memory and arithmetic, as `diffrl doctor` counts it on fake tensors: true sizes,
no weights, any machine.

    python scripts/benchmarks/memory.py --out assets/results/memory.json

The models' folders are made from the sizes of the published models, weights left out. Rewards come on top.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from published_models import MODELS, write_model

from diffrl import __version__
from diffrl.config import load_config
from diffrl.run.fit import GIB, estimate

CHECKPOINTING = "optimise.gradient_checkpointing"
# label, config, model, processes, FSDP2, overrides
CASES: list[tuple[str, str, str, int, bool, list[str]]] = [
    ("SD3.5-Medium, 512 px", "sd35/nft_ocr", "sd35-medium", 8, False, []),
    ("SD3.5-Medium, checkpointing", "sd35/nft_ocr", "sd35-medium", 8, False, [f"{CHECKPOINTING}=true"]),
    ("SD3.5-Medium, 1 GPU", "sd35/nft_ocr", "sd35-medium", 1, False, []),
    (
        "SD3.5-Medium, 1 GPU of 24 GB",
        "sd35/nft_ocr",
        "sd35-medium",
        1,
        False,
        ["optimise.micro_batch=6", f"{CHECKPOINTING}=true"],
    ),
    ("FLUX.1-dev, 512 px", "flux/nft_pickscore", "flux-dev", 8, False, []),
    ("FLUX.1-dev, FSDP2 over 8", "flux/nft_pickscore", "flux-dev", 8, True, []),
    ("FLUX.1-dev, FSDP2 over 64", "flux/nft_pickscore", "flux-dev", 64, True, ["optimise.micro_batch=2"]),
]


def table(told: dict[str, Any]) -> str:
    """The counted memory of shipped recipes."""
    lines = [
        "| recipe | processes | sharded | GiB on each device | text encoders in main memory, GiB |",
        "| --- " * 5 + "|",
    ]
    for case in told["cases"]:
        words = f"{case['label']} (`{case['config']}`)"
        sharded = "FSDP2" if case["fsdp2"] else ""
        lines.append(
            f"| {words} | {case['processes']} | {sharded} | {case['total_gib']} | {case['text_encoders_gib']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        folders = {model: write_model(Path(work) / model, model) for model in MODELS}
        for label, config, model, processes, sharded, overrides in CASES:
            prompts = ["prompts.train=playground/words/train", "prompts.test=playground/words/test"]  # not counted
            loaded = load_config(config, [*overrides, *prompts, f"model={folders[model]}"], world=processes)
            fit = estimate(loaded, processes, sharded)
            sizes = {name: round(size / GIB, 2) for name, size in {**fit.parts, **fit.peaks}.items()}
            total, host = round(fit.total / GIB, 1), round(fit.host / GIB, 1)
            how = {"config": config, "overrides": overrides, "processes": processes, "fsdp2": sharded}
            petaflop = {name: round(value / 1e15, 3) for name, value in fit.work.items()}
            epoch = {"images": loaded.rollout.images, "petaflop_of_a_device": petaflop}
            rows.append(
                {"label": label, **how, "total_gib": total, "text_encoders_gib": host, "gib": sizes, "epoch": epoch}
            )
            print(f"{label:<32} {processes:>3} processes {total:>7.1f} GiB  {sizes}  {epoch}", flush=True)
    result = {"command": shlex.join(["python", *sys.argv]), "diffrl_version": __version__, "cases": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
