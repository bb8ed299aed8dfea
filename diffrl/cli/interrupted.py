"""How a command ends before its work is done: by a signal, with an exit code of its own; as one process of several."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from diffrl.errors import say


def loading() -> None:
    """Say that it has begun, where what follows imports torch and reads a model: half a minute without a word."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it has no reader: the run will say so
            print("diffrl: loading ...", flush=True)


def resumable(folder: Callable[[], str | None], train: Callable[[], object]) -> int:
    """Run `train`, which writes the run `folder()`, None as long as that is not known; 0, or 75 if a signal ended it
    with everything saved."""
    from diffrl.run.interrupt import EXIT_CODE, Interrupted

    try:
        train()
    except Interrupted as ended:
        from diffrl.ranks.heartbeat import say_stopped

        say_stopped(Path(place) if (place := folder()) else None, ended)
        return EXIT_CODE
    except KeyboardInterrupt:
        if (place := folder()) and (Path(place) / "checkpoints").is_dir():
            say(f"diffrl: continue with: diffrl train --resume {place}")
        raise
    return 0


def leave_peers(code: int, error: Exception | None = None) -> None:
    """End this process where it is one of several that were joined; else do nothing. `error`: to show.

    Not as the interpreter ends: it would destroy torch's process group, whose threads still run, and that aborts now
    and then ("terminate called without an active exception"), or waits for a peer for ever, as
    `destroy_process_group` may.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        if error is not None:
            traceback.print_exception(error)
        if code == 0:
            atexit._run_exitfuncs()  # those that Python code has asked for
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
