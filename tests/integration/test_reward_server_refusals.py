"""Requests that a reward server refuses: each gets the status that fits, and the server goes on."""

from __future__ import annotations

import base64
import io
import json
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from safetensors.torch import save
from serving import IMAGES, TOKEN, Light, running_three
from torch import Tensor

from diffrl.errors import UserError
from diffrl.serving.server import check_address
from diffrl.serving.wire import JSON, TENSORS, encode


@pytest.fixture(scope="module")
def light() -> Light:
    return Light()


@pytest.fixture(scope="module")
def url(light: Light) -> Iterator[str]:
    with running_three(light) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False) as client:
        yield client


def body(**changes: Any) -> tuple[bytes, str]:
    """A JSON request of one image, with changes."""
    picture = io.BytesIO()
    Image.new("RGB", (4, 4), "white").save(picture, "PNG")
    words = {"images": [base64.b64encode(picture.getvalue()).decode()], "prompts": ["a"], "metadata": [{}]}
    return json.dumps({**words, **changes}).encode(), JSON


def bomb(side: int) -> str:
    """A PNG whose header promises side x side pixels."""
    picture = io.BytesIO()
    Image.new("1", (1, 1)).save(picture, "PNG")
    data = picture.getvalue()  # signature, length, "IHDR", width, height, 5 bytes, checksum
    header = b"IHDR" + struct.pack(">II", side, side) + data[24:29]
    return base64.b64encode(data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]).decode()


def tensors(images: Tensor, **words: Any) -> tuple[bytes, str]:
    count = len(images)
    request = {"prompts": ["a"] * count, "metadata": [{}] * count, **words}
    return save({"images": images}, metadata={"request": json.dumps(request)}), TENSORS


BAD: list[tuple[int, str, Callable[[], tuple[bytes, str]]]] = [
    (400, "not valid JSON", lambda: (b"{", JSON)),
    (400, "not valid JSON", lambda: (b"[" * 50_000, JSON)),
    (400, "not valid safetensors", lambda: (b"\xff" * 64, TENSORS)),
    (400, "not valid safetensors", lambda: (encode(IMAGES[:1], ["a"], [{}], "tensors")[0][:-1], TENSORS)),
    (400, r"images\[0\] is not a PNG", lambda: body(images=["AAAA"])),
    (400, r"images\[0\] is not a PNG", lambda: body(images=["?"])),
    (413, "exceeds limit", lambda: body(images=[bomb(20_000)])),
    (413, "a request may have 100000", lambda: body(images=[bomb(5_000)])),
    (413, "9 images; a request may have 8", lambda: encode(IMAGES[:9, :, :2, :2], ["a"] * 9, [{}] * 9, "tensors")),
    (413, "a request may have 8", lambda: body(images=["AAAA"] * 9)),
    (413, "as float32", lambda: tensors(torch.zeros(1, 3, 110, 110, dtype=torch.uint8))),
    (413, "bytes; a request may have 100000", lambda: (b" " * 100_001, JSON)),
    (415, "text/plain", lambda: (b"{}", "text/plain")),
    (422, "expected an object", lambda: (b"[]", JSON)),
    (422, "images: expected a list", lambda: body(images=[])),
    (422, "prompts: expected a list of texts", lambda: body(prompts=[1])),
    (422, "1 images, 2 prompts and 1 metadata", lambda: body(prompts=["a", "b"])),
    (422, "metadata: expected a list of objects", lambda: body(metadata=[1])),
    (422, r"shape \(1, 1, 4, 4\)", lambda: tensors(torch.zeros(1, 1, 4, 4))),
    (422, "torch.int64", lambda: tensors(torch.zeros(1, 3, 4, 4, dtype=torch.int64))),
    (422, r"outside of \[0, 1\]", lambda: tensors(torch.full((1, 3, 4, 4), torch.nan))),
    (422, r"outside of \[0, 1\]", lambda: tensors(torch.full((1, 3, 4, 4), 1.5))),
    (500, 'prompt "fail"', lambda: body(prompts=["fail"])),
]


@pytest.mark.parametrize(("status", "said", "make"), BAD, ids=[f"{status} {said}" for status, said, _ in BAD])
def test_bad_requests_get_their_status(http: httpx.Client, status: int, said: str, make: Callable) -> None:  # type: ignore[type-arg]
    content, kind = make()
    answer = http.post("/rewards/light/score", content=content, headers={"Content-Type": kind})
    assert answer.status_code == status, answer.text
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(answer.json()["error"])
    assert http.post("/rewards/light/score", content=body()[0], headers={"Content-Type": JSON}).json() == {
        "scores": [1.0]
    }


def test_paths_tokens_and_lengths(http: httpx.Client, url: str) -> None:
    assert http.get("/health").json() == {
        "status": "ok",
        "rewards": ["redness", "light", "rank"],
        "waiting": 0,
        "busy_seconds": 0.0,
    }
    assert http.get("/rewards").json() == ["redness", "light", "rank"]
    about = http.get("/rewards/redness").json()
    assert about["arguments"] == {"power": 0.5} and about["applies"] and about["card"] is None
    assert http.get("/nothing").status_code == 404 and http.get("/rewards/light/score").status_code == 405
    chunked = http.post("/rewards/light/score", content=iter([b"{}"]), headers={"Content-Type": JSON})
    assert chunked.status_code == 411
    answer = http.post("/rewards/redness/applies", json={"prompts": ["red", "blue"]})
    assert answer.json() == {"applies": [True, False]}
    for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": f"Basic {TOKEN}"}, {"Authorization": "é"}):
        for path in ("/rewards", "/rewards/light", "/rewards/light/score"):
            method = "POST" if path.endswith("score") else "GET"
            answer = httpx.request(method, url + path, headers={k: v.encode() for k, v in headers.items()})
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert httpx.get(url + "/health").status_code == 200


def raw(url: str, *parts: bytes, pause: float = 0.0) -> bytes:
    """What the server answers to bytes sent piece by piece."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause)
        answer = b""
        while (part := connection.recv(65536)) and not (answer := answer + part).endswith(b"}"):
            pass
    return answer


def test_slow_clients_and_no_http_at_all(url: str) -> None:
    head = f"POST /rewards/light/score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: {JSON}\r\n"
    started = time.monotonic()
    slow = raw(url, head.encode() + b"Content-Length: 90000\r\n\r\n", b"{", pause=0.1)  # stops in the body
    assert slow.startswith(b"HTTP/1.1 408 ") and b"did not come within 1 s" in slow
    assert raw(url, head.encode() + b"Content-Length: 1e9\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert raw(url, b"\x16\x03\x01 hello \r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert raw(url, b"GET /health HTTP/1.1\r\nx: " + b"x" * 2**16).startswith(b"HTTP/1.1 400 ")  # no end
    huge = raw(url, head.encode() + b"Content-Length: 900000000\r\n\r\n")  # refused before it is sent
    assert huge.startswith(b"HTTP/1.1 413 ")
    assert time.monotonic() - started < 20


def test_scoring_that_takes_too_long_is_an_error(http: httpx.Client, light: Light) -> None:
    light.gate.clear()
    try:
        answer = http.post("/rewards/light/score", content=body()[0], headers={"Content-Type": JSON})
        assert answer.status_code == 504
        assert answer.json()["error"] == 'reward "light" had no scores within 1.5 s'
        stuck = http.get("/health")
        assert stuck.status_code == 503 and stuck.json()["status"] == "stuck"
    finally:
        light.gate.set()


def test_only_this_machine_without_a_token() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        check_address(host, None)
    check_address("0.0.0.0", TOKEN)
    for host in ("0.0.0.0", "::", "gpu2"):
        with pytest.raises(UserError, match="reachable from other machines"):
            check_address(host, None)
    with pytest.raises(UserError, match="use 16 or more"):
        check_address("127.0.0.1", "short")
