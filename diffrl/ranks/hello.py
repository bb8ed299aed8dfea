"""Before all processes have met: who fails or dies on its way there, as while packages are read, ends the others, too.

Torch's meeting waits for missing processes until its time is over. So from its first moment on a process has a
connection to the first one, beside the launcher's port; when all have met `diffrl.ranks.heartbeat` goes on. On one
machine the launcher sees to it. Where the ports are taken or closed, only the meeting's limit remains.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import socketserver
import threading
import time
from types import TracebackType
from typing import Any

from diffrl.errors import UserError, first_of_machine, in_one_line, say

PAUSE = 1.0  # seconds that the news of another's end may need after torch's own error, which follows from it
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PATIENCE = 15.0  # seconds that a process with an error waits for those who do not know of it yet
GONE = "is gone: killed, or ended by a fault"


class Hello:
    """Entered until all have met. An error inside is told to all; another process's end ends this one at once."""

    def __init__(self) -> None:
        found = {name: os.environ.get(name, "") for name in NAMES}
        self.rank, self.world, here, port = (int(found[name] or -1) for name in NAMES if name != "MASTER_ADDR")
        self.master, self.watched = found["MASTER_ADDR"], all(found.values()) and here != self.world
        self.ports = [20_000 + (port + 17_389 + 911 * turn) % 40_000 for turn in range(4)]
        run = os.environ.get("TORCHELASTIC_RUN_ID", "")
        self.greeting = json.dumps(["diffrl", run, port, self.world]).encode() + b"\n"  # what only this run's know
        self.who = f"rank {self.rank} (process {os.getpid()} on {socket.gethostname()})"
        self.seen = {self.rank}
        self._links: list[Any] = []
        self._lock, self._over, self._server = threading.Lock(), False, None
        self._heard_of = threading.Event()  # all that this process can tell of its end are there

    _server: socketserver.ThreadingTCPServer | None

    def __enter__(self) -> Hello:
        if self.watched:
            threading.Thread(target=self._receive if self.rank == 0 else self._call, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None or not self.watched or self._over:
            return
        time.sleep(PAUSE)
        self._heard_of.wait(PATIENCE)
        text = str(error) if isinstance(error, UserError) else in_one_line(error)
        self._leave({"code": 2 if isinstance(error, UserError) else 1, "text": f"{self.who} ended: {text}"})

    def missing(self) -> str:
        """Who was never heard of, in words; only the first process knows."""
        ranks = [str(rank) for rank in range(self.world) if rank not in self.seen]
        more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        return f"; no sign of rank {', '.join(ranks[:8])}{more}" if ranks and self._server is not None else ""

    def met(self) -> None:
        """All are there: from here on they have other means."""
        self._leave({})

    def _leave(self, word: dict[str, Any]) -> None:
        with self._lock:
            self._over = True
            self._tell(word)

    def _tell(self, word: dict[str, Any]) -> None:
        for link in self._links:
            with contextlib.suppress(OSError, ValueError):  # a process that has ended needs no word
                link.sendall(json.dumps(word).encode() + b"\n")

    def _heard(self, line: bytes, who: str) -> None:
        """The last that another process says: nothing at all where it has died."""
        word: dict[str, Any] = json.loads(line) if line else {"code": 1, "text": f"{who} {GONE}"}
        with self._lock:
            if self._over or not word:
                return
            self._tell(word)
            if first_of_machine():
                say(f"diffrl: error: {' '.join(word['text'].split())}")
            os._exit(int(word["code"]))

    def _receive(self) -> None:
        for port in self.ports:
            with contextlib.suppress(OSError):
                self._server = _Server(("", port), _Link)
                self._server.hello = self  # type: ignore[attr-defined]
                self._server.timeout = 0.2
                with self._server:
                    while not self._over:
                        self._server.handle_request()
                return

    def _call(self) -> None:
        while not self._over:
            for port in self.ports:
                with contextlib.suppress(OSError, ValueError):
                    link = socket.create_connection((self.master, port), timeout=5)
                    link.sendall(self.greeting + json.dumps([self.rank, self.who]).encode() + b"\n")
                    lines = link.makefile("rb")
                    if lines.readline(500) == self.greeting:
                        link.settimeout(None)
                        self._links.append(link)
                        self._heard_of.set()
                        self._heard(lines.readline(4096), "rank 0")
                        return
            time.sleep(0.5)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that does not speak as we do is none of ours."""


class _Link(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        hello = self.server.hello  # type: ignore[attr-defined]
        if self.rfile.readline(500) != hello.greeting:
            return
        rank, who = json.loads(self.rfile.readline(500))
        self.wfile.write(hello.greeting)
        hello.seen.add(rank)
        hello._links.append(self.connection)
        if len(hello.seen) == hello.world:
            hello._heard_of.set()
        line = b""
        with contextlib.suppress(OSError):
            line = self.rfile.readline(4096)
        hello._heard(line, who)
