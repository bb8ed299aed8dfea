"""`diffrl rewards serve`: rewards behind HTTP, for clients that have no room or no device for them.

    GET  /health                  ok, or 503 when a call of a reward hangs; needs no token
    GET  /rewards                 the names
    GET  /rewards/NAME            card, abilities, arguments, limits
    POST /rewards/NAME/applies    prompts and metadata to booleans
    POST /rewards/NAME/score      images, prompts and metadata (`diffrl.serving.wire`) to scores; null: not applicable

What a POST answers has the reward's identity in the header `Diffrl-Identity`: a client sees that it changed. Errors are
`{"error": text}`: 400 malformed, 401 token, 404 name, 408 too slow, 411 no length, 413 too large, 415 type, 422 values,
500 the reward failed, 503 busy (with Retry-After), 504 it took too long.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from fastapi import Depends, FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse

from diffrl.errors import UserError, nearest, say
from diffrl.reward_kinds.cached import identity_for_cache
from diffrl.reward_kinds.fingerprint import essential
from diffrl.rewards.answers import applies
from diffrl.rewards.protocol import ABILITIES, Reward, RewardError, ability
from diffrl.serving import wire
from diffrl.serving.batcher import Batcher
from diffrl.serving.limits import add_refusals, check_address, has_token, listen, read_body, size_of
from diffrl.serving.wire import Limits, Refused
from diffrl.version import __version__


@dataclass(frozen=True)
class Served:
    """A reward that is served, and what it was built from."""

    reward: Reward
    plugin: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """What a server allows. Seconds, and bytes."""

    token: str | None = None
    limits: Limits = field(default_factory=Limits)
    wait: float = 0.005  # that a batch with room waits for company
    read_limit: float = 30.0  # to send a request
    time_limit: float = 300.0  # from a request's last byte to its scores
    pending: int = 2**30  # of all requests that are read or wait
    at_once: int = 4  # requests that one client should have under way


class Host:
    """The rewards with their queues, and the bytes of the requests that it holds."""

    def __init__(self, served: Mapping[str, Served], options: Options) -> None:
        self.served, self.options = served, options
        self.pending = 0
        # One thread for all: two rewards at once would fight for the same cores or device.
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="diffrl-reward")
        self.readers = ThreadPoolExecutor(2, thread_name_prefix="diffrl-reader")  # few: each may unpack a large image
        self.deciders = ThreadPoolExecutor(1, thread_name_prefix="diffrl-applies")  # the reward's code, which may hang
        most, wait = options.limits.images, options.wait
        self.batchers = {name: Batcher(name, one.reward, self.worker, most, wait) for name, one in served.items()}
        what = {name: (one.plugin, one.arguments, one.reward) for name, one in served.items()}
        self.identities = {name: identity_for_cache(*one) for name, one in what.items()}

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        yield
        for pool in (self.worker, self.readers, self.deciders):
            pool.shutdown(wait=False, cancel_futures=True)

    def find(self, name: str) -> Served:
        if name not in self.served:
            raise Refused(404, f'no reward "{name}" here{nearest(name, self.served)}')
        return self.served[name]

    @contextmanager
    def room(self, size: int) -> Iterator[None]:
        """Holds `size` bytes; Refused with 503 when it is full."""
        if self.pending + size > max(self.options.pending, 2 * self.options.limits.bytes):
            raise Refused(503, "busy; try again")
        self.pending += size
        try:
            yield
        finally:
            self.pending -= size

    async def score(self, name: str, request: HttpRequest) -> list[float | None]:
        self.find(name)
        kind, limit = request.headers.get("content-type", ""), self.options.time_limit
        size = size_of(request, self.options.limits.bytes)
        # Room for the images, too, from the start: requests that are read and then find none would all come again.
        with self.room(2 * size):
            body = await read_body(request, self.options.read_limit)
            loop = asyncio.get_running_loop()
            asked = await loop.run_in_executor(self.readers, wire.decode, body, kind, self.options.limits)
            with self.room(max(4 * asked.images.numel() - size, 0)):  # a small PNG may hold a large image
                try:
                    return await asyncio.wait_for(self.batchers[name].score(asked), limit)
                except TimeoutError as error:
                    raise Refused(504, f'reward "{name}" had no scores within {limit:g} s') from error
                except RewardError as error:
                    raise Refused(500, str(error)) from error

    async def applies(self, name: str, request: HttpRequest) -> list[bool]:
        reward = self.find(name).reward
        with self.room(size_of(request, self.options.limits.bytes)):
            words = wire.read_json(await read_body(request, self.options.read_limit))
        count = len(words["prompts"]) if isinstance(words.get("prompts"), list) else 0
        prompts, metadata = wire.read_words(words, count)
        if count > self.options.limits.images:
            raise Refused(413, f"{count} prompts; a request may have {self.options.limits.images}")

        def ask() -> list[bool]:
            return [applies(reward, *pair) for pair in zip(prompts, metadata, strict=True)]

        limit = self.options.time_limit
        try:
            return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(self.deciders, ask), limit)
        except TimeoutError as error:
            raise Refused(504, f'reward "{name}" did not say within {limit:g} s whether it applies') from error
        except RewardError as error:
            raise Refused(500, str(error)) from error

    def describe(self, name: str) -> dict[str, Any]:
        served = self.find(name)
        reward = served.reward
        return {
            "name": name,
            "protocol": wire.PROTOCOL,
            "diffrl_version": __version__,
            "plugin": served.plugin,
            "arguments": essential(served.arguments),
            "identity": self.identities[name],
            "limits": asdict(self.options.limits),
            "at_once": self.options.at_once,
            **{name: one.to_json(ability(reward, name)) for name, one in ABILITIES.items() if one.to_json is not None},
        }

    def signed(self, name: str, content: dict[str, Any]) -> JSONResponse:
        """An answer that says which reward gave it."""
        return JSONResponse(content, headers={wire.IDENTITY: self.identities[name]})

    def health(self) -> JSONResponse:
        since = [batcher.busy_since for batcher in self.batchers.values() if batcher.busy_since is not None]
        busy = time.monotonic() - min(since) if since else 0.0
        stuck = busy > self.options.time_limit
        content = {
            "status": "stuck" if stuck else "ok",
            "rewards": list(self.served),
            "waiting": sum(batcher.waiting for batcher in self.batchers.values()),
            "busy_seconds": round(busy, 3),
        }
        return JSONResponse(content, 503 if stuck else 200)


def make_app(served: Mapping[str, Served], options: Options) -> FastAPI:
    """The ASGI application. Nothing of a request is read before its token was seen."""
    host = Host(served, options)
    app = FastAPI(title="diffrl rewards", lifespan=host.lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    def check_token(request: HttpRequest) -> None:
        if options.token is not None and not has_token(request, options.token):
            raise Refused(401, "send the header Authorization: Bearer TOKEN with the server's token")

    app.state.host = host
    guarded = [Depends(check_token)]

    @app.get("/health")
    async def health() -> JSONResponse:
        return host.health()

    @app.get("/rewards", dependencies=guarded)
    async def names() -> list[str]:
        return list(served)

    @app.get("/rewards/{name}", dependencies=guarded)
    async def card(name: str) -> JSONResponse:
        return JSONResponse(host.describe(name))

    @app.post("/rewards/{name}/applies", dependencies=guarded)
    async def applicable(name: str, request: HttpRequest) -> JSONResponse:
        return host.signed(name, {"applies": await host.applies(name, request)})

    @app.post("/rewards/{name}/score", dependencies=guarded)
    async def score(name: str, request: HttpRequest) -> JSONResponse:
        return host.signed(name, {"scores": await host.score(name, request)})

    add_refusals(app)
    return app


def serve(served: Mapping[str, Served], host: str, port: int, options: Options, ready: Callable[[str], object]) -> None:
    """Serve until interrupted or terminated. `port` 0: a free one. `ready` gets the URL when the socket is bound."""
    check_address(host, options.token)
    try:
        listen(make_app(served, options), host, port, ready)
    except KeyboardInterrupt:
        say("diffrl: interrupted")
        os._exit(130)  # a call of a reward that hangs would keep the interpreter from its end


def check_served(one: Served) -> None:
    """UserError for a reward that cannot be served."""
    if ability(one.reward, "learns"):
        raise UserError(f'rewards serve: "{one.plugin}" learns in the run that trains on it, so it cannot be served')
    if ability(one.reward, "batchwise"):
        raise UserError(f'rewards serve: "{one.plugin}" judges whole batches, so it cannot be served')
    if columns := ability(one.reward, "columns"):
        raise UserError(f'rewards serve: "{one.plugin}" answers in columns ({", ".join(columns)}): not served')


def name_of(plugin: str, reward: Reward | type) -> str:
    """The name under which a reward is served: an installed plugin's own, else the reward's."""
    return str(reward.name if ".py" in plugin else plugin)  # type: ignore[union-attr]
