"""From folders of images to scores: counts, reasons in place of numbers, order, and what a broken file does."""

from __future__ import annotations

import itertools
import json
import random
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from divgen_parts import as_written, load_extractors
from PIL import Image
from torch import Tensor

from diffrl.divgen.extractors import KINDS, NONE, load_extractor
from diffrl.divgen.folders import read_folder
from diffrl.divgen.metrics import mean_cosine
from diffrl.divgen.observe import Item, Sight, in_batches, observe, to_tensor
from diffrl.divgen.reference import Reference, build_reference, drawn_reference, load_reference
from diffrl.divgen.score import FILE, METRICS, load_scores, score
from diffrl.divgen.scoring import score_folder
from diffrl.divgen.store import kept
from diffrl.errors import UserError
from diffrl.prompts import Prompt
from diffrl.worlds import worlds
from diffrl_playground.grammar import parse
from diffrl_playground.renderer import draw
from diffrl_playground.scenes import complete

PIXELS = {"identity": NONE, "style": "pixels", "layout": NONE, "features": "pixels", "lpips": NONE}
HEAD, SHAPES = "a smiling tan head with red hair on white", "two red circles on white"


def noise(seed: int, size: int = 16) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def rendered(prompts: list[Prompt], members: int, repeat: bool = False) -> list[tuple[list[Item], Tensor]]:
    """True images, one batch for each prompt; all of a prompt's images are the same one with `repeat`."""
    batches = []
    for prompt in prompts:
        rngs = [np.random.default_rng(0 if repeat else (len(batches), member)) for member in range(members)]
        pixels = np.stack([draw(prompt.text, rng) for rng in rngs])
        batches.append(([Item(prompt, member) for member in range(members)], to_tensor(pixels)))
    return batches


def of(dimension: str, *texts: str) -> list[Prompt]:
    return [Prompt(text, {"dimension": dimension, "keyword": text[:5]}) for text in texts]


def test_identical_images_have_no_diversity() -> None:
    extractors, _ = load_extractors({"identity": "playground", "layout": "playground", "features": "pixels"})
    prompts = of("id", HEAD) + of("layout", SHAPES) + of("tonal", "a red circle on white, dark")
    result = score(observe(rendered(prompts, 4, repeat=True), extractors))
    values = result.values()
    assert values["ids"] == pytest.approx(1.0) and values["sdi"] == pytest.approx(0.0)
    assert values["pvs"] == pytest.approx(0.0) and values["diversity"] == pytest.approx(0.0)
    assert result.metrics["ids"].images == 4 and result.metrics["ids"].low is None  # one prompt has no interval
    different = score(observe(rendered(prompts, 4), extractors)).values()
    assert different["sdi"] > 0.5 and different["pvs"] > 0.0 and different["diversity"] > 0.0


def test_heads_give_the_share_of_features_on_which_they_agree() -> None:
    extractors, _ = load_extractors({"identity": "playground"})
    texts = [f"a {skin} head with {hair} hair" for skin in ("light", "tan", "brown") for hair in ("red", "blue")]
    sight = observe(rendered(of("id", *texts), 1), extractors)
    scenes = [complete(parse(text), np.random.default_rng((i, 0))) for i, text in enumerate(texts)]
    names = ("skin", "hair", "mood", "glasses", "hat")
    agree = [np.mean([a[n] == b[n] for n in names]) for a, b in itertools.combinations(scenes, 2)]
    assert score(sight).values()["ids"] == pytest.approx(np.mean(agree))


def test_what_is_not_found_is_counted_and_not_scored() -> None:
    extractors, _ = load_extractors({"identity": "playground", "layout": "playground"})
    blank = ([Item(prompt, 9) for prompt in of("id", HEAD) + of("layout", SHAPES)], torch.ones(2, 3, 64, 64))
    sight = observe([*rendered(of("id", HEAD) + of("layout", SHAPES), 3), blank], extractors)
    found = score(sight).metrics
    assert (found["ids"].images, found["ids"].empty) == (3, 1) and found["ids"].value is not None
    assert (found["sdi"].images, found["sdi"].empty) == (3, 1)
    only_blank = score(observe([blank], extractors)).metrics
    assert only_blank["ids"].value is None and "0 images in which something was found" in only_blank["ids"].why
    assert only_blank["sdi"].value is None and only_blank["sdi"].why


def test_every_missing_value_has_a_reason() -> None:
    extractors, missing = load_extractors({**PIXELS, "identity": NONE})
    result = score(observe(rendered(of("tonal", "a red circle on white, dark"), 3), extractors), None, missing)
    for name, found in result.metrics.items():
        assert (found.value is None) == bool(found.why), name
    assert result.metrics["asc"].why == "no image of the dimension style"
    assert result.metrics["ids"].why == "left out"
    one = score(observe(rendered(of("style", "a red circle on white, striped"), 3), extractors), None, missing)
    assert "divgen reference" in one.metrics["asc"].why


def test_the_order_of_the_images_says_nothing(tmp_path: Path) -> None:
    extractors, _ = load_extractors({"features": "pixels", "style": "pixels"})
    items = []
    for i in range(40):
        path = tmp_path / f"{i}.png"
        save(path, noise(i))
        items.append(Item(Prompt(f"prompt {i // 4}", {"dimension": "style", "keyword": "k"}), i % 4, path))
    reference = Reference(*(np.random.default_rng(s).normal(size=(60, 192)) for s in (1, 2)), "pixels", "noise")
    shuffled = random.Random(1).sample(items, len(items))
    results = [
        score(observe(in_batches(order, size, Sight()), extractors), reference)
        for order, size in ((items, 32), (shuffled, 1), (items[::-1], 7))
    ]
    assert results[0].metrics["asc"].value is not None and results[0].metrics["diversity"].low is not None
    for other in results[1:]:
        for name, found in results[0].metrics.items():
            assert found.value == pytest.approx(other.metrics[name].value, abs=1e-7), name
            assert found.low == pytest.approx(other.metrics[name].low, abs=1e-6), name


def test_a_folder_scores_like_the_images_in_memory(tmp_path: Path) -> None:
    extractors, missing = load_extractors(PIXELS)
    drawn = torch.rand(12, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    items, lines = [], []
    for i, image in enumerate(as_written(drawn)):
        prompt = Prompt(f"prompt {i // 4}", {"dimension": "tonal", "keyword": "dark"})
        items.append(Item(prompt, i % 4))
        save(tmp_path / f"{i}.png", (image.permute(1, 2, 0) * 255).round().byte().numpy())
        lines.append(json.dumps({"file": f"{i}.png", "prompt": prompt.text, "member": i % 4, **prompt.metadata}))
    (tmp_path / "manifest.jsonl").write_text("\n".join(lines))
    there = score(observe([(items, as_written(drawn))], extractors), None, missing)
    here = score_folder(tmp_path, PIXELS)
    assert here.values() == there.values() and here.values().keys() >= {"pvs", "diversity", "vendi"}
    assert load_scores(tmp_path / FILE) == here
    assert here.keywords == {"tonal": {"dark": pytest.approx(here.values()["pvs"])}}


def test_no_image_is_kept() -> None:
    """While a batch is looked at, the batches before it are gone: memory holds features only."""
    extractors, _ = load_extractors({"features": "pixels", "style": "pixels"})
    drawn: list[weakref.ref[Tensor]] = []

    def batches() -> Iterator[tuple[list[Item], Tensor]]:
        for i in range(20):
            images = torch.rand(4, 3, 16, 16)
            drawn.append(weakref.ref(images))
            yield [Item(Prompt(f"{i}", {"dimension": "style"}), member) for member in range(4)], images
            del images
            assert sum(kept() is not None for kept in drawn) <= 1

    sight = observe(batches(), extractors)
    assert len(sight.seen) == 80
    values = [v for s in sight.seen for kind, v in s.values.items() if v is not None and kind != "size"]
    assert sum(value.nbytes for value in values) == 80 * 2 * 768


def test_sub_folders_give_dimension_and_keyword(tmp_path: Path) -> None:
    for i in range(3):
        save(tmp_path / "layout" / "two cats" / f"{i}.png", noise(i))
        save(tmp_path / "tonal" / f"{i}.jpg", noise(10 + i))
        save(tmp_path / "other" / f"{i}.png", noise(20 + i))
    (tmp_path / "notes.txt").write_text("not an image")
    items = read_folder(tmp_path).items
    found = {(item.dimension, item.keyword, item.prompt.text, item.member) for item in items}
    assert len(items) == 9 and ("layout", "two cats", "layout/two cats", 2) in found
    assert ("tonal", "", "tonal/1.jpg", 0) in found and ("", "other", "other", 2) in found
    assert {item.dimension for item in read_folder(tmp_path / "other", "style").items} == {"style"}
    result = score_folder(tmp_path, PIXELS)
    assert result.metrics["pvs"].images == 6  # of tonal, and of those that nobody gave a dimension
    assert result.metrics["diversity"].prompts == 2 and result.dimensions["layout"]["images"] == 3


def test_broken_and_missing_images_are_reported(tmp_path: Path) -> None:
    for i in range(4):
        save(tmp_path / "tonal" / f"{i}.png", noise(i))
    whole = (tmp_path / "tonal" / "0.png").read_bytes()
    (tmp_path / "tonal" / "1.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "tonal" / "2.png").write_bytes(b"no image at all")
    result = score_folder(tmp_path, PIXELS)
    assert result.metrics["pvs"].images == 2 and result.dimensions["tonal"] == {
        "images": 2,
        "unreadable": 2,
        "prompts": 2,
        "diversity": None,
        "vendi": pytest.approx(result.values()["vendi"]),
    }
    broken = [str(tmp_path / "tonal" / name) for name in ("1.png", "2.png")]
    assert [line.partition(": ")[0] for line in sorted(result.unreadable)] == broken
    (tmp_path / "manifest.jsonl").write_text(
        '{"file": "tonal/0.png", "prompt": "a"}\n{"file": "x.png", "prompt": "b"}\n'
    )
    assert score_folder(tmp_path, PIXELS).unreadable == [f"{tmp_path / 'x.png'}: missing"]


def test_images_of_several_sizes_and_modes(tmp_path: Path) -> None:
    for i, (mode, size) in enumerate([("RGB", (20, 20)), ("L", (20, 20)), ("RGBA", (40, 24)), ("P", (9, 31))]):
        Image.fromarray(noise(i, 40)).convert(mode).resize(size).save(tmp_path / f"{i}.png")
    result = score_folder(tmp_path, PIXELS)
    assert result.metrics["pvs"].images == result.metrics["vendi"].images == 4


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        read_folder(tmp_path / "nothing")
    with pytest.raises(UserError, match="no image in"):
        read_folder(tmp_path)
    (tmp_path / "manifest.jsonl").write_text('{"file": "a.png", "prompt": "a"}\n{"prompt": "b"}\n')
    with pytest.raises(UserError, match=r"manifest.jsonl:2: expected"):
        read_folder(tmp_path)
    (tmp_path / "manifest.jsonl").write_text('{"file": "a.png", "prompt": "a", "dimension": "mood"}\n')
    with pytest.raises(UserError, match='unknown dimension "mood"'):
        read_folder(tmp_path)
    with pytest.raises(UserError, match="not scored yet"):
        load_scores(tmp_path / FILE)
    (tmp_path / FILE).write_text("[]")
    with pytest.raises(UserError, match="not scores that"):
        load_scores(tmp_path / FILE)


def test_a_reference_is_stored_and_fits_its_extractor(tmp_path: Path) -> None:
    for i in range(30):
        save(tmp_path / "art" / "cubism" / f"{i}.png", noise(i))
        save(tmp_path / "mine" / "style" / f"{i}.png", noise(100 + i))
    (tmp_path / "art" / "broken.png").write_bytes(b"")
    reference, sight = build_reference(tmp_path / "art", "pixels")
    assert reference.train.shape == (20, 192) and reference.test.shape == (10, 192)
    assert [str(item.path) for item, _ in sight.unreadable] == [str(tmp_path / "art" / "broken.png")]
    path = tmp_path / "art.safetensors"
    reference.save(path)
    again = load_reference(path)
    np.testing.assert_array_equal(again.train, reference.train)
    assert (again.style, again.source) == ("pixels", str(tmp_path / "art"))
    found = score_folder(tmp_path / "mine", PIXELS, reference=path)
    assert found.metrics["asc"].value is not None and found.metrics["asc"].images == 10
    with pytest.raises(UserError, match='style extractor "pixels", but this scores with "clip"'):
        score_folder(tmp_path / "mine", {**PIXELS, "style": "clip"}, reference=path)
    path.write_bytes(b"no tensors")
    with pytest.raises(UserError, match="not a reference"):
        load_reference(path)


def test_real_images_cover_the_playgrounds_styles() -> None:
    """Other true images of the same prompts reach an ASC of about 1; one image over and over next to nothing."""
    style = load_extractor("style", "pixels")
    texts = [
        f"a {color} {shape} on {ground}, {style}"
        for color in ("red", "blue")
        for shape in ("star", "heart", "square")
        for ground in ("white", "black")
        for style in ("striped", "filled", "outlined")
    ]
    reference = drawn_reference(worlds()["playground"], style, [*texts, *texts, "not of the world"], train=300)
    assert reference.train.shape == (300, 192) and reference.test.shape == (72, 192)
    true = score(observe(rendered(of("style", *texts), 2), {"style": style}), reference).metrics["asc"]
    assert true.images == 72 and true.low is not None and true.high is not None
    assert true.low < 1.0 < true.high and true.high - true.low < 1.0
    alike = score(observe(rendered(of("style", texts[0]), 72, repeat=True), {"style": style}), reference)
    assert alike.metrics["asc"].value is not None and alike.metrics["asc"].value < 0.1


def test_an_extractor_of_ones_own(tmp_path: Path) -> None:
    source = "import numpy as np\nclass Mean:\n    name = 'mean'\n    def __init__(self, device): pass\n"
    source += "    def __call__(self, images, prompts):\n        return list(images.mean((2, 3)).numpy())\n"
    (tmp_path / "own.py").write_text(source)
    extractor = load_extractor("features", f"{tmp_path}/own.py:Mean")
    images = torch.rand(5, 3, 4, 4)
    sight = observe([([Item(Prompt("a"), i) for i in range(5)], images)], {"features": extractor})
    expected = 1 - float(mean_cosine(images.mean((2, 3)).numpy())[0])
    assert score(sight).values()["diversity"] == pytest.approx(expected, abs=1e-6)
    for name, text in (
        ("own.py:Mean", 'no file "own.py"'),
        (f"{tmp_path}/own.py:Main", 'no "Main"'),
        ("pixel", 'unknown extractor "pixel"'),
        ("pixels:large", "takes no weights"),
        ("vit", "needs a hub id or a folder"),
    ):
        with pytest.raises(UserError, match=text):
            load_extractor("features", name)
    assert set(KINDS) == {metric.kind for metric in METRICS.values()} - {"tones"}


def test_features_that_find_no_room_are_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "a.png", noise(0))
    with kept(tmp_path) as store:
        store.keep([(b"0", "x", np.zeros(9))])
        store.base.execute("PRAGMA max_page_count = 6")
        for key in (b"1", b"2"):
            store.keep([(key, "x", np.zeros(9999))])
        store.digest(tmp_path / "a.png")
    with kept(tmp_path) as store:
        assert set(store.known("x")) == {b"0"}
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'features.sqlite'}: features are not kept (database or disk is full)"
    ]
