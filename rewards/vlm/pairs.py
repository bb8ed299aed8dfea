"""A vision-language model that compares the images of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from diffrl.rewards.protocol import RewardError
from diffrl_zoo.cards import card_of
from diffrl_zoo.inputs import check_choice
from diffrl_zoo.vlm import parse
from diffrl_zoo.vlm.backend import Judge
from diffrl_zoo.vlm.question import ASK, Question, form_of

Order = tuple[int, int]  # who is shown first, and who then


def win_rates(wins: Mapping[Order, float], count: int) -> Tensor:
    """(count,) mean result of every image against the others: `wins[i, j]` is 1 where i, shown first, beat j; NaN for
    an image that is in none."""
    rates = torch.zeros(count, dtype=torch.float64)
    counts = torch.zeros(count, dtype=torch.float64)
    for (i, j), win in wins.items():
        for image, value in ((i, win), (j, 1.0 - win)):
            rates[image] += value
            counts[image] += 1
    return (rates / counts).float()


def tournament(ask: Callable[[Sequence[Order]], Mapping[Order, float]], count: int, seed: str) -> Tensor:
    """(count,) win rates by a knockout of count - 1 pairs: the share of the others that went out earlier, ties half.

    `ask` gets a round's pairs in both orders and gives each first one's result. The first round's pairs are drawn from
    `seed`; of an odd number the last one waits. A drawn pair is won by who stands first. Single elimination
    (ArenaRL) finds the best and the halves, not the order within them.
    """
    draw = torch.Generator().manual_seed(int.from_bytes(sha256(seed.encode()).digest()[:8], "big") >> 1)
    left, rounds, number = torch.randperm(count, generator=draw).tolist(), torch.zeros(count), 0
    while len(left) > 1:
        pairs = list(zip(left[0::2], left[1::2], strict=False))
        results = ask([order for i, j in pairs for order in ((i, j), (j, i))])
        winners = [i if results[i, j] + 1.0 - results[j, i] >= 1.0 else j for i, j in pairs]
        left, number = winners + left[2 * len(pairs) :], number + 1
        rounds[left] = number
    earlier, same = rounds[:, None] > rounds, rounds[:, None] == rounds
    return (earlier.sum(1) + 0.5 * (same.sum(1) - 1)) / (count - 1)


@dataclass(eq=False, repr=False, kw_only=True)
class VlmPairs(Judge):
    """Win rate of every image against all others of its group, each pair shown in both orders; group-wise.

    `mode`: answer (the model names the winner or a tie) or yes (probability that it says yes to "is the first better",
    a soft win). `compare`: all (n (n - 1) requests for a group of n images), or tournament (2 (n - 1): a knockout whose
    pairs are drawn from the prompt, each shown in both orders). All other parameters as in `vlm`.
    """

    name = "vlm_pairs"
    groupwise = True
    card = card_of(name)

    mode: str = "answer"
    question: str | None = None
    compare: str = "all"
    least: float = 0.5

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("answer", "yes"), "vlm_pairs")
        check_choice("compare", self.compare, ("all", "tournament"), "vlm_pairs")
        self.asked = self.question or ASK["pair" if self.mode == "answer" else "pair_yes"]
        if self.mode == "answer":
            self.asked += f' {ASK["end"]} "Winner: A", "Winner: B" or "Winner: tie".'
        self.connect()

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Win rates (n,) in [0, 1] of the images (n, 3, H, W) in [0, 1] of one group."""
        if len(images) < 2:
            raise RewardError("vlm_pairs: a group of one image has no pairs; set rollout.group_size to 2 or more")
        text, rows = self.asked.replace("{prompt}", prompts[0]), list(images)
        form = form_of({"winner": {"type": "string", "enum": ["A", "B", "tie"]}}) if self.mode == "answer" else None
        read = parse.winner if self.mode == "answer" else partial(parse.yes_probability, least=self.least)

        def ask(order: Sequence[Order]) -> dict[Order, float]:
            questions = [Question([rows[i], rows[j]], text, prompts[0], form=form) for i, j in order]
            answers = self.backend.ask(questions, read, first=self.mode == "yes")
            # A refused pair is left out; a knockout needs a result of each, and takes it for a draw.
            missing = 0.5 if self.compare == "tournament" else None
            wins = zip(order, (missing if answer is None else answer for answer in answers), strict=True)
            return {pair: win for pair, win in wins if win is not None}

        if self.compare == "tournament":
            return tournament(ask, len(images), prompts[0])
        return win_rates(ask(list(permutations(range(len(images)), 2))), len(images))
