"""Direct alignment: back-propagation of a differentiable reward into the generator (D2-Align's stage 2, 2512.24146).

symbol        name here     meaning
x0, eps_gt    x0, eps       latent of a generated image, and the known noise that it is noised with
t, t'         t, t_next     a level of the sampling schedule, drawn uniformly, and the next lower one
x_{t-1}       x_next        the noised latent after one ODE step from t to t'
x0^           one_step      (x_{t-1} - sigma_t' eps_gt) / alpha_t'
R             phi           reward of the decoded x0^, in which the gradient flows

In their places: `path` (R0), the sampler's own path (`pathwise.py`); `align` and `pair`, other levels, another noise
and another reward (`srpo.py`). Beside it: `confidence` (`confidence.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diffrl.config.base import Section
from diffrl.config.sections import Rollout as Drawn
from diffrl.methods.direct import BRANCHES, Align, DirectSection
from diffrl.methods.direct.confidence import neighbours, trusted_loss, uncertainty
from diffrl.methods.direct.pathwise import path_images, path_rows
from diffrl.methods.direct.rows import DirectRows
from diffrl.methods.direct.srpo import Contrast, column, drawn_words, factors, step_levels
from diffrl.objectives.noising import Noising, noised_rows
from diffrl.objectives.objective import BuildContext, Cost, Objective, OptimiserStep
from diffrl.objectives.rows import Names, Rows, row_sigmas
from diffrl.policy import Policy
from diffrl.prompts import Prompt
from diffrl.rewards.protocol import Reward
from diffrl.rollout import Rollout
from diffrl.samplers import one_step


class Direct(Objective):
    """The objective on the loop's seams; phi is the reward itself, and the loss is -phi, or relu(cap - phi).

    phi has one column, the weighted sum of the rewards, or one for each weighted reward if they are balanced (MARBLE).
    Advantages are not used: the gradient comes from the reward, not from a comparison within the group. The penalty is
    NFT's; the paper has none.
    """

    def __init__(
        self,
        rewards: Mapping[str, Reward] | None = None,
        weights: Sequence[float] = (),
        keys: DirectSection | None = None,
        **values: Any,
    ) -> None:
        keys = DirectSection.of(keys, values)
        super().__init__(beta=keys.beta, noising=Noising(keys.timesteps * (BRANCHES if keys.align else 1)))
        self.align, self.path, self.pair = keys.align, keys.path, keys.pair
        self.cap = keys.cap
        self.keep_trajectory = "path" if keys.path == "random" else False
        self.confidence = keys.confidence
        self.rewards, self.weights = dict(rewards or {}), list(weights)
        self.guidance_scale = keys.guidance_scale
        self.decode_chunk = keys.decode_chunk

    @classmethod
    def of(cls, section: Section, given: BuildContext) -> Direct:
        weights = [given.config.rewards[name].weight for name in given.rewards]
        return cls(given.rewards, weights, section)  # type: ignore[arg-type]

    def cost(self, rollout: Drawn, split: bool, steps: int) -> Cost:
        # Each step is computed again, and all but one are trained beside the row's own.
        return Cost(forwards=4 * rollout.steps - 3 if self.path == "all" else 3 * (self.confidence is not None))

    def rows(self, rollout: Rollout, advantages: Tensor, pairs: Tensor, key: tuple[int | str, ...]) -> DirectRows:
        if self.align is not None:
            rows = self._aligned(self.align, rollout, advantages, pairs, key)
        elif self.path is not None:
            rows = path_rows(self.path, rollout, advantages, pairs, key, self.on_policy)
        else:
            rows = DirectRows(**vars(super().rows(rollout, advantages, pairs, key)))
            schedule = rollout.schedule.to(rows.t.device, non_blocking=True)
            rows.t_next = schedule[(rows.t[:, None] == schedule[:-1]).int().argmax(1) + 1]
            rows.rollout = rollout if self.confidence else None
        rows.guidance, rows.prompts = self.guidance_scale, rollout.prompts
        return rows

    def _aligned(
        self, align: Align, rollout: Rollout, advantages: Tensor, pairs: Tensor, key: tuple[int | str, ...]
    ) -> DirectRows:
        """Direct-Align's rows; the branches of a level stand side by side and share noise, target and words."""
        sample, level, inversion = pairs[:, 0], pairs[:, 1] // BRANCHES, pairs[:, 1] % BRANCHES == 1
        images: Names = [(*key, *rollout.identity(int(i))) for i in sample]
        names: Names = [(*name, "eps", int(j)) for name, j in zip(images, level, strict=True)]
        u = row_sigmas(rollout, images, level, self.noising.count(rollout), "uniform")
        t, t_next, place = step_levels(align, u, inversion)
        eps = rollout.initial_noise(sample)
        rows = DirectRows(**vars(noised_rows(rollout, advantages, pairs, t, images, self.on_policy, eps)))
        rows.t_next = t_next.to(rows.t.device, non_blocking=True)
        if self.pair is not None:
            rows.words, rows.factors = drawn_words(self.pair, names), factors(place, inversion)
        return rows

    def before_step(self, policy: Policy, step: OptimiserStep) -> None:
        vae = policy.vae  # some cannot recompute within: then `decode_chunk` alone bounds what is kept
        if self.decode_chunk and vae._supports_gradient_checkpointing and not vae.is_gradient_checkpointing:
            vae.enable_gradient_checkpointing()

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        assert isinstance(rows, DirectRows), "rows() makes them"
        x0 = self._images(policy, rows)
        prompts, contrast = [rows.prompts[i] for i in rows.groups.tolist()], None
        if self.pair is not None:
            assert rows.words is not None and rows.factors is not None, "a pair's rows carry words and factors"
            contrast = Contrast.of(self.pair, [prompt.text for prompt in prompts], rows.words, rows.factors)
        weighted = self._weighted(self.scores(policy, x0, prompts, contrast))
        total = weighted.sum(1, keepdim=True)
        self.means.add("direct/reward", total)
        if contrast is not None:  # what one branch wants, the other does not: their mean says little
            inverted = rows.t_next > rows.t  # type: ignore[operator]
            self.means.add("direct/denoised", total[:, 0], ~inverted)
            self.means.add("direct/inverted", total[:, 0], inverted)
        phi = weighted if self.rule.each else total
        if self.confidence is None:
            return phi
        second = self._step(policy, neighbours(rows, policy.process, self.confidence.step))
        other = self._weighted(self.scores(policy, second, prompts))
        u = uncertainty(phi, other if self.rule.each else other.sum(1, keepdim=True), self.confidence.scale)
        self.means.add("direct/uncertainty", u)
        return torch.cat([phi, u], dim=1)

    def _weighted(self, scores: Tensor) -> Tensor:
        """(b, K), each reward's times its weight."""
        columns = zip(self.weights, scores.unbind(1), strict=True)
        return torch.stack([weight * column for weight, column in columns], dim=1)

    def _images(self, policy: Policy, rows: DirectRows) -> Tensor:
        """(b, C, h, w), the clean latents that are judged; with gradient."""
        if self.path is not None:
            return path_images(self.path, policy, rows)
        return self._step(policy, rows)

    def _step(self, policy: Policy, rows: DirectRows) -> Tensor:
        rows.prediction = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance)
        assert rows.t_next is not None and rows.eps is not None, "direct rows carry the next level and their noise"
        return one_step(rows.x_t, rows.prediction, rows.t, rows.t_next, rows.eps, policy.process)

    def scores(
        self, policy: Policy, latents: Tensor, prompts: Sequence[Prompt], contrast: Contrast | None = None
    ) -> Tensor:
        """(b, K) rewards of the decoded latents (b, C, h, w), 0 where a reward does not apply; with gradient."""

        def judge(part: Tensor, texts: Sequence[Prompt], other: Contrast | None) -> Tensor:
            images = policy.decode(part, chunk=len(part) if self.decode_chunk else None, grad=True)
            return torch.stack([column(reward, images, texts, other) for reward in self.rewards.values()], dim=1)

        size = self.decode_chunk or len(latents)
        if size >= len(latents):
            return judge(latents, prompts, contrast)
        parts = []
        for start in range(0, len(latents), size):
            here = range(start, min(start + size, len(latents)))
            other = contrast.take(here) if contrast is not None else None
            given = latents[start : start + size], prompts[start : start + size], other
            # Chunks alone save nothing: their activations would all wait for the backward pass.
            parts.append(checkpoint(judge, *given, use_reentrant=False, preserve_rng_state=False))
        return torch.cat(parts)

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        if self.cap is None:
            return -phi.sum(0)
        if self.confidence is not None:
            return trusted_loss(phi, self.cap, self.confidence.price).sum(0)
        self.means.add("direct/silenced", (phi.detach() >= self.cap).float())
        return (self.cap - phi).relu().sum(0)
