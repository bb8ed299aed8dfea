"""Does D2-Align's direction lie along the bias that was planted, and does the corrected reward lose it?

    python -m experiments.trials.planted_direction --seeds 0 1 2 --out assets/results/planted_direction.json

For each seed the direction of the preference model is learned as configs/playground/d2align.yaml does, on images of the
shipped generator. It is compared with axes that are known: how the embedding of one rendered scene moves when only its
style, or only its tone, becomes the one that the raters like (planted), or another one (not planted). A direction drawn
at random has a cosine of 0 with a deviation of 1 / sqrt(D). Then the corrected reward is asked what it pays for a liked
style, a liked tone and a stated fact that is right, beside what the plain one pays; a correction that works pays less
for the first two against the third. What it pays is also measured for other lengths of the direction, of which the
paper leaves open which is meant.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from diffrl.methods.d2align.corrected import OMEGA, guided_embedding, load_direction
from diffrl.rewards import load_reward
from diffrl_playground import grammar
from diffrl_playground.grammar import STYLES, TONES, Caption
from diffrl_playground.renderer import render
from diffrl_playground.scenes import Scene, complete, sample_caption
from diffrl_playground.taste import BIAS
from experiments import command

VALUES = {"style": STYLES, "tone": TONES}
LENGTHS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of b_v, against the learned length


def learned(seed: int) -> Tensor:
    """b_v (D,) of the preference model, learned by the command."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ["rewards.clip=null", "rewards.preference.weight=1.0", "watch.plain=null", f"seed={seed}"]
        command = [sys.executable, "-m", "diffrl", "d2align", "learn", "playground/d2align"]
        subprocess.run([*command, *settings, f"run_dir={folder}/run"], check=True, stdout=sys.stderr)
        return load_direction(Path(folder) / "run/d2align/direction.safetensors").vector


def pictures(scenes: Sequence[Scene]) -> Tensor:
    """(N, 3, 64, 64) in [0, 1]."""
    return torch.from_numpy(np.stack([render(scene) for scene in scenes])).permute(0, 3, 1, 2) / 255.0


def free_captions(count: int, rng: np.random.Generator) -> list[Caption]:
    """Captions of drawn shapes that say neither style nor tone."""
    captions: list[Caption] = []
    while len(captions) < count:
        caption = sample_caption(rng, "test")
        if caption.kind in grammar.SHAPED and not {"style", "tone"} & caption.attributes.keys():
            captions.append(caption)
    return captions


def one_wrong(caption: Caption, scene: Scene, rng: np.random.Generator) -> Scene:
    """The scene drawn anew with one said fact, chosen at random, at another value."""
    while True:
        attributes = dict(caption.attributes)
        name = str(rng.choice(sorted(attributes)))
        attributes[name] = str(rng.choice([v for v in grammar.VALUES[grammar.kind_of(name)] if v != attributes[name]]))
        try:
            wrong = complete(Caption(caption.kind, attributes), rng)
        except ValueError:  # two things that would be one
            continue
        style = {fact: scene.facts[fact] for fact in VALUES}
        return dataclasses.replace(wrong, facts={**wrong.facts, **style})


@torch.no_grad()
def embedded(reward: Any, scenes: Sequence[Scene]) -> Tensor:
    """(N, D) unit embeddings of rendered scenes."""
    return torch.cat([reward.embed_image(part) for part in pictures(scenes).split(64)]).float()


def cosine(a: Tensor, b: Tensor) -> float:
    return round(float(F.cosine_similarity(a, b, dim=0)), 3)


def axes(by: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Axes (D,) of images by name, planted and not."""
    result: dict[str, Tensor] = {}
    for fact, values in VALUES.items():
        for value in values:
            others = torch.stack([by[fact][other] for other in values if other != value]).mean(0)
            result[f"image {fact} {value}"] = (by[fact][value] - others).mean(0)
    liked = [F.normalize(result[f"image {fact} {value}"], dim=0) for fact, (value, _) in BIAS.items()]
    return result | {"image planted": torch.stack(liked).sum(0)}


def paid(score: Callable[[Tensor], Tensor], by: dict[str, dict[str, Tensor]], true: Tensor, wrong: Tensor) -> Any:
    """What a score pays for a liked style, a liked tone and a right fact, and the first two over the third."""
    points: dict[str, float] = {}
    for fact, (liked, _) in BIAS.items():
        others = torch.stack([score(by[fact][value]) for value in VALUES[fact] if value != liked]).mean(0)
        points[f"{fact} {liked}"] = float((score(by[fact][liked]) - others).mean())
    points["a stated fact right"] = right = float((score(true) - score(wrong)).mean())
    bias = sum(points[f"{fact} {liked}"] for fact, (liked, _) in BIAS.items())
    return {name: round(value, 3) for name, value in points.items()} | {"bias over right": round(bias / right, 3)}


def _score(reward: Any, e_text: Tensor, e_image: Tensor) -> Tensor:
    return reward.score(e_image, e_text)


def table(result: dict[str, Any]) -> str:
    """What D2-Align's direction does to the preference model's planted bias."""
    seeds = result["seeds"]
    ways = list(seeds[0]["corrected reward, by length"])
    length = np.mean([seed["length"] for seed in seeds])
    heads = [way.replace("times", "x the direction") for way in ways]
    lines = [f"| points for | plain reward | {' | '.join(heads)} |", "| --- " * (len(ways) + 2) + "|"]
    for name, plain in result["plain reward"].items():
        means = [np.mean([seed["corrected reward, by length"][way][name] for seed in seeds]) for way in ways]
        lines.append(f"| {name} | {plain:.2f} | {' | '.join(f'{mean:.2f}' for mean in means)} |")
    cosines = {
        name: [seed["cosines"][name] for seed in seeds]
        for name in ("image planted", "image style striped", "image tone pale", "image style filled", "image tone dark")
    }
    lines += ["", "| axis of rendered pictures | cosine of the direction with it |", "| --- | --- |"]
    lines += [f"| {name.removeprefix('image ')} | {np.mean(cosine_of):+.2f} |" for name, cosine_of in cosines.items()]
    chance = result["deviation of a random direction's cosine"]
    told_by = (
        f"`{result['command']}`: {len(seeds)} seeds, {result['prompts']} prompts; the learned length is {length:.2f}."
    )
    return "\n".join(lines) + f"\n\n{told_by} A random direction's cosine has a deviation of {chance}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--out", type=Path, help="JSON file of the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    reward: Any = load_reward("preference", device="cpu")
    captions = free_captions(args.prompts, rng)
    texts = [caption.text() for caption in captions]
    base = [complete(caption, rng) for caption in captions]
    by = {
        fact: {
            value: embedded(reward, [dataclasses.replace(s, facts={**s.facts, fact: value}) for s in base])
            for value in values
        }
        for fact, values in VALUES.items()
    }
    true = embedded(reward, base)
    wrong = embedded(reward, [one_wrong(c, s, rng) for c, s in zip(captions, base, strict=True)])
    known = axes(by)
    with torch.no_grad():
        e_text = reward.embed_text(texts).float()
    result: dict[str, Any] = {
        "command": command(),
        "prompts": len(base),
        "dimensions": e_text.shape[1],
        "deviation of a random direction's cosine": round(e_text.shape[1] ** -0.5, 3),
        "plain reward": paid(partial(_score, reward, e_text), by, true, wrong),
        "seeds": [],
    }
    vectors = [learned(seed) for seed in args.seeds]
    for seed, vector in zip(args.seeds, vectors, strict=True):
        row: dict[str, Any] = {"seed": seed, "length": round(float(vector.norm()), 3)}
        row["cosines"] = {name: cosine(vector, axis) for name, axis in known.items()}
        row["corrected reward, by length"] = {}
        for factor in LENGTHS:
            e_guided = guided_embedding(e_text, factor * vector, OMEGA)
            points = paid(partial(_score, reward, e_guided), by, true, wrong)
            row["corrected reward, by length"][f"{factor:g} times"] = points
        result["seeds"].append(row)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
