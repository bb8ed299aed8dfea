"""Uvicorn's HTTP protocol with limits on what a client may keep waiting: its headers, and its idle connections.

Uvicorn itself waits for headers for ever, and counts idle connections as load: a client that opens some hundred of them
would keep all others out. The time for a body is limited by the application.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class ImpatientProtocol(H11Protocol):
    """Answers 408 and hangs up when the headers are not there in time, or a refused body does not end in time.

    Of more than `most` connections of one client that have no request, the one that waits longest is closed.
    """

    seconds: ClassVar[float] = 30.0
    most: ClassVar[int] = 64
    waiting: ClassVar[dict[str, dict[ImpatientProtocol, None]]] = {}  # by the client's address, in order of waiting
    _timer: asyncio.TimerHandle | None = None

    @classmethod
    def within(cls, seconds: float, most: int = 64) -> type[ImpatientProtocol]:
        """The protocol with these limits."""
        return type("ImpatientProtocol", (cls,), {"seconds": seconds, "most": most, "waiting": {}})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        self._count()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()
        self._count()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._watch()
        self._count()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()
        self._forget()

    def _count(self) -> None:
        """Note whether this connection waits for a request, and close the longest waiting one of too many."""
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy or self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._forget()
            return
        waiting = self.waiting.setdefault(self._client, {})
        waiting.setdefault(self)
        if len(waiting) > self.most:
            # Those that never asked anything go first: a kept connection is worth more to an honest client.
            oldest = next((one for one in waiting if one.cycle is None), next(iter(waiting)))
            oldest._forget()
            oldest.transport.close()

    def _forget(self) -> None:
        waiting = self.waiting.get(self._client, {})
        waiting.pop(self, None)
        if not waiting:
            self.waiting.pop(self._client, None)

    @property
    def _client(self) -> str:
        return self.client[0] if self.client else ""

    def _watch(self) -> None:
        answered = self.cycle is not None and self.cycle.response_complete
        unfinished = self.conn.their_state is h11.IDLE or (self.conn.their_state is h11.SEND_BODY and answered)
        if not unfinished:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self._hang_up)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hang_up(self) -> None:
        self._timer = None
        answered = self.cycle is not None and self.cycle.response_complete
        # Between two requests of a connection silence is allowed: uvicorn's keep-alive limit ends that.
        if self.transport.is_closing() or (
            answered and self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        ):
            return
        if self.conn.our_state is h11.IDLE:
            self.transport.write(_TOO_SLOW)
        self.transport.close()
