"""Everything that only a GPU can prove, in one command: run it on a machine with one, and commit the JSON.

    python scripts/gpu_proof.py --count estimates.json              # on any machine: what `doctor` counts, 10 minutes
    python scripts/gpu_proof.py --out proof.json --estimates estimates.json     # again and again, until all is done
    python scripts/gpu_proof.py --out proof.json --only 'train/sd35/*'          # some parts
    python scripts/gpu_proof.py --out proof.json --tiny             # the same code on the CPU, at tiny size
    python scripts/gpu_proof.py --list

A call takes eight minutes and writes what it finds into the JSON at once. Parts for which no time is left are skipped
with a reason; the next call goes on with them, and repeats none that was done by the same code on the same device.
Networks are of true size with random weights made on the device, text embeddings random and of true shape, 512 and 1024
pixels; rewards cost nothing, and nothing is downloaded. Exit codes: 0; 1 if a part failed; 2 for bad input.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch reads it once, long before the deterministic part

import argparse
import fnmatch
import importlib.metadata
import logging
import shlex
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "proof"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import checks
import torch
from estimates import Estimates
from journal import Journal, Part, digest_of, run_parts
from rich.console import Console
from rich.table import Column, Table
from training import CASES, ROOT, Workshop, train_method, try_option

from diffrl import __version__
from diffrl.errors import UserError, nearest

HERE = Path(__file__).resolve().parent
COLUMNS = {  # of the table: a figure's name in the JSON, and what stands above it
    "images_per_second_rollout": "images/s",
    "rows_per_second_optimise": "rows/s",
    "spread": "spread",
    "share_of_bare_loop": "of bare loop",
    "peak_gib": "peak GiB",
    "counted_gib": "counted GiB",
}
WIDTH = 150  # of the table: a terminal or a log of 80 columns would cut the figures off
CHECKS = {  # by name: what runs, about how many seconds it takes, and the part after which it comes
    "environment": (checks.environment, 10.0, ""),
    "suite": (checks.suite, 60.0, ""),
    "resume": (checks.resume, 70.0, "train/sd35/marble-5"),
    "profile/sd35": (lambda shop, seconds: checks.profile(shop, "sd35"), 30.0, "train/flux-1024/nft"),
    "profile/flux": (lambda shop, seconds: checks.profile(shop, "flux"), 60.0, "option/compiled-blocks"),
}


def all_parts(shop: Workshop | None) -> list[Part]:
    """In the order of what is worth most; without a workshop to be listed alone."""

    def measured(name: str) -> Part:
        work = try_option if name.startswith("option/") else train_method
        return Part(name, lambda seconds: work(shop, name), CASES[name].seconds)  # type: ignore[arg-type]

    def checked(after: str) -> list[Part]:
        return [
            Part(name, lambda seconds, work=work: work(shop, seconds), taken)  # type: ignore[misc]
            for name, (work, taken, place) in CHECKS.items()
            if place == after
        ]

    parts = checked("")
    for name in CASES:
        parts += [measured(name), *checked(name)]
    return [Part(part.name, part.run, 0.0) for part in parts] if shop is not None and shop.tiny else parts


def count(names: list[str], shop: Workshop, path: Path, free: float, say: Any) -> None:
    """What doctor counts for these parts on a device with `free` bytes, into the file, after each of them."""
    for name in names:
        mark, outcome = time.monotonic(), ""
        try:
            overrides, fit = shop.estimates.fitting(name, shop.written(name, "counted"), free)
            outcome = f"{fit.total / 2**30:.1f} GiB {' '.join(overrides)}".rstrip()
        except UserError as error:
            outcome = str(error)
        shop.estimates.write(path)
        say(f"{name}: {outcome} ({time.monotonic() - mark:.0f} s)")


def chosen(parts: list[Part], only: list[str]) -> list[Part]:
    """Those that one of the patterns names; UserError for a pattern that names none."""
    names = [part.name for part in parts]
    for pattern in only:
        if not fnmatch.filter(names, pattern):
            raise UserError(f'--only: no part "{pattern}"{nearest(pattern, names)}')
    return [part for part in parts if not only or any(fnmatch.fnmatch(part.name, pattern) for pattern in only)]


def show(journal: Journal, parts: list[Part], console: Console) -> None:
    table = Table(Column("part", no_wrap=True), Column("", no_wrap=True), "s", *COLUMNS.values(), "beside plain; note")
    ran = [part for part in parts if "seconds" in journal.parts.get(part.name, {})]
    for part in ran:
        entry = journal.parts[part.name]
        figures = [f"{entry[key]:g}" if isinstance(entry.get(key), float) else "" for key in COLUMNS]
        relative = ", ".join(f"{key.split('_')[0]} x {value:g}" for key, value in entry.get("relative", {}).items())
        table.add_row(part.name, entry["status"], f"{entry['seconds']:g}", *figures, entry.get("reason", relative)[:70])
    console.print(table)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--out", type=Path, help="the JSON file; it is gone on with if it is there")
    found.add_argument("--work", type=Path, help="folder for models and runs (default: OUT.work beside it)")
    found.add_argument("--minutes", type=float, default=8.0, help="time for this call")
    found.add_argument("--only", nargs="+", default=[], metavar="PART", help="parts by name, * and ? allowed")
    found.add_argument("--estimates", type=Path, metavar="FILE", help="what --count wrote")
    found.add_argument("--count", type=Path, metavar="FILE", help="count for --estimates, and run nothing")
    found.add_argument("--gib", type=float, default=76.0, help="with --count: free memory of the device to advise for")
    found.add_argument("--tiny", action="store_true", help="tiny networks; runs on a CPU, too")
    found.add_argument("--list", action="store_true", help="name the parts and do nothing")
    return found


def checked(args: argparse.Namespace) -> None:
    """UserError for arguments that cannot work."""
    if args.out is None and args.count is None:
        raise UserError("--out: give the JSON file that the proof is written to")
    if not (args.count or args.tiny or torch.cuda.is_available()):
        raise UserError("no CUDA device here; --tiny runs the same code at tiny size on the CPU")
    for name in ("minutes", "gib"):
        if not getattr(args, name) > 0:
            raise UserError(f"--{name}: expected more than 0, got {getattr(args, name):g}")


def prove(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    console = Console(width=WIDTH)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    if args.list:
        say("\n".join(part.name for part in all_parts(None)))
        return 0
    checked(args)
    package, proof = (ROOT / "diffrl").rglob("*.py"), HERE / "proof"
    counted = digest_of([*package, proof / "training.py", proof / "estimates.py"], ROOT, [])
    facts = {"diffrl": __version__, "code": counted, "size": "tiny" if args.tiny else "true"}
    facts["diffusers"] = importlib.metadata.version("diffusers")
    known = args.estimates or (args.count if args.count and args.count.exists() else None)
    out = args.out or args.count
    shop = Workshop(args.work or out.with_suffix(".work"), args.tiny, Estimates(facts, known))
    parts = chosen(all_parts(shop), args.only)
    if args.count is not None:
        count([part.name for part in parts if part.name in CASES], shop, args.count, args.gib * 2**30, say)
        return 0
    head = {"command": shlex.join(["python", "scripts/gpu_proof.py", *(arguments or sys.argv[1:])]), "tiny": args.tiny}
    head |= {"diffrl_version": __version__, "machine": checks.machine(), "versions": checks.versions(), "seed": 0}
    code = [Path(__file__).resolve(), *proof.glob("*.py"), *(HERE / "benchmarks").glob("*.py")]
    same = [counted, str(args.tiny), str(head["machine"].get("gpu")), *map(str, sorted(head["versions"].items()))]
    journal = Journal(out, head, digest_of(code, ROOT, same))
    for name, part in journal.parts.items():
        if name in CASES and name.endswith("/nft") and journal.done(name) and part["status"] == "done":
            shop.plain[CASES[name].model] = part
    run_parts(parts, journal, 60 * args.minutes, say)
    journal.write()
    show(journal, parts, console)
    failed = [part.name for part in parts if journal.parts.get(part.name, {}).get("status") == "failed"]
    left = [part.name for part in parts if not journal.done(part.name) and part.name not in failed]
    if left:
        say(f"{len(left)} parts are left: call again ({', '.join(left)})")
    return 1 if failed else 0


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
