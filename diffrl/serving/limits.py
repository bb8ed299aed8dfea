"""What every HTTP server of this package shares: where it may listen, who is let in, and what a client may ask.

The size of a request's headers, the time for its body, idle connections and their number have limits. A client that
opens connections and sends no headers is not sent away: a proxy in front does that (docs/security.md).
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from fastapi.security.utils import get_authorization_scheme_param
from starlette.requests import ClientDisconnect

from diffrl.errors import UserError
from diffrl.serving.secrets import is_loopback
from diffrl.serving.wire import Refused

LEAST_TOKEN = 16  # characters


def same_secret(given: str, secret: str) -> bool:
    """Compared in a time that says nothing of where they differ."""
    return hmac.compare_digest(given.encode(), secret.encode())


def has_token(request: Request, token: str) -> bool:
    """Whether a request brings the token."""
    scheme, given = get_authorization_scheme_param(request.headers.get("authorization"))
    return scheme.lower() == "bearer" and same_secret(given.strip(), token)


def size_of(request: Request, most: int) -> int:
    """Bytes of the body, which are not read yet; Refused for more than `most`."""
    text = request.headers.get("content-length")
    if text is None:
        raise Refused(411, "send a Content-Length")
    if int(text) > most:  # h11 has seen that it is a number
        raise Refused(413, f"{text} bytes; a request may have {most}")
    return int(text)


async def read_body(request: Request, seconds: float) -> bytes:
    """The body, within the limit of time."""
    try:
        return await asyncio.wait_for(request.body(), seconds)
    except TimeoutError as error:
        raise Refused(408, f"the request did not come within {seconds:g} s") from error


def check_address(host: str, token: str | None) -> None:
    """UserError for an address that other machines reach without a token, and for a token that can be guessed."""
    if token is not None and len(token) < LEAST_TOKEN:
        raise UserError(f"the token has {len(token)} characters; use {LEAST_TOKEN} or more")
    if token is None and not is_loopback(host):
        raise UserError(f'--host: "{host}" is reachable from other machines; give a --token-file')


def add_refusals(app: FastAPI) -> None:
    """`Refused`, and a client that went away, become answers."""

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        headers = {401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"}, 503: {"Retry-After": "1"}}
        return JSONResponse({"error": str(error)}, error.status, headers.get(error.status))

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> JSONResponse:
        return JSONResponse({"error": "the client went away"}, 400)  # which no client reads


def listen(app: Any, host: str, port: int, ready: Callable[[str], object]) -> None:
    """Serve an ASGI application until interrupted or terminated. `port` 0: a free one. `ready` gets the URL when the
    socket is bound. UserError where nothing can listen."""
    listener = bind(host, port)
    ready(url_of(host, listener.getsockname()[1]))
    server_of(app).run(sockets=[listener])


def server_of(app: Any) -> uvicorn.Server:
    """The HTTP server of an ASGI application, which has no socket yet."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        log_level="critical",
        access_log=False,
        server_header=False,
        limit_concurrency=512,
        timeout_keep_alive=60,
        h11_max_incomplete_event_size=2**15,  # bytes of headers
        timeout_graceful_shutdown=10,
    )
    return uvicorn.Server(config)


def url_of(host: str, port: int) -> str:
    """Where a server is reached."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. UserError where there can be none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By its protocol asyncio knows it for TCP, and sets TCP_NODELAY: without, each answer waits 40 ms for the client's
    # delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)  # from here on connections wait instead of being refused
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--host {host} --port {port}: cannot listen there ({reason})") from error
    return listener
