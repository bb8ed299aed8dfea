"""Draws the playground's scenes: 64 x 64 pixels, anti-aliased by drawing four times as large and averaging.

Coordinates and lengths are in pixels of the finished image. Everything random (places, sizes, a small jitter of the
colours) comes from the generator that the caller passes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFont

from diffrl.playground.grammar import BACKGROUNDS, COLORS, HAIRS, RELATIONS, SKINS, Head, Scene

SIZE = 64
SCALE = 4
JITTER = 5  # grey levels, per channel
REACH = 1.15  # how far the widest shape goes from its middle, in radii
EDGE, GAP = 2.0, 3.0  # free pixels at the edge and between two things

PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (225, 25, 35),
    "green": (30, 165, 55),
    "blue": (35, 75, 230),
    "yellow": (250, 225, 40),
    "purple": (140, 30, 175),
    "orange": (250, 120, 0),
    "cyan": (40, 205, 220),
    "pink": (255, 95, 200),
}
GROUNDS: dict[str, tuple[int, int, int]] = {"white": (250, 250, 250), "gray": (150, 150, 150), "black": (10, 10, 10)}
SKIN: dict[str, tuple[int, int, int]] = {"light": (255, 220, 190), "tan": (215, 155, 100), "brown": (145, 90, 55)}
INK = (15, 10, 15)  # eyes, mouth and glasses
HAT = PALETTE["purple"]
TONE_MAP: dict[str, tuple[float, float]] = {"normal": (1.0, 0.0), "dark": (0.5, 0.0), "pale": (0.45, 140.0)}

assert (
    tuple(PALETTE) == COLORS and tuple(GROUNDS) == BACKGROUNDS and tuple(SKIN) == SKINS and set(HAIRS) <= set(PALETTE)
)

Color = tuple[int, int, int]
Points = np.ndarray


def toned(color: Sequence[float], tone: str) -> tuple[float, float, float]:
    """A colour (0 to 255) as a tone shows it: dark halves it, pale mixes it with 55 % white."""
    gain, lift = TONE_MAP[tone]
    red, green, blue = (gain * value + lift for value in color)
    return red, green, blue


@functools.cache
def outline(shape: str) -> Points:
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
        radius = np.where(np.arange(10) % 2 == 0, 1.2, 0.52)
        return np.stack([radius * np.cos(angle), radius * np.sin(angle) + 0.1], 1)
    if shape == "cross":
        a, b = 0.36, 1.05
        return np.array(
            [(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a), (a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a)]
        )
    x = 16 * np.sin(turn) ** 3
    y = -(13 * np.cos(turn) - 5 * np.cos(2 * turn) - 2 * np.cos(3 * turn) - np.cos(4 * turn))
    return np.stack([x / 15.2, (y - 2.5) / 14.2], 1)


def _corners(shape: str, x: float, y: float, radius: float) -> list[float]:
    """A shape's polygon on the large canvas, as x, y, x, y ..."""
    return (SCALE * (np.array([x, y]) + radius * outline(shape))).ravel().tolist()


def stamp(shape: str, style: str, x: float, y: float, radius: float, size: int = SIZE) -> Image.Image:
    """The mask ("L", drawn large: `size * SCALE` on a side) of a shape with its middle at (x, y)."""
    side = size * SCALE
    mask = Image.new("L", (side, side))
    pen = ImageDraw.Draw(mask)
    points = _corners(shape, x, y, radius)
    if style == "filled":
        pen.polygon(points, fill=255)
    elif style == "outlined":
        pen.polygon(points, outline=255, width=3 * SCALE)
    elif style == "striped":
        pen.polygon(points, fill=255)
        bars = Image.new("L", (side, side))
        ruler = ImageDraw.Draw(bars)
        for i in range(-4, 5):
            middle = SCALE * (y + 6.0 * i)
            ruler.rectangle((0, middle - 1.5 * SCALE, side, middle + 1.5 * SCALE - 1), fill=255)
        mask = ImageChops.multiply(mask, bars)
        ImageDraw.Draw(mask).polygon(points, outline=255, width=int(1.5 * SCALE))
    else:
        pen.polygon(points, fill=255)
        for i in range(-4, 5):
            for j in range(-4, 5):
                px, py = SCALE * (x + 6.5 * i), SCALE * (y + 6.5 * j)
                pen.ellipse((px - 2 * SCALE, py - 2 * SCALE, px + 2 * SCALE, py + 2 * SCALE), fill=0)
        pen.polygon(points, outline=255, width=int(1.5 * SCALE))
    return mask


def _jittered(color: Sequence[float], rng: np.random.Generator) -> Color:
    shift = rng.integers(-JITTER, JITTER + 1, 3).tolist()
    red, green, blue = (min(max(round(value) + move, 0), 255) for value, move in zip(color, shift, strict=True))
    return red, green, blue


def _grey(level: Sequence[float], rng: np.random.Generator) -> Color:
    """Backgrounds keep their hue: one shift for all three channels."""
    value = min(max(round(level[0]) + int(rng.integers(-JITTER, JITTER + 1)), 0), 255)
    return value, value, value


def _related(relation: str, radii: Sequence[float], rng: np.random.Generator) -> list[tuple[float, float]]:
    """Places of two things: clear of each other on the axis of `relation`, about level on the other one."""
    reach = [REACH * radius for radius in radii]
    spare = SIZE - 2 * EDGE - GAP - 2 * sum(reach)
    before, after = sorted(float(value) for value in rng.uniform(0, spare, 2))
    near = EDGE + reach[0] + before
    far = near + sum(reach) + GAP + (after - before)
    level = float(rng.uniform(20, 44))
    across = [level + float(shift) for shift in rng.uniform(-4, 4, 2)]
    places = [(near, across[0]), (far, across[1])]
    if relation in ("right of", "below"):
        places.reverse()
    return places if relation in ("left of", "right of") else [(y, x) for x, y in places]


def _scattered(radii: Sequence[float], rng: np.random.Generator) -> list[tuple[float, float]]:
    """Places of several things anywhere in the image, clear of each other."""
    reach = REACH * np.asarray(radii)
    apart = reach[:, None] + reach[None, :] + GAP
    np.fill_diagonal(apart, 0.0)
    while True:
        tries = rng.uniform(EDGE + reach[:, None], SIZE - EDGE - reach[:, None], (32, len(reach), 2))
        distance = np.hypot(*np.moveaxis(tries[:, :, None] - tries[:, None], -1, 0))
        good = np.flatnonzero((distance >= apart).all((1, 2)))
        if len(good):
            return [(x, y) for x, y in tries[good[0]].tolist()]


def _places(scene: Scene, rng: np.random.Generator) -> list[tuple[float, float, float]]:
    """(x, y, radius) of every thing of a scene of shapes."""
    if scene.kind == "objects":
        radius = float(rng.uniform(15, 21))
        x, y = (float(value) for value in rng.uniform(EDGE + REACH * radius, SIZE - EDGE - REACH * radius, 2))
        return [(x, y, radius)]
    if scene.kind == "counts":
        middle = float(rng.uniform(7.5, 9.0))
        radii = [middle + float(shift) for shift in rng.uniform(-0.5, 0.5, scene.count)]
        return [(x, y, r) for (x, y), r in zip(_scattered(radii, rng), radii, strict=True)]
    radii = [float(radius) for radius in rng.uniform(10.5 if scene.style != "filled" else 9.5, 12, 2)]
    relation = scene.relation or RELATIONS[int(rng.integers(len(RELATIONS)))]
    return [(x, y, r) for (x, y), r in zip(_related(relation, radii, rng), radii, strict=True)]


def _draw_shapes(canvas: Image.Image, scene: Scene, rng: np.random.Generator) -> None:
    pen = ImageDraw.Draw(canvas)
    for i, (x, y, radius) in enumerate(_places(scene, rng)):
        thing = scene.things[min(i, len(scene.things) - 1)]
        color = _jittered(toned(PALETTE[thing.color], scene.tone), rng)
        if scene.style == "filled":
            pen.polygon(_corners(thing.shape, x, y, radius), fill=color)
        else:
            canvas.paste(color, (0, 0), stamp(thing.shape, scene.style, x, y, radius))


@functools.cache
def _font(height: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans Bold as matplotlib ships it, with capitals `height` pixels of the large canvas high."""
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans-Bold.ttf"
    return ImageFont.truetype(str(path), round(height / 0.729))


def _draw_word(canvas: Image.Image, scene: Scene, rng: np.random.Generator) -> None:
    """Capitals 22 to 27 pixels high, less where the word would not fit, a pixel between the letters."""
    word, gap = scene.word.upper(), SCALE
    height = int(rng.integers(22, 28)) * SCALE
    while True:
        font = _font(height)
        boxes = [font.getbbox(letter) for letter in word]
        width = sum(right - left for left, _, right, _ in boxes) + gap * (len(word) - 1)
        if width <= (SIZE - 2 * EDGE) * SCALE:
            break
        height -= SCALE
    spare = (SIZE - 2 * EDGE) * SCALE - width
    x = EDGE * SCALE + float(rng.uniform(0, spare))
    y = (SIZE * SCALE - height) / 2 + SCALE * float(rng.uniform(-8, 8)) - font.getbbox("H")[1]
    pen = ImageDraw.Draw(canvas)
    color = _jittered(PALETTE[scene.things[0].color], rng)
    for letter, (left, _, right, _) in zip(word, boxes, strict=True):
        pen.text((x - left, y), letter, font=font, fill=color)
        x += right - left + gap


def _draw_head(canvas: Image.Image, head: Head, rng: np.random.Generator) -> None:
    pen = ImageDraw.Draw(canvas)
    unit = SCALE * float(rng.uniform(0.92, 1.06))
    cx, cy = (SCALE * float(value) for value in rng.uniform((29.5, 35.5), (34.5, 38.0)))

    def box(x: float, y: float, rx: float, ry: float) -> tuple[float, float, float, float]:
        return cx + unit * (x - rx), cy + unit * (y - ry), cx + unit * (x + rx), cy + unit * (y + ry)

    hair = _jittered(PALETTE[head.hair], rng)
    skin = _jittered(SKIN[head.skin], rng)
    pen.ellipse(box(0, -3, 23.5, 22.5), fill=hair)
    pen.ellipse(box(0, 2, 18.5, 20), fill=skin)
    pen.chord(box(0, 2, 19, 20.5), 207, 333, fill=hair)
    for side in (-1, 1):
        if head.glasses:
            pen.ellipse(box(7.6 * side, -0.5, 6.2, 5.4), fill=INK)
        else:
            pen.ellipse(box(7.0 * side, -0.5, 2.3, 2.6), fill=INK)
    if head.glasses:
        pen.rectangle(box(0, -1.5, 4, 1.2), fill=INK)
        pen.rectangle(box(0, -1.5, 18, 1.0), fill=INK)
    stroke = round(3.0 * unit)
    if head.mood == "smiling":
        pen.arc(box(0, 5.5, 9.5, 10.5), 25, 155, fill=INK, width=stroke)
    else:
        pen.arc(box(0, 19.5, 9.5, 10.5), 205, 335, fill=INK, width=stroke)
    if head.hat:
        hat = _jittered(HAT, rng)
        pen.rounded_rectangle(box(0, -23, 15, 9), radius=3 * unit, fill=hat)
        pen.rounded_rectangle(box(0, -14.5, 25, 2.6), radius=2 * unit, fill=hat)


def render(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """An image of `scene`, uint8 (64, 64, 3)."""
    ground = _grey(toned(GROUNDS[scene.background], scene.tone), rng)
    canvas = Image.new("RGB", (SIZE * SCALE, SIZE * SCALE), ground)
    if scene.head is not None:
        _draw_head(canvas, scene.head, rng)
    elif scene.kind == "words":
        _draw_word(canvas, scene, rng)
    else:
        _draw_shapes(canvas, scene, rng)
    return np.asarray(canvas.reduce(SCALE))
