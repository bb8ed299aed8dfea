"""How well the playground's generator draws: facts right by kind, variety, and what the autoencoder loses.

    python -m experiments.trials.playground_facts --out facts.json
    python -m experiments.trials.playground_facts --model FOLDER --guidance 1 3 --steps 10

Prompts of the test split, of every kind, which no training prompt's composition shares; one image each. Variety is of 8
images for each of a quarter as many prompts. The plain diffusers pipeline draws. True renderings of the same prompts go
through the autoencoder and back.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline

from diffrl.lora_files import lora_file
from diffrl.resources import shipped
from diffrl_playground.artefact import artefact
from diffrl_playground.grammar import facts, kind_of, parse
from diffrl_playground.renderer import draw
from diffrl_playground.scenes import prompt_set
from diffrl_playground.verifier import Verdict, verify
from experiments import command
from experiments.variety import variety

BATCH, MEMBERS = 64, 8


def drawn(pipe: Any, prompts: Sequence[str], guidance: float, steps: int, seed: int) -> np.ndarray:
    """Images uint8 (N, 64, 64, 3)."""
    generator = torch.Generator().manual_seed(seed)
    parts = [
        pipe(
            list(prompts[i : i + BATCH]), num_inference_steps=steps, guidance_scale=guidance, max_sequence_length=0,
            height=64, width=64, output_type="np", generator=generator,
        ).images
        for i in range(0, len(prompts), BATCH)
    ]  # fmt: skip
    return (np.concatenate(parts) * 255).round().astype(np.uint8)


@torch.no_grad()
def through(vae: Any, images: np.ndarray) -> np.ndarray:
    """The images after a trip through the autoencoder."""
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
    y = torch.cat([vae.decode(vae.encode(part).latent_dist.mean).sample for part in x.split(BATCH)])
    return ((y.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()


def shares(verdicts: Sequence[Verdict], prompts: Sequence[str]) -> dict[str, Any]:
    """Share of facts that are right, in all, by the fact's kind and by the prompt's; and of images with all right."""
    by_fact, by_prompt = defaultdict(list), defaultdict(list)
    for verdict, prompt in zip(verdicts, prompts, strict=True):
        caption = parse(prompt)
        for name in facts(caption):
            by_fact[kind_of(name)].append(verdict.strict[name])
            by_prompt[caption.kind].append(verdict.strict[name])
    every = [right for answers in by_fact.values() for right in answers]

    def means(table: dict[str, list[bool]]) -> dict[str, float]:
        return {name: round(float(np.mean(answers)), 3) for name, answers in sorted(table.items())}

    return {
        "facts": round(float(np.mean(every)), 3),
        "all_right": round(float(np.mean([verdict.all_right for verdict in verdicts])), 3),
        "by_fact": means(by_fact),
        "by_prompt": means(by_prompt),
    }


def table(result: dict[str, Any]) -> str:
    """How well the playground's generator draws, before and after its last stage."""
    now, before = result["figures"], result["figures before wrong captions"]
    columns = {
        "through the autoencoder": now["autoencoder"],
        "before the last stage": before["guidance 1"],
        "... guidance 3": before["guidance 3"],
        "as shipped": now["guidance 1"],
        "... guidance 3 ": now["guidance 3"],
    }
    lines = [f"| | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    rows = {"facts right": "facts", "all facts right": "all_right"}
    rows |= {f"of {n}": f"by_fact.{n}" for n in ("shape", "color", "count", "relation", "background", "word")}
    for name, path in (rows | {"variety": "variety", "artefact": "artefact"}).items():
        outer, _, inner = path.rpartition(".")
        numbers = [(column[outer] if outer else column).get(inner) for column in columns.values()]
        cells = ["" if x is None else f"{x:.3f}" for x in numbers]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def turbo(result: dict[str, Any], nft: dict[str, Any]) -> str:
    """The distilled student beside the generator, and a trained LoRA on both (nft.json)."""
    result = result["turbo"]
    lines = ["| | facts right | all facts right | variety | artefact |", "| --- | --- | --- | --- | --- |"]
    for name, row in result["figures"].items():
        cells = [f"{row[key]:.3f}" for key in ("facts", "all_right", "variety", "artefact")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    curves = [run["curve"] for run in nft["runs"]]
    lines += ["", "| held-out reward, mean of three seeds | before | after NFT on the model |", "| --- | --- | --- |"]
    for name, key in (("the model", "eval/playground"), ("its turbo student", "eval/turbo/playground")):
        ends = [np.mean([curve[i][key] for curve in curves]) for i in (0, -1)]
        lines.append(f"| {name} | {ends[0]:.3f} | {ends[1]:.3f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=shipped("assets", "playground", "pipeline"))
    parser.add_argument("--merge", help="a LoRA that becomes part of the model first: playground/turbo, for 4 steps")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--split", choices=("validation", "test"), default="test")
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0, 3.0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--varied", action="store_true", help="also measure variety (8 images of each fourth prompt)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pipe: Any = StableDiffusion3Pipeline.from_pretrained(args.model, text_encoder_3=None, tokenizer_3=None)
    if args.merge:
        pipe.load_lora_weights(str(lora_file(args.merge)))
    pipe.set_progress_bar_config(disable=True)
    prompts = prompt_set("all", args.split)[: args.prompts]
    rng = np.random.default_rng(args.seed)
    true = np.stack([draw(prompt, rng) for prompt in prompts])
    back = through(pipe.vae, true)
    result: dict[str, Any] = {
        "command": command(),
        "renderings": shares(verify(true, prompts), prompts),
        "autoencoder": shares(verify(back, prompts), prompts) | {"artefact": round(float(artefact(back).median()), 4)},
    }
    few = [prompt for prompt in prompts[::4] for _ in range(MEMBERS)]
    for guidance in args.guidance:
        images = drawn(pipe, prompts, guidance, args.steps, args.seed)
        row = shares(verify(images, prompts), prompts) | {"artefact": round(float(artefact(images).median()), 4)}
        if args.varied:
            seen = variety(drawn(pipe, few, guidance, args.steps, args.seed + 1), few)
            row |= {"variety": round(seen.value or 0.0, 3), "unreadable": round(seen.unreadable, 3)}
        result[f"guidance {guidance:g}"] = row
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
