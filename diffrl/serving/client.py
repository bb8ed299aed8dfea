"""The client of reward servers and judges: several servers as one, requests side by side, and patience.

Each server has a bound of requests at once. A request goes to the server that has the fewest of ours, oldest first; one
that finds its server gone (no connection, a disconnect, no answer in time) or busy (429, 502, 503, 504) goes to another
at once, or waits for one, until `patience` seconds after its first failure have passed. A server that failed rests: as
long as its Retry-After asks, or else with growing pauses; after a disconnect one request alone tries it again.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
import random
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from heapq import heappop, heappush
from pathlib import Path
from time import time
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx

from diffrl.errors import UserError, read_text
from diffrl.reward_kinds.coroutines import running_loop
from diffrl.rewards.credentials import redact
from diffrl.serving.secrets import check_file, check_transport

T = TypeVar("T")
log = logging.getLogger("diffrl")
TOKEN = "DIFFRL_REWARD_TOKEN"  # environment variable of the token, for servers and clients
PATIENCE = 600.0  # seconds, as a default
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 2.0  # seconds that a server rests after a failure, doubled from one to the next
# Statuses that another attempt, or another server, may not meet; from 520 on those of proxies on the net.
PASSING = (408, 425, 429, 502, 503, 504, *range(520, 531))
CUTS = 2  # times that a request is sent again for a plain-text 500
MOST = 2**20  # bytes of an answer: some 40,000 scores
DESCRIBING = 30.0  # seconds at most that a server may take to say what it serves
NEWS = 30.0  # seconds after which a name is looked up again: servers come and go
IDLE = 4.0  # seconds that a connection is kept: uvicorn, and so vLLM, closes it after five


class RemoteError(RuntimeError):
    """A server did not answer, or did not serve a request: the message names it. `absent`: there was no connection.
    `status`: what it answered, if it did."""

    absent, status = False, 0


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
            refusal = RemoteError(f"server {self.url}: {self.problem}")
            refusal.status = self.status
            raise refusal
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise RemoteError(f"server {self.url}: its answer is not JSON; is it the right server?") from error
        if not isinstance(value, dict):
            raise RemoteError(f"server {self.url}: its answer is not a JSON object; is it the right server?")
        return value

    @property
    def cut(self) -> bool:
        """Is it a proxy's word that the server behind it broke off? A server's own error is JSON."""
        return self.status == 500 and not self.body.lstrip().startswith(b"{")

    @property
    def problem(self) -> str:
        """`401: send the header ...`."""
        if self.status in range(300, 400) and (place := self.headers.get("location")):
            return f"{self.status}: it sends elsewhere, which is not followed: {redact(place[:200])}"
        try:
            message = json.loads(self.body)
            text = message.get("error") or message.get("detail") or message.get("message") or ""
            text = text.get("message", text) if isinstance(text, dict) else text
        except (ValueError, RecursionError, AttributeError):
            text = self.body.decode(errors="replace") or self.reason
        return f"{self.status}: {' '.join(str(text).split())[:500]}"


@dataclass(eq=False)
class _Server:
    """One address. `room`: requests that it gets at once; `rests`: until this time of the loop; `gone`: it did not
    answer, so that one request alone tries it again."""

    url: str
    room: float
    extras: dict[str, Any] = field(default_factory=dict)
    busy: int = 0
    pause: float = 0.0
    rests: float = 0.0
    failed: float = -1.0  # when it failed last
    gone: bool = False

    def succeeded(self, most: int) -> None:
        self.room = float(most) if self.gone else min(most, self.room + 1 / self.room)
        self.gone, self.pause, self.rests = False, 0.0, 0.0

    def refused(self, began: float, now: float, gone: bool, wait: float) -> None:
        if began > self.failed:  # not one of many that failed together
            self.pause, self.failed = min(max(2 * self.pause, FIRST_PAUSE), LONGEST_PAUSE), now
        self.gone = gone
        self.room = 1.0 if gone else max(1.0, min(self.room, self.busy - 1))  # a busy server has as many as it takes
        chance = _chance.random()  # or clients would come again together
        self.rests = max(self.rests, now + max(wait * (1 + 0.1 * chance), self.pause * (0.75 + 0.5 * chance)))


_chance = random.Random()  # not the global one, whose state belongs to the run


class Servers:
    """Servers that serve the same.

    urls: one or several; a name with several addresses stands for all of them, and is looked up again as they change.
    token: sent to all. timeout: seconds that one attempt may last, from its first byte to its last, however the server
    paces them. patience: seconds from a request's first failure to its end. at_once: requests to each server. most:
    bytes of an answer. proxies: those of the environment are used. what: begins messages on the URLs.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        token: str | None,
        timeout: float,
        patience: float = PATIENCE,
        *,
        at_once: int = 4,
        most: int = MOST,
        proxies: bool = False,
        what: str = "servers",
    ) -> None:
        given = [urls] if isinstance(urls, str) else urls or ()
        self.urls = list(dict.fromkeys(_checked(url, what) for url in given))
        for url in self.urls if token is not None else ():
            check_transport(url, what)
        if not self.urls:
            raise UserError(f"{what}: name at least one, for example http://127.0.0.1:8000")
        self.patience, self.timeout, self.at_once, self.most = patience, timeout, at_once, most
        headers = {"Accept-Encoding": "identity"}  # a compressed answer has no size until it is unpacked
        headers |= {} if token is None else {"Authorization": f"Bearer {token}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE)
        connect = httpx.Timeout(timeout, connect=min(timeout, 10.0), pool=None)
        self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=connect, trust_env=proxies)
        self._names = not (proxies and getproxies().keys() - {"no"})  # a proxy looks names up itself
        self._servers: list[_Server] = []
        self._update(self._look_up())
        # Each process begins at another server: in step, all of them would ask the same one at the same moment.
        self._turn = int(os.environ.get("RANK") or 0)
        self._tickets = itertools.count()
        self._waiting: list[tuple[int, asyncio.Future[_Server]]] = []
        self._looked = 0.0

    def widen(self, at_once: int) -> None:
        """Each server gets so many requests at once."""
        self.at_once = at_once
        for server in self._servers:
            server.room = at_once

    def run(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """The results of coroutines that `send`, all of them at once; the first failure ends the others."""

        async def every() -> list[T]:
            tasks = [asyncio.ensure_future(one) for one in work]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)  # none is left behind the error

        future = asyncio.run_coroutine_threadsafe(every(), running_loop())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def each(self, path: str, beside: str = "") -> dict[str, dict[str, Any] | RemoteError]:
        """{server: the JSON object that it has there, or what is wrong with it}, asked once and side by side. `beside`:
        an end of the servers' URLs in whose place the path stands."""
        limit = min(self.timeout, DESCRIBING)

        async def ask(server: _Server) -> dict[str, Any] | RemoteError:
            try:
                return (await self._attempt("GET", server, server.url.removesuffix(beside) + path, limit)).json()
            except httpx.HTTPError as error:
                problem = RemoteError(f"server {server.url}: {_reason(error)}")
                problem.absent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                return problem
            except RemoteError as error:
                return error

        asked = list(self._servers)
        return dict(zip([one.url for one in asked], self.run([ask(one) for one in asked]), strict=True))

    async def send(self, path: str, make: Callable[[], tuple[bytes, str]]) -> Answer:
        """The answer of whichever server takes the POST, whatever its status if waiting does not help.

        `make`: the body and its type, made in a thread when there is a place for the request. Raises `RemoteError`.
        """
        loop, ticket, first, cuts = asyncio.get_running_loop(), next(self._tickets), None, 0
        while True:
            server = await self._place(ticket)
            began = loop.time()
            try:
                body, kind = await asyncio.to_thread(make)
                url, headers = server.url + path, {"Content-Type": kind}
                answer = await self._attempt("POST", server, url, self.timeout, body, headers)
                cuts += answer.cut  # a server whose own fault is plain text is not waited for
                if answer.status not in PASSING and not (answer.cut and cuts <= CUTS):
                    server.succeeded(self.at_once)
                    return answer
                problem = f"server {server.url}: {answer.problem}"
                server.refused(began, loop.time(), False, _wait(answer.headers))
            except httpx.HTTPError as error:
                problem = f"server {server.url}: {_reason(error)}"
                if server.gone and began > server.failed and server.pause <= FIRST_PAUSE:  # no mere disconnect
                    log.warning("%s; it is asked again for up to %g s", problem, self.patience)
                server.refused(began, loop.time(), True, 0.0)
            finally:
                server.busy -= 1
                self._serve()
                if server.rests:
                    loop.call_at(server.rests, self._serve)
            first = began if first is None else first
            if min(one.rests for one in self._servers) - first > self.patience:
                passed = loop.time() - first
                others = f" (and {len(self._servers) - 1} more)" if len(self._servers) > 1 else ""
                raise RemoteError(f"{problem}{others}; given up after {passed:.0f} s (patience: {self.patience:g} s)")

    async def _place(self, ticket: int) -> _Server:
        """A place at a server."""
        loop = asyncio.get_running_loop()
        place: asyncio.Future[_Server] = loop.create_future()
        heappush(self._waiting, (ticket, place))
        try:
            if self._names and loop.time() - self._looked > NEWS:
                self._looked = loop.time()
                self._update(await asyncio.to_thread(self._look_up))
            self._serve()
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                place.result().busy -= 1
                self._serve()
            raise

    def _serve(self) -> None:
        """Hand free places to the oldest requests."""
        now = asyncio.get_running_loop().time() + 1e-3  # a timer may ring a moment early
        while self._waiting:
            if self._waiting[0][1].done():  # given up
                heappop(self._waiting)
                continue
            count = len(self._servers)
            free = [i for i, one in enumerate(self._servers) if one.rests <= now and one.busy < int(one.room)]
            if not free:
                break
            chosen = min(free, key=lambda i: (self._servers[i].busy, (i - self._turn) % count))
            self._turn = chosen + 1
            self._servers[chosen].busy += 1
            heappop(self._waiting)[1].set_result(self._servers[chosen])

    async def _attempt(
        self, method: str, server: _Server, url: str, limit: float, body: bytes | None = None, headers: Any = None
    ) -> Answer:
        """One attempt, read piece by piece: httpx limits the wait for each, and a server may send a byte at a time."""
        extensions = server.extras.get("extensions")
        headers = {**server.extras.get("headers", {}), **(headers or {})}
        request = {"content": body, "headers": headers, "extensions": extensions}
        try:
            async with asyncio.timeout(limit):
                async with self._client.stream(method, url, **request) as response:
                    if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
                        raise RemoteError(f"server {server.url}: its answer is compressed, which was not asked for")
                    parts, size = [], 0
                    async for part in response.aiter_raw():
                        parts.append(part)
                        size += len(part)
                        if size > self.most:
                            raise RemoteError(f"server {server.url}: its answer has more than {self.most} bytes")
                    status, reason = response.status_code, response.reason_phrase
                    return Answer(server.url, status, reason, response.headers, b"".join(parts))
        except TimeoutError:
            raise httpx.ReadTimeout(f"no whole answer within {limit:g} s") from None

    def _look_up(self) -> dict[str, dict[str, Any]]:
        """{URL of an address: how a request to it says the name}, of all URLs."""
        return {url: extras for one in self.urls for url, extras in _addresses(one, self._names).items()}

    def _update(self, addresses: dict[str, dict[str, Any]]) -> None:
        before = {one.url: one for one in self._servers}
        self._servers = [before.get(url) or _Server(url, self.at_once, extras) for url, extras in addresses.items()]

    def close(self) -> None:
        """Closes the connections."""
        self.run([self._client.aclose()])


def _addresses(url: str, names: bool) -> dict[str, dict[str, Any]]:
    """The URL itself, or one for each of the several addresses of its name."""
    parts = urlsplit(url)
    host, port = str(parts.hostname), parts.port or (443 if parts.scheme == "https" else 80)
    try:
        told = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM) if names else []
    except OSError:  # it may be known later
        told = []
    families = [
        list(dict.fromkeys(str(one[4][0]) for one in told if one[0] == f)) for f in (socket.AF_INET, socket.AF_INET6)
    ]
    several = next((found for found in families if len(found) > 1), None)
    if several is None:
        return {url: {}}
    extras = {"headers": {"Host": parts.netloc.rpartition("@")[2]}, "extensions": {"sni_hostname": host}}
    return {
        parts._replace(netloc=f"[{one}]:{port}" if ":" in one else f"{one}:{port}").geturl(): extras for one in several
    }


def find_token(token_file: str | None, trusted: bool = False) -> str | None:
    """The token of a file, or of the environment variable DIFFRL_REWARD_TOKEN, or None. It is never in a config.

    `trusted`: the user himself named the file, on the command line; one that a config names has to be allowed.
    """
    if token_file is None:
        return os.environ.get(TOKEN) or None
    if not trusted:
        check_file(token_file, "token_file")
    try:
        token = read_text(Path(os.path.expanduser(token_file))).strip()
    except UserError as error:
        raise UserError(f'token file "{token_file}" cannot be read: {error.__cause__ or error}') from error
    if not token or not token.isascii() or not token.isprintable():
        raise UserError(f'token file "{token_file}": expected one line of printable ASCII')
    return token


def _checked(url: str, what: str) -> str:
    try:
        parts = urlsplit(url)
        path_alone = not parts.query and not parts.fragment  # what is asked for is written behind it
        name = (parts.hostname or "").encode("idna")  # as it is looked up
        fine = parts.scheme in ("http", "https") and parts.port != 0 and path_alone and url.isprintable() and bool(name)
    except ValueError:
        fine = False
    if not fine:
        raise UserError(f'{what}: "{redact(url)}" is not a URL such as http://127.0.0.1:8000')
    return url.rstrip("/")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _wait(headers: Mapping[str, str]) -> float:
    """Seconds by Retry-After: a number or a date, by the server's own clock; or by retry-after-ms."""
    text, divisor = headers.get("retry-after", ""), 1.0
    if more := headers.get("retry-after-ms"):
        text, divisor = more, 1000.0
    try:
        wait = float(text) / divisor
    except ValueError:
        try:
            now = headers.get("date")
            then = parsedate_to_datetime(text).timestamp()
            wait = then - (parsedate_to_datetime(now).timestamp() if now else time())
        except (ValueError, OverflowError, TypeError):
            return 0.0
    return min(max(wait, 0.0), 1e6) if math.isfinite(wait) else 0.0
