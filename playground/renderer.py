"""Draws the playground's scenes: 64 x 64 pixels, anti-aliased by drawing four times as large and averaging.

Coordinates and lengths are in pixels of the finished image. A scene is the whole truth: the same scene gives the same
picture.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFont

from .grammar import WORLD, parse
from .scenes import SIZE, Place, Scene, complete

SCALE = 4
LINE = 3.5  # width of an outlined shape's line
BAR = 4  # height of a stripe, and of the gap below it
RIM = 2.0  # width of the line around a striped shape
LETTER_PITCH = 19.5  # from one letter's middle to the next one's

PALETTE, GROUNDS, SKIN = (
    {name: (red, green, blue) for name, (red, green, blue) in WORLD["values"][fact].items()}
    for fact in ("color", "background", "skin")
)
INK = (15, 10, 15)  # eyes, mouth and glasses
HAT = PALETTE["pink"]


def toned(color: Sequence[float], tone: str) -> tuple[int, int, int]:
    """A colour (0 to 255) as a tone shows it."""
    gain, lift = WORLD["values"]["tone"][tone]
    red, green, blue = (round(gain * value + lift) for value in color)
    return red, green, blue


@functools.cache
def outline(shape: str) -> np.ndarray:
    """The polygon (n, 2) of a shape of radius 1 around (0, 0), y downwards; the shapes look about equally large."""
    turn = np.linspace(0.0, 2.0 * math.pi, 49)[:-1]
    if shape == "circle":
        return np.stack([np.cos(turn), np.sin(turn)], 1)
    if shape == "square":
        return 0.9 * np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)], float)
    if shape == "triangle":
        return np.array([(0, -1.05), (1.12, 0.95), (-1.12, 0.95)])
    if shape == "star":
        angle = -math.pi / 2 + np.arange(10) * math.pi / 5
        radius = np.where(np.arange(10) % 2 == 0, 1.2, 0.5)
        return np.stack([radius * np.cos(angle), radius * np.sin(angle) + 0.1], 1)
    x = 16 * np.sin(turn) ** 3
    y = -(13 * np.cos(turn) - 5 * np.cos(2 * turn) - 2 * np.cos(3 * turn) - np.cos(4 * turn))
    return np.stack([x / 15.2, (y - 2.5) / 14.2], 1)


def _corners(shape: str, x: float, y: float, radius: float) -> list[float]:
    """A shape's polygon on the large canvas, as x, y, x, y ..."""
    return (SCALE * (np.array([x, y]) + radius * outline(shape))).ravel().tolist()


@functools.cache
def _bars() -> Image.Image:
    """Stripes over the whole picture: rows of BAR pixels of thing, then of ground, from the top edge on."""
    rows = (np.arange(SIZE * SCALE) // (BAR * SCALE)) % 2 == 0
    return Image.fromarray(np.repeat(rows[:, None] * np.uint8(255), SIZE * SCALE, axis=1))


def stamp(shape: str, x: float, y: float, radius: float, line: float = 0.0, size: int = SIZE) -> Image.Image:
    """The mask ("L", drawn large: `size * SCALE` on a side) of a shape with its middle at (x, y): filled, or its
    outline, `line` pixels wide."""
    mask = Image.new("L", (size * SCALE, size * SCALE))
    look = {"outline": 255, "width": round(line * SCALE)} if line else {"fill": 255}
    ImageDraw.Draw(mask).polygon(_corners(shape, x, y, radius), **look)
    return mask


def _styled(shape: str, style: str, place: Place) -> Image.Image:
    """The mask of a shape that is outlined or striped."""
    if style == "outlined":
        return stamp(shape, *place, LINE)
    return ImageChops.lighter(ImageChops.multiply(stamp(shape, *place), _bars()), stamp(shape, *place, RIM))


@functools.cache
def font(height: float) -> ImageFont.FreeTypeFont:
    """DejaVu Sans Mono Bold as matplotlib ships it, with capitals `height` pixels of the large canvas high."""
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono-Bold.ttf"
    return ImageFont.truetype(str(path), round(height / 0.729))


def _draw_word(canvas: Image.Image, scene: Scene) -> None:
    """Three capitals side by side, each in a place of the same width."""
    x, y, height = scene.places[0]
    pen = ImageDraw.Draw(canvas)
    for i, letter in enumerate(scene["word"].upper()):
        middle = (SCALE * (x + LETTER_PITCH * (i - 1)), SCALE * (y + height / 2))
        pen.text(middle, letter, font=font(height * SCALE), fill=PALETTE[scene["color"]], anchor="ms")


def _draw_head(canvas: Image.Image, scene: Scene) -> None:
    pen = ImageDraw.Draw(canvas)
    cx, cy, unit = (SCALE * value for value in scene.places[0])

    def box(x: float, y: float, rx: float, ry: float) -> tuple[float, float, float, float]:
        return cx + unit * (x - rx), cy + unit * (y - ry), cx + unit * (x + rx), cy + unit * (y + ry)

    hair, skin = PALETTE[scene["hair"]], SKIN[scene["skin"]]
    pen.ellipse(box(0, -3, 23.5, 22.5), fill=hair)
    pen.ellipse(box(0, 2, 18.5, 20), fill=skin)
    pen.chord(box(0, 2, 19, 20.5), 207, 333, fill=hair)
    for side in (-1, 1):
        if scene["glasses"] == "yes":
            pen.ellipse(box(7.6 * side, -0.5, 6.2, 5.4), fill=INK)
        else:
            pen.ellipse(box(7.0 * side, -0.5, 2.3, 2.6), fill=INK)
    if scene["glasses"] == "yes":
        pen.rectangle(box(0, -1.5, 4, 1.2), fill=INK)
        pen.rectangle(box(0, -1.5, 18, 1.0), fill=INK)
    stroke = round(3.0 * unit)
    if scene["mood"] == "smiling":
        pen.arc(box(0, 5.5, 9.5, 10.5), 25, 155, fill=INK, width=stroke)
    else:
        pen.arc(box(0, 19.5, 9.5, 10.5), 205, 335, fill=INK, width=stroke)
    if scene["hat"] == "yes":
        pen.rounded_rectangle(box(0, -23, 15, 9), radius=3 * unit, fill=HAT)
        pen.rounded_rectangle(box(0, -14.5, 25, 2.6), radius=2 * unit, fill=HAT)


def render(scene: Scene) -> np.ndarray:
    """The picture of `scene`, uint8 (64, 64, 3)."""
    canvas = Image.new("RGB", (SIZE * SCALE, SIZE * SCALE), GROUNDS[scene["background"]])
    if scene.kind == "heads":
        _draw_head(canvas, scene)
    elif scene.kind == "words":
        _draw_word(canvas, scene)
    else:
        for shape, name, place in scene.things():
            color = toned(PALETTE[name], scene["tone"])
            if scene["style"] == "filled":
                ImageDraw.Draw(canvas).polygon(_corners(shape, *place), fill=color)
            else:
                canvas.paste(color, (0, 0), _styled(shape, scene["style"], place))
    return np.asarray(canvas.reduce(SCALE))


def draw(prompt: str, rng: np.random.Generator) -> np.ndarray:
    """A true picture of a prompt, uint8 (64, 64, 3): `rng` draws what the prompt leaves free.

    Raises ValueError for a prompt that is not of the world.
    """
    return render(complete(parse(prompt), rng))
