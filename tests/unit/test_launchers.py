"""The launch scripts, with stand-ins for the programs that they call: what would be run?"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

LAUNCH = Path(__file__).parents[2] / "scripts" / "launch"


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    """An environment in which Python prints its arguments and what accelerate would read."""
    program = tmp_path / "python"
    program.write_text(
        '#!/usr/bin/env bash\necho "$* fsdp=${ACCELERATE_USE_FSDP:-no}"\necho "$PYTORCH_CUDA_ALLOC_CONF" >&2\n'
    )
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "GPUS": "4"}


def run(script: str, environment: dict[str, str], **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(LAUNCH / script), "my.yaml", "epochs=3"]
    return subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, check=False)


def test_one_machine(stand_ins: dict[str, str]) -> None:
    said = run("gpus.sh", stand_ins).stdout
    assert said.startswith("-m diffrl.launch accelerate launch --num_processes 4 --num_machines 1 --mixed_precision no")
    assert said.split(" -m ")[-1].startswith("diffrl train my.yaml epochs=3 --resume auto")
    sharded = run("gpus.sh", stand_ins, ENGINE="fsdp2").stdout
    assert f"--config_file {LAUNCH / 'fsdp2.yaml'} -m diffrl train my.yaml" in sharded


@pytest.mark.parametrize("script", ["gpus.sh", "nodes.sh"])
def test_segments_of_memory_may_grow_unless_the_user_says_otherwise(stand_ins: dict[str, str], script: str) -> None:
    where = {"NODES": "1", "RANK": "0", "MASTER": "here"}
    assert run(script, stand_ins, **where).stderr == "expandable_segments:True\n"
    asked = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert run(script, stand_ins, **where, **asked).stderr == "max_split_size_mb:64\n"


def test_several_machines(stand_ins: dict[str, str]) -> None:
    where = {"NODES": "2", "RANK": "1", "MASTER": "10.0.0.1"}
    said = run("nodes.sh", stand_ins, **where).stdout
    assert (
        said.startswith("-m diffrl.launch --nnodes 2")
        and "--nnodes 2 --node_rank 1 --master_addr 10.0.0.1" in said
        and "--nproc_per_node 4" in said
    )
    assert said.strip().endswith("diffrl train my.yaml epochs=3 --resume auto fsdp=no")
    assert run("nodes.sh", stand_ins, ENGINE="fsdp2", **where).stdout.strip().endswith("fsdp=true")
    missing = run("nodes.sh", stand_ins, NODES="2", RANK="1")
    assert missing.returncode != 0 and "address of machine 0" in missing.stderr


@pytest.mark.parametrize("script", ["gpus.sh", "nodes.sh"])
def test_an_unknown_engine_is_refused(stand_ins: dict[str, str], script: str) -> None:
    done = run(script, stand_ins, ENGINE="zero3", NODES="1", RANK="0", MASTER="here")
    assert done.returncode == 2 and '"zero3" is neither ddp nor fsdp2' in done.stderr and not done.stdout


def test_slurm_is_told_to_queue_the_job_again() -> None:
    text = (LAUNCH / "slurm.sbatch").read_text()
    assert subprocess.run(["bash", "-n", str(LAUNCH / "slurm.sbatch")], check=False).returncode == 0
    assert "#SBATCH --requeue" in text and "--signal=B:TERM@" in text and "scontrol requeue" in text
    assert "kill -TERM" not in text  # tried in tests/slurm


@pytest.mark.parametrize(
    ("array", "number"), [({}, "7"), ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "7_3")]
)
def test_a_warned_job_of_an_array_ends_and_queues_itself_alone(
    stand_ins: dict[str, str], tmp_path: Path, array: dict[str, str], number: str
) -> None:
    """The last job of an array has the array's number as its own: by it Slurm ends, and queues again, all of them."""
    calls, started = tmp_path / "calls", tmp_path / "started"
    note = f'echo $(basename "$0") "$@" >> {calls}'
    programs = {"srun": f"echo $$ > {started}.new; mv {started}.new {started}; exec sleep 60", "scontrol": note}
    for name, text in (programs | {"scancel": f"{note}; kill $(cat {started})"}).items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n1", "MASTER": "here", **array}
    command = ["bash", "scripts/launch/slurm.sbatch", "my.yaml"]
    script = subprocess.Popen(command, env={**stand_ins, **slurm}, cwd=LAUNCH.parents[1])
    while not started.is_file():
        time.sleep(0.05)
    script.terminate()
    assert script.wait(60) == 0
    warned = calls.read_text().splitlines()[-2:]
    assert warned == [f"scancel --signal=TERM {number}", f"scontrol requeue {number}"]


def test_fewer_processes_than_the_launcher_was_asked_for_are_said(monkeypatch, caplog) -> None:
    from types import SimpleNamespace

    import psutil
    from accelerate.utils import DynamoBackend

    from diffrl import launched

    words = ["python", "/bin/accelerate", "launch", "--num_processes", "2", "-m", "diffrl", "train", "x"]
    parent = SimpleNamespace(cmdline=lambda: words)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(parent=lambda: parent))
    state = SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO))
    for count in (2, 1):
        started = SimpleNamespace(num_processes=count, mixed_precision="no", state=state)
        launched.check_launcher(started, "fp32")
        assert caplog.messages == [] or count == 1
    (text,) = caplog.messages
    assert "torchrun --nproc_per_node 2 -m diffrl" in text and "--cpu" not in text, "with --cpu, too, it starts one"
    words[3:5] = ["--num_processes=1"]
    launched.check_launcher(started, "fp32")
    words[1:3] = ["-m", "pytest"]
    launched.check_launcher(started, "fp32")
    assert caplog.messages == [text]


STARTED = """
import logging, os
from diffrl.launched import check_launcher, join_processes

logging.basicConfig(format="%(message)s")
accelerator = join_processes()
print(accelerator.num_processes, os.environ[os.environ["COUNT"]])
check_launcher(accelerator, "fp32")
"""


@pytest.mark.parametrize(
    ("count", "rank"), [("PMI_SIZE", "PMI_RANK"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")]
)
def test_what_mpirun_has_started_is_a_run_of_its_own_and_says_so(count: str, rank: str) -> None:
    """accelerate counted them on a CPU, without a group in which they are: a traceback."""
    environment = {**os.environ, "COUNT": count, count: "3", rank: "0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", STARTED], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["1", "3"]), done.stderr
    assert "has started this 3 times, and each trains by itself" in done.stderr


def test_tasks_of_srun_are_said_once_and_not_under_the_launcher(monkeypatch, caplog) -> None:
    from accelerate.utils import DynamoBackend

    from diffrl import launched

    state = SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO))
    monkeypatch.setattr(launched, "_asked_processes", lambda: 1)
    for tasks, task, processes, said in (("1", "0", 1, 0), ("4", "0", 1, 1), ("4", "3", 1, 0), ("4", "0", 4, 0)):
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", tasks)
        monkeypatch.setenv("SLURM_PROCID", task)
        caplog.clear()
        launched.check_launcher(SimpleNamespace(num_processes=processes, mixed_precision="no", state=state), "fp32")
        assert len(caplog.messages) == said and all("started this 4 times" in text for text in caplog.messages)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ending", "code", "last"), [("sys.exit(75)", 75, "bad input"), ("os.kill(os.getpid(), 9)", 137, "SIGKILL")]
)
def test_a_launch_ends_as_the_process_did_without_a_traceback(
    tmp_path: Path, ending: str, code: int, last: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys\nprint('bad input', file=sys.stderr, flush=True)\n{ending}\n")
    command = [sys.executable, "-m", "diffrl.launch", "--standalone", "--nproc_per_node", "1", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code and done.stdout == "diffrl: starting the processes ...\n"
    assert "Traceback" not in done.stderr and "ChildFailedError" not in done.stderr and last in done.stderr


def test_what_stops_a_launch_before_its_processes_start_is_one_line(monkeypatch, capsys) -> None:
    """A Python without torch, which a job calls whose environment is not active, and machines that do not meet."""
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    from diffrl import launch

    def unmet(words: list[str]) -> None:
        raise RendezvousConnectionError("the store has failed; see the cause") from OSError("n1:20000 timed out")

    monkeypatch.setattr("torch.distributed.run.main", unmet)
    assert launch.main(["--nnodes", "2"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("diffrl: error: the machines did not meet: OSError: n1:20000 timed out; MASTER=ADDRESS")
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    assert launch.main(["--nnodes", "2"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"diffrl: error: {sys.executable} has no torch") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("meets", "line"),
    [
        (False, "diffrl: error: the machines did not meet: DistNetworkError: no answer; MASTER="),
        (True, "diffrl: another machine's launcher has ended (DistNetworkError: no answer)"),
    ],
)
def test_a_launcher_that_loses_the_others_says_whether_they_met(monkeypatch, capsys, meets: bool, line: str) -> None:
    """Processes of another machine may fail so soon that its launcher is gone while this one still speaks to it."""
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerState

    from diffrl import launch

    def _initialize_workers(group: object) -> None:
        if not meets:
            raise DistNetworkError("no answer")

    def gone() -> int:
        raise DistNetworkError("no answer")

    spec = SimpleNamespace(role="r", monitor_interval=0, max_restarts=0, get_entrypoint_name=lambda: "script")
    spec.rdzv_handler = SimpleNamespace(num_nodes_waiting=gone)
    agent = SimpleNamespace(
        _worker_group=SimpleNamespace(spec=spec, state=WorkerState.HEALTHY),
        _initialize_workers=_initialize_workers,
        _monitor_workers=lambda group: SimpleNamespace(state=WorkerState.HEALTHY),
        _remaining_restarts=0,
    )
    monkeypatch.setattr("torch.distributed.run.main", lambda words: SimpleElasticAgent._invoke_run(agent))
    assert launch.main(["--nnodes", "2"]) == 1
    assert capsys.readouterr().err.startswith(line)
