"""Heartbeat between ranks: if one rank dies or hangs, all ranks stop and the error names the rank.

A process that waits in an exchange hears nothing of a rank that was stopped, and under NCCL nothing of one that died
either; nor does it run Python's handlers of signals. So a thread in each process has a connection to rank 0's and sends
a heartbeat, whatever its main thread is busy with; SIGSTOP stops both. Where the main thread cannot end the run within
GRACE seconds, the thread does: it keeps what the last epoch began with, says why, and ends the process.

Keys in the process group's TCPStore would not do: a store does not tell whether the process behind a key still lives.
The end of a connection does, at once and on every machine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from diffrl.errors import TrainingError, UserError, first_of_machine, in_one_line, printable, say
from diffrl.run.interrupt import EXIT_CODE, SIGNALS, Interrupted
from diffrl.run.peers import Peers

LIMIT = "DIFFRL_HEARTBEAT"  # environment variable: seconds without a heartbeat after which a process is given up
SECONDS = 90.0
GRACE = 10.0  # seconds for a main thread to end by itself; launchers kill 30 s after their SIGTERM
PAUSE = 3.0  # seconds that the news of a peer may need after an exchange with it has failed, or an error in the start
JOINING = 20.0  # seconds for all to be connected

log = logging.getLogger("diffrl")


class Heartbeat(Peers):
    """The processes that train together. Nothing happens before `join`, nor where there is one process only."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.table, self.limit = 0, [("", 0)], SECONDS
        self._links: dict[socket.socket, int] = {}  # to the rank
        self._silent: dict[socket.socket, int] = {}  # beats since something was heard
        self._listening = selectors.DefaultSelector()
        self._word: dict[str, Any] = {}  # what is told to the others: why it ends
        self._decided = threading.Event()
        self._thread: threading.Thread | None = None

    _wake: socket.socket
    _woken: socket.socket

    def join(self, accelerator: Accelerator) -> None:
        """Connect with the others and begin to watch; every process calls it.

        Raises:
            UserError: where DIFFRL_HEARTBEAT is no number of seconds.
        """
        asked = os.environ.get(LIMIT, str(SECONDS))
        with contextlib.suppress(ValueError):
            self.limit, asked = float(asked), ""
        if asked or not self.limit > 0:
            raise UserError(f'{LIMIT}: expected seconds above 0, got "{os.environ[LIMIT]}"')
        self.accelerator = accelerator
        if accelerator.num_processes == 1:
            return
        self.rank, token = accelerator.process_index, secrets.token_hex(16)
        server, where = _open(accelerator.num_processes) if self.rank == 0 else (None, "")
        port = server.getsockname()[1] if server else 0
        found = gather_object([(socket.gethostname(), os.getpid(), where, port, token, self.limit)])
        self.table = [(host, pid) for host, pid, *_ in found]
        host, _, where, port, token, self.limit = found[0]
        if server is not None:
            with server:
                self._accept(server, token)
        for address in (where, host) if self.rank else ():
            with contextlib.suppress(OSError):
                link = socket.create_connection((address, port), timeout=JOINING)
                link.sendall(f"{token} {self.rank}\n".encode())
                self._links[link] = 0
                break
        if len(self._links) < (1 if self.rank else len(found) - 1):
            log.warning("rank %d: no connection for heartbeats (%s): who stops is not noticed", self.rank, where)
        self._silent = dict.fromkeys(self._links, 0)
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="diffrl-heartbeat", daemon=True)
        self._thread.start()

    def _accept(self, server: socket.socket, token: str) -> None:
        """A link to every rank; a connection without the token is none."""
        until = time.monotonic() + JOINING
        while len(self._links) < len(self.table) - 1 and (left := until - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(OSError, ValueError):
                link, _ = server.accept()
                link.settimeout(2)
                secret, rank = link.makefile("rb", buffering=0).readline(64).decode().split()
                if secrets.compare_digest(secret, token):
                    self._links[link] = int(rank)

    @contextlib.contextmanager
    def forward_signals(self) -> Iterator[None]:
        """While entered the thread sees signals, too, which Python's handlers do not while an exchange waits."""
        if self._thread is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)

    @contextlib.contextmanager
    def attribute_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            cause = self._cause(error)
            if cause is error:
                raise
            raise cause from error

    def _cause(self, error: BaseException) -> BaseException:
        if self._thread is None:
            return error
        self.lock.acquire()  # and never given back: from here on the main thread ends this process
        exchange = isinstance(error, RuntimeError) and not type(error).__module__.startswith("diffrl.")
        if exchange:
            self._decided.wait(PAUSE)
        if self.ended is not None and (exchange or isinstance(error, Interrupted)):
            return self.ended
        if exchange and "Timed out waiting" in str(error):  # gloo's words; NCCL's watchdog ends the process by itself
            return TrainingError(
                f"rank {self.rank}: the others live but do not come to an exchange: {in_one_line(error)}"
            )
        return error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Tell the others how this process ended. After an error they wait for rank 0: its end may end them, and a
        launcher then ends rank 0, which has something to keep."""
        if self._thread is None:
            return
        cause = None if error is None else self._cause(error)
        self._wake.send(b"\0")
        self._thread.join()
        signalled = isinstance(error, Interrupted | KeyboardInterrupt)
        if error is not None and not self._word:
            said = str(error) if isinstance(error, UserError) else in_one_line(error)
            text = getattr(error, "signal", "SIGINT") if signalled else f"ended: {said}"
            code = EXIT_CODE if signalled else 2 if isinstance(error, UserError) else 1
            self._word = {"rank": self.rank, "code": code, "text": text, "printed": True}
        self._tell(self._word or {"code": 0})
        if error is not None and self.rank:
            with contextlib.suppress(OSError):
                until = time.monotonic() + 6 * GRACE
                for link in self._links:
                    link.settimeout(GRACE)
                    while link.recv(1024) and time.monotonic() < until:
                        pass
        for link in [*self._links, self._wake, self._woken]:
            link.close()
        if cause is not None and (final := self._final(cause)) is not error:
            raise final from error

    def _watch(self) -> None:
        try:
            self._listen()
        except Exception as error:  # what was made to end a run in order must not end one that is in order
            log.warning("rank %d: heartbeats ended (%s)", self.rank, in_one_line(error))

    def _listen(self) -> None:
        beat, last = min(5.0, self.limit / 6), math.inf
        due = time.monotonic() + beat
        for link in [self._woken, *self._links]:
            self._listening.register(link, selectors.EVENT_READ, bytearray())
        while True:
            ready = self._listening.select(max(0.0, min(due, last) - time.monotonic()))
            # What became of a peer comes first: a launcher's signal follows from it.
            for key, _ in sorted(ready, key=lambda found: found[0].fileobj is self._woken):
                if key.fileobj is not self._woken:
                    self._receive(key.fileobj, key.data)
                elif not all(numbers := self._woken.recv(64)):
                    return
                elif named := [signal.Signals(number).name for number in numbers if number in SIGNALS]:
                    self._decide({"rank": self.rank, "code": EXIT_CODE, "text": named[0]})
            if time.monotonic() >= due:
                due = time.monotonic() + beat
                self._beat(int(self.limit / beat))
            if self.ended is not None and last == math.inf:
                last = time.monotonic() + (GRACE if self.on_failure else PAUSE)
            if time.monotonic() >= last:
                if self.lock.acquire(blocking=False):
                    self._end()
                last = time.monotonic() + 0.2  # the main thread is about to end, or keeps something

    def _receive(self, link: Any, begun: bytearray) -> None:
        """What has come from another process; nothing at all comes where that is gone."""
        received = b""
        with contextlib.suppress(OSError):
            received = link.recv(4096)
        if not received:
            self._drop(link, "is gone: killed, or ended by a fault")
            return
        self._silent[link] = 0
        *lines, rest = bytes(begun + received).split(b"\n")
        begun[:] = rest
        for word in map(json.loads, filter(None, lines)):
            if word["code"]:
                self._decide(word)
            else:
                self._drop(link)

    def _beat(self, most: int) -> None:
        """Beats are counted, not seconds: a process that was stopped itself has not waited in that time."""
        self._tell(None)
        for link, count in list(self._silent.items()):
            self._silent[link] = count + 1
            if count >= most:
                self._drop(link, f"has given no sign of life for {self.limit:g} s: stopped, or its machine is")

    def _drop(self, link: socket.socket, text: str = "") -> None:
        """Listen no more to a process that has ended in order, or for the reason in `text`."""
        del self._silent[link]
        self._listening.unregister(link)
        if text:
            self._decide({"rank": self._links[link], "code": 1, "text": text})

    def _decide(self, word: dict[str, Any]) -> None:
        """What ended the run: the first news of it counts, here and, through rank 0, everywhere."""
        if self.ended is None:
            self._word, self.ended = word, self._error(**word)
            self._decided.set()
            self._tell(word)

    def _tell(self, word: dict[str, Any] | None) -> None:
        for link in self._links:
            with contextlib.suppress(OSError):  # a rank that cannot be told is seen to be gone when it is listened to
                link.sendall(b"\n" if word is None else json.dumps(word).encode() + b"\n")

    def _error(self, rank: int, code: int, text: str, printed: bool = False) -> Exception:
        host, pid = self.table[rank]
        who = f"rank {rank} (process {pid} on {host})"
        if code == EXIT_CODE:
            return Interrupted(text if rank == self.rank else f"{text} to {who}")
        if code == 2:
            return UserError(f"{who} {text}")
        error = TrainingError(f"{who} {text}")
        mine = self.table[self.rank][0]
        first = next((r for r, (where, _) in enumerate(self.table) if where == mine and r != rank), self.rank)
        error.quiet = first != self.rank or (printed and host == mine)  # one line on every machine
        return error

    def _final(self, cause: BaseException) -> BaseException:
        if self.folder is not None and cause is self.ended and isinstance(cause, TrainingError):
            folder = self.folder  # which this machine may not have
            kept = folder.intact if folder.path.is_dir() else f"continue with --resume {folder.path}"
            final = TrainingError(f"{cause}; {kept}")
            final.quiet = cause.quiet
            return final
        return cause

    def _end(self) -> None:
        """End this process, whose main thread is held up."""
        assert self.ended is not None
        try:
            if self.on_failure is not None:
                self.on_failure(self.ended)
        except Exception as error:
            say(f"diffrl: error: {in_one_line(error)}")
        final, code = self._final(self.ended), self._word["code"]
        if self.folder is not None:
            self.folder.ended(code)
        if isinstance(final, Interrupted):
            say_stopped(None if self.folder is None else self.folder.path, final)
        elif not (getattr(final, "quiet", False) or (code == 2 and not first_of_machine())):
            say(f"diffrl: error: {' '.join(printable(str(final)).split())}")
        os._exit(code)


def say_stopped(folder: Path | None, ended: Interrupted) -> None:
    """How the run in `folder`, where one is known, goes on: once on each machine."""
    if first_of_machine():
        begun = folder is not None and (folder / "metrics.jsonl").is_file()
        again = f"continue with: diffrl train --resume {folder}" if begun else "nothing was trained yet"
        say(f"diffrl: {again}  ({ended}; exit code {EXIT_CODE})")


def _open(world: int) -> tuple[socket.socket | None, str]:
    """A server on a free port, until all are connected, and its address, on this machine's way to the master's."""
    master = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "1"))
    try:
        family, kind, _, _, target = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            where = str(probe.getsockname()[0])
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world)) == world
        # A machine's own name may lead to its loopback device, where no other machine reaches it.
        return socket.create_server((where if here else "", 0), family=family if here else socket.AF_INET), where
    except OSError as error:
        return None, str(error)
