"""The playground's truth as rewards: the exact verifier (gold), and the distance from its world's images (held out)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffrl.reward_kinds.mapped import known_means
from diffrl_playground.grammar import facts as facts_of
from diffrl_playground.grammar import kind_of, parse, understood
from diffrl_playground.sight import to_pixels
from diffrl_playground.variety import FIGURES
from diffrl_playground.verifier import Verdict, glance, verify
from diffrl_zoo.cards import card_of
from diffrl_zoo.inputs import check_choice

MODES = ("reward", "strict", "all_right")
KINDS = (
    *("shape", "color", "count", "relation", "background", "style", "tone"),
    *("skin", "hair", "mood", "glasses", "hat"),
)


class ByKind:
    """The share of facts that are right by their kind, as `diffrl.reward_kinds.figures.Breakdown`."""

    names = (*KINDS, "word")

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """(B, 13) in [0, 1] of images (B, 3, 64, 64) in [0, 1]; NaN for kinds of which a prompt states no fact."""
        table = torch.full((len(prompts), len(self.names)), float("nan"))
        known = [i for i, prompt in enumerate(prompts) if understood(prompt) is not None]
        for i, verdict in zip(known, verify(images[known], [prompts[i] for i in known]), strict=True):
            facts: dict[str, list[bool]] = {}
            for name, right in verdict.strict.items():
                facts.setdefault(kind_of(name), []).append(right)
            for kind, rights in facts.items():
                table[i, self.names.index(kind)] = sum(rights) / len(rights)
        return table


BY_KIND = ByKind()


MEASURES = {
    "strict": "share of the prompt's facts that are right, without credit for nearly",
    "all_right": "1 where every fact of the prompt is right, else 0",
}


class Playground:
    """How many of the prompt's facts the image shows, in [0, 1], read from the pixels by the exact verifier.

    `mode`: "reward" is half for being right, half partial credit (how far is the shape, the count, the relation);
    "strict" is the share of facts that are right, "all_right" is 1 if all are and 0 otherwise. `facts`: only these
    kinds of facts count (None: all); prompts that state none of them are not judged, nor are prompts that are not of
    the world.
    """

    name = "playground"
    figures = FIGURES
    breakdown = BY_KIND
    card = card_of(name)

    def __init__(self, mode: str = "reward", facts: Sequence[str] | None = None) -> None:
        check_choice("mode", mode, MODES, 'reward "playground"')
        for kind in facts or ():
            check_choice("kind of fact", kind, KINDS, 'reward "playground"')
        self.mode = mode
        if mode in MEASURES:
            self.card = replace(self.card, measures=MEASURES[mode])
        self.facts = None if facts is None else frozenset(facts)

    def applies(self, prompt: str, metadata: Mapping[str, Any]) -> bool:
        """True for prompts of the world that state a fact of the chosen kinds."""
        caption = understood(prompt)
        if caption is None or self.facts is None:
            return caption is not None
        return any(kind_of(name) in self.facts for name in facts_of(caption))

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) in [0, 1] of images (B, 3, 64, 64) in [0, 1]."""
        verdicts = verify(images, list(prompts))
        return torch.tensor([self._value(*pair) for pair in zip(verdicts, prompts, strict=True)], dtype=torch.float32)

    def rewrite(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> list[str]:
        """Each prompt with the facts that its image (3, 64, 64) lacks said once more."""
        texts = []
        for verdict, prompt in zip(verify(images, list(prompts)), prompts, strict=True):
            caption = parse(prompt)
            wrong = {name: value for name, value in caption.attributes.items() if not verdict.strict.get(name, True)}
            texts.append(", ".join([prompt, *wrong.values()]))
        return texts

    def _value(self, verdict: Verdict, prompt: str) -> float:
        if self.facts is None:
            return {"reward": verdict.reward, "strict": verdict.score, "all_right": float(verdict.all_right)}[self.mode]
        chosen: Mapping[str, float] = verdict.facts if self.mode == "reward" else verdict.strict
        values = [float(chosen[name]) for name in facts_of(parse(prompt)) if kind_of(name) in self.facts]
        return float(all(values)) if self.mode == "all_right" else sum(values) / len(values)


class PlaygroundFacts:
    """The share of the prompt's facts that are right, by their kind: a named column for each kind, from one look.

    NaN where a prompt states no fact of a kind.
    """

    name = "playground_facts"
    columns = BY_KIND.names
    card = card_of(name)

    def applies(self, prompt: str, metadata: Mapping[str, Any]) -> bool:
        """True for prompts of the world."""
        return understood(prompt) is not None

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """(B, 13) in [0, 1] of images (B, 3, 64, 64) in [0, 1]."""
        return BY_KIND(images, prompts, metadata)


class PlaygroundRegions:
    """Where an image is right, by the exact verifier: a map of what is drawn, thing by thing, in [-1, 1].

    A region is 1 where all the prompt says of the thing holds, -1 where nothing does or the prompt asks for no such
    thing. `whole`: the map is multiplied by the share of all facts that hold, a in [0, 1], as SRUM (arXiv 2510.12784)
    multiplies by its global score; then relations and counts matter, too.
    """

    name = "playground_regions"
    maps = (8, 8)
    card = card_of(name)

    def __init__(self, whole: bool = False) -> None:
        self.whole = whole

    def applies(self, prompt: str, metadata: Mapping[str, Any]) -> bool:
        """True for prompts of the world."""
        return understood(prompt) is not None

    def map(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """(B, 8, 8) in [-1, 1] of images (B, 3, 64, 64) in [0, 1]; NaN where the prompt says nothing of a place."""
        from diffrl_playground.reading import region_map

        verdicts = verify(images, list(prompts))
        seen = glance(to_pixels(images))
        fine = np.stack([region_map(one, parse(prompt)) for one, prompt in zip(seen, prompts, strict=True)])
        cells = known_means(torch.from_numpy(fine), self.maps)
        share = torch.tensor([verdict.score for verdict in verdicts])
        return cells * share[:, None, None] if self.whole else cells

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """(B,) in [-1, 1] of images (B, 3, 64, 64) in [0, 1]: the map's mean over the places that it judges."""
        return self.map(images, prompts, metadata).flatten(1).nanmean(1)


class Artefact:
    """Distance of an image's patches from the patches of rendered images: 0 for what the world could contain."""

    name = "artefact"
    card = card_of(name)

    def __init__(self) -> None:
        from diffrl_playground.artefact import artefact

        self._distance = artefact

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Distances (B,), not negative, of images (B, 3, 64, 64) in [0, 1]."""
        return self._distance(images).float()
