"""GenEval: its rules against a brute-force reading of the protocol, and the plugin on tiny true models."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from diffrl.errors import UserError
from diffrl.reward_tools.check import examine
from diffrl.rewards import RewardError, load_reward
from diffrl_playground import grammar
from diffrl_zoo.geneval_rules import (
    COLORS,
    RELATIONS,
    TAGS,
    Detection,
    Thresholds,
    correct,
    filter_detections,
    flow_grpo_credit,
    iou,
    parse_prompt,
    partial_credit,
    placed,
    relations,
)
from scripts.playground.clip_building import build_clip, clip_config, save_clip
from scripts.playground.tokenizer import vocabulary, write_tokenizer

pytestmark = pytest.mark.usefixtures("one_call")

NAMES = ["bench", "dog", "cat", "bus", "orange"]


# rules: the brute force


def published(found: list[dict[str, Any]], metadata: dict[str, Any]) -> bool:
    """The protocol read sentence by sentence, on all rows {name, score, box, color} that the detector gave.

    Keep what is above 0.3 (0.9 when counting), at most the 16 surest of a class. Every included class must be there
    `count` times; the `count` surest are the objects meant; all of them have the colour, and all stand in the relation
    to all objects meant by the clause referred to, which must have been met itself. No excluded class may be there
    `count` times or more.
    """
    least = 0.9 if metadata["tag"] == "counting" else 0.3
    there = {}
    for name in NAMES:
        rows = [row for row in found if row["name"] == name and row["score"] > least]
        there[name] = sorted(rows, key=lambda row: row["score"], reverse=True)[:16]
    meant: list[list[dict[str, Any]]] = []
    verdicts: list[bool] = []
    for clause in metadata["include"]:
        rows = there[clause["class"]][: clause["count"]]
        good = len(rows) >= clause["count"]
        if good and "color" in clause:
            good = all(row["color"] == clause["color"] for row in rows)
        if good and "position" in clause:
            relation, target = clause["position"]
            good = verdicts[target] and all(stands(a["box"], relation, b["box"]) for a in rows for b in meant[target])
        meant.append(rows)
        verdicts.append(good)
    excluded = [len(there[clause["class"]]) >= clause["count"] for clause in metadata.get("exclude", [])]
    return all(verdicts) and not any(excluded)


def stands(a: tuple[float, ...], relation: str, b: tuple[float, ...]) -> bool:
    """One axis at a time: the centres' offset, less a tenth of both sizes, over the distance of the centres."""
    dx, dy = (a[0] + a[2] - b[0] - b[2]) / 2, (a[1] + a[3] - b[1] - b[3]) / 2
    distance = math.sqrt(dx * dx + dy * dy)
    axis, sign = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}[relation]
    offset = (dx, dy)[axis] * sign
    slack = 0.1 * ((a[2 + axis] - a[axis]) + (b[2 + axis] - b[axis]))
    return offset - slack > 0.5 * distance and offset - slack > 1e-3


def scene(rng: random.Random) -> list[dict[str, Any]]:
    """A few boxes of random classes; many confidences near the thresholds, some classes crowded."""
    rows = []
    for _ in range(rng.choice([1, 2, 3, 4, 6, 24])):
        x, y = rng.uniform(0, 400), rng.uniform(0, 400)
        box = (x, y, x + rng.uniform(5, 110), y + rng.uniform(5, 110))
        score = rng.choice([0.3, 0.31, 0.6, 0.9, 0.91, 0.95]) + rng.uniform(0, 0.009)
        rows.append({"name": rng.choice(NAMES[:3]), "score": score, "box": box, "color": rng.choice(COLORS[:2])})
    return rows


def question(rng: random.Random, tag: str) -> dict[str, Any]:
    """Metadata of the task type `tag`, as GenEval's generator makes them."""
    a, b = rng.sample(NAMES[:3], 2)
    first, second = {"class": a, "count": 1}, {"class": b, "count": 1}
    if tag == "counting":
        n = rng.randint(2, 4)
        return {"tag": tag, "include": [first | {"count": n}], "exclude": [first | {"count": n + 1}]}
    if tag == "position":
        return {"tag": tag, "include": [second, first | {"position": [rng.choice(RELATIONS), 0]}]}
    if tag in ("colors", "color_attr"):
        first, second = (clause | {"color": rng.choice(COLORS[:2])} for clause in (first, second))
    return {"tag": tag, "include": [first] if tag in ("single_object", "colors") else [first, second]}


Colours = Callable[[Sequence[Detection], str], list[str]]


def detected(rows: list[dict]) -> tuple[dict[str, list[Detection]], dict, Colours]:
    """A scene's detections by name, the colour of each box, and what asks for colours."""
    colour_of = {row["box"]: row["color"] for row in rows}
    found: dict[str, list[Detection]] = {}
    for row in rows:
        found.setdefault(row["name"], []).append(Detection(row["box"], row["score"]))
    return found, colour_of, lambda things, name: [colour_of[thing.box] for thing in things]


@pytest.mark.parametrize("tag", TAGS)
def test_the_verdict_is_the_published_one(tag: str) -> None:
    rng, verdicts = random.Random(TAGS.index(tag)), []
    for _ in range(1500):
        rows, metadata = scene(rng), question(rng, tag)
        found, _, colours = detected(rows)
        verdict = correct(filter_detections(found, tag), metadata, colours)
        assert verdict == published(rows, metadata), (rows, metadata)
        verdicts.append(verdict)
        part = partial_credit(filter_detections(found, tag), metadata, colours)
        assert 0.0 <= part <= 1.0
        if part == 1.0:  # exactly the number asked for, and all right
            assert verdict
    assert 30 < sum(verdicts) < 1470  # both verdicts were tried


def flow_grpos(found: dict[str, list[Detection]], metadata: dict[str, Any], colour_of: dict[Any, str]) -> float:
    """`evaluate_reward` of Flow-GRPO's reward server, step by step, with its way of appending."""
    rewards: list[float] = []
    matched_groups: list[Any] = []
    for req in metadata["include"]:
        objects, matched = found.get(req["class"], []), True
        rewards.append(1 - abs(req["count"] - len(objects)) / req["count"])
        if len(objects) != req["count"]:
            matched = False
            if "color" in req or "position" in req:
                rewards.append(0.0)
        else:
            if "color" in req:
                colours = [colour_of[thing.box] for thing in objects]
                rewards.append(1 - abs(req["count"] - colours.count(req["color"])) / req["count"])
                matched = colours.count(req["color"]) == req["count"]
            if "position" in req and matched:
                relation, target = req["position"]
                if matched_groups[target] is None:
                    matched = False
                    rewards.append(0.0)
                else:
                    for thing in objects:
                        for other in matched_groups[target]:
                            if not stands(thing.box, relation, other.box):
                                matched = False
                                rewards.append(0.0)
                                break
                        if not matched:
                            break
                    rewards.append(1.0)
        matched_groups.append(objects if matched else None)
    return sum(rewards) / len(rewards)


def test_flow_grpos_server_gives_the_same_reward() -> None:
    """5,000 scenes, also of clauses with a colour and a position and with several objects: no disagreement."""
    rng, seen, mended = random.Random(0), [], 0
    for i in range(5000):
        rows, metadata = scene(rng), question(rng, TAGS[i % len(TAGS)])
        if i % 3 == 0:  # beyond GenEval's own tasks
            first, second = ({"class": n, "count": rng.randint(1, 2)} for n in rng.sample(NAMES[:3], 2))
            second |= {"color": rng.choice(COLORS[:2]), "position": [rng.choice(RELATIONS), 0]}
            metadata = {"tag": "position", "include": [first, second]}
        found, colour_of, colours = detected(rows)
        kept = filter_detections(found, metadata["tag"])
        score = flow_grpo_credit(kept, metadata, colours)
        assert score == flow_grpos(kept, metadata, colour_of), (rows, metadata)
        seen.append(score)
        mended += abs(score - partial_credit(kept, metadata, colours)) > 1e-12
    assert min(seen) < -5 and max(seen) == 1.0 and mended > 500


def test_relations_by_hand() -> None:
    square = (100.0, 100.0, 140.0, 140.0)

    def at(dx: float, dy: float) -> set[str]:
        return relations((100 + dx, 100 + dy, 140 + dx, 140 + dy), square)

    assert at(0, 0) == set() and at(8, 0) == set()  # a tenth of both widths is 8
    assert at(15, 0) == set() and at(17, 0) == {"right of"}  # (17 - 8) / 17 > 1/2
    assert at(-60, 0) == {"left of"} and at(0, -60) == {"above"} and at(0, 60) == {"below"}
    assert at(60, 60) == {"right of", "below"} and at(60, 25) == {"right of"}


def test_what_is_kept() -> None:
    rows = [Detection((i, 0, i + 10, 10), 0.31 + 0.01 * i) for i in range(20)]
    assert [d.score for d in filter_detections({"dog": rows}, "")["dog"]] == [
        d.score for d in rows[:3:-1]
    ]  # the 16 surest
    assert filter_detections({"dog": [Detection((0, 0, 1, 1), 0.3)]}, "") == {}  # above, not at
    assert filter_detections({"dog": [Detection((0, 0, 1, 1), 0.9)]}, "counting") == {}
    apart = filter_detections({"dog": rows}, "", Thresholds(overlap=0.5))["dog"]
    assert [d.box[0] for d in apart] == [19, 15, 11, 7]  # boxes 4 pixels apart share 7 of 15 columns
    assert iou((0, 0, 9, 9), (0, 0, 9, 9)) == 1.0 and iou((0, 0, 9, 9), (10, 0, 19, 9)) == 0.0


def test_partial_credit_by_hand() -> None:
    def dogs(n: int) -> dict[str, list[Detection]]:
        return {"dog": [Detection((50.0 * i, 0, 50.0 * i + 20, 20), 0.95) for i in range(n)]}

    counting = {"tag": "counting", "include": [{"class": "dog", "count": 4}]}
    scores = [partial_credit(dogs(n), counting, lambda *_: []) for n in (0, 1, 3, 4, 5, 9)]
    assert scores == [0.0, 0.25, 0.75, 1.0, 0.75, 0.0]  # never below 0
    red = {"tag": "colors", "include": [{"class": "dog", "count": 1, "color": "red"}]}
    assert partial_credit(dogs(1), red, lambda *_: ["red"]) == 1.0
    assert partial_credit(dogs(1), red, lambda *_: ["blue"]) == 0.5
    assert partial_credit(dogs(2), red, lambda *_: ["red", "red"]) == 0.0
    cat = {"cat": [Detection((200.0, 0, 220.0, 20), 0.9)]}
    place = {"include": [{"class": "cat", "count": 1}, {"class": "dog", "count": 1, "position": ["left of", 0]}]}
    assert partial_credit(dogs(1) | cat, place, lambda *_: []) == 1.0
    place["include"][1]["position"] = ["right of", 0]
    assert partial_credit(dogs(1) | cat, place, lambda *_: []) == pytest.approx(2 / 3)
    assert flow_grpo_credit(dogs(1) | cat, place, lambda *_: []) == 3 / 4
    assert flow_grpo_credit(dogs(9), counting, lambda *_: []) == -0.25


def test_prompts_of_the_six_templates_are_read() -> None:
    bench, dog, cat, bus, orange = ({"class": name, "count": 1} for name in NAMES)
    for prompt, tag, include in (
        ("a photo of a bench", "single_object", [bench]),
        ("a photo of an orange", "single_object", [orange]),
        ("a photo of a bus and an orange", "two_object", [bus, orange]),
        ("a photo of three buses", "counting", [bus | {"count": 3}]),
        ("a photo of an orange orange", "colors", [orange | {"color": "orange"}]),
        ("a photo of a dog left of a cat", "position", [cat, dog | {"position": ["left of", 0]}]),
        ("a photo of a red dog and a blue cat", "color_attr", [dog | {"color": "red"}, cat | {"color": "blue"}]),
    ):
        metadata = parse_prompt(prompt, NAMES)
        assert metadata is not None and (metadata["tag"], metadata["include"]) == (tag, include), prompt
        assert ("exclude" in metadata) == (tag == "counting")
    for other in (
        "a dog",
        "a photo of dogs",
        "a photo of a wolf",
        "a photo of a red dog and a cat",
        "a photo of a teal dog",
    ):
        assert parse_prompt(other, NAMES) is None, other


# the plugin


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("clip")
    size = write_tokenizer(path, vocabulary(), grammar.LETTERS)
    torch.manual_seed(0)
    config = clip_config(size, image_size=32, width=32, layers=1, text_width=32, text_layers=1, embed_dim=16)
    save_clip(build_clip(config), config, path, path)
    return str(path)


@pytest.fixture(scope="module")
def mask2former(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import (
        Mask2FormerConfig,
        Mask2FormerForUniversalSegmentation,
        Mask2FormerImageProcessor,
        SwinConfig,
    )

    swin = SwinConfig(
        image_size=64, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    labels = dict(enumerate(["bench", "dog", "mouse"]))
    config = Mask2FormerConfig(
        backbone_config=swin, id2label=labels, label2id={v: k for k, v in labels.items()}, num_queries=12,
        feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=32, dim_feedforward=32,
        encoder_layers=1, decoder_layers=2, num_attention_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Mask2FormerForUniversalSegmentation(config)
    with torch.no_grad():  # confident enough, and different from image to image
        model.class_predictor.weight.mul_(8)
        for parameter in model.model.pixel_level_module.parameters():
            parameter.mul_(2.0)
    folder = tmp_path_factory.mktemp("mask2former")
    model.save_pretrained(folder)
    Mask2FormerImageProcessor(size={"shortest_edge": 64, "longest_edge": 128}).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def detr(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import AutoImageProcessor, YolosConfig, YolosForObjectDetection, YolosImageProcessor

    labels = dict(enumerate(["bench", "dog", "tvmonitor"]))
    config = YolosConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=[64, 64],
        patch_size=16, num_detection_tokens=10, id2label=labels, label2id={v: k for k, v in labels.items()},
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("yolos")
    YolosForObjectDetection(config).save_pretrained(folder)
    YolosImageProcessor(size={"shortest_edge": 64, "longest_edge": 96}).save_pretrained(folder)
    assert AutoImageProcessor.from_pretrained(folder) is not None
    return str(folder)


def pictures(count: int) -> torch.Tensor:
    noise = torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(3))
    return torch.nn.functional.interpolate(noise, (80, 96), mode="nearest")


def test_instances_are_mmdets_reading_of_mask2former(mask2former: str) -> None:
    """Confidence, mask and box of every instance, one query and class at a time."""
    from diffrl_zoo.geneval import Detector

    detector = Detector(mask2former, torch.device("cpu"), "fp32")
    assert detector.names == ["bench", "dog", "computer mouse"] and detector.masks
    images, least = pictures(2), 0.2
    inputs = detector.processor(images=list((images * 255).round().byte()), return_tensors="pt")
    with torch.no_grad():
        output = detector.model(pixel_values=inputs["pixel_values"])
    for i, found in enumerate(detector(images, least)):
        expected: list[tuple[str, float, tuple[int, ...]]] = []
        for query in range(12):
            logits = output.class_queries_logits[i, query].double()
            mask = torch.nn.functional.interpolate(
                output.masks_queries_logits[i, query][None, None], (80, 96), mode="bilinear", align_corners=False
            )[0, 0]
            if not (mask > 0).any():
                continue
            ys, xs = [y for y in range(80) if (mask[y] > 0).any()], [x for x in range(96) if (mask[:, x] > 0).any()]
            for label in range(3):
                score = float(logits.exp()[label] / logits.exp().sum() * mask.sigmoid()[mask > 0].mean())
                if score > least:
                    expected.append((detector.names[label], score, (xs[0], ys[0], xs[-1] + 1, ys[-1] + 1)))
        flat = [(name, d.score, d.box) for name, things in found.items() for d in things]
        assert len(flat) == len(expected) > 0
        for (name, score, box), (name_, score_, box_) in zip(sorted(flat), sorted(expected), strict=True):
            assert name == name_ and box == box_ and score == pytest.approx(score_, abs=1e-5)


def prompts_for(count: int) -> list[str]:
    kinds = [
        "a photo of a dog",
        "a photo of a red bench",
        "a photo of two dogs",
        "a photo of a bench above a dog",
        "a photo of a bench and a dog",
    ]
    return [kinds[i % len(kinds)] for i in range(count)]


def test_geneval_conforms_on_a_tiny_mask2former(mask2former: str, clip_folder: str) -> None:
    params = {"detector": mask2former, "clip": clip_folder, "pretrained": None, "device": "cpu", "mode": "partial"}
    reward = load_reward("geneval", **params, threshold=0.25, counting_threshold=0.25, max_objects=3)
    images = pictures(15)
    bad = [result for result in examine(reward, images, prompts_for(15)) if not result.passed]
    assert not bad, bad
    assert reward.applies("a photo of a dog", {}) and not reward.applies("a dog on the moon", {})  # type: ignore[attr-defined]
    server: Any = load_reward("geneval", **params | {"mode": "flow_grpo"}, threshold=0.25, counting_threshold=0.25)
    assert server.card.range == (-14.0, 1.0) and server(images, prompts_for(15), [{}] * 15).min() < 0
    verdict: Any = load_reward("geneval", **params | {"mode": "correct"}, threshold=0.25, counting_threshold=0.25)
    assert set(verdict(images, prompts_for(15), [{}] * 15).tolist()) <= {0.0, 1.0}


def test_detectors_without_masks_work(detr: str, clip_folder: str) -> None:
    reward: Any = load_reward("geneval", detector=detr, clip=clip_folder, pretrained=None, device="cpu", threshold=0.05)
    found = reward.detect(pictures(2), 0.05)
    assert reward.detect.names[2] == "tv" and all(things for things in found)
    assert all(d.mask is None and d.box[2] > d.box[0] for things in found for ds in things.values() for d in ds)
    scores = reward(pictures(2), ["a photo of a red dog"] * 2, [{}] * 2)
    assert set(scores.tolist()) <= {0.0, 1.0}


def test_the_colour_is_the_objects_own(clip_folder: str) -> None:
    """Pixels outside of the mask and of the box do not count, and the class is the nearest colour's mean prompt."""
    from diffrl_zoo.clip import shared_clip
    from diffrl_zoo.geneval import TEMPLATES, ColourClassifier

    clip = shared_clip(clip_folder, None, "cpu", "fp32")
    classifier = ColourClassifier(clip)
    mask = torch.zeros(40, 40, dtype=torch.bool)
    mask[10:20, 10:25] = True
    thing = Detection((8.0, 6.0, 27.0, 22.0), 0.9, mask)
    a, b = torch.rand(3, 40, 40, generator=torch.Generator().manual_seed(0)), torch.rand(3, 40, 40)
    both = torch.where(mask, a, b)
    assert classifier(a, [thing], "dog") == classifier(both, [thing], "dog")
    shown = torch.full((3, 16, 19), 0x99 / 255)
    shown[:, 4:14, 2:17] = a[:, 10:20, 10:25]
    means = [sum(clip.embed_text([t.format(colour=c, name="dog") for t in TEMPLATES])) for c in COLORS]  # type: ignore[arg-type]
    cosines = [float(clip.embed_image(shown[None])[0] @ (m / m.norm())) for m in means]  # type: ignore[union-attr]
    assert classifier(a, [thing], "dog") == [COLORS[cosines.index(max(cosines))]]


def test_what_cannot_be_judged_is_an_error(detr: str, clip_folder: str) -> None:
    reward: Any = load_reward("geneval", detector=detr, clip=clip_folder, pretrained=None, device="cpu")

    def refused(prompt: str, *include: dict[str, Any]) -> str:
        with pytest.raises(RewardError) as caught:
            reward(pictures(1), [prompt], [{"include": list(include)} if include else {}])
        return str(caught.value)

    assert 'asks for "dgo", which no class is (nearest: "dog")' in refused("x", {"class": "dgo", "count": 1})
    assert 'unknown colour "read" (nearest: "red")' in refused("x", {"class": "dog", "count": 1, "color": "read"})
    assert "no count of 1 or more" in refused("x", {"class": "dog"})
    assert "a position refers to clause 1" in refused("x", {"class": "dog", "count": 1, "position": ["above", 1]})
    assert "has no metadata `include`" in refused("a dog on the moon")
    with pytest.raises(UserError, match=r'unknown mode "strict" \(choose from: correct, flow_grpo, partial\)'):
        load_reward("geneval", mode="strict")
    with pytest.raises(UserError, match='geneval: cannot load "/nowhere"'):
        load_reward("geneval", detector="/nowhere")


def test_which_objects_meet_a_clause_by_hand() -> None:
    def thing(score: float) -> Detection:
        return Detection((0, 0, 10, 10), score)

    dogs, cats = [thing(0.9), thing(0.7), thing(0.8)], [thing(0.6), thing(0.5)]
    seen = {0.9: "red", 0.8: "blue", 0.7: "red", 0.6: "white", 0.5: "black"}

    def colours(things: Sequence[Detection], name: str) -> list[str]:
        return [seen[one.score] for one in things]

    def told(*include: dict[str, Any]) -> dict[float, bool]:
        objects = {"dog": dogs, "cat": cats, "bus": [thing(0.95)]}
        return {one.score: right for one, right in placed(objects, {"include": include}, colours)}

    assert told({"class": "dog", "count": 2}) == {0.9: True, 0.8: True, 0.7: False}  # the surest two
    assert told({"class": "dog", "count": 1, "color": "blue"}) == {0.9: False, 0.8: True, 0.7: False}
    both = told({"class": "dog", "count": 1, "color": "red"}, {"class": "cat", "count": 1})
    assert both == {0.9: True, 0.8: False, 0.7: False, 0.6: True, 0.5: False}
    one_of_each = told({"class": "dog", "count": 1, "color": "red"}, {"class": "dog", "count": 1})
    assert one_of_each == {0.9: True, 0.8: True, 0.7: False}
    assert told({"class": "bench", "count": 1}) == {}


def test_a_map_is_where_the_objects_are(mask2former: str, detr: str, clip_folder: str) -> None:
    params = {"clip": clip_folder, "pretrained": None, "device": "cpu", "threshold": 0.25, "counting_threshold": 0.25}
    reward: Any = load_reward("geneval_regions", detector=mask2former, **params)
    images, prompts = pictures(15), prompts_for(15)
    bad = [result for result in examine(reward, images, prompts) if not result.passed]
    assert not bad, bad
    cells = reward.map(images, prompts, [{}] * 15)
    assert cells.shape == (15, 32, 32) and float(cells.nan_to_num(0).abs().max()) <= 1
    torch.testing.assert_close(reward(images, prompts, [{}] * 15), cells.flatten(1).nanmean(1))
    whole: Any = load_reward("geneval_regions", detector=mask2former, whole=True, **params)
    share = load_reward("geneval", detector=mask2former, mode="partial", **params)(images, prompts, [{}] * 15)
    torch.testing.assert_close(
        whole.map(images, prompts, [{}] * 15), cells * share[:, None, None], equal_nan=True, rtol=1e-5, atol=1e-6
    )
    # Pixel by pixel: an object in the upper left quarter, and a less sure one of the same class behind and below it.
    reward.detect = lambda images, least: [
        {"dog": [Detection((0.0, 0.0, 48.0, 40.0), 0.9), Detection((0.0, 20.0, 48.0, 80.0), 0.8)]},
        {},
    ]
    reward.detect.names = ["dog"]
    two = reward.map(images[:2], ["a photo of a dog"] * 2, [{}] * 2)
    assert bool((two[0, :16, :16] == 1).all() and (two[0, 16:, :16] == -1).all() and two[0, :, 16:].isnan().all())
    assert bool((two[1] == -1).all())
