"""Does `diffrl rewards fit` find the bias that the playground's raters have?

    python -m experiments.trials.fitted_bias --out assets/results/fitted_bias.json

Raters (`diffrl_playground.taste`) choose between two renderings of a prompt, each of whose stated facts is wrong with
some probability: points for facts that are right, and, whatever the prompt says, for stripes and for pale pictures. A
head is fitted on the shipped CLIP's embeddings; its scores of other prompts' renderings are regressed on these.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from diffrl.reward_tools.fit import fit_head
from diffrl.rewards.registry import load_reward
from diffrl_playground.grammar import Caption, misdescribe
from diffrl_playground.renderer import render
from diffrl_playground.scenes import Scene, complete, sample_caption
from diffrl_playground.taste import BIAS, RIGHT, WRONG, preference_of, rated_pair

PLANTED = {"right": RIGHT, **{name: value for name, (_, value) in BIAS.items()}}
TERMS = tuple(PLANTED)


def drawn(rng: np.random.Generator, split: str) -> tuple[Caption, Scene]:
    caption = sample_caption(rng, split)
    return caption, complete(misdescribe(caption, rng, WRONG), rng)


def write_set(folder: Path, pairs: int, rng: np.random.Generator) -> Path:
    """Pairs with a rater's choice, as an image set."""
    file = folder / "pairs.jsonl"
    with file.open("w") as stream:
        for number in range(pairs):
            caption, scenes, chance = rated_pair(rng)
            names = [f"{number:05d}-{side}.png" for side in range(2)]
            for name, scene in zip(names, scenes, strict=True):
                Image.fromarray(render(scene)).save(folder / name)
            won = float(rng.random() < chance)
            row = {"images": names, "prompt": caption.text(), "scores": {"preference": [won, 1 - won]}}
            stream.write(json.dumps(row) + "\n")
    return file


def terms_of(caption: Caption, scene: Scene) -> list[float]:
    right = sum(scene.facts.get(name) == value for name, value in caption.attributes.items())
    return [float(right), *(float(scene.facts.get(name) == value) for name, (value, _) in BIAS.items())]


class Renderings:
    """Pictures of prompts of the test split, each of whose stated facts is wrong with some probability."""

    def __init__(self, count: int, rng: np.random.Generator) -> None:
        examples = [drawn(rng, "test") for _ in range(count)]
        self.pixels = torch.from_numpy(np.stack([render(scene) for _, scene in examples])).permute(0, 3, 1, 2) / 255
        self.texts = [caption.text() for caption, _ in examples]
        self.terms = np.array([terms_of(*example) for example in examples])
        self.stated = np.array([len(caption.attributes) for caption, _ in examples], float)
        self.points = np.array([preference_of(*example) for example in examples])

    @torch.no_grad()
    def scores(self, reward: Any) -> np.ndarray:
        """A reward's scores (N,) of them."""
        parts = zip(self.pixels.split(128), range(0, len(self.texts), 128), strict=True)
        scores = [reward(part, self.texts[i : i + 128], [{}] * len(part)) for part, i in parts]
        return np.asarray(torch.cat(scores).double())

    def regressed(self, scores: np.ndarray) -> dict[str, list[float]]:
        """Coefficient and standard error of each term, beside the number of stated facts."""
        x = np.column_stack([self.terms, self.stated, np.ones(len(self.terms))])
        found, *_ = np.linalg.lstsq(x, scores, rcond=None)
        noise = ((scores - x @ found) ** 2).sum() / (len(x) - x.shape[1])
        errors = np.sqrt(np.diag(np.linalg.inv(x.T @ x)) * noise)
        return {name: [float(found[i]), float(errors[i])] for i, name in enumerate(TERMS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=3000)
    parser.add_argument("--judged", type=int, default=4000)
    arguments = parser.parse_args()
    rng = np.random.default_rng(7)
    with tempfile.TemporaryDirectory() as folder:
        head = Path(folder) / "head.safetensors"
        figures = fit_head(str(write_set(Path(folder), arguments.pairs, rng)), head, "clip", {})
        fitted = load_reward("fitted", head=str(head))
    shown = Renderings(arguments.judged, rng)
    result: dict[str, Any] = {"pairs": arguments.pairs, "figures": figures, "judged": arguments.judged}
    result["planted"] = PLANTED
    for name, reward in (("fitted", fitted), ("clip", load_reward("clip")), ("preference", load_reward("preference"))):
        scores = shown.scores(reward)
        correlations = {term: float(np.corrcoef(scores, shown.terms[:, i])[0, 1]) for i, term in enumerate(TERMS)}
        result[name] = {
            "coefficients": shown.regressed(scores),
            "correlation with the terms": correlations,
            "correlation with the raters' points": float(np.corrcoef(scores, shown.points)[0, 1]),
        }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
