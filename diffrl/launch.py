"""`python -m diffrl.launch OPTIONS -m diffrl ...`: torchrun, or with `accelerate launch` as its first words that.

It ends with the exit code of the process that failed first (2: bad input, 75: stopped by a signal), whose one line is
the last that one reads: the launchers themselves end with 1, and 30 lines of traceback of their own.
"""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Sequence

from diffrl.errors import in_one_line, say


def main(words: Sequence[str] | None = None) -> int:
    """Start the processes, and wait for them; the exit code."""
    words = list(sys.argv[1:] if words is None else words)
    print("diffrl: starting the processes ...", flush=True)
    try:
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
    except ModuleNotFoundError as error:
        say(f"diffrl: error: {sys.executable} has no {error.name}; activate the environment that diffrl is in")
        return 2

    try:
        if words[:1] == ["accelerate"]:
            from accelerate.commands.accelerate_cli import main as accelerate

            sys.argv = words
            accelerate()
        else:
            from torch.distributed.run import main as torchrun

            torchrun(words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            say(f"diffrl: rank {rank} was ended by {failure.signal_name()}")
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except (RendezvousError, DistError) as error:
        reason = in_one_line(error.__cause__ or error)
        if _met(error):  # the processes have said why, on each machine
            say(f"diffrl: another machine's launcher has ended ({reason})")
        else:
            text = f"the machines did not meet: {reason}; MASTER=ADDRESS names the first one to scripts/launch"
            say(f"diffrl: error: {text}")
        return 1
    except SignalException as error:  # the processes have had it, too, and have ended
        return 128 + int(error.sigval)
    except subprocess.CalledProcessError as error:
        return error.returncode if error.returncode > 0 else 128 - error.returncode
    return 0


def _met(error: BaseException) -> bool:
    """Whether torch's agent had started the processes, which it does when all machines are there."""
    names = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    return "_invoke_run" in names and "_initialize_workers" not in names


if __name__ == "__main__":
    sys.exit(main())
