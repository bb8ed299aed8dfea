"""The same run on any number of processes, whole or sharded by FSDP2, and resumed on another number."""

from __future__ import annotations

import atexit
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from children import child, ended
from launching import FSDP2, free_port, launch, launch_script, train_on
from test_equivalence import lora_of, same_lora

from diffrl.config import load_config
from diffrl.records.progress import PHASES
from diffrl.records.tracking import read_metrics
from diffrl.run.train import train

pytestmark = pytest.mark.long  # four processes on two cores

FSDP2_FILE = Path(__file__).parents[2] / "scripts" / "launch" / "fsdp2.yaml"
REDNESS = str(Path(__file__).parents[1] / "data" / "redness.py") + ":Redness"
# Three groups of four over two or four processes: groups are split, and three test prompts are unevenly shared.
UNEVEN: dict[str, Any] = {
    "rollout": {"groups": 3, "group_size": 4, "batch_size": 4},
    "optimise": {"batch_size": 12, "micro_batch": 0.3333, "learning_rate": 1e-3},
    "evaluate": {"every": 2, "prompts": 3, "per_prompt": 2},
}
GATED = {
    "gardo": {"auxiliary": ["aux"], "beta": 0.5, "reset": {"kl": None, "steps": None}},
    "watch": {"aux": {"plugin": REDNESS, "power": 3.0}},
}

WAIT = PHASES.index("wait")


def same_metrics(one: Path, other: Path) -> None:
    for a, b in zip(read_metrics(one), read_metrics(other), strict=True):
        for key in ("reward/redness", "diversity", "eval/redness", "eval/diversity", "loss", "kl", "gardo/kl_gated"):
            assert (a.get(key) is None) == (b.get(key) is None)
            if a.get(key) is not None:
                assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-7), key


@pytest.mark.parametrize("objective", ["nft", "crd"])
def test_four_processes_are_one(config_file: Any, objective: str) -> None:
    alone, shared = (config_file(name, objective=objective, epochs=2, **UNEVEN) for name in ("one", "four"))
    train(load_config(alone))
    train_on(4, shared)
    one, four = (Path(load_config(path).run_dir) for path in (alone, shared))
    assert same_lora(lora_of(four), lora_of(one))
    same_metrics(one, four)
    assert not any(key.startswith("seconds/process") for line in read_metrics(one) for key in line)
    for line in read_metrics(four)[1:]:
        spent = [[line[f"seconds/process/{rank}/{phase}"] for phase in PHASES] for rank in range(4)]
        assert all(min(phases) >= 0 < phases[0] for phases in spent)
        assert line["seconds/wait"] == pytest.approx(spent[0][WAIT] + spent[0][-1], abs=1e-3)
        assert min(phases[WAIT] for phases in spent) < max(phases[WAIT] for phases in spent), (
            "somebody waits for the last"
        )


def test_saved_on_two_processes_it_goes_on_on_one_or_four(config_file: Any, tmp_path: Path) -> None:
    sections = {**UNEVEN, "nft": {"old": [0, 0.5, 0.001, 0.5]}, "epochs": 3}
    undisturbed, moved = (config_file(name, **sections) for name in ("undisturbed", "moved"))
    train(load_config(undisturbed))
    train_on(2, moved, "epochs=1")
    folder, copy = tmp_path / "moved", tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    train(load_config(moved), resume=folder)
    train_on(4, moved, f"run_dir={copy}", "--resume", "auto")
    for found in (folder, copy):
        assert [line["epoch"] for line in read_metrics(found)] == [0, 1, 2, 3]
        assert same_lora(lora_of(found), lora_of(tmp_path / "undisturbed"))


@pytest.mark.parametrize("sections", [{"optimise": {"gradient_checkpointing": True}}, GATED], ids=["nft", "gardo"])
def test_sharded_by_fsdp2_it_is_the_same_run(config_file: Any, sections: dict[str, Any]) -> None:
    """Uneven everywhere: images, test prompts, gated rows, pictures that one process draws. NFT by the launcher."""
    optimise = {**UNEVEN["optimise"], **sections.get("optimise", {})}
    merged = {**UNEVEN, **sections, "optimise": optimise, "epochs": 2}
    alone, shared = (config_file(name, **merged) for name in ("alone", "sharded"))
    train(load_config(alone))
    if sections is GATED:
        said = train_on(2, shared, **FSDP2)
    else:
        done = launch(2, shared, config_file=FSDP2_FILE)
        assert done.returncode == 0, done.stderr[-3000:]
        said = done.stdout
    assert "which share the network (FSDP2)" in said, said
    one, two = (Path(load_config(path).run_dir) for path in (alone, shared))
    assert same_lora(lora_of(two), lora_of(one))
    same_metrics(one, two)


SCRIPT = """
import atexit, sys
import torch.distributed as dist
atexit.register(lambda: print("a group is left:", dist.is_initialized()))  # runs after what comes later
import diffrl
diffrl.train(sys.argv[1])
if sys.argv[2:]:
    diffrl.train(sys.argv[1], epochs=2)
"""


def run_script(rank: int, port: int, said: Path, words: list[str]) -> None:
    """In a child: the script as one of two processes, and what an interpreter calls at its end."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    for stream in (1, 2):
        os.dup2(os.open(said.with_suffix(f".{stream}"), os.O_WRONLY | os.O_CREAT), stream)
    atexit._clear()  # of the server that it comes of
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def test_a_script_s_own_end_finds_no_group(config_file: Any, tmp_path: Path) -> None:
    """A live group at the interpreter's end aborts now and then."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = launch_script(2, script, config_file("run", epochs=1, evaluate={"every": 5}, tracking={"samples": 0}))
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(f"a group is left: {left}") for left in (True, False)] == [0, 2], done.stdout


def test_where_a_script_s_run_has_failed_its_group_is_left(config_file: Any, tmp_path: Path) -> None:
    """The second run is refused: its folder holds one. Leaving the group could wait for the other process."""
    script, port = tmp_path / "script.py", free_port()
    script.write_text(SCRIPT)
    words = [str(script), str(config_file("run", epochs=1, evaluate={"every": 5}, tracking={"samples": 0})), "again"]
    files = [tmp_path / f"said{rank}" for rank in range(2)]
    codes = ended(child(run_script, rank, port, said, words) for rank, said in enumerate(files))
    told = [[said.with_suffix(f".{stream}").read_text() for stream in (1, 2)] for said in files]
    assert codes == [1, 1] and all("a group is left: True" in out for out, _ in told), told
    assert all("run_dir" in error for _, error in told), told
