"""Everything that only a GPU can prove, in one command: run it on a machine with one, and commit the JSON.

    python scripts/gpu_proof.py --out proof.json                    # again and again, until all is done
    python scripts/gpu_proof.py --out proof.json --only 'train/sd35/*'          # some parts, in the order given
    python scripts/gpu_proof.py --out proof.json --tiny             # the same code on the CPU, at tiny size
    python scripts/gpu_proof.py --plan --minutes 8                  # which parts fit, by the times of an H200
    python scripts/gpu_proof.py --count counts.json                 # on any machine: what `doctor` counts

It needs no installation, only the packages. A call takes eight minutes and writes what it finds into the JSON at once.
Parts for which no time is left are skipped with a reason; the next call goes on with them, and repeats none that was
done by the same code on the same device. Networks are of true size with random weights, made on the device once for all
parts that follow on them, text embeddings random and of true shape; rewards cost nothing, and nothing is downloaded.
Exit codes: 0; 1 if a part failed; 2 for bad input.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch reads it once, long before the deterministic part

import argparse
import fnmatch
import importlib.metadata
import json
import logging
import shlex
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the package, where it is not installed
sys.path.insert(0, str(Path(__file__).resolve().parent / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "proof"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import checks
import psutil
import torch
import trials
from estimates import Estimates
from installed import provide
from journal import Journal, Part, digest_of, plan, run_parts
from learning import learn
from recipes import RECIPES
from rich.console import Console
from rich.table import Column, Table
from training import CASES, MODELS, ROOT
from workshop import Workshop, plain_of, train_method, try_option

from diffrl import __version__
from diffrl.errors import UserError, nearest

HERE = Path(__file__).resolve().parent
COLUMNS = {  # of the table: a figure's name in the JSON, and what stands above it
    "images_per_gpu_second": "images/s",
    "images_per_second_rollout": "sampling",
    "rows_per_second_optimise": "rows/s",
    "mfu_rollout": "mfu",
    "mfu_optimise": "mfu",
    "peak_gib": "peak GiB",
    "counted_gib": "counted GiB",
}
SHORT = {"images_per_second_rollout": "sampling", "rows_per_second_optimise": "rows", "images_per_gpu_second": "images"}
WIDTH = 170  # of the table: a terminal or a log of 80 columns would cut the figures off
TIMES = HERE / "proof" / "times.json"  # seconds of the parts and of making the networks, on the device that it names
COUNTS = ROOT / "assets" / "results" / "gpu" / "counts.json"
CHECKS: dict[str, tuple[Any, str]] = {  # by name: what runs, and the model that it runs on
    "environment": (checks.environment, ""),
    "suite": (checks.suite, ""),
    "learn/playground": (learn, ""),
    "resume": (checks.resume, "sd35"),
    "trial/decode/sd35": (partial(trials.decode, model="sd35"), "sd35"),
    "trial/arithmetic/sd35": (partial(trials.arithmetic, model="sd35"), "sd35"),
    "trial/memory/sd35": (partial(trials.memory, model="sd35"), "sd35"),
    "trial/arithmetic/flux": (partial(trials.arithmetic, model="flux"), "flux"),
    "trial/arithmetic/qwen": (partial(trials.arithmetic, model="qwen"), "qwen"),
    "profile/sd35": (partial(checks.profile, model="sd35"), "sd35"),
    "profile/flux": (partial(checks.profile, model="flux"), "flux"),
}
# The first eight minutes: what is worth most, and the parts of a network together.
FIRST = ["environment", "suite", "learn/playground", "recipe/qwen_image/grpo_ocr", "recipe/flux/nft_pickscore"]
FIRST += ["recipe/flux/nft_pickscore+int8", "recipe/sd35/gardo_ocr", "recipe/sd35/nft_ocr", "resume"]
FIRST += ["recipe/sd35/nft_ocr+compiled"]


def all_parts(shop: Workshop | None) -> list[Part]:
    """In the order in which they run; without a workshop to be listed alone."""
    times = json.loads(TIMES.read_text())["parts"]

    def part(name: str) -> Part:
        run: Any
        if name in CHECKS:
            work, model = CHECKS[name]
            run, guess = partial(work, shop), 60.0
        else:
            case = RECIPES[name] if name in RECIPES else CASES[name]
            work, model, guess = try_option if plain_of(name) else train_method, case.model, case.seconds

            def run(limit: float, tell: Any) -> dict[str, Any]:
                return work(shop, name, tell)  # type: ignore[arg-type]

        network = MODELS[model].architecture if model else ""
        if shop is not None and shop.tiny:
            return Part(name, run, 0.0)
        return Part(name, run, times.get(name, guess), network, measured=name in times)

    rest = [name for model in ("sd35", "flux", "qwen") for name in _of(model) if name not in FIRST]
    return [part(name) for name in [*FIRST, *rest]]


def _of(model: str) -> list[str]:
    """Names of the parts on it, also at other sizes."""
    every = {name: case.model for name, case in [*CASES.items(), *RECIPES.items()]}
    every |= {name: place for name, (_, place) in CHECKS.items()}
    return [name for name, place in every.items() if place.partition("-")[0] == model]


def count(names: list[str], shop: Workshop, path: Path, free: float, say: Any) -> None:
    """What doctor counts for these parts on a device with `free` bytes, into the file, after each of them."""
    for name in names:
        mark, outcome = time.monotonic(), ""
        try:
            overrides, fit = shop.estimates.fitting(name, shop.written(name, "counted"), free)
            assert fit is not None, "here nothing is guessed"
            outcome = f"{fit.total / 2**30:.1f} GiB {' '.join(overrides)}".rstrip()
        except UserError as error:
            outcome = str(error)
        shop.estimates.write(path)
        say(f"{name}: {outcome} ({time.monotonic() - mark:.0f} s)")


def chosen(parts: list[Part], only: list[str]) -> list[Part]:
    """Those that a pattern names, in the patterns' order; UserError for a pattern that names none."""
    if not only:
        return parts
    names, wanted = [part.name for part in parts], dict[str, Part]()
    for pattern in only:
        matching = {part.name: part for part in parts if fnmatch.fnmatch(part.name, pattern)}
        if not matching:
            raise UserError(f'--only: no part "{pattern}"{nearest(pattern, names)}')
        wanted |= {name: part for name, part in matching.items() if name not in wanted}
    return list(wanted.values())


def show_plan(parts: list[Part], minutes: float, say: Any) -> None:
    """Which parts fit into so many minutes: a dry run of the bookkeeping, by the times of the device in TIMES."""
    times = json.loads(TIMES.read_text())
    total = times["start"]
    say(f"by the times of an {times['device']} (~: a guess); {total:g} s to start")
    for part, needed, fits in plan(parts, 60 * minutes - times["start"], times["networks"]):
        total += needed if fits else 0.0
        taken = f"{'' if part.measured else '~'}{needed:.0f} s"
        say(f"{part.name:<46} {taken:>7} {f'{total:6.0f} s' if fits else 'does not fit'}")


def show(journal: Journal, parts: list[Part], console: Console) -> None:
    table = Table(
        Column("part", no_wrap=True),
        Column("", no_wrap=True),
        "s",
        *COLUMNS.values(),
        "peft's time of ours; beside plain; note",
    )
    ran = [part for part in parts if "seconds" in journal.parts.get(part.name, {})]
    for part in ran:
        entry = journal.parts[part.name]
        figures = [f"{entry[key]:g}" if isinstance(entry.get(key), float) else "" for key in COLUMNS]
        beside = {"peft": entry.get("of_the_epoch", {}).get("peft"), **entry.get("relative", {})}
        note = ", ".join(f"{SHORT.get(key, key)} x {value:g}" for key, value in beside.items() if value is not None)
        table.add_row(part.name, entry["status"], f"{entry['seconds']:g}", *figures, entry.get("reason", note)[:90])
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
    found.add_argument("--plan", action="store_true", help="say which parts fit into --minutes and do nothing")
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


def prove(arguments: list[str] | None = None, before: float = 0.0) -> int:
    """`before`: seconds that have gone to starting Python and importing."""
    args = parser().parse_args(arguments)
    console = Console(width=WIDTH)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    if args.list:
        say("\n".join(part.name for part in all_parts(None)))
        return 0
    if args.plan:
        show_plan(chosen(all_parts(None), args.only), args.minutes, say)
        return 0
    checked(args)
    mark, counted = time.monotonic(), digest_of((ROOT / "diffrl").rglob("*.py"), ROOT, [])
    out = args.out or args.count
    work = args.work or out.with_suffix(".work")
    provide(work)
    shop = Workshop(work, args.tiny, estimates(args, counted))
    if shop.estimates.stale:
        say(f"counted with {', '.join(shop.estimates.stale)}: what doctor counts may be others' figures")
    parts = chosen(all_parts(shop), args.only)
    if args.count is not None:
        names = [part.name for part in parts if part.name in CASES or part.name in RECIPES]
        count(names, shop, args.count, args.gib * 2**30, say)
        return 0
    head = {"command": shlex.join(["python", "scripts/gpu_proof.py", *(arguments or sys.argv[1:])]), "tiny": args.tiny}
    head |= {"diffrl_version": __version__, "machine": checks.machine(), "versions": checks.versions(), "seed": 0}
    head |= {"commit": commit(), "seconds_to_start": round(before, 1), "counted_with": shop.estimates.stale}
    code = [Path(__file__).resolve(), *(HERE / "proof").glob("*.py"), *(HERE / "benchmarks").glob("*.py")]
    same = [counted, str(args.tiny), str(head["machine"].get("gpu")), *map(str, sorted(head["versions"].items()))]
    journal = Journal(out, head, digest_of(code, ROOT, same))
    shop.plain |= {n: p for n, p in journal.parts.items() if journal.done(n) and "images_per_gpu_second" in p}
    end = mark + 60 * args.minutes - before
    networks = {} if args.tiny else json.loads(TIMES.read_text())["networks"]
    rest = run_parts(parts, journal, end - time.monotonic(), say, networks, device_lost)
    journal.write()
    if rest:
        again(arguments or sys.argv[1:], rest, end - time.monotonic(), say)
    show(journal, parts, console)
    return verdict(journal, parts, say)


def estimates(args: argparse.Namespace, code: str) -> Estimates:
    """What doctor counts: from the file that is named, else for true sizes from the one that is shipped."""
    facts = {"diffrl": __version__, "code": code, "size": "tiny" if args.tiny else "true"}
    facts["diffusers"] = importlib.metadata.version("diffusers")
    known = args.estimates or (args.count if args.count and args.count.exists() else None)
    if known is None and not args.tiny and not args.count and COUNTS.exists():
        known = COUNTS
    return Estimates(facts, known, guess=not (args.tiny or args.count))


def commit() -> str | None:
    """Of the tree, where it is a checkout."""
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def device_lost() -> bool:
    """After an illegal access a process can do nothing on its device any more, not even free its memory."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def again(arguments: list[str], parts: list[str], left: float, say: Any) -> None:
    """A new process in the place of this one, for these parts: the device's memory is free only then."""
    say("the device is lost to this process: a new one goes on")
    sys.stdout.flush()
    words = [*arguments, "--minutes", f"{max(left, 1) / 60:.3f}", "--only", *parts]  # the last of an option counts
    os.execv(sys.executable, [sys.executable, str(Path(__file__).resolve()), *words])


def verdict(journal: Journal, parts: list[Part], say: Any) -> int:
    """The exit code; what is left is said."""
    failed = [part.name for part in parts if journal.parts.get(part.name, {}).get("status") == "failed"]
    left = [part.name for part in parts if not journal.done(part.name) and part.name not in failed]
    if left:
        say(f"{len(left)} parts are left: call again ({', '.join(left)})")
    return 1 if failed else 0


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("diffrl").setLevel(logging.ERROR)
    try:
        code = prove(before=time.time() - psutil.Process().create_time())
    except UserError as error:
        print(f"gpu_proof.py: {error}", file=sys.stderr)
        code = 2
    raise SystemExit(code)


if __name__ == "__main__":
    main()
