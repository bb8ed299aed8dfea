"""HiDream-I1: four text encoders, a mixture of experts, minus the velocity.

The conditioning is the T5's tokens, the Llama's layers (of which the network's blocks read some) and CLIP's pooled
embeddings; all of one length, without a mask. The plain pipeline shifts its schedule by the largest picture's tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU, MoEGate
from torch import Tensor, nn

from diffrl.errors import UserError
from diffrl.families.family import Family, Known
from diffrl.policy.conditioning import Conditioning
from diffrl.policy.pipelines import Resolution, schedule_shift


class HiDream(Family):
    """The family's part of a policy (see `diffrl.families.family`).

    In evaluation mode diffusers' experts run without a gradient. So they are kept in training mode, which computes the
    same, with one; their gates stay in evaluation mode.
    """

    targets = tuple(
        f"attn1.{name}" for name in ("to_q", "to_k", "to_v", "to_out", "to_q_t", "to_k_t", "to_v_t", "to_out_t")
    )
    text_length = 128
    known = (
        Known("HiDream-ai/HiDream-I1-Full", 50, 5.0),
        Known("HiDream-ai/HiDream-I1-Dev", 28, 1.0, "distilled, no guidance"),
        Known("HiDream-ai/HiDream-I1-Fast", 16, 1.0, "distilled, no guidance"),
    )
    restrictions = ("square pictures only", "the plain pipeline draws every size at its full area")

    def __init__(self, pipe: Any, resolution: Resolution = None, max_sequence_length: int | None = None) -> None:
        super().__init__(pipe, resolution, max_sequence_length)
        self.read = sorted(set(self.network.config.llama_layers))  # of the Llama's layers
        self._experts = [part for part in self.network.modules() if isinstance(part, MOEFeedForwardSwiGLU)]

    def set_size(self, resolution: Resolution) -> None:
        super().set_size(resolution)
        _, height, width = self.latent_shape
        if height != width:
            raise UserError("rollout.resolution: HiDream draws square pictures only here")

    @property
    def text_shape(self) -> tuple[int, int, int]:
        config = self.network.config
        return self.max_length, config.caption_channels[0], config.text_emb_dim

    def blank(self, rows: int, dtype: torch.dtype) -> Conditioning:
        cond = super().blank(rows, dtype)
        llama = torch.empty(rows, len(self.read), self.max_length, self.network.config.caption_channels[1], dtype=dtype)
        return Conditioning(cond.embeds, cond.pooled, None, (llama,))

    def encode(self, prompt: str | None, device: torch.device) -> Conditioning:
        t5, _, llama, _, pooled, _ = self.pipe.encode_prompt(
            [prompt], device=device, do_classifier_free_guidance=False, max_sequence_length=self.max_length
        )
        return Conditioning(t5, pooled, None, (llama[self.read].transpose(0, 1).contiguous(),))

    def forward(self, network: nn.Module, x_t: Tensor, t: Tensor, cond: Conditioning, guidance: float) -> Tensor:
        for part in self._experts:
            part.training = True
        output = network(
            hidden_states=x_t,
            timesteps=t * self.pipe.scheduler.config.num_train_timesteps,
            encoder_hidden_states_t5=cond.embeds,
            encoder_hidden_states_llama3=dict(zip(self.read, cond.extra[0].unbind(1), strict=True)),
            pooled_embeds=cond.pooled,
            return_dict=False,
        )[0]
        return -output

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Without values no token chooses its experts: each of them then gets as many."""
        gates = [part.gate for part in self._experts]
        for gate in gates:
            gate.forward = partial(_evenly, gate)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for gate in gates:
                del gate.forward

    def prepare_plain(self, pipe: Any) -> None:
        pipe.default_sample_size = self.latent_shape[-1]  # whatever is asked for, it draws at this area

    def mu(self, steps: int) -> float:
        network: Any = self.network
        return schedule_shift({}, network.max_seq, self.max_shift)

    def timesteps(self, steps: int) -> Tensor:
        scheduler = copy.deepcopy(self.pipe.scheduler)
        dynamic = {"mu": self.mu(steps)} if isinstance(scheduler, FlowMatchEulerDiscreteScheduler) else {}
        scheduler.set_timesteps(steps, device="cpu", **dynamic)
        return scheduler.sigmas.float()


def _evenly(gate: MoEGate, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    chosen, weight, loss = MoEGate.forward(gate, hidden)
    even = torch.arange(chosen.numel(), dtype=torch.int64) % gate.n_routed_experts
    return even.view(chosen.shape), weight, loss
