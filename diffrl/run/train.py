"""`diffrl train`: from a config to a run folder, with evaluation, checkpoints and an exact resume."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from diffrl.config import Config
from diffrl.errors import TrainingError, UserError, foreign, in_one_line
from diffrl.records.disk import DiskError
from diffrl.run.folder import RunFolder
from diffrl.run.interrupt import EXIT_CODE, Interrupted, Interrupts
from diffrl.run.logger import RunLogger
from diffrl.run.peers import Peers
from diffrl.run.run import Run
from diffrl.run.start import Start, find_start

__all__ = ["Run", "train"]


def train(
    config: Config,
    resume: Path | None = None,
    override: Sequence[str] = (),
    peers: Peers | None = None,
    instead: Callable[[Config, RunFolder, bool, Sequence[str], Peers], None] | None = None,
) -> None:
    """Run or resume a training; see the module's documentation and `diffrl train --help`.

    `override`: keys in which a resumed run may differ from what its checkpoint was trained with. `peers`: the
    other processes, once they have met (`diffrl.ranks.joined`). `instead`: what is done in the place of a training,
    of the config, the folder, whether its run goes on, `override` and the peers (`diffrl.prepare.dry_run.try_out`).

    Raises:
        UserError: for what the config asks and cannot be had, before anything is written; for a folder that another
            process writes to, that holds a run (without `resume`), or that has none that could go on (with it).
        RewardError, TrainingError: when the run cannot go on; the last checkpoint is intact.
        Interrupted: by a signal; the epoch that was broken off starts again with --resume.
    """
    folder = RunFolder(Path(config.run_dir) if resume is None else resume, os.environ.get("RANK", "0") == "0")
    peers = peers or Peers()
    peers.folder = folder
    with peers, Interrupts(at_once=True), peers.forward_signals():
        (instead or _train)(config, folder, resume is not None, override, peers)


def _train(config: Config, folder: RunFolder, resumed: bool, override: Sequence[str], peers: Peers) -> None:
    from diffrl.hub import commits

    with folder.held() as owner:
        # A new run's folder is looked at by the first process only: it may have begun to write while others start.
        look = folder.main or resumed
        start = find_start(config, folder.path, resumed, override) if look else Start()
        run = Run(config, folder, peers)
        start.compare(run.identity)
        with _left_intact(run):
            facts = {"device": str(run.policy.device), "processes": run.accelerator.num_processes, "hub": commits()}
            facts |= {"lower_is_better": sorted(run.lower), "evaluations": run.evaluation.facts}
            folder.begin(run.config, start, run.identity, **facts)
            run.prepare()
            with _interruptible(run, [] if owner is None else [owner.check]):
                with foreign(start.path or folder.path):
                    run.restore(start)
                with RunLogger(run) as logger, run.peers.attribute_errors():
                    run.train(logger)


@contextmanager
def _left_intact(run: Run) -> Iterator[None]:
    """On any exit: the newest checkpoint is on the disk, and the scoring thread is stopped."""
    code = 1
    try:
        yield
        code = 0
    except DiskError as error:
        raise DiskError(f"{error}; {run.folder.intact}") from error
    except SystemExit as error:  # of an objective, say: the command would end with its code, 0 as well, and no word
        what = in_one_line(error, place=True)
        raise TrainingError(f"an exit in the middle of the run: {what}; {run.folder.intact}") from error
    except (Interrupted, UserError) as error:
        code = EXIT_CODE if isinstance(error, Interrupted) else 2
        raise
    finally:
        run.folder.ended(code)
        run.close()


@contextmanager
def _interruptible(run: Run, checks: Sequence[Callable[[], None]]) -> Iterator[None]:
    """`checks` may raise, and signals and the other processes' endings do, wherever the run can be left."""
    with Interrupts() as interrupts, run.peers.forward_signals():
        every = [*checks, run.peers.check, interrupts.check]
        run.set_interrupt_check(lambda: [check() for check in every])  # type: ignore[arg-type,return-value]
        try:
            yield
        except (TrainingError, Interrupted) as error:
            run.leave(error)
            raise
