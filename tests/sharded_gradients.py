"""One epoch of each config: what the gradients of its optimiser steps are, and the epoch's metrics. For launchers.

`python sharded_gradients.py OUT CONFIG ...`: the main process writes OUT. The LoRA begins away from the pretrained
model, so that penalties pull, and hardly moves, so that the second step says as much as the first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffrl.config import load_config
from diffrl.run.train import Run


def gradients_of(path: str | Path) -> tuple[list[Tensor], dict[str, Any]]:
    """One flat gradient for each optimiser step, over all processes; the epoch's line."""
    run = Run(load_config(path))
    generator = torch.Generator().manual_seed(1)
    lora = run.policy.state("default")
    run.policy.load_state("default", {k: v + 0.05 * torch.randn(v.shape, generator=generator) for k, v in lora.items()})
    found: list[Tensor] = []
    finish = run.loop.gradients.finish

    def seen(parameters: Any, reduce: Any) -> None:
        finish(parameters, reduce)
        found.append(torch.cat([p.grad.flatten() for p in parameters]).clone())

    run.loop.gradients.finish = seen  # type: ignore[method-assign]
    try:
        line = run.loop.run_epoch(0)
    finally:
        run.close()
    return found, {**line, "sharded": run.policy.sharded}


def train_together(rank: int, port: int, said: Path, out: Path, paths: list[str], environment: dict[str, str]) -> None:
    """In a child: the same as one of two processes; stderr in a file."""
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    names |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "true"}
    os.environ |= names | environment
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    write(out, paths)


def write(out: str | Path, paths: list[str]) -> None:
    """What the configs at these paths give, from the main process; this process ends."""
    torch.set_num_threads(1)
    found = {path: gradients_of(path) for path in paths}
    from accelerate import PartialState

    if PartialState().is_main_process:
        torch.save(found, out)
    PartialState().wait_for_everyone()
    # A dozen runs leave process groups of their own behind, and the threads of one may still run when it is destroyed
    # at exit, which ends the process by std::terminate. What is tested is in the file.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    write(sys.argv[1], sys.argv[2:])
