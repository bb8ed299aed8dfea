"""Where an image is right: the verifier's answers by places, for rewards with a map."""

from __future__ import annotations

import numpy as np

from .grammar import Caption
from .scenes import SIZE
from .sight import without_holes
from .verifier import Observation, by_thing, judge


def region_map(seen: Observation, caption: Caption) -> np.ndarray:
    """(64, 64) float32 in [-1, 1]: on each thing and what it encloses, 2 p - 1 of the share p of its facts that hold,
    -1 on what the caption does not ask for; the ground 1 or -1 where the caption names it, else NaN. All is -1 where
    nothing is drawn.

    Of heads and words, whose facts have no places of their own, all that is drawn is one region.
    """
    verdict = judge(seen, caption)
    named = "background" in caption.attributes
    scores = np.full((SIZE, SIZE), 2.0 * verdict.strict["background"] - 1 if named else np.nan, np.float32)
    parts, answers = seen.view.parts, by_thing(seen, caption)
    if answers:
        for part, facts in zip(parts, [*answers, *[[False]] * (len(parts) - len(answers))], strict=True):
            scores[part.place][without_holes(part.member)] = 2 * sum(facts) / len(facts) - 1
    elif not parts:
        scores[:] = -1.0
    else:
        facts = [holds for name, holds in verdict.strict.items() if name != "background"]
        scores[seen.view.inked] = 2 * sum(facts) / len(facts) - 1 if facts else np.nan
    return scores
