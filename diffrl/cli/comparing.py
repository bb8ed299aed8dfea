"""The commands for runs that are there: `report` writes one's page again, `compare` puts several side by side; and
`sweep`, which makes several."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffrl.cli.arguments import configs_of, need, whole_number
from diffrl.errors import UserError, say
from diffrl.records.disk import check_writable
from diffrl.records.outputs import out_file
from diffrl.resources import file_of_run

if TYPE_CHECKING:
    from diffrl.sweep.plan import Member

SUFFIXES = (".md", ".tex")


def add(add: Callable[..., Any]) -> None:
    """Register the commands with the command line's `add`."""
    command = add(
        "report",
        report,
        "write a run's page again; with --divgen also what DivGenBench says of its diversity",
        "diffrl report runs/nft --divgen",
    )
    command.add_argument("run", metavar="RUN_DIR", type=Path, help="the folder of a run")
    text = "draw prompts of DivGenBench with the base model and with the LoRA, as the run evaluates, and compare them"
    command.add_argument("--divgen", action="store_true", help=text)
    text = "with --divgen: prompts of each of its four dimensions (default 16)"
    command.add_argument("--limit", type=whole_number(1), default=16, metavar="N", help=text)
    text = "with --divgen: images per prompt (default 4)"
    command.add_argument("--per-prompt", type=whole_number(2), default=4, metavar="M", help=text)

    command = add(
        "compare",
        compare,
        "compare runs: curves on one page; seeds as a mean with its interval, and tests",
        "diffrl compare runs/a runs/b",
        "diffrl compare runs/a runs/b --out ab.html",
        "diffrl compare runs/sweep --out sweep.html --table sweep.tex",
    )
    text = "folders of runs, or of sweeps; runs that differ by their seed only become one group"
    command.add_argument("runs", nargs="+", metavar="RUN_DIR|SWEEP", type=Path, help=text)
    command.add_argument("--out", type=Path, metavar="FILE.html", help="the page to write (default: a table here)")
    text = "a table of the last values and their differences: Markdown, or LaTeX (booktabs)"
    command.add_argument("--table", type=Path, metavar="FILE.md|FILE.tex", help=text)

    command = add(
        "sweep",
        sweep,
        "train configs with several seeds and variations, a few at a time; go on after a kill",
        "diffrl sweep playground/nft playground/grpo --seeds 5 --jobs 2 --out runs/bases",
        "diffrl sweep my.yaml epochs=20 --vary nft.beta=0.1,1.0 --out runs/beta",
        words_anywhere=True,
    )
    usage = "diffrl sweep CONFIG [CONFIG ...] [section.key=value ...] [--seeds N]\n"
    usage += "                    [--vary section.key=A,B ...] [--jobs N]\n"
    usage += "                    [--slurm KEY=VALUE,...] --out FOLDER"
    command.usage = usage
    text = "YAML files or shipped configs, then overrides for all of them; the same command continues where it stopped"
    command.add_argument("words", nargs="*", metavar="CONFIG [section.key=value ...]", help=text)
    text = "how many seeds, 0 to N - 1 (default 5)"
    command.add_argument("--seeds", type=whole_number(1, 10**4), default=5, metavar="N", help=text)
    text = "a key and its values; may be repeated: every combination is run"
    command.add_argument("--vary", action="append", default=[], metavar="section.key=A,B", help=text)
    text = (
        "runs at a time, one CPU thread each, so that N changes no result; several GPUs are shared out "
        "(default: one run, on all threads)"
    )
    command.add_argument("--jobs", type=whole_number(1, 1024), metavar="N", help=text)
    text = "run them as jobs of Slurm, in an array: partition=gpu,gpus_per_node=1,timeout_min=600 (extra: sweep)"
    command.add_argument("--slurm", metavar="KEY=VALUE,...", help=text)
    command.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the runs are")


def report(arguments: argparse.Namespace, rest: list[str]) -> int:
    run: Path = arguments.run
    file_of_run(run, "metrics.jsonl", "report")
    from diffrl.report import write_report

    if arguments.divgen:
        from diffrl.report.divgen import report_of_run

        if (page := report_of_run(run, arguments.limit, arguments.per_prompt)) is None:
            return 0  # another process writes
        print(f"DivGenBench: {page}")
    print(f"report: {write_report(run)}")
    return 0


def compare(arguments: argparse.Namespace, rest: list[str]) -> int:
    asked = arguments.out is not None or arguments.table is not None
    out, table = asked_for("compare", arguments.out, arguments.table) if asked else (None, None)
    for folder in arguments.runs:
        if not any(path for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}metrics.jsonl")):
            file_of_run(folder, "metrics.jsonl", "compare")
    if len(arguments.runs) == 1 and (arguments.runs[0] / "metrics.jsonl").is_file():
        raise UserError("compare: name at least two runs")
    if out is not None:
        from diffrl.report.compare import write_comparison

        write_comparison(arguments.runs, out)
        print(f"report: {out}")
    if table is not None:
        from diffrl.report.compare import write_table

        write_table(arguments.runs, table)
        print(f"table: {table}")
    if not asked:
        from diffrl.report.compare import text_of

        print(text_of(arguments.runs))
    return 0


def asked_for(command: str, out: Path | None, table: Path | None) -> tuple[Path | None, Path | None]:
    """The page and the table that a command is to write, at least one of them; UserError for what is no such file."""
    if out is None and table is None:
        raise UserError(f"{command}: name what to write: --out FILE.html or --table FILE.md|FILE.tex")
    if table is not None and table.suffix not in SUFFIXES:
        raise UserError(f'--table: "{table}": its name must end with {" or ".join(SUFFIXES)}')
    name = command.replace(" ", "-")
    return (
        None if out is None else out_file(out, "--out", f"{name}.html"),
        None if table is None else out_file(table, "--table", f"{name}{table.suffix}"),
    )


def sweep(arguments: argparse.Namespace, rest: list[str]) -> int:
    configs, overrides = configs_of([*arguments.words, *rest])
    if not configs:
        raise UserError("sweep: no CONFIG; name YAML files or shipped configs such as playground/nft")
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise UserError("sweep: it starts its runs itself; call it without accelerate launch")
    check_writable(arguments.out, "--out")
    from diffrl.sweep.plan import plan, read_axis, settle

    axes = dict(map(read_axis, arguments.vary))
    if len(axes) < len(arguments.vary):
        raise UserError("--vary: a key is given twice; write all its values behind one --vary")
    members = plan(configs, overrides, axes, arguments.seeds, arguments.out)
    for line in settle(members):
        print(line)
    return _run(members, arguments)


def _run(members: list[Member], arguments: argparse.Namespace) -> int:
    """Run what is left of a sweep; 0, 1 where runs failed, 75 after a signal."""
    from diffrl.run.interrupt import EXIT_CODE, Interrupted
    from diffrl.sweep.jobs import run_jobs
    from diffrl.sweep.results import conclude

    waiting = [member for member in members if not member.finished]
    if done := len(members) - len(waiting):
        print(f"{done} of {len(members)} runs are done already")
    jobs, one_thread = arguments.jobs or 1, arguments.jobs is not None
    work = [member.job for member in waiting]
    try:
        if arguments.slurm is None:
            failed = run_jobs(work, jobs, one_thread)
        else:
            from diffrl.sweep.cluster import run_on_slurm

            failed = run_on_slurm(work, jobs, _slurm(arguments.slurm), arguments.out)
    except Interrupted as ended:
        say(f"diffrl: stopped; the same command continues  ({ended}; exit code {EXIT_CODE})")
        return EXIT_CODE
    command = shlex.join(["diffrl", *sys.argv[1:]])
    print(conclude(members, {job.name for job in failed}, command, arguments.out))
    return 1 if failed else 0


def _slurm(text: str) -> dict[str, str]:
    """submitit's options in `KEY=VALUE,...`; UserError for another form, and without submitit."""
    pairs = dict(pair.partition("=")[::2] for pair in text.split(","))
    if not all(key.isidentifier() and value for key, value in pairs.items()):
        raise UserError(f'--slurm: "{text}": write KEY=VALUE,..., for example partition=gpu,gpus_per_node=1')
    need("sweep", "sweep", "submitit")
    return pairs
