"""A judge that speaks OpenAI's protocol as vLLM's server does, with slots, delays, refusals and absence."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import log
from typing import Any

TOP = [{"token": "Yes", "logprob": log(0.75)}, {"token": "No", "logprob": log(0.25)}]
ANSWER = {"choices": [{"message": {"content": "Yes"}, "logprobs": {"content": [{"top_logprobs": TOP}]}}]}


class SlowJudge:
    """Answers in `seconds`, `slots` at once: who comes then gets `busy`, a status, with Retry-After `after`, or waits
    for a slot (busy None). `faults`: of the next requests, statuses, or 0 for a disconnect."""

    def __init__(
        self, seconds: float = 0.05, slots: int = 8, busy: int | None = None, after: str | None = None, port: int = 0
    ) -> None:
        self.seconds, self.busy, self.after = seconds, busy, after
        self.slots, self.lock = threading.Semaphore(slots), threading.Lock()
        self.faults: list[int] = []
        self.answered, self.refused, self.now, self.peak, self.arrivals = 0, 0, 0, 0, list[float]()
        self.port = port
        self.begin()

    def begin(self) -> None:
        """Listens, again on the same port after `stop`."""
        judge = self
        handler = type("Handler", (_Handler,), {"judge": judge})
        quiet = {"handle_error": lambda *_: None}  # who has its answer goes; a test reads what is printed
        server = type("Server", (ThreadingHTTPServer,), {"request_queue_size": 256, "daemon_threads": True, **quiet})
        self.server = server(("127.0.0.1", self.port), handler)
        self.port, self.there = self.server.server_address[1], True
        self.url = f"http://127.0.0.1:{self.port}/v1"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        """Gone: nobody listens, and requests under way are cut off."""
        self.there = False
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    judge: SlowJudge
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None: ...

    def send(self, status: int, value: Any, **headers: str) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def cut(self) -> None:
        self.close_connection = True
        self.connection.close()

    def do_GET(self) -> None:
        self.send(200, {"data": [{"id": "judge"}]})

    def do_POST(self) -> None:
        judge = self.judge
        self.rfile.read(int(self.headers["Content-Length"]))
        with judge.lock:
            judge.arrivals.append(time.monotonic())
            fault = judge.faults.pop(0) if judge.faults else None
        if not judge.there or fault == 0:
            self.cut()
            return
        if fault is not None or not judge.slots.acquire(blocking=judge.busy is None):
            with judge.lock:
                judge.refused += 1
            after = {} if judge.after is None else {"Retry_After": judge.after}
            self.send(fault or judge.busy or 503, {"error": {"message": "busy"}}, **after)
            return
        try:
            with judge.lock:
                judge.now += 1
                judge.peak = max(judge.peak, judge.now)
            time.sleep(judge.seconds)
            with judge.lock:
                judge.now -= 1
        finally:
            judge.slots.release()
        if not judge.there:
            self.cut()
            return
        with judge.lock:
            judge.answered += 1
        self.send(200, ANSWER)
