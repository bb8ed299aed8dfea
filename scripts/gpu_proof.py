"""Everything that only a GPU can prove, in one command: run it on a machine with one, and commit the JSON.

    python scripts/gpu_proof.py --out assets/results/gpu_proof.json            # again and again, until all is done
    python scripts/gpu_proof.py --out proof.json --only 'train/sd35/*'         # some parts
    python scripts/gpu_proof.py --out proof.json --tiny                        # the same code on the CPU, at tiny size
    python scripts/gpu_proof.py --list

Every part takes at most ten minutes and writes what it found into the JSON at once. Parts for which no time is left are
skipped with a reason; the next call goes on with them, and repeats none that was done by the same code on the same
device. Networks are of true size with random weights made on the device, text embeddings random and of true shape, 512
pixels; rewards cost nothing. Exit codes: 0; 1 if a part failed; 2 for bad input.
"""

from __future__ import annotations

import argparse
import fnmatch
import logging
import shlex
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "proof"))

import checks
import torch
from journal import Journal, Part, digest_of, run_parts
from rich.console import Console
from rich.table import Column, Table
from training import METHODS, MODELS, OPTIONS, ROOT, Workshop, train_method, try_option

from diffrl import __version__
from diffrl.errors import UserError, nearest

HERE = Path(__file__).resolve().parent
COLUMNS = {  # of the table: a figure's name in the JSON, and what stands above it
    "images_per_second_rollout": "images/s",
    "rows_per_second_optimise": "rows/s",
    "share_of_bare_loop": "of bare loop",
    "peak_gib": "peak GiB",
    "counted_gib": "counted GiB",
}


def all_parts(shop: Workshop) -> list[Part]:
    """In the order of what is worth most."""
    tiny = shop.tiny

    def part(name: str, work: Any, seconds: float, open_end: bool = False) -> Part:
        return Part(name, work, 0.0 if tiny else seconds, open_end)

    def plain(work: Any, *arguments: Any) -> Any:
        return lambda seconds: work(shop, *arguments)

    def train(model: str, method: str) -> Part:
        return part(f"train/{model}/{method}", plain(train_method, model, method), MODELS[model].seconds)

    # A first call of eight minutes: does everything run, and how fast is the smallest model with each kind of method?
    parts = [
        part("environment", partial(checks.environment, shop), 10.0),
        part("suite", partial(checks.suite, shop), 60.0),
    ]
    parts += [train("sd35", method) for method in ("nft", "crd", "grpo", "marble-5")]
    parts += [part("fsdp2", partial(checks.sharded, shop), 60.0), part("resume", partial(checks.resume, shop), 90.0)]
    parts += [train("flux", "nft"), train("qwen", "nft")]
    for option, (model, _, longer) in OPTIONS.items():
        seconds = MODELS[model].seconds * (3 + longer)
        parts.append(part(f"option/{option}", plain(try_option, option), seconds))
    before = {one.name for one in parts}
    rest = [train(model, method) for method in METHODS for model in MODELS]
    parts += [one for one in rest if one.name not in before]
    parts.append(part("playground", partial(checks.playground, shop), 150.0, open_end=True))
    return parts


def chosen(parts: list[Part], only: list[str]) -> list[Part]:
    """Those that one of the patterns names; UserError for a pattern that names none."""
    names = [part.name for part in parts]
    for pattern in only:
        if not fnmatch.filter(names, pattern):
            raise UserError(f'--only: no part "{pattern}"{nearest(pattern, names)}')
    return [part for part in parts if not only or any(fnmatch.fnmatch(part.name, pattern) for pattern in only)]


def show(journal: Journal, parts: list[Part], console: Console) -> None:
    table = Table(Column("part", no_wrap=True), Column("", no_wrap=True), "s", *COLUMNS.values(), "")
    for part in parts:
        entry = journal.parts.get(part.name, {})
        figures = [f"{entry[key]:g}" if isinstance(entry.get(key), float) else "" for key in COLUMNS]
        relative = ", ".join(f"{key.split('_')[0]} x {value:g}" for key, value in entry.get("relative", {}).items())
        seconds = f"{entry['seconds']:g}" if "seconds" in entry else ""
        note = entry.get("reason", relative)[:70]
        table.add_row(part.name, entry.get("status", "to do"), seconds, *figures, note)
    console.print(table)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--out", type=Path, help="the JSON file; it is gone on with if it is there")
    found.add_argument("--work", type=Path, help="folder for models and runs (default: OUT.work beside it)")
    found.add_argument("--minutes", type=float, default=8.0, help="time for this call")
    found.add_argument("--only", nargs="+", default=[], metavar="PART", help="parts by name, * and ? allowed")
    found.add_argument("--tiny", action="store_true", help="tiny networks; runs on a CPU, too")
    found.add_argument("--list", action="store_true", help="name the parts and do nothing")
    return found


def prove(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    # A file or a pipe is no 80 columns wide: rich would cut the figures off.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    if args.out is None and not args.list:
        raise UserError("--out: give the JSON file that the proof is written to")
    if not (args.list or args.tiny or torch.cuda.is_available()):
        raise UserError("no CUDA device here; --tiny runs the same code at tiny size on the CPU")
    if not args.minutes > 0:
        raise UserError(f"--minutes: expected more than 0, got {args.minutes:g}")
    out = args.out or Path("gpu_proof.json")
    shop = Workshop(args.work or out.with_suffix(".work"), args.tiny) if not args.list else None
    parts = chosen(all_parts(shop or _Listing()), args.only)  # type: ignore[arg-type]
    if shop is None:
        console.print("\n".join(part.name for part in parts), highlight=False)
        return 0
    head = {"command": shlex.join(["python", "scripts/gpu_proof.py", *(arguments or sys.argv[1:])]), "tiny": args.tiny}
    head |= {"diffrl_version": __version__, "machine": checks.machine(), "versions": checks.versions(), "seed": 0}
    code = [*(ROOT / "diffrl").rglob("*.py"), *(HERE / "proof").glob("*.py"), *(HERE / "benchmarks").glob("*.py")]
    facts = [str(args.tiny), str(head["machine"].get("gpu")), *map(str, sorted(head["versions"].items()))]
    journal = Journal(out, head, digest_of([Path(__file__).resolve(), *code], ROOT, facts))
    run_parts(parts, journal, 60 * args.minutes, lambda text: console.print(text, highlight=False, markup=False))
    journal.write()
    show(journal, parts, console)
    failed = [part.name for part in parts if journal.parts.get(part.name, {}).get("status") == "failed"]
    left = [part.name for part in parts if not journal.done(part.name) and part.name not in failed]
    if left:
        console.print(f"{len(left)} parts are left: call again", highlight=False)
    return 1 if failed else 0


class _Listing:
    """In the place of a workshop where nothing runs."""

    tiny = True


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("diffrl").setLevel(logging.ERROR)
    try:
        code = prove()
    except UserError as error:
        print(f"gpu_proof.py: {error}", file=sys.stderr)
        code = 2
    raise SystemExit(code)


if __name__ == "__main__":
    main()
