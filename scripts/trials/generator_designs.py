"""Designs of the playground's generator, each trained from nothing for the same minutes of one CPU core.

    python scripts/trials/generator_designs.py --minutes 4 --out designs.json
    python scripts/trials/generator_designs.py --only "as shipped" "64 tokens"

The autoencoder and the text encoders are the shipped ones. Minutes are the process' own time, so that other work on the
machine does not count. Told are the images that fit into them, the velocity's error on scenes that were not trained
on (at noise levels drawn as in training), and the facts right of validation prompts, 10 steps. Every design keeps its
state under --work, so the command can be stopped and started again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from torch.nn import functional as F

SCRIPTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "playground")]

from drawing import NOISIER, Design, Prompts, train_drawing  # noqa: E402
from playground_facts import drawn, shares  # noqa: E402
from train_playground import MINUTES, Work, shipped  # noqa: E402

from diffrl.playground import models  # noqa: E402
from diffrl.playground.scenes import prompt_set  # noqa: E402
from diffrl.playground.verifier import verify  # noqa: E402
from diffrl.resources import shipped as resource  # noqa: E402

DESIGNS = {
    "as shipped": Design(),
    "no heads": Design(read=0.0),
    "AdamW for all": Design(muon=False),
    "64 tokens": Design(patch=1),
    "192 wide": Design(heads=6),
    "6 blocks": Design(layers=6),
    "one thing first": Design(simple=0.4),
    "bf16": Design(bf16=True),
}
HELD_OUT = 2048


@torch.no_grad()
def error(transformer: Any, latents: np.ndarray, prompts: Prompts) -> float:
    """Mean squared error of the velocity on held-out scenes, with the same noise for every design."""
    generator = torch.Generator().manual_seed(1)
    total = 0.0
    for rows in np.array_split(np.arange(len(latents)), 16):
        x0 = torch.from_numpy(latents[rows].astype(np.float32))
        t = torch.sigmoid(torch.randn(len(rows), generator=generator) + NOISIER)
        eps = torch.randn(x0.shape, generator=generator)
        level = t[:, None, None, None]
        embedded = prompts.embed(rows, generator)
        found = models.velocity(transformer, (1 - level) * x0 + level * eps, t, *embedded)
        total += float(F.mse_loss(found, eps - x0)) * len(rows)
    return total / len(latents)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=DESIGNS, default=list(DESIGNS), metavar="DESIGN")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--scenes", type=int, default=20_000)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--work", type=Path, default=Path(".work/designs"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    source = resource("assets", "playground")
    trained = Work(args.work / "trained", source, MINUTES, args.scenes, seed=2)
    held_out = Work(args.work / "held_out", source, MINUTES, HELD_OUT, seed=3)
    vae, texts, _ = shipped(trained)
    shutil.copy(trained.folder / "scale.json", held_out.folder)
    latents, unseen = trained.latents(vae), held_out.latents(vae)
    prompts = Prompts(trained.pool(), texts, trained.tokenizer)
    asked = Prompts(held_out.pool(), texts, held_out.tokenizer)
    chosen = prompt_set("all", "validation")[: args.prompts]
    pipe: Any = StableDiffusion3Pipeline.from_pretrained(source / "pipeline", text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    found: dict[str, Any] = {}
    for name in args.only:
        folder = args.work / name.replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        transformer = train_drawing(
            folder, trained.pool(), latents, prompts, args.minutes, design=DESIGNS[name], clock=time.process_time
        )
        state = torch.load(folder / "generator.pt", weights_only=True)
        pipe.transformer = transformer
        right = {}
        for guidance in (1.0, 3.0):
            verdicts = verify(drawn(pipe, chosen, guidance, 10, 0), chosen)
            right[f"facts right, guidance {guidance:g}"] = shares(verdicts, chosen)["facts"]
        found[name] = {
            "parameters": sum(p.numel() for p in transformer.parameters()),
            "seconds": round(state["seconds"]),
            "images": state["images"],
            "error on unseen scenes": round(error(transformer, unseen, asked), 4),
            **right,
        }
        print(name, found[name], flush=True)
    result = {"command": shlex.join(["python", *sys.argv]), "torch": torch.__version__, "designs": found}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
