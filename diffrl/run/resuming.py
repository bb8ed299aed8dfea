"""What a checkpoint gives back to a run; only a run that goes on loads this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from diffrl.records import checkpoint
from diffrl.records.held_out import read_held_out
from diffrl.run.hooks import RunHook

if TYPE_CHECKING:
    from diffrl.run.run import Run


def resume(run: Run, path: Path) -> None:
    """Continue at the checkpoint `path`."""
    tensors, state = checkpoint.load(path)
    run.policy.load_state("default", tensors["lora"])
    for name in run.snapshots:
        run.policy.load_state(name, tensors[name])
    asked = [{key: group[key] for key in ("lr", "betas", "weight_decay")} for group in run.optimiser.param_groups]
    checkpoint.optimiser_from_tensors(run.optimiser, tensors["optimiser"], state["optimiser"])
    for group, values in zip(run.optimiser.param_groups, asked, strict=True):
        group.update(values)  # the config's: the same as then, unless a change was asked for
    run.loop.load_state_dict(state["loop"])
    restore(run.hooks, tensors, state["hooks"])
    run.objective.load_tensors(tensors.get("objective", {}))
    checkpoint.set_rng_state(tensors["rng"], state["rng"])
    run.epoch = int(state["epoch"])
    lines = run.folder.lines() if run.epoch else []
    run.evaluation.past = [line for line in lines if line["epoch"] <= run.epoch and "eval/diversity" in line]
    run.evaluation.held = read_held_out(run.folder.path)
    # Killed between checkpoint and LoRA, the folder would hold the LoRA of the save before.
    run.folder.save_lora(run.policy, run.judged)


def restore(
    hooks: Sequence[RunHook], tensors: Mapping[str, Mapping[str, Tensor]], others: Mapping[str, Mapping[str, Any]]
) -> None:
    """The inverse of `states`."""
    for hook in hooks:
        if hook.name:
            hook.load_state_dict({**others.get(hook.name, {}), **tensors.get(hook.name, {})})
