"""Bradley-Terry scores against a closed form, a published example, and what an optimiser finds."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from diffrl.reward_tools.bradley_terry import bradley_terry, wins_of, with_prior

# Agresti, Categorical Data Analysis, table 10.10: the American League of 1987; rows beat columns.
BASEBALL = np.array(
    [
        [0, 7, 9, 7, 7, 9, 11],
        [6, 0, 7, 5, 11, 9, 9],
        [4, 6, 0, 7, 7, 8, 12],
        [6, 8, 6, 0, 6, 7, 10],
        [6, 2, 6, 7, 0, 7, 12],
        [4, 4, 5, 6, 6, 0, 6],
        [2, 4, 1, 3, 1, 7, 0],
    ]
)
# Against Baltimore, as the R package BradleyTerry2 prints them, in the same order.
PUBLISHED = [1.5814, 1.4364, 1.2945, 1.2476, 1.1077, 0.6839]


@pytest.mark.parametrize(("won", "lost", "prior"), [(3, 1, 0.5), (1, 0, 0.5), (0, 0, 0.5), (7, 2, 0.0), (2, 2, 1.0)])
def test_two_things_have_a_closed_form(won: int, lost: int, prior: float) -> None:
    scores, errors = bradley_terry(np.array([[0, won], [lost, 0]]), prior)
    a, b = won + prior, lost + prior
    assert scores[0] - scores[1] == pytest.approx(np.log(a / b), abs=1e-12)
    assert scores.sum() == pytest.approx(0, abs=1e-12)
    # The variance of the log odds is 1/a + 1/b; each score is half of the difference.
    assert errors == pytest.approx([np.sqrt(1 / a + 1 / b) / 2] * 2, abs=1e-9)


def test_a_published_example() -> None:
    scores, errors = bradley_terry(BASEBALL, prior=0.0)
    assert scores[:-1] - scores[-1] == pytest.approx(PUBLISHED, abs=1e-4)
    assert (errors > 0.15).all() and (errors < 0.3).all()


def test_it_is_the_maximum_that_an_optimiser_finds() -> None:
    wins = np.random.default_rng(0).integers(0, 3, (6, 6)).astype(float)
    np.fill_diagonal(wins, 0)
    games = with_prior(wins, 0.5)

    def loss(s: np.ndarray) -> float:
        return float((games * np.logaddexp(0, s[None] - s[:, None])).sum() + s.sum() ** 2)

    best = minimize(loss, np.zeros(6), tol=1e-14).x
    assert bradley_terry(wins)[0] == pytest.approx(best - best.mean(), abs=1e-5)


def test_what_the_comparisons_do_not_decide_needs_a_prior() -> None:
    for wins in (np.array([[0, 5], [0, 0]]), np.zeros((3, 3))):
        with pytest.raises(ValueError, match="do not decide"):
            bradley_terry(wins, prior=0.0)
    scores, errors = bradley_terry(np.zeros((3, 3)))
    assert scores == pytest.approx([0, 0, 0]) and (errors > 1).all()  # nothing is known, and that is said


def test_a_pick_says_nothing_of_the_others_and_a_tie_of_the_best_counts_half() -> None:
    assert wins_of([[0, 1, 0]], 3).tolist() == [[0, 0, 0], [1, 0, 1], [0, 0, 0]]
    assert wins_of([[2, 2, 1]], 3).tolist() == [[0, 0.5, 1], [0.5, 0, 1], [0, 0, 0]]
    assert wins_of([[1, 1]], 2).tolist() == [[0, 0.5], [0.5, 0]]
    assert wins_of([[None, 1, 0]], 3).tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 0]]
