"""Reads a quoted word from pixels: three capitals in places of the same width, each compared with the world's letters.

Every letter has to look like one of LETTERS and unlike the others, and nothing but the three may be there.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

from .grammar import LETTERS
from .renderer import LETTER_PITCH, SCALE, font
from .scenes import LETTER_HEIGHT, SIZE
from .sight import View, ramp

MIN_MATCH, MIN_LEAD = 0.72, 0.03  # correlation with the letter, and how far it must be before the next one
_WIDTH, _HEIGHT = 20, 30  # of a letter's window, in pixels
_SHIFTS = range(-3, 4)
_TURNS = (-9.0, 0.0, 9.0)


@dataclass(frozen=True)
class Word:
    """What stands where a word would. `matches` (3, len(LETTERS)): correlation of each place with each letter.

    `x`, `y`: the middle in pixels. `alone`: share of the ink that the three letters explain.
    """

    matches: np.ndarray
    x: float
    y: float
    alone: float

    @property
    def text(self) -> str | None:
        """The word, or None unless all three letters are read and nothing else is there."""
        order = np.sort(self.matches, axis=1)
        sure = (order[:, -1] > MIN_MATCH) & (order[:, -1] - order[:, -2] > MIN_LEAD)
        if not sure.all() or self.alone < 0.9:
            return None
        return "".join(LETTERS[i] for i in self.matches.argmax(1))

    def credit(self, wanted: str) -> float:
        """How near this is to the word `wanted`, in [0, 1]: the mean over its letters."""
        parts = []
        for i, letter in enumerate(wanted):
            match = float(self.matches[i, LETTERS.index(letter)])
            other = float(np.delete(self.matches[i], LETTERS.index(letter)).max())
            parts.append(0.5 * ramp(match, 0.2, 0.85) + 0.5 * ramp(match - other, -0.3, MIN_LEAD))
        return sum(parts) / len(parts) * ramp(self.alone, 0.5, 0.9)


@functools.cache
def _templates() -> np.ndarray:
    """The letters, each turned a little (k * len(LETTERS), _HEIGHT * _WIDTH), of mean 0 and norm 1."""
    rows = []
    for turn in _TURNS:
        for letter in LETTERS:
            canvas = Image.new("L", (_WIDTH * SCALE, _HEIGHT * SCALE))
            middle = (_WIDTH * SCALE / 2, (_HEIGHT + LETTER_HEIGHT) * SCALE / 2)
            ImageDraw.Draw(canvas).text(middle, letter.upper(), font=font(LETTER_HEIGHT * SCALE), fill=255, anchor="ms")
            mask = np.asarray(canvas.reduce(SCALE), np.float32) / 255.0
            mask = ndimage.rotate(mask, turn, reshape=False, order=1) if turn else mask
            rows.append(ndimage.gaussian_filter(mask, 1.0).ravel())
    table = np.stack(rows)
    table -= table.mean(1, keepdims=True)
    return table / np.linalg.norm(table, axis=1, keepdims=True)


def read(view: View) -> Word | None:
    """The word, or None where nothing is large enough to be one."""
    inked = np.zeros((SIZE, SIZE), bool)
    for part in view.parts:
        inked[part.place] |= part.member
    columns, rows = np.flatnonzero(inked.sum(0) > 1), np.flatnonzero(inked.sum(1) > 1)
    if len(columns) < 30 or len(rows) < 14:
        return None
    alpha = np.where(inked, np.clip(view.distance / max(float(np.quantile(view.distance[inked], 0.8)), 1.0), 0, 1), 0.0)
    alpha = np.pad(ndimage.gaussian_filter(alpha, 0.7), 16)
    x = (columns[0] + columns[-1] + 1) / 2
    y = (rows[0] + rows[-1] + 1) / 2
    best = [_place(alpha, x + LETTER_PITCH * i, y) for i in (-1, 0, 1)]
    height = rows[-1] + 1 - rows[0]
    inside = inked.copy()
    inside[:, : max(int(x - 1.6 * LETTER_PITCH), 0)] = False
    inside[:, int(x + 1.6 * LETTER_PITCH) + 1 :] = False
    fits = ramp(abs(height - LETTER_HEIGHT), 12.0, 7.0)  # so high, turned or not
    return Word(np.stack(best), float(x), float(y), fits * float(inside.sum() / inked.sum()))


def _place(alpha: np.ndarray, x: float, y: float) -> np.ndarray:
    """Best correlation of each letter (len(LETTERS),) around one place."""
    left, top = round(x - _WIDTH / 2) + 16, round(y - _HEIGHT / 2) + 16
    windows = [alpha[top + dy : top + dy + _HEIGHT, left + dx : left + dx + _WIDTH] for dy in _SHIFTS for dx in _SHIFTS]
    seen = np.stack([w.ravel() if w.shape == (_HEIGHT, _WIDTH) else np.zeros(_HEIGHT * _WIDTH) for w in windows])
    seen = seen - seen.mean(1, keepdims=True)
    seen /= np.linalg.norm(seen, axis=1, keepdims=True) + 1e-6
    return (seen @ _templates().T).reshape(len(seen) * len(_TURNS), len(LETTERS)).max(0)
