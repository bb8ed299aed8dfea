"""`diffrl train`, or a script, on several CPU processes, launched as a user would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from children import child, ended

from diffrl.cli.main import main


def launch(processes: int, *arguments: str | Path, config_file: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`torchrun ... -m diffrl train ARGUMENTS`, or `accelerate launch` with a config file. AssertionError for fewer.

    `accelerate launch --cpu --num_processes 2` runs one process, without a word: so we look how many there were.
    """
    done = launch_script(processes, "-m", "diffrl", "train", *arguments, config_file=config_file)
    assert done.returncode or f"{processes} process(es)" in done.stdout, done.stdout
    return done


def launch_script(
    processes: int, *command_line: str | Path, config_file: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """A script with its arguments, or "-m" and a module, launched likewise."""
    port = free_port()
    if config_file:
        options = f"accelerate.commands.launch --config_file {config_file} --num_machines 1 --num_processes {processes}"
        options += f" --main_process_port {port}"
    else:
        options = f"torch.distributed.run --nnodes 1 --nproc_per_node {processes} --master_port {port}"
    command = [sys.executable, "-m", *options.split(), *map(str, command_line)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"ACCELERATE_USE_CPU": "true"} if config_file else {}  # torchrun's processes see for themselves
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


# What `accelerate launch` sets for scripts/launch/fsdp2.yaml.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_OFFLOAD_PARAMS": "false",
}


def train_on_two(*words: str | Path) -> None:
    """`diffrl train WORDS` on two processes; without a launcher and its imports, which take longer than a small run."""
    train_on(2, *words)


def train_on(processes: int, *words: str | Path, **environment: str) -> str:
    """`diffrl train WORDS` on several processes likewise, with more variables; returns what they said to stdout."""
    port, folder = free_port(), Path.cwd()
    with TemporaryDirectory() as said:
        files = [Path(said, str(rank)) for rank in range(processes)]
        texts = [str(word) for word in words]
        ranks = (
            child(_train_one, environment | {"WORLD_SIZE": str(processes)}, rank, port, file, texts, folder)
            for rank, file in enumerate(files)
        )
        assert ended(ranks) == [0] * processes, [file.read_text()[-3000:] for file in files]
        return "".join(file.with_suffix(".out").read_text() for file in files)


@contextmanager
def joined(rank: int, folder: Path) -> Iterator[None]:
    """Inside, this process is one of two that compute together; they meet in a file: no port to collide with."""
    torch.set_num_threads(1)
    names = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "unused", "MASTER_PORT": "0"}
    os.environ |= {**names, "ACCELERATE_USE_CPU": "true"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    yield
    dist.destroy_process_group()


def _train_one(environment: dict[str, str], rank: int, port: int, said: Path, words: list[str], folder: Path) -> None:
    os.environ |= environment
    os.dup2(os.open(said.with_suffix(".out"), os.O_WRONLY | os.O_CREAT), 1)
    train_joined(rank, port, said, words, folder)


def free_port() -> int:
    """Tests run side by side: each launch needs a port of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def train_joined(
    rank: int,
    port: int,
    said: Path,
    words: list[str],
    folder: Path,
    heard: bool = True,
    limit: str = "90",
    local: int | None = None,
) -> None:
    """In a child: `diffrl train WORDS` as one of two (or $WORLD_SIZE) processes, stderr in a file. `heard`: stdout is.
    `local`: its number on its machine; None: both are on one."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.setdefault("WORLD_SIZE", "2")
    os.environ["LOCAL_RANK"] = str(rank if local is None else local)
    os.environ |= {"RANK": str(rank), "ACCELERATE_USE_CPU": "true", "DIFFRL_HEARTBEAT": limit}
    os.chdir(folder)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    if not heard:
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(reader)
    sys.exit(main(["train", *words]))
