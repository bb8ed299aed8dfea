"""Morphology of many masks at once: a row of 64 pixels is one word of 64 bits, the leftmost pixel its lowest bit.

Words are uint64 (B, 64). Outside of a picture nothing is set. The results are those of `scipy.ndimage`.
"""

from __future__ import annotations

import numpy as np

_ONE, _TOP = np.uint64(1), np.uint64(1 << 63)
_SIDES = _ONE | _TOP


def pack(masks: np.ndarray) -> np.ndarray:
    """The words of masks (B, 64, 64)."""
    return np.packbits(masks, axis=-1, bitorder="little").view("<u8")[..., 0]


def unpack(words: np.ndarray) -> np.ndarray:
    """The masks (B, 64, 64) of words."""
    return np.unpackbits(words[..., None].view(np.uint8), axis=-1, bitorder="little").view(bool)


def dilated(words: np.ndarray) -> np.ndarray:
    """By a pixel up, down and to the sides."""
    result = _upright(words)
    result |= words << _ONE
    result |= words >> _ONE
    return result


def eroded(words: np.ndarray) -> np.ndarray:
    """By a pixel up, down and to the sides; what touches the picture's edge loses a pixel there, too."""
    result = words & words << _ONE & words >> _ONE
    result[:, 1:] &= words[:, :-1]
    result[:, :-1] &= words[:, 1:]
    result[:, [0, -1]] = 0
    return result


def widened(words: np.ndarray, pixels: int) -> np.ndarray:
    """By a square of `pixels` to every side."""
    for _ in range(pixels):
        words = _upright(words | words << _ONE | words >> _ONE)
    return words


def closed(words: np.ndarray) -> np.ndarray:
    """Gaps of a pixel closed, also aslant; a picture's outermost pixels are closed along the edge alone."""
    across = _closed_rows(words | words << _ONE | words >> _ONE)
    return (across & across << _ONE & across >> _ONE & ~_SIDES) | (_closed_rows(words) & _SIDES)


def filled(words: np.ndarray) -> np.ndarray:
    """With all that they enclose: what cannot be reached from the picture's edge by steps up, down and to the sides."""
    free = ~words
    edge = np.full_like(words, _SIDES)
    edge[:, [0, -1]] = ~np.uint64(0)
    down, up = (np.bitwise_and.accumulate(rows, axis=1) for rows in (free, free[:, ::-1]))
    outside, reached = None, (free & edge) | down | up[:, ::-1]  # most is reached straight from above or below
    while outside is None or not np.array_equal(outside, reached):
        outside = reached
        for _ in range(4):
            reached = dilated(reached) & free
    return ~outside


def _upright(words: np.ndarray) -> np.ndarray:
    result = words.copy()
    result[:, 1:] |= words[:, :-1]
    result[:, :-1] |= words[:, 1:]
    return result


def _closed_rows(words: np.ndarray) -> np.ndarray:
    grown, result = _upright(words), words.copy()
    result[:, 1:-1] = grown[:, :-2] & grown[:, 1:-1] & grown[:, 2:]
    return result
