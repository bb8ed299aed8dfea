"""Damage a run's folder in a hundred ways, and see where a resume would begin: at an intact checkpoint, or nowhere.

    python tests/stress/folders.py --folders 100 --out assets/results/folders.json

A short run is trained once. Each time its folder is copied, one to three things in it are broken (files deleted, cut,
changed in a byte, overwritten, emptied; folders deleted, or made of files; a checkpoint left half written), and
`find_start` is asked, as `train` and `train --resume` ask it before they write anything. It must never begin at zero
where checkpoints were, never take a damaged one, refuse in one line, and leave every byte as it was.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diffrl import __version__
from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.records import checkpoint
from diffrl.run.start import find_start

WORDS = (
    *("epochs=3", "lora.rank=4", "lora.alpha=8", "rollout.groups=2", "rollout.group_size=2", "rollout.steps=2"),
    *("optimise.batch_size=4", "optimise.micro_batch=null", "evaluate.prompts=2", "evaluate.per_prompt=2"),
    *("evaluate.every=3", "tracking.samples=0", "checkpoint.keep=2", "watch=null", "nft.timesteps=null"),
)


def cut(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(max(len(data), 1))])


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes() or b"x")
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def folder_of_files(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


FILES: dict[str, Callable[[Path, random.Random], object]] = {
    "deleted": lambda path, chance: path.unlink(),
    "cut": cut,
    "a bit flipped": flip,
    "zeros": lambda path, chance: path.write_bytes(b"\0" * len(path.read_bytes())),
    "garbage": lambda path, chance: path.write_bytes(chance.randbytes(200)),
    "a folder instead": folder_of_files,
}


def damage(folder: Path, chance: random.Random) -> list[str]:
    """What was broken."""
    done = []
    for _ in range(chance.choice((1, 1, 2, 3))):
        steps = sorted((folder / "checkpoints").glob("step-*"))
        kind = chance.choice(("file", "file", "file", "file", "step", "checkpoints", "temporary", "all"))
        if kind == "checkpoints":
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            done.append("checkpoints deleted")
        elif kind == "step" and steps:
            shutil.rmtree(path := chance.choice(steps))
            done.append(f"{path.name} deleted")
        elif kind == "temporary" and steps:
            path = chance.choice(steps)
            path.rename(path.with_name(f".tmp-{path.name}-1"))
            done.append(f"{path.name} half written")
        elif kind == "all":
            for step in steps:
                flip(chance.choice(sorted(file for file in step.iterdir() if file.is_file()) or [step]), chance)
            done.append("a bit in every checkpoint")
        else:
            files = sorted(path for path in folder.rglob("*") if path.is_file() and "samples" not in path.parts)
            path, how = chance.choice(files), chance.choice(list(FILES))
            FILES[how](path, chance)
            done.append(f"{path.relative_to(folder)}: {how}")
    return done


def listing(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def judge(folder: Path, config: Any, whole: dict[str, dict[str, Any]]) -> tuple[str, list[str]]:
    """(what a resume would do, what is wrong with that)."""
    wrong: list[str] = []
    before = listing(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            start = find_start(config, folder, resume=True)
            if start.path is None:
                said = "begins at zero"
                wrong.append("begins at zero, although there were checkpoints")
            else:
                said = f"goes on at {start.path.name}"
                tensors, _ = checkpoint.load(start.path)
                name = start.path.name.removeprefix(".tmp-replaced-")
                if any(
                    not torch.equal(value, whole[name][part][key])
                    for part in tensors
                    for key, value in tensors[part].items()
                ):
                    wrong.append("goes on with other weights")
        except UserError as error:
            said = "refused"
            if "\n" in str(error) or str(folder) not in str(error):
                wrong.append(f"not one line with the path: {str(error)[:300]}")
        except Exception as error:
            said = "FAILED"
            wrong.append(f"{type(error).__name__}: {str(error)[:300]}")
        try:
            find_start(config, folder, resume=False)
            wrong.append("a new run would begin in the folder of another")
        except UserError:
            pass
        except Exception as error:
            wrong.append(f"a new run: {type(error).__name__}: {str(error)[:300]}")
    if listing(folder) != before:
        wrong.append("the folder changed")
    return said, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    from diffrl.run.train import train

    chance, counts, broken, failures = random.Random(args.seed), Counter[str](), Counter[str](), []
    with tempfile.TemporaryDirectory() as name:
        original = Path(name) / "run"
        config = load_config("playground/nft", [*WORDS, f"run_dir={original}"])
        train(config)
        whole = {path.name: checkpoint.load(path)[0] for path in (original / "checkpoints").glob("step-*")}
        for _ in range(args.folders):
            folder = Path(name) / "copy"
            shutil.copytree(original, folder)
            what = damage(folder, chance)
            said, wrong = judge(folder, config, whole)
            counts[said] += 1
            broken.update(one.split(": ")[-1] for one in what)
            if wrong:
                failures.append({"damage": what, "did": said, "wrong": wrong})
            shutil.rmtree(folder)
    result = {"command": shlex.join(["python", *sys.argv]), "diffrl_version": __version__, "folders": args.folders}
    result |= {"did": dict(counts), "damages": dict(broken), "failures": failures}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(dict(counts), f"{len(failures)} failures")
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
