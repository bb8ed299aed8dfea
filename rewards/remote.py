"""A reward that runs behind `diffrl rewards serve`, on this machine or others, with the same scores as in process."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from diffrl.errors import UserError
from diffrl.reward_kinds.fingerprint import essential
from diffrl.rewards.protocol import ABILITIES, RewardError
from diffrl.serving import wire
from diffrl.serving.client import PATIENCE, RemoteError, Servers, find_token
from diffrl_zoo.cards import card_of
from diffrl_zoo.inputs import check_choice

FORMS = ("tensors", "png")
log = logging.getLogger("diffrl")


class Remote:
    """The reward `reward` of one or several `servers` (URLs; a name may stand for several), which must serve the same.

    `remote:clip` is short for the plugin `remote` with `reward: clip`. Every other parameter is the reward's own: the
    server was started with it, and one that differs is an error. Large batches are split, and each part goes to the
    server that is asked least; a group goes to one server.

    `token_file`: of the servers' token (None: the environment variable DIFFRL_REWARD_TOKEN, if set).
    `request_timeout`: seconds that one attempt may last. `patience`: seconds of trying again, on all servers, from a
    request's first failure. `images`: most in one request (None: the reward's batch size). `form`: "tensors" is exact,
    "png" is smaller and rounds to 8 bits a channel.
    """

    name = "remote"
    remote = True
    groupwise = False  # this and the card: as the server says
    card = card_of(name)

    def __init__(
        self,
        reward: str,
        servers: str | Sequence[str],
        token_file: str | None = None,
        request_timeout: float = 300.0,
        patience: float = PATIENCE,
        images: int | None = None,
        form: str = "tensors",
        **arguments: Any,
    ) -> None:
        check_choice("form", form, FORMS, "remote")
        self.servers = Servers(servers, find_token(token_file), request_timeout, patience)
        self.form = form
        described = self._describe(reward)
        (first, about), *others = described.items()
        for url, one in described.items():
            _check_same(url, one, reward, arguments)
        for url, one in others:
            if one["identity"] != about["identity"]:
                raise UserError(f'servers {first} and {url} serve different rewards as "{reward}"')
        self._path = _path(reward)
        self.name = str(about["name"])
        self.identity = str(about["identity"])
        declared = _abilities(about)
        self._restricted, batch_size = bool(declared.pop("applies")), declared.pop("batch_size")
        vars(self).update({name: value for name, value in declared.items() if value is not None})
        self._limits = wire.Limits(
            *(min(one["limits"][key] for one in described.values()) for key in ("images", "bytes"))
        )
        self.servers.widen(min(int(one.get("at_once", 1)) for one in described.values()))
        self._size = images or batch_size or self._limits.images
        self._applies: dict[str, bool] = {}

    def applies(self, prompt: str, metadata: Mapping[str, Any]) -> bool:
        """What the server says; each distinct prompt is asked for once."""
        if not self._restricted:
            return True
        asked = json.dumps({"prompts": [prompt], "metadata": [dict(metadata)]})
        if asked not in self._applies:
            try:
                (applicable,) = self.servers.run([self._post("applies", lambda: (asked.encode(), wire.JSON))])
            except RemoteError as error:
                raise RewardError(f'reward "{self.name}", asked whether it applies to "{prompt}": {error}') from error
            if not (isinstance(applicable, list) and len(applicable) == 1 and isinstance(applicable[0], bool)):
                raise RewardError(
                    f'reward "{self.name}", asked whether it applies to "{prompt}", said {str(applicable)[:80]}'
                )
            self._applies[asked] = applicable[0]
        return self._applies[asked]

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,), float32 on the CPU, of images (B, 3, H, W) in [0, 1].

        Raises `RemoteError`, which names the server.
        """
        size = len(images) if self.groupwise else self._most(images)
        parts = [slice(start, start + size) for start in range(0, len(images), size)]
        return torch.cat(self.servers.run([self._score(images[p], prompts[p], metadata[p]) for p in parts]))

    def _most(self, images: Tensor) -> int:
        """Images of one request: within the server's limits, with a sixteenth of room for the prompts."""
        fit = self._limits.bytes * 15 // 16 // (4 * images[0].numel())
        return max(1, min(self._size, self._limits.images, fit))

    async def _score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        scores = await self._post("score", partial(wire.encode, images, prompts, metadata, self.form))
        if not isinstance(scores, list) or len(scores) != len(images) or not all(map(_is_score, scores)):
            raise RemoteError(
                f"servers {', '.join(self.servers.urls)}: not one score for each image: {str(scores)[:80]}"
            )
        return torch.tensor([torch.nan if one is None else one for one in scores], dtype=torch.float32)

    async def _post(self, what: str, make: Callable[[], tuple[bytes, str]]) -> Any:
        """What a server says to `what`: "score" or "applies". RewardError, which is not tried again, if the reward that
        answers is not the one that this one began with."""
        answer = await self.servers.send(f"{self._path}/{what}", make)
        reply = answer.json()
        if (now := answer.headers.get(wire.IDENTITY)) != self.identity:
            other = "does not say which reward answers" if now is None else "now serves another reward under this name"
            raise RewardError(
                f'reward "{self.name}": server {answer.url} {other} (identity {str(now)[:12]}, at the start '
                f"{self.identity[:12]}); serve the former one again and resume, or begin a new run"
            )
        return reply.get("scores" if what == "score" else what)

    def _describe(self, reward: str) -> dict[str, dict[str, Any]]:
        """{server: what it says of the reward}, of those that answer."""
        answers = self.servers.each(_path(reward))
        described = {url: about for url, about in answers.items() if not isinstance(about, RemoteError)}
        problems = [about for about in answers.values() if isinstance(about, RemoteError)]
        for problem in problems:
            if not described or not problem.absent:
                raise UserError(f"remote: {problem}") from problem
            log.warning("remote: %s; the others do its work", problem)
        for url, about in described.items():
            if about.get("protocol") != wire.PROTOCOL:
                theirs = f"protocol {about.get('protocol')}, diffrl {about.get('diffrl_version')}"
                raise UserError(f"remote: server {url} speaks {theirs}; this is protocol {wire.PROTOCOL}")
            try:
                _check_description(about)
            except (KeyError, TypeError, ValueError) as error:
                text = f"remote: server {url} does not describe its reward as it should ({error!r})"
                raise UserError(text) from error
        return described


def _path(reward: str) -> str:
    return f"/rewards/{quote(reward, safe='')}"


def _is_score(value: object) -> bool:
    """Nothing (no score), or a number that float32 has room for. To Python booleans are whole numbers, which have no
    largest."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 3e38
    return value is None or number


def _check_description(about: Mapping[str, Any]) -> None:
    """KeyError, TypeError or ValueError for a description that `Remote` cannot be built from."""
    kinds = {"name": str, "identity": str, "arguments": dict, "limits": dict}
    for key, kind in kinds.items():
        if not isinstance(about[key], kind):
            raise TypeError(f"{key}: {str(about[key])[:40]}")
    for count in (about["limits"]["images"], about["limits"]["bytes"], about.get("at_once", 1)):
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"limits: {str(count)[:40]}")
    _abilities(about)


def _abilities(about: Mapping[str, Any]) -> dict[str, Any]:
    """What a server says of its reward's abilities."""
    return {name: one.from_json(about[name]) for name, one in ABILITIES.items() if one.to_json is not None}


def _check_same(url: str, about: Mapping[str, Any], reward: str, arguments: Mapping[str, Any]) -> None:
    """UserError if the reward was started with other arguments than the config asks for."""
    served = about["arguments"]
    for key, value in essential(arguments).items():
        if key not in served or served[key] != json.loads(json.dumps(value)):
            theirs = json.dumps(served[key]) if key in served else "its default"
            raise UserError(f'remote: server {url} serves "{reward}" with {key}={theirs}, not {json.dumps(value)}')
