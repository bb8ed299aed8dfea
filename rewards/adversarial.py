"""A discriminator as the reward, which learns while the policy does (Adv-GRPO, arXiv:2511.20256).

Shapes: B images, H x W pixels, N patches of which n are drawn, W the width of the encoder's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffrl.errors import UserError
from diffrl.reward_kinds.learning import Learner, Reduce
from diffrl.seeds import generator
from diffrl_zoo.cards import card_of
from diffrl_zoo.references import LearnsFromReferences, References, stacks
from diffrl_zoo.vision import Looker


def score(logits: Tensor, share: float) -> Tensor:
    """(B,): `R(x) = l h(f) + (1 - l) mean_j h(f_j)` by the head's logits (B, 1 + n), the class token first."""
    return share * logits[:, 0] + (1.0 - share) * logits[:, 1:].mean(dim=1)


def hinge(real: Tensor, generated: Tensor, weight: float) -> Tensor:
    """(B,): the discriminator's loss of pairs by their logits (B, 1 + n), the class token's first.

    `L = (relu(1 - h(f)) + relu(1 + h(f'))) / 2 + w [the same, mean over patches]`; 1 + w where h is 0 everywhere.
    """
    both = (F.relu(1.0 - real) + F.relu(1.0 + generated)) / 2
    return both[:, 0] + weight * both[:, 1:].mean(dim=1)


def _logits(head: nn.Module, tokens: Tensor) -> Tensor:
    """(B, 1 + n) of tokens (B, 1 + n, W)."""
    return head(tokens).squeeze(-1)  # type: ignore[no-any-return]


@dataclass(eq=False, repr=False, kw_only=True)
class Adversarial(Looker, LearnsFromReferences):
    """How much an image looks like the reference pictures, by a head that is trained to tell them apart.

    The encoder is frozen; one head, a layer of `hidden` and GELU, reads its class token and its patches' tokens, all of
    mean square 1. After every epoch the head takes `steps` Adam steps of `learning_rate` on the hinge loss between the
    epoch's images and as many references, with `patches` random patches of each. Before training it learns once from an
    epoch's images of the untrained model; that head is kept, and `NAME_first` judges held-out images by it.

    `references`: "playground" (the renderer's true pictures), "metadata" (paths under `reference`), or a folder for all
    prompts. `share`: the class token's part of the score; `patch_weight`: the patches' part of the loss. The encoder:
    see `Looker`.
    """

    name = "adversarial"
    card = card_of(name)

    references: str = "playground"
    share: float = 0.7
    patches: int = 64
    patch_weight: float = 0.3
    hidden: int = 512
    learning_rate: float = 1e-4
    steps: int = 9
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("patches", "hidden", "steps"):
            if getattr(self, key) < 1:
                raise UserError(f'reward "{self.name}": {key} is {getattr(self, key)}, not at least 1')
        if not 0.0 <= self.share <= 1.0:
            raise UserError(f'reward "{self.name}": share is {self.share:g}, not from 0 to 1')
        self.pool = References(self.references, self.name)
        self.look()
        width = self._tokens(torch.zeros(1, 3, 64, 64)).shape[-1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            layers = (nn.Linear(width, self.hidden), nn.GELU(), nn.Linear(self.hidden, 1))
            head = nn.Sequential(*layers).to(self.device)
        self.learner = Learner(head, self.learning_rate, betas=(0.5, 0.999))
        self._observed: list[tuple[Tensor, Tensor]] = []  # of the epoch: references' and generated images' tokens

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1] by the head as it is now."""
        self._last = self._tokens(images)
        with torch.no_grad():
            return score(_logits(self.learner.module, self._last), self.share)

    def score_first(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1] by the head that had learned once."""
        return score(_logits(self.learner.first, self._tokens(images)), self.share)

    @torch.no_grad()
    def observe(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]], keys: Sequence[int]
    ) -> None:
        """Keep the tokens of training images (B, 3, H, W), and of a reference for each."""
        pictures = self.pool.draw(prompts, metadata, keys)
        real = torch.cat([self._tokens(part) for part in stacks(pictures)])
        pair = zip((real, self._last), ("reference", "generated"), strict=True)
        self._observed.append(tuple(self._drawn(tokens, keys, kind) for tokens, kind in pair))  # type: ignore[arg-type]

    def learn(self, reduce: Reduce) -> dict[str, float]:
        """Train the head on what was observed; its loss, its accuracy on class tokens (0.5: it cannot tell) and the
        gap of the scores between references and images, all before the first step."""
        width = self.learner.parameters[0].shape[1]
        none = torch.zeros(0, 2, width, device=self.device)
        parts = zip(*self._observed, strict=True) if self._observed else ([none], [none])
        real, generated = (torch.cat(list(tokens)) for tokens in parts)
        self._observed.clear()
        head = self.learner.module
        figures: dict[str, float] = {}
        for step in range(self.steps):
            logits = _logits(head, real), _logits(head, generated)
            total, count = hinge(logits[0], logits[1], self.patch_weight).sum(), len(real)
            loss = self.learner.step([total] if count else [], count, reduce)
            if step == 0:
                right = (logits[0][:, 0] > 0).sum() + (logits[1][:, 0] < 0).sum()
                gap = (score(logits[0], self.share) - score(logits[1], self.share)).sum()
                sums = reduce(torch.stack([right / 2, gap, loss.new_tensor(count)]).detach())
                accuracy, between = (sums[:2] / sums[2].clamp(min=1)).tolist()
                figures = {"loss": float(loss), "accuracy": accuracy, "gap": between}
        self.learner.remember()
        return figures

    @torch.no_grad()
    def _tokens(self, images: Tensor) -> Tensor:
        """Tokens (B, 1 + N, W) of images (B, 3, H, W), each of mean square 1."""
        tokens = self.encoder.tokens(images.to(self.device))
        return F.normalize(tokens, dim=-1) * tokens.shape[-1] ** 0.5

    def _drawn(self, tokens: Tensor, keys: Sequence[int], kind: str) -> Tensor:
        """The class token and `patches` of the patches' (B, 1 + n, W), drawn by the images' keys."""
        count = tokens.shape[1] - 1
        if count <= self.patches:
            return tokens
        draws = [torch.randperm(count, generator=generator(self.seed, key, kind))[: self.patches] for key in keys]
        chosen = torch.stack([torch.cat([torch.zeros(1, dtype=torch.long), 1 + draw]) for draw in draws])
        return tokens.gather(1, chosen.to(tokens.device)[..., None].expand(-1, -1, tokens.shape[2]))


@dataclass(eq=False, repr=False, kw_only=True)
class Similarity(Looker):
    """Cosine between an image's embedding and the nearest reference picture's, in [-1, 1]; nothing is trained.

    Adv-GRPO's form for rewards by rule (OCR, GenEval): add it to one, with the weights l and 1 - l. All parameters as
    in `Adversarial`; of the playground's pictures it takes eight.
    """

    name = "similarity"
    differentiable = True
    card = card_of(name)

    references: str = "playground"

    def __post_init__(self) -> None:
        self.pool = References(self.references, self.name)
        self.look()
        self._embedded: dict[tuple[str, ...], Tensor] = {}

    def applies(self, prompt: str, metadata: Mapping[str, Any]) -> bool:
        """Whether there is a reference for the prompt."""
        return self.pool.applies(prompt, metadata)

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Scores (B,) of images (B, 3, H, W) in [0, 1]."""
        embedded = self.encoder.embed_image(images.to(self.device))
        targets = [self._targets(*row) for row in zip(prompts, metadata, strict=True)]
        return torch.stack([(target @ one).max() for target, one in zip(targets, embedded, strict=True)])

    @torch.no_grad()
    def _targets(self, prompt: str, metadata: Mapping[str, Any]) -> Tensor:
        """The unit embeddings (R, D) of a prompt's references; each set of them is embedded once."""
        name = self.pool.identity(prompt, metadata)
        if name not in self._embedded:
            pictures = self.pool.all(prompt, metadata)
            self._embedded[name] = torch.cat([self.encoder.embed_image(p[None].to(self.device)) for p in pictures])
        return self._embedded[name]
