"""scripts/launch/slurm.sbatch on a real Slurm: a controller and two nodes on one machine (Debian's packages).

Skipped where they are not installed, or the tests do not run as root, whom their daemons need.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
HERE = all(shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") for program in PROGRAMS) and os.geteuid() == 0
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not HERE, reason="needs root, and slurmctld, slurmd and munge (Debian's packages)"),
]
CONF = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2
ReturnToService=2
MpiDefault=none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 CoresPerSocket=2 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 CoresPerSocket=2 RealMemory=4000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def until(true: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of its commands."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "n1", "n2", "bin"):
        (folder / name).mkdir()
    program = folder / "bin" / "python"
    program.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    text = CONF.format(host=socket.gethostname().partition(".")[0], folder=folder, ports=free_ports(3))
    (folder / "slurm.conf").write_text(text)
    path = f"{folder / 'bin'}:{os.environ['PATH']}:/usr/sbin"
    more = {"OMP_NUM_THREADS": "1", "SLURM_GPUS_ON_NODE": "1"}  # n1 resolves nowhere: Slurm's address is taken
    environment = {**os.environ, **more, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
    if subprocess.run(["pgrep", "-x", "munged"], capture_output=True, check=False).returncode:
        Path("/run/munge").mkdir(exist_ok=True)
        shutil.chown("/run/munge", "munge", "munge")
        subprocess.run(["runuser", "-u", "munge", "--", "munged"], env=environment, check=True)
    daemons = [subprocess.Popen(["slurmctld", "-D"], env=environment)]
    daemons += [subprocess.Popen(["slurmd", "-D", "-N", node], env=environment) for node in ("n1", "n2")]
    try:
        until(lambda: "2   idle" in ask(environment, "sinfo", "--noheader"), 60, "the nodes do not come up")
        yield environment
    finally:
        subprocess.run(["scancel", "--full", "--user=root"], env=environment, check=False)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def ask(environment: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout


def submit(environment: dict[str, str], log: Path, *words: str) -> str:
    """The number of the job."""
    options = ["--parsable", "--gpus-per-node=0", "--time=0:20:00", f"--output={log}"]
    command = ["sbatch", *options, "scripts/launch/slurm.sbatch", *words]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip().partition(";")[0]


def state(environment: dict[str, str], job: str) -> str:
    words = dict(word.partition("=")[::2] for word in ask(environment, "scontrol", "show", "job", job).split())
    return words.get("JobState", "")


WORDS = ["configs/playground/nft.yaml", "epochs=10", "rollout.groups=4", "rollout.group_size=8", "watch=null"]
WORDS += ["optimise.batch_size=16", "evaluate.prompts=2", "evaluate.every=20", "evaluate.also=null"]


def test_a_job_that_is_warned_saves_is_queued_again_and_ends_as_an_undisturbed_one(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    """What `--signal=B:TERM@120` sends, and a pre-emption, is sent here when the first checkpoint is there."""
    plain, warned = tmp_path / "plain", tmp_path / "warned"
    first = submit(cluster, tmp_path / "plain.log", *WORDS, f"run_dir={plain}")
    until(lambda: state(cluster, first) in ("COMPLETED", "FAILED"), 240, "the undisturbed job does not end")
    assert state(cluster, first) == "COMPLETED", (tmp_path / "plain.log").read_text()[-3000:]

    log = tmp_path / "warned.log"
    job = submit(cluster, log, *WORDS, f"run_dir={warned}")
    until(lambda: any((warned / "checkpoints").glob("step-*")), 120, "no checkpoint")
    assert ask(cluster, "scancel", "--batch", "--signal=TERM", job) == ""
    until(lambda: state(cluster, job) == "PENDING", 60, "the job is not queued again")
    text = log.read_text()
    assert "ending after this micro-batch" in text and "continue with: diffrl train --resume" in text
    ask(cluster, "scontrol", "update", f"JobId={job}", "StartTime=now")  # else two minutes later
    until(lambda: state(cluster, job) in ("COMPLETED", "FAILED"), 240, "the resumed job does not end")
    assert state(cluster, job) == "COMPLETED", log.read_text()[-3000:]
    ours, theirs = (load_file(run / "lora" / "pytorch_lora_weights.safetensors") for run in (warned, plain))
    assert ours.keys() == theirs.keys() and all((ours[key] == theirs[key]).all() for key in ours)


def test_what_the_second_node_lacks_ends_the_job_with_its_line(cluster: dict[str, str], tmp_path: Path) -> None:
    """A file that the plugin reads is on the first node's disk only."""
    plugin, log = tmp_path / "reward.py", tmp_path / "lacking.log"
    lacked = 'pathlib.Path(__file__).with_name(os.environ["SLURMD_NODENAME"] + ".pt").read_bytes()'
    read = f"import os\nimport pathlib\n\n{lacked}\n"
    plugin.write_text((ROOT / "tests/data/redness.py").read_text() + read)
    (tmp_path / "n1.pt").touch()
    job = submit(cluster, log, *WORDS, f"rewards.red.plugin={plugin}:Redness", f"run_dir={tmp_path / 'lacking'}")
    until(lambda: state(cluster, job) in ("COMPLETED", "FAILED"), 90, "the first node waits for the second one")
    lines = [line for line in log.read_text().splitlines() if line.startswith("diffrl: error:")]
    assert state(cluster, job) == "FAILED" and all("n2.pt" in line for line in lines)
    assert any(" (process " in line for line in lines) and not list((tmp_path / "lacking").glob("*.jsonl"))


def test_a_sweep_is_an_array_whose_stopped_runs_go_on(cluster: dict[str, str], tmp_path: Path) -> None:
    """The warning before a time limit comes to the first run: it saves, is queued again, and all end as one table."""
    pytest.importorskip("submitit", reason="needs the extra sweep")
    out = tmp_path / "sweep"
    words = [WORDS[0], "epochs=8", *WORDS[2:], "--seeds", "2", "--jobs", "2", "--out", str(out)]
    command = [sys.executable, "-m", "diffrl", "sweep", *words, "--slurm", "partition=main,cpus_per_task=1"]
    sweep = subprocess.Popen(
        command, env=cluster, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    first = out / "nft" / "seed-0"
    until(lambda: any((first / "checkpoints").glob("step-*")), 240, "no checkpoint")
    array = ask(cluster, "squeue", "-h", "-o", "%F").split()[0]
    assert ask(cluster, "scancel", "--signal=USR2", f"{array}_0") == ""
    log = first.with_name("seed-0.log")
    until(lambda: "continue with: diffrl train --resume" in log.read_text(), 60, "it does not save")
    until(lambda: state(cluster, f"{array}_0") != "RUNNING", 60, "it is not queued again")
    ask(cluster, "scontrol", "update", f"JobId={array}_0", "StartTime=now")  # else two minutes later
    told, _ = sweep.communicate(timeout=400)
    assert sweep.returncode == 0 and "2 of 2 runs are done" in told, told
    assert (out / "sweep.json").is_file()
