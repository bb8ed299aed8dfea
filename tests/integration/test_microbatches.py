"""Micro-batches by rows: sizes, group borders, the same update, and a number in the place of auto."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from accelerate import Accelerator
from test_equivalence import same_lora
from tiny import count_forwards

from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.memory import fit
from diffrl.memory.selection import micro_batches
from diffrl.objectives.minibatches import AUTO_ROWS, holds_groups, part_sizes
from diffrl.run.build import loop_settings
from diffrl.run.train import Run


def test_sizes() -> None:
    assert part_sizes(576, 1 / 16) == [36] * 16
    assert part_sizes(10, 0.25) == [3, 3, 2, 2]  # as tensor_split
    assert part_sizes(100, 30) == [25] * 4
    assert part_sizes(7, 100) == [7]
    # 36 rows are no multiple of 8: four groups each, instead of micro-batches that split groups
    assert part_sizes(576, 1 / 16, group=8) == [32] * 18
    assert part_sizes(576, 1 / 16, group=24) == [24] * 24
    assert part_sizes(576, 1 / 16, group=48) == [36] * 16  # one group would be more than what was asked for
    for rows, count, group in ((576, 16, 8), (96, 5, 12), (1000, 7, 8), (60, 60, 4)):
        sizes = part_sizes(rows, 1 / count, group=group)
        assert sum(sizes) == rows and max(sizes) <= -(-rows // count) and max(sizes) - min(sizes) <= group
    assert (holds_groups(48, 8, True), holds_groups(12, 8, True), holds_groups(48, 8, False)) == (8, 1, 1)


def test_crd_runs_the_trained_lora_once_where_micro_batches_can_hold_groups(config_file, monkeypatch) -> None:
    """4 groups of 4, 3 timesteps, 48 rows in 8 parts: 6 rows split groups, 4 hold one."""
    config = load_config(
        config_file("run", objective="crd", optimise={"batch_size": 16, "micro_batch": 0.125}), ["crd.beta=0"]
    )
    loras = []
    for cut in (True, False):
        if not cut:
            monkeypatch.setattr("diffrl.run.loop.holds_groups", lambda *_: 1)
        run = Run(config)
        run.objective.on_policy = False
        seen: Counter = count_forwards(run, monkeypatch)
        run.loop.run_epoch(0)
        trained = {grad: rows for (name, grad), rows in seen.items() if name == "default"}
        assert trained == ({True: 48} if cut else {True: 48, False: 48})
        loras.append(run.policy.state())
    assert same_lora(*loras)
    assert set(micro_batches(config, run.objective)) == {4}
    run.objective.whole_groups = False
    assert set(micro_batches(config, run.objective)) == {6}


def test_rows_give_the_update_that_counts_give(config_file) -> None:
    loras = []
    for overrides in ([], ["optimise.micro_batch=5"]):
        run = Run(load_config(config_file("run"), overrides))
        run.loop.run_epoch(0)
        loras.append(run.policy.state())
    assert same_lora(*loras)


def test_auto_becomes_a_number_that_fits(config_file, monkeypatch: pytest.MonkeyPatch) -> None:
    path = config_file("run")
    config = load_config(path, ["optimise.micro_batch=auto", "optimise.batch_size=16", "rollout.steps=8"])
    cpu, accelerator = torch.device("cpu"), Accelerator()
    peaks = []
    estimate = fit.estimate
    monkeypatch.setattr(fit, "estimate", lambda *args: (peaks.append(estimate(*args)), peaks[-1])[1])
    assert fit.auto_micro_batch(config, cpu, accelerator).optimise.micro_batch == AUTO_ROWS
    whole = next(size for name, size in peaks[0].peaks.items() if name == f"training {AUTO_ROWS} rows")
    monkeypatch.setattr(fit, "free_bytes", lambda device: whole // 2)
    settled = fit.auto_micro_batch(config, cpu, accelerator)
    rows = settled.optimise.micro_batch
    assert isinstance(rows, int) and AUTO_ROWS // 4 < rows < AUTO_ROWS // 2
    assert settled.resolved()["optimise"]["micro_batch"] == rows == loop_settings(settled).micro_batch
    for wrong in ("0", "much"):
        with pytest.raises(UserError, match=r"optimise\.micro_batch"):
            load_config(path, [f"optimise.micro_batch={wrong}"])
