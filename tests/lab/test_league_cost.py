"""What an image costs, counted: forwards in rows of images, three where there is a gradient."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffrl.run.clock import Clock
from diffrl.sweep.jobs import Job
from experiments.league import cost
from experiments.league.plan import read_league


def test_a_forward_counts_its_rows_with_gradient_three_times_and_guidance_twice() -> None:
    weight = torch.ones(1, requires_grad=True)

    def predict(x: torch.Tensor, t: Any, cond: Any, guidance: float = 1.0) -> Any:
        return SimpleNamespace(v=x * weight)

    policy: Any = SimpleNamespace(predict=predict, decode=lambda x: x, backbone=SimpleNamespace(classifier_free=True))
    policy.device = torch.device("cpu")
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


def test_only_what_has_no_cost_is_measured_and_a_failure_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[str]()

    def run_jobs(jobs: Iterable[Job], *_: Any, **__: Any) -> list[Job]:
        failed = []
        for job in jobs:
            begun.append(job.name)
            if job.name == "verifier/grpo":
                failed.append(job)
                continue
            Path(json.loads(Path(job.command[-1]).read_text())["out"]).write_text(json.dumps(row(3.0)))
            job.done()
        return failed

    monkeypatch.setattr(cost, "run_jobs", run_jobs)
    named = {one.name: one for one in read_league().experiments(tmp_path)}
    file = tmp_path / "league" / "cost.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"entries": {"verifier/nft": row(2.0)}}))
    chosen = [named[f"verifier/{name}"] for name in ("nft", "grpo", "crd")]
    assert cost.measure_all(chosen, tmp_path, "command") == 1
    assert begun == ["verifier/grpo", "verifier/crd"]
    assert json.loads(file.read_text())["entries"] == {"verifier/nft": row(2.0), "verifier/crd": row(3.0)}
