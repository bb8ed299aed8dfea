"""What an image costs, counted: forwards in rows of images, three where there is a gradient."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffrl.league import cost
from diffrl.league.plan import read_league
from diffrl.run.clock import Clock
from diffrl.sweep.jobs import Job


def test_a_forward_counts_its_rows_with_gradient_three_times_and_guidance_twice() -> None:
    weight = torch.ones(1, requires_grad=True)

    def predict(x: torch.Tensor, t: Any, cond: Any, guidance: float = 1.0) -> Any:
        return SimpleNamespace(v=x * weight)

    policy: Any = SimpleNamespace(predict=predict, decode=lambda x: x, backbone=SimpleNamespace(classifier_free=True))
    clock, x = Clock(), torch.zeros(5, 1)
    clock.watch(policy)
    with torch.no_grad():
        policy.predict(x, 0, None)
        policy.predict(x, 0, None, 4.5)
    assert clock.forwards == 5 + 10
    policy.predict(x, 0, None, guidance=1.0)
    assert clock.forwards == 15 + 15


def row(seconds: float) -> dict[str, Any]:
    return {"setup": {"forwards": 0, "seconds": 1.0}, "image": {"forwards": 1, "seconds": seconds}, "mib": 1}


@pytest.mark.parametrize("failing", [(), ("verifier/nft",)])
def test_an_entry_that_joins_later_is_scaled_by_the_tracks_first_ones_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: tuple[str, ...]
) -> None:
    now, begun = {"verifier/nft": 4.0, "verifier/crd": 3.0, "clip/nft": 5.0}, list[str]()

    def run_jobs(jobs: Iterable[Job], *_: Any, **__: Any) -> list[Job]:
        failed = []
        for job in jobs:
            begun.append(job.name)
            if job.name in failing:
                failed.append(job)
                continue
            Path(json.loads(Path(job.command[-1]).read_text())["out"]).write_text(json.dumps(row(now[job.name])))
            job.done()
        return failed

    monkeypatch.setattr(cost, "run_jobs", run_jobs)
    every = read_league().experiments(tmp_path)
    named, file = {one.name: one for one in every}, tmp_path / "league" / "cost.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"entries": {"verifier/nft": row(2.0)}}))  # by a machine that is twice as fast
    failed = cost.measure_all([named["verifier/crd"], named["clip/nft"]], every, tmp_path, "diffrl league cost")
    rows = json.loads(file.read_text())["entries"]
    assert begun == ["verifier/nft", "verifier/crd", "clip/nft"] and failed == len(failing)
    assert rows["verifier/nft"] == row(2.0)
    assert rows["clip/nft"] == row(5.0) | {"scale": 1.0}, "the first of its track"
    scaled = {
        "setup": {"forwards": 0, "seconds": 0.5},
        "image": {"forwards": 1, "seconds": 1.5},
        "mib": 1,
        "scale": 0.5,
    }
    assert rows.get("verifier/crd") == (None if failing else scaled), "never one machine's seconds among another's"
