"""Checkpoints: exact, verified, and complete or absent whenever the process dies."""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import in_child

from diffrl.records import checkpoint, saving
from diffrl.records.checkpoint import latest, load
from diffrl.records.saving import CheckpointError, save


def write(run_dir: Path, step: int, keep: int = 2) -> Path:
    return save(run_dir, step, {"lora": {"a": torch.full((3,), float(step))}}, {"epoch": step}, keep)


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_everything_comes_back_bit_by_bit(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    tensors = {
        "lora": {
            "half": torch.randn(3).to(torch.bfloat16),
            "view": base[:, ::2],
            "base": base,
            "scalar": torch.ones(()),
        },
        "ema": {"nan": torch.tensor([float("nan"), -0.0])},
        "empty": {},
    }
    state = {"pi": 0.1 + 0.2, "inf": float("inf"), "names": ["a", None], "step": 7}
    path = save(tmp_path, 7, tensors, state, keep=1)
    assert path == tmp_path / "checkpoints" / "step-000007"
    assert names(tmp_path) == ["step-000007"]
    loaded, loaded_state = load(path)
    assert loaded_state == state
    assert loaded.keys() == tensors.keys()
    for name, group in tensors.items():
        assert loaded[name].keys() == group.keys()
        for key, value in group.items():
            assert loaded[name][key].dtype == value.dtype
            assert loaded[name][key].shape == value.shape
            bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (loaded[name][key], value)]
            assert torch.equal(*bits)
    manifest = json.loads((path / "manifest.json").read_text())
    assert set(manifest["files"]) == {"lora.safetensors", "ema.safetensors", "empty.safetensors", "state.json"}
    assert manifest["files"]["state.json"]["size"] == (path / "state.json").stat().st_size


def test_keeps_the_newest_and_replaces_the_same_step(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-000002", "step-000003"]
    save(tmp_path, 3, {"lora": {"a": torch.zeros(1)}}, {"again": True}, keep=2)
    assert names(tmp_path) == ["step-000002", "step-000003"]
    tensors, state = load(tmp_path / "checkpoints" / "step-000003")
    assert state == {"again": True} and tensors["lora"]["a"].tolist() == [0.0]
    with pytest.raises(ValueError, match="keep must be at least 1"):
        write(tmp_path, 4, keep=0)


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "no manifest", "bad manifest"])
def test_damage_is_named_and_passed_over(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 1)
    newest = write(tmp_path, 2)
    file = newest / "lora.safetensors"
    if damage == "flip":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "missing":
        file.unlink()
    else:
        file = newest / "manifest.json"
        file.unlink() if damage == "no manifest" else file.write_text("{")
    with pytest.raises(CheckpointError, match=str(file)):
        load(newest)
    assert latest(tmp_path) == tmp_path / "checkpoints" / "step-000001"
    assert f"damaged checkpoint passed over: {file}" in caplog.text


def test_pruning_never_removes_what_was_just_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a damaged step 9 the run goes on from step 3: saving step 4 with keep=1 must leave step 4."""
    write(tmp_path, 3)
    (write(tmp_path, 9) / "state.json").write_text("?")
    write(tmp_path, 4, keep=1)
    assert latest(tmp_path) == tmp_path / "checkpoints" / "step-000004"
    assert "step-000009" in caplog.text
    assert names(tmp_path) == ["step-000004", "step-000009"]


def test_nothing_there(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        load(tmp_path / "checkpoints" / "step-000001")


def deadly(function: Callable[..., Any], when: int, calls: Iterator[int]) -> Callable[..., Any]:
    """The function; this process is killed before or after it, at number `when` of these places."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == when:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if next(calls) == when:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return wrapped


def killed_everywhere(run: Path, second: int, keep: int) -> None:
    """In a child: the second of two checkpoints is written until a process survives its writing."""
    warnings.simplefilter("error")
    # A killed process loses nothing that it wrote; only the place of the call counts.
    os.fsync = lambda handle: None

    def write_value(folder: Path, step: int, value: float) -> None:
        save(folder, step, {"lora": {"a": torch.full((3,), value)}}, {"value": value}, keep)

    when, survived, seen = 0, False, set()
    while not survived:
        when += 1
        folder = run / f"{when:03d}"
        write_value(folder, 5, 1.0)
        child = os.fork()
        if child == 0:
            calls = itertools.count(1)
            for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
                setattr(os, name, deadly(getattr(os, name), when, calls))
            write_value(folder, second, 2.0)
            os._exit(0)
        survived = os.waitpid(child, 0)[1] == 0
        tensors, state = load(latest(folder))
        value = state["value"]
        assert tensors["lora"]["a"].tolist() == [value] * 3, (when, value)
        assert value == 2.0 or not survived
        seen.add(value)
        visible = [name for name in names(folder) if not name.startswith(".tmp-")]
        assert all((folder / "checkpoints" / name / "manifest.json").exists() for name in visible)
        write_value(folder, second + 1, 3.0)
        assert not any(name.startswith(".tmp-") for name in names(folder)), names(folder)
        assert load(latest(folder))[1]["value"] == 3.0
    assert seen == {1.0, 2.0}
    assert when > 12  # at least a dozen places were tried


@pytest.mark.parametrize(("second", "keep"), [(6, 1), (5, 2)], ids=["next step", "same step again"])
def test_killed_at_every_system_call(tmp_path: Path, second: int, keep: int) -> None:
    """SIGKILL before and after each fsync, rename and removal: a complete checkpoint is always found."""
    assert in_child(killed_everywhere, tmp_path, second, keep) == 0


def written_to_the_limit(run: Path) -> None:
    """In a child: a second checkpoint is larger than the system lets a file be; the refusal is in `said.txt`."""
    save(run, 1, {"lora": {"a": torch.ones(3)}}, {}, keep=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        save(run, 2, {"lora": {"a": torch.ones(100_000)}}, {}, keep=1)
    except CheckpointError as error:
        (run / "said.txt").write_text(str(error))


def test_a_failing_write_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    assert in_child(written_to_the_limit, tmp_path) == 0
    said = (tmp_path / "said.txt").read_text()
    assert str(tmp_path / "checkpoints" / "step-000002") in said
    assert "File too large" in said and "MB free" in said and "--resume" in said
    assert names(tmp_path) == ["step-000001"]
    assert latest(tmp_path) == tmp_path / "checkpoints" / "step-000001"


def test_full_disk_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving.os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"step-000002: .*No space left on device \([\d,.]+ MB free\)"):
        write(tmp_path, 2)
    assert names(tmp_path) == ["step-000001"]


def test_state_that_is_no_json_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        save(tmp_path, 1, {}, {"bad": object()}, keep=1)
    assert not (tmp_path / "checkpoints").exists()


def adamw(seed: int) -> tuple[list[torch.nn.Parameter], torch.optim.AdamW]:
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 3), (3,))]
    groups = [{"params": weights[:1], "lr": 1 / 3e3}, {"params": weights[1:], "weight_decay": 0.1}]
    return weights, torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.997))


def take_steps(weights: list[torch.nn.Parameter], optimiser: torch.optim.AdamW, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimiser.step()


def test_adamw_continues_bit_identically(tmp_path: Path) -> None:
    weights, optimiser = adamw(0)
    take_steps(weights, optimiser, range(5))
    tensors, state = saving.optimiser_to_tensors(optimiser)
    assert {"0.exp_avg", "0.exp_avg_sq", "0.step", "1.exp_avg"} <= set(tensors)
    saved = {str(i): weight for i, weight in enumerate(weights)}
    path = save(tmp_path, 5, {"lora": saved, "optimiser": tensors}, {"optimiser": state}, keep=1)
    take_steps(weights, optimiser, range(5, 9))

    fresh, resumed = adamw(1)
    loaded, loaded_state = load(path)
    with torch.no_grad():
        for i, weight in enumerate(fresh):
            weight.copy_(loaded["lora"][str(i)])
    checkpoint.optimiser_from_tensors(resumed, loaded["optimiser"], loaded_state["optimiser"])
    assert resumed.param_groups[0]["lr"] == 1 / 3e3
    assert resumed.param_groups[1]["betas"] == (0.9, 0.997)
    take_steps(fresh, resumed, range(5, 9))
    for a, b in zip(weights, fresh, strict=True):
        assert torch.equal(a, b)
    for key, value in saving.optimiser_to_tensors(optimiser)[0].items():
        assert torch.equal(value, saving.optimiser_to_tensors(resumed)[0][key]), key
    assert loaded["optimiser"]["0.step"].item() == 5.0  # what was loaded is not changed by the steps taken since


def test_optimiser_of_another_model_is_refused() -> None:
    weights, optimiser = adamw(0)
    take_steps(weights, optimiser, range(1))
    tensors, state = saving.optimiser_to_tensors(optimiser)
    other = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(5, 4)), torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(CheckpointError, match=r"parameter 0: \[5, 3\] and \[5, 4\]"):
        checkpoint.optimiser_from_tensors(other, tensors, state)


def test_random_generators_continue(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [*torch.rand(3).tolist(), *np.random.rand(3), np.random.randn(), random.random(), random.gauss(0, 1)]

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    draw()  # an odd number of normals: numpy and python each hold a second one back
    tensors, state = saving.rng_state()
    path = save(tmp_path, 1, {"rng-0": tensors}, {"rng-0": state}, keep=1)
    expected = draw()
    loaded, loaded_state = load(path)
    checkpoint.set_rng_state(loaded["rng-0"], loaded_state["rng-0"])
    assert draw() == expected
