"""How a launcher, or what it left behind in the environment, says which process this is: whole, or not at all."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from diffrl.errors import UserError, in_one_line

if TYPE_CHECKING:
    from accelerate import Accelerator

log = logging.getLogger("diffrl")
# How many of a program srun or mpirun has started, and which of them this is. Processes of one training are torchrun's.
TASKS = {
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
}


@contextlib.contextmanager
def as_launched() -> Iterator[None]:
    """Around the start of accelerate: a UserError for what the environment asks of it and it has not."""
    check_launched()
    # On a CPU accelerate would count them as processes of this training.
    counts = {name: os.environ.pop(name) for name in TASKS if name in os.environ}
    try:
        yield
    except (ImportError, ValueError) as error:
        asked = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("ACCELERATE_")]
        text = f"accelerate cannot start as the environment asks ({', '.join(asked)})"
        raise UserError(f"{text}: {in_one_line(error)}") from error
    finally:
        os.environ.update(counts)


def join_processes(**settings: Any) -> Accelerator:
    """This process's accelerator, which knows the others that a launcher started. `settings`: of `Accelerator`."""
    import torch
    from accelerate import Accelerator

    with as_launched():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.accelerator.is_available():
            # Else each of torchrun's processes would take itself for the only one, and all would write one folder.
            os.environ.setdefault("ACCELERATE_USE_CPU", "true")
        return Accelerator(**settings)


def launched_with_fsdp() -> bool:
    """Did the launcher ask for FSDP? accelerate's own variable."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def check_launched() -> None:
    """UserError where a launcher's variables are there in part, or cannot be: a process would take itself for another,
    or wait for ones that never come."""
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    there = [name for name in names[:3] if name in os.environ]
    missing = [name for name in names if name not in os.environ]
    found = ", ".join(f"{name}={os.environ[name]}" for name in there)
    todo = f"unset {', '.join(there)}, or start with torchrun --nproc_per_node N -m diffrl ..."
    if there and missing and (os.environ.get("WORLD_SIZE", "1") != "1" or "WORLD_SIZE" in missing):
        raise UserError(f"the environment has {found} and not {', '.join(missing)}: {todo}")
    count, *ranks = (os.environ.get(name, default) for name, default in zip(names[:3], "100", strict=True))
    if not (count.isdecimal() and all(rank.isdecimal() and int(rank) < int(count) for rank in ranks)):
        raise UserError(f"the environment has {found}, and ranks count from 0 to WORLD_SIZE - 1: {todo}")


def check_launcher(accelerator: Any, precision: str) -> None:
    """Say so where the launcher asks for what the config decides here, or started fewer processes than it was asked."""
    from accelerate.utils import DynamoBackend

    wanted = _asked_processes() if accelerator.num_processes == 1 else 1
    if wanted > 1:
        text = "accelerate launch was asked for %d processes and has started one; this starts them: torchrun "
        log.warning(text + "--nproc_per_node %d -m diffrl ...", wanted, wanted)
    tasks = {os.environ.get(count, "1") for count, rank in TASKS.items() if os.environ.get(rank, "0") == "0"} - {"1"}
    if tasks and accelerator.num_processes == 1:
        text = "srun or mpirun has started this %s times, and each trains by itself; one training on all of them is "
        log.warning(text + "started by python -m diffrl.launch, see scripts/launch/slurm.sbatch", tasks.pop())
    asked = accelerator.mixed_precision
    if asked not in ("no", precision):
        log.warning("accelerate's mixed_precision %s is not used; optimise.precision is %s", asked, precision)
    dynamo = accelerator.state.dynamo_plugin.backend
    if dynamo != DynamoBackend.NO:
        log.warning("accelerate's dynamo_backend %s is not used; engine.compile=true compiles the blocks", dynamo.value)


def _asked_processes() -> int:
    """`--num_processes` of the `accelerate launch` that started this process; 1 without. It tells no other process."""
    import psutil

    try:
        parent = psutil.Process().parent()
        words = parent.cmdline() if parent is not None else []
    except psutil.Error:
        return 1
    if "launch" not in words or not any("accelerate" in word for word in words):
        return 1
    text = " ".join(words).partition(" launch ")[2]
    found = re.search(r"--num[_-]processes[= ](\d+)", text)
    return int(found[1]) if found else 1
