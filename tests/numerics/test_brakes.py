"""The page on what objectives have in common on policy: its figures are those of the shipped classes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from experiments.figures import brakes, tables


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("label", ["DiffusionNFT", "CRD", "AWM, ghuber", "DGPO", "Flow-DPPO", "GRPO-Guard"])
def test_the_page_has_what_the_shipped_class_does(label: str) -> None:
    kept = json.loads((tables.RESULTS / "brakes.json").read_text(encoding="utf-8"))["objectives"][label]
    found = brakes.measured(label)
    assert found["error"] < 1e-9  # awm's powers have 1e-10 added to e
    assert {name: value for name, value in kept.items() if name not in ("error", "norm", "step")} == {
        name: value for name, value in found.items() if name not in ("error", "norm")
    }
    assert kept["norm"] == pytest.approx(found["norm"], rel=1e-6)


def test_a_wrong_formula_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    *rest, _, brake = brakes.OBJECTIVES["AWM, huber"]
    monkeypatch.setitem(brakes.OBJECTIVES, "AWM, huber", (*rest, lambda r: r.t / 5 / r.e**0.5, brake))
    assert brakes.measured("AWM, huber")["error"] == pytest.approx(0.5)
