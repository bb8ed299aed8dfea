"""Two processes on the pretend device, under NCCL's rules: what would hang there raises here."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import FSDP2
from pretend_runs import config_of

from diffrl.records import checkpoint


def on_two(arguments: list[str], **more: str) -> list[tuple[int, str]]:
    """Exit code and what was said, of each process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PRETEND_DEVICES": "2", **more}
    children = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **together, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [child.communicate(timeout=300)[0] for child in children]
    return [(child.returncode, text) for child, text in zip(children, said, strict=True)]


# Pairs and gated rows are uneven.
@pytest.mark.parametrize(
    ("method", "sharded"),
    [("gardo", False), ("marble", True), ("dpo", False), ("dpo", True)],
)
def test_two_processes_call_the_same_collectives(config_file: Any, method: str, sharded: bool) -> None:
    overrides = ["epochs=2", "evaluate.every=1"]
    config = config_of(config_file, method, *overrides)
    path = Path(config.run_dir).with_suffix(".yaml")
    drop = ["rewards.redness=null"] if "redness" not in config.rewards else []
    done = on_two(["-m", "diffrl", "train", str(path), *drop, *overrides], **(FSDP2 if sharded else {}))
    assert [code for code, _ in done] == [0, 0], "\n".join(text[-1500:] for _, text in done)
    assert ("which share the network (FSDP2)" in done[0][1]) == sharded
    assert (Path(config.run_dir) / "report.html").is_file()


# Rank 1 ends rank 0, which waits for its scores in an exchange, in the third epoch.
ENDS = """
import os, pathlib, signal, time
{redness}
score, calls, there = Redness.__call__, [], pathlib.Path(__file__).with_name("pid")
if os.environ["RANK"] == "0":
    there.write_text(str(os.getpid()))

def ends(self, *given, **more):
    calls.append(0)
    if os.environ["RANK"] == "1" and len(calls) > 8:
        time.sleep(3)
        os.kill(int(there.read_text()), signal.SIGTERM)
        time.sleep(600)
    return score(self, *given, **more)

Redness.__call__ = ends
"""


def test_a_signal_is_seen_in_an_exchange_and_a_checkpoint_needs_no_peer(config_file: Any, tmp_path: Path) -> None:
    reward = tmp_path / "ends.py"
    reward.write_text(ENDS.format(redness=(Path(__file__).parents[1] / "data" / "redness.py").read_text()))
    path = config_file("ended", epochs=50, checkpoint={"every": 100}, evaluate={"every": 100})
    done = on_two(
        ["-m", "diffrl", "train", str(path), f"rewards.redness.plugin={reward}:Redness"], PRETEND_TIMEOUT="300"
    )
    assert [code for code, _ in done] == [75, 75], "\n".join(text[-1500:] for _, text in done)
    assert sum(text.count("--resume") for _, text in done) == 1
    kept = checkpoint.latest(tmp_path / "ended")
    assert kept is not None and checkpoint.load(kept)[1]["epoch"] >= 1


PLANTED = """
import torch, torch.distributed as dist
dist.init_process_group()
rank = dist.get_rank()
dist.all_reduce(torch.ones(2, device="cuda"))
{mistake}
"""
MISTAKES = {
    "other sizes": ('dist.all_reduce(torch.ones(2 + rank, device="cuda"))', "would hang or corrupt"),
    "of the host": ("dist.all_reduce(torch.ones(2))", "No backend type associated with device type cpu"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_raises(tmp_path: Path, name: str) -> None:
    mistake, message = MISTAKES[name]
    script = tmp_path / "planted.py"
    script.write_text(PLANTED.format(mistake=mistake))
    done = on_two([str(script)], PRETEND_TIMEOUT="10")
    assert all(code != 0 and message in text for code, text in done), done
