"""D2-Align's stage 1: learn the direction b_v while the generator is frozen (arXiv 2512.24146; methods section 6).

symbol        name here     meaning
b_v           vector        (D,) the direction; the only thing that is learned
e_img         e_img         (N, D) embeddings of N images of the pretrained generator
e_text        e_text        (P, D) embeddings of their P prompts; image i belongs to prompt owner[i]
R_guided      guided        score(e_img, e~), whose mean over images is maximised

The generator does not change, so its images are drawn and embedded once (`stage1.py`), and the steps draw from them:
that is the same in distribution as new images in every step as long as the pool is large, and takes seconds.
What is embedded is the image itself, or what Algorithm 1 embeds: the image noised and `reconstructed` in one step.
Stage 2 is `diffrl.methods.direct.objective` with the corrected reward, or any other objective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from diffrl.methods.d2align.corrected import guided_embedding
from diffrl.policy import Conditioning, Policy
from diffrl.records import checkpoint, saving
from diffrl.rewards.protocol import Embedder
from diffrl.samplers import one_step
from diffrl.seeds import generator, noise

SAVE_EVERY = 500  # steps


@torch.no_grad()
def reconstructed(
    policy: Policy,
    x0: Tensor,
    cond: Conditioning,
    names: Sequence[tuple[int | str, ...]],
    schedule: Tensor,
    guidance: float = 1.0,
) -> Tensor:
    """x0^ (B, C, h, w) of latents x0 as stage 2 sees them, but by the pretrained model (Algorithm 1 of the paper).

    x_t is x0 with known noise at a level t drawn uniformly from the sampling schedule, and `one_step` predicts it back.

    Args:
        names: what each image's level and noise are keyed by.
        schedule: (S + 1,) noise levels, noisiest first, the last is 0.
    """
    levels = noise((len(schedule) - 1,), [(*name, "level") for name in names]).argmax(1)  # uniform: all are alike
    t, t_next = schedule[levels].to(x0.device), schedule[levels + 1].to(x0.device)
    eps = noise(tuple(x0.shape[1:]), [(*name, "eps") for name in names]).to(x0.device)
    x_t = policy.process.add_noise(x0, eps, t)
    with policy.adapter(None):
        prediction = policy.predict(x_t, t, cond, guidance)
    return one_step(x_t, prediction, t, t_next, eps, policy.process)


def learn(
    reward: Embedder,
    e_img: Tensor,
    e_text: Tensor,
    owner: Tensor,
    *,
    omega: float,
    steps: int,
    learning_rate: float,
    seed: int,
    batch_size: int = 64,
    initial: Tensor | None = None,
    resume: tuple[dict[str, Tensor], dict[str, Any]] | None = None,
    keep: Callable[[int, dict[str, Tensor], dict[str, Any]], None] = lambda step, tensors, state: None,
) -> tuple[Tensor, list[list[float]]]:
    """b_v (D,) by Adam on `-R_guided` from `initial`, and its course: [step, mean guided reward of the pool, norm].

    The paper says 3,000 steps and no step size, which decides: Adam's steps have one length, so b_v becomes about
    `steps * learning_rate * sqrt(D)` long before it converges, to nearly the images' mean embedding, with which the
    prompt hardly counts. The default, 5e-6, is the paper's for the generator: a length of 0.5 for D = 1024.

    Args:
        initial: (D,), or None for 0.
        e_img, e_text, owner: (N, D), (P, D) and (N,) int64, see the module; constants.
        resume, keep: `keep(step, tensors, state)` gets every 500 steps what `resume` continues from, to the bit.
    """
    vector = (torch.zeros_like(e_text[0]) if initial is None else initial.clone()).requires_grad_()
    optimiser = torch.optim.Adam([vector], lr=learning_rate)
    course: list[list[float]] = []
    start = 0
    if resume is not None:
        tensors, state = resume
        start, course = int(state["step"]), state["course"]
        moments = {key: value for key, value in tensors.items() if key != "vector"}
        checkpoint.optimiser_from_tensors(optimiser, moments, state["optimiser"])
        with torch.no_grad():
            vector.copy_(tensors["vector"])
    every = max(steps // 60, 1)

    def guided(rows: Tensor | slice) -> Tensor:
        return reward.score(e_img[rows], guided_embedding(e_text[owner[rows]], vector, omega)).mean()

    for step in range(start, steps + 1):
        if step % every == 0 or step == steps:
            with torch.no_grad():
                course.append([step, float(guided(slice(None))), float(vector.norm())])
        if step == steps:
            break
        draw = torch.randint(len(e_img), (batch_size,), generator=generator(seed, "d2align", step))
        optimiser.zero_grad()
        (-guided(draw.to(e_img.device))).backward()
        optimiser.step()
        if (step + 1) % SAVE_EVERY == 0:
            saved, numbers = saving.optimiser_to_tensors(optimiser)
            keep(step + 1, {**saved, "vector": vector}, {"step": step + 1, "course": course, "optimiser": numbers})
    return vector.detach(), course


def word_direction(reward: Embedder, texts: Sequence[str], word: str) -> Tensor:
    """b_v (D,) picked by hand: the mean of `e_text("<prompt>, <word>") - e_text("<prompt>")` over the prompts."""
    with torch.no_grad():
        pairs = (reward.embed_text([f"{text}, {word}" for text in texts]), reward.embed_text(list(texts)))
    return (pairs[0].float() - pairs[1].float()).mean(0)
