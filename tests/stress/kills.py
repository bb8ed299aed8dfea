"""Kill a training on one or two processes again and again, resume it, and compare with one that was left alone.

    python tests/stress/kills.py --kills 10 --writers 5 --out assets/results/kills.json
    python tests/stress/kills.py --kills 10 --writers 5 --processes 1 --out assets/results/kills.json
    python tests/stress/kills.py --kills 10 --writers 5 --seeds 1 2 --out assets/results/kills.json

Each seed is a round, a trial of its own, and is added to those in the file. With --warm the processes are forks of one
that has imported everything, and the launcher of two is 20 lines here that do as torchrun does: for a busy machine,
where the imports of 30 starts take longer than all the rest.

With --writers N a second `diffrl train --resume` is started on the same folder before every Nth kill: it must be
refused, with exit code 2 and the first one's process number, and change nothing.

Each time, a random number of epochs later and a random while after that, one of three things happens: the whole machine
dies (SIGKILL to everything), one worker dies (SIGKILL to one process; its launcher must end the others), or the run is
pre-empted (SIGTERM to the launcher). In the end the weights must be those of the undisturbed run to the bit, no epoch
may be missing or there twice, and no file left over.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import json
import multiprocessing
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from diffrl import __version__
from diffrl.policy import LoraSpec, load_policy
from diffrl.records import checkpoint
from diffrl.records.tracking import read_metrics

CONFIG = {
    "model": "playground",
    "prompts": {"train": "playground/compositional/train", "test": "playground/compositional/test"},
    "lora": {"rank": 8, "alpha": 16},
    "rollout": {"groups": 2, "group_size": 2, "steps": 2, "batch_size": 2},
    "rewards": {"playground": {}},
    "objective": "nft",
    "optimise": {"batch_size": 4, "micro_batch": None, "learning_rate": 1e-3},
    "evaluate": {"every": 5, "prompts": 2, "per_prompt": 2},
    "checkpoint": {"every": 2, "keep": 2},
    "tracking": {"samples": 2},
}
WAYS = ("machine", "worker", "pre-emption")


class Warm:
    """A fork of this process that runs `work`, with the few methods of `subprocess.Popen` that are used here."""

    def __init__(self, work: Callable[[], int], log: Path) -> None:
        def body() -> None:
            atexit._clear()  # what this process cleans up at its end, as its temporary folder, stays its own
            with log.open("ab") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            sys.exit(work())

        self.process = multiprocessing.get_context("fork").Process(target=body)
        self.process.start()
        assert self.process.pid is not None
        self.pid: int = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("diffrl train", timeout or 0)
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def train_here(config: Path, **environment: str) -> int:
    """`diffrl train CONFIG --resume auto` in this process."""
    from diffrl.cli.main import main as diffrl

    sys.argv = ["diffrl", "train", str(config), "--resume", "auto"]
    os.environ.update({"ACCELERATE_USE_CPU": "true", **environment})
    return diffrl(sys.argv[1:])


def launch_two(config: Path, log: Path, port: str) -> int:
    """As torchrun does: two workers; if one dies the other is told to end, and is killed if it does not."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    workers = [Warm(partial(train_here, config, **rank), log) for rank in ranks]
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    while not told and all(worker.poll() is None for worker in workers):
        time.sleep(0.05)
    if not told and all(worker.poll() in (0, None) for worker in workers):
        return max(worker.wait() for worker in workers)
    for worker in workers:
        if worker.poll() is None:
            worker.send_signal(signal.SIGTERM)
    for worker in workers:
        try:
            worker.wait(timeout=30)
        except subprocess.TimeoutExpired:
            worker.send_signal(signal.SIGKILL)
            worker.wait()
    return 1


def launch(config: Path, log: Path, processes: int, warm: bool) -> subprocess.Popen[bytes] | Warm:
    """`diffrl train` on so many CPU processes."""
    if warm:
        if processes == 1:
            return Warm(partial(train_here, config), log)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        return Warm(partial(launch_two, config, log, port), log)
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


def second_writer(config: Path, folder: Path, warm: bool) -> dict[str, object]:
    """Another `diffrl train` on a folder in use: its exit code, and whether it named the first one's process."""
    if warm:
        log = config.with_suffix(".second")
        log.unlink(missing_ok=True)
        code = Warm(partial(train_here, config), log).wait()
        return {"code": code, "refused": all(text in log.read_text() for text in ("is in use: process", str(folder)))}
    command = [sys.executable, "-m", "diffrl", "train", str(config), "--resume", "auto"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return {"code": done.returncode, "refused": "is in use: process" in done.stderr and str(folder) in done.stderr}


def workers(launcher: int) -> list[int]:
    """The launcher's children."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(launcher)], capture_output=True, text=True).stdout
    return [int(pid) for pid in found.split()]


def disturb(process: subprocess.Popen[bytes] | Warm, way: str, chance: random.Random) -> float:
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


def live(process: subprocess.Popen[bytes] | Warm, folder: Path, epochs: int, chance: random.Random) -> bool:
    """Let it train so many epochs and a moment more (none: some seconds of its start); False if it ended by itself.

    Counted in epochs, so that the kills fall where they should on a slow machine, too.
    """
    before = len(read_metrics(folder))
    while epochs and process.poll() is None and len(read_metrics(folder)) < before + epochs:
        time.sleep(0.1)
    try:
        process.wait(timeout=chance.uniform(0, 1.5 if epochs else 15))
    except subprocess.TimeoutExpired:
        return True
    return False


def final(folder: Path) -> dict[str, torch.Tensor]:
    path = checkpoint.latest(folder)
    assert path is not None, f"{folder} has no checkpoint"
    tensors, _ = checkpoint.load(path)
    return {f"{part}/{name}": value for part, group in tensors.items() for name, value in group.items()}


def trial(
    folder: Path, epochs: int, kills: int, life: tuple[int, int], seed: int, processes: int, writers: int, warm: bool
) -> dict[str, Any]:
    """The undisturbed run, the disturbed one, and what they have in common."""
    chance, log = random.Random(seed), folder / "log.txt"
    ended: list[dict[str, object]] = []
    second_writers_seen: list[dict[str, object]] = []
    paths: dict[str, Path] = {}
    for name in ("whole", "broken"):
        paths[name] = folder / f"{name}.yaml"
        paths[name].write_text(yaml.safe_dump({**CONFIG, "epochs": epochs, "run_dir": str(folder / name)}))
    started = time.perf_counter()
    assert launch(paths["whole"], log, processes, warm).wait() == 0, (
        f"the undisturbed run failed:\n{log.read_text()[-4000:]}"
    )
    undisturbed = time.perf_counter() - started
    while True:
        process = launch(paths["broken"], log, processes, warm)
        if len(ended) < kills:
            rival = writers and len(ended) % writers == writers - 1
            if live(process, folder / "broken", max(chance.randint(*life), int(bool(rival))), chance):
                if rival:
                    found = second_writer(paths["broken"], folder / "broken", warm)
                    # The first one may have ended meanwhile: then the second one was right to go on.
                    if process.poll() is None or found["code"] == 2:
                        second_writers_seen.append(found)
                    if process.poll() is not None:
                        continue
                way = chance.choice(WAYS)
                seconds = disturb(process, way, chance)
                epoch = max([m["epoch"] for m in read_metrics(folder / "broken")], default=-1)
                ended.append({"way": way, "after_epoch": epoch, "seconds_to_the_end": round(seconds, 2)})
                print(f"kill {len(ended)}: {ended[-1]}, {second_writers_seen[-1:] if rival else ''}", flush=True)
                continue
        assert process.wait() == 0, f"the last part failed:\n{log.read_text()[-4000:]}"
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
        "undisturbed_seconds": round(undisturbed, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--life", type=int, nargs=2, default=(0, 5), help="fewest and most epochs between two kills")
    parser.add_argument("--processes", type=int, default=2, choices=(1, 2))
    parser.add_argument("--writers", type=int, default=0, metavar="N", help="a second writer before every Nth kill")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="a round for each")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--warm", action="store_true", help="forks of this process, which has imported everything")
    args = parser.parse_args()
    if args.warm:
        torch.set_num_threads(1)  # before any parallel region, so that forks may compute
        for module in ("api", "run.train", "report", "worlds", "families.sd3", "cli.main"):
            importlib.import_module(f"diffrl.{module}")
        load_policy("playground", lora=LoraSpec(rank=8, alpha=16))  # diffusers imports a pipeline when it is loaded
    good = [one_round(args, seed) for seed in args.seeds]
    raise SystemExit(0 if all(good) else 1)


def one_round(args: argparse.Namespace, seed: int) -> bool:
    """A trial, added to the file; whether nothing was lost."""
    with tempfile.TemporaryDirectory() as folder:
        found = trial(
            Path(folder), args.epochs, args.kills, tuple(args.life), seed, args.processes, args.writers, args.warm
        )
    one = {
        "command": shlex.join(["python", *sys.argv]),
        "diffrl_version": __version__,
        "torch": torch.__version__,
        "machine": f"{os.cpu_count()} CPU cores, shared with other work",
        "seed": seed,
        "epochs": args.epochs,
    }
    rounds = json.loads(args.out.read_text())["rounds"] if args.out.exists() else []
    args.out.write_text(json.dumps(summed([*rounds, one | found]), indent=1) + "\n")
    apart = all(one["refused"] and one["code"] == 2 for one in found["second_writers"])
    good = apart and found["weights_equal_to_the_bit"] and found["epochs_once_each"] and not found["files_that_differ"]
    print(f"{len(found['kills'])} kills, equal" if good else f"DIFFERENT: {found}", flush=True)
    return bool(good)


def summed(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The rounds, and over all of them: kills, second writers that were refused, and whether all weights were equal."""
    return {
        "kills": sum(len(one["kills"]) for one in rounds),
        "second_writers_refused": sum(each["refused"] for one in rounds for each in one["second_writers"]),
        "weights_equal_to_the_bit": all(one["weights_equal_to_the_bit"] for one in rounds),
        "epochs_once_each": all(one["epochs_once_each"] for one in rounds),
        "rounds": rounds,
    }


if __name__ == "__main__":
    main()
