"""Where a vision-language model answers: an OpenAI-compatible server (vLLM, SGLang, ...), or transformers in process.

Both answer `Question`s and hand every answer to a parser that raises `Unreadable` where it cannot be understood; what
stays unreadable, or unanswered, is a `RewardError`.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from diffrl.errors import UserError
from diffrl.rewards.protocol import RewardError, Unscored
from diffrl.serving.secrets import variable
from diffrl_zoo.inputs import to_pictures
from diffrl_zoo.loading import cannot_load, dtype_of, from_pretrained, frozen, pick_device, transformers_bytes
from diffrl_zoo.vlm.parse import line_starts, plain
from diffrl_zoo.vlm.question import Question, Reply, Unreadable

if TYPE_CHECKING:
    from diffrl.serving.client import Answer

T = TypeVar("T")
log = logging.getLogger("diffrl")
TOP = 20  # first tokens whose probabilities a server tells: the most that the protocol allows
PASSING = (409, 500)  # statuses that are tries; those of a busy or absent server cost patience alone
NO_SCHEMA = (400, 404, 415, 422, 501)  # what a server says that cannot bind an answer to a schema
# What models that think refuse (OpenAI's since o1), in the words that gateways hand on, and what is sent in its place.
UNSUPPORTED = re.compile(r"unsupported (?:parameter|value): .?['\"](\w+)", re.IGNORECASE)
IN_PLACE = {"max_tokens": "max_completion_tokens", "temperature": None, "seed": None}
OF_NOW = ("created", "permission", "owned_by")  # what a server says of a model that does not make its answers
MOST = 2**24  # bytes of an answer with its probabilities
REFUSALS = re.compile("content.?(?:filter|policy)|moderation|safety|responsible.?ai", re.IGNORECASE)  # of one image
REFUSING = (400, 403)  # with such a word; without one the request is wrong, or the key may not ask
ANSWERS = ("yes", "no")
# Where text-generation-inference and SGLang say what vLLM says in its list of models.
BESIDE = {"/info": ("model_id", "model_sha"), "/get_model_info": ("model_path", "weight_version")}
A_LINE = 8  # tokens of an answer of one word, a number before it included
KIND = "AutoModelForImageTextToText"


@dataclass(eq=False, repr=False, kw_only=True)
class Judge:
    """What every reward that asks a vision-language model is told of it.

    `server`: URL of an OpenAI-compatible server, ending in /v1, or several of them, or a name with several addresses
    (`diffrl.serving.client`), with `model` the name that they serve (None: their only one), `key` the environment
    variable with their token (DIFFRL_..., or one that you allowed), `concurrency` requests at once to each. A request
    goes to the server that is asked least, and to another one where that is gone or busy, for `patience` seconds; an
    attempt may last `request_timeout` seconds. An answer that cannot be read or says that the server failed is asked
    for again, `request_retries` times, the first after `backoff` seconds and each of the next after twice the wait
    before; a model that refuses `temperature` is asked without, and scores an image anew each time. Without `server`,
    `model` is a hub id or folder for transformers, on `device`, in `precision`. `batch_size`:
    images a call (for transformers: a forward). `max_tokens`: of an answer in words.
    """

    server: str | Sequence[str] | None = None
    model: str | None = None
    key: str = "DIFFRL_VLM_KEY"
    request_timeout: float = 60.0
    patience: float = 600.0
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
        self.identity = getattr(self.backend, "identity", "")

    @staticmethod
    def footprint(server: str | Sequence[str] | None, model: str | None, precision: str, **_: Any) -> int | None:
        """Bytes of the weights in this process; None where the model's config is not to be had."""
        if server is not None:
            return 0
        return None if model is None else transformers_bytes(KIND, model, precision)


def readable(answers: Sequence[T | Unscored]) -> list[T | None]:
    """The answers, None for one that there is not; where there is none at all the first `Unscored` is raised."""
    missing = [answer for answer in answers if isinstance(answer, Unscored)]
    if missing and len(missing) == len(answers):
        raise missing[0]
    return [None if isinstance(answer, Unscored) else answer for answer in answers]


class Server:
    """OpenAI-compatible servers as one, `concurrency` requests at once to each.

    An unreadable answer is asked for again at temperature 0.5, bound to the question's JSON schema where the server
    offers that.
    """

    def __init__(self, settings: Judge) -> None:
        from diffrl.serving.client import Servers

        token, given = variable(settings.key, "vlm.key"), settings.server or ()
        self.retries, self.backoff, self.max_tokens = settings.request_retries, settings.backoff, settings.max_tokens
        times, bounds = (settings.request_timeout, settings.patience), {"at_once": settings.concurrency, "most": MOST}
        self.servers = Servers(given, token, *times, **bounds, proxies=True, what="vlm.server")
        self.where = ", ".join(self.servers.urls)
        answers = self.servers.each("/models")
        if all(getattr(one, "absent", False) for one in answers.values()):
            raise UserError(f"vlm: no server is there: {'; '.join(map(str, answers.values()))}")
        if denied := next((one for one in answers.values() if getattr(one, "status", 0) == 401), None):
            raise UserError(f"vlm: {denied}; set the environment variable {settings.key} to its token (vlm.key)")
        self.model = settings.model or self._only_model(answers)
        self.identity = self._identity(answers)
        self.schemas = True  # until the server refuses one
        self.refused = set[str]()  # of IN_PLACE

    def _only_model(self, answers: Mapping[str, Any]) -> str:
        try:
            served = [[str(model["id"]) for model in one["data"]] for one in answers.values() if isinstance(one, dict)]
        except (KeyError, TypeError) as error:
            raise UserError(f"vlm: the server {self.where} does not tell its models: {error!r}") from error
        if not served:
            raise UserError(f"vlm: no server tells its models: {'; '.join(map(str, answers.values()))}")
        if len(served[0]) != 1:
            raise UserError(
                f"vlm: the server {self.where} serves {', '.join(served[0]) or 'nothing'}; name one as `model`"
            )
        if odd := [models for models in served if models != served[0]]:
            raise UserError(f"vlm: the servers serve {served[0][0]} and {', '.join(odd[0])}; name one as `model`")
        return served[0][0]

    def _identity(self, answers: Mapping[str, Any]) -> str:
        """What the servers say of the model: its name, its weights' place, revision or size, as each of them does."""
        told = [one.get("data") for one in answers.values() if isinstance(one, dict)]
        entries = [one for many in told if isinstance(many, list) for one in many if isinstance(one, dict)]
        found = [{k: v for k, v in one.items() if k not in OF_NOW} for one in entries if one.get("id") == self.model]
        asked = {} if any(one.get("owned_by") == "vllm" for one in entries) else BESIDE
        for path, keys in asked.items():
            more = self.servers.each(path, beside="/v1").values()
            found += [{key: one.get(key) for key in keys} for one in more if isinstance(one, dict) and keys[0] in one]
        return json.dumps(sorted({json.dumps([self.model, one], sort_keys=True) for one in found}))

    def ask(self, questions: Sequence[Question], parse: Callable[[Reply], T], first: bool) -> list[T | None]:
        """The parsed answers, in order; None for one that cannot be read, `Unscored` if there is no other. `first`: the
        parser needs the first token's probabilities, not the text."""
        images = {id(image): image for question in questions for image in question.images}
        urls = {key: data_url(image) for key, image in images.items()}  # once, in however many pairs an image is
        bodies = [self._body(q, [urls[id(image)] for image in q.images], first) for q in questions]
        rows = zip(questions, bodies, strict=True)
        return readable(self.servers.run([self._one(question, body, parse, first) for question, body in rows]))

    async def _one(
        self, question: Question, body: dict[str, Any], parse: Callable[[Reply], T], first: bool
    ) -> T | Unscored:
        from diffrl.serving.client import RemoteError

        on = f'on the prompt "{question.prompt}"'
        for trial in range(self.retries + 1):
            try:
                answer = await self._send(body)
            except RemoteError as error:
                raise RewardError(f"vlm: no answer {on}: {error}") from error
            if answer.status in REFUSING and REFUSALS.search(answer.body.decode(errors="replace")):  # its code, too
                return Unscored(f"vlm: the server {answer.url} refuses {on}: {answer.problem}")
            try:
                return parse(_reply(_content(answer), first, question.lines))
            except Unreadable as error:
                last: Exception = error
                body = body | {"temperature": 0.5, "seed": trial + 1}
                if question.form and self.schemas:
                    schema = {"name": "answer", "schema": question.form, "strict": True}
                    body |= {"response_format": {"type": "json_schema", "json_schema": schema}}
            except ValueError as error:
                last = error
            if trial < self.retries:
                await asyncio.sleep(self.backoff * 2**trial)
        text = " ".join(str(last).split()) or "no message"
        text = f"vlm: no usable answer from the server {answer.url} {on} in {self.retries + 1} tries; the last: {text}"
        if isinstance(last, Unreadable):
            return Unscored(text)
        raise RewardError(text) from last

    async def _send(self, body: dict[str, Any]) -> Answer:
        """What the server answers to the body without what it refuses: of that it is known for the next ones, too."""
        while True:
            names = {name: IN_PLACE[name] if name in self.refused else name for name in body}
            sent = {name: body[old] for old, name in names.items() if name is not None}
            answer = await self.servers.send("/chat/completions", partial(_as_json, sent))
            said = UNSUPPORTED.search(answer.body.decode(errors="replace")) if answer.status in NO_SCHEMA else None
            if said is not None and said[1] in IN_PLACE and said[1] in sent:
                if said[1] == "temperature" and said[1] not in self.refused:
                    log.warning("vlm: %s takes no temperature: it scores an image anew each time", self.model)
                self.refused.add(said[1])
            elif answer.status in NO_SCHEMA and body.pop("response_format", None):
                self.schemas = False
            else:
                return answer

    def _body(self, question: Question, urls: Sequence[str], first: bool) -> dict[str, Any]:
        images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content = [*images, {"type": "text", "text": question.text}]
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], "temperature": 0.0}
        if first:
            most = 1 if question.lines == 1 else A_LINE * question.lines
            return body | {"max_tokens": most, "logprobs": True, "top_logprobs": TOP}
        return body | {"max_tokens": self.max_tokens}


def _as_json(body: dict[str, Any]) -> tuple[bytes, str]:
    return json.dumps(body).encode(), "application/json"


def _content(answer: Answer) -> Any:
    """The JSON of an answer. ValueError where another try may help, `RewardError` where none does."""
    if answer.status == 200:
        try:
            value = json.loads(answer.body)
        except (RecursionError, ValueError) as error:  # of a stream, of a page to log in
            raise ValueError(f"{error}: {answer.body[:80].decode(errors='replace')!r}") from error
        if isinstance(value, dict) and value.get("error") and not value.get("choices"):  # of a gateway
            raise ValueError(answer.problem)
        return value
    if answer.status in PASSING:
        raise ValueError(answer.problem)
    raise RewardError(f"vlm: the server {answer.url} answered {answer.problem}")


def _reply(answer: Any, first: bool, lines: int = 1) -> Reply:
    """What a chat completion says; `Unreadable` if it is none, or lacks the probabilities."""
    try:
        choice = answer["choices"][0]
        text = _text(choice["message"].get("content"))
        if not first and choice.get("finish_reason") == "length":  # the last number may be a part of one
            text = re.sub(r"[\d.,/]+$", "", text)
        if (no := choice["message"].get("refusal")) or choice.get("finish_reason") == "content_filter":
            raise Unreadable(f"the judge refuses: {str(no or text)[:200]!r}")
        if not first:
            return Reply(text)
        content = choice["logprobs"]["content"]
        starts = line_starts([str(entry["token"]) for entry in content]) if lines > 1 else [0]
        firsts = [[(e["token"], exp(float(e["logprob"]))) for e in content[i]["top_logprobs"]] for i in starts]
    except Unreadable:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        what = "no probabilities of the first token (logprobs)" if first else "no chat completion"
        raise Unreadable(f"{what} in {str(answer)[:200]}") from error
    if len(firsts) < lines:
        raise Unreadable(f"{len(firsts)} lines of answers to {lines} questions: {text[:200]!r}")
    return Reply(text, firsts[0], firsts if lines > 1 else ())


def _text(content: Any) -> str:
    """Of a text, or of a list of parts with texts."""
    parts = content if isinstance(content, list) else [content or ""]
    texts = [part.get("text", "") if isinstance(part, dict) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("the content is no text")
    return "".join(texts)


def data_url(image: Tensor) -> str:
    """(3, H, W) in [0, 1] as a PNG in a data URL."""
    file = io.BytesIO()
    to_pictures(image[None])[0].save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


class LocalModel:
    """A vision-language model of transformers (hub id or folder), answering greedily in batches.

    Its answers are the same every time, so an unreadable one is no score at once.
    """

    def __init__(self, settings: Judge) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.name, dtype = str(settings.model), dtype_of(settings.precision, "vlm")
        self.device, self.batch_size = pick_device(settings.device), settings.batch_size
        self.max_tokens, self._tokens = settings.max_tokens, dict[str, int]()
        with cannot_load("vlm", self.name):
            self.network = frozen(AutoModelForImageTextToText, self.name, dtype, self.device)
            self.processor = from_pretrained(AutoProcessor, self.name)
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
    def ask(self, questions: Sequence[Question], parse: Callable[[Reply], T], first: bool) -> list[T | None]:
        """The parsed answers, in order; see `Server.ask`."""
        spelled = {plain(word) for word in self.candidates.values()} == set(ANSWERS)
        if first and not spelled and not all(question.words for question in questions):
            raise RewardError(f'vlm: yes and no are not single tokens of "{self.name}"; use another mode')
        answers: list[T | Unscored] = []
        for start in range(0, len(questions), self.batch_size):
            part = questions[start : start + self.batch_size]
            inputs = self._inputs(part)
            replies = self._first(inputs, part) if first else self._text(inputs)
            for question, reply in zip(part, replies, strict=True):
                try:
                    answers.append(parse(reply))
                except Unreadable as error:
                    text = f'vlm: no usable answer of "{self.name}" on the prompt "{question.prompt}": {error}'
                    answers.append(Unscored(text))
        return readable(answers)

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
