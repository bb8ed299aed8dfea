"""`diffrl train`, or a script, on several CPU processes, launched as a user would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


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
    with socket.socket() as free:  # tests run side by side: each launch needs a port of its own
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if config_file:
        options = f"accelerate.commands.launch --config_file {config_file} --num_machines 1 --num_processes {processes}"
        options += f" --main_process_port {port}"
    else:
        options = f"torch.distributed.run --nnodes 1 --nproc_per_node {processes} --master_port {port}"
    command = [sys.executable, "-m", *options.split(), *map(str, command_line)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"ACCELERATE_USE_CPU": "true"} if config_file else {}  # torchrun's processes see for themselves
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
