"""Several reward servers and judges as one: their throughput, and what absence and death cost. Two CPU cores do.

    python scripts/benchmarks/pool.py --ray --out pool.json

The reward takes 0.05 s an image and the judge 1 s an answer, asleep: what is measured is the waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diffrl.rewards import load_reward
from diffrl.version import __version__

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
REWARD = """
import os, time

class Sleepy:
    name, batch_size = "sleepy", 4

    def __init__(self):
        os.makedirs(f"{os.path.dirname(__file__)}/calls", exist_ok=True)
        self.calls = open(f"{os.path.dirname(__file__)}/calls/{os.getpid()}", "a", buffering=1)

    def __call__(self, images, prompts, metadata):
        self.calls.write("image\\n" * len(images))
        time.sleep(0.05 * len(images))
        return images.mean((1, 2, 3))
"""
IMAGES = torch.rand(480, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Server:
    """`diffrl rewards serve` as a process."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "diffrl", "rewards", "serve", f"{folder / 'sleepy.py'}:Sleepy", "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split(" on ")[1].split()[0]


def by_ray(folder: Path, rounds: int) -> dict[str, Any]:
    """Four replicas of Ray Serve behind one address; then again, the busiest of them killed."""
    from diffrl.serving.replicas import Wanted, serve_on_ray, stop
    from diffrl.serving.server import Options

    wanted, urls, found = Wanted(f"{folder / 'sleepy.py'}:Sleepy", {}, least=4, most=4, cpus=0.25), list[str](), {}
    try:
        serve_on_ray({"sleepy": wanted}, "127.0.0.1", 0, Options(), urls.append)
        clients(folder, urls, 2)  # a first round opens connections
        found["4 replicas of Ray, 4 clients in step"] = clients(folder, urls, rounds)
        found["one of Ray's killed (SIGKILL)"] = clients(folder, urls, rounds, kill=lambda: calls(folder)[1])
    finally:
        stop()
    return found


def calls(folder: Path) -> tuple[int, int]:
    """Images that the replicas were asked for, and the process of the busiest one that lives."""
    counts = {int(file.name): len(file.read_bytes().split()) for file in (folder / "calls").iterdir()}
    living = [process for process in counts if Path(f"/proc/{process}").exists()]
    return sum(counts.values()), max(living, key=lambda process: counts[process])


def clients(folder: Path, urls: list[str], rounds: int, kill: Callable[[], int] | None = None) -> dict[str, Any]:
    """Four clients, as ranks: in every round each has 4 images scored, and all wait for the last of them."""
    before = calls(folder)[0]
    rewards = []
    for rank in range(4):
        os.environ["RANK"] = str(rank)
        rewards.append(load_reward("remote", reward="sleepy", servers=urls))
    step, seconds, wrong = threading.Barrier(4), list[float](), list[int]()

    def work(rank: int) -> None:
        for number in range(rounds):
            step.wait()
            if kill is not None and rank == 0 and number == rounds // 3:
                os.kill(kill(), signal.SIGKILL)
            first = 4 * (4 * number + rank) % 480
            part = IMAGES[first : first + 4]
            begun = time.perf_counter()
            scores = rewards[rank](part, ["a"] * 4, [{}] * 4)
            seconds.append(time.perf_counter() - begun)
            wrong.append(int((scores - part.mean((1, 2, 3))).abs().gt(1e-6).sum()))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole, seconds = time.perf_counter() - begun, sorted(seconds)
    found = {
        "scores": 4 * len(seconds),
        "wrong scores": sum(wrong),
        "scored again, as their answer died": calls(folder)[0] - before - 4 * len(seconds),
        "scores a second": round(4 * len(seconds) / whole, 1),
    }
    return found | {"p50 s": round(seconds[len(seconds) // 2], 3), "p99 s": round(seconds[int(0.99 * len(seconds))], 3)}


def judge(gone: float) -> dict[str, Any]:
    """64 images by a judge of 1 s and 8 slots, which goes away after 2 s for `gone` seconds."""
    from judges import SlowJudge

    one = SlowJudge(1.0, 8)
    reward = load_reward("vlm", server=one.url)
    if gone:
        threading.Timer(2.0, one.stop).start()
        threading.Timer(2.0 + gone, one.begin).start()
    begun = time.perf_counter()
    scores = reward(IMAGES[:64], ["a"] * 64, [{}] * 64)
    seconds = time.perf_counter() - begun
    one.stop()
    return {"seconds": round(seconds, 2), "scores": len(scores), "answered": one.answered}


def table(result: dict[str, Any]) -> str:
    """What each part needed, and the conditions."""
    heads = ["scores", "wrong scores", "scores a second", "p50 s", "p99 s", "seconds"]
    lines = [f"| | {' | '.join(heads)} |", "| --- " * 7 + "|"]
    for name, row in result.items():
        if isinstance(row, dict):
            lines.append(f"| {name} | " + " | ".join(f"{row[key]:g}" if key in row else "" for key in heads) + " |")
    said = "; ".join(f"{one['part']}: commit {one['commit']}, load {one['load']}" for one in result["parts"])
    return "\n".join(lines) + f"\n\n`{result['command']}`, {result['cpus']} CPU cores. {said[0].upper()}{said[1:]}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="of the four clients (default 30)")
    parser.add_argument("--servers-only", action="store_true", help="leave the judge out, to compare an older client")
    parser.add_argument("--ray", action="store_true", help="replicas of Ray Serve, too")
    parser.add_argument("--out", type=Path, help="JSON file of the figures")
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True).stdout.strip()
    part = {"part": "all", "commit": commit, "load": round(os.getloadavg()[0], 1)}
    result: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "cpus": os.cpu_count()}
    result |= {"version": __version__, "parts": [part]}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sleepy.py").write_text(REWARD)
        servers = [Server(Path(folder)) for _ in range(4)]
        urls = [server.url for server in servers]
        try:
            result["4 servers, 4 clients in step"] = clients(Path(folder), urls, arguments.rounds)
            victim = servers[1].process.pid
            if not arguments.servers_only:
                result["one of them killed (SIGKILL)"] = clients(Path(folder), urls, arguments.rounds, lambda: victim)
        finally:
            for server in servers:
                server.process.kill()
        if arguments.ray:
            shutil.rmtree(Path(folder) / "calls")
            result |= by_ray(Path(folder), arguments.rounds)
    if not arguments.servers_only:
        result["64 images, a judge of 1 s with 8 slots"] = judge(0.0)
        result["the same, away for 60 s"] = judge(60.0)
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
