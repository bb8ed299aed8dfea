"""The command line: reads and checks what it is given before anything heavy is imported.

Exit codes: 0 success; 1 a run that could not go on, or a check that failed; 2 bad input; 130 interrupted. Expected
errors are one line on stderr; with DIFFRL_DEBUG=1 they come with their traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from diffrl.cli.commands import add_commands
from diffrl.cli.interrupted import leave_peers, loading, resumable
from diffrl.errors import UserError, check_process, discard, first_of_machine, nearest, say
from diffrl.ranks import joined
from diffrl.version import __version__

# The files of commands in `tables`, in the order of the help.
TABLES = ("train", "drawing", "runs", "rewards", "parts", "recipes", "divgen", "sharing", "shell")
# Commands whose processes, where a launcher started several, join one another.
JOINING = {"demo", "train", "sample", "evaluate", "search", "refine", "divgen", "report"}
JOINING |= {"draw-set", "d2align", "bench", "sweep"}

# Errors that say what is to be done, raised by modules that import torch: looked up, not imported.
FAILURES = (
    ("diffrl.rewards.protocol", "RewardError", ""),
    ("diffrl.records.saving", "CheckpointError", ""),
    ("diffrl.errors", "TrainingError", ""),
    ("diffrl.records.disk", "DiskError", ""),
    ("diffrl.records.lock", "LockLostError", ""),
    ("diffrl.rollout", "SamplingError", ""),
    ("torch", "OutOfMemoryError", "; lower rollout.batch_size or optimise.micro_batch"),
)


def main(argv: Sequence[str] | None = None, parser: Callable[[], Parser] | None = None) -> int:
    """Run one command; returns the exit code. `parser`: of other commands than diffrl's own."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell (`>&-`)
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (for the process's life)
        elif hasattr(stream := getattr(sys, name), "reconfigure"):  # a name's letters that this encoding has not
            with contextlib.suppress(OSError, ValueError):  # closed, or another file by now
                stream.reconfigure(errors="backslashreplace")
    if os.environ.get("COLUMNS") == "0":  # of a terminal without a size: rich would print nothing at all
        del os.environ["COLUMNS"]
    try:
        with _shown_warnings():
            words = [_at_home(_readable(word)) for word in (sys.argv[1:] if argv is None else argv)]
            code = _run(words, parser() if parser else _parser(next(iter(words), "")))
        sys.stdout.flush()  # here, so that a closed pipe is noticed here
        leave_peers(code)
        return code
    except KeyboardInterrupt:
        say("diffrl: interrupted")
        leave_peers(130)
        return 130
    except BrokenPipeError:  # the reader (head, less) has seen enough; Python flushes once more at exit
        discard(sys.stdout)
        return 1
    except Exception as error:
        code, text = _explain(error)
        if code == 0 or os.environ.get("DIFFRL_DEBUG") == "1":
            leave_peers(1, error)
            raise
        # Bad input is the same on every process of a machine, and machines may have different files: the first process
        # of each says so. Other failures may be one process's alone.
        if not getattr(error, "quiet", False) and (code != 2 or first_of_machine()):
            say(f"diffrl: error: {' '.join(text.split())}")
        leave_peers(code)
        return code


def _readable(word: str) -> str:
    """UserError for letters that this process cannot read, nor find a file by: those of a locale without UTF-8."""
    if sys.getfilesystemencoding() != "utf-8" and re.search("[\ud800-\udfff]", word):
        shown = os.fsencode(word).decode("utf-8", "replace")
        raise UserError(f'"{shown}": the locale (LC_ALL, LANG) has no such letters; set PYTHONUTF8=1')
    return word


def _at_home(word: str) -> str:
    """`~` as the home folder where a shell leaves it: behind an equals sign, or in a program's list of words."""
    name, equals, path = word.partition("=") if re.match(r"[\w.-]+=~(/|$)", word) else ("", "", word)
    return f"{name}{equals}{os.path.expanduser(path)}" if path == "~" or path.startswith("~/") else word


def _explain(error: Exception) -> tuple[int, str]:
    """(exit code, message) of an expected error; exit code 0 for an unexpected one."""
    for module, name, hint in FAILURES:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(error, kind):
            return 1, f"{error}{hint}"
    if isinstance(error, UserError):
        return 2, str(error)
    if isinstance(error, OSError):
        code = 2 if error.errno in (errno.ENAMETOOLONG, errno.ELOOP) else 1  # a name that was given
        return code, f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    return 0, ""


def _run(argv: list[str], parser: Parser) -> int:
    if argv[:1] == ["lab"]:
        from diffrl.cli.grouped import others

        argv = argv[1:]
        if not argv or argv[0] in ("-h", "--help"):
            print(others(parser), end="")
            return 0
    if not argv:
        parser.print_help()
        return 0
    options = ("-h", "--help", "--version")
    if argv[0].startswith("-") and argv[0] not in options:
        raise UserError(f'unknown option "{argv[0]}"{nearest(argv[0], options)}')
    try:
        arguments, rest = parser.parse_known_args(argv)
    except SystemExit as done:  # a help text was printed
        return int(done.code or 0)
    for word in rest:
        if word.startswith("-") or not arguments.words_anywhere:
            from diffrl.cli.arguments import refuse

            refuse(word, arguments.parser)
    check_process()
    if argv[0] in JOINING:
        from diffrl.launched import check_launched

        check_launched()
    return arguments.handler(arguments, rest)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are UserErrors, with the nearest command."""

    def __init__(self, *words: Any, **given: Any) -> None:
        super().__init__(*words, **given)
        self.register("type", Path, _path)

    def format_help(self) -> str:
        if self.prog != "diffrl":
            return super().format_help()
        from diffrl.cli.grouped import first

        return first(self)

    def error(self, message: str) -> NoReturn:
        raise UserError(f'{message} (see "{self.prog} --help")')

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """A command that is none is told with the nearest one."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            given = " ".join([*self.prog.split(" ")[1:], value])
            raise UserError(f'unknown command "{given}"{nearest(value, action.choices)}')
        super()._check_value(action, value)


def _path(text: str) -> Path:
    """A path on the command line; an empty word, such as a variable of the shell that is not set, would be `.`."""
    if not text:
        raise argparse.ArgumentTypeError("an empty name; the folder that one is in is written .")
    return Path(text)


def _parser(first: str = "") -> Parser:
    parser = Parser(
        prog="diffrl",
        description="Reinforcement learning for diffusion and flow text-to-image models.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"diffrl {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    for name in TABLES[:1] if first == "train" else TABLES:  # a training loads nothing of the other commands
        add_commands(commands, name, alone=first == "train")
    return parser


def train(arguments: argparse.Namespace, rest: list[str]) -> int:
    words = [*arguments.words, *rest]
    if arguments.help_config:
        from diffrl.cli.recipes import print_keys

        return print_keys(words)
    given = words.pop(0) if words and ("=" not in words[0] or Path(words[0]).is_file()) else None
    if given is None and (late := [word for word in words if "=" not in word]):
        raise UserError(f"train: the config comes first: diffrl train {late[0]} {words[0]}")
    if watched := sys.stdout.isatty():
        loading()
    import psutil

    from diffrl.config import Config
    from diffrl.prepare import prepare

    config: Config | None = None

    def run() -> None:
        nonlocal config
        with (peers := joined()).starting():
            peers.began = time.monotonic() - time.time() + psutil.Process().create_time()
            config, resume = prepare(given, words, resume=arguments.resume, outside="command line")
            if not watched:  # a file has a mistake's one line alone
                loading()
            from diffrl.run.train import train as run_training

            if arguments.dry_run:
                from diffrl.prepare.dry_run import try_out
        instead = try_out if arguments.dry_run else None
        run_training(config, resume, override=arguments.override, peers=peers, instead=instead)

    return resumable(lambda: None if config is None else config.run_dir, run)


class _ToStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(f"diffrl: {record.levelname.lower()}: {record.getMessage()}")


@contextlib.contextmanager
def _shown_warnings() -> Iterator[None]:
    """What diffrl logs goes to stderr once: libraries give the root logger a handler of their own."""
    logger, handler = logging.getLogger("diffrl"), _ToStderr()
    # A reward's file that lets every logger speak (`logging.basicConfig(level=DEBUG)`) means its own, not each chunk of
    # every PNG and each font of every report; nor, of a handler that a library gives, matplotlib's new list of fonts.
    for name in ("PIL", "matplotlib", "filelock"):
        if logging.getLogger(name).level == logging.NOTSET:
            logging.getLogger(name).setLevel(logging.WARNING)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
