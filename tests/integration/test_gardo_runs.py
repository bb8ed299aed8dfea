"""GARDO decides alike on any number of processes, and goes on after a kill as if nothing had happened."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gardo_didactic
import pytest
import torch
from launching import train_on_two
from test_equivalence import lora_of, same_lora
from test_resume import PHASES, final_tensors, run_and_die

from diffrl.config import load_config
from diffrl.records import checkpoint
from diffrl.records.tracking import read_metrics
from diffrl.run.train import train

BLUE = """
class Blueness:
    name = "blue"
    def __call__(self, images, prompts, metadata):
        return images[:, 2].mean(dim=(1, 2))
"""
GARDO = {"auxiliary": ["blue"], "share": 0.2, "beta": 0.5, "reset": {"kl": 1e-4, "steps": 3}}


@pytest.fixture
def gardo_file(config_file: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A config with GARDO, its auxiliary reward watched."""
    plugin = tmp_path / "blue.py"
    plugin.write_text(BLUE)

    def write(name: str, **sections: Any) -> Path:
        return config_file(name, watch={"blue": {"plugin": f"{plugin}:Blueness"}}, gardo=GARDO, **sections)

    return write


def method_state(run_dir: Path) -> dict[str, Any]:
    """What the newest checkpoint has of the objective and of GARDO, its only penalty with counters."""
    path = checkpoint.latest(run_dir)
    assert path is not None
    loop = checkpoint.load(path)[1]["loop"]
    (gardo,) = (state for state in loop["penalties"] if "resets" in state)
    return loop["objective"] | gardo


def test_resume_is_exact_with_gate_window_and_reference(gardo_file) -> None:
    whole, broken = (gardo_file(name) for name in ("whole", "broken"))
    train(load_config(whole))
    assert run_and_die(broken, *PHASES["optimising"]) == -signal.SIGKILL
    config = load_config(broken)
    folder, other = Path(config.run_dir), Path(load_config(whole).run_dir)
    train(config, resume=folder)
    expected, ours = final_tensors(other), final_tensors(folder)
    assert ours.keys() == expected.keys() and "reference" in ours
    for part, tensors in expected.items():
        for name, tensor in tensors.items():
            assert torch.equal(ours[part][name], tensor), f"{part}/{name} differs after a resume"
    state = method_state(folder)
    assert state == method_state(other) and state["resets"] > 0
    files = [sorted(path.name for path in (run / "gardo").iterdir()) for run in (folder, other)]
    assert files[0] == files[1] and "epoch-0002.json" in files[0]
    for name in files[0]:
        assert (folder / "gardo" / name).read_bytes() == (other / "gardo" / name).read_bytes()


@pytest.mark.long
def test_one_process_equals_two_with_groups_split_between_them(gardo_file) -> None:
    """Three groups of four: the second one's members are on both processes; some micro-batches have no gated row."""
    rollout = {"groups": 3, "group_size": 4}
    optimise = {"batch_size": 6, "micro_batch": 0.3333}
    alone, shared = (gardo_file(name, rollout=rollout, optimise=optimise) for name in ("alone", "shared"))
    train(load_config(alone))
    train_on_two(shared)
    one, two = (Path(load_config(path).run_dir) for path in (alone, shared))
    assert same_lora(lora_of(two), lora_of(one))
    a, b = method_state(one), method_state(two)
    assert (a["since_reset"], a["resets"]) == (b["since_reset"], b["resets"]) and a["resets"]
    assert a["share"] == b["share"] and a["window"] == pytest.approx(b["window"])
    names = ("gate", "uncertainty", "penalised", "kl_gated", "resets", "forwards_saved", "nearest")
    rows = list(zip(read_metrics(one), read_metrics(two), strict=True))[1:]
    assert any(first["gardo/kl_gated"] for first, _ in rows)
    for first, second in rows:
        for key in (f"gardo/{name}" for name in names):
            assert (first[key] is None) == (second[key] is None)  # the KL, in an epoch in which nobody was penalised
            assert first[key] is None or first[key] == pytest.approx(second[key], rel=1e-4, abs=1e-7), key
    texts = [(run / "gardo" / "epoch-0003.json").read_text() for run in (one, two)]
    assert [text.count('"penalised": true') for text in texts] == [texts[0].count('"penalised": true')] * 2
    images = [(run / "gardo" / "epoch-0003-00.png").read_bytes() for run in (one, two)]
    assert images[0] == images[1]


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_didactic_case_only_gardo_finds_every_mode(seed: int) -> None:
    """A large KL leaves the model where it was, none ends on one mode, GARDO with the same KL has all three."""
    outcomes = gardo_didactic.didactic(seed)
    base, large, none, gardo = (outcomes[name] for name in ("base", "large KL", "no KL", "GARDO"))
    assert base.found == 2 and base.shares[gardo_didactic.RARE] < gardo_didactic.FOUND
    assert large.proxy < base.proxy + 0.05 and large.found == 2
    assert none.shares[gardo_didactic.RARE] < 0.01 and max(none.shares.values()) > 0.8 and none.found < 3
    assert gardo.found == 3 and gardo.shares[gardo_didactic.RARE] > 1.5 * base.shares[gardo_didactic.RARE]
    assert gardo.proxy > base.proxy + 0.1 and none.proxy > base.proxy + 0.1
