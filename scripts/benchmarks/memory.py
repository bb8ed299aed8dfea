"""What the recipes need on each GPU, memory and arithmetic, as `diffrl doctor` counts it on fake tensors: true sizes,
no weights, any machine.

    python scripts/benchmarks/memory.py --out assets/results/memory.json

The models are `assets/architectures`: configs without weights. Rewards come on top.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from diffrl import __version__
from diffrl.config import load_config
from diffrl.resources import shipped
from diffrl.run.fit import GIB, estimate

SD35, CHECKPOINTING = "stable-diffusion-3.5-medium", "optimise.gradient_checkpointing=true"
# label, config, model, processes, FSDP2, overrides
CASES: list[tuple[str, str, str, int, bool, list[str]]] = [
    ("SD3.5-Medium, 512 px", "sd35/nft_ocr", SD35, 8, False, []),
    ("SD3.5-Medium, checkpointing", "sd35/nft_ocr", SD35, 8, False, [CHECKPOINTING]),
    ("SD3.5-Medium, 1 GPU", "sd35/nft_ocr", SD35, 1, False, []),
    ("SD3.5-Medium, 1 GPU of 24 GB", "sd35/nft_ocr", SD35, 1, False, ["optimise.micro_batch=6", CHECKPOINTING]),
    ("FLUX.1-dev, 512 px", "flux/nft_pickscore", "FLUX.1-dev", 8, False, []),
    ("FLUX.1-dev, FSDP2 over 8", "flux/nft_pickscore", "FLUX.1-dev", 8, True, []),
    ("FLUX.1-dev, FSDP2 over 64", "flux/nft_pickscore", "FLUX.1-dev", 64, True, ["optimise.micro_batch=2"]),
]


def table(result: dict[str, Any]) -> str:
    """The counted memory of shipped recipes."""
    heads = "| recipe | processes | sharded | GiB on each device | text encoders in main memory, GiB |"
    lines = [heads, "| --- " * 5 + "|"]
    for case in result["cases"]:
        head = f"| {case['label']} (`{case['config']}`) | {case['processes']} | {'FSDP2' if case['fsdp2'] else ''} |"
        lines.append(f"{head} {case['total_gib']} | {case['text_encoders_gib']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for label, config, model, processes, sharded, overrides in CASES:
        prompts = ["prompts.train=playground/words/train", "prompts.test=playground/words/test"]  # not counted
        source = shipped("assets", "architectures", model)
        loaded = load_config(config, [*overrides, *prompts, f"model={source}"], world=processes)
        fit = estimate(loaded, processes, sharded)
        sizes = {name: round(size / GIB, 2) for name, size in {**fit.parts, **fit.peaks}.items()}
        total, host = round(fit.total / GIB, 1), round(fit.host / GIB, 1)
        how = {"label": label, "config": config, "overrides": overrides, "processes": processes, "fsdp2": sharded}
        petaflop = {name: round(value / 1e15, 3) for name, value in fit.work.items()}
        epoch = {"images": loaded.rollout.images, "petaflop_of_a_device": petaflop}
        rows.append(how | {"total_gib": total, "text_encoders_gib": host, "gib": sizes, "epoch": epoch})
        print(f"{label:<32} {processes:>3} processes {total:>7.1f} GiB  {sizes}  {epoch}", flush=True)
    result = {"command": shlex.join(["python", *sys.argv]), "diffrl_version": __version__, "cases": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
