"""Every second of a run is somebody's: an epoch's parts are its wall time, and the first image has its own line."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from covering import some

from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.records.progress import BETWEEN, PARTS, wall
from diffrl.records.tracking import Tracker, read_metrics
from diffrl.run import clock as clocks
from diffrl.run.clock import Clock, close_line, split_epoch

SLOW = """
import time

class Slow:
    name = "slow"

    def __call__(self, images, prompts, metadata):
        time.sleep(0.15)
        return images[:, 0].mean((1, 2))
"""


@pytest.mark.parametrize("objective", some(["nft", "grpo"], "nft"))
def test_an_epochs_parts_are_its_wall_time(
    config_file: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    objective: str,
) -> None:
    """Within 2 %, by a watch of the test's own; with evaluations, checkpoints and a reward that is waited for."""
    (tmp_path / "slow.py").write_text(SLOW)
    rollout = {"groups": 6, "group_size": 8, "steps": 8, "batch_size": 24}
    rollout |= {"sampler": "flow_sde"} if objective == "grpo" else {}
    path = config_file(
        objective=objective,
        rollout=rollout,
        rewards={"redness": {"plugin": f"{tmp_path / 'slow.py'}:Slow"}},
        optimise={"batch_size": 24, "micro_batch": 24, "inner_epochs": 2},
        evaluate={"every": 1, "prompts": 4, "per_prompt": 4},
        checkpoint={"every": 1},
    )
    times: list[float] = []
    log = Tracker.log

    def timed(tracker: Tracker, metrics: Any) -> Any:
        times.append(time.perf_counter())
        return log(tracker, metrics)

    monkeypatch.setattr(Tracker, "log", timed)
    assert main(["train", str(path)]) == 0
    lines = read_metrics(load_config(path).run_dir)
    assert len(lines) == len(times) == 4
    for line, before, after in zip(lines[1:], times[:-1], times[1:], strict=True):
        spent = {part: line[f"seconds/{part}"] for part in (*PARTS, *BETWEEN)}
        assert sum(spent.values()) == pytest.approx(after - before, rel=0.02), (spent, after - before)
        assert line["seconds/wall"] == pytest.approx(after - before, rel=0.02)
        assert sum(spent.values()) + line["seconds/other"] == pytest.approx(line["seconds/wall"], abs=0.002)
        assert all(spent[part] > 0 for part in ("rollout", "decode", "advantages", "optimise", "evaluate"))
        assert spent["reward"] > 0.1 and spent["wait"] == 0 and (spent["checkpoint"] > 0.001) == (line is not lines[1])
    said = next(text for text in capsys.readouterr().out.splitlines() if "first image after" in text)
    first = lines[0]["seconds/first_image"]
    assert f"first image after {first:.1f} s: " in said and "to load" in said and "to draw" in said
    assert [line for line in lines if "seconds/first_image" in line] == lines[:1]


def test_what_lies_within_a_phase_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 8 s of rollout hold 3 of a reward and 1 of decoding; 2 s of advantages wait 1; 6 s of optimising 0.5."""
    clock = Clock()
    clock.add("reward", 1.0, 4.0)
    clock.add("decode", 4.0, 5.0)
    clock.lap("rollout", 0.0, 8.0)
    clock.add("wait", 8.0, 9.0)
    clock.lap("advantages", 8.0, 10.0)
    clock.add("reduce", 11.0, 11.5)
    clock.add("backward", 12.0, 14.0)
    clock.add("forward", 14.0, 15.0)
    clock.lap("optimise", 10.0, 16.0)
    named = split_epoch(clock.take(), 17.0, on_cpu=True)
    parts = {"rollout": 4.0, "decode": 1.0, "reward": 3.0, "wait": 1.5, "advantages": 1.0, "optimise": 5.5}
    assert {part: named[f"seconds/{part}"] for part in PARTS} == parts
    assert named["seconds/model"] == 4.0 and named["seconds/overhead"] == 17.0 - 4.0 - 3.0 - 1.5
    assert "seconds/model" not in split_epoch({}, 15.0, on_cpu=False)
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: 25.0)
    line = named | {"seconds/evaluate": 2.0}
    assert close_line(line, last=3.0, saved=5.0, encoded=6.0) == 25.0
    assert (line["seconds/checkpoint"], line["seconds/texts"], line["seconds/wall"]) == (2.0, 1.0, 22.0)
    assert line["seconds/other"] == 22.0 - sum(parts.values()) - 2.0 - 2.0 - 1.0
    assert wall(line) == 22.0 and wall({"seconds": 17.0, "seconds/evaluate": 2.0}) == 19.0 and wall({}) == 0.0


def test_the_first_image_is_told_once_whatever_the_clock_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that was set back in the start made it "-31535981.3 s"."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    policy: Any = SimpleNamespace(predict=None, decode=lambda x: x, device=torch.device("cpu"))
    clock, notes = Clock(), list[str]()
    clock.watch(policy)
    begun = [time.monotonic() - seconds for seconds in (6.0, 2.0, 1.0)]
    assert clock.first_image(begun, notes.append) == {} and not notes, "nothing was drawn yet"
    policy.decode(torch.zeros(1))
    found = clock.first_image(begun, notes.append)
    assert found["seconds/first_image"] == pytest.approx(6.0, abs=0.5)
    assert notes == ["first image after 6.0 s: 4.0 to load, 1.0 to encode prompts, 1.0 to draw"]
    assert clock.first_image(begun, notes.append) == {}
