"""The client of reward servers (`diffrl.serving.server`): pooled connections, several servers in turn, back-off."""

from __future__ import annotations

import itertools
import json
import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from diffrl.errors import UserError
from diffrl.rewards.secrets import check_file, check_transport, redact
from diffrl.rewards.timeouts import TooLong, call

TOKEN = "DIFFRL_REWARD_TOKEN"  # environment variable of the token, for servers and clients
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 15.0  # seconds of back-off, doubled from one to the next
PASSING = (429, 502, 503)  # statuses that another attempt may not meet
MOST = 2**20  # bytes of an answer: some 40,000 scores
DESCRIBING = 30.0  # seconds at most that a server may take to say what it serves


class RemoteError(RuntimeError):
    """A server did not answer, or did not serve a request: the message names it."""


@dataclass(frozen=True)
class Answer:
    """A server's answer, read to its end. `url`: of the server."""

    url: str
    status: int
    reason: str
    headers: httpx.Headers
    body: bytes

    def json(self) -> dict[str, Any]:
        """The object of an answer with status 200; else `RemoteError`."""
        if self.status != 200:
            raise RemoteError(f"server {self.url}: {_status(self)}")
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise RemoteError(f"server {self.url}: its answer is not JSON; is it a diffrl reward server?") from error
        if not isinstance(value, dict):
            raise RemoteError(f"server {self.url}: its answer is not a JSON object; is it a diffrl reward server?")
        return value


class Servers:
    """Servers that serve the same, used in turn.

    A request that finds its server gone or busy goes to the next at once, and after all of them have failed again after
    a pause, until `patience` seconds have passed. `timeout`: seconds that one attempt may last, from its first byte to
    its last, however the server paces them. Answers that another attempt cannot change, and those of more than `MOST`
    bytes, are errors at once. Connections are kept; proxies of the environment are not used.
    """

    def __init__(self, urls: Sequence[str], token: str | None, timeout: float, patience: float) -> None:
        self.urls = [_checked(url) for url in urls]
        for url in self.urls if token is not None else ():
            check_transport(url, "servers")
        if not self.urls:
            raise UserError("servers: name at least one, for example http://127.0.0.1:8000")
        self.patience, self.timeout = patience, timeout
        headers = {"Accept-Encoding": "identity"}  # a compressed answer has no size until it is unpacked
        headers |= {} if token is None else {"Authorization": f"Bearer {token}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8 * len(self.urls))
        connect = httpx.Timeout(timeout, connect=min(timeout, 10.0))
        self._client = httpx.Client(headers=headers, limits=limits, timeout=connect, trust_env=False)
        # Each process begins at another server: in step, all of them would ask the same one at the same moment.
        self._turn = itertools.count(int(os.environ.get("RANK", "0")))
        self._chance = random.Random()  # not the global one, whose state belongs to the run
        self._lock = threading.Lock()
        self.stop = threading.Event()  # set: nobody waits for a server any more

    def get(self, url: str, path: str) -> dict[str, Any]:
        """The JSON object of one server; `RemoteError` at the first failure."""
        try:
            return self._ask("GET", url, path, min(self.timeout, DESCRIBING)).json()
        except httpx.HTTPError as error:
            raise RemoteError(f"server {url}: {_reason(error)}") from error

    def post(self, path: str, body: bytes, content_type: str) -> Answer:
        """Of whichever server answers first with status 200; see the class for what is tried. Raises `RemoteError`."""
        begun = time.monotonic()
        pause = FIRST_PAUSE
        while True:
            wait = 0.0
            for url in self._round():
                try:
                    answer = self._ask("POST", url, path, self.timeout, body, {"Content-Type": content_type})
                except httpx.HTTPError as error:
                    problem = f"server {url}: {_reason(error)}"
                    continue
                if answer.status not in PASSING:
                    return answer
                problem = f"server {url}: {_status(answer)}"
                wait = max(wait, _seconds(answer.headers.get("retry-after")))
            wait = max(wait, pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            passed = time.monotonic() - begun
            if passed + wait > self.patience:
                others = f" (and {len(self.urls) - 1} more)" if len(self.urls) > 1 else ""
                raise RemoteError(f"{problem}{others}; given up after {passed:.0f} s (patience: {self.patience:g} s)")
            if self.stop.wait(wait * (0.75 + 0.5 * self._chance.random())):  # or clients would come again together
                raise RemoteError(f"{problem}; interrupted")

    def _ask(
        self, method: str, url: str, path: str, limit: float, body: bytes | None = None, headers: Any = None
    ) -> Answer:
        """One attempt. httpx limits the wait for each piece, and a server may send a byte at a time: the whole attempt
        is made in a thread that can be left behind."""
        end = time.monotonic() + limit
        too_long = httpx.ReadTimeout(f"no whole answer within {limit:g} s")

        def attempt() -> Answer:
            with self._client.stream(method, url + path, content=body, headers=headers) as response:
                if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
                    raise RemoteError(f"server {url}: its answer is compressed, which was not asked for")
                parts, size = [], 0
                for part in response.iter_raw():
                    parts.append(part)
                    size += len(part)
                    if size > MOST:
                        raise RemoteError(f"server {url}: its answer has more than {MOST} bytes")
                    if time.monotonic() > end:
                        raise too_long
                return Answer(url, response.status_code, response.reason_phrase, response.headers, b"".join(parts))

        try:
            return call(attempt, limit, self._interrupted).result()
        except TooLong:
            raise too_long from None

    def _interrupted(self) -> None:
        if self.stop.is_set():
            raise RemoteError("interrupted")

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _round(self) -> list[str]:
        """All servers, beginning with the one whose turn it is."""
        with self._lock:
            first = next(self._turn) % len(self.urls)
        return self.urls[first:] + self.urls[:first]


def find_token(token_file: str | None, trusted: bool = False) -> str | None:
    """The token of a file, or of the environment variable DIFFRL_REWARD_TOKEN, or None. It is never in a config.

    `trusted`: the user himself named the file, on the command line; one that a config names has to be allowed.
    """
    if token_file is None:
        return os.environ.get(TOKEN) or None
    if not trusted:
        check_file(token_file, "token_file")
    try:
        token = Path(token_file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'token file "{token_file}" cannot be read: {error}') from error
    if not token or not token.isascii() or not token.isprintable():
        raise UserError(f'token file "{token_file}": expected one line of printable ASCII')
    return token


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if not fine:
        raise UserError(f'servers: "{redact(url)}" is not a URL such as http://127.0.0.1:8000')
    return url.rstrip("/")


def _status(answer: Answer) -> str:
    """`401: send the header ...`."""
    try:
        message = json.loads(answer.body)
        text = message.get("error") or message.get("detail") or ""
    except (ValueError, RecursionError, AttributeError):
        text = answer.reason
    return f"{answer.status}: {str(text)[:500]}"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _seconds(text: str | None) -> float:
    return min(float(text), LONGEST_PAUSE) if text is not None and text.isascii() and text.isdigit() else 0.0
