"""The checks of a family: it must say what the plain pipeline says, and train.

Every check is a function of a `Subject`; it returns what it saw, or raises `Failed` with what it expected. Symbols as
in `diffrl.policy.base`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffrl.config import Config
from diffrl.conformance.bases import over_bases
from diffrl.conformance.subject import (
    GUIDANCE,
    PROMPTS,
    SPEC,
    Failed,
    Subject,
    clear,
    gradients,
    loss,
    ratios,
    scramble,
)
from diffrl.forward import FlowMatching
from diffrl.memory import fit
from diffrl.memory.buffers import Alive
from diffrl.policy import Conditioning, Policy
from diffrl.policy.merged import KEPT
from diffrl.samplers import ode_step


class _Stop(Exception):
    """The plain pipeline has set its schedule; more is not needed."""


def draw(policy: Policy, prompts: Sequence[str], latents: Tensor, steps: int, guidance: float) -> Tensor:
    """Images by the deterministic solver that the plain pipeline has."""
    cond, x, levels, state = policy.encode(prompts), latents, policy.timesteps(steps).tolist(), None
    name = policy.backbone.solver
    with torch.no_grad():
        for i in range(steps):
            t, t_next = (x.new_full((len(x),), levels[j]) for j in (i, i + 1))
            prediction = policy.predict(x, t, cond, guidance)
            x, state = ode_step(name, x, prediction, t, t_next, state, policy.process)
        return policy.decode(x)


def same_picture(subject: Subject) -> str:
    """One step and four, without guidance and with it, and the saved LoRA in the plain pipeline."""
    policy, pipe, worst = subject.fp32, subject.plain, 0.0
    latents, prompts = subject.noise(2), PROMPTS[:2]

    def plain(steps: int, guidance: float) -> Tensor:
        rows = []
        for i, prompt in enumerate(prompts):  # one by one: a plain batch of unequal texts may differ from its rows
            call = policy.backbone.plain_arguments([prompt], latents[i : i + 1], guidance)
            rows.append(pipe(**call, num_inference_steps=steps).images)
        return torch.cat(rows)

    without = plain(4, 1.0)
    with tempfile.TemporaryDirectory() as folder:
        policy.save_lora(folder)
        pipe.load_lora_weights(folder)
    one = 1 if policy.backbone.timesteps(1).isfinite().all() else 2  # one step has no end to stretch a schedule to
    for steps, guidance in ((one, 1.0), (4, 1.0), (4, GUIDANCE)):
        theirs, ours = plain(steps, guidance), draw(policy, prompts, latents, steps, guidance)
        difference = float((theirs - ours).abs().max())
        if not difference < 1e-3:
            raise Failed(f"{steps} steps at guidance {guidance:g}: pictures differ by {difference:.2g}, at most 1e-3")
        worst = max(worst, difference)
        shows = float((theirs - without).abs().max())
        if steps == 4 and not shows > 1e-3:
            raise Failed(f"the LoRA changes the plain pipeline's picture by {shows:.2g} only: was it loaded?")
    pipe.unload_lora_weights()
    return f"largest difference {worst:.1g}"


def same_levels(subject: Subject) -> str:
    """The noise levels are those that the plain pipeline sets."""
    policy, pipe = subject.fp32, subject.plain

    def stop(*_: Any, **__: Any) -> None:
        raise _Stop

    pipe.progress_bar = stop  # the first thing that a pipeline does with its schedule
    for steps in subject.steps:
        call = policy.backbone.plain_arguments([PROMPTS[0]], subject.noise(1), 1.0)
        try:
            pipe(**call, num_inference_steps=steps)
        except _Stop:
            levels = policy.backbone.timesteps(steps)
            if isinstance(policy.process, FlowMatching):
                theirs, ours = pipe.scheduler.sigmas, levels
            else:
                process: Any = policy.process
                theirs, ours = pipe.scheduler.timesteps.float(), process.index(levels[:-1]).round()
            if theirs.isnan().any() and steps == 1:
                continue  # a schedule that is stretched to an end of its own has none of one step
            if theirs.shape != ours.shape or not torch.allclose(theirs.float(), ours, atol=1e-6):
                raise Failed(f"{steps} steps: {ours.tolist()}, the plain pipeline has {theirs.tolist()}") from None
            if levels[-1] != 0 or (levels.diff() >= 0).any():
                raise Failed(f"{steps} steps: {levels.tolist()} does not fall to 0") from None
    del pipe.progress_bar
    return f"equal at {', '.join(map(str, subject.steps))} steps"


def ratio_is_one(subject: Subject) -> str:
    """Training looks at a rollout's steps with the very numbers that drew them."""
    worst, steps = ratios(subject.fp32)
    if worst:
        raise Failed(f"log-probability ratio on policy is off 1 by {worst:.2g}")
    return f"exactly 1 at {steps} steps"


def company_changes_nothing(subject: Subject) -> str:
    """Three rows, with texts of different length, are three single ones; and nothing is encoded twice."""
    policy, worst = subject.fp32, 0.0
    x, t = subject.noise(3), torch.tensor([0.9, 0.6, 0.3])
    seen: list[str | None] = []
    encode = policy.backbone.encode

    def counted(prompt: str | None, device: torch.device) -> Conditioning:
        seen.append(prompt)
        return encode(prompt, device)

    policy.backbone.encode = counted  # type: ignore[method-assign]
    policy.texts.forget()
    lengths = []
    with torch.no_grad():
        for guidance in (1.0, GUIDANCE):
            together = policy.predict(x, t, policy.encode(PROMPTS), guidance).v
            for i, prompt in enumerate(PROMPTS):
                cond = policy.encode([prompt])
                alone = policy.predict(x[i : i + 1], t[i : i + 1], cond, guidance).v
                worst = max(worst, float((together[i] - alone[0]).abs().max() / alone.abs().max()))
                lengths.append(cond.embeds.shape[1])
    del policy.backbone.encode
    if not worst < 1e-4:
        raise Failed(f"a row differs by {worst:.2g} of its size from itself alone, at most 1e-4")
    if len(seen) != len(set(seen)):
        raise Failed(f"encoded more than once: {seen}")
    return f"largest difference {worst:.1g}; texts of {', '.join(map(str, lengths[:3]))} tokens, each encoded once"


def every_matrix_moves(subject: Subject) -> str:
    """No LoRA parameter without a gradient, and none left out that would have one."""
    policy = subject.fp32
    found = gradients(policy, subject)
    still = [name for name, gradient in found.items() if gradient is None or not gradient.any()]
    if still:
        raise Failed(f"{len(still)} LoRA matrices have no gradient, such as {still[0]}: name them in dead_targets")
    dead = policy.backbone.dead_targets
    layers = dict(policy.network.named_modules())
    for name in dead:
        if name not in layers:
            raise Failed(f"dead_targets names {name}, which the network does not have")
        weight = layers[name].weight
        weight.requires_grad_(True)  # so that its output has a gradient, whatever comes in
        outputs: list[Tensor] = []

        def keep(module: Any, given: Any, output: Tensor, outputs: list[Tensor] = outputs) -> None:
            output.retain_grad()
            outputs.append(output)

        handle = layers[name].register_forward_hook(keep)
        loss(policy, subject).backward()
        handle.remove()
        weight.grad = None
        weight.requires_grad_(False)
        if any(output.grad is not None and bool(output.grad.any()) for output in outputs):
            raise Failed(f"dead_targets names {name}, but it has a gradient")
    clear(policy)
    return f"{len(found)} matrices; {len(dead)} layers left out, rightly"


def checkpointing(subject: Subject) -> str:
    """Recomputed activations give the same gradient."""
    plain = gradients(subject.fp32, subject)
    policy = subject.policy()
    scramble(policy)
    policy.enable_gradient_checkpointing()
    worst = 0.0
    for name, gradient in gradients(policy, subject).items():
        expected = plain[name]
        assert gradient is not None and expected is not None
        worst = max(worst, float((gradient - expected).norm() / expected.norm().clamp(min=1e-12)))
    if not worst < 1e-4:
        raise Failed(f"the gradient differs by {worst:.2g}, at most 1e-4")
    return f"largest difference {worst:.1g}"


def narrow(subject: Subject) -> str:
    """bf16 runs, near fp32, with finite gradients; the LoRA stays fp32."""
    policy = subject.policy("bf16")
    scramble(policy)
    x, t = subject.noise(2), torch.tensor([0.9, 0.4])
    # Without the LoRA: one that shows makes a tiny random network multiply rounding more than seventyfold.
    with torch.no_grad(), subject.fp32.adapter(None), policy.adapter(None):
        exact = subject.fp32.predict(x, t, subject.fp32.encode(PROMPTS[:2])).v
        velocity = policy.predict(x, t, policy.encode(PROMPTS[:2])).v
        picture = policy.decode(x)
    away = float((velocity - exact).norm() / exact.norm())
    if velocity.dtype != torch.float32 or not away < 0.2:
        raise Failed(f"the prediction is {away:.2g} of its size away from fp32's")
    if not picture.isfinite().all():
        raise Failed("the picture is not finite")
    if any(parameter.dtype != torch.float32 for _, parameter in policy.trainable):
        raise Failed("the LoRA is not fp32")
    if not all(gradient is not None and gradient.isfinite().all() for gradient in gradients(policy, subject).values()):
        raise Failed("a gradient is missing or not finite")
    return f"{away:.1g} of its size from fp32"


def resident(subject: Subject) -> str:
    """`diffrl doctor`'s estimate, on modules without weights, is what the real ones need."""
    policy, rows = subject.policy(), 4
    if not policy.backbone.counted:
        return "not counted: the network's shapes depend on values"
    config = Config.model_validate(
        {
            "model": subject.model,
            "family": subject.family,
            "lora": {"rank": SPEC.rank, "alpha": SPEC.alpha},
            "objective": "rwr",  # no forward beside the trained one, and no row is left out
            "rollout": {"resolution": subject.resolution, "groups": 1, "group_size": rows, "batch_size": rows},
            "optimise": {"batch_size": rows, "micro_batch": 0.1},
        }
    )
    estimate = fit.estimate(config)
    frozen = sum(p.nbytes for name, p in policy.network.named_parameters() if "lora_" not in name)
    merged = policy.lora.fused.prepare(policy.precision)  # kept from one micro-batch to the next: no part of its peak
    whole = {"network": frozen, "autoencoder": sum(p.nbytes for p in policy.vae.parameters())}
    for name, real in (whole | {fit.merged_part(): KEPT * sum(tensor.nbytes for tensor in merged)}).items():
        if estimate.parts.get(name, 0) != real:
            raise Failed(f"{name}: {estimate.parts.get(name, 0)} bytes expected, {real} there")
    x, t = torch.randn(estimate.rows, *policy.latent_shape), torch.full((estimate.rows,), 0.5)
    if estimate.text is not None:
        policy.backbone.max_length = estimate.text[0]
    cond = policy.backbone.blank(estimate.rows, torch.float32)
    for tensor in (cond.embeds, cond.pooled, *cond.extra):
        tensor.normal_()
    made = [x, t, cond.embeds, cond.pooled, *cond.extra]
    with torch.no_grad():
        policy.predict(x, t, cond)  # an epoch samples first: tables that a library then keeps are no micro-batch's
    with Alive([*policy.network.parameters(), *policy.network.buffers(), *merged, *made]) as alive:
        policy.predict(x, t, cond).v.square().mean().backward()
    real, predicted = alive.peak + sum(v.nbytes for v in made), estimate.peaks[f"training {estimate.rows} rows"]
    if abs(predicted - real) > 0.05 * real:
        raise Failed(f"a micro-batch: {predicted} bytes expected, {real} needed; at most 5 % off")
    host = sum(p.nbytes for encoder in policy.backbone.text_encoders for p in encoder.parameters())
    return f"network {frozen} bytes, as expected; a micro-batch {100 * (predicted / real - 1):+.1f} %; encoders {host}"


CHECKS: dict[str, Callable[[Subject], str]] = {
    "picture": same_picture,
    "levels": same_levels,
    "ratio": ratio_is_one,
    "company": company_changes_nothing,
    "lora": every_matrix_moves,
    "checkpointing": checkpointing,
    "bf16": narrow,
    "base": over_bases,
    "memory": resident,
}


@dataclass(frozen=True)
class Finding:
    check: str
    passed: bool
    text: str


def run_checks(subject: Subject, names: Sequence[str] = tuple(CHECKS)) -> Iterator[Finding]:
    """One finding after the other; an exception of the family's own is a finding, too."""
    for name in names:
        try:
            yield Finding(name, True, CHECKS[name](subject))
        except Failed as error:
            yield Finding(name, False, str(error))
        except Exception as error:  # a stranger's family may raise anything
            yield Finding(name, False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
