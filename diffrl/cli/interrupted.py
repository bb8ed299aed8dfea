"""How a command ends before its work is done: by a signal, with an exit code of its own; as one process of several."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from diffrl.errors import say


def resumable(folder: str | Path, train: Callable[[], object]) -> int:
    """Run `train`, which writes the run `folder`; 0, or 75 if a signal ended it with everything saved."""
    from diffrl.run.interrupt import EXIT_CODE, Interrupted

    again = f"diffrl: continue with: diffrl train --resume {folder}"
    try:
        train()
    except Interrupted as ended:
        say(f"{again}  ({ended}; exit code {EXIT_CODE})")
        return EXIT_CODE
    except KeyboardInterrupt:
        if (Path(folder) / "checkpoints").is_dir():
            say(again)
        raise
    return 0


def leave_peers(code: int) -> None:
    """End this process where it is one of several that were joined: torch's threads may wait for a peer at exit."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
