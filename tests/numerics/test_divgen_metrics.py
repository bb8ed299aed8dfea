"""DivGenBench's metrics against hand-computed cases, brute force, simulation, and what independent draws must give."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.special import gammaln

from diffrl.divgen import asc
from diffrl.divgen.metrics import (
    box_overlap,
    deviations,
    difference,
    error_of,
    interval,
    layout_diversity,
    layout_similarity,
    left_out,
    mean_cosine,
    tonal_variety,
    tone_of,
    vendi,
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def weighted_mean(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Mean over prompts: values (U,), weights (R, U) -> (R,)."""
    return weights @ values / weights.sum(1)


def log_likelihood(s: np.ndarray | float, queries: int, hits: int) -> np.ndarray:
    """log P(hits | s, queries) up to what does not depend on s: n uniform draws from s images meet k distinct ones.

    The occupancy distribution: P = s! / (s - k)! * S(n, k) / s^n, with S the Stirling number of the second kind.
    """
    s = np.asarray(s, np.float64)
    return gammaln(s + 1) - gammaln(s - hits + 1) - queries * np.log(s)


def some_boxes(rng: np.random.Generator, count: int) -> np.ndarray:
    corner, size = rng.random((count, 2)) * 0.7, 0.1 + 0.2 * rng.random((count, 2))
    return np.concatenate([corner, corner + size], axis=1)


# --- identity --------------------------------------------------------------------------------------------------------


def test_mean_cosine_by_hand() -> None:
    faces = np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]])
    expected = (0.0 + math.sqrt(0.5) + math.sqrt(0.5)) / 3  # of the pairs (1, 2), (1, 3), (2, 3)
    assert mean_cosine(faces)[0] == pytest.approx(expected, abs=1e-15)


def test_identical_faces_have_one_and_independent_ones_zero(rng: np.random.Generator) -> None:
    face = rng.normal(size=512)
    assert mean_cosine(np.tile(face, (50, 1)))[0] == pytest.approx(1.0, abs=1e-12)
    # 2,000 pairs' cosines in 512 dimensions have a standard deviation of 1 / sqrt(512)
    assert abs(mean_cosine(rng.normal(size=(400, 512)))[0]) < 5 / math.sqrt(512 * 400 * 399 / 2)


def test_weights_give_the_metric_of_the_subset(rng: np.random.Generator) -> None:
    faces, tones = rng.normal(size=(30, 8)), rng.random((30, 3))
    rows = rng.random((5, 30)) < 0.8
    for metric, values in ((mean_cosine, faces), (vendi, faces), (tonal_variety, tones)):
        one_by_one = [float(metric(values[row])[0]) for row in rows]
        np.testing.assert_allclose(metric(values, rows), one_by_one, rtol=1e-9)
    np.testing.assert_allclose(weighted_mean(tones[:, 0], rows), [tones[row, 0].mean() for row in rows])


@pytest.mark.parametrize("features", [np.zeros((3, 4)), np.full((3, 4), np.nan)])
def test_features_without_direction_are_refused(features: np.ndarray) -> None:
    with pytest.raises(ValueError, match="no direction"):
        mean_cosine(features)


def test_vendi_counts_different_images(rng: np.random.Generator) -> None:
    orthogonal = np.eye(6)
    assert vendi(orthogonal)[0] == pytest.approx(6.0)
    assert vendi(np.repeat(orthogonal[:3], 7, axis=0))[0] == pytest.approx(3.0)
    assert vendi(np.tile(rng.normal(size=5), (9, 1)))[0] == pytest.approx(1.0)
    x = rng.normal(size=(12, 4))
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    values = np.linalg.eigvalsh(unit @ unit.T / 12)
    values = values[values > 1e-12]
    assert vendi(x)[0] == pytest.approx(float(np.exp(-(values * np.log(values)).sum())))


# --- layout ----------------------------------------------------------------------------------------------------------


def test_overlap_by_hand() -> None:
    square, shifted, far = [0, 0, 2, 2], [1, 0, 3, 2], [5, 5, 6, 6]
    np.testing.assert_allclose(box_overlap(np.array([square]), np.array([square, shifted, far])), [[1.0, 1 / 3, 0.0]])


def test_layout_similarity_by_hand() -> None:
    two = np.array([[0, 0, 2, 2], [4, 0, 6, 2]])
    assert layout_similarity(two, two[::-1]) == 1.0  # the order of the boxes says nothing
    assert layout_similarity(two, two[:1]) == 0.5  # one box of two has no partner
    assert layout_similarity(two, two + 10) == 0.0


def test_matching_equals_brute_force(rng: np.random.Generator) -> None:
    for _ in range(60):
        a, b = (some_boxes(rng, int(rng.integers(1, 6))) for _ in range(2))
        if len(a) > len(b):
            a, b = b, a
        overlap = box_overlap(a, b)
        best = max(sum(overlap[i, j] for i, j in enumerate(p)) for p in itertools.permutations(range(len(b)), len(a)))
        assert layout_similarity(a, b) == pytest.approx(best / len(b))
        assert layout_similarity(b, a) == pytest.approx(best / len(b))


def test_layout_diversity_of_identical_images_is_zero(rng: np.random.Generator) -> None:
    boxes = some_boxes(rng, 3)
    assert layout_diversity([boxes] * 4) == pytest.approx(0.0, abs=1e-12)
    assert layout_diversity([boxes, boxes[::-1], boxes + 5]) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="two images"):
        layout_diversity([boxes])


# --- tone ------------------------------------------------------------------------------------------------------------


def test_tone_by_hand() -> None:
    image = np.zeros((1, 3, 1, 4))
    image[0, :, 0, 0] = [1.0, 0.0, 0.0]  # red: S 1, V 1, gray 0.299
    image[0, :, 0, 1] = [0.5, 0.5, 0.5]  # gray: S 0, V 0.5
    image[0, :, 0, 2] = [0.8, 0.6, 0.4]  # S 0.5, V 0.8, gray 0.637; the last one is black: S 0, V 0
    gray = np.array([0.299, 0.5, 0.299 * 0.8 + 0.587 * 0.6 + 0.114 * 0.4, 0.0])
    np.testing.assert_allclose(tone_of(image), [[1.5 / 4, 2.3 / 4, gray.std()]])


def test_tonal_variety_of_draws(rng: np.random.Generator) -> None:
    assert tonal_variety(np.tile(rng.random(3), (20, 1)))[0] == pytest.approx(0.0, abs=1e-9)
    two = np.array([[0.0, 0.1, 0.2], [1.0, 0.3, 0.2]])
    assert tonal_variety(two)[0] == pytest.approx(0.5 + 0.1 + 0.0)
    uniform = rng.random((100_000, 3))
    assert tonal_variety(uniform)[0] == pytest.approx(3 / math.sqrt(12), rel=0.01)


# --- ASC -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("learned", [40, 100, 150])
def test_the_number_of_learnable_images_is_found_again(rng: np.random.Generator, learned: int) -> None:
    """200 simulated sets of 200 draws from s images: the mean estimate is within 3 % of s."""
    hits = asc.draws(learned, 200, seed=int(rng.integers(1 << 30)), replicates=200)
    estimates = [asc.learnable(200, int(k), 100 * learned) for k in hits]
    assert np.mean(estimates) == pytest.approx(learned, rel=0.03)


def test_draws_are_those_of_the_occupancy_distribution(rng: np.random.Generator) -> None:
    plain = [len(np.unique(rng.integers(30, size=50))) for _ in range(4000)]
    expected = 30 * (1 - (1 - 1 / 30) ** 50)
    assert np.mean(asc.draws(30.2, 50, 1, 4000)) == pytest.approx(expected, rel=0.01)
    assert np.std(asc.draws(30, 50, 1, 4000)) == pytest.approx(np.std(plain), rel=0.1)


def test_the_likelihood_is_the_occupancy_probability() -> None:
    """By counting all sequences: 4 draws from s images that meet 2 distinct ones."""
    counts = {
        s: sum(len(set(draw)) == 2 for draw in itertools.product(range(s), repeat=4)) / s**4 for s in (2, 3, 4, 5)
    }
    logs = {s: float(log_likelihood(s, 4, 2)) for s in counts}
    for s in counts:
        assert math.exp(logs[s] - logs[2]) == pytest.approx(counts[s] / counts[2])


@pytest.mark.parametrize(("queries", "hits", "most"), [(10, 4, 60), (50, 30, 400), (200, 150, 3000), (30, 28, 900)])
def test_the_maximum_is_the_best_whole_number(queries: int, hits: int, most: int) -> None:
    grid = np.arange(hits, most + 1)
    best = int(grid[log_likelihood(grid, queries, hits).argmax()])
    assert abs(asc.learnable(queries, hits, most) - best) <= 1


def test_edges_of_the_likelihood() -> None:
    assert asc.learnable(100, 100, 5000) == 5000  # nothing came twice: no finite maximum
    assert asc.learnable(100, 99, 500) == 500  # its maximum lies above the number of training images
    assert asc.learnable(10_000, 3, 5000) == pytest.approx(3.0)
    assert asc.learnable(50, 1, 1000) == 1.0
    for queries, hits, most in ((5, 6, 100), (5, 0, 100), (50, 20, 10)):
        with pytest.raises(ValueError, match="cannot come from"):
            asc.learnable(queries, hits, most)


def test_coverage_of_identical_images_and_of_real_ones(rng: np.random.Generator) -> None:
    real = rng.integers(300, size=200)
    one, _ = asc.coverage(np.full(200, 7), real, 500)
    assert one == pytest.approx(1 / asc.learnable(200, len(np.unique(real)), 500))
    half, deviation = asc.coverage(rng.integers(100, size=200), rng.integers(200, size=200), 500)
    assert half == pytest.approx(0.5, abs=4 * deviation.std())
    with pytest.raises(ValueError, match="equally many"):
        asc.coverage(real, real[:100], 500)


def test_nearest_is_by_cosine(rng: np.random.Generator) -> None:
    train = rng.normal(size=(40, 6))
    np.testing.assert_array_equal(asc.nearest(train, 3.0 * train[::-1]), np.arange(40)[::-1])


# --- intervals -------------------------------------------------------------------------------------------------------


def test_groups_are_left_out_in_turn() -> None:
    for units, groups in ((8, 8), (20, 20), (21, 11), (60, 20), (65, 17), (400, 20)):
        kept = left_out(units)
        assert kept.shape == (groups, units) and ((~kept).sum(0) == 1).all()
        assert np.ptp((~kept).sum(1)) <= 1


def test_deviations_of_a_mean_give_its_standard_error(rng: np.random.Generator) -> None:
    """One prompt left out at a time is exact; groups estimate the same."""
    x = rng.normal(size=20)
    one = deviations(float(x.mean()), weighted_mean(x, left_out(20)), left_out(20))
    assert error_of(one) == pytest.approx(x.std(ddof=1) / 20**0.5)
    many = rng.normal(size=(200, 90))
    kept = left_out(90)
    errors = [error_of(deviations(float(x.mean()), weighted_mean(x, kept), kept)) ** 2 for x in many]
    assert np.mean(errors) == pytest.approx(1 / 90, rel=0.06)


def test_intervals_cover_the_truth(rng: np.random.Generator) -> None:
    """Of 300 samples of 60 prompts, and of 8, about 95 % of the intervals hold the true value (two standard errors:
    2.5 %)."""
    inside = {"mean of 8": 0, "mean": 0, "tone": 0}
    for _ in range(300):
        x = rng.normal(size=(60, 3))
        for name, value, replicates, truth in (
            ("mean of 8", x[:8, 0].mean(), weighted_mean(x[:8, 0], left_out(8)), 0.0),
            ("mean", x[:, 0].mean(), weighted_mean(x[:, 0], left_out(60)), 0.0),
            ("tone", tonal_variety(x)[0], tonal_variety(x, left_out(60)), 3.0),
        ):
            kept = left_out(8 if name == "mean of 8" else 60)
            found = interval(float(value), deviations(float(value), replicates, kept))
            assert found is not None
            inside[name] += found.low <= truth <= found.high
    assert all(0.91 < count / 300 < 0.985 for count in inside.values()), inside


def test_a_paired_difference_sees_more(rng: np.random.Generator) -> None:
    """Two models with the same hard and easy prompts: their difference is far surer than either score."""
    prompts = rng.normal(size=80)
    kept = left_out(80)
    a, b = prompts + 0.1 * rng.normal(size=80), prompts + 0.2 + 0.1 * rng.normal(size=80)
    scores = [(float(x.mean()), deviations(float(x.mean()), weighted_mean(x, kept), kept)) for x in (a, b)]
    paired = difference(scores[0][0], scores[1][0], scores[0][1], scores[1][1], paired=True)
    apart = difference(scores[0][0], scores[1][0], scores[0][1], scores[1][1], paired=False)
    assert paired is not None and apart is not None
    assert paired.change == apart.change == pytest.approx(scores[1][0] - scores[0][0])
    assert paired.p < 1e-6 and apart.p > 0.05 and paired.paired and not apart.paired
    assert paired.interval.low > 0 > apart.interval.low


def test_equal_models_differ_in_one_of_twenty_cases(rng: np.random.Generator) -> None:
    kept, called = left_out(40), 0
    for _ in range(300):
        x = [rng.normal(size=40) for _ in range(2)]
        own, other = (deviations(float(v.mean()), weighted_mean(v, kept), kept) for v in x)
        found = difference(float(x[0].mean()), float(x[1].mean()), own, other, paired=True)
        assert found is not None
        called += found.p < 0.05
    assert 0.02 < called / 300 < 0.085


def test_the_same_scores_do_not_differ() -> None:
    none = np.zeros(10)
    found = difference(0.5, 0.5, none, none, paired=True)
    assert found is not None and found.p == 1.0 and found.change == 0.0
    assert difference(0.5, 0.6, np.zeros(0), none, paired=True) is None
    assert interval(0.5, np.array([0.1, np.nan])) is None
