"""What each method gains and loses at equal cost: `python -m experiments.league run|check|cost|report`, in a checkout.

Exit codes as of `diffrl`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffrl.cli.arguments import whole_number
from diffrl.cli.commands import subcommand
from diffrl.cli.comparing import asked_for
from diffrl.cli.main import Parser, main
from diffrl.errors import UserError, say
from diffrl.records.disk import check_writable
from experiments import command

if TYPE_CHECKING:
    from experiments.league.checks import Verdict
    from experiments.league.experiments import Experiment
    from experiments.league.plan import League

OUT, RUNS = Path("assets/results"), Path("runs/league")
PROGRAM = "python -m experiments.league"


def commands() -> Parser:
    """The parser of all commands."""
    text = "What does each method gain, and what does it lose, at equal cost?"
    parser = Parser(prog=PROGRAM, description=text, allow_abbrev=False)
    actions = parser.add_subparsers(metavar="run|check|cost|report", required=True)
    _add_run(actions)
    _add_check_and_cost(actions)
    _add_report(actions)
    return parser


def _add_run(actions: Any) -> None:
    run = subcommand(
        actions,
        "run",
        _run,
        "train and judge entries on tracks, a few at a time; the same command goes on",
        f"{PROGRAM} run --list",
        f"{PROGRAM} run --tracks preference --methods nft,crd --seeds 3 --jobs 2",
        f"{PROGRAM} run --others my_methods --methods mine --out mine",
    )
    _add_chosen(run)
    text = "how many seeds, 0 to N - 1 (default 5); a finished result keeps its seeds"
    run.add_argument("--seeds", type=whole_number(1, 10**4), default=5, metavar="N", help=text)
    text = "seeds at a time, one CPU thread each (default 1)"
    run.add_argument("--jobs", type=whole_number(1, 1024), default=1, metavar="N", help=text)
    run.add_argument("--list", action="store_true", help="show entries, their state and the minutes left; run none")


def _add_check_and_cost(actions: Any) -> None:
    check = subcommand(
        actions,
        "check",
        _check,
        "was a result trained on its test, or is its gold what was trained?",
        f"{PROGRAM} check assets/results/league/preference/nft.json",
        f"{PROGRAM} check --entry clip/mine --others my_methods",
    )
    text = "a result's file; the LoRAs are those in --runs, without which the fresh prompts are left out"
    check.add_argument("result", nargs="?", type=Path, metavar="RESULT.json", help=text)
    check.add_argument("--entry", metavar="TRACK/NAME", help="an entry, before it is trained")
    _add_places(check)

    cost = subcommand(
        actions,
        "cost",
        _cost,
        "measure an image's forwards and seconds: two epochs of each entry, one thread",
        f"{PROGRAM} cost --tracks preference",
    )
    _add_chosen(cost)


def _add_report(actions: Any) -> None:
    examples = f"{PROGRAM} report --out league.html", f"{PROGRAM} report mine/league.json --out m.html --table m.tex"
    report = subcommand(actions, "report", _report, "draw the league's page, write its table", *examples)
    default = OUT / "league.json"
    text = f"what `run` wrote (default {default})"
    report.add_argument("league", nargs="?", type=Path, default=default, metavar="LEAGUE.json", help=text)
    report.add_argument("--out", type=Path, metavar="FILE.html", help="the page to write")
    text = "the table over all results: Markdown, or LaTeX (booktabs)"
    report.add_argument("--table", type=Path, metavar="FILE.md|FILE.tex", help=text)


def _add_chosen(command: argparse.ArgumentParser) -> None:
    command.add_argument("--methods", type=_names, default=[], metavar="A,B", help="entries (default: all)")
    command.add_argument("--tracks", type=_names, default=[], metavar="A,B", help="tracks (default: all)")
    text = f"results go to DIR/league, the summary to DIR/league.json (default {OUT})"
    command.add_argument("--out", type=Path, default=OUT, metavar="DIR", help=text)
    _add_places(command)


def _add_places(command: argparse.ArgumentParser) -> None:
    command.add_argument("--runs", type=Path, default=RUNS, metavar="DIR", help=f"where it trains (default {RUNS})")
    text = "other people's entries: folders with entry.yaml, a config and plugins (default: none)"
    command.add_argument("--others", type=Path, metavar="FOLDER", help=text)
    text = "tracks.yaml and entries.yaml of your own (default: experiments/league)"
    command.add_argument("--league", type=Path, metavar="FOLDER", help=text)


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _opened(arguments: argparse.Namespace) -> League:
    from experiments.league.plan import read_league

    for option in ("others", "league"):
        folder = getattr(arguments, option)
        if folder is not None and not folder.is_dir():
            raise UserError(f"--{option}: no folder {folder}")
    return read_league(arguments.league, arguments.others)


def _run(arguments: argparse.Namespace, rest: list[str]) -> int:
    league = _opened(arguments)
    chosen = league.experiments(arguments.out, arguments.methods, arguments.tracks, arguments.seeds)
    from experiments.league.running import run_all, show

    if arguments.list:  # shows only, whatever stands beside it: a look must not start hours of work
        show(chosen)
        return 0
    check_writable(arguments.out, "--out")
    check_writable(arguments.runs, "--runs")
    from diffrl.run.interrupt import EXIT_CODE, Interrupted
    from experiments.league.summary import summarise

    every, started = league.experiments(arguments.out, seeds=arguments.seeds), command()

    def command_of(one: Experiment) -> str:
        track, _, name = one.name.partition("/")
        return f"{PROGRAM} run --tracks {track} --methods {name}"

    def after() -> None:
        summarise(league, every, arguments.out, started)

    try:
        failed = run_all(chosen, arguments.jobs, arguments.runs.resolve(), command_of, after)
    except Interrupted as ended:
        say(f"diffrl: stopped; the same command goes on  ({ended}; exit code {EXIT_CODE})")
        return EXIT_CODE
    after()
    show(chosen)
    print(f"summary: {arguments.out / 'league.json'}")
    return 1 if failed else 0


def _check(arguments: argparse.Namespace, rest: list[str]) -> int:
    league = _opened(arguments)
    if (arguments.result is None) == (arguments.entry is None):
        raise UserError("league check: name a RESULT.json or --entry TRACK/NAME")
    from experiments.league import checking
    from experiments.league.experiments import read_result

    runs = arguments.runs.resolve()
    if arguments.entry is not None:
        verdicts = {"before training": checking.of_entry(league, arguments.entry, runs)}
    else:
        read_result(arguments.result)
        verdicts = checking.of_result(league, arguments.result, runs)
    for name, verdict in verdicts.items():
        _tell(name, verdict)
    return 0 if all(verdict.passed for verdict in verdicts.values()) else 1


def _tell(name: str, verdict: Verdict) -> None:
    print(f"{name}: {'nothing was found' if verdict.passed else 'CAUGHT'}")
    for line in verdict.caught:
        print(f"  {line}")
    for key, value in verdict.facts.get("correlation", {}).items():
        print(f"  correlation of {key} inside groups: {'none' if value is None else f'{value:.2f}'}")
    for key, row in verdict.facts.get("fresh", {}).items():
        p = "" if row["p"] is None else f", p = {row['p']:.2g}"
        print(f"  {key}: gain {row['known']:+.4f} on known, {row['fresh']:+.4f} on fresh prompts and noise{p}")
    if note := verdict.facts.get("left_out"):
        print(f"  {note}")


def _cost(arguments: argparse.Namespace, rest: list[str]) -> int:
    league = _opened(arguments)
    chosen = league.experiments(arguments.out, arguments.methods, arguments.tracks)
    every = league.experiments(arguments.out)
    check_writable(arguments.out, "--out")
    from diffrl.run.interrupt import EXIT_CODE, Interrupted
    from experiments.league.cost import measure_all
    from experiments.league.summary import summarise

    started = command()
    try:
        failed = measure_all(chosen, arguments.out, started)
    except Interrupted as ended:
        say(f"diffrl: stopped; the same command goes on  ({ended}; exit code {EXIT_CODE})")
        return EXIT_CODE
    summarise(league, every, arguments.out, started)
    print(f"costs: {arguments.out / 'league' / 'cost.json'}; summary: {arguments.out / 'league.json'}")
    return 1 if failed else 0


def _report(arguments: argparse.Namespace, rest: list[str]) -> int:
    out, table = asked_for("league report", arguments.out, arguments.table)
    for path, option in ((out, "--out"), (table, "--table")):
        if path is not None:
            check_writable(path.parent, option)
    from experiments.league.page import write_league, write_league_table

    if out is not None:
        print(f"page: {write_league(arguments.league, out)}")
    if table is not None:
        print(f"table: {write_league_table(arguments.league, table)}")
    return 0


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    return main(argv, commands)


if __name__ == "__main__":
    sys.exit(run())
