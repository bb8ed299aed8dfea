"""The commands for runs that are there: `report` writes one's page again, `watch` serves a live one, `compare` puts
several side by side; and `sweep`, which makes several."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from diffrl.cli.arguments import configs_of, need
from diffrl.errors import UserError, nearest, say
from diffrl.records.disk import check_writable
from diffrl.resources import file_of_run
from diffrl.tools.outputs import out_file

if TYPE_CHECKING:
    from diffrl.sweep.plan import Member

SUFFIXES = (".md", ".tex")


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
    from diffrl.report.compare import text_of, write_comparison, write_table

    if out is not None:
        write_comparison(arguments.runs, out)
        print(f"report: {out}")
    if table is not None:
        write_table(arguments.runs, table)
        print(f"table: {table}")
    if not asked:
        print(text_of(arguments.runs))
    return 0


def watch(arguments: argparse.Namespace, rest: list[str]) -> int:
    run: Path = arguments.run
    if not run.is_dir():
        folders = [folder.name for folder in run.parent.iterdir() if folder.is_dir()] if run.parent.is_dir() else []
        raise UserError(f'watch: no folder "{run}"{nearest(run.name, folders)}')
    if not any((run / name).is_file() for name in ("config.yaml", "metrics.jsonl")):
        raise UserError(f'watch: "{run}" is not a run\'s folder: it has neither config.yaml nor metrics.jsonl')
    need("watch", "serve", "fastapi", "uvicorn")
    from diffrl.serving.client import find_token
    from diffrl.watch.server import Settings
    from diffrl.watch.server import watch as serve

    token = None if arguments.token_file is None else find_token(arguments.token_file, trusted=True)

    def ready(url: str) -> None:
        guard = "asks for the token" if token is not None else "this machine alone"
        print(f"{run} on {url} ({guard}); Ctrl-C ends it", flush=True)

    serve(Settings(run, arguments.host, token), arguments.port, ready)
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
