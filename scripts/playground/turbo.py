"""The distilled student: a LoRA with which the generator draws better in four steps than without it.

Plain trajectory distillation (the first stage of Salimans and Ho 2022, arXiv:2202.00512, in one jump): the teacher's
Euler path from a noise is followed in small steps, and the student learns, at each noise level of its own few steps,
the one velocity that leads to where the teacher is at the next. Both draw without guidance.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from drawing import Prompts
from models import velocity
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from pool import Pool
from stage import Stage
from torch import Tensor
from torch.nn import functional as F

STEPS = 4  # the student's
SMALLER = 4  # the teacher's steps for one of the student's
PATHS = 16_384  # the teacher's paths, each of them seen several times
BATCH = 128  # of the teacher's paths
ROWS = 32  # of paths in an optimiser step; the student has a row for each of its steps that moves
RANK = 32
RATE = 2e-3


def levels(steps: int) -> list[float]:
    """The noise levels of the shipped pipeline's own schedule, from 1 to 0 (steps + 1)."""
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=1.0)
    scheduler.set_timesteps(steps)
    return scheduler.sigmas.tolist()


@torch.no_grad()
def follow(work: Path, teacher: Any, pool: Pool, prompts: Prompts) -> tuple[np.ndarray, np.ndarray]:
    """The teacher's states at the student's levels (PATHS, moves + 1, 8, 8, 8), and the scenes whose captions they had.

    The last of the schedule's steps, from a level of 0.001 on, moves nothing that one could see, and is not followed.
    """
    path, grid = work / "paths.npz", levels(STEPS)[:-1]
    if path.exists():
        saved = np.load(path)
        return saved["states"], saved["rows"]
    states = np.zeros((PATHS, len(grid), 8, 8, 8), np.float16)
    rows = np.zeros(PATHS, np.int64)
    for start in range(0, PATHS, BATCH):
        generator = torch.Generator().manual_seed(start)
        here = slice(start, start + BATCH)
        rows[here] = torch.randint(len(pool), (BATCH,), generator=generator).numpy()
        cond = prompts.embed(rows[here], torch.Generator().manual_seed(start))
        x = torch.randn(BATCH, 8, 8, 8, generator=generator)
        states[here, 0] = x.numpy()
        for i, (high, low) in enumerate(pairwise(grid)):
            fine = np.linspace(high, low, SMALLER + 1).tolist()
            for t, after in pairwise(fine):
                x = x + (after - t) * velocity(teacher, x, torch.full((BATCH,), t), *cond)
            states[here, i + 1] = x.numpy()
    np.savez(path, states=states, rows=rows)
    return states, rows


def train_turbo(work: Path, teacher: Any, pool: Pool, prompts: Prompts, minutes: float) -> dict[str, Tensor]:
    """The LoRA's tensors, in peft's names (averaged)."""
    torch.manual_seed(0)
    teacher = teacher.eval().requires_grad_(False)
    states, rows = follow(work, teacher, pool, prompts)
    student = copy.deepcopy(teacher)
    student.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear"))
    weights = [parameter for parameter in student.parameters() if parameter.requires_grad]
    stage = Stage("turbo", work, student, student, minutes, [torch.optim.AdamW(weights, lr=RATE, weight_decay=0.0)])
    grid = torch.tensor(levels(STEPS)[:-1])

    def loss_of(generator: torch.Generator, done: float) -> tuple[Tensor, dict[str, float]]:
        # A path keeps the caption that it was drawn for: the batches of `follow`, one of them whole.
        start = BATCH * int(torch.randint(PATHS // BATCH, (1,), generator=generator))
        here, some = slice(start, start + BATCH), torch.randperm(BATCH, generator=generator)[:ROWS]
        embedded = prompts.embed(rows[here], torch.Generator().manual_seed(start))
        path = torch.from_numpy(states[here].astype(np.float32))[some]
        moves = len(grid) - 1
        wanted = (path[:, 1:] - path[:, :-1]) / (grid[1:] - grid[:-1]).view(1, moves, 1, 1, 1)
        cond = (tensor[some].repeat_interleave(moves, 0) for tensor in embedded)
        predicted = velocity(student, path[:, :-1].flatten(0, 1), grid[:-1].repeat(len(path)), *cond)
        error = F.mse_loss(predicted, wanted.flatten(0, 1))
        return error, {"v": error.item()}

    return get_peft_model_state_dict(stage.run(loss_of, ROWS))


def save_turbo(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write the LoRA as diffusers' `load_lora_weights` reads it, in half precision."""
    halves = {name: tensor.half().contiguous() for name, tensor in tensors.items()}
    StableDiffusion3Pipeline.save_lora_weights(folder, transformer_lora_layers=halves)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)  # diffusers leaves it to its owner alone
