"""Train a config with several seeds and write what it did to the held-out prompts, as one JSON.

    python -m experiments.reproduce configs/playground/nft.yaml --seeds 0 1 2 --out assets/results/nft.json
    python -m experiments.reproduce --list                       # the experiments of listed.yaml, and their state
    python -m experiments.reproduce --all --jobs 2               # all that has not been run as it stands now
    python -m experiments.reproduce --all --only nft gardo/clip  # some of them, by the beginning of their names

Every run is resumable: started again, finished runs are only evaluated and broken ones continue. `--all` goes on where
it was stopped; a seed whose config and prompts are those of its result is not run again. How a seed is judged, and what
a result has: `experiments/league`. One in assets/results is written into the pages' tables, too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch

from diffrl.config import load_config
from diffrl.run.interrupt import EXIT_CODE, Interrupted
from experiments import command
from experiments.league.judge import Task
from experiments.league.results import result_of, write
from experiments.league.running import run_all, show
from experiments.league.seed import one_seed
from experiments.listed import RESULTS, ROOT, experiments

PROGRAM = "python -m experiments.reproduce"


def tabulate() -> None:
    """Write the pages' tables as the results are now."""
    subprocess.run([sys.executable, "-m", "experiments.figures.tables"], cwd=ROOT, check=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--prompts", type=int, default=256, help="test prompts of the final judgement")
    parser.add_argument("--per-prompt", type=int, default=4)
    parser.add_argument("--runs", type=Path, default=Path("runs/reproduce"))
    parser.add_argument("--tag", default="", help="added to the run folders' names, for variants")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's default)")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--all", action="store_true", help="run the experiments of experiments/listed.yaml")
    parser.add_argument("--list", action="store_true", help="show them, their state and the minutes left")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="NAME", help="with --all or --list: names' beginnings"
    )
    parser.add_argument("--jobs", type=int, default=1, help="with --all: seeds at a time, one thread each")
    args = parser.parse_intermixed_args()  # keys may stand behind options
    if not (args.all or args.list) and (args.config is None or args.out is None):
        parser.error("give a config and --out, or --all or --list")
    return args


def main() -> None:
    args = arguments()
    if args.all or args.list:
        chosen = [e for e in experiments() if e.name.startswith(tuple(args.only))]
        if not chosen:
            raise SystemExit(f"reproduce: no experiment is called {' or '.join(args.only)} (--list shows them)")
        if args.list:  # shows only, whatever stands beside it: a look must not start hours of work
            show(chosen)
            return
        try:
            runs = args.runs.resolve()
            failed = run_all(chosen, args.jobs, runs, lambda e: f"{PROGRAM} --all --only {e.name}")
        except Interrupted as ended:
            print(f"reproduce: {ended}; the same command goes on", file=sys.stderr)
            raise SystemExit(EXIT_CODE) from ended
        tabulate()
        if failed:
            raise SystemExit(f"reproduce: {failed} seeds failed")
        show(chosen)
        return
    if args.threads:
        torch.set_num_threads(args.threads)
    args.runs.mkdir(parents=True, exist_ok=True)
    folders = {seed: args.runs / f"{Path(args.config).stem}{args.tag}-{seed}" for seed in args.seeds}
    settings = {"prompts": args.prompts, "per_prompt": args.per_prompt}
    runs = [one_seed(Task(args.config, args.overrides, *one, args.runs, **settings)) for one in folders.items()]
    result = result_of(runs, command(), load_config(args.config, args.overrides).resolved(), settings)
    write(args.out, result)
    if args.out.resolve().is_relative_to(RESULTS):
        tabulate()
    for name, row in result["summary"].items():
        change = f"{row['gain']:+.3f} +- {row['gain_std'] or 0:.3f}"
        print(f"{name:>12}  {row['before']:.3f} -> {row['after']:.3f}  {change}")


if __name__ == "__main__":
    main()
