"""`diffrl watch`: a run's folder as a live page, and people's votes on its groups.

    GET  /                            the page; without the token a form that asks for it
    GET  /watch.js                    its script
    GET  /state                       by each part what changes when its files do; whether votes are waited for
    GET  /parts/NAME                  a part's HTML
    GET  /pictures/FOLDER/EPOCH/FILE  an image of a group, of the folders `groups` and `votes`
    POST /votes                       {"vote", "voter", "group", "order": [[place, ...], ...]}: one vote
    POST /go-on                       {"epoch"}: the run need not wait for more
    POST /enter                       {"token"}: a cookie for the browser

Errors are `{"error": text}`: 400 malformed, 401 token, 403 another site's request, 404 path, 408 too slow, 409 no run
asks that (any more), 411 no length, 413 too large, 415 type, 421 a name that is not this machine's, 507 the disk.

Pages of other sites can neither read nor vote: on a loopback address the header Host must be a loopback name (so a name
that is made to lead here does not), a POST must be JSON, and its Origin must be this page's; the cookie is SameSite.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from diffrl.methods import ballots
from diffrl.methods.groups import FOLDER, PICTURE
from diffrl.records.disk import DiskError
from diffrl.serving.limits import add_refusals, check_address, has_token, listen, read_body, same_secret, size_of
from diffrl.serving.secrets import is_loopback
from diffrl.serving.wire import Refused, read_json
from diffrl.watch.parts import NAMES, Parts, page

MOST = 2**16  # bytes of a request
LARGEST = 2**26  # bytes of a picture
NAME = re.compile(r"[0-9a-f-]{8,64}")  # of a vote, a voter
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self' data:; style-src 'unsafe-inline'; "
    "script-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(frozen=True)
class Settings:
    """`host`: the address that is listened on. `read_limit`: seconds in which a request must be there."""

    run_dir: Path
    host: str = "127.0.0.1"
    token: str | None = None
    read_limit: float = 30.0


class Watch:
    """What the requests share."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.parts = settings, Parts(settings.run_dir)
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="diffrl-watch")  # charts and votes: one at a time
        self.readers = ThreadPoolExecutor(4, thread_name_prefix="diffrl-pictures")
        self.session = secrets.token_urlsafe(32)  # of the cookie: ends with this process

    def known(self, request: Request) -> bool:
        """Does the request carry the token?"""
        token = self.settings.token
        if token is None or has_token(request, token):
            return True
        return same_secret(request.cookies.get("diffrl-watch", ""), self.session)

    def check_site(self, request: Request) -> None:
        """Refused where a page of another site may have sent it."""
        host = request.headers.get("host", "")
        name = _name_of(host)
        if is_loopback(self.settings.host) and not is_loopback(name):
            raise Refused(421, f'this page is on this machine alone, and not called "{name[:80]}"')
        if request.method == "GET":
            return
        origin, kind = request.headers.get("origin"), request.headers.get("sec-fetch-site", "same-origin")
        if kind not in ("same-origin", "none") or (origin is not None and urlsplit(origin).netloc != host):
            raise Refused(403, "sent by the page of another site")
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "expected application/json")

    async def content(self, request: Request, what: str) -> dict[str, Any]:
        size_of(request, MOST)
        return read_json(await read_body(request, self.settings.read_limit), what)

    async def at(self, pool: ThreadPoolExecutor, call: Callable[..., Any], *arguments: Any) -> Any:
        """`call` in a thread; a vote that no run asks for, and a full disk, become answers."""
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, call, *arguments)
        except ballots.NotAsked as error:
            raise Refused(409, str(error)) from error
        except DiskError as error:
            raise Refused(507, str(error)) from error

    async def vote(self, request: Request) -> dict[str, Any]:
        content = await self.content(request, "vote, voter, group and order")
        texts = [content.get(key) for key in ("vote", "voter", "group")]
        if not all(isinstance(text, str) and NAME.fullmatch(text) for text in texts):
            raise Refused(422, "expected `vote`, `voter` and `group`, each 8 to 64 of 0-9, a-f and -")
        order = content.get("order")
        if not _is_order(order):
            raise Refused(422, "order: expected a list of lists of places, best first, such as [[2], [0]]")
        new = await self.at(self.worker, ballots.add_vote, self.settings.run_dir, *texts, order)
        return {"kept": True, "new": new}

    def picture(self, folder: str, epoch: int, name: str) -> bytes:
        """An image of the run's folder; no link is followed, in no part of its path below the run."""
        if folder not in (FOLDER, ballots.FOLDER) or not 0 <= epoch < 10**9 or not PICTURE.fullmatch(name):
            raise Refused(404, "no such picture")
        path, handle = [folder, f"epoch-{epoch:04d}", name], -1
        try:
            handle = os.open(self.settings.run_dir, os.O_RDONLY | os.O_DIRECTORY)
            for depth, part in enumerate(path):
                kind = os.O_NONBLOCK if depth == 2 else os.O_DIRECTORY  # a FIFO would wait for a writer
                flags = os.O_RDONLY | os.O_NOFOLLOW | kind
                inner = os.open(part, flags, dir_fd=handle)
                os.close(handle)
                handle = inner
            facts = os.fstat(handle)
            if not stat.S_ISREG(facts.st_mode) or facts.st_size > LARGEST:
                raise Refused(404, "no such picture")
            with os.fdopen(os.dup(handle), "rb") as file:
                return file.read()
        except OSError as error:
            raise Refused(404, "no such picture") from error
        finally:
            if handle >= 0:
                os.close(handle)


def _name_of(host: str) -> str:
    """The name in a header Host, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_order(order: Any) -> bool:
    if not isinstance(order, list) or not 1 <= len(order) <= 1000:
        return False
    return all(
        isinstance(tier, list) and 1 <= len(tier) <= 1000 and all(type(place) is int for place in tier)
        for tier in order
    )


def make_app(settings: Settings) -> FastAPI:
    """The ASGI application. Nothing of a request's body is read before its site and token were seen."""
    watch = Watch(settings)
    app = FastAPI(title="diffrl watch", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

    def check(request: Request) -> None:
        if not watch.known(request):
            raise Refused(401, "send the header Authorization: Bearer TOKEN, or enter the token on the page")

    guarded = [Depends(check)]

    @app.middleware("http")
    async def guard(request: Request, call_next: Any) -> Response:
        try:
            watch.check_site(request)
            answer: Response = await call_next(request)
        except Refused as error:
            answer = JSONResponse({"error": str(error)}, error.status)
        answer.headers.setdefault("Cache-Control", "no-store")
        answer.headers.update(HEADERS)
        return answer

    _add_reading(app, watch, guarded)
    _add_writing(app, watch, guarded)
    add_refusals(app)
    return app


def _add_reading(app: FastAPI, watch: Watch, guarded: Sequence[Any]) -> None:
    settings = watch.settings
    script = (files("diffrl.watch") / "templates" / "watch.js").read_text(encoding="utf-8")

    @app.get("/")
    async def index(request: Request) -> HTMLResponse:
        known = watch.known(request)
        return HTMLResponse(page(settings.run_dir, locked=not known), 200 if known else 401)

    @app.get("/watch.js")
    async def code() -> Response:
        return Response(script, media_type="text/javascript")

    @app.get("/state", dependencies=guarded)
    async def state() -> JSONResponse:
        return JSONResponse(await watch.at(watch.readers, watch.parts.state))

    @app.get("/parts/{name}", dependencies=guarded)
    async def part(name: str) -> HTMLResponse:
        if name not in NAMES:
            raise Refused(404, "no such part")
        stamp = (await watch.at(watch.readers, watch.parts.stamps))[name]
        return HTMLResponse(await watch.at(watch.worker, watch.parts.make, name, stamp))

    @app.get("/pictures/{folder}/{epoch}/{name}", dependencies=guarded)
    async def picture(folder: str, epoch: str, name: str) -> Response:
        if not re.fullmatch(r"\d{1,9}", epoch):
            raise Refused(404, "no such picture")
        content = await watch.at(watch.readers, watch.picture, folder, int(epoch), name)
        # Its name is a digest of its pixels.
        return Response(content, media_type="image/png", headers={"Cache-Control": "private, max-age=86400, immutable"})


def _add_writing(app: FastAPI, watch: Watch, guarded: Sequence[Any]) -> None:
    settings = watch.settings

    @app.post("/votes", dependencies=guarded)
    async def votes(request: Request) -> JSONResponse:
        return JSONResponse(await watch.vote(request))

    @app.post("/go-on", dependencies=guarded)
    async def go_on(request: Request) -> JSONResponse:
        epoch = (await watch.content(request, "epoch")).get("epoch")
        if type(epoch) is not int:
            raise Refused(422, "epoch: expected a whole number")
        await watch.at(watch.worker, ballots.go_on, settings.run_dir, epoch)
        return JSONResponse({})

    @app.post("/enter")
    async def enter(request: Request) -> JSONResponse:
        given, token = (await watch.content(request, "token")).get("token"), settings.token
        if token is None or not isinstance(given, str) or not same_secret(given, token):
            raise Refused(401, "that is not the token")
        answer = JSONResponse({})
        answer.set_cookie("diffrl-watch", watch.session, httponly=True, samesite="strict")
        return answer


def watch(settings: Settings, port: int, ready: Callable[[str], object]) -> None:
    """Serve until interrupted. `port` 0: a free one. `ready` gets the URL when the socket is bound.

    Raises UserError for an address without a token that other machines reach, and where nothing can listen.
    """
    check_address(settings.host, settings.token)
    listen(make_app(settings), settings.host, port, ready)
