"""How the processes of a run meet, within minutes (see `diffrl.ranks.joined`), and part."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate.utils import InitProcessGroupKwargs

from diffrl.errors import UserError, in_one_line
from diffrl.launched import join_processes, launched_with_fsdp
from diffrl.ranks.heartbeat import Heartbeat
from diffrl.ranks.hello import Hello
from diffrl.run.processes import WAITING, check_agreement, set_timeout
from diffrl.version import __version__

LIMIT = "DIFFRL_JOINING"  # environment variable: seconds in which all processes have to meet
SECONDS = 300.0  # until the slowest machine has read Python's packages from its disk


def join(hello: Hello) -> Heartbeat:
    """The heartbeat between this process and the others. UserError: see `diffrl.ranks.joined`."""
    asked = os.environ.get(LIMIT, str(SECONDS))
    try:
        limit = timedelta(seconds=float(asked))
    except (ValueError, OverflowError):
        raise UserError(f'{LIMIT}: expected seconds, got "{asked}"') from None
    heartbeat = Heartbeat()
    try:
        heartbeat.join(join_processes(kwargs_handlers=[InitProcessGroupKwargs(timeout=limit)]))
    except (RuntimeError, OSError) as error:  # torch.distributed's errors are RuntimeErrors
        rank, count, *where = (os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
        text = f"rank {rank} of {count} has not met all others at {':'.join(map(str, where))} within {asked} s"
        text += f"{hello.missing()}; see what the other machines say ({in_one_line(error, most=160)})"
        raise UserError(text) from error
    hello.met()
    assert heartbeat.accelerator is not None
    engine = "FSDP" if launched_with_fsdp() else "not FSDP"
    alike = {"diffrl": __version__, "torch": torch.__version__, "the launcher's engine": engine}
    with heartbeat.starting():
        hint = "install the same versions and start the same command on every machine"
        check_agreement(heartbeat.accelerator, alike, hint)
    set_timeout(WAITING)
    return heartbeat


@contextlib.contextmanager
def parted_at_exit() -> Iterator[None]:
    """Around a run in a script of one's own: where it ends in order, the group of its processes ends before the
    interpreter does, which aborts now and then where one still lives. After an error nothing is done: what waits for a
    peer then would wait at the exit, too. The command line leaves by itself (`diffrl.cli.interrupted.leave_peers`).
    """
    atexit.unregister(_part)
    yield
    if dist.is_initialized() and dist.get_world_size() > 1:
        atexit.register(_part)


def _part() -> None:
    if dist.is_initialized():  # the script may have ended it
        dist.destroy_process_group()
