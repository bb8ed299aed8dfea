"""What `diffrl doctor` counts against the most that a run takes on the pretend device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_runs import METHODS, config_of
from test_pretend_methods import started
from tiny import tiny_flux, tiny_sd

from diffrl.config import load_config
from diffrl.memory.fit import JUDGING, estimate


@pytest.mark.parametrize("method", [name for name in METHODS if name != "acflow"])  # its critic outweighs the network
def test_what_is_counted_is_what_is_taken(config_file: Any, method: str) -> None:
    """As a share of the peak, in an epoch whose steps are the second and later ones: the reference has moved."""
    gc.collect()  # of the tests before
    before = torch.cuda.memory_allocated()
    config = config_of(config_file, method)
    run = started(config)
    run.loop.run_epoch(0)
    torch.cuda.reset_peak_memory_stats()
    run.loop.run_epoch(1)
    peak = torch.cuda.max_memory_allocated() - before
    fit = estimate(config)
    counted = sum(fit.parts.values()) + max(fit.peaks.values())
    assert counted / peak == pytest.approx(1.0, abs=0.05)
    run.close()


@pytest.mark.parametrize("make", [tiny_flux, tiny_sd])
def test_what_is_counted_for_larger_evaluations_is_what_they_take(
    config_file: Any, tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    """`evaluate.resolution`: as a share of the peak of an evaluation, whose images are of four times as many pixels."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    path = config_file(model=str(make(tmp_path / "model")), rollout={"resolution": 16}, evaluate={"resolution": 32})
    config = load_config(path)
    run = started(config)
    run.loop.run_epoch(0)
    torch.cuda.reset_peak_memory_stats()
    run.evaluation.scores()
    peak = torch.cuda.max_memory_allocated() - before
    fit = estimate(config)
    counted = sum(fit.parts.values()) + max(size for name, size in fit.peaks.items() if name.startswith(JUDGING))
    assert counted / peak == pytest.approx(1.0, abs=0.1)
    run.close()
