"""The searches: each spends a budget of network forwards on every prompt of a batch, and gives what it finished.

Symbols: P prompts, K particles or children of a prompt at once, N = P K, S steps, `cost` forwards for one image and
step (2 with classifier-free guidance). All randomness is keyed by (seed, prompt, generation, member): neither the batch
nor the other prompts change a prompt's images. Image m of best-of-N is member m of `diffrl sample`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffrl.continuations import finish
from diffrl.denoising import EVALUATION, Steer, initial_noise
from diffrl.forward import FlowMatching, Prediction
from diffrl.policy import Policy
from diffrl.prompts import Prompt
from diffrl.rollout import generate
from diffrl.samplers import schedule, sde_kernel
from diffrl.sampling import SamplerSpec
from diffrl.seeds import generator, noise

from .equations import effective_size, log_potential, mixed_noise, mutated, reward_gradient, systematic, tournament

Rewrite = Callable[[Tensor, Sequence[Prompt]], Sequence[str]]  # images (n, 3, H, W) and their prompts to new texts

# EvoSearch's schedule for SD2.1: where a generation begins, as a share of the steps, and its children. The first is the
# start noises; its 42, 26, 26, 26 and 30 members without the 5 best, which a deterministic path leaves as they are.
GENERATIONS = ((0.0, 42), (0.0, 21), (0.4, 21), (0.6, 21), (0.8, 25))
LOOKS = 4  # steps at which particles are weighed on the way, evenly over the schedule
LEVEL = 0.7  # of the noise that particles and mutations draw: Flow-GRPO's a


@dataclass(frozen=True)
class Bench:
    """What a search draws with, and how it judges.

    score: images (n, 3, H, W) and their prompts to (n, R) scores; value: those to (n,), higher is better; ascend:
    images and prompts to the value (n,), through which gradients flow; rewrite: images and prompts to prompts anew.
    """

    policy: Policy
    spec: SamplerSpec
    seed: int
    batch_size: int
    snapshot: str | None
    score: Callable[[Tensor, Sequence[Prompt]], Tensor]
    value: Callable[[Tensor], Tensor]
    ascend: Callable[[Tensor, Sequence[Prompt]], Tensor] | None = None
    rewrite: Rewrite | None = None

    @property
    def cost(self) -> int:
        """Forwards of the network for one image and step."""
        return 1 if self.spec.guidance_scale == 1.0 or self.policy.distilled_guidance else 2

    def image(self) -> int:
        """Forwards for one image."""
        return self.spec.steps * self.cost

    def draw(self, prompts: Sequence[Prompt], count: int, **more: Any) -> Iterator[tuple[list[int], Tensor]]:
        """Batches of `count` images of each prompt, with their places from prompt to prompt; `more`: of `generate`."""
        amount = {"seed": self.seed, "per_prompt": count, "batch_size": self.batch_size, "snapshot": self.snapshot}
        for index, images in generate(self.policy, prompts, self.spec, **{**amount, **more}):
            yield index.tolist(), images


@dataclass(frozen=True)
class Finished:
    """n images (n, 3, H, W) with their scores (n, R), the prompt of each (n,), and the forwards that its prompt had
    taken when it was there; `origin`: how it was made."""

    prompt: list[int]
    forwards: list[int]
    images: Tensor
    scores: Tensor
    origin: list[str]


def best_of_n(bench: Bench, prompts: Sequence[Prompt], budget: int, steer: Steer | None = None) -> Iterator[Finished]:
    """As many images of each prompt as the budget gives."""
    count = budget // bench.image()
    for index, images in bench.draw(prompts, count, steer=steer):
        owner = [i // count for i in index]
        spent = [(i % count + 1) * bench.image() for i in index]
        scores = bench.score(images, [prompts[i] for i in owner])
        yield Finished(owner, spent, images, scores, ["drawn"] * len(owner))


def refine(
    bench: Bench, prompts: Sequence[Prompt], budget: int, rewrite: Rewrite, good: float | None = None
) -> Iterator[Finished]:
    """Generate, critique, refine (RationalRewards, 2604.11626): rounds of one image for each prompt.

    After an image that is not `good` (None: none is), the next one is drawn from what `rewrite` makes of image and
    prompt. Scores are for the prompt itself. The noise of round m is that of member m of the text that is drawn.
    """
    texts, active = [prompt.text for prompt in prompts], list(range(len(prompts)))
    for number in range(budget // bench.image()):
        distinct = list(dict.fromkeys(texts[i] for i in active))
        drawn: dict[str, Tensor] = {}
        for index, images in bench.draw([Prompt(text) for text in distinct], 1, first_member=number):
            drawn |= {distinct[i]: image for i, image in zip(index, images, strict=True)}
        images, owners = torch.stack([drawn[texts[i]] for i in active]), [prompts[i] for i in active]
        scores = bench.score(images, owners)
        origin = ["drawn" if texts[i] == prompts[i].text else f"from: {texts[i]}" for i in active]
        yield Finished(list(active), [(number + 1) * bench.image()] * len(active), images, scores, origin)
        values = bench.value(scores).tolist()
        open_ = [j for j, value in enumerate(values) if good is None or value < good]
        if not open_:
            return
        new = rewrite(images[open_], [owners[j] for j in open_])
        active = [active[j] for j in open_]
        for i, text in zip(active, new, strict=True):
            texts[i] = text


def gradient(bench: Bench, prompts: Sequence[Prompt], budget: int, strength: float) -> Iterator[Finished]:
    """Best-of-N of images that the reward's gradient guides (Flow-NRG); its backward passes are the decoder's and the
    reward's, and cost no forward of the network."""
    for place, prompt in enumerate(prompts):
        for finished in best_of_n(bench, [prompt], budget, guide(bench, prompt, strength)):
            yield replace(finished, prompt=[place] * len(finished.prompt))


def guide(bench: Bench, prompt: Prompt, strength: float) -> Steer:
    """Moves each step's prediction along the gradient of the value of its decoded clean latent."""
    policy, ascend, sigmas = bench.policy, bench.ascend, schedule(bench.policy, bench.spec).tolist()
    assert ascend is not None, "checked before anything is drawn"

    def steer(step: int, x: Tensor, prediction: Prediction) -> tuple[Tensor, Prediction]:
        with torch.enable_grad():
            x0 = prediction.x0.detach().requires_grad_()
            (slope,) = torch.autograd.grad(ascend(policy.decode(x0, grad=True), [prompt] * len(x)).sum(), x0)
        return x, reward_gradient(x, prediction, slope, x.new_full((len(x),), sigmas[step]), strength, policy.process)

    return steer


def particles(
    bench: Bench, prompts: Sequence[Prompt], budget: int, population: int, temperature: float
) -> Iterator[Finished]:
    """Feynman-Kac steering (2501.06848): rounds of `population` particles each until the budget is spent."""
    spent = first = 0
    while (count := min(population, (budget - spent) // bench.image())) > 0:
        spent += count * bench.image()
        at_once = max(bench.batch_size // count, 1)
        for start in range(0, len(prompts), at_once):
            part = prompts[start : start + at_once]
            steer = Resampling(bench, part, count, temperature, first)
            for index, images in bench.draw(part, count, batch_size=len(part) * count, first_member=first, steer=steer):
                owner = [start + i // count for i in index]
                scores = bench.score(images, [prompts[i] for i in owner])
                origin = f"round {first // population}"
                yield Finished(owner, [spent] * len(owner), images, scores, [origin] * len(owner))
        first += count


class Resampling:
    """Weighs the particles (P, K) of a batch by what their clean predictions are worth, and lets the better ones go on.

    The unit of the temperature is the deviation of the values among a prompt's particles at that step, so that it means
    the same for every reward. Particles are resampled where fewer than half of them count (the paper's adaptive form):
    a single one, or a temperature without end, leaves plain sampling to the bit.
    """

    def __init__(self, bench: Bench, prompts: Sequence[Prompt], count: int, temperature: float, first: int) -> None:
        self.bench, self.prompts, self.count = bench, prompts, count
        self.temperature, self.first = temperature, first
        self.looks = {round(i * bench.spec.steps / (LOOKS + 1)) for i in range(1, LOOKS + 1)} - {0}
        self.log_weights = torch.zeros(len(prompts), count, dtype=torch.float64)
        self.before = torch.zeros_like(self.log_weights)

    def __call__(self, step: int, x: Tensor, prediction: Prediction) -> tuple[Tensor, Prediction]:
        if step not in self.looks or self.count == 1:
            return x, prediction
        owners = [prompt for prompt in self.prompts for _ in range(self.count)]
        scores = self.bench.score(self.bench.policy.decode(prediction.x0), owners)
        value = self.bench.value(scores).double().view(-1, self.count)
        spread = value.std(1, keepdim=True)
        value = torch.where(spread > 0, value / spread.clamp_min(1e-12), 0.0)
        self.log_weights += log_potential(value, self.before, self.temperature)
        self.before = value
        rows = torch.arange(len(x)).view(-1, self.count)
        for p, prompt in enumerate(self.prompts):
            if effective_size(self.log_weights[p]) < self.count / 2:
                u = torch.rand((), generator=generator(self.bench.seed, prompt.text, self.first, step, "resampling"))
                chosen = systematic(self.log_weights[p], float(u))
                rows[p], self.before[p] = rows[p][chosen], self.before[p][chosen]
                self.log_weights[p] = 0.0
        on = rows.flatten().to(x.device)
        return x[on], Prediction(prediction.x0[on], prediction.eps[on], prediction.v[on])


class Generation(NamedTuple):
    """So many children of each prompt, which go on from the state before step `step`."""

    step: int
    children: int


def generations(
    budget: int, steps: int, cost: int, shape: Sequence[tuple[float, int]] = GENERATIONS
) -> list[Generation]:
    """EvoSearch's generations in the proportions of `shape`, as large as the budget of forwards allows.

    What is left of it are further start noises, and then further children of the last generation, so that less than one
    of those is not spent. A budget for less than one start noise gives none.
    """
    places = [min(round(share * steps), steps - 1) for share, _ in shape]  # before the last step, or nothing is drawn
    prices = [(steps - place) * cost for place in places]
    whole = sum(price * count for price, (_, count) in zip(prices, shape, strict=True))
    counts = [count * budget // whole for _, count in shape]
    counts[0] = max(counts[0], min(budget // prices[0], 1))
    while sum(map(int.__mul__, prices, counts)) > budget:  # of a budget for hardly more than one image
        last = max(i for i, count in enumerate(counts) if count and i)
        counts[last] -= 1
    counts[0] += (budget - sum(map(int.__mul__, prices, counts))) // prices[0]
    if counts[0]:
        counts[-1] += (budget - sum(map(int.__mul__, prices, counts))) // prices[-1]
    return [Generation(place, count) for place, count in zip(places, counts, strict=True) if count]


def evolution(bench: Bench, prompts: Sequence[Prompt], plan: Sequence[Generation]) -> Iterator[Finished]:
    """EvoSearch (2505.17618): children of the best noises and of the best states on the way, which are kept, so that
    nothing before them is drawn again. Without further generations it is best-of-N."""
    starts = sorted({generation.step for generation in plan})
    states: dict[int, Tensor] = {}  # by step: (P, n, C, h, w) of all members that passed it
    values: dict[int, Tensor] = {}  # (P, n) of their clean images
    spent = 0
    for number, generation in enumerate(plan):
        step, count = generation.step, generation.children
        if number == 0:
            texts = [prompt.text for prompt in prompts for _ in range(count)]
            members = list(range(count)) * len(prompts)  # as `diffrl sample` begins them
            x = initial_noise(bench.policy.latent_shape, texts, members, seed=bench.seed).to(bench.policy.device)
            origin = "noise"
        else:
            x = _children(bench, prompts, number, generation, states[step], values[step])
            origin = f"generation {number}, step {step}"
        passed, images, scores = _run(bench, prompts, x, step, [s for s in starts if s >= step])
        value = bench.value(scores).view(len(prompts), count)
        for place, state in passed.items():
            state = state.view(len(prompts), count, *state.shape[1:])
            states[place] = torch.cat([states[place], state], 1) if place in states else state
            values[place] = torch.cat([values[place], value], 1) if place in values else value
        price = (bench.spec.steps - step) * bench.cost
        owner = [p for p in range(len(prompts)) for _ in range(count)]
        forwards = [spent + (i + 1) * price for _ in prompts for i in range(count)]
        spent += count * price
        yield Finished(owner, forwards, images, scores, [origin] * len(owner))


def _children(
    bench: Bench, prompts: Sequence[Prompt], number: int, generation: Generation, states: Tensor, values: Tensor
) -> Tensor:
    """(P K, C, h, w) of a generation, from the members (P, n, C, h, w) that passed its step and their values (P, n)."""
    step, count = generation.step, generation.children
    parents = []
    for p, prompt in enumerate(prompts):
        draws = torch.rand(count, values.shape[1], generator=generator(bench.seed, prompt.text, number, "tournament"))
        parents.append(states[p][tournament(values[p], draws).to(states.device)])
    x = torch.cat(parents)
    keys = [(bench.seed, EVALUATION, prompt.text, number, i, "mutation") for prompt in prompts for i in range(count)]
    eps = noise(tuple(x.shape[1:]), keys).to(x.device)
    if step == 0:
        return mixed_noise(x, eps)
    return mutated(x, eps, step_std(bench, x, step))


def step_std(bench: Bench, x: Tensor, step: int) -> Tensor:
    """(B, 1, 1, 1): s_g, what the SDE adds in the step from sigma number `step` on."""
    process, sigmas = bench.policy.process, schedule(bench.policy, bench.spec).tolist()
    name, level = ("flow_sde", LEVEL) if isinstance(process, FlowMatching) else ("ddim", 1.0)
    t, t_next = x.new_full((len(x),), sigmas[step]), x.new_full((len(x),), sigmas[step + 1])
    zero = torch.zeros_like(x)  # the std depends on no prediction
    return sde_kernel(name, x, Prediction(zero, zero, zero), t, t_next, level, sigmas[1], process)[1]


@torch.no_grad()
def _run(
    bench: Bench, prompts: Sequence[Prompt], x: Tensor, step: int, stops: Sequence[int]
) -> tuple[dict[int, Tensor], Tensor, Tensor]:
    """From the states x (P K, ...) before `step` to their images and scores; and the states at the steps `stops`."""
    policy, spec, sigmas = bench.policy, bench.spec, schedule(bench.policy, bench.spec).tolist()
    owner = [p for p in range(len(prompts)) for _ in range(len(x) // len(prompts))]
    with policy.adapter(bench.snapshot):
        cond = policy.encode([prompt.text for prompt in prompts])
    passed: dict[int, list[Tensor]] = {stop: [] for stop in stops}
    images, scores = [], []
    for start in range(0, len(x), bench.batch_size):
        part, mine = x[start : start + bench.batch_size], owner[start : start + bench.batch_size]
        own = cond.select(torch.tensor(mine))
        with policy.adapter(bench.snapshot):
            for here, there in pairwise(sorted({step, *stops, spec.steps})):
                if here in passed:
                    passed[here].append(part)
                part = finish(
                    policy.predict, policy.process, part, own, sigmas[here : there + 1], spec.guidance_scale,
                    spec.sampler,
                )  # fmt: skip
        images.append(policy.decode(part))
        scores.append(bench.score(images[-1], [prompts[i] for i in mine]))
    return {stop: torch.cat(parts) for stop, parts in passed.items()}, torch.cat(images), torch.cat(scores)
