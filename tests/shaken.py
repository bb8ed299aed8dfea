"""Ten things that happen to pictures and change nothing of what they show; and one change that does."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image
from scipy import ndimage

from diffrl_playground import grammar
from diffrl_playground.grammar import Caption
from diffrl_playground.scenes import Scene, complete
from diffrl_playground.sight import views
from diffrl_playground.verifier import Observation


def see(image: np.ndarray) -> Observation:
    """What one image, uint8 (64, 64, 3), shows."""
    return Observation(image, views(image[None])[0])


def shaken(image: np.ndarray, how: str, rng: np.random.Generator) -> np.ndarray:
    """A picture as a camera, an editor or a picture model changes it; edges are filled with the ground."""
    x, ground = image.astype(float), image[0, 0].astype(float)
    if how == "noise of 16 levels":
        x = x + rng.normal(0, 16, x.shape)
    elif how == "blur of a pixel":
        x = ndimage.gaussian_filter(x, (1, 1, 0))
    elif how == "turned by 10 degrees":
        x = ndimage.rotate(x - ground, rng.choice([-10, 10]), reshape=False, order=1) + ground
    elif how == "vignette":
        y, z = np.mgrid[-1:1:64j, -1:1:64j]
        x = x * (1 - 0.2 * (y**2 + z**2))[..., None]
    elif how == "moved":
        x = ndimage.shift(x - ground, (*rng.uniform(-1.5, 1.5, 2), 0), order=1) + ground
    elif how == "JPEG":
        held = io.BytesIO()
        Image.fromarray(image).save(held, "JPEG", quality=75, subsampling=0)
        x = np.asarray(Image.open(held)).astype(float)
    elif how == "40 pixels and back":
        small = Image.fromarray(image).resize((40, 40), Image.Resampling.BILINEAR)
        x = np.asarray(small.resize((64, 64), Image.Resampling.BILINEAR)).astype(float)
    elif how == "darker":
        x = 0.88 * x + 6
    elif how == "less contrast":
        x = 0.85 * (x - 128) + 128
    elif how == "warmer":
        x = x * np.array([1.0, 0.94, 0.9])
    return x.clip(0, 255).round().astype(np.uint8)


SHAKEN = (
    *("noise of 16 levels", "blur of a pixel", "turned by 10 degrees", "vignette", "moved", "JPEG"),
    *("40 pixels and back", "darker", "less contrast", "warmer"),
)


def changed(scene: Scene, name: str, rng: np.random.Generator) -> Scene:
    """The scene with one fact changed, its places drawn anew."""
    kind = grammar.kind_of(name)
    taken = [scene.facts.get(f"{kind}/{i}") for i in (1, 2)] if "/" in name else [scene[name]]
    said = {key: scene[key] for key in grammar.NAMES[scene.kind]}
    said[name] = str(rng.choice([value for value in grammar.VALUES[kind] if value not in taken]))
    return complete(Caption(scene.kind, said), rng)
