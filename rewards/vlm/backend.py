"""Where a vision-language model answers: an OpenAI-compatible server (vLLM, SGLang, ...), or transformers in process.

Both answer `Question`s and hand every answer to a parser that raises `Unreadable` where it cannot be understood; what
stays unreadable, or unanswered, is a `RewardError`.
"""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import exp
from typing import Any, TypeVar

import torch
from torch import Tensor

from diffrl.errors import UserError
from diffrl.hub import pinned
from diffrl.rewards.protocol import RewardError
from diffrl.rewards.secrets import check_transport, variable
from diffrl_zoo.loading import cannot_load, dtype_of, pick_device, to_pictures, transformers_bytes
from diffrl_zoo.vlm.parse import line_starts, plain
from diffrl_zoo.vlm.question import Question, Reply, Unreadable

T = TypeVar("T")
TOP = 20  # first tokens whose probabilities a server tells: the most that the protocol allows
PASSING = (408, 409, 425, 429, 500, 502, 503, 504)  # statuses after which a request may succeed when sent again
ANSWERS = ("yes", "no")
A_LINE = 8  # tokens of an answer of one word, a number before it included
KIND = "AutoModelForImageTextToText"


@dataclass(eq=False, repr=False, kw_only=True)
class Judge:
    """What every reward that asks a vision-language model is told of it.

    `server`: URL of an OpenAI-compatible server, ending in /v1, with `model` the name that it serves (None: its only
    one), `key` the environment variable with its token (DIFFRL_..., or one that you allowed), `concurrency` requests at
    once. A request fails after `request_timeout` seconds of silence, and is sent again `request_retries` times, the
    first after `backoff` seconds and each of the next after twice the wait before. Without `server`, `model` is a hub
    id or folder for transformers, on `device`, in `precision`. `batch_size`: images a call (for transformers: a
    forward). `max_tokens`: of an answer in words.
    """

    server: str | None = None
    model: str | None = None
    key: str = "DIFFRL_VLM_KEY"
    request_timeout: float = 60.0
    request_retries: int = 3
    backoff: float = 1.0
    concurrency: int = 16
    max_tokens: int = 512
    device: Any = None
    batch_size: int = 16
    precision: str = "bf16"

    def connect(self) -> None:
        """Sets `backend`, `remote` and `device`. UserError if there is no such model, or a server does not answer."""
        if self.server is None and self.model is None:
            raise UserError("vlm: name a `server` (its URL, ending in /v1), or a `model` (hub id or folder)")
        self.backend: Server | LocalModel = LocalModel(self) if self.server is None else Server(self)
        self.remote, self.device = self.server is not None, getattr(self.backend, "device", None)

    @staticmethod
    def footprint(server: str | None, model: str | None, precision: str, **_: Any) -> int | None:
        """Bytes of the weights in this process; None where the model's config is not to be had."""
        if server is not None:
            return 0
        return None if model is None else transformers_bytes(KIND, model, precision)


class Server:
    """An OpenAI-compatible server, asked by `concurrency` threads over pooled connections.

    An unreadable answer is asked for again at temperature 0.5.
    """

    def __init__(self, settings: Judge) -> None:
        import httpx

        url, count = str(settings.server), settings.concurrency
        token = variable(settings.key, "vlm.key")
        if token is not None:
            check_transport(url, "vlm.server")
        self.url, self.retries, self.backoff = url.rstrip("/"), settings.request_retries, settings.backoff
        self.concurrency, self.max_tokens = count, settings.max_tokens
        try:
            self.client = httpx.Client(
                headers={"Authorization": f"Bearer {token}"} if token else {},
                timeout=settings.request_timeout,
                limits=httpx.Limits(max_connections=count, max_keepalive_connections=count),
            )
            self.model = settings.model or self._only_model()
        except UserError:
            raise
        except (httpx.HTTPError, httpx.InvalidURL, KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__} {' '.join(str(error).split())}"
            raise UserError(f"vlm: the server {url} does not tell its models: {reason}") from error

    def _only_model(self) -> str:
        served = [entry["id"] for entry in self.client.get(f"{self.url}/models").raise_for_status().json()["data"]]
        if len(served) != 1:
            raise UserError(f"vlm: the server {self.url} serves {', '.join(served) or 'nothing'}; name one as `model`")
        return served[0]

    def ask(self, questions: Sequence[Question], parse: Callable[[Reply], T], first: bool) -> list[T]:
        """The parsed answers, in order. `first`: the parser needs the first token's probabilities, not the text."""
        images = {id(image): image for question in questions for image in question.images}
        urls = {key: data_url(image) for key, image in images.items()}  # once, in however many pairs an image is
        halt = threading.Event()  # after a failure the other requests are not sent again
        with ThreadPoolExecutor(self.concurrency, thread_name_prefix="diffrl-vlm") as pool:
            bodies = [self._body(q, [urls[id(image)] for image in q.images], first) for q in questions]
            rows = zip(questions, bodies, strict=True)
            waiting = [pool.submit(self._one, question, body, parse, first, halt) for question, body in rows]
            try:
                done, _ = wait(waiting, return_when=FIRST_EXCEPTION)  # in whatever order they end
                for error in filter(None, (future.exception() for future in done)):
                    raise error
                return [future.result() for future in waiting]
            except BaseException:
                halt.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _one(
        self,
        question: Question,
        body: dict[str, Any],
        parse: Callable[[Reply], T],
        first: bool,
        halt: threading.Event,
    ) -> T:
        import httpx

        last: Exception | None = None
        for trial in range(self.retries + 1):
            if trial and halt.wait(self.backoff * 2 ** (trial - 1)):
                break
            try:
                response = self.client.post(f"{self.url}/chat/completions", json=body)
                if response.status_code not in PASSING and response.is_error:
                    message = " ".join(response.text.split())[:300]
                    raise RewardError(f"vlm: the server {self.url} answered {response.status_code}: {message}")
                return parse(_reply(response.raise_for_status().json(), first, question.lines))
            except Unreadable as error:
                last, body = error, body | {"temperature": 0.5, "seed": trial + 1}
            except (httpx.HTTPError, ValueError) as error:
                last = error
        message = " ".join(str(last).split()) or "no message"
        raise RewardError(
            f'vlm: no usable answer from the server {self.url} on the prompt "{question.prompt}" in {self.retries + 1} '
            f"tries; the last: {type(last).__name__}: {message}"
        ) from last

    def _body(self, question: Question, urls: Sequence[str], first: bool) -> dict[str, Any]:
        images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content = [*images, {"type": "text", "text": question.text}]
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], "temperature": 0.0}
        if first:
            most = 1 if question.lines == 1 else A_LINE * question.lines
            return body | {"max_tokens": most, "logprobs": True, "top_logprobs": TOP}
        return body | {"max_tokens": self.max_tokens}


def _reply(answer: Any, first: bool, lines: int = 1) -> Reply:
    """What a chat completion says; `Unreadable` if it is none, or lacks the probabilities."""
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"] or ""
        if not first:
            return Reply(text)
        content = choice["logprobs"]["content"]
        starts = line_starts([str(entry["token"]) for entry in content]) if lines > 1 else [0]
        firsts = [[(e["token"], exp(float(e["logprob"]))) for e in content[i]["top_logprobs"]] for i in starts]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        what = "no probabilities of the first token (logprobs)" if first else "no chat completion"
        raise Unreadable(f"{what} in {str(answer)[:200]}") from error
    if len(firsts) < lines:
        raise Unreadable(f"{len(firsts)} lines of answers to {lines} questions: {text[:200]!r}")
    return Reply(text, firsts[0], firsts if lines > 1 else ())


def data_url(image: Tensor) -> str:
    """(3, H, W) in [0, 1] as a PNG in a data URL."""
    file = io.BytesIO()
    to_pictures(image[None])[0].save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


class LocalModel:
    """A vision-language model of transformers (hub id or folder), answering greedily in batches.

    Its answers are the same every time, so an unreadable one is an error at once.
    """

    def __init__(self, settings: Judge) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.name, dtype = str(settings.model), dtype_of(settings.precision, "vlm")
        self.device, self.batch_size = pick_device(settings.device), settings.batch_size
        self.max_tokens, self._tokens = settings.max_tokens, dict[str, int]()
        with cannot_load("vlm", self.name):
            source, at = pinned(self.name)
            network = AutoModelForImageTextToText.from_pretrained(source, dtype=dtype, **at)
            self.processor: Any = AutoProcessor.from_pretrained(source, **at)
        self.network: Any = network.eval().requires_grad_(False).to(self.device)
        tokenizer = self.processor.tokenizer
        tokenizer.padding_side = "left"  # the answer follows the last token of every row
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        spelled = [s + w for w in ("yes", "Yes", "YES", "no", "No", "NO") for s in ("", " ")]
        tokens = {ids[0] for word in spelled if len(ids := tokenizer.encode(word, add_special_tokens=False)) == 1}
        self.candidates = {
            i: word for i in sorted(tokens) if (word := tokenizer.decode([i])) and plain(word) in ANSWERS
        }

    @torch.no_grad()
    def ask(self, questions: Sequence[Question], parse: Callable[[Reply], T], first: bool) -> list[T]:
        """The parsed answers, in order; see `Server.ask`."""
        spelled = {plain(word) for word in self.candidates.values()} == set(ANSWERS)
        if first and not spelled and not all(question.words for question in questions):
            raise RewardError(f'vlm: yes and no are not single tokens of "{self.name}"; use another mode')
        answers = []
        for start in range(0, len(questions), self.batch_size):
            part = questions[start : start + self.batch_size]
            inputs = self._inputs(part)
            replies = self._first(inputs, part) if first else self._text(inputs)
            for question, reply in zip(part, replies, strict=True):
                try:
                    answers.append(parse(reply))
                except Unreadable as error:
                    raise RewardError(
                        f'vlm: no usable answer of "{self.name}" on the prompt "{question.prompt}": {error}'
                    ) from error
        return answers

    def _inputs(self, questions: Sequence[Question]) -> Any:
        chats = []
        for question in questions:
            content = [{"type": "image", "image": to_pictures(image[None])[0]} for image in question.images]
            chats.append([{"role": "user", "content": [*content, {"type": "text", "text": question.text}]}])
        inputs = self.processor.apply_chat_template(
            chats,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        )
        return inputs.to(self.device, self.network.dtype)

    def _first(self, inputs: Any, questions: Sequence[Question]) -> list[Reply]:
        if all(question.lines == 1 for question in questions):
            probabilities = self.network(**inputs, use_cache=False).logits[:, -1].float().softmax(dim=-1)
            return [Reply("", self._candidates(row, q)) for row, q in zip(probabilities, questions, strict=True)]
        most = A_LINE * max(question.lines for question in questions)
        done = self.network.generate(
            **inputs, max_new_tokens=most, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        tokens = done.sequences[:, inputs["input_ids"].shape[1] :]
        replies = []
        for i, question in enumerate(questions):
            words = [self.processor.tokenizer.decode([token], skip_special_tokens=True) for token in tokens[i].tolist()]
            rows = [done.logits[step][i].float().softmax(dim=-1) for step in line_starts(words)]
            replies.append(Reply("".join(words), lines=[self._candidates(row, question) for row in rows]))
        return replies

    def _candidates(self, probabilities: Tensor, question: Question) -> list[tuple[str, float]]:
        """The spellings that count as answers with the probability (V,) of their first token."""
        tokens = {word: self._first_token(word) for word in question.words} or {
            word: i for i, word in self.candidates.items()
        }
        return list(zip(tokens, probabilities[list(tokens.values())].tolist(), strict=True))

    def _first_token(self, word: str) -> int:
        if word not in self._tokens:
            self._tokens[word] = self.processor.tokenizer.encode(word, add_special_tokens=False)[0]
        return self._tokens[word]

    def _text(self, inputs: Any) -> list[Reply]:
        tokens = self.network.generate(**inputs, max_new_tokens=self.max_tokens, do_sample=False)
        answers = tokens[:, inputs["input_ids"].shape[1] :]
        return [Reply(text) for text in self.processor.batch_decode(answers, skip_special_tokens=True)]
