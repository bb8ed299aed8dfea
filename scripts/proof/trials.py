"""Ways to be faster that are no option yet, tried on the network itself: each beside the plain way, in one call.

`trial/decode/MODEL`: the autoencoder in several arithmetics and layouts, and how far its images move.
`trial/arithmetic/MODEL`: the network without autocast, which keeps norms and modulations in bf16, as a plain pipeline
in bf16 does; and how far its prediction is from float32's, beside autocast's.
`trial/memory/MODEL`: the peak of each phase by the caching allocator, for what doctor counts of that phase.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from measuring import TEXT, Tell, built, clean
from networks import POOL
from torch import Tensor
from workshop import Workshop, seconds

from diffrl.errors import UserError
from diffrl.memory.fit import GIB
from diffrl.run.train import Run

# SD3.5's without TF32, which two trials have as a way of their own, or compare with true float32.
RECIPE = {"sd35": "recipe/sd35/nft_ocr+no-tf32", "flux": "recipe/flux/nft_pickscore"}
RECIPE |= {"qwen": "recipe/qwen_image/grpo_ocr"}


@contextmanager
def opened(shop: Workshop, model: str) -> Iterator[Run]:
    """The run of the model's recipe."""
    clean()
    config, _ = shop.config(RECIPE[model])
    run = built(config)
    try:
        yield run
    finally:
        run.close()
        del run
        POOL.drop()  # whose weights a trial may have cast
        clean()


def inputs(run: Run, rows: int) -> tuple[Tensor, Tensor, Any]:
    """Noisy rows, their levels and texts."""
    device, policy = run.policy.device, run.policy
    generator = torch.Generator(device).manual_seed(7)
    x = torch.randn(rows, *policy.latent_shape, device=device, generator=generator)
    t = torch.linspace(0.9, 0.2, rows, device=device)
    return x, t, policy.encode([TEXT] * rows)


def decode(shop: Workshop, limit: float, tell: Tell, model: str) -> dict[str, Any]:
    """Milliseconds an image, and the largest and the mean distance of a pixel (of 1) from the plain way's."""
    found: dict[str, Any] = {}
    with opened(shop, model) as run, torch.no_grad():
        policy, rows = run.policy, run.config.rollout.batch_size
        latents = inputs(run, rows)[0]
        plain = policy.decode(latents)
        dtype = next(policy.vae.parameters()).dtype

        def trial(name: str, work: Callable[[], Tensor]) -> None:
            away = (work() - plain).abs()
            taken = seconds(work, shop.device, repeats=2) / rows
            found[name] = {"ms": round(1000 * taken, 2), "largest": float(away.max()), "mean": float(away.mean())}
            tell(found)

        trial("plain", lambda: policy.decode(latents))
        for chunk in (1, 4):
            trial(f"chunks of {chunk}", lambda chunk=chunk: policy.decode(latents, chunk))  # type: ignore[misc]
        with torch.backends.cudnn.flags(allow_tf32=True):
            trial("tf32", lambda: policy.decode(latents))
        policy.vae.to(memory_format=torch.channels_last)
        trial("channels last", lambda: policy.decode(latents))
        with torch.backends.cudnn.flags(allow_tf32=True):
            trial("tf32, channels last", lambda: policy.decode(latents))
        policy.vae.to(torch.bfloat16)
        trial("bf16, channels last", lambda: policy.decode(latents))
        policy.vae.to(memory_format=torch.contiguous_format)
        trial("bf16", lambda: policy.decode(latents))
    return found | {"dtype": str(dtype), "rows": rows}


def arithmetic(shop: Workshop, limit: float, tell: Tell, model: str) -> dict[str, Any]:
    """Milliseconds of a forward and of a forward with its backward, and the distance from float32's (by norm)."""
    found: dict[str, Any] = {}
    with opened(shop, model) as run:
        policy, rows = run.policy, run.config.optimise.micro_batch
        assert isinstance(rows, int), "auto is a number in a run's config"
        if policy.precision == torch.float32 and not shop.tiny:
            raise UserError("the recipe is in float32")
        with torch.no_grad():
            for _, parameter in policy.trainable:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
        given = inputs(run, rows)
        made: dict[str, tuple[Tensor, Tensor]] = {}
        for name, around in (("autocast", autocast), ("plain bf16", narrow)):
            with around(policy):
                made[name] = _both(policy, given)
                forward = seconds(lambda: _forward(policy, given), shop.device, repeats=4)
                train = seconds(lambda: _both(policy, given), shop.device, repeats=3)
            found[name] = {"forward_ms": round(1000 * forward, 2), "train_ms": round(1000 * train, 2)}
            found[name] |= {"finite": all(bool(part.isfinite().all()) for part in made[name])}
            tell(found)
        if model == "sd35":  # the larger ones in float32 leave no room for the activations
            policy.backbone.network.float()
            policy._autocast_to = None
            texts = replace(given[2], embeds=given[2].embeds.float(), pooled=given[2].pooled.float())
            exact = _both(policy, (*given[:2], texts))
            for name, pair in made.items():
                away = [float((ours - true).norm() / true.norm()) for ours, true in zip(pair, exact, strict=True)]
                found[name] |= {"prediction_off": away[0], "gradient_off": away[1]}
    return found | {"rows": rows}


@contextmanager
def autocast(policy: Any) -> Iterator[None]:
    yield


@contextmanager
def narrow(policy: Any) -> Iterator[None]:
    """Without autocast: what goes into the network is in its type, and stays so."""
    dtype, forward = policy._autocast_to, policy.backbone.forward

    def narrowed(network: Any, x: Tensor, t: Tensor, cond: Any, guidance: float) -> Tensor:
        return forward(network, x.to(dtype), t, cond, guidance)  # type: ignore[no-any-return]

    policy._autocast_to, policy.backbone.forward = None, narrowed
    try:
        yield
    finally:
        policy._autocast_to = dtype
        del policy.backbone.forward


def _forward(policy: Any, given: tuple[Tensor, Tensor, Any]) -> Tensor:
    with torch.no_grad():
        return policy.predict(*given).v  # type: ignore[no-any-return]


def _both(policy: Any, given: tuple[Tensor, Tensor, Any]) -> tuple[Tensor, Tensor]:
    """The prediction, and the LoRA's gradient of its mean square, as one vector."""
    v = policy.predict(*given).v
    v.square().mean().backward()
    gradient = torch.cat([p.grad.flatten() for _, p in policy.trainable if p.grad is not None])
    for _, parameter in policy.trainable:
        parameter.grad = None
    return v.detach(), gradient


def memory(shop: Workshop, limit: float, tell: Tell, model: str) -> dict[str, Any]:
    """GiB: what lies there all the time, and the peak of each phase on top of it."""
    if shop.device.type != "cuda":
        raise UserError("needs CUDA")
    found: dict[str, Any] = {}
    with opened(shop, model) as run:
        policy, config = run.policy, run.config
        _, fit = shop.config(RECIPE[model])
        if fit is not None:
            found["counted"] = {key: round(size / GIB, 3) for key, size in {**fit.parts, **fit.peaks}.items()}
        rows = config.optimise.micro_batch
        assert isinstance(rows, int), "auto is a number in a run's config"
        found["lies_there"] = round(torch.cuda.memory_allocated() / GIB, 3)

        def sample() -> None:
            with torch.no_grad(), policy.adapter(run.objective.samples_from):
                policy.predict(*inputs(run, config.rollout.batch_size), guidance=config.rollout.guidance_scale)

        def decoding() -> None:
            with torch.no_grad():
                policy.decode(inputs(run, config.rollout.batch_size)[0])

        def train() -> None:
            policy.predict(*inputs(run, rows), guidance=run.objective.guidance_scale).v.square().mean().backward()
            for _, parameter in policy.trainable:
                parameter.grad = None

        for name, work in (("sampling", sample), ("decoding", decoding), ("training", train)):
            work()
            clean()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            work()
            peak, held = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            found[name] = {"peak": round((peak - before) / GIB, 3), "reserved": round((held - before) / GIB, 3)}
            tell(found)
    return found
