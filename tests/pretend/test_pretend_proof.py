"""The kinds of parts of `scripts/gpu_proof.py` on the pretend device, at tiny size, with counts made beforehand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import gpu_proof

# One of each kind. Not: the suite, whose tests run beside this one, and compiled blocks: torch asks for CUDA's driver.
COUNTED = ["train/sd35/nft", "option/fp16"]
NAMES = ["environment", *COUNTED, "train/sd35/marble-5", "resume", "train/flux-1024/nft", "profile/sd35"]
NAMES += ["recipe/sd35/nft_ocr", "recipe/sd35/nft_ocr+no-tf32", "trial/memory/sd35"]
NAMES += ["train/qwen/d2align", "option/micro-batches-by-memory", "option/checkpointing"]


def test_a_part_of_each_kind_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, out = tmp_path / "counts.json", tmp_path / "proof.json"
    assert gpu_proof.prove(["--count", str(counts), "--tiny", "--only", *COUNTED]) == 0
    words = ["--out", str(out), "--estimates", str(counts), "--tiny", "--minutes", "30", "--only"]
    with monkeypatch.context() as patched:
        patched.setattr("estimates.estimate", None)  # what is counted is not counted again
        assert gpu_proof.prove([*words, *COUNTED]) == 0
    # Not nf4: without CUDA's driver bitsandbytes ends the whole process from its C code.
    bases = [name for name in gpu_proof.CASES if name.startswith("option/base-") and name != "option/base-nf4"]
    assert gpu_proof.prove([*words, *NAMES, *bases]) == 0  # what the call before has done is kept
    parts = json.loads(out.read_text())["parts"]
    assert all(parts.pop(name)["status"] in ("done", "refused") for name in bases)  # their kernels may need a true card
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(NAMES, "done")
    assert parts["resume"]["resumed_equal"] and parts["resume"]["numbers"] > 1000
    for name, part in parts.items():
        if name in gpu_proof.CASES:
            assert part["peak_gib"] > 0 and part["rows_per_second_optimise"] > 0 and part["spread"] >= 1
        if name.startswith("option/"):
            assert part["relative"].keys() >= {"images_per_second_rollout", "peak_gib"}
        if name.startswith("profile/"):
            assert len(part["table"]) == 25 and all(row["calls"] > 0 for row in part["table"])
