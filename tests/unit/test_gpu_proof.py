"""`scripts/gpu_proof.py` without a GPU: the same code at tiny size, and its bookkeeping."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_proof  # noqa: E402
import training  # noqa: E402
from journal import Journal, Part, TimeUp, run_parts  # noqa: E402

from diffrl.errors import UserError  # noqa: E402


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two parts at tiny size."""
    path = tmp_path_factory.mktemp("proof") / "proof.json"
    words = ["--out", str(path), "--tiny", "--minutes", "5", "--only", "environment", "train/sd35/marble-5"]
    assert gpu_proof.prove(words) == 0
    return path


def test_a_tiny_proof_measures_and_is_not_repeated(proof: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(proof.read_text())
    assert found["tiny"] is True and found["machine"]["cores"] and found["versions"]["torch"] == torch.__version__
    assert set(found["parts"]) == {"environment", "train/sd35/marble-5"}
    part = found["parts"]["train/sd35/marble-5"]
    assert part["status"] == "done" and part["images_per_second_rollout"] > 0 and part["rows_per_second_optimise"] > 0
    assert 0 < part["share_of_bare_loop"] < 1.5 and part["counted_gib"] > 0
    before = proof.read_text()
    assert gpu_proof.prove(["--out", str(proof), "--tiny", "--only", "train/sd35/marble-5"]) == 0
    assert json.loads(proof.read_text())["parts"] == json.loads(before)["parts"]
    shown = capsys.readouterr().out
    assert "..." not in shown.replace("marble-5", "")  # nothing ran
    assert "train/sd35/marble-5" in shown


def test_what_cannot_work_is_said_in_one_line(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "proof.json")]
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA device here; --tiny runs the same code"):
            gpu_proof.prove(out)
    with pytest.raises(UserError, match=r'--only: no part "train/sd35/nf".*train/sd35/nft'):
        gpu_proof.prove([*out, "--tiny", "--only", "train/sd35/nf"])
    with pytest.raises(UserError, match="--out: give the JSON file"):
        gpu_proof.prove(["--tiny"])
    (tmp_path / "proof.json").write_text("[]")
    with pytest.raises(UserError, match="not a file that this command wrote"):
        gpu_proof.prove([*out, "--tiny", "--only", "environment"])


def test_counts_travel_and_those_of_another_version_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "counts.json"
    only = ["--tiny", "--only", "train/sd35/nft"]
    assert gpu_proof.prove(["--count", str(path), *only]) == 0
    assert "train/sd35/nft: 0.5 GiB" in capsys.readouterr().out
    monkeypatch.setattr("estimates.estimate", None)
    reading = ["--out", str(tmp_path / "proof.json"), "--estimates", str(path)]
    assert gpu_proof.prove([*reading, *only]) == 0
    with pytest.raises(UserError, match=r"counted with size tiny, here it is true: --count it again"):
        gpu_proof.prove(["--count", str(path)])
    found = json.loads(path.read_text())
    for broken, match in (
        (found | {"facts": {}}, "counted with diffrl None"),
        ({"facts": 1}, "not a file that --count"),
    ):
        path.write_text(json.dumps(broken))
        with pytest.raises(UserError, match=match):
            gpu_proof.prove([*reading, *only])


def test_a_first_call_has_time_for_what_is_worth_most() -> None:
    parts = gpu_proof.all_parts(None)
    names = [part.name for part in parts]
    first = parts[: names.index("train/flux/nft") + 1]
    assert sum(part.seconds for part in first) < 8 * 60 - 5
    assert all(part.seconds < 8 * 60 - 5 for part in parts) and len(set(names)) == len(names)
    assert {"suite", "resume", "train/sd35/marble-5"} <= {part.name for part in first}


def test_quantised_bases_are_those_of_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    class Field:
        annotation, default = Literal["full", "int8", "nf4"] | None, "full"

    monkeypatch.setattr(training.Engine, "model_fields", {"base": Field})
    assert training.quantised() == ["int8", "nf4"]
    assert "option/base-nf4" in training._cases()
    monkeypatch.setattr(training.Engine, "model_fields", {})
    assert training.quantised() == []


def journal(path: Path, digest: str = "a") -> Journal:
    return Journal(path / "journal.json", {}, digest)


def test_parts_are_resumed_repeated_for_other_code_and_skipped_with_a_reason(tmp_path: Path) -> None:
    ran: list[str] = []

    def part(name: str, seconds: float = 0.0, error: BaseException | None = None) -> Part:
        def run(limit: float) -> dict[str, Any]:
            ran.append(name)
            if error is not None:
                raise error
            return {"figure": 1.5}

        return Part(name, run, seconds)

    parts = [
        part("fails", error=RuntimeError("broken")),
        part("refuses", error=UserError("not here")),
        part("works"),
        part("long", seconds=100.0),
    ]
    run_parts(parts, journal(tmp_path), 20.0, lambda text: None)
    found = json.loads((tmp_path / "journal.json").read_text())["parts"]
    assert ran == ["fails", "refuses", "works"]
    assert [found[p.name]["status"] for p in parts] == ["failed", "refused", "done", "skipped"]
    assert "RuntimeError: broken" in found["fails"]["reason"] and "it takes about 100 s" in found["long"]["reason"]
    assert found["works"]["figure"] == 1.5
    ran.clear()
    run_parts(parts, journal(tmp_path), 200.0, lambda text: None)  # what failed comes after what never ran
    assert ran == ["long", "fails"]
    ran.clear()
    run_parts(parts[2:3], journal(tmp_path, digest="b"), 20.0, lambda text: None)
    assert ran == ["works"]


def test_a_part_is_broken_off_in_time_and_a_dead_process_leaves_the_others_figures(tmp_path: Path) -> None:
    def hangs(limit: float) -> dict[str, Any]:
        try:
            time.sleep(30)
        except Exception:
            raise AssertionError("time is up is nobody's failure") from None
        return {}

    mark = time.monotonic()
    run_parts([Part("hangs", hangs, 0.0)], journal(tmp_path), 6.0, lambda text: None)
    assert time.monotonic() - mark < 5
    assert json.loads((tmp_path / "journal.json").read_text())["parts"]["hangs"]["status"] == "skipped"

    def dies(limit: float) -> dict[str, Any]:
        raise KeyboardInterrupt

    first = Part("works", lambda limit: {"figure": 2}, 0.0)
    with pytest.raises(KeyboardInterrupt):
        run_parts([first, Part("dies", dies, 0.0)], journal(tmp_path), 20.0, lambda text: None)
    found = json.loads((tmp_path / "journal.json").read_text())["parts"]
    assert found["works"]["figure"] == 2 and found["dies"]["status"] == "running"
    assert issubclass(TimeUp, BaseException) and not issubclass(TimeUp, Exception)
