"""Reward serving under stress: the same scores as in process, a server killed in the middle, thousands of bad requests.

    python tests/stress/serving.py --out assets/results/serving.json

A server process serves a cheap reward that writes down which images it judged. Clients score images through it; it is
killed (SIGKILL) and started again meanwhile. Then it gets bad requests of every kind, and its memory is watched.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from torch import Tensor

from diffrl.rewards import load_reward
from diffrl.serving.wire import JSON, TENSORS, encode

TOKEN = "a token of this trial"
REWARD = '''
import os, time

class Ledger:
    """Mean of the pixels; appends the identities of the images that it judged to a file."""

    name, batch_size = "ledger", 32

    def __init__(self, file):
        self.file = open(file, "a", buffering=1)

    def __call__(self, images, prompts, metadata):
        time.sleep(0.002 * len(images))  # so that the kill comes in the middle
        self.file.write("".join(f"{one['id']}\\n" for one in metadata if "id" in one))
        return images.mean((1, 2, 3))
'''


class Server:
    """`diffrl rewards serve` as a process of its own, on one port through restarts."""

    def __init__(self, folder: Path) -> None:
        (folder / "ledger.py").write_text(REWARD)
        (folder / "token").write_text(TOKEN)
        (folder / "settings.yaml").write_text(f"files: [{folder / 'token'}]\n")
        os.environ["DIFFRL_SETTINGS"] = str(folder / "settings.yaml")
        self.folder, self.ledger = folder, folder / "ledger.txt"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Returns when it answers."""
        command = [sys.executable, "-m", "diffrl", "rewards", "serve", f"{self.folder / 'ledger.py'}:Ledger", "clip"]
        command += [f"Ledger.file={self.ledger}", "clip.device=cpu", "--port", str(self.port), "--read-limit", "2"]
        command += ["--token-file", str(self.folder / "token"), "--max-megabytes", "16"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        for _ in range(600):
            try:
                httpx.get(self.url + "/health", trust_env=False)
                return
            except httpx.HTTPError:
                time.sleep(0.1)
        raise RuntimeError("the server does not start")

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def remote(self, reward: str, **arguments: Any) -> Any:
        token = str(self.folder / "token")
        return load_reward("remote", reward=reward, servers=self.url, token_file=token, **arguments)

    def megabytes(self) -> float:
        return psutil.Process(self.process.pid).memory_info().rss / 2**20


def same_scores(server: Server, count: int) -> dict[str, Any]:
    """The shipped CLIP over HTTP against the one in this process."""
    from diffrl.reward_tools.examples import example_images

    images, prompts = example_images()
    images, prompts = images[:count], prompts[:count]
    there = server.remote("clip")(images, prompts, [{}] * len(images))
    here = load_reward("clip", device="cpu")(images, prompts, [{}] * len(images))
    return {"images": len(images), "largest difference": float((there - here).abs().max())}


def restart(server: Server, total: int, clients: int) -> dict[str, Any]:
    """`clients` threads score `total` images between them; the server is killed after a third and started again."""
    images = torch.rand(total, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    answers: list[list[float]] = [[] for _ in range(total)]
    done = 0
    lock = threading.Lock()
    failures: list[str] = []

    def client(number: int) -> None:
        nonlocal done
        reward = server.remote("ledger", images=8)
        own = list(range(number, total, clients))
        for start in range(0, len(own), 25):
            rows = own[start : start + 25]
            try:
                scores = reward(images[rows], ["a"] * len(rows), [{"id": row} for row in rows])
            except RuntimeError as error:
                failures.append(str(error))
                return
            with lock:
                for row, score in zip(rows, scores.tolist(), strict=True):
                    answers[row].append(score)
                done += len(rows)

    begun = time.monotonic()
    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    while done < total // 3:
        time.sleep(0.01)
    server.kill()
    before = done
    down = time.monotonic()
    server.start()
    down = time.monotonic() - down
    for thread in threads:
        thread.join()
    expected: Tensor = images.mean((1, 2, 3))
    computed = collections.Counter(int(line) for line in server.ledger.read_text().split())
    right = [len(given) == 1 and abs(given[0] - float(expected[row])) <= 1e-6 for row, given in enumerate(answers)]
    return {
        "images": total,
        "clients": clients,
        "scored when killed": before,
        "seconds down": round(down, 2),
        "seconds": round(time.monotonic() - begun, 2),
        "images with exactly one score, the right one": sum(right),
        "failures": failures,
        "computed a second time, as the answer died with the server": sum(n - 1 for n in computed.values()),
    }


def bad_requests(server: Server, total: int) -> dict[str, Any]:
    """Every kind of bad request in turn; what was answered, and the server's memory on the way."""
    image = torch.rand(1, 3, 64, 64)
    good, kind = encode(image, ["a"], [{}], "tensors")
    deep = b'{"images":' + b"[" * 100_000
    wrong = encode(image * 2, ["a"], [{}], "tensors")[0]
    kinds: dict[str, tuple[int, str, bytes, str, str]] = {
        "broken JSON": (400, "ledger", b'{"images": [', JSON, TOKEN),
        "deep JSON": (400, "ledger", deep, JSON, TOKEN),
        "broken safetensors": (400, "ledger", good[:-7], TENSORS, TOKEN),
        "a PNG that is none": (400, "ledger", b'{"images": ["aGVsbG8="], "prompts": ["a"]}', JSON, TOKEN),
        "wrong token": (401, "ledger", good, kind, "x" * 20),
        "unknown reward": (404, "legder", good, kind, TOKEN),
        "oversized": (413, "ledger", bytes(17 * 2**20), TENSORS, TOKEN),
        "too many images": (
            413,
            "ledger",
            encode(torch.zeros(300, 3, 2, 2), ["a"] * 300, [{}] * 300, "tensors")[0],
            kind,
            TOKEN,
        ),
        "another type": (415, "ledger", good, "application/x-pickle", TOKEN),
        "values outside of [0, 1]": (422, "ledger", wrong, kind, TOKEN),
    }
    found: dict[str, collections.Counter[int]] = {name: collections.Counter() for name in kinds}
    memory: list[float] = []
    begun = time.monotonic()
    with httpx.Client(trust_env=False, timeout=60) as client:

        def ask(name: str) -> None:
            _, reward, body, content, token = kinds[name]
            headers = {"Content-Type": content, "Authorization": f"Bearer {token}"}
            answer = client.post(f"{server.url}/rewards/{reward}/score", content=body, headers=headers)
            found[name][answer.status_code] += 1

        names = list(kinds)
        for number in range(total):
            # The large ones take the time of all others together: one of them in 20 rounds.
            name = names[number % len(names)]
            ask("wrong token" if name == "oversized" and number // len(names) % 20 else name)
            if number % max(total // 10, 1) == 0 or number == total - 1:
                memory.append(round(server.megabytes(), 1))
                print(f"{number + 1} bad requests, server {memory[-1]} MiB", file=sys.stderr)
    wrong_status = {name: dict(counts) for name, counts in found.items() if set(counts) - {kinds[name][0]}}
    slow = slow_requests(server, 40)
    return {
        "requests": sum(sum(counts.values()) for counts in found.values()),
        "seconds": round(time.monotonic() - begun, 1),
        "answered": {name: dict(counts) for name, counts in found.items()},
        "answered with another status than expected": wrong_status,
        "server MiB on the way": memory,
        "slow requests answered 408": slow,
        "server MiB after slow ones": round(server.megabytes(), 1),
        "and then a good one": server.remote("ledger")(image, ["a"], [{}]).tolist() == [float(image.mean())],
    }


def slow_requests(server: Server, count: int) -> str:
    """Connections that stop in their body, all at once."""
    head = f"POST /rewards/ledger/score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
    head += f"Content-Type: {JSON}\r\nContent-Length: 9000000\r\n\r\n{{".encode()
    sockets = []
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        connection.sendall(head)
        sockets.append(connection)
    answers = []
    for connection in sockets:
        answers.append(connection.recv(64).startswith(b"HTTP/1.1 408 "))
        connection.close()
    return f"{sum(answers)} of {count}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000, help="images to score (default 2000)")
    parser.add_argument("--clients", type=int, default=8, help="clients at once (default 8)")
    parser.add_argument("--bad", type=int, default=10_000, help="bad requests (default 10000)")
    parser.add_argument("--out", type=Path, help="JSON file of the figures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        try:
            command = shlex.join(["python", *sys.argv])
            result: dict[str, Any] = {"command": command, "cpus": os.cpu_count(), "torch": torch.__version__}
            result["same scores"] = same_scores(server, 60)
            result["restart"] = restart(server, arguments.images, arguments.clients)
            result["bad requests"] = bad_requests(server, arguments.bad)
        finally:
            server.kill()
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
