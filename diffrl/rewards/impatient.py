"""Uvicorn's HTTP protocol with a limit on how long a client may take to send its request line and headers.

Uvicorn itself waits for them for ever; the time for a body is limited by the application.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class ImpatientProtocol(H11Protocol):
    """Answers 408 and hangs up when the headers are not there in time, or a refused body does not end in time."""

    seconds: ClassVar[float] = 30.0
    _timer: asyncio.TimerHandle | None = None

    @classmethod
    def within(cls, seconds: float) -> type[ImpatientProtocol]:
        """The protocol with this limit."""
        return type("ImpatientProtocol", (cls,), {"seconds": seconds})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

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
