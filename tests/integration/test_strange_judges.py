"""Judges as servers and gateways answer in the wild: what is a score, what is none, and what is only asked again."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from diffrl.errors import UserError
from diffrl.rewards import RewardError, Unscored, load_reward

IMAGE = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
HOUR = 3600.0
Answer = tuple[int, dict[str, str], Any]  # status, headers, JSON; or bytes, which are sent as they are


def said(content: Any, **more: Any) -> Answer:
    message = {"content": content, **more.pop("message", {})}
    return 200, {}, {"choices": [{"message": message, **more}]}


class Strange(ThreadingHTTPServer):
    """Gives the answers of `script`, and then `usual`. `models`: what it says of them, or a status."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.script: list[Any] = []
        self.usual: Any = said("Score: 4")
        self.bodies: list[dict[str, Any]] = []
        self.models: Any = [{"id": "judge"}]
        self.beside: dict[str, Any] = {}


class Handler(BaseHTTPRequestHandler):
    server: Strange
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def date_time_string(self, timestamp: Any = None) -> str:
        return formatdate(time.time() + HOUR, usegmt=True)  # its clock is an hour ahead

    def give(self, answer: Any) -> None:
        if isinstance(answer, bytes):
            self.wfile.write(answer)
            self.wfile.flush()
            self.close_connection = True
            return
        status, headers, value = answer
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        models, beside = self.server.models, self.server.beside.get(self.path)
        if isinstance(models, int):
            self.give((models, {}, {"error": {"message": "Incorrect API key provided"}}))
        elif self.path == "/v1/models":
            self.give((200, {}, {"data": models}))
        else:
            self.give((200, {}, beside) if beside else (404, {}, {"detail": "Not Found"}))

    def do_POST(self) -> None:
        self.server.bodies.append(body := json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        answer = self.server.script.pop(0) if self.server.script else self.server.usual
        self.give(answer(body) if callable(answer) else answer)


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Strange]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Strange()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ask(judge: Strange, **more: Any) -> float:
    reward: Any = load_reward(
        "vlm", **{"server": judge.url, "mode": "score", "request_retries": 1, "backoff": 0.0, "patience": 20.0, **more}
    )
    return float(reward(IMAGE, ["a"], [{}])[0])


CHUNKED = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n{"choices": [{"mes'
SHORT = b'HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n{"choices": [{"mes'
GATEWAY = (200, {}, {"error": {"message": "Provider returned error", "code": 502}})


@pytest.mark.parametrize(
    "answer",
    [
        said([{"type": "text", "text": "It is fine.\n"}, {"type": "text", "text": "Score: 4"}]),
        said("Score: 4", finish_reason="stop", message={"refusal": None, "reasoning_content": "Score: 2"}),
        said("Score: 2?\n</think>\n\nScore: 4"),
        said("Score: 4.\nThe cat is", finish_reason="length"),
        *(
            (status, {}, {"error": {"message": "later"}})
            for status in (408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 529)
        ),
        (503, {"Retry-After": "soon"}, {}),
        (429, {"retry-after-ms": "20"}, {}),
        (429, {"Retry-After": "0.02"}, {}),
        (503, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, {}),
        GATEWAY,
        said(""),
        said(None),
        (200, {}, {"choices": []}),
        (200, {}, {"choices": [{"message": {}}]}),
        (200, {}, []),
        said("I think Score: 4", finish_reason="length"),  # perhaps 4.5
        CHUNKED,
        SHORT,
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)  # fmt: skip
def test_what_passes_is_asked_again_and_what_is_an_answer_is_read(judge: Strange, answer: Any) -> None:
    judge.script = [answer]
    assert ask(judge) == 4.0


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (said(None, message={"refusal": "I'm sorry, I can't."}), "refuses: \"I'm sorry"),
        (said("", finish_reason="content_filter"), "refuses"),
        ((200, {}, {"choices": []}), "no chat completion"),
        (said(None, message={"reasoning_content": "Score: 4"}), "no score in it"),
        (said("Score: 4", finish_reason="length"), "no score in it"),
        ((400, {}, {"error": {"code": "content_filter", "message": "content filter"}}), "refuses on"),
        ((400, {}, {"error": {"code": "content_policy_violation", "message": "try another"}}), "refuses on"),
        ((403, {}, {"error": {"code": 403, "message": "this model requires moderation: flagged"}}), "refuses on"),
    ],
)
def test_no_answer_is_no_score_and_no_failure(judge: Strange, answer: Any, why: str) -> None:
    judge.usual = answer
    with pytest.raises(Unscored, match=why):
        ask(judge)


@pytest.mark.parametrize("body", [b'data: {"choices": []}\n\ndata: [DONE]', b"<html>Log in", b"caf\xe9", b"[" * 10**6])
def test_what_is_no_json_is_shown(judge: Strange, body: bytes) -> None:
    """A stream that was not asked for, a page of a proxy, another alphabet, and nested too deeply."""
    judge.usual = b"HTTP/1.1 200 OK\r\n\r\n" + body
    with pytest.raises(RewardError, match="no usable answer") as caught:
        ask(judge)
    assert body[:12].decode(errors="replace") in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("answer", [GATEWAY, (500, {}, {"error": "broken"}), (401, {}, {}), (404, {}, {})])
def test_a_server_that_fails_is_no_image_without_a_score(judge: Strange, answer: Any) -> None:
    judge.usual = answer
    with pytest.raises(RewardError) as caught:
        ask(judge)
    assert not isinstance(caught.value, Unscored)


def test_a_date_in_retry_after_is_read_by_the_servers_own_clock(judge: Strange) -> None:
    """Two seconds by its clock, which is an hour ahead of ours."""
    judge.script = [(429, {"Retry-After": formatdate(time.time() + HOUR + 2, usegmt=True)}, {})]
    begun = time.monotonic()
    assert ask(judge) == 4.0
    assert 1.0 <= time.monotonic() - begun < 6.0


def test_an_unreadable_answer_is_bound_to_a_schema_where_the_server_has_them(judge: Strange) -> None:
    judge.script = [said("Quite good."), said('{"explanation": "two cats", "score": 3.5}')]
    assert ask(judge) == 3.5
    first, second = judge.bodies
    assert "response_format" not in first  # its answers are as they always were
    schema = second["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["score"] == {"type": "number", "minimum": 1.0, "maximum": 5.0}
    judge.bodies.clear()
    refuses = lambda body: (400, {}, {"error": "unknown field"}) if "response_format" in body else said("Hm.")  # noqa: E731
    judge.usual = refuses
    reward: Any = load_reward("vlm", server=judge.url, mode="score", request_retries=2, backoff=0.0)
    with pytest.raises(Unscored, match="Hm"):
        reward(IMAGE, ["a"], [{}])
    assert ["response_format" in body for body in judge.bodies] == [False, True, False, False]


@pytest.mark.parametrize(
    ("reward", "more", "answer", "value"),
    [
        ("vlm_rubric", {"rubric": {"one": "a", "two": "b"}}, '{"explanation": "", "one": 2, "two": "n/a"}', 2.0),
        ("vlm_pairs", {}, '{"explanation": "", "winner": "tie"}', 0.5),
    ],
)
def test_every_judge_in_words_has_a_schema(judge: Strange, reward: str, more: Any, answer: str, value: float) -> None:
    judge.usual = lambda body: said(answer if "response_format" in body else "Who knows.")
    one: Any = load_reward(reward, server=judge.url, backoff=0.0, **more)
    scores = one(IMAGE.repeat(2, 1, 1, 1), ["a"] * 2, [{}] * 2)
    assert float(scores.flatten()[0]) == value


def test_a_wrong_key_is_known_at_once(judge: Strange) -> None:
    judge.models = 401
    with pytest.raises(UserError, match=r"401: Incorrect API key.*DIFFRL_VLM_KEY"):
        ask(judge, model="judge")
    assert not judge.bodies


def test_the_identity_is_the_models_and_not_the_days(judge: Strange) -> None:
    def identity(models: Any, **beside: Any) -> str:
        judge.models, judge.beside = models, beside
        one: Any = load_reward("vlm", server=judge.url, model="judge")
        return str(one.identity)

    vllm = {"id": "judge", "owned_by": "vllm", "root": "Qwen/Qwen2.5-VL-7B-Instruct", "created": 1}
    first = identity([vllm])
    assert first == identity([{**vllm, "created": 2, "permission": [{"id": "x"}]}, {"id": "another"}])
    assert first != identity([{**vllm, "root": "Qwen/Qwen2.5-VL-3B-Instruct"}])
    tgi = [{"/info": {"model_id": "a/b", "model_sha": sha, "version": "1"}} for sha in ("1f", "2e")]
    assert identity([{"id": "judge"}], **tgi[0]) != identity([{"id": "judge"}], **tgi[1])
    assert identity([{"id": "judge"}]) != identity([{"id": "judge"}], **tgi[0])
