"""What a client takes from a reward server: so many bytes, in so many seconds, of the reward that it began with."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
from serving import IMAGES, REDNESS, Light, running

from diffrl.errors import UserError
from diffrl.prompts import Prompt
from diffrl.rewards import RewardError, load_reward
from diffrl.rewards.scoring import Scorer
from diffrl.serving import client
from diffrl.serving.client import RemoteError
from diffrl.serving.limits import bind
from diffrl.serving.server import Served
from diffrl.serving.wire import JSON, PROTOCOL, Limits

ABOUT = {
    "name": "light",
    "protocol": PROTOCOL,
    "arguments": {},
    "identity": "f00d",
    "groupwise": False,
    "applies": False,
    "batch_size": None,
    "limits": {"images": 8, "bytes": 10**6},
    "card": None,
}
Send = Callable[[bytes], None]
Speech = Callable[[Send], None]


def said(body: bytes, *headers: str, length: bool = True) -> bytes:
    lines = ["HTTP/1.1 200 OK", "Connection: close", *headers, *([f"Content-Length: {len(body)}"] if length else [])]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@contextmanager
def speaking(describe: Speech, score: Speech = lambda send: None) -> Iterator[str]:
    """A server of raw bytes: `describe` answers every GET, `score` every POST."""
    listener = bind("127.0.0.1", 0)
    over = threading.Event()

    def talk(connection: socket.socket) -> None:
        with connection:
            asked = connection.recv(65536)

            def send(data: bytes) -> None:
                if over.is_set():
                    raise OSError("over")
                connection.sendall(data)

            with suppress(OSError):  # the client has gone away
                (describe if asked.startswith(b"GET") else score)(send)

    def accept() -> None:
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def described(**changes: Any) -> Speech:
    return lambda send: send(said(json.dumps({**ABOUT, **changes}).encode()))


def scored(value: Any, *headers: str) -> Speech:
    return lambda send: send(said(json.dumps({"scores": [value]}).encode(), *headers))


def drip(send: Send) -> None:
    for byte in said(b"{}" * 10**4):
        send(bytes([byte]))
        time.sleep(0.05)


def drip_body(send: Send) -> None:
    send(said(b" " * 10**4)[:100])
    drip(send)


def endless(send: Send) -> None:
    send(said(b"", length=False))
    while True:
        send(b" " * 65536)


def squeezed(send: Send) -> None:
    send(said(gzip.compress(json.dumps({"scores": [0.5]}).encode()), "Content-Encoding: gzip"))


@pytest.mark.parametrize("pace", [drip, drip_body])
def test_a_dripped_description_ends(monkeypatch: pytest.MonkeyPatch, pace: Speech) -> None:
    monkeypatch.setattr(client, "DESCRIBING", 0.5)
    begun = time.monotonic()
    with speaking(pace) as url, pytest.raises(UserError, match=f"server {url}: .*no whole answer within 0.5 s"):
        load_reward("remote", reward="light", servers=url)
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    ("speech", "text"),
    [
        (endless, "more than 1048576 bytes"),
        (squeezed, "compressed"),
        (drip, "no whole answer within 0.5 s"),
        (drip_body, "no whole answer within 0.5 s"),
        (lambda send: send(said(b"[" * 10**5)), "not JSON"),
        (lambda send: send(said(b"[1]")), "not a JSON object"),
        (scored(True, "Diffrl-Identity: f00d"), r"not one score for each image: \[True\]"),
        (scored("1", "Diffrl-Identity: f00d"), "not one score for each image"),
        (scored(10**60, "Diffrl-Identity: f00d"), "not one score for each image"),
    ],
)
def test_answers_that_are_not_taken(speech: Speech, text: str) -> None:
    with speaking(described(), speech) as url:
        reward = load_reward("remote", reward="light", servers=url, request_timeout=0.5, patience=0.0)
        with pytest.raises(RemoteError, match=text):
            reward(IMAGES[:1], ["a"], [{}])


@pytest.mark.parametrize("status", ["301 Moved Permanently", "307 Temporary Redirect", "308 Permanent Redirect"])
def test_a_server_that_sends_elsewhere_is_not_followed_and_the_place_is_named(status: str) -> None:
    """A token, images and prompts go where the config says."""
    moved = said(b"<html>moved</html>", "Location: https://me:word@else.example/rewards/light")
    with speaking(lambda send: send(moved.replace(b"200 OK", status.encode()))) as url:
        text = (
            f"server {url}: {status[:3]}: it sends elsewhere, which is not followed: https://\\*\\*\\*@else.example/r"
        )
        with pytest.raises(UserError, match=text):
            load_reward("remote", reward="light", servers=url)


@pytest.mark.parametrize("changes", [{"limits": []}, {"name": 3}, {"card": {"range": 1}}, {"batch_size": "x"}])
def test_descriptions_that_are_not_taken(changes: dict[str, Any]) -> None:
    with speaking(described(**changes)) as url, pytest.raises(UserError, match="does not describe its reward"):
        load_reward("remote", reward="light", servers=url)


def test_a_reward_that_is_exchanged_under_its_name_stops_the_run() -> None:
    """A server that comes back with another model, on the same port: not tried again, and no score of it is taken."""
    with running({"light": Served(Light(), REDNESS)}) as url:
        reward = load_reward("remote", reward="light", servers=url)
        assert len(reward(IMAGES[:2], ["a"] * 2, [{}] * 2)) == 2
    with running({"light": Served(Light(), REDNESS, {"power": 2.0})}, port=int(url.rpartition(":")[2])):
        for attempt in (
            lambda: reward(IMAGES[:1], ["a"], [{}]),
            lambda: reward.__class__.applies(restricted(reward), "", {}),
        ):
            with pytest.raises(RewardError, match=f"server {url} now serves another reward under this name"):
                attempt()
        with pytest.raises(RewardError, match=r'^reward "light": server'):  # as it is: one line, not tried again
            Scorer({"light": reward}, retries=5, backoff=100.0).score(IMAGES[:1], [Prompt("a")])
    with speaking(described(), scored(0.5)) as url:
        old = load_reward("remote", reward="light", servers=url)
        with pytest.raises(RewardError, match="does not say which reward answers"):
            old(IMAGES[:1], ["a"], [{}])


def restricted(reward: Any) -> Any:
    reward._restricted = True
    return reward


class Picky(Light):
    """Takes its time to say where it applies."""

    def applies(self, prompt: str, metadata: dict) -> bool:  # type: ignore[type-arg]
        self.gate.wait(10)
        return True


def test_applies_has_limits_and_holds_nobody_up() -> None:
    picky = Picky()
    picky.gate.clear()
    with (
        running({"picky": Served(picky, REDNESS)}, limits=Limits(images=8), time_limit=1.0) as url,
        httpx.Client(base_url=url, trust_env=False) as http,
    ):
        try:
            many = http.post("/rewards/picky/applies", json={"prompts": ["a"] * 9})
            assert many.status_code == 413 and many.json() == {"error": "9 prompts; a request may have 8"}
            found: list[httpx.Response] = []
            asking = threading.Thread(
                target=lambda: found.append(http.post("/rewards/picky/applies", json={"prompts": ["a"]}))
            )
            asking.start()
            time.sleep(0.2)
            begun = time.monotonic()
            assert httpx.get(url + "/health", trust_env=False).status_code == 200
            assert time.monotonic() - begun < 0.7  # meanwhile
            asking.join(20)
            assert found[0].status_code == 504 and "whether it applies" in found[0].json()["error"]
        finally:
            picky.gate.set()
        content = json.dumps({"prompts": ["a"]}).encode()
        answer = http.post("/rewards/picky/applies", content=content, headers={"Content-Type": JSON})
        assert answer.json() == {"applies": [True]}


def test_answers_are_sent_at_once() -> None:
    """asyncio sets TCP_NODELAY on connections of a listener that says that it is TCP."""
    found: list[int] = []

    async def look() -> None:
        listener = bind("127.0.0.1", 0)
        seen = asyncio.Event()

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            found.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()
            seen.set()

        async with await asyncio.start_server(accepted, sock=listener):
            await asyncio.open_connection(*listener.getsockname())
            await asyncio.wait_for(seen.wait(), 10)

    asyncio.run(look())
    assert found and found[0] != 0
