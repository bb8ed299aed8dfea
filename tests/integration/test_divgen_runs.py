"""DivGenBench on models: images drawn once, by any number of processes, and the small version in a training."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import collapse
import pytest
import torch
from divgen_parts import as_written, load_extractors
from PIL import Image

from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.divgen import run as divgen_run
from diffrl.divgen.extractors import NONE
from diffrl.divgen.folders import read_folder
from diffrl.divgen.observe import Item, observe
from diffrl.divgen.prompts import DIMENSIONS, benchmark, small
from diffrl.divgen.run import Job, generate_images
from diffrl.divgen.score import score
from diffrl.divgen.scoring import score_folder
from diffrl.drawing import Drawing
from diffrl.errors import UserError
from diffrl.prompts import Prompt
from diffrl.rollout import generate
from diffrl.run.train import train

PROMPTS = [
    Prompt(f"red {word}", {"dimension": d, "keyword": word}) for d in DIMENSIONS for word in (f"a {d}", f"b {d}")
]
NAMES = {"identity": NONE, "style": NONE, "layout": NONE, "features": "pixels", "lpips": NONE}


@pytest.fixture
def job(tiny_model: Path) -> Job:
    return Job(Drawing(str(tiny_model), per_prompt=2, steps=2, batch_size=3))


def pictures(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.png"))}


def test_an_interrupted_call_goes_on(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert generate_images(job, PROMPTS, whole) == 16
    write, written = divgen_run._write, []

    def failing(*arguments: Any) -> None:
        if len(written) == 7:
            raise KeyboardInterrupt
        written.append(arguments)
        write(*arguments)

    monkeypatch.setattr(divgen_run, "_write", failing)
    with pytest.raises(KeyboardInterrupt):
        generate_images(job, PROMPTS, broken)
    assert len(pictures(broken)) == 7
    missing = score_folder(broken, NAMES)
    assert len(missing.unreadable) == 9 and missing.dimensions["tonal"]["unreadable"] == 4  # told, not passed over
    monkeypatch.setattr(divgen_run, "_write", write)
    assert generate_images(job, PROMPTS, broken) == 10  # three prompts are complete; the fourth is drawn again
    assert pictures(broken).keys() == pictures(whole).keys()
    for name in pictures(whole):
        pixels = [torch.tensor(list(Image.open(folder / name).tobytes())) for folder in (whole, broken)]
        assert (pixels[0] - pixels[1]).abs().max() <= 1  # another place in a batch rounds otherwise
    assert generate_images(job, PROMPTS, whole) == 0


def test_images_tell_what_they_show(job: Job, tmp_path: Path) -> None:
    generate_images(job, PROMPTS[:2], tmp_path)
    with Image.open(tmp_path / "images" / "id" / "00001-01.png") as image:
        text = dict(image.info)
    assert text == {"prompt": "red b id", "seed": "0", "member": "1", "dimension": "id", "keyword": "b id"}
    items = read_folder(tmp_path).items
    assert [(item.prompt, item.member) for item in items] == [(p, m) for p in PROMPTS[:2] for m in (0, 1)]


def test_another_job_does_not_continue_a_folder(job: Job, tmp_path: Path) -> None:
    generate_images(job, PROMPTS[:1], tmp_path)
    other = Job(replace(job.drawing, seed=3, batch_size=1))
    with pytest.raises(UserError, match="holds images of another job"):
        generate_images(other, PROMPTS[:1], tmp_path)
    with pytest.raises(UserError, match="prompts"):
        generate_images(job, PROMPTS[:2], tmp_path)


def test_two_processes_draw_the_images_of_one(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads play the processes: every one meets the other where a process would."""
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    generate_images(job, PROMPTS, alone)
    barrier, rank, drawn = threading.Barrier(2, timeout=60), threading.local(), {}

    class Process:
        num_processes = 2
        device = torch.device("cpu")

        def __init__(self) -> None:
            self.process_index = rank.number
            self.is_main_process = rank.number == 0

        def wait_for_everyone(self) -> None:
            barrier.wait()

    policies = [job.policy() for _ in range(2)]
    monkeypatch.setattr(divgen_run, "join_processes", Process)
    monkeypatch.setattr(Job, "policy", lambda self: policies[rank.number])

    def work(number: int) -> None:
        rank.number = number
        drawn[number] = generate_images(job, PROMPTS, shared)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drawn == {0: 16, 1: 16}  # the job's images; each drew its half
    assert pictures(shared).keys() == pictures(alone).keys()


def test_scores_of_a_folder_equal_those_of_the_model(job: Job, tmp_path: Path) -> None:
    generate_images(job, PROMPTS, tmp_path)
    policy = job.policy()
    extractors, missing = load_extractors(NAMES)
    drawn = generate(policy, PROMPTS, job.drawing.spec(policy), **job.drawing.amount())
    batches = [([Item(PROMPTS[i // 2], i % 2) for i in n.tolist()], as_written(images)) for n, images in drawn]
    direct = score(observe(batches, extractors), None, missing)
    assert score_folder(tmp_path, NAMES).values() == direct.values()
    assert direct.values().keys() >= {"pvs", "diversity", "vendi"}


@pytest.mark.long
def test_a_checkpoint_of_a_run_can_be_measured(config_file: Callable[..., Path], tmp_path: Path) -> None:
    config = load_config(config_file(epochs=1))
    train(config)
    checkpoint = next((Path(config.run_dir) / "checkpoints").glob("step-*"))
    drawing = Drawing(config.model, per_prompt=1, steps=2)
    generate_images(Job(drawing, checkpoint=str(checkpoint)), PROMPTS[:3], tmp_path / "checkpoint")
    lora = replace(drawing, lora=str(Path(config.run_dir) / "lora"))
    generate_images(Job(lora), PROMPTS[:3], tmp_path / "lora")
    assert pictures(tmp_path / "checkpoint") == pictures(tmp_path / "lora")
    generate_images(Job(drawing), PROMPTS[:3], tmp_path / "base")
    assert pictures(tmp_path / "base") != pictures(tmp_path / "lora")
    record = json.loads((tmp_path / "checkpoint" / "job.json").read_text())
    assert record["checkpoint"] == str(checkpoint) and record["weights"]
    merged = replace(drawing, merge=lora.lora)  # into the model, to which the checkpoint's is then added
    generate_images(Job(merged, checkpoint=str(checkpoint)), PROMPTS[:3], tmp_path / "merged")
    assert pictures(tmp_path / "merged") != pictures(tmp_path / "checkpoint")
    with pytest.raises(UserError, match=r"another job \(merge None there"):
        generate_images(Job(merged, checkpoint=str(checkpoint)), PROMPTS[:3], tmp_path / "checkpoint")
    with pytest.raises(UserError, match="nothing"):
        Job(replace(drawing, family="nothing.py:Family"), checkpoint=str(checkpoint)).policy()


@pytest.mark.long
def test_every_kind_of_collapse_lowers_its_own_metric() -> None:
    """True renderings that lose one kind of variety, half of them and all: see tests/collapse.py."""
    items = collapse.pictured(48)
    extractors, _ = load_extractors({"identity": "playground", "layout": "playground"})

    def measured(kind: str, share: float) -> dict[str, float]:
        return score(observe(collapse.batches(items, kind, share), extractors)).values()

    base = measured("none", 0.0)
    for kind, name in (("identity", "ids"), ("layout", "sdi"), ("tone", "pvs")):
        half, full = measured(kind, 0.5), measured(kind, 1.0)
        falls = [-values[name] if name == "ids" else values[name] for values in (base, half, full)]
        assert falls[0] > falls[1] > falls[2], (kind, falls)
        for other in {"ids", "sdi", "pvs"} - {name}:
            assert full[other] == pytest.approx(base[other], rel=0.15), (kind, other)
    assert measured("image", 1.0) == {"ids": pytest.approx(1.0), "sdi": pytest.approx(0.0), "pvs": pytest.approx(0.0)}


@pytest.mark.long
def test_a_runs_report_and_the_command_give_the_same_numbers(config_file: Callable[..., Path], tmp_path: Path) -> None:
    """Of a model's pictures as they are drawn, of the run's report, and of the same files in a folder of anybody's."""
    config = load_config(config_file(epochs=1))
    train(config)
    run = Path(config.run_dir)
    words = ["report", str(run), "--divgen", "--limit", "3", "--per-prompt", "2"]
    assert main(words) == 0
    own = json.loads((run / "divgen" / "report.json").read_text())["scores"]
    sets = dict.fromkeys(row["set"] for row in own)
    assert list(sets) == ["base", "epoch-00001"]
    for name in sets:
        shutil.copytree(run / "divgen" / name / "images", tmp_path / name)
    folders = [str(tmp_path / name) for name in sets]
    files = ["--out", str(tmp_path / "r.html"), "--json", str(tmp_path / "r.json")]
    assert main(["divgen", "report", *folders, *files, "--device", "cpu"]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["scores"] == own
    values = {row["score"]: row["value"] for row in own if row["set"] == "epoch-00001" and row["value"] is not None}
    assert values.keys() >= {"pvs", "diversity", "vendi"}
    drawing = Drawing(config.model, lora=str(run / "lora"), like=str(run), per_prompt=2, seed=config.seed)
    policy, prompts = drawing.policy(), small(benchmark(), 3)
    drawn = generate(policy, prompts, drawing.spec(policy), **drawing.amount())
    batches = [([Item(prompts[i // 2], i % 2) for i in n.tolist()], as_written(images)) for n, images in drawn]
    direct = score(observe(batches, load_extractors(NAMES)[0]), None).values()
    assert {name: value for name, value in values.items() if name != "lpips"} == direct
    page = (run / "report.html").read_text()
    assert "DivGenBench</h2>" in page and "Vendi score" in page and 'href="divgen/report.html"' in page
    drawn_at = {path: path.stat().st_mtime_ns for path in (run / "divgen").rglob("*.png")}
    assert main(words) == 0 and (run / "report.html").read_text() == page
    assert drawn_at == {path: path.stat().st_mtime_ns for path in (run / "divgen").rglob("*.png")}
