"""`diffrl divgen`: what it is called with, what it says, and one line for a mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hub import serving
from PIL import Image
from pyarrow import parquet

from diffrl.cli.divgen import DIMENSIONS, KINDS
from diffrl.cli.main import main
from diffrl.divgen.score import FILE, load_scores
from diffrl.prompts import load_prompts

PIXELS = [f"--{kind}={name}" for kind, name in zip(KINDS, ("none", "pixels", "none", "pixels", "none"), strict=True)]


def folder_of(root: Path, spread: float, members: int = 3) -> Path:
    """A scored-to-be folder: 10 prompts in each dimension, images that differ by `spread` within a prompt."""
    rng, lines = np.random.default_rng(0), []
    for i, dimension in enumerate(np.repeat(DIMENSIONS, 10)):
        base = rng.integers(60, 190, (8, 8, 3))
        for member in range(members):
            name = f"images/{dimension}/{i:02d}-{member}.png"
            pixels = np.clip(base + spread * rng.normal(size=(8, 8, 3)), 0, 255).astype(np.uint8)
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(root / name)
            entry = {"file": name, "prompt": f"a <b>{dimension}</b> {i}", "member": member, "dimension": dimension}
            lines.append(json.dumps({**entry, "keyword": f"word {i % 2}"}))
    (root / "manifest.jsonl").write_text("\n".join(lines))
    return root


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A diverse set and a collapsed one."""
    root = tmp_path_factory.mktemp("divgen")
    folders = {"wide": folder_of(root / "wide", 40), "narrow": folder_of(root / "narrow", 4)}
    for folder in folders.values():
        assert main(["divgen", "score", str(folder), *PIXELS, "--device", "cpu"]) == 0
    return folders


def test_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.jsonl"
    assert main(["divgen", "prompts", "--small", "--out", str(path)]) == 0
    assert capsys.readouterr().out == f"320 prompts: {path}\n"
    assert [p.metadata["dimension"] for p in load_prompts(str(path))] == list(np.repeat(DIMENSIONS, 80))


def test_scores_are_written_and_told(scored: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    out = scored["wide"].parent / "elsewhere.json"
    assert main(["divgen", "score", str(scored["wide"]), *PIXELS, "--device", "cpu", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = {line[:16].strip(): line for line in lines if line}
    assert "left out" in told["IDS"] and "divgen reference" in told["ASC"]
    scores = load_scores(out)
    value = scores.values()["diversity"]
    assert f"{value:.4f}" in told["group diversity"] and "120 images" in told["group diversity"]
    assert scores == load_scores(scored["wide"] / FILE)
    assert scores.about["extractors"]["features"] == "pixels" and scores.metrics["diversity"].prompts == 40


def test_the_report_says_who_is_less_diverse(scored: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "pages" / "report.html"
    folders = [f"wide & far={scored['wide']}", str(scored["narrow"])]
    assert main(["divgen", "report", *folders, "--out", str(out)]) == 0
    page = out.read_text()
    verdict = page[page.index('<p class="lead">') :].partition("</p>")[0]
    assert "<b>narrow</b> against wide &amp; far" in verdict and "less diverse</b> in" in verdict
    assert "group diversity" in verdict.partition("less diverse")[2]
    assert "a &lt;b&gt;layout&lt;/b&gt;" in page and "<b>layout</b>" not in page
    assert "http" not in page.replace("http-equiv", "") and "<script" not in page  # no request to anywhere
    assert page.count("data:image/png") > 2 * 4 * 2 * 3  # walls of both sets in every dimension, and what was lost
    for title in ("Scores", "Charts", "By keyword", "ID: images", "prompts on which diversity was lost most"):
        assert f"{title}</h2>" in page
    assert page.count("40 of 40 prompts are more alike") == 1


def test_a_single_set_and_a_set_without_images_have_reports(scored: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "one.html"
    assert main(["divgen", "report", str(scored["wide"]), "--out", str(out)]) == 0
    assert "lost most" not in out.read_text()
    gone = folder_of(tmp_path / "gone", 10)
    assert main(["divgen", "score", str(gone), *PIXELS, "--device", "cpu"]) == 0
    for path in (gone / "images").rglob("*.png"):
        path.unlink()
    assert main(["divgen", "report", str(scored["wide"]), str(gone), "--out", str(out)]) == 0
    assert ": images</h2>" not in out.read_text()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["prompts", "--out", "a.txt"], "--out: name a file that ends in .jsonl"),
        (["prompts", "--world", "playgroud", "--out", "a.jsonl"], 'unknown "playgroud" (nearest: "playground")'),
        (["prompts", "--world", "playground", "--base", "b.txt", "--out", "a.jsonl"], "--base: the playground's"),
        (["prompts", "--base", "nothing.txt", "--out", "a.jsonl"], "no such file"),
        (["score", "nowhere"], 'no folder "nowhere"'),
        (["score", ".", "--dimension", "styles"], 'unknown "styles" (nearest: "style")'),
        (["score", ".", "--style", "cds"], 'unknown extractor "cds"'),
        (["score", ".", "--device", "gpu"], '--device: "gpu" cannot be used'),
        (["reference", "nowhere", "--style", "pixels", "--out", "r.safetensors"], 'no folder "nowhere"'),
        (["reference", "nowhere", "--style", "pixel", "--out", "r.safetensors"], 'unknown extractor "pixel"'),
        (["report", "nowhere", "--out", "r.html"], 'no folder "nowhere"'),
        (["report", "a/x", "c/../a/x", "--out", "r.html"], 'two sets are "x"'),
        (["report", "a", "--out", "r.pdf"], "ends in .html"),
        (["generate", "playgroun", "--out", "x"], "MODEL:"),
        (["generate", "playground", "--out", "x", "--lora", "."], "--lora:"),
        (["generate", "playground", "--out", "x", "--merge", "playground/turb"], "--merge: no LoRA"),
        (["generate", "playground", "--out", "x", "--checkpoint", "."], "--checkpoint:"),
        (["generate", "playground", "--out", "x", "--prompts", "p.txt", "--small"], "leave out --small"),
        (["generate", "playground"], "--out"),
        (["paint"], 'unknown command "divgen paint"'),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DIFFRL_DEBUG", raising=False)
    (tmp_path / "image.png").touch()
    assert main(["divgen", *words]) == 2
    captured = capsys.readouterr().err
    assert text in captured and captured.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["image.png"]


def test_other_extractors_cannot_be_compared(
    scored: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = folder_of(tmp_path / "other", 10, members=1)
    source = "class Mean:\n    name = 'mean'\n    def __init__(self, device): pass\n"
    source += "    def __call__(self, images, prompts):\n        return list(images.mean((2, 3)).numpy())\n"
    (tmp_path / "own.py").write_text(source)
    words = [word.replace("--features=pixels", f"--features={tmp_path}/own.py:Mean") for word in PIXELS]
    assert main(["divgen", "score", str(other), *words, "--device", "cpu"]) == 0
    assert main(["divgen", "report", str(scored["wide"]), str(other), "--out", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text()
    verdict = page[page.index('<p class="lead">') :].partition("</p>")[0]
    assert "features extractor: pixels (wide), mean (other)" in page
    assert "Vendi" not in verdict and "PVS" in verdict


def test_the_lists_that_the_command_line_repeats() -> None:
    """They are repeated so that `--help` does not import torch."""
    from diffrl.divgen import extractors, prompts

    assert (KINDS, DIMENSIONS) == (extractors.KINDS, prompts.DIMENSIONS)


def test_images_are_drawn_without_a_guidance_scale_and_some_of_each_dimension(tmp_path: Path) -> None:
    """As the help and the guide have it."""
    words = ["divgen", "generate", "playground", "--small", "--per-prompt", "2", "--steps", "2", "--limit", "1"]
    assert main([*words, "--out", str(tmp_path / "base")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "base" / "manifest.jsonl").read_text().splitlines()]
    counts = Counter(line["dimension"] for line in lines)
    assert len(counts) > 1 and set(counts.values()) == {2}


@pytest.mark.long
def test_pictures_of_the_hub(tmp_path: Path) -> None:
    """A data set of parquet files and one of a folder, from a hub on this machine: scored and compared by name."""
    folder_of(tmp_path / "set", 40, members=2)
    rows = [json.loads(line) for line in (tmp_path / "set/manifest.jsonl").read_text().split("\n")]
    data = {row["file"]: (tmp_path / "set" / row["file"]).read_bytes() for row in rows}
    columns = {"image": [{"bytes": data[row["file"]], "path": None} for row in rows]}
    columns |= {name: [row[name] for row in rows] for name in ("prompt", "member", "dimension", "keyword")}
    parquet.write_table(pyarrow.table(columns), tmp_path / "one.parquet")
    lines = [json.dumps({"file_name": row.pop("file"), "text": row.pop("prompt"), **row}) for row in rows]
    with serving() as hub:
        hub.files["me/rows"] = {"data/train-0.parquet": (tmp_path / "one.parquet").read_bytes(), "README.md": b"hello"}
        hub.files["me/pictures"] = data | {"metadata.jsonl": "\n".join(lines).encode()}
        more = hub.environment(tmp_path / "home")

        def run(*words: str) -> str:
            command = [sys.executable, "-m", "diffrl", "divgen", *words, *PIXELS, "--device", "cpu"]
            done = subprocess.run(command, env=os.environ | more, cwd=tmp_path, capture_output=True, text=True)
            return done.stdout + done.stderr

        sets = ("hub:me/rows:data/train-*", "hub:me/pictures@main", "here=set")
        said = run("report", *sets, "--out", "page.html", "--json", "page.json")
        found = json.loads((tmp_path / "page.json").read_text())
        assert [one["name"] for one in found["sets"]] == ["rows", "pictures", "here"]
        assert "80 images, 40 prompts by train-0.parquet, 2 each" in found["sets"][0]["about"]["read"]
        assert {row["change"] for row in found["scores"]} == {None, 0.0}
        said = run("score", "hub:me/nothing")
        assert '"hub:me/nothing" is not on this machine' in said and "Traceback" not in said
        assert not [*tmp_path.glob("hub:*")]
