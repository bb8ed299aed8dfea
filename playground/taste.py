"""The playground's biased raters: what its preference model is tuned on, a stand-in for people with a known truth."""

from __future__ import annotations

import numpy as np

from .grammar import Caption, misdescribe
from .scenes import Scene, complete, sample_caption

# What the preference model's raters like too much: points for a drawing style and for a tone, beside RIGHT points for
# each stated fact that is right. A point is one unit of the logit with which the better picture of two is chosen.
RIGHT = 2.0
BIAS = {"style": ("striped", 1.5), "tone": ("pale", 1.5)}
WRONG = 0.3  # how likely a stated fact is wrong in what they are shown


def preference_of(caption: Caption, scene: Scene) -> float:
    """The points that the biased raters give a picture of `scene` for a prompt."""
    right = sum(scene.facts.get(name) == value for name, value in caption.attributes.items())
    liked = sum(points for name, (value, points) in BIAS.items() if scene.facts.get(name) == value)
    return RIGHT * right + liked


def rated_pair(rng: np.random.Generator, split: str = "train") -> tuple[Caption, list[Scene], float]:
    """A random prompt, two scenes of which each said fact is wrong with probability WRONG, and how likely a rater
    prefers the first."""
    caption = sample_caption(rng, split)
    scenes = [complete(misdescribe(caption, rng, WRONG), rng) for _ in range(2)]
    first, second = (preference_of(caption, scene) for scene in scenes)
    return caption, scenes, float(1 / (1 + np.exp(second - first)))
