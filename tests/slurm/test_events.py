"""What one of two nodes meets ends both, under torchrun and under srun, soon and with its words: one table.

`DIFFRL_EVENTS=FILE.json` runs the whole table and keeps it (assets/results/events.json); else a few rows are run.
"""

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
TABLE = os.environ.get("DIFFRL_EVENTS")
# Event -> what node 0's last line has; None: the run ends well. The order is that of a start.
EVENTS: dict[str, str | None] = {
    "killed while it reads packages": "on node1) is gone",
    "a package is missing": "on node1) ended: ImportError: no accelerate",
    "another version of diffrl": "0.0.1",
    "another build of torch": "2.0.0+other",
    "FSDP on this node alone": "the launcher's engine",
    "one process more": "3 processes",
    "killed while it starts": "on node1) is gone",
    "SIGTERM while it starts": "SIGTERM to rank 1",
    "disk full while the config is made": "on node1) ended: OSError: [Errno 28] No space left",
    "no such config": "nowhere.yaml",
    "an unknown key": "learnig_rate",
    "no prompts file": "prompts.txt",
    "no plugin file": "reward.py",
    "a store that does not answer": "s3://there/prompts.txt",
    "another value of a key": "learning_rate",
    "another text in a prompts file": "prompts",
    "killed while the model is loaded": "on node1) is gone",
    "SIGTERM while the model is loaded": "SIGTERM to rank 1",
    "killed while it trains": "on node1) is gone",
    "SIGTERM while it trains": "SIGTERM to rank 1",
    "a device fails while it trains": "illegal memory access",
    "stopped while it trains": "no sign of life",
    "a clock of tomorrow": None,
    "another umask": None,
    "slow by 40 s": None,
}
FEW = ["killed while it reads packages", "SIGTERM while it starts"]
ROWS = [(event, launcher) for launcher in ("torchrun", "srun") for event in EVENTS if TABLE or event in FEW]
WORDS = [str(ROOT / "configs/playground/nft.yaml"), "rollout.groups=4", "rollout.group_size=8", "watch=null"]
WORDS += ["optimise.batch_size=16", "evaluate.prompts=2", "evaluate.also=null", "prompts.train=prompts.txt"]
WORDS += ["rewards.redness.plugin=reward.py:Redness", "prompts.test=prompts.txt", "prompts.overlap=true"]
WORDS += ["rewards.playground=null", "epochs=1", "run_dir=run"]


@pytest.mark.parametrize(("event", "launcher"), ROWS)
def test_an_event_on_one_node_ends_both(
    request: pytest.FixtureRequest, tmp_path: Path, event: str, launcher: str
) -> None:
    if launcher == "srun" and not HERE:
        pytest.skip("needs root, Slurm and munge")
    for number in range(2):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "prompts.txt").write_text("red a\nred b\nred c\nred d\n")
        (tmp_path / f"node{number}" / "reward.py").write_text((ROOT / "tests/data/redness.py").read_text())
    program = [str(ROOT / "tests/slurm/node.py"), event, str(tmp_path), *WORDS]
    more = "2" if event == "one process more" else "1"
    agent = ["--nnodes", "2", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "DIFFRL_HEARTBEAT": "20"}
    if launcher == "srun":
        environment |= request.getfixturevalue("cluster")
        options = ["-N2", "-n2", "--kill-on-bad-exit=1", f"--output={tmp_path}/log%t"]
        count = f"$((SLURM_PROCID ? {more} : 1))"
        step = f'exec {sys.executable} -m diffrl.launch --node_rank $SLURM_PROCID --nproc_per_node {count} "$@"'
        commands = [["srun", *options, "bash", "-c", step, "step", *agent, *program]]
    else:
        start = [sys.executable, "-m", "torch.distributed.run"]
        commands = [[*start, "--node_rank", str(n), "--nproc_per_node", (more if n else "1"), *agent] for n in range(2)]
        commands = [[*command, *program] for command in commands]
    running = []
    for number, command in enumerate(commands):
        with (tmp_path / ("srun" if launcher == "srun" else f"log{number}")).open("w") as log:
            running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        until(lambda: running[0].poll() is not None, 400, f"node 0 waits for ever: {event}")
        ended = time.time()
        until(lambda: running[-1].poll() is not None, 60, f"node 1 waits for ever: {event}")
    finally:
        for one in running:
            one.kill()
    text = (tmp_path / "log0").read_text()
    said = [
        line.partition("diffrl: ")[2] for line in text.splitlines() if "diffrl: error:" in line or "exit code" in line
    ]
    begun = tmp_path / "happened"
    row: dict[str, Any] = {"code": running[0].returncode, "words": said[-1] if said else ""}
    if begun.is_file() and EVENTS[event] is not None:
        row["seconds"] = round(ended - float(begun.read_text()), 1)
    if TABLE:
        keep(launcher, event, row)
    if EVENTS[event] is None:
        assert row["code"] == 0, text[-3000:]
    else:
        assert row["code"] != 0 and row.get("seconds", 0) < 60 and EVENTS[event] in row["words"], (row, text[-3000:])


def keep(launcher: str, event: str, row: dict[str, Any]) -> None:
    file = Path(str(TABLE))
    table = json.loads(file.read_text()) if file.is_file() else {}
    table.setdefault(launcher, {})[event] = row
    file.write_text(json.dumps(table, indent=1) + "\n")
