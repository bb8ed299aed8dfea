"""The vision-language judge: against a real small HTTP server, and on a tiny Qwen2.5-VL saved in the hub's format."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from diffrl.errors import UserError
from diffrl.reward_tools.check import examine
from diffrl.reward_tools.examples import example_images
from diffrl.rewards import RewardError, load_reward
from diffrl_zoo.vlm.pairs import tournament, win_rates
from diffrl_zoo.vlm.parse import (
    line_starts,
    probability,
    rewritten,
    spellings,
    yes_probability,
)
from diffrl_zoo.vlm.question import Question, Reply, Unreadable

pytestmark = pytest.mark.usefixtures("one_call")

PROMPT = 'a {red} "circle" on white'


class Judge(ThreadingHTTPServer):
    """An OpenAI-compatible server that judges by brightness; `script` has the faults of the next requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.script: list[str] = []
        self.refuses: dict[str, str] = {}  # parameters, and in which words
        self.models, self.delay, self.busy, self.peak, self.lock = ["judge"], 0.0, 0, 0, threading.Lock()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        content = body["messages"][0]["content"]
        lights, text = [], content[-1]["text"]
        for part in content[:-1]:
            head, _, data = part["image_url"]["url"].partition(",")
            assert head == "data:image/png;base64"
            lights.append(float(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))).mean()) / 255)
        if body.get("logprobs") and body["max_tokens"] > 1:  # several questions: a line each
            return lines_of_answers(lights[0], text)
        if body.get("logprobs"):
            p = lights[0] if len(lights) == 1 else 0.5 + (lights[0] - lights[1]) / 2
            top = [("Yes", 0.6 * p), (" yes", 0.3 * p), ("No", 0.9 * (1 - p)), ("Well", 0.1)]
            entries = [{"token": token, "logprob": log(max(value, 1e-9))} for token, value in top]
            return {"message": {"content": "Yes"}, "logprobs": {"content": [{"top_logprobs": entries}]}}
        if len(lights) == 2:
            gap = lights[0] - lights[1]
            said = "tie" if abs(gap) < 0.01 else "A" if gap > 0 else "B"
            return {"message": {"content": f"A is nice. B, too.\n\n**Winner: {said}**"}}
        if "Prompt: ..." in text:
            told = text.partition('prompt "')[2].partition('"')[0]
            return {"message": {"content": f"Too dark.\nPrompt: {told}, lit"}}
        assert "Score: X" in text
        return {"message": {"content": f"It shows a shape.\nScore: {1 + 4 * lights[0]:.3f}"}}


def lines_of_answers(light: float, text: str) -> dict[str, Any]:
    """ "Yes" or "2" with the picture's brightness as the first token of every line, and newlines between."""
    entries = []
    for question in text.splitlines()[1:]:
        right = "2" if question.startswith("How many") else "Yes"
        top = [(right, 0.6 * light), (f" {right}", 0.3 * light), ("no", 0.9 * (1 - light)), ("Well", 0.1)]
        top_logprobs = [{"token": token, "logprob": log(max(value, 1e-9))} for token, value in top]
        entries += [{"token": right, "top_logprobs": top_logprobs}, {"token": "\n\n", "top_logprobs": []}]
    return {"message": {"content": "Yes"}, "logprobs": {"content": entries}}


class Handler(BaseHTTPRequestHandler):
    server: Judge
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def send(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.send(200, json.dumps({"data": [{"id": name} for name in self.server.models]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(body)
            self.server.headers.append(dict(self.headers))
            self.server.busy += 1
            self.server.peak = max(self.server.peak, self.server.busy)
            fault = self.server.script.pop(0) if self.server.script else ""
        time.sleep(self.server.delay)
        with self.server.lock:
            self.server.busy -= 1
        if fault == "slow":
            time.sleep(1.5)
        if refused := next((name for name in self.server.refuses if name in body), None):
            error = {"message": self.server.refuses[refused], "type": "invalid_request_error", "param": refused}
            self.send(400, json.dumps({"error": error}))
        elif fault.isdigit():
            self.send(int(fault), "no such luck")
        elif fault == "hang up":
            self.close_connection = True
            self.connection.close()
        elif fault == "no json":
            self.send(200, "<html>")
        elif fault:
            self.send(200, json.dumps({"choices": [{"message": {"content": "" if fault == "slow" else fault}}]}))
        else:
            self.send(200, json.dumps({"choices": [self.server.answer(body)]}))


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("DIFFRL_JUDGE_KEY", "sesame")
    server = Judge()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def build(judge: Judge, name: str = "vlm", **params: Any) -> Any:
    return load_reward(name, server=judge.url, key="DIFFRL_JUDGE_KEY", backoff=0.0, **params)


def lit(*lights: float) -> torch.Tensor:
    """One grey image of each brightness, exact in bytes."""
    return torch.stack([torch.full((3, 16, 16), round(255 * light) / 255) for light in lights])


def failure(reward: Any, images: torch.Tensor) -> str:
    with pytest.raises(RewardError) as caught:
        reward(images, [PROMPT] * len(images), [{}] * len(images))
    return str(caught.value)


# the server


def test_yes_is_the_share_of_yes_and_no(judge: Judge) -> None:
    reward, images = build(judge), lit(0.0, 0.25, 0.5, 1.0)
    scores = reward(images, [PROMPT] * 4, [{}] * 4)
    torch.testing.assert_close(scores, images.mean(dim=(1, 2, 3)), atol=1e-6, rtol=0)
    body = judge.requests[0]
    assert body["model"] == "judge" and body["temperature"] == 0.0 and body["max_tokens"] == 1
    assert body["logprobs"] is True and body["top_logprobs"] == 20
    assert PROMPT in body["messages"][0]["content"][1]["text"]  # braces and quotes as they are
    assert judge.headers[0]["Authorization"] == "Bearer sesame"


def test_the_rubrics_number(judge: Judge) -> None:
    reward, images = build(judge, mode="score", low=1, high=5), lit(0.2, 0.8)
    scores = reward(images, [PROMPT] * 2, [{}] * 2)
    torch.testing.assert_close(scores, 1 + 4 * images.mean(dim=(1, 2, 3)), atol=1e-3, rtol=0)
    assert reward.card.range == (1, 5)


def test_win_rates_in_a_group(judge: Judge) -> None:
    reward = build(judge, "vlm_pairs")
    assert reward(lit(0.5, 0.1, 0.9, 0.5), [PROMPT] * 4, [{}] * 4).tolist() == pytest.approx([0.5, 0.0, 1.0, 0.5])
    assert len(judge.requests) == 12  # every pair in both orders
    soft = build(judge, "vlm_pairs", mode="yes")
    lights = lit(0.4, 0.2, 0.8)
    values = lights.mean(dim=(1, 2, 3))
    expected = torch.stack([(0.5 + (v - values) / 2).sum() - 0.5 for v in values]) / 2
    torch.testing.assert_close(soft(lights, [PROMPT] * 3, [{}] * 3), expected, atol=1e-6, rtol=0)
    assert "set rollout.group_size to 2 or more" in failure(reward, lit(0.5))


def test_a_tournament_takes_few_pairs_and_finds_the_best(judge: Judge) -> None:
    reward = build(judge, "vlm_pairs", compare="tournament")
    rates = reward(lit(0.5, 0.1, 0.9, 0.3, 0.7), [PROMPT] * 5, [{}] * 5)
    assert len(judge.requests) == 2 * 4
    assert rates.argmax() == 2 and rates[2] == 1.0 and float(rates.mean()) == pytest.approx(0.5)
    assert torch.equal(rates, reward(lit(0.5, 0.1, 0.9, 0.3, 0.7), [PROMPT] * 5, [{}] * 5))  # the same pairs again
    with pytest.raises(UserError, match=r'unknown compare "tournment" \(nearest: "tournament"\)'):
        build(judge, "vlm_pairs", compare="tournment")


def test_a_knockout_by_hand() -> None:
    asked: list[tuple[int, int]] = []

    def ask(order: Any) -> dict[tuple[int, int], float]:
        asked.extend(order)
        return {(i, j): float(i > j) for i, j in order}  # the later image is better

    rates = tournament(ask, 8, "a prompt")
    assert len(asked) == 14 and len({frozenset(pair) for pair in asked}) == 7
    # four go out in the first round, two in the second, one in the last: 1.5, 4.5, 6 and 7 of 7 others
    assert sorted((rates * 7).round(decimals=3).tolist()) == [1.5] * 4 + [4.5] * 2 + [6.0, 7.0] and rates[7] == 1.0
    assert tournament(lambda order: dict.fromkeys(order, 0.5), 2, "p").sum() == 1.0  # a drawn pair has a winner, too


def test_requests_run_at_once_and_answers_keep_their_order(judge: Judge) -> None:
    judge.delay = 0.1
    reward, images = build(judge, concurrency=8), torch.rand(24, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    images = (images * torch.linspace(0.1, 1, 24).view(-1, 1, 1, 1) * 255).round() / 255
    scores = reward(images, [PROMPT] * 24, [{}] * 24)
    assert 4 <= judge.peak <= 8
    torch.testing.assert_close(scores, images.mean(dim=(1, 2, 3)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("fault", ["500", "429", "hang up", "no json", "slow", "I cannot say."])
def test_a_fault_that_passes_is_tried_again(judge: Judge, fault: str) -> None:
    judge.script = [fault, fault]
    limit = 0.6 if fault == "slow" else 30.0
    reward, images = build(judge, mode="score", concurrency=1, request_timeout=limit), lit(0.5)
    assert reward(images, [PROMPT], [{}]).item() == pytest.approx(1 + 4 * images.mean().item(), abs=1e-3)
    assert len(judge.requests) == 3
    heat = [body["temperature"] for body in judge.requests]
    assert heat == ([0.0, 0.5, 0.5] if fault == "I cannot say." else [0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("500", "500: no such luck"),
        ("no json", "Expecting value"),
        ("Score: 0", "is not a number from 1 to 5"),
        ("I would give it a Score: 4 to 5", "is a range or several numbers; the answer: 'I would give it"),
    ],
)
def test_a_fault_that_stays_is_an_error_and_no_number(judge: Judge, fault: str, said: str) -> None:
    judge.script = [fault] * 9
    message = failure(build(judge, mode="score", request_retries=2, concurrency=1), lit(0.5))
    assert said in message and judge.url in message and PROMPT in message and "in 3 tries" in message


def test_what_trying_again_cannot_mend_fails_at_once(judge: Judge) -> None:
    judge.script = ["401"] * 9
    assert "answered 401: no such luck" in failure(build(judge, concurrency=1), lit(0.5))
    assert len(judge.requests) == 1
    judge.script = ["Yes"]
    assert "no probabilities of the first token" in failure(build(judge, concurrency=1, request_retries=0), lit(0.5))


def test_a_model_that_thinks_is_asked_in_its_own_words(judge: Judge, caplog: pytest.LogCaptureFixture) -> None:
    """OpenAI's since o1: no `max_tokens`, and no temperature but the default."""
    judge.refuses = {
        "max_tokens": "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
        "'max_completion_tokens' instead.",
        "temperature": "litellm.BadRequestError: Unsupported value: 'temperature' does not support 0.0 with this model."
        " Only the default (1) value is supported.",
    }
    reward, images = build(judge, mode="score", max_tokens=77, concurrency=2), lit(0.2, 0.5, 0.9)
    wanted = [1 + 4 * image.mean().item() for image in images]
    assert reward(images, [PROMPT] * 3, [{}] * 3).tolist() == pytest.approx(wanted, abs=1e-3)
    assert caplog.text.count("takes no temperature") == 1
    first = len(judge.requests)
    reward(images, [PROMPT] * 3, [{}] * 3)
    known = judge.requests[first:]
    assert len(known) == 3 and all(body["max_completion_tokens"] == 77 for body in known)
    assert not any({"max_tokens", "temperature"} & set(body) for body in known)
    judge.refuses["messages"] = "Unsupported parameter: 'messages' is not supported with this model."
    assert "answered 400" in failure(reward, images[:1])


def test_after_a_failure_the_others_are_not_tried_again(judge: Judge) -> None:
    judge.delay, judge.script = 0.05, ["401", *["500"] * 20]
    reward = load_reward("vlm", server=judge.url, concurrency=4, backoff=60.0)  # a minute until the second try
    start = time.perf_counter()
    failure(reward, lit(0.1, 0.2, 0.3, 0.4))
    assert time.perf_counter() - start < 30 and len(judge.requests) <= 4


def test_servers_that_cannot_be_used_are_named(judge: Judge) -> None:
    judge.models = ["one", "two"]
    with pytest.raises(UserError, match="serves one, two; name one as `model`"):
        build(judge)
    chosen = build(judge, model="two")
    assert chosen.backend.model == "two" and chosen.remote is True and chosen.device is None
    with pytest.raises(UserError, match=r"no server is there: server http://127.0.0.1:9/v1: ConnectError"):
        load_reward("vlm", server="http://127.0.0.1:9/v1", model="any")
    with pytest.raises(UserError, match="name a `server`"):
        load_reward("vlm")
    with pytest.raises(UserError, match=r'unknown mode "pairs".*vlm_pairs compares'):
        build(judge, mode="pairs")


@pytest.mark.long
def test_all_modes_conform_on_the_server(judge: Judge) -> None:
    images, prompts = example_images()
    for name, mode, every in (("vlm", "yes", 16), ("vlm", "score", 16), ("vlm_pairs", "answer", 24)):
        bad = [r for r in examine(build(judge, name, mode=mode), images[::every], prompts[::every]) if not r.passed]
        assert not bad, bad


# reading answers


def test_rewritten_prompts_are_read_strictly() -> None:
    for text in ("Prompt: a red cat", 'The cat is blue.\n**Prompt: "a red cat"**', "prompt:a red cat"):
        assert rewritten(Reply(text)) == "a red cat", text
    for text in ("", "a red cat", "Prompt:", "Prompt: a red cat\nThanks!", 'Prompt: ""'):
        with pytest.raises(Unreadable):
            rewritten(Reply(text))


def test_the_judge_rewrites_each_prompt(judge: Judge) -> None:
    images = torch.stack([torch.full((3, 8, 8), 0.5), torch.ones(3, 8, 8)])
    assert load_reward("vlm", server=judge.url).rewrite(images, ["a cat", "a dog"], [{}, {}]) == [
        "a cat, lit",
        "a dog, lit",
    ]


def test_yes_needs_yes_or_no() -> None:
    tokens = [("Yes", 0.5), ("▁yes", 0.1), (" NO.", 0.2), ("yesterday", 0.2)]
    assert yes_probability(Reply("", tokens), 0.5) == pytest.approx(0.75)
    assert yes_probability(Reply("", [("no", 0.9)]), 0.5) == 0.0
    with pytest.raises(Unreadable, match=r"0\.8 together"):
        yes_probability(Reply("", tokens), 0.9)
    with pytest.raises(Unreadable):
        yes_probability(Reply("", [("maybe", 1.0)]), 0.0)


def test_win_rates_by_hand() -> None:
    wins = {(0, 1): 1.0, (1, 0): 1.0, (0, 2): 1.0, (2, 0): 0.0, (1, 2): 0.5, (2, 1): 0.5}
    assert win_rates(wins, 3).tolist() == pytest.approx([3 / 4, 2 / 4, 1 / 4])


def test_a_question_is_sent_word_for_word(judge: Judge) -> None:
    """UnifiedReward's way: its prompt without an instruction of ours, and the number after its words."""
    asked = "<image>\nAssign a score from 1 to 5 after 'Final Score:'.\nText Caption: [{prompt}]"
    reward = build(judge, mode="score", question=asked, after="Final Score:", concurrency=1)
    judge.script = ["Alignment: 5 of 5. Final Score: 3.5 Thank you."]
    assert reward(lit(0.5), [PROMPT], [{}]).tolist() == [3.5]
    assert judge.requests[0]["messages"][0]["content"][1]["text"] == asked.replace("{prompt}", PROMPT)
    for answer in ("Score: 3", "Final Score: none", "Final Score: 7"):
        judge.script = [answer] * 4
        assert "number from 1 to 5" in (message := failure(reward, lit(0.5))) and repr(answer) in message
    three = ["Alignment Score (1-5):", "Coherence Score (1-5):", "Style Score (1-5):"]  # UnifiedReward 2's
    reward = build(judge, mode="score", question=asked, after=three, concurrency=1)
    judge.script = [f"{three[0]} 2.694700002670288\n{three[1]} 2.371500015258789\n{three[2]} 2.802500009536743"]
    assert reward(lit(0.5), [PROMPT], [{}]).tolist() == pytest.approx([2.6229])
    judge.script = [f"{three[0]} 2.6\n{three[1]} 2.3"] * 4
    assert 'no number from 1 to 5 after "Style Score (1-5):"' in failure(reward, lit(0.5))
    for after in ("Final Score:", [], ["Final Score:", " "]):
        with pytest.raises(UserError, match="for mode: score with a `question` of your own"):
            build(judge, mode="yes" if after == "Final Score:" else "score", question=asked, after=after)


def test_ocr_reads_with_a_vision_language_model(judge: Judge) -> None:
    """Peers' reader: the transcription of a served model, without spaces and capitals, by the edit distance."""
    reward = build(judge, "ocr", engine="vlm", targets="first", contained=True, concurrency=1)
    assert reward.remote is True
    judge.script = ["Sorry, we are  OPEN now", "oqen", "CLOSED and much more that is not there"]
    scores = reward(lit(0.1, 0.5, 0.9), ['a sign "Open"'] * 3, [{}] * 3)
    assert scores.tolist() == pytest.approx([1.0, 0.75, 0.0])
    said = judge.requests[0]["messages"][0]["content"][1]["text"]
    assert said == (
        "Please output only the text content from the image without any additional descriptions or formatting."
    )
    for params, text in (
        ({"engine": "vllm"}, r'unknown engine "vllm" \(nearest: "vlm"\)'),
        ({"engine": "vlm"}, "name a `server`"),
        ({"model": "some/model"}, "reads with engine: vlm"),
        ({"engine": "vlm", "server": judge.url, "detect": True}, "belong to engine: rapidocr"),
    ):
        with pytest.raises(UserError, match=text):
            load_reward("ocr", **params)


# questions (Soft-TIFA) and points

TWO = {"vqa_list": [["Is it grey?", "Yes"], ["How many greys are there?", "two"]]}
THREE = {"vqa_list": [["Is it grey?", "Yes"], ["Is it plain?", "Yes"], ["How many greys are there?", "two"]]}


def test_questions_are_asked_alone_and_word_for_word(judge: Judge) -> None:
    """0.9 of the brightness is yes; the judge never says a number, so "two" has the probability 0."""
    reward, images = build(judge, mode="questions", combine="arithmetic", least=0.0), lit(0.2, 0.8)
    assert reward.applies(PROMPT, TWO) and not reward.applies(PROMPT, {})
    answers = reward.answers(images, [PROMPT] * 2, [TWO, THREE])
    lights = [0.9 * float(image.mean()) for image in images]
    assert answers == [pytest.approx([lights[0], 0.0]), pytest.approx([lights[1], lights[1], 0.0])]
    assert reward(images, [PROMPT] * 2, [TWO, THREE]).tolist() == pytest.approx([lights[0] / 2, 2 * lights[1] / 3])
    asked = {body["messages"][0]["content"][1]["text"] for body in judge.requests}
    assert "How many greys are there? Answer in one word." in asked and len(judge.requests) == 10
    whole = build(judge, mode="questions", least=0.0)
    yes = {"vqa_list": TWO["vqa_list"][:1]}
    assert whole(images, [PROMPT] * 2, [yes, TWO]).tolist() == pytest.approx([lights[0], 0.0])


def test_all_questions_in_one_request(judge: Judge) -> None:
    reward, images = build(judge, mode="questions", together=True), lit(0.4, 0.9)
    assert reward.answers(images, [PROMPT] * 2, [TWO, THREE]) == [
        pytest.approx([0.9 * float(images[0].mean())] * 2),
        pytest.approx([0.9 * float(images[1].mean())] * 3),
    ]
    assert len(judge.requests) == 2 and judge.requests[0]["max_tokens"] > 2
    judge.script = ["Yes"] * 9
    data = [TWO]
    with pytest.raises(RewardError, match="no probabilities of the first token"):
        reward(images[:1], [PROMPT], data)


def test_a_judge_that_answers_nonsense_is_no_number(judge: Judge) -> None:
    reward = build(judge, mode="questions", least=0.95, concurrency=1)
    with pytest.raises(RewardError, match=r"on average 0\.45 of the first token is an answer at all, less than 0\.95"):
        reward(lit(0.5), [PROMPT], [TWO])
    for data in ({}, {"vqa_list": ["What?"]}, {"vqa_list": [["Is it?", 3]]}):
        with pytest.raises(RewardError, match="expected `vqa_list`"):
            reward(lit(0.5), [PROMPT], [data])
    for params, text in (
        ({"combine": "harmonic"}, "unknown combine"),
        ({"question": "What?"}, "needs the text {quest"),
    ):
        with pytest.raises(UserError, match=text):
            build(judge, mode="questions", **params)


def test_points_are_read_from_the_score_list(judge: Judge) -> None:
    reward, data = (
        build(judge, mode="points", concurrency=1, request_retries=1),
        {"points": ["a", "b"], "request": "Say"},
    )
    judge.script = ["<analysis>['x', 'y']</analysis>\n<score>[1, 0]</score>"]
    assert reward.answers(lit(0.5), [PROMPT], [data]) == [[1.0, 0.0]]
    assert judge.requests[0]["messages"][0]["content"][1]["text"] == "Say"
    judge.script = ["<score>[1, 1, 1]</score>", "<score>[1, 1]</score>"]  # asked again
    assert reward(lit(0.5), [PROMPT], [data]).tolist() == [1.0]
    for answer in ("[1, 0, 1]", "<score>[1]</score>", "<score>[1, 0.5]</score>", "<score>__import__('os')</score>"):
        judge.script = [answer] * 2
        with pytest.raises(RewardError, match="no <score> with a list of 2 times 0 or 1"):
            reward(lit(0.5), [PROMPT], [data])


def test_spellings_are_the_published_ones() -> None:
    assert set(spellings("three")) == {"three", "Three", " three", " Three", "3", " 3"}
    assert set(spellings("Yes")) == {"yes", "Yes", " yes", " Yes"}
    first = [("3", 0.2), (" Three", 0.1), ("Ġthree", 0.1), ("THREE", 0.3), ("thirty", 0.3)]
    assert probability(first, spellings("three")) == pytest.approx(0.4)


# in process


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random Qwen2.5-VL with its processor, a byte-pair tokenizer and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    special = ["<|im_end|>", "<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    pairs = [(word[:i], word[i]) for word in ("Yes", "yes", "No", "no") for i in range(1, len(word))]
    tokens = Counter([*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in pairs)])
    ids = {token: i for i, token in enumerate(tokens)}
    base = Tokenizer(models.BPE(vocab=ids, merges=pairs))
    base.pre_tokenizer, base.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base, pad_token=special[0], eos_token=special[0], additional_special_tokens=special
    )
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}{% if c['type'] == 'image' %}"
        "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    size = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
    parts = (Qwen2VLImageProcessor(size=size), tokenizer, Qwen2VLVideoProcessor(size=size))
    width = {"hidden_size": 32, "intermediate_size": 64}
    vision = {
        **width,
        "depth": 2,
        "num_heads": 2,
        "out_hidden_size": 32,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    text = {**width, "vocab_size": len(ids), "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    text |= {"rope_parameters": rope, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    names = {"image_token_id": 4, "video_token_id": 5, "vision_start_token_id": 2, "vision_end_token_id": 3}
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(vision_config=vision, text_config=text, **names))
    folder = tmp_path_factory.mktemp("qwen")
    model.save_pretrained(folder)
    Qwen2_5_VLProcessor(*parts, chat_template=template).save_pretrained(folder)
    return str(folder)


def test_a_local_model_conforms(qwen: str) -> None:
    images, prompts = example_images()
    common = {"model": qwen, "device": "cpu", "precision": "fp32", "least": 0.0, "batch_size": 8}
    bad = [r for r in examine(load_reward("vlm", **common), images[::16], prompts[::16]) if not r.passed]
    assert not bad, bad
    pairs: Any = load_reward("vlm_pairs", mode="yes", **common)
    assert pairs.remote is False and pairs.device == torch.device("cpu") and pairs.groupwise
    bad = [r for r in examine(pairs, images[:4], prompts[:4]) if not r.passed]
    assert not bad, bad
    assert pairs(images[:4], prompts[:1] * 4, [{}] * 4).mean().item() == pytest.approx(0.5)  # every win is a loss


def test_soft_tifa_in_process_is_the_published_script(qwen: str) -> None:
    """Of each question alone, the sum of the softmax over the first tokens of the answer's spellings."""
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    images, prompts = example_images()
    common = {"model": qwen, "device": "cpu", "precision": "fp32", "least": 0.0, "mode": "questions"}
    reward: Any = load_reward("vlm", **common, batch_size=3)
    answers = reward.answers(images[:2], prompts[:2], [TWO, THREE])
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(qwen).eval()
    processor = AutoProcessor.from_pretrained(qwen)
    for image, data, values in zip(images[:2], (TWO, THREE), answers, strict=True):
        picture = Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
        for (question, right), value in zip(data["vqa_list"], values, strict=True):
            asked = f"<|vision_start|><|image_pad|><|vision_end|>{question} Answer in one word."
            chat = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
            with torch.no_grad():
                p = model(**processor(text=[chat], images=[picture], return_tensors="pt")).logits[0, -1].softmax(-1)
            forms = ["Yes", "yes", " yes", " Yes"] if right == "Yes" else ["two", "Two", " two", " Two", "2", " 2"]
            expected = sum(float(p[processor.tokenizer.encode(form)[0]]) for form in forms)
            assert value == pytest.approx(min(expected, 1.0), abs=1e-5)


def test_the_first_token_of_every_line_in_process(qwen: str) -> None:
    """The first line's is the answer's first token, as if it were asked for alone."""
    images, _ = example_images()
    backend: Any = load_reward("vlm", model=qwen, device="cpu", precision="fp32", least=0.0).backend
    texts = [f"What is it, {n}?" for n in range(6)]
    asked = {n: [Question([images[0]], text, text, spellings("two"), n) for text in texts] for n in (1, 2)}
    alone, several = (backend.ask(asked[n], lambda reply: reply, first=True) for n in (1, 2))
    pairs = [(one.first, more.lines[0]) for one, more in zip(alone, several, strict=True) if more.text.strip()]
    same = [dict(first) == pytest.approx(dict(line), abs=1e-6) for first, line in pairs]
    assert any(same) and len(pairs) == 6
    assert line_starts(["\n", "Yes", ".", "\n", " ", "tw", "o\n\n", "No"]) == [1, 5, 7]


def test_the_probability_is_the_next_tokens(qwen: str) -> None:
    """Softmax over the whole vocabulary at the place of the answer, yes over yes and no, one image alone."""
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    images, prompts = example_images()
    reward: Any = load_reward("vlm", model=qwen, device="cpu", precision="fp32", least=0.0, question="Is it {prompt}?")
    scores = reward(images[:3], prompts[:3], [{}] * 3)
    model, processor = (
        Qwen2_5_VLForConditionalGeneration.from_pretrained(qwen).eval(),
        AutoProcessor.from_pretrained(qwen),
    )
    ids = {word: processor.tokenizer.encode(word)[0] for word in ("Yes", "yes", "No", "no")}
    for image, prompt, score in zip(images[:3], prompts[:3], scores.tolist(), strict=True):
        picture = Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
        asked = f"<|vision_start|><|image_pad|><|vision_end|>Is it {prompt}?"
        chat = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        with torch.no_grad():
            inputs = processor(text=[chat], images=[picture], return_tensors="pt")
            p = model(**inputs).logits[0, -1].softmax(-1)
        yes, no = float(p[ids["Yes"]] + p[ids["yes"]]), float(p[ids["No"]] + p[ids["no"]])
        assert score == pytest.approx(yes / (yes + no), abs=1e-5)


def test_a_local_model_that_talks_nonsense_is_an_error(qwen: str, tmp_path: Path) -> None:
    images = lit(0.5)
    words = {"model": qwen, "device": "cpu", "precision": "fp32", "max_tokens": 4}
    assert "there is no score in it" in failure(load_reward("vlm", mode="score", **words), images)
    assert 'there is no "Winner: A"' in failure(load_reward("vlm_pairs", **words), lit(0.2, 0.5))
    assert "less than 0.5" in failure(load_reward("vlm", model=qwen, device="cpu", precision="fp32"), images)
    with pytest.raises(UserError, match="vlm: cannot load"):
        load_reward("vlm", model=str(tmp_path))
