"""Sets that are not alike: compared on what all have, or not at all; and what was seen is kept."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from diffrl.cli.main import main
from diffrl.divgen import extractors, store, vision
from diffrl.divgen.fair import SetOf, make_fair
from diffrl.divgen.metrics import difference
from diffrl.divgen.scoring import score_folder, seen_folder
from diffrl.divgen.sets import sets_of
from diffrl.errors import UserError
from diffrl.prompts import Prompt

PIXELS = {"identity": "none", "style": "none", "layout": "none", "features": "pixels", "lpips": "none"}


def folder_of(
    root: Path, seed: int = 0, prompts: int = 12, members: int = 4, missing: tuple[int, ...] = (), twice: bool = False
) -> Path:
    """Pictures of one source: a colour for each prompt, noise for each picture."""
    root.mkdir(parents=True)
    lines = []
    for i in range(prompts):
        base = np.random.default_rng(i).integers(60, 190, (8, 8, 3))
        for m in range(members):
            pixels = base + 40 * np.random.default_rng((seed, i, m)).normal(size=(8, 8, 3))
            Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(root / f"{i}-{m}.png")
            if i not in missing:
                lines += [json.dumps({"file": f"{i}-{m}.png", "prompt": f"prompt {i}", "seed": m})] * (1 + twice)
    (root / "manifest.jsonl").write_text("\n".join(lines))
    return root


def compared(*folders: Path) -> tuple[list[SetOf], list[str]]:
    sets = [seen_folder(folder, PIXELS) for folder in folders]
    return sets, make_fair(sets)


def test_half_of_the_same_pictures_is_as_diverse(tmp_path: Path) -> None:
    whole, half = folder_of(tmp_path / "whole", members=4), folder_of(tmp_path / "half", members=2)
    (a, b), lines = compared(whole, half)
    raw = [one.scores.metrics["vendi"].value for one in (a, b)]
    fair = [one.fair["vendi"] for one in (a, b)]
    assert raw[0] is not None and raw[1] is not None and raw[0] > 1.02 * raw[1]
    assert fair[0].cut and not fair[1].cut and fair[0].images == fair[1].images == 24
    assert fair[0].value == pytest.approx(fair[1].value, rel=0.01)
    for name in ("vendi", "pvs", "diversity"):
        x, y = a.fair[name], b.fair[name]
        assert x.units == y.units and x.value is not None and y.value is not None
        found = difference(x.value, y.value, np.array(x.deviations), np.array(y.deviations), True)
        assert found is not None and found.paired and found.p > 0.05
    assert any(line.startswith("images of a prompt: 4 (whole), 2 (half)") for line in lines)


def test_a_missing_prompt_keeps_the_pairing_and_copies_count_once(tmp_path: Path) -> None:
    whole, part = folder_of(tmp_path / "whole"), folder_of(tmp_path / "part", missing=(3,), twice=True)
    (a, b), lines = compared(whole, part)
    assert b.sight.copies == 44 and len(b.sight.seen) == 44
    for name in ("vendi", "pvs", "diversity"):
        assert a.fair[name].units == b.fair[name].units and a.fair[name].prompts == 11
        assert a.fair[name].value == b.fair[name].value  # the same pictures
    assert any("11 of 12 prompts are in all sets" in line for line in lines)
    assert any("part: 44 images are there twice" in line for line in lines)


def test_equal_bytes_count_once_unless_their_seeds_are_stated(tmp_path: Path) -> None:
    for i in range(4):
        for folder, name in (("copies", f"cat/{i}.png"), ("collapsed", f"a cat_seed_{i}.png")):
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), "red").save(tmp_path / folder / name)
    assert score_folder(tmp_path / "copies", PIXELS).about["copies"] == 3
    collapsed = score_folder(tmp_path / "collapsed", PIXELS)
    assert collapsed.about["copies"] == 0 and collapsed.metrics["diversity"].value == 0.0


def test_what_differs_is_said_a_line_each(tmp_path: Path) -> None:
    sets, _ = compared(folder_of(tmp_path / "a"), folder_of(tmp_path / "b", seed=1))
    sets[1].scores.about["drawn"] |= {"steps": ["30"], "size": ["16 x 16"]}
    sets[0].scores.about["drawn"] |= {"steps": ["20"]}
    for one, source in zip(sets, ("art", "other art"), strict=True):
        one.scores.about["reference"] = {"source": source, "digest": source}
        one.scores.metrics["asc"].value = 0.5
    lines = "\n".join(make_fair(sets))
    assert "steps: 20 (a), 30 (b)" in lines and "size: 8 x 8 (a), 16 x 16 (b)" in lines
    assert "the reference of ASC: art (a), other art (b); ASC is not compared" in lines
    assert sets[0].fair["asc"].why == "by other references"


def test_no_prompt_in_common_is_not_compared(tmp_path: Path) -> None:
    first, second = folder_of(tmp_path / "a"), folder_of(tmp_path / "b")
    text = (second / "manifest.jsonl").read_text()
    (second / "manifest.jsonl").write_text(text.replace('"prompt ', '"other '))
    (a, b), _ = compared(first, second)
    assert {one.fair[name].why for one in (a, b) for name in ("vendi", "diversity", "pvs")} == {"no prompt in common"}


OWN = """
import numpy as np
class Own:
    name = "own"
    def __init__(self, device): self.calls = 0
    def __call__(self, images, prompts):
        values = [np.append(x.mean((1, 2)).numpy(), 1.0) for x in images]
        spoilt = [i for i, p in enumerate(prompts) if p.text == "prompt 5"]
        %s
        return values
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("values = [v * float('nan') if i in spoilt else v for i, v in enumerate(values)]", "not finite"),
        ("values = values[:-1] if spoilt else values", "0 answers for one image"),
        ("values = [v[:2] if i in spoilt else v for i, v in enumerate(values)]", "of shape"),
        ("values = [0 * v if i in spoilt else v for i, v in enumerate(values)]", "zeros alone"),
        ("values = 1 / 0 if spoilt else values", "ZeroDivisionError"),
        ("values = None if spoilt else values", "a NoneType for one image"),
        ("values = [1.0 if i in spoilt else v for i, v in enumerate(values)]", "a number in place"),
    ],
)
def test_a_bad_answer_names_the_file_and_what_was_seen_stays(fault: str, said: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "set", prompts=40)
    (tmp_path / "own.py").write_text(OWN % fault)
    with pytest.raises(UserError, match=r"own .*5-[0-3]\.png") as error:
        score_folder(folder, {**PIXELS, "features": f"{tmp_path}/own.py:Own"})
    assert said in str(error.value)
    assert (folder / store.FILE).stat().st_size > 0


def test_a_second_scoring_looks_at_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path / "set")
    first = score_folder(folder, PIXELS)
    opened: list[Any] = []
    real = store.in_batches
    monkeypatch.setattr(store, "in_batches", lambda items, *rest: real(opened.extend(items) or items, *rest))
    assert score_folder(folder, PIXELS) == first and not opened
    monkeypatch.setattr(store, "load_extractor", lambda *words: pytest.fail("an extractor was loaded"))
    assert score_folder(folder, PIXELS).metrics == first.metrics
    monkeypatch.setattr(store, "load_extractor", extractors.load_extractor)
    Image.new("RGB", (8, 8), "blue").save(folder / "0-0.png")
    assert score_folder(folder, PIXELS) != first
    assert [item.path.name for item in opened] == ["0-0.png"]


def test_a_killed_scoring_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = score_folder(folder_of(tmp_path / "whole"), PIXELS)
    folder, looked, real = folder_of(tmp_path / "set"), [], vision.Space.__call__

    def ends(self: Any, images: Any, prompts: Any) -> Any:
        looked.append(len(prompts))
        if len(looked) == 2:
            raise KeyboardInterrupt
        return real(self, images, prompts)

    monkeypatch.setattr(vision.Space, "__call__", ends)
    with pytest.raises(KeyboardInterrupt):
        score_folder(folder, PIXELS)
    assert score_folder(folder, PIXELS).values() == whole.values()
    assert looked == [32, 16, 16]


def test_features_that_are_here_in_the_place_of_those_that_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rest = {kind: name for kind, name in PIXELS.items() if kind != "features"}
    folder = folder_of(tmp_path / "set")
    assert score_folder(folder, rest).about["extractors"]["features"] == "pixels"
    asked = score_folder(folder, {**PIXELS, "features": "dinov2"})
    assert asked.metrics["diversity"].value is None and "dinov2" in asked.metrics["diversity"].why


def test_pictures_are_prepared_as_the_models_processor_does(tmp_path: Path) -> None:
    """A wide picture is cut, not squashed."""
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    model = Dinov2Model(Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28)).eval()
    model.save_pretrained(tmp_path / "dino")
    processor = BitImageProcessor(size={"shortest_edge": 36}, crop_size={"height": 28, "width": 28}, resample=3)
    processor.save_pretrained(tmp_path / "dino")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((96, 64), Image.Resampling.BICUBIC)
    images = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255
    found = extractors.load_extractor("features", f"vit:{tmp_path}/dino")(images, [Prompt("a")])[0]
    with torch.no_grad():
        expected = model(**processor(image, return_tensors="pt")).pooler_output[0].numpy()
    assert found is not None
    assert found @ expected / np.linalg.norm(found) / np.linalg.norm(expected) > 0.9999


def test_ten_models_are_one_table_that_marks_the_collapsed_one(tmp_path: Path) -> None:
    root = tmp_path / "models"
    for i in range(10):
        folder_of(root / f"model_{i:02d}", seed=i, prompts=20)
    for path in (root / "model_07").glob("*-[123].png"):
        image = Image.open(path.with_name(path.name.replace(path.name[-5:], "0.png"))).convert("RGB")
        image.putpixel((0, 0), (int(path.name[-5]), 0, 0))
        image.save(path)
    files = [f"--{kind}={tmp_path / 'out'}.{kind}" for kind in ("json", "csv")]
    words = ["divgen", "report", str(root), "--features=pixels", "--by=diversity", f"--out={tmp_path}/out.html", *files]
    words += [f"--{kind}=none" for kind in ("identity", "style", "layout", "lpips")]
    assert main([*words, "--device=cpu"]) == 0
    page = (tmp_path / "out.html").read_text()
    names = [part.partition('"')[0] for part in page.split('<th scope="row" data-value="')[1:]]
    assert names[0] == "model_00" and names[-1] == "model_07" and len(names) == 10
    assert (
        "&lt;style" not in page and page.count('<tr class="less">') == 1 and "<b>model_07</b> against model_00" in page
    )
    assert "All (" not in page and "The others (8): no sure difference" in page and "<script>" in page
    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["set"] for row in rows if row["verdict"]} == {"model_07"} and len(rows) == 70
    assert all(float(row["p"]) <= float(row["p_holm"]) for row in rows if row["p"])
    content = json.loads((tmp_path / "out.json").read_text())
    assert [one["name"] for one in content["sets"]] == names and len(content["scores"]) == 70


def test_sets_are_named_by_a_pattern_a_table_and_a_root(tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder_of(tmp_path / "runs" / name / "samples", members=1, prompts=2)
    (tmp_path / "models.csv").write_text(f"model,folder\nfirst,runs/a/samples\nsecond,{tmp_path}/runs/b/samples\n")
    root = str(tmp_path / "runs")
    assert list(sets_of([f"{root}/*/samples"])) == list(sets_of([root])) == ["a", "b"]
    assert list(sets_of([f"{tmp_path}/models.csv"])) == ["first", "second"]
    assert list(sets_of([f"x={root}/a/samples", f"{root}/b/samples"])) == ["x", "samples"]
    assert list(sets_of([f"{root}/a/samples", f"{root}/b/samples"])) == ["a", "b"]
    others = [f"{root}/a/samples", f"{root}/b/samples", f"{root}/b", "hub:me/samples@main:data/*"]
    assert list(sets_of(others)) == ["a/samples", "b/samples", "b", "me/samples"]
    with pytest.raises(UserError, match='two sets are "'):
        sets_of([root + "/a/samples", f"{root}/b/../a/samples"])
    with pytest.raises(UserError, match="no folder is named as"):
        sets_of([f"{root}/c*"])


def test_a_second_scoring_needs_no_torch(tmp_path: Path) -> None:
    """Start-up was 8 of its 10 seconds."""
    folder = folder_of(tmp_path / "set")
    words = ["divgen", "score", str(folder), *(f"--{kind}={name}" for kind, name in PIXELS.items())]
    assert main(words) == 0
    script = f"import sys\nfrom diffrl.cli.main import main\nassert main({words!r}) == 0 and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_guide_quotes_the_calibration() -> None:
    root = Path(__file__).parents[2]
    found = json.loads((root / "assets/results/divgen_calibration.json").read_text())["false alarms"]
    shares = [100 * one["share"] for one in found.values()]
    assert max(shares) <= 6
    text = f"the scores called {min(shares):.1f} to {max(shares):.1f} % different"
    assert text in (root / "docs/guides/divgenbench.md").read_text()
