"""Bradley-Terry scores of things that were compared in pairs, with their intervals.

    P(i beats j) = sigma(s_i - s_j)                              Bradley and Terry 1952
    s = argmax sum_ij w_ij log sigma(s_i - s_j),  sum_i s_i = 0

Symbols: n things; w (n, n), w_ij: how often i beat j, a tie counts one half for each; s (n,) in logits. All in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

NORMAL = 1.959963984540054  # of a 95 % interval


def with_prior(wins: np.ndarray, prior: float) -> np.ndarray:
    """`wins` as if each thing had won and lost `prior` comparisons more, spread over all others.

    Without it what always won would be infinitely good. For two things the scores are log((w_12 + prior) / (w_21 +
    prior)) apart.
    """
    count = len(wins)
    return wins + prior / max(count - 1, 1) * (1 - np.eye(count))


def bradley_terry(wins: np.ndarray, prior: float = 0.5, steps: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """Scores (n,) with mean 0, and their standard errors (n,), by Newton's method.

    The errors are those of scores with mean 0: from the pseudo-inverse of the observed information. `prior`: see
    `with_prior`. Raises ValueError without a prior where the comparisons do not decide: nothing joins two parts of the
    things, or one part has beaten the other every time.
    """
    games = with_prior(np.asarray(wins, np.float64), prior)
    count = len(games)
    scores, ones = np.zeros(count), np.ones((count, count))
    pairs = games + games.T
    for _ in range(steps):
        chance = 1 / (1 + np.exp(np.clip(scores[None] - scores[:, None], -700, 700)))  # (i, j): that i beats j
        gradient = (games - pairs * chance).sum(1)
        weight = pairs * chance * chance.T
        information = np.diag(weight.sum(1)) - weight
        try:
            step = np.linalg.solve(information + ones, gradient)
        except np.linalg.LinAlgError as error:
            raise ValueError("the comparisons do not decide all scores; give a prior") from error
        size = np.abs(step).max(initial=0.0)
        scores = scores + step * min(1.0, 2.0 / max(size, 1e-300))  # far from the end a whole step may overshoot
        scores -= scores.mean()
        if np.abs(scores).max(initial=0.0) > 50:
            raise ValueError("the comparisons do not decide all scores; give a prior")
        if size < 1e-12:
            break
    return scores, np.sqrt(np.diag(np.linalg.pinv(information)).clip(min=0)) if count else np.zeros(0)


def compared(numbers: Sequence[float | None]) -> Iterator[tuple[int, int, bool]]:
    """The pairs that a ranking tells apart: (better, worse, whether it is a tie) by their places.

    numbers: one for every thing, a higher one is better; None or NaN: not ranked. Equal numbers are a tie where they
    are the ranking's best; below, nothing is known of the pair: a person picks one thing and has not compared the
    others.
    """
    known = [(i, value) for i, value in enumerate(numbers) if value is not None and value == value]
    best = max((value for _, value in known), default=0.0)
    for (i, mine), (j, other) in itertools.combinations(known, 2):
        if mine != other:
            yield (i, j, False) if mine > other else (j, i, False)
        elif mine == best:
            yield i, j, True


def wins_of(rankings: Sequence[Sequence[float | None]], count: int) -> np.ndarray:
    """(n, n) of rankings of n things, see `compared`."""
    wins = np.zeros((count, count))
    for ranking in rankings:
        for better, worse, tie in compared(ranking):
            wins[better, worse] += 0.5 if tie else 1.0
            wins[worse, better] += 0.5 if tie else 0.0
    return wins
