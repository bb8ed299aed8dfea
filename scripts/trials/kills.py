"""Kill a training on one or two processes again and again, resume it, and compare with one that was left alone.

    python scripts/trials/kills.py --kills 30 --out assets/results/kills.json
    python scripts/trials/kills.py --kills 10 --processes 1 --writers --out assets/results/kills_one_process.json

With --writers a second `diffrl train --resume` is started on the same folder before each kill: it must be refused, with
exit code 2 and the first one's process number, and change nothing.

Each time one of three things happens at a random moment: the whole machine dies (SIGKILL to everything), one worker
dies (SIGKILL to one process; its launcher must end the others), or the run is pre-empted (SIGTERM to the launcher). In
the end the weights must be those of the undisturbed run to the bit, no epoch may be missing or there twice, and no file
left over.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml

from diffrl import __version__
from diffrl.records import checkpoint
from diffrl.records.tracking import read_metrics

CONFIG = {
    "model": "playground",
    "prompts": {"train": "playground/compositional/train", "test": "playground/compositional/test"},
    "lora": {"rank": 8, "alpha": 16},
    "rollout": {"groups": 4, "group_size": 4, "steps": 4, "batch_size": 8},
    "rewards": {"playground": {}},
    "objective": "nft",
    "optimise": {"batch_size": 8, "accumulation": 2, "learning_rate": 1e-3},
    "evaluate": {"every": 3, "prompts": 4, "per_prompt": 2},
    "checkpoint": {"every": 2, "keep": 2},
    "tracking": {"samples": 2},
}
WAYS = ("machine", "worker", "pre-emption")


def launch(config: Path, log: Path, processes: int) -> subprocess.Popen[bytes]:
    """`diffrl train` on so many CPU processes."""
    command = [sys.executable]
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command += ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", str(port)]
    command += ["-m", "diffrl", "train", str(config), "--resume", "auto"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    with log.open("ab") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file)


def second_writer(config: Path, folder: Path) -> dict[str, object]:
    """Another `diffrl train` on a folder in use: its exit code, and whether it named the first one's process."""
    command = [sys.executable, "-m", "diffrl", "train", str(config), "--resume", "auto"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return {"code": done.returncode, "refused": "is in use: process" in done.stderr and str(folder) in done.stderr}


def workers(launcher: int) -> list[int]:
    """The launcher's children."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(launcher)], capture_output=True, text=True).stdout
    return [int(pid) for pid in found.split()]


def disturb(process: subprocess.Popen[bytes], way: str, chance: random.Random) -> float:
    """Kill in one of `WAYS`; returns the seconds until everything had ended."""
    started = time.perf_counter()
    children = workers(process.pid)
    if way == "machine":
        for pid in (process.pid, *children):  # workers have sessions of their own, so killpg would miss them
            os.kill(pid, signal.SIGKILL)
    elif way == "worker" and children:
        os.kill(chance.choice(children), signal.SIGKILL)
    else:
        process.send_signal(signal.SIGTERM)
    process.wait(timeout=120)
    return time.perf_counter() - started


def final(folder: Path) -> dict[str, torch.Tensor]:
    path = checkpoint.latest(folder)
    assert path is not None, f"{folder} has no checkpoint"
    tensors, _ = checkpoint.load(path)
    return {f"{part}/{name}": value for part, group in tensors.items() for name, value in group.items()}


def trial(
    folder: Path, epochs: int, kills: int, life: tuple[float, float], seed: int, processes: int, writers: bool
) -> dict[str, object]:
    """The undisturbed run, the disturbed one, and what they have in common."""
    chance, log = random.Random(seed), folder / "log.txt"
    ended: list[dict[str, object]] = []
    second_writers_seen: list[dict[str, object]] = []
    paths: dict[str, Path] = {}
    for name in ("whole", "broken"):
        paths[name] = folder / f"{name}.yaml"
        paths[name].write_text(yaml.safe_dump({**CONFIG, "epochs": epochs, "run_dir": str(folder / name)}))
    started = time.perf_counter()
    assert launch(paths["whole"], log, processes).wait() == 0, f"the undisturbed run failed: {log}"
    seconds = time.perf_counter() - started
    while True:
        process = launch(paths["broken"], log, processes)
        if len(ended) < kills:
            try:
                process.wait(timeout=chance.uniform(*life))
            except subprocess.TimeoutExpired:
                if writers and (folder / "broken" / ".lock").exists():
                    found = second_writer(paths["broken"], folder / "broken")
                    # The first one may have ended meanwhile: then the second one was right to go on.
                    if process.poll() is None or found["code"] == 2:
                        second_writers_seen.append(found)
                    if process.poll() is not None:
                        continue
                way = chance.choice(WAYS)
                ended.append({"way": way, "seconds_to_the_end": round(disturb(process, way, chance), 2)})
                epoch = max([m["epoch"] for m in read_metrics(folder / "broken")], default=-1)
                print(f"kill {len(ended)}: {way}, after epoch {epoch}", flush=True)
                continue
        assert process.wait() == 0, f"the last part failed: {log}"
        break
    whole, broken = final(folder / "whole"), final(folder / "broken")
    lines = [m["epoch"] for m in read_metrics(folder / "broken")]
    names = [{str(p.relative_to(folder / n)) for p in (folder / n).rglob("*")} for n in ("whole", "broken")]
    return {
        "processes": processes,
        "kills": ended,
        "second_writers": second_writers_seen,
        "weights_equal_to_the_bit": whole.keys() == broken.keys()
        and all(torch.equal(whole[key], broken[key]) for key in whole),
        "epochs_once_each": lines == list(range(epochs + 1)),
        "files_that_differ": sorted(names[0] ^ names[1]),
        "undisturbed_seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--life", type=float, nargs=2, default=(5.0, 15.0), help="shortest and longest, in seconds")
    parser.add_argument("--processes", type=int, default=2, choices=(1, 2))
    parser.add_argument("--writers", action="store_true", help="start a second writer before each kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = trial(Path(folder), args.epochs, args.kills, tuple(args.life), args.seed, args.processes, args.writers)
    result = {"command": shlex.join(["python", *sys.argv]), "diffrl_version": __version__, "torch": torch.__version__}
    args.out.write_text(json.dumps(result | {"epochs": args.epochs} | found, indent=1) + "\n")
    apart = all(one["refused"] and one["code"] == 2 for one in found["second_writers"])  # type: ignore[attr-defined]
    good = apart and found["weights_equal_to_the_bit"] and found["epochs_once_each"] and not found["files_that_differ"]
    print("equal" if good else f"DIFFERENT: {found}")
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
