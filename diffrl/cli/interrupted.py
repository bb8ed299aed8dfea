"""How a command that trains ends when a signal ends the run: how to go on, and an exit code of its own."""

from __future__ import annotations

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
