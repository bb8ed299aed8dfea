"""T2I-CompBench++'s judges: its rules against a transcription, and tiny random models of the true classes; mPLUG."""

from __future__ import annotations

import random
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from diffrl.errors import UserError
from diffrl.reward_tools.check import examine
from diffrl.rewards import RewardError, load_reward
from diffrl_zoo import compbench_rules as rules
from diffrl_zoo.geneval_rules import Detection

pytestmark = pytest.mark.usefixtures("one_call")

LABELS = ["cat", "dog", "wild cat", "table, desk", "person", "boat", "cup"]

# a transcription of the published rules, in float64 and case by case


def place(relation: str | None, a: Any, b: Any, depth: Any = None) -> float:
    ax, ay, bx, by = (a[0] + a[2]) / 2, (a[1] + a[3]) / 2, (b[0] + b[2]) / 2, (b[1] + b[3]) / 2
    right, down = bx - ax, by - ay
    wide = max(0, min(a[2], b[2]) - max(a[0], b[0]))
    both = wide * max(0, min(a[3], b[3]) - max(a[1], b[1]))
    share = both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)
    if relation in ("next to", "on side of", "near"):
        if abs(right) < 150 or abs(down) < 150:
            return 1
        return 150 / max(abs(right), abs(down))
    directions = {"on the right of": (-right, down), "on the left of": (right, down)}
    directions |= {"on the bottom of": (-down, right), "on the top of": (down, right)}
    if relation in directions:
        along, across = directions[relation]
        if along > 0 and abs(along) > abs(across):
            return 1 if share < 0.1 else 0.1 / share
        return 0
    if relation in ("in front of", "behind", "hidden"):
        means = [depth[int(box[0]) : int(box[2]), int(box[1]) : int(box[3])].mean() for box in (a, b)]
        right_order = means[0] > means[1] if relation == "in front of" else means[0] < means[1]
        if share > 0.5:
            return 1 if right_order else 0
        if 0 < share < 0.5:
            return share / 0.5 if right_order else 0
    return 0


def plane(pair: Any, relation: str | None, names: list[str], boxes: Any, scores: Any) -> float:
    here = [names.index(name) if name in names else None for name in pair]
    if here[0] is not None and here[1] is not None:
        score = 0.25 * scores[here[0]] + 0.25 * scores[here[1]]
        score += place(relation, boxes[here[0]], boxes[here[1]]) / 2
    elif here[0] is not None or here[1] is not None:
        score = 0.25 * scores[here[0] if here[0] is not None else here[1]]
    else:
        score = 0
    return score if score >= 0.5 else 0


def deep(pair: Any, relation: str | None, names: list[str], boxes: Any, scores: Any, depth: Any) -> float:
    text = " ".join(names)
    if pair[0] in text and pair[1] in text:
        here: list[Any] = [None, None]
        for i, name in enumerate(names):
            for side in (0, 1):
                if pair[side] in name:
                    here[side] = i
            if None not in here:
                break
        score = 0.25 * scores[here[0]] + 0.25 * scores[here[1]]
        return score + place(relation, boxes[here[0]], boxes[here[1]], depth) / 2
    for wanted in pair:
        for i, name in enumerate(names):
            if wanted in name:
                return 0.25 * scores[i]
    return 0


def same(a: Any, b: Any) -> bool:
    wide, high = min(a[2], b[2]) - max(a[0], b[0]) + 1, min(a[3], b[3]) - max(a[1], b[1]) + 1
    both = max(0, wide) * max(0, high)
    one, two = ((box[2] - box[0] + 1) * (box[3] - box[1] + 1) for box in (a, b))
    return both / (one + two - both) > 0.9 or both / one > 0.9 or both / two > 0.9


def count(things: list[str], numbers: list[int], names: list[str], boxes: Any) -> float:
    labels: list[str] = []
    places: list[Any] = []
    for name, box in zip(names, boxes, strict=True):
        if not any(same(box, other) and name == label for label, other in zip(labels, places, strict=True)):
            labels.append(name)
            places.append(box)
    score = 0.0
    for thing, number in zip(things, numbers, strict=True):
        name = {"girl": "person", "man": "person", "ship": "boat", "goldfish": "fish"}.get(thing, thing)
        if name not in labels:
            for j in range(len(labels)):
                if name in labels[j]:
                    labels[j] = name
        if name in labels:
            score += 0.5 * (1.0 / len(things))
            if labels.count(name) == number:
                score += 0.5 * (1.0 / len(things))
    return score


def detections(dice: random.Random) -> tuple[list[str], list[Any], list[float]]:
    boxes: list[tuple[float, ...]] = []
    for _ in range(dice.choice([0, 1, 2, 3, 6])):
        if boxes and dice.random() < 0.5:  # one that overlaps
            box = [value + dice.uniform(-20, 20) for value in dice.choice(boxes)]
        else:
            x, y = dice.uniform(0, 400), dice.uniform(0, 400)
            box = [x, y, x + dice.uniform(30, 300), y + dice.uniform(30, 300)]
        left, top = (min(max(value, 0.0), 450.0) for value in box[:2])
        box = [left, top, min(max(box[2], left + 5), 479.0), min(max(box[3], top + 5), 479.0)]
        boxes.append(tuple(float(round(v)) for v in box) if dice.random() < 0.3 else tuple(box))
    scores = sorted((dice.uniform(0.1, 1) for _ in boxes), reverse=True)
    return [dice.choice(LABELS) for _ in boxes], boxes, scores


def test_the_rules_agree_with_a_transcription_on_synthetic_detections() -> None:
    dice = random.Random(5)
    relations, depths = [*rules.RELATIONS, None], [*rules.DEPTHS, None]
    maps = torch.nn.functional.interpolate(
        torch.rand(8, 1, 5, 5, generator=torch.Generator().manual_seed(0)), (479, 479)
    )
    positive = [0, 0, 0]
    for i in range(6000):
        names, boxes, scores = detections(dice)
        objects = [(name, Detection(box, s)) for name, box, s in zip(names, boxes, scores, strict=True)]
        pair = (dice.choice(["cat", "dog", "person"]), dice.choice(["cat", "desk", "table", "cup"]))
        relation, order, depth = dice.choice(relations), dice.choice(depths), maps[i % 8, 0]
        values = [rules.spatial(pair, relation, objects), rules.spatial_in_depth(pair, order, objects, depth)]
        assert values[0] == plane(pair, relation, names, boxes, scores)
        assert values[1] == deep(pair, order, names, boxes, scores, depth)
        things = dice.sample(["cat", "dog", "girl", "ship", "desk", "cup", "goldfish"], dice.randint(1, 3))
        numbers = [dice.randint(1, 3) for _ in things]
        values.append(rules.numeracy(things, numbers, objects))
        assert values[2] == count(things, numbers, names, boxes)
        positive = [n + (value > 0) for n, value in zip(positive, values, strict=True)]
    assert min(positive) > 100


def tagged(text: str) -> list[tuple[str, str]]:
    """Words by "word/KIND"; without a kind it is an ADP."""
    return [(word.partition("/")[0], word.partition("/")[2] or "ADP") for word in text.split()]


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("The red/ADJ hat/NOUN was on top of the coat/NOUN rack/NOUN .", ("hat", "coat")),
        ("A man/NOUN next to a Ford/PROPN Focus/PROPN .", ("person", "Focus")),
        ("A bowl/NOUN", None),
        ("The cat/NOUN near a dog/NOUN and near a cup/NOUN", None),  # four things
        ("near the cup/NOUN", None),
    ],
)
def test_the_things_of_complex_prompts(text: str, pair: Any) -> None:
    assert rules.pair_around(tagged(text)) == pair


def test_words_of_simple_prompts() -> None:
    assert rules.pair_of(tagged("a girl/NOUN on the left/NOUN of a pig/NOUN")) == ("person", "pig")
    assert rules.pair_of(tagged("a on")) is None
    assert rules.relation_of("a mug on top of a box", rules.RELATIONS) == "on top of"
    assert rules.in_place("on top of", (0, 0, 10, 10), (0, 100, 10, 110)) == 0.0  # a fault that is kept
    assert rules.relation_of("a cat hidden by a dog", rules.DEPTHS) == "hidden"


# the reward


@pytest.fixture(scope="module")
def owl(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import CLIPTokenizer, Owlv2Config, Owlv2ForObjectDetection, Owlv2ImageProcessor, Owlv2Processor

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    width = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**width, "vocab_size": len(words), "max_position_embeddings": 32}
    text |= {"bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1, "pad_token_id": 0}
    torch.manual_seed(0)
    vision = {**width, "image_size": 64, "patch_size": 16}
    model = Owlv2ForObjectDetection(Owlv2Config(text_config=text, vision_config=vision, projection_dim=16))
    with torch.no_grad():  # confidences and boxes that differ
        for parameter in [*model.owlv2.parameters(), *model.class_head.parameters()]:
            parameter.add_(0.1 * torch.randn(parameter.shape))
        model.box_head.dense2.weight.mul_(0.02)  # near their patches
    folder = tmp_path_factory.mktemp("owl")
    model.save_pretrained(folder)
    tokenizer = CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=32)
    Owlv2Processor(Owlv2ImageProcessor(size={"height": 64, "width": 64}), tokenizer).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def dpt(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import DPTConfig, DPTForDepthEstimation

    torch.manual_seed(0)
    backbone = {"model_type": "bit", "global_padding": "same", "layer_type": "bottleneck", "depths": [1, 1, 1],
                "hidden_sizes": [8, 16, 24], "embedding_size": 8, "out_features": ["stage1", "stage2", "stage3"],
                "embedding_dynamic_padding": True, "num_groups": 2}  # fmt: skip
    config = DPTConfig(
        is_hybrid=True, backbone_config=backbone, hidden_size=16, num_hidden_layers=4, num_attention_heads=2,
        intermediate_size=32, image_size=384, patch_size=16, backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 16, 24, 24], fusion_hidden_size=16, backbone_featmap_shape=[1, 24, 24, 24],
        neck_ignore_stages=[0, 1], readout_type="project",
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("dpt")
    DPTForDepthEstimation(config).save_pretrained(folder)
    return str(folder)


def pictures(n: int, height: int = 48, width: int = 64) -> torch.Tensor:
    noise = torch.rand(n, 3, 6, 6, generator=torch.Generator().manual_seed(3))
    return torch.nn.functional.interpolate(noise, (height, width), mode="nearest")


def nouns(text: str) -> list[Any]:
    """A stand-in for spaCy: every word is a noun, or an adjective if it is a colour or a size."""
    kinds = {"red": "ADJ", "big": "ADJ"}
    return [types.SimpleNamespace(text=word, pos_=kinds.get(word, "NOUN")) for word in text.split()]


def build(owl: str, dpt: str = "", **more: Any) -> Any:
    return load_reward("compbench", detector=owl, device="cpu", **({"depth": dpt} if dpt else {}), **more)


def test_an_open_detector_is_asked_for_the_prompts_things(owl: str) -> None:
    """Against the processor's own reading, threshold and suppression by hand; boxes at the scripts' size."""
    detector = build(owl).detector
    image = pictures(1)[0]
    for size in ((48, 64), (64, 64)):
        assert rules.seen_size(*size) == {(48, 64): (360, 480), (64, 64): (479, 479)}[size]
    found = detector(image, ["cat", "dog", "cat"], 0.05)
    picture = Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
    inputs = detector.processor(text=[["a photo of a cat", "a photo of a dog"]], images=[picture], return_tensors="pt")
    with torch.no_grad():
        output = detector.model(**inputs)
    scores, labels = output.logits[0].max(dim=-1)
    centre = output.pred_boxes[0] * 480  # of the square to which the picture is padded
    rows, edges = [], (480, 360, 480, 360)
    for score, label, (x, y, w, h) in zip(scores.sigmoid().tolist(), labels.tolist(), centre.tolist(), strict=True):
        box = [
            min(max(v, 0), edge) for v, edge in zip((x - w / 2, y - h / 2, x + w / 2, y + h / 2), edges, strict=True)
        ]
        if score > 0.05:
            rows.append((score, ["cat", "dog"][label], tuple(box)))
    expected: list[Any] = []
    for score, name, box in sorted(rows, reverse=True):
        if all(name != other or rules.iou(box, above) <= 0.5 for _, other, above in expected):
            expected.append((score, name, box))
    assert len(found) == len(expected) > 1 and {name for name, _ in found} <= {"cat", "dog"}
    for (name, thing), (score, name_, box) in zip(found, expected, strict=True):
        assert name == name_ and thing.score == pytest.approx(score, abs=1e-4)
        assert thing.box == pytest.approx(box, abs=0.05)


def test_depth_is_what_the_script_stores(owl: str, dpt: str) -> None:
    """Pillow's resizing and bytes, as the script's own steps, against ours on tensors."""
    depth, image = build(owl, dpt, mode="depth").depth, pictures(1, 60, 48)[0]
    picture = Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
    resized = np.asarray(picture.resize((480, 480), Image.Resampling.BILINEAR)) / 255
    pixels = torch.tensor((resized - 0.5) / 0.5, dtype=torch.float32).permute(2, 0, 1)[None]
    with torch.no_grad():
        raw = depth.model(pixels).predicted_depth
    raw = (raw - raw.min()) / (raw.max() - raw.min())
    raw = torch.nn.functional.interpolate(raw[:, None], (60, 48), mode="bilinear", align_corners=True)
    stored = Image.fromarray((255 * raw[0, 0]).numpy()).convert("L").resize((384, 480), Image.Resampling.BILINEAR)
    ours = depth(image)
    assert ours.shape == (480, 384) == rules.seen_size(60, 48) and ours.std() > 0.05
    assert (ours - torch.tensor(np.asarray(stored) / 255)).abs().max() < 0.02


@pytest.mark.parametrize("mode", ["spatial", "numeracy"])
def test_compbench_conforms_on_tiny_models(mode: str, owl: str, dpt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffrl_zoo.compbench.language", lambda: nouns)
    reward, images = build(owl, mode=mode, threshold=0.05), pictures(6, 64, 64)
    prompts = ["a cat near a dog"] * 6
    metadata: list[dict[str, Any]] = [{"things": ["cat", "dog"]}] * 6
    if mode == "numeracy":  # right in the first picture
        objects = [name for name, _ in reward.detector(images[0], ["cat", "dog"], 0.05)]
        metadata = [{"objects": ["cat", "dog"], "counts": [objects.count("cat"), objects.count("dog")]}] * 6
    bad = [r for r in examine(reward, images, prompts, metadata) if not r.passed]
    assert not bad, bad
    assert reward.applies("p", metadata[0]) and reward.applies("p", {}) == (mode != "numeracy")


def test_positions_in_depth_use_both_models(owl: str, dpt: str) -> None:
    reward, image = build(owl, dpt, mode="depth", threshold=0.05), pictures(1, 64, 64)
    objects = reward.detector(image[0], ["cat", "dog"], 0.05)
    expected = rules.spatial_in_depth(("cat", "dog"), "behind", objects, reward.depth(image[0]))
    score = reward(image, ["a cat behind a dog"], [{"things": ["cat", "dog"]}])
    assert score.tolist() == pytest.approx([expected]) and expected > 0


def test_actions_are_clips_cosine_without_adjectives(owl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffrl_zoo.compbench.language", lambda: nouns)
    reward: Any = load_reward("compbench", mode="action", clip="playground", pretrained=None, device="cpu")
    plain: Any = load_reward("clip", model="playground", device="cpu")
    images = pictures(2, 64, 64)
    scores = reward(images, ["a red circle", "a big square"], [{}, {}])
    assert scores.tolist() == pytest.approx(plain(images, ["a circle", "a square"], [{}, {}]).tolist(), abs=1e-6)
    assert reward.card.range == (-1.0, 1.0)


def test_what_compbench_cannot_judge_is_one_line(owl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffrl_zoo.compbench import words_of

    with pytest.raises(UserError, match=r'unknown mode "depht" \(nearest: "depth"\)'):
        build(owl, mode="depht")
    with pytest.raises(UserError, match="compbench: cannot load"):
        build(str(tmp_path))
    counts = build(owl, mode="numeracy")
    with pytest.raises(RewardError, match="lists of one length"):
        counts(pictures(1), ["p"], [{"objects": ["cat"], "counts": [1, 2]}])
    with pytest.raises(RewardError, match="`things` are two names"):
        build(owl)(pictures(1), ["p"], [{"things": ["cat"]}])
    words_of.cache_clear()
    monkeypatch.setattr("diffrl_zoo.compbench.language", lambda: None)
    with pytest.raises(RewardError, match=r"read by spaCy and en_core_web_sm: install it .*, or give `things`"):
        build(owl)(pictures(1), ["a cat near a dog"], [{}])


# mPLUG


def modelscope(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[Any]:
    """A stand-in for modelscope's pipeline, and what was asked of it."""
    made: list[Any] = []

    def pipeline(task: str, model: str, device: str) -> Any:
        made.append((task, model, device))
        return answer

    tasks = types.SimpleNamespace(visual_question_answering="vqa")
    names: dict[str, Any] = {"modelscope": {}, "modelscope.utils": {}, "modelscope.pipelines": {"pipeline": pipeline}}
    names["modelscope.utils.constant"] = {"Tasks": tasks}
    for name, content in names.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return made


def test_mplug_answers_each_question_to_the_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(request: dict[str, Any]) -> dict[str, str]:
        light = float(np.asarray(request["image"]).mean()) / 255
        asked.append((request["image"].size, request["question"]))
        return {"text": "yes" if light > 0.5 else "yes it is"}

    made = modelscope(monkeypatch, answer)
    reward: Any = load_reward("mplug", device="cpu")
    assert made == [("vqa", "damo/mplug_visual-question-answering_coco_large_en", "cpu")]
    images = torch.stack([torch.full((3, 8, 16), 0.2), torch.full((3, 8, 16), 0.9)])
    data = [{"vqa_list": [["Is it day?", "Yes"], ["Is it night?", "No"]]}] * 2
    assert reward.answers(images, ["p"] * 2, data) == [[0.0, 0.0], [1.0, 0.0]]
    assert asked[:2] == [((16, 8), "Is it day?"), ((16, 8), "Is it night?")]
    assert reward(images, ["p"] * 2, data).tolist() == [0.0, 0.5]
    assert reward.applies("p", data[0]) and not reward.applies("p", {})
    with pytest.raises(RewardError, match='mplug: the prompt "p": expected `vqa_list`'):
        reward(images, ["p"] * 2, [{"vqa_list": "?"}] * 2)
    modelscope(monkeypatch, lambda request: {"boxes": []})
    with pytest.raises(RewardError, match='no text in the answer to "Is it day'):
        load_reward("mplug", device="cpu")(images, ["p"] * 2, data)


def test_mplug_without_modelscope_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(UserError, match=r"mplug: it comes with modelscope .*pip install 'modelscope\[multi-modal\]'"):
        load_reward("mplug", device="cpu")
