"""People's votes: an epoch's groups are shown on `diffrl watch`, a person picks or ranks, and the run learns from that.

Rankings become pairs, pairs become Bradley-Terry scores of the group's images (`diffrl.reward_tools.bradley_terry`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffrl.errors import UserError
from diffrl.methods import ballots
from diffrl.methods.asking import Answers
from diffrl.methods.groups import ImageGroup
from diffrl.reward_tools.bradley_terry import NORMAL, bradley_terry, wins_of
from diffrl.rewards.protocol import RewardError
from diffrl_zoo.cards import card_of

LONGEST = 3600.0  # seconds: the other processes wait for their peer that long
LOOK = 0.5  # seconds between two looks at the votes


class Votes:
    """Bradley-Terry scores, in logits, of the images of a group, from people's votes; their mean in a group is 0.

    `groups`: how many of an epoch's groups are shown, evenly spread; the others get no score. `wait`: seconds that the
    run waits at most; then it goes on with the votes that came, and a group without any has no score (NaN, not 0).
    `votes`: the run goes on as soon as each group has so many. `prior`: each image counts as having won and lost so
    many comparisons more, so that the one that was picked is not infinitely good.
    """

    name = "votes"
    groupwise = True
    asks = True
    card = card_of(name)

    def __init__(self, groups: int = 8, wait: float = 300.0, votes: int = 1, prior: float = 0.5) -> None:
        for name, value in (("groups", groups), ("votes", votes)):
            if not isinstance(value, int) or value < 1:
                raise UserError(f"votes: {name}: expected a whole number of at least 1, got {value!r}")
        if not 0 <= wait <= LONGEST:
            raise UserError(f"votes: wait: expected 0 to {LONGEST:g} seconds, got {wait!r}")
        if not 0 < prior <= 100:
            raise UserError(f"votes: prior: expected a number above 0 and up to 100, got {prior!r}")
        self.groups, self.wait, self.votes, self.prior = groups, float(wait), votes, float(prior)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        raise RewardError("votes: people are asked by a training run alone, on `diffrl watch RUN_DIR`")

    def ask(self, run_dir: Path, epoch: int, groups: Sequence[ImageGroup], look: Callable[[str], None]) -> Answers:
        """Shows the groups, waits, and returns what came; `look` gets what is going on, often, and may raise."""
        if (before := self.answered(run_dir, epoch, groups)) is not None:
            return before  # a resumed run trains this epoch once more: on the same votes
        names, started = [group.identity for group in groups], time.monotonic()
        ballots.ask(run_dir, epoch, groups, time.time() + self.wait)
        while True:
            counted = [vote for vote in ballots.read_votes(run_dir) if vote["group"] in names]
            numbers = [sum(vote["group"] == name for vote in counted) for name in names]
            waited = time.monotonic() - started
            if min(numbers) >= self.votes or waited >= self.wait or ballots.may_go_on(run_dir, epoch):
                break
            done = sum(number >= self.votes for number in numbers)
            look(f"votes: {done}/{len(names)} groups, {self.wait - waited:.0f} s left; diffrl watch {run_dir}")
            time.sleep(min(LOOK, self.wait - waited))
        answers = self._answers(groups, counted, waited)
        ballots.close(run_dir, epoch, names, counted, scores=answers.scores, errors=answers.errors)
        return answers

    def answered(self, run_dir: Path, epoch: int, groups: Sequence[ImageGroup]) -> Answers | None:
        """What the run went on with in this epoch; None if it was not asked about these very images."""
        closed = ballots.closed(run_dir, epoch, [group.identity for group in groups])
        if closed is None:
            return None
        counted = [vote for vote in ballots.read_votes(run_dir) if vote["vote"] in closed["votes"]]
        return self._answers(groups, counted, 0.0)

    def _answers(self, groups: Sequence[ImageGroup], counted: Sequence[Mapping[str, Any]], waited: float) -> Answers:
        scores, errors, numbers = list[Any](), list[Any](), list[int]()
        for group in groups:
            rankings = [
                vote["scores"][ballots.PREFERENCE]
                for vote in counted
                if vote["group"] == group.identity and len(vote["images"]) == len(group.images)
            ]
            numbers.append(len(rankings))
            if not rankings:
                scores.append([None] * len(group.images))
                errors.append([None] * len(group.images))
                continue
            values, deviations = bradley_terry(wins_of(rankings, len(group.images)), self.prior)
            scores.append(torch.from_numpy(values).float().tolist())
            errors.append([round(float(deviation), 4) for deviation in deviations])
        known = [error for row in errors for error in row if error is not None]
        figures: dict[str, float | None] = {
            "groups": len(groups),
            "answered": sum(number > 0 for number in numbers),
            "votes": sum(numbers),
            "waited": round(waited, 1),
            "interval": NORMAL * sum(known) / len(known) if known else None,  # mean half of a 95 % interval
        }
        note = ""
        if not figures["votes"]:
            note = f"no vote came within {self.wait:g} s; trained without this reward"
        return Answers(scores, errors, figures, note)
