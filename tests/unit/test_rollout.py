"""Sampling with a model whose answer is known: what is drawn, what is stored, and that batches do not matter."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diffrl import rollout as module
from diffrl import seeds
from diffrl.denoising import chain
from diffrl.errors import UserError
from diffrl.forward import FlowMatching, Prediction, Process, VariancePreserving
from diffrl.prompts import Prompt
from diffrl.rollout import SamplerSpec, SamplingError, collect, generate, initial_noise, remake
from diffrl.samplers import euler_step, gaussian_log_prob, ode_step, sde_kernel, window_steps

SHAPE = (3, 4, 4)
PROMPTS = [Prompt("a red circle"), Prompt("two blue squares", {"count": 2}), Prompt("a star")]
GROUP = 4
CPU = torch.device("cpu")
SDE = SamplerSpec("flow_sde", 6, guidance_scale=2.0, noise_level=0.7)
ODE = SamplerSpec("dpm2", 6)


@dataclass
class Cond:
    embeds: Tensor  # (B, 1, D)
    pooled: Tensor  # (B, D)
    first: int = 0

    def select(self, index: Tensor) -> "Cond":
        index = index - self.first
        return Cond(self.embeds[index], self.pooled[index])

    def to(self, device: Any) -> "Cond":
        return Cond(self.embeds.to(device), self.pooled.to(device))


@dataclass
class Known:
    """The exact model of images N(mean of the prompt + shift of the snapshot, 0.3^2)."""

    process: Process = field(default_factory=FlowMatching)
    latent_shape: tuple[int, int, int] = SHAPE
    distilled_guidance = False
    device: torch.device = CPU
    shifts: dict[str | None, Tensor] = field(
        default_factory=lambda: {
            "default": torch.zeros((), requires_grad=True),
            "old": torch.tensor(0.5),
            None: torch.tensor(-1.0),
        }
    )
    active: str | None = "default"
    calls: list[dict[str, Any]] = field(default_factory=list)
    encoded: list[list[str]] = field(default_factory=list)
    broken: str = ""

    def encode(self, prompts: Sequence[str]) -> Cond:
        self.encoded.append(list(prompts))
        means = [hashlib.sha256(text.encode()).digest()[0] / 128 - 1 for text in prompts]
        value = torch.tensor([math.nan if text == self.broken else m for text, m in zip(prompts, means, strict=True)])
        return Cond(value.view(-1, 1, 1), value.view(-1, 1))

    def predict(self, x: Tensor, t: Tensor, cond: Cond, guidance: float = 1.0) -> Prediction:
        grad = torch.is_grad_enabled()
        self.calls.append({"t": t, "guidance": guidance, "snapshot": self.active, "grad": grad, "size": len(x)})
        alpha, sigma = (value.view(-1, 1, 1, 1) for value in (self.process.alpha(t), self.process.sigma(t)))
        mean = cond.pooled.view(-1, 1, 1, 1) + self.shifts[self.active].to(x.device) + 0.1 * (guidance - 1)
        x0 = mean + 0.09 * alpha / (0.09 * alpha**2 + sigma**2) * (x - alpha * mean)
        eps = (x - alpha * x0) / sigma
        return Prediction(x0, eps, self.process.velocity(x0, eps, t))

    def decode(self, latents: Tensor) -> Tensor:
        return latents.sigmoid()

    def timesteps(self, steps: int) -> Tensor:
        u = torch.linspace(1, 0, steps + 1)
        return 3 * u / (1 + 2 * u)

    @contextmanager
    def adapter(self, name: str | None) -> Iterator[None]:
        before, self.active = self.active, name
        try:
            yield
        finally:
            self.active = before


def draw(policy: Known | None = None, spec: SamplerSpec = SDE, prompts: Sequence[Prompt] = PROMPTS, **options: Any):  # type: ignore[no-untyped-def]
    options = {"seed": 1, "epoch": 2, "group_size": GROUP, "batch_size": 5, **options}
    return collect(policy or Known(), prompts, spec, **options)  # type: ignore[arg-type]


def close(found: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(found, want, rtol=0, atol=2e-6)


# --- an image is its key --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SDE, ODE, SamplerSpec("cps", 6, window=2, window_range=(0, 5), same_noise=True)])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_images_do_not_depend_on_batch_rank_and_world(spec: SamplerSpec, world: int) -> None:
    keep = spec.stochastic_steps > 0
    whole = draw(spec=spec, batch_size=12, keep_trajectory=keep)
    parts = [draw(spec=spec, batch_size=2, rank=r, world=world, keep_trajectory=keep) for r in range(world)]
    assert [p.first for p in parts] == [r * 12 // world for r in range(world)] and {p.total for p in parts} == {12}
    for name in ("latents", "images", "prompt_index", "member"):
        close(torch.cat([getattr(p, name) for p in parts]).float(), getattr(whole, name).float())
    if keep:
        close(torch.cat([p.trajectory.states for p in parts]), whole.trajectory.states)
        assert torch.equal(
            torch.cat([p.trajectory.t for p in parts]), whole.trajectory.t
        )  # one window for all processes
    assert whole.images.unique(dim=0).shape[0] == 12


def test_order_is_prompt_major_and_the_other_prompts_do_not_matter() -> None:
    found = draw()
    assert found.prompt_index.tolist() == [0] * 4 + [1] * 4 + [2] * 4 and found.prompt_index.dtype == torch.int64
    assert found.member.tolist() == [0, 1, 2, 3] * 3
    assert found.identity(6) == ("two blue squares", 2)
    alone = draw(prompts=[PROMPTS[2], PROMPTS[1]])
    close(alone.latents[4:], found.latents[4:8])
    close(alone.latents[:4], found.latents[8:])


@pytest.mark.parametrize("spec", [SDE, ODE, SamplerSpec("flow_sde", 6, window=2, window_range=(1, 6), same_noise=True)])
def test_one_image_can_be_made_again_alone(spec: SamplerSpec) -> None:
    found = draw(spec=spec, snapshot="old")
    latents, image = remake(Known(), spec, "two blue squares", 3, seed=1, epoch=2, snapshot="old")  # type: ignore[arg-type]
    close(latents, found.latents[7:8])
    close(image, found.images[7:8])


def test_seed_epoch_prompt_and_member_all_change_the_noise() -> None:
    def first(seed: int = 1, epoch: int | str = 2, text: str = "a star", member: int = 0, same: bool = False) -> Tensor:
        return initial_noise(SHAPE, [text], [member], seed=seed, epoch=epoch, same_noise=same)

    others = [first(seed=2), first(epoch=3), first(text="a sta"), first(member=1), first(epoch="2"), first(same=True)]
    assert all(not torch.equal(first(), other) for other in others)
    assert torch.equal(first(same=True), first(member=9, same=True))
    assert torch.equal(first(), initial_noise(SHAPE, ["x", "a star"], [5, 0], seed=1, epoch=2)[1:])


# --- the loop -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["euler", "dpm2"])
def test_deterministic_sampling_is_the_solver(name: str) -> None:
    policy, found = Known(), draw(spec=SamplerSpec(name, 6))
    cond = policy.encode([p.text for p in PROMPTS]).select(found.prompt_index)
    x = initial_noise(SHAPE, [PROMPTS[i].text for i in found.prompt_index], found.member.tolist(), seed=1, epoch=2)
    state = None
    for t, t_next in pairwise(policy.timesteps(6).tolist()):
        now, later = torch.full((12,), t), torch.full((12,), t_next)
        x, state = ode_step(name, x, policy.predict(x, now, cond), now, later, state, policy.process)
    close(found.latents, x.detach())
    close(found.images, x.detach().sigmoid())


def test_the_model_is_asked_at_the_exact_levels_without_gradients_and_once_per_step() -> None:
    policy = Known()
    found = draw(policy, snapshot="old")
    levels = policy.timesteps(6)
    assert len(policy.calls) == 3 * 6 and [c["size"] for c in policy.calls[::6]] == [5, 5, 2]
    for i, call in enumerate(policy.calls):
        assert call["t"].dtype == torch.float32 and call["t"].shape == (call["size"],)
        assert (call["t"] == levels[i % 6]).all()
        assert (call["guidance"], call["snapshot"], call["grad"]) == (2.0, "old", False)
    assert policy.encoded == [["a red circle", "two blue squares", "a star"]]
    assert torch.equal(found.schedule, levels) and found.t_second == levels[1].item()


def test_the_step_loop_never_waits_for_the_device() -> None:
    """On the meta device tensors hold no values, so that any read by the host raises."""
    policy = Known(device=torch.device("meta"))
    for spec in (ODE, SDE, SamplerSpec("cps", 6, window=2)):
        job = module._job(policy, spec, 1, 2, "default", keep=spec.stochastic_steps > 0)  # type: ignore[arg-type]
        x, noise = torch.empty(2, *SHAPE, device="meta"), torch.empty(2, spec.stochastic_steps, *SHAPE, device="meta")
        with torch.no_grad():
            drawn = chain(job, x, Known().encode(["a", "b"]).to("meta"), noise)  # type: ignore[arg-type]
        assert drawn.latents.shape == x.shape and (drawn.states is None) == (spec.stochastic_steps == 0)


def test_snapshots_differ_and_none_is_the_pretrained_model() -> None:
    means = {name: draw(spec=ODE, snapshot=name).latents.mean().item() for name in ("default", "old", None)}
    assert means["old"] - means["default"] == pytest.approx(0.5, abs=1e-3)
    assert means[None] - means["default"] == pytest.approx(-1.0, abs=1e-3)


# --- what is stored for training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flow_sde", "dance", "cps", "ddim"])
def test_trajectory_gives_the_sampled_log_prob_again_bit_for_bit(name: str) -> None:
    policy, spec = Known(), SamplerSpec(name, 6, noise_level=0.7)
    found = draw(policy, spec, batch_size=12, keep_trajectory=True)
    steps = found.trajectory
    width = 6 if name in ("flow_sde", "dance") else 5  # the last step of cps and ddim has no noise
    assert steps.states.shape == (12, width + 1, *SHAPE) and steps.log_prob.shape == (12, width)
    assert torch.equal(steps.t, found.schedule[:width].expand(12, -1))
    assert torch.equal(steps.t_next, found.schedule[1 : width + 1].expand(12, -1))
    assert torch.equal(steps.x[:, 1:], steps.x_next[:, :-1]) and steps.x.data_ptr() == steps.states.data_ptr()
    assert steps.log_prob.isfinite().all()
    cond = found.cond.select(found.prompt_index)
    for j in range(width):
        t, t_next = steps.t[:, j], steps.t_next[:, j]
        prediction = policy.predict(steps.x[:, j], t, cond, spec.guidance_scale)
        mean, std = sde_kernel(
            name, steps.x[:, j], prediction, t, t_next, spec.noise_level, found.t_second, found.process
        )
        log_prob = gaussian_log_prob(steps.x_next[:, j], mean, std)
        assert log_prob.requires_grad
        assert torch.equal((log_prob - steps.log_prob[:, j]).exp(), torch.ones(12)), "importance ratio is not exactly 1"
    log_prob.sum().backward()  # type: ignore[no-untyped-call]
    assert policy.shifts["default"].grad is not None and policy.shifts["default"].grad.abs() > 0


def test_window_is_stochastic_and_the_rest_is_euler() -> None:
    policy, spec = Known(), SamplerSpec("flow_sde", 6, window=2, window_range=(2, 4))
    found = draw(policy, spec, keep_trajectory=True)
    steps, levels = found.trajectory, found.schedule
    assert torch.equal(steps.t, levels[2:4].expand(12, -1)) and steps.states.shape[1] == 3
    cond = found.cond.select(found.prompt_index)
    texts = [found.identity(i)[0] for i in range(12)]

    def walk(x: Tensor, first: int, last: int) -> Tensor:
        for i in range(first, last):
            t, t_next = levels[i].expand(12), levels[i + 1].expand(12)
            x = euler_step(x, policy.predict(x, t, cond).v, t, t_next)
        return x.detach()

    start = initial_noise(SHAPE, texts, found.member.tolist(), seed=1, epoch=2)
    close(walk(start, 0, 2), steps.x[:, 0])
    close(walk(steps.x_next[:, -1], 4, 6), found.latents)
    noise = seeds.noise(
        (2, *SHAPE), [(1, 2, text, m, "steps") for text, m in zip(texts, found.member.tolist(), strict=True)]
    )
    for j in range(2):
        t, t_next = steps.t[:, j], steps.t_next[:, j]
        prediction = policy.predict(steps.x[:, j], t, cond)
        mean, std = sde_kernel("flow_sde", steps.x[:, j], prediction, t, t_next, 0.7, found.t_second, found.process)
        close((mean + std * noise[:, j]).detach(), steps.x_next[:, j])


def test_window_moves_from_epoch_to_epoch() -> None:
    spec = SamplerSpec("flow_sde", 6, window=1, window_range=(0, 6))
    starts = {
        float(draw(spec=spec, epoch=e, prompts=PROMPTS[:1], keep_trajectory=True).trajectory.t[0, 0]) for e in range(40)
    }
    assert starts == set(Known().timesteps(6)[:-1].tolist())


@pytest.mark.parametrize("name", ["flow_sde", "dance", "cps", "renoise"])
def test_every_sampler_draws_on_the_shifted_schedule(name: str) -> None:
    found = draw(spec=SamplerSpec(name, 4, noise_level=0.7, shift=3.0), keep_trajectory=True)
    close(found.schedule, torch.tensor([1, 9 / 10, 3 / 4, 1 / 2, 0]))  # 3 t / (1 + 2 t) of 1, 3/4, 1/2, 1/4, 0
    assert set(found.trajectory.t[0].tolist()) <= set(found.schedule.tolist())
    even = draw(spec=SamplerSpec("dpm2", 4, shift=1.0))
    close(even.schedule, torch.tensor([1, 0.75, 0.5, 0.25, 0]))
    assert not torch.equal(even.latents, draw(spec=SamplerSpec("dpm2", 4, shift=3.0)).latents)


def test_same_noise_is_shared_by_a_group_only() -> None:
    found = draw(spec=SamplerSpec("flow_sde", 6, window=2, same_noise=True), keep_trajectory=True)
    start = found.trajectory.x[:, 0].unflatten(0, (3, GROUP))
    assert torch.equal(start, start[:, :1].expand_as(start))
    assert start[:, 0].unique(dim=0).shape[0] == 3
    assert found.latents.unique(dim=0).shape[0] == 12  # the steps' noise is each member's own
    apart = draw(spec=SamplerSpec("flow_sde", 6, window=2), keep_trajectory=True)
    assert apart.trajectory.x[:, 0].unique(dim=0).shape[0] == 12


def test_latents_can_be_used_in_autograd_and_nothing_else_is_kept() -> None:
    found = draw(spec=ODE)
    assert found.trajectory is None and found.latents.dtype == torch.float32
    assert not found.latents.requires_grad and not found.latents.is_inference()
    weight = torch.ones((), requires_grad=True)
    (weight * found.latents).square().sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None and weight.grad > 0


# --- hand-over of images --------------------------------------------------------------------------------------------


def test_on_batch_gets_each_batch_at_once_and_outside_of_the_sampling_context() -> None:
    policy, seen = Known(), []

    def on_batch(images: Tensor, part: slice) -> None:
        seen.append((images, part, torch.is_grad_enabled(), policy.active, len(policy.calls)))

    found = draw(policy, on_batch=on_batch, snapshot="old", rank=1, world=2, batch_size=4)
    assert [s[1] for s in seen] == [slice(0, 4), slice(4, 6)]  # of the local images
    assert [s[4] for s in seen] == [6, 12]  # each batch at once, while the next is still to be sampled
    assert all(s[2] and s[3] == "default" for s in seen)
    assert torch.equal(torch.cat([s[0] for s in seen]), found.images)
    assert draw(on_batch=on_batch, keep_images=False).images is None


def test_generate_is_the_same_for_every_world_and_shares_no_noise_with_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PROMPTS_AT_ONCE", 2)  # prompts are encoded in blocks, the last one not full

    def run(world: int, batch_size: int) -> tuple[Tensor, Tensor]:
        pieces = []
        for rank in range(world):
            policy = Known()
            batches = generate(
                policy,
                PROMPTS,
                ODE,
                seed=1,
                per_prompt=3,
                batch_size=batch_size,
                rank=rank,
                world=world,
                snapshot="old",
            )  # type: ignore[call-overload]
            for piece in batches:
                assert torch.is_grad_enabled() and policy.active == "default"  # the consumer's own context
                pieces.append(piece)
            assert max([len(texts) for texts in policy.encoded], default=0) <= 2
        return torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces])

    index, images = run(1, 9)
    assert index.tolist() == list(range(9))
    for world, batch_size in ((2, 4), (4, 1), (12, 3)):  # 12: more processes than images
        other, pictures = run(world, batch_size)
        assert other.tolist() == list(range(9))
        close(pictures, images)
    close(remake(Known(), ODE, "two blue squares", 2, seed=1, snapshot="old")[1], images[5:6])  # type: ignore[arg-type]
    trained = draw(spec=ODE, epoch=0, group_size=3, snapshot="old").images
    assert (trained - images).abs().flatten(1).amax(1).min() > 1e-3


# --- mistakes -------------------------------------------------------------------------------------------------------


def test_non_finite_latents_name_the_prompt_and_the_member() -> None:
    whose = 'prompt "two blue squares", member 0 and 0 more of its batch'
    message = rf"non-finite latents for {whose} \(sampler flow_sde, seed 1, epoch 2\)"
    with pytest.raises(SamplingError, match=message):
        draw(Known(broken="two blue squares"))


def test_what_cannot_be_collected() -> None:
    with pytest.raises(
        UserError, match=r'rollout.sampler: "dpm2" at noise level 0.7 and 6 steps has no stochastic step'
    ):
        draw(spec=ODE, keep_trajectory=True)
    with pytest.raises(UserError, match=r'rollout.sampler: "flow_sde" at noise level 0.0'):
        draw(spec=SamplerSpec("flow_sde", 6, noise_level=0.0), keep_trajectory=True)
    with pytest.raises(UserError, match='prompts: "a star" comes 2 times'):
        draw(prompts=[PROMPTS[2], PROMPTS[0], Prompt("a star", {"other": 1})])


def test_variance_preserving_models_take_ddim_and_dpm2() -> None:
    process = VariancePreserving((1 - torch.linspace(1e-4, 0.02, 1000)).cumprod(0))
    with pytest.raises(UserError, match='"flow_sde" is not defined for a VariancePreserving model; use ddim'):
        draw(Known(process=process))
    want = Known().encode([p.text for p in PROMPTS]).pooled
    for spec in (
        SamplerSpec("dpm2", 100),
        SamplerSpec("ddim", 300, noise_level=0.0),
        SamplerSpec("ddim", 300, noise_level=1.0),
    ):
        found = draw(Known(process=process), spec, group_size=40, batch_size=120).latents.view(3, -1)
        assert (found.mean(1) - want[:, 0]).abs().max() < 0.03  # standard error 0.3 / sqrt(1920) = 0.007
        assert (found.std(1) - 0.3).abs().max() < 0.03  # the last step, to the posterior mean, loses a little


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "rollout.steps: .*greater than or equal to 1, got 0"),
        ({"sampler": "euler", "window": 2}, "rollout.window: 2 stochastic steps, but 0 of the 10 .* euler"),
        ({"sampler": "cps", "noise_level": 1.2}, "rollout.noise_level: expected at most 1 with cps, got 1.2"),
        ({"sampler": "dance", "noise_level": -0.1}, "rollout.noise_level: .*, got -0.1"),
        ({"sampler": "ddim", "noise_level": 1.5}, "rollout.noise_level: expected at most 1 with ddim"),
        ({"sampler": "flow_sde", "window": 11}, "rollout.window: 11 stochastic steps, but 10 of the 10"),
        ({"sampler": "cps", "window": 10}, "rollout.window: 10 stochastic steps, but 9 of the 10"),
        (
            {"sampler": "flow_sde", "window": 3, "window_range": (0, 2)},
            r"rollout.window_range: \[0, 2\] is too short for a window of 3",
        ),
        (
            {"sampler": "cps", "window": 3, "window_range": (7, 10)},
            r"rollout.window_range: \[7, 10\] is not within \[0, 9\]",
        ),
        ({"sampler": "flow_sde", "window": 3, "window_range": (-1, 4)}, "rollout.window_range"),
        ({"sampler": "renoise", "noise_level": 1.5}, "rollout.noise_level"),
        ({"sampler": "cps", "tail": 0.0}, "rollout.tail: .*greater than 0, got 0.0"),
        ({"tail": 0.5}, "rollout.tail: the sampler .dpm2. has no"),
        ({"sampler": "cps", "window_move": (0, 1)}, r"rollout.window_move: \[0, 1\]: both must be at least 1"),
        ({"same_noise": True}, "rollout.same_noise: .* would be the same"),
        (
            {"sampler": "flow_sde", "noise_level": 0.0, "same_noise": True},
            "rollout.same_noise: .* would be the same",
        ),
    ],
)
def test_a_specification_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SamplerSpec(**options)


def test_a_moving_window_goes_from_noisy_to_clean_and_back_to_the_start() -> None:
    spec = SamplerSpec("flow_sde", 7, window=3, window_move=(2, 3))
    assert [window_steps(spec, 0, epoch).start for epoch in range(8)] == [0, 0, 3, 3, 4, 4, 0, 0]
    within = SamplerSpec("flow_sde", 7, window=2, window_range=(1, 5), window_move=(1, 1))
    assert [window_steps(within, 9, epoch).start for epoch in range(4)] == [1, 2, 3, 1]


def test_a_tail_with_all_steps_is_the_run_and_a_short_one_takes_fewer_forwards(monkeypatch) -> None:
    spec = SamplerSpec("flow_sde", 10, window=2)
    plain = draw(spec=spec)
    with monkeypatch.context() as patched:
        patched.setattr("diffrl.denoising.TAIL_SOLVER", "euler")  # as without a tail
        close(draw(spec=spec.model_copy(update={"tail": 1.0})).latents, plain.latents)
    model = Known()
    short = draw(model, spec=spec.model_copy(update={"tail": 0.4}), keep_trajectory=True)
    assert short.forwards == 12 * 6 == sum(call["size"] for call in model.calls) and plain.forwards == 120
    assert 0 < float((short.latents - plain.latents).abs().mean()) < 0.1
    assert short.trajectory.t.shape == (12, 2)


def test_noise_levels_differ_by_step() -> None:
    one = SamplerSpec("dance", 4, noise_level=0.5)
    same = draw(spec=one.with_levels((0.5,) * 4), keep_trajectory=True)
    assert torch.equal(same.latents, draw(spec=one).latents)
    assert torch.equal(same.trajectory.noise_level, torch.full((12, 4), 0.5))
    decayed = SamplerSpec("flow_sde", 4, noise_level=(1.0, 0.2))
    schedule = [1.0, 0.75, 0.5, 0.25, 0.0]
    assert decayed.noise_by_step(schedule) == pytest.approx(
        [1.0, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2 + 0.4 * (1 - math.sqrt(0.5))]
    )
    found = draw(spec=decayed, keep_trajectory=True)
    level = found.trajectory.noise_level[0]
    assert (level.diff() < 0).all() and torch.equal(level, found.trajectory.noise_level[5])
    steps, cond = found.trajectory, found.cond.select(found.prompt_index)
    for j in range(4):  # training evaluates the very step that was drawn
        prediction = Known().predict(steps.x[:, j], steps.t[:, j], cond)
        mean, std = sde_kernel("flow_sde", steps.x[:, j], prediction, steps.t[:, j], steps.t_next[:, j],
                               steps.noise_level[:, j], found.t_second, FlowMatching())  # fmt: skip
        assert torch.equal(gaussian_log_prob(steps.x_next[:, j], mean, std), steps.log_prob[:, j])


OWN = """
from diffrl.samplers import flow_sde
from diffrl.sampling import Sampler

own = Sampler(stochastic=True, step=lambda x, p, t, tn, a, t2, process: flow_sde(x, p.v, t, tn, a, t2))
no_step = Sampler(stochastic=True)
"""


def test_a_sampler_of_ones_own_is_drawn_with_like_a_shipped_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    found = draw(spec=SamplerSpec(f"{file}:own", 6, guidance_scale=2.0), keep_trajectory=True)
    shipped = draw(keep_trajectory=True)
    assert torch.equal(found.latents, shipped.latents)
    assert torch.equal(found.trajectory.log_prob, shipped.trajectory.log_prob)
    process = VariancePreserving((1 - torch.linspace(1e-4, 0.02, 1000)).cumprod(0))
    with pytest.raises(UserError, match="is not defined for a VariancePreserving model; use ddim"):
        draw(Known(process=process), SamplerSpec(f"{file}:own", 6))
    with pytest.raises(UserError, match=r'rollout.sampler: no "onw" in .* \(nearest: "own"\)'):
        SamplerSpec(f"{file}:onw", 6)
    with pytest.raises(UserError, match=r"no_step. is not a diffrl\.sampling\.Sampler with a step"):
        SamplerSpec(f"{file}:no_step", 6)
    with pytest.raises(UserError, match=r'no sampler file "nowhere\.py"'):
        SamplerSpec("nowhere.py:own", 6)


def test_an_installed_sampler_is_found_by_its_name(installed: Any) -> None:
    installed("mine", "diffrl.sampling:SAMPLERS", "diffrl.samplers")
    with pytest.raises(UserError, match=r'"mine" is not a diffrl\.sampling\.Sampler with a step'):
        SamplerSpec("mine", 6)
    with pytest.raises(UserError, match=r'unknown sampler "mime" \(nearest: "mine"'):
        SamplerSpec("mime", 6)


def test_which_steps_are_stochastic() -> None:
    assert window_steps(SamplerSpec("dpm2", 10), 0, 0) == range(0)
    assert window_steps(SamplerSpec("flow_sde", 10), 0, 0) == range(10)
    assert window_steps(SamplerSpec("flow_sde", 10, noise_level=0.0), 0, 0) == range(0)
    assert window_steps(SamplerSpec("cps", 10), 0, 0) == range(9)
    assert window_steps(SamplerSpec("cps", 10, window=2), 0, 5) == range(2)
    sliding = SamplerSpec("flow_sde", 10, window=2, window_range=(1, 6))
    drawn = [window_steps(sliding, 7, epoch) for epoch in range(200)]
    assert {steps.start for steps in drawn} == {1, 2, 3, 4}  # the window lies within the steps 1 to 5
    assert all(len(steps) == 2 for steps in drawn)
    assert drawn == [window_steps(sliding, 7, epoch) for epoch in range(200)]
    assert drawn != [window_steps(sliding, 8, epoch) for epoch in range(200)]
