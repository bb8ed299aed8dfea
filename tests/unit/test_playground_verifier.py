"""The verifier is exact on true images, notices every single change, and cannot be pleased by degenerate pictures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from diffrl.playground import grammar
from diffrl.playground.grammar import Scene, parse, sample_scene
from diffrl.playground.renderer import GROUNDS, PALETTE, SKIN, render
from diffrl.playground.verifier import Verdict, judge, see, verify


def world(count: int, split: str = "test", subset: str = "all", seed: int = 0) -> tuple[list[Scene], np.ndarray]:
    rng = np.random.default_rng(seed)
    scenes = [sample_scene(rng, split, subset) for _ in range(count)]
    return scenes, np.stack([render(scene, rng) for scene in scenes])


def flat(color: tuple[int, int, int]) -> np.ndarray:
    return np.broadcast_to(np.array(color, np.uint8), (64, 64, 3)).copy()


def test_exact_on_rendered_images() -> None:
    for split in ("train", "test"):
        scenes, images = world(500, split)
        verdicts = verify(images, [scene.text() for scene in scenes])
        strict = [held for verdict in verdicts for held in verdict.strict.values()]
        credit = [value for verdict in verdicts for value in verdict.facts.values()]
        assert len(strict) > 2000 and np.mean(strict) >= 0.995
        assert np.mean(credit) > 0.99 and min(credit) >= 0.0 and max(credit) <= 1.0


@pytest.mark.parametrize("subset", ["styles", "tones", "heads"])
def test_exact_on_the_harder_subsets(subset: str) -> None:
    scenes, images = world(250, subset=subset, seed=1)
    verdicts = verify(images, [scene.text() for scene in scenes])
    assert np.mean([verdict.score for verdict in verdicts]) >= 0.995


def changes(scene: Scene, rng: np.random.Generator) -> list[tuple[Scene, str]]:
    """Scenes that differ from `scene` in one thing, and the fact that is then wrong."""

    def other(options: tuple[str, ...], *taken: str) -> str:
        return str(rng.choice([option for option in options if option not in taken]))

    found = [(replace(scene, background=other(grammar.BACKGROUNDS, scene.background)), "background")]
    if scene.head is not None:
        head = scene.head
        for part in (
            {"skin": other(grammar.SKINS, head.skin)},
            {"hair": other(grammar.HAIRS, head.hair)},
            {"mood": other(grammar.MOODS, head.mood)},
            {"glasses": not head.glasses},
            {"hat": not head.hat},
        ):
            found.append((replace(scene, head=replace(head, **part)), next(iter(part))))  # type: ignore[arg-type]
        return found
    first, rest = scene.things[0], scene.things[1:]
    suffix = "/1" if rest else ""
    color = other(grammar.COLORS, *(thing.color for thing in scene.things))
    found.append((replace(scene, things=(replace(first, color=color), *rest)), "color" + suffix))
    if scene.kind != "words":
        shape = other(grammar.SHAPES, *(thing.shape for thing in scene.things))
        found.append((replace(scene, things=(replace(first, shape=shape), *rest)), "shape" + suffix))
    if scene.kind == "counts":
        found += [(replace(scene, count=count), "count") for count in (2, 3, 4) if count != scene.count]
    if scene.relation:
        found += [(replace(scene, relation=r), "relation") for r in grammar.RELATIONS if r != scene.relation]
    if scene.style != "filled":
        found.append((replace(scene, style=other(grammar.STYLES[1:], scene.style)), "style"))
    if scene.tone != "normal":
        found.append((replace(scene, tone=other(grammar.TONES[1:], scene.tone)), "tone"))
    return found


@pytest.mark.parametrize("subset", ["all", "styles", "tones"])
def test_one_change_makes_that_fact_wrong_and_costs_credit(subset: str) -> None:
    rng = np.random.default_rng(2)
    scenes, images = world(80, subset=subset, seed=2)
    wrong = []
    for scene, image in zip(scenes, images, strict=True):
        seen = see(image)
        true = judge(seen, scene)
        for changed, name in changes(scene, rng):
            verdict = judge(seen, changed)
            wrong.append(not verdict.strict[name])
            assert verdict.facts[name] < true.facts[name] - 0.15, (scene.text(), changed.text())
    assert np.mean(wrong) > 0.995


def test_an_unsaid_tone_costs_the_colour_or_the_background() -> None:
    scenes, images = world(150, subset="tones", seed=3)
    for scene, image in zip(scenes, images, strict=True):
        verdict = judge(see(image), replace(scene, tone="normal"))
        told = {name: held for name, held in verdict.strict.items() if name.startswith(("color", "background"))}
        assert not all(told.values()), scene.text()


@pytest.mark.parametrize("kind", list(grammar.KINDS))
def test_degenerate_pictures_earn_little(kind: str) -> None:
    rng = np.random.default_rng(4)
    for _ in range(20):
        scene = sample_scene(rng, "test", kind)
        color = PALETTE[scene.things[0].color] if scene.things else SKIN["tan"]
        noise = rng.integers(0, 256, (64, 64, 3)).astype(np.uint8)
        for image in (flat(GROUNDS[scene.background]), flat(color), noise):
            verdict = judge(see(image), scene)
            assert not verdict.all_right
            named = ("shape", "count", "relation", "mood", "hat", "glasses")
            assert all(value < 0.4 for name, value in verdict.facts.items() if name.startswith(named))
            if kind != "words":
                assert verdict.reward < 0.45 and verdict.score <= 0.34


def test_too_many_things_are_not_right() -> None:
    rng = np.random.default_rng(5)
    image = render(parse("three red circles on white"), rng)
    assert not judge(see(image), parse("a red circle on white")).strict["shape"]
    assert not judge(see(image), parse("two red circles on white")).strict["count"]
    both = render(parse("a red circle and a blue star on white"), rng)
    verdict = judge(see(both), parse("a red circle on white"))
    assert verdict.strict["color"] and not verdict.strict["shape"]


def test_colours_stay_bound_to_their_shapes() -> None:
    image = render(parse("a red circle left of a blue star on white"), np.random.default_rng(6))
    swapped = judge(see(image), parse("a blue circle left of a red star on white"))
    assert not swapped.all_right and not swapped.strict["relation"]
    assert judge(see(image), parse("a blue star right of a red circle on white")).all_right


def test_partial_credit_falls_smoothly_as_the_picture_decays() -> None:
    scenes, images = world(50, subset="compositional", seed=7)

    def reward(radius: float) -> float:
        blurred = [np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(radius))) for image in images]
        verdicts = verify(np.stack(blurred), [scene.text() for scene in scenes])
        return float(np.mean([verdict.reward for verdict in verdicts]))

    curve = [reward(radius) for radius in (0, 2, 3, 4, 6)]
    assert curve[0] > 0.99 and curve == sorted(curve, reverse=True)
    assert 0.3 < curve[-1] < 0.7 and max(np.diff(curve[::-1])) < 0.3


def test_the_count_credit_grades_how_far_off_it_is() -> None:
    image = render(parse("two red circles on white"), np.random.default_rng(8))
    credit = [judge(see(image), parse(f"{n} red circles on white")).facts["count"] for n in ("two", "three", "four")]
    assert credit == pytest.approx([1.0, 4 / 9, 1 / 4])


def test_the_relation_credit_grades_how_far_off_it_is() -> None:
    def credit(x: int) -> float:
        image = flat(GROUNDS["white"])
        image[24:40, x : x + 16] = PALETTE["red"]
        image[24:40, 24:40] = PALETTE["blue"] if not 8 < x < 40 else image[24:40, 24:40]
        return judge(see(image), parse("a red square left of a blue square on white")).facts["relation"]

    assert credit(3) == pytest.approx(1.0)
    assert credit(44) == pytest.approx(0.1, abs=0.1)


def test_inputs_float_and_bytes_and_larger_images_agree() -> None:
    scenes, images = world(40, seed=9)
    prompts = [scene.text() for scene in scenes]
    floats = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    large = torch.nn.functional.interpolate(floats, scale_factor=4, mode="nearest")
    plain = verify(images, prompts)
    assert verify(floats, prompts) == plain
    assert np.mean([verdict.score for verdict in verify(large, prompts)]) > 0.98


@pytest.mark.parametrize(
    ("images", "prompts", "message"),
    [
        (np.zeros((1, 64, 64), np.uint8), ["a red circle on white"], "images must be float"),
        (np.zeros((1, 64, 64, 3), np.float32), ["a red circle on white"], "images must be float"),
        (np.full((1, 3, 64, 64), np.nan, np.float32), ["a red circle on white"], "non-finite"),
        (np.zeros((2, 3, 64, 64), np.float32), ["a red circle on white"], "2 images but 1 prompts"),
        (np.zeros((1, 3, 64, 64), np.float32), ["a cat"], "not a prompt of the playground"),
    ],
)
def test_bad_input_is_named(images: np.ndarray, prompts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify(images, prompts)


def test_layout_and_head_tell_images_of_one_prompt_apart() -> None:
    rng = np.random.default_rng(10)
    boxes = see(render(parse("three red circles on white"), rng)).layout
    assert len(boxes) == 3 and all(
        13 <= right - left <= 22 and 13 <= low - top <= 22 for left, top, right, low in boxes
    )
    for scene in (sample_scene(rng, "test", "heads") for _ in range(30)):
        assert see(render(scene, rng)).head == scene.head
    assert see(flat(GROUNDS["gray"])).head is None and see(flat(GROUNDS["gray"])).layout == []


def test_verdict_arithmetic() -> None:
    verdict = Verdict(facts={"shape": 0.5, "color": 1.0}, strict={"shape": False, "color": True})
    assert verdict.reward == 0.75 and verdict.score == 0.5 and not verdict.all_right
