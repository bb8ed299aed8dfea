"""What one of two nodes meets ends both, under torchrun and under srun, soon and with its words: one table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launching import free_port
from test_slurm import HERE, ROOT, cluster, until  # noqa: F401

pytestmark = pytest.mark.long
LAUNCHERS = ["torchrun", pytest.param("srun", marks=pytest.mark.skipif(not HERE, reason="needs root, Slurm and munge"))]
# Event on node 1 -> what node 0 says of it. The first eight come before the processes have agreed on the run.
EVENTS = {
    "killed while it starts": "node1",
    "SIGTERM while it starts": "",
    "disk full while the config is made": "No space left",
    "no such config": "nowhere.yaml",
    "an unknown key": "learnig_rate",
    "no prompts file": "prompts.txt",
    "no plugin file": "reward.py",
    "a store that does not answer": "s3://there/prompts.txt",
    "another version of diffrl": "0.0.1",
    "FSDP on this node alone": "engine",
    "another value of a key": "learning_rate",
    "another text in a prompts file": "prompts",
    "killed while the model is loaded": "node1",
    "killed while it trains": "node1",
    "a device fails while it trains": "illegal memory access",
}
WORDS = [str(ROOT / "configs/playground/nft.yaml"), "rollout.groups=4", "rollout.group_size=8", "watch=null"]
WORDS += ["optimise.batch_size=16", "evaluate.prompts=2", "evaluate.also=null", "prompts.train=prompts.txt"]
WORDS += ["rewards.redness.plugin=reward.py:Redness", "prompts.test=prompts.txt", "prompts.overlap=true", "epochs=2", "run_dir=run"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("event", EVENTS)
def test_an_event_on_one_node_ends_both(
    request: pytest.FixtureRequest, tmp_path: Path, event: str, launcher: str
) -> None:
    for number in range(2):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "prompts.txt").write_text("red a\nred b\nred c\nred d\n")
        (tmp_path / f"node{number}" / "reward.py").write_text((ROOT / "tests/data/redness.py").read_text())
    program = [str(ROOT / "tests/slurm/node.py"), event, str(tmp_path), *WORDS]
    agent = ["--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    logs = [tmp_path / f"log{number}" for number in range(2)]
    if launcher == "srun":
        environment |= request.getfixturevalue("cluster")
        options = ["-N2", "-n2", "--kill-on-bad-exit=1", "--label", f"--output={tmp_path}/log%t"]
        step = f'exec {sys.executable} -m diffrl.launch --node_rank $SLURM_PROCID "$@"'
        commands = [["srun", *options, "bash", "-c", step, "step", *agent, *program]]
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        commands = [[*torchrun, "--node_rank", str(number), *agent, *program] for number in range(2)]
    running = []
    for number, command in enumerate(commands):
        with (logs[number] if launcher == "torchrun" else tmp_path / "srun").open("w") as log:
            running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        until(lambda: running[0].poll() is not None, 280, f"node 0 waits for ever: {event}")
        ended = time.time()
        until(lambda: running[-1].poll() is not None, 40, f"node 1 waits for ever: {event}")
    finally:
        for one in running:
            one.kill()
    said = [line for line in logs[0].read_text().splitlines() if "diffrl: error:" in line]
    seconds = ended - float((tmp_path / "happened").read_text())
    words = said[-1].partition("diffrl: error: ")[2] if said else ""
    keep(launcher, event, {"seconds": round(seconds, 1), "code": running[0].returncode, "words": words})
    assert running[0].returncode != 0 and seconds < 60
    assert EVENTS[event] in words, logs[0].read_text()[-3000:]


def keep(launcher: str, event: str, row: dict[str, Any]) -> None:
    """A row of the table, where DIFFRL_EVENTS names a file."""
    if (name := os.environ.get("DIFFRL_EVENTS")) is not None:
        file = Path(name)
        table = json.loads(file.read_text()) if file.is_file() else {}
        table.setdefault(launcher, {})[event] = row
        file.write_text(json.dumps(table, indent=1) + "\n")
