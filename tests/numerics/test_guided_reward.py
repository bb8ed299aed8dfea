"""D2-Align against literal float64 transcriptions (methods section 6), and its gradients against finite differences."""

from __future__ import annotations

import contextlib
import copy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats
from tiny import SPEC, inputs, scramble

from diffrl.forward import FlowMatching, Prediction, VariancePreserving
from diffrl.methods.d2align.corrected import Corrected, guided_embedding
from diffrl.methods.d2align.direction import learn, reconstructed, word_direction
from diffrl.methods.direct.objective import Direct
from diffrl.methods.direct.rows import DirectRows
from diffrl.objectives.rows import Rows
from diffrl.policy import base as policy_base
from diffrl.policy import load_policy
from diffrl.prompts import Prompt
from diffrl.samplers import one_step

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from embedder import Embedder

D, SHAPE = 12, (3, 4, 4)


def fixed(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.square().sum(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("omega", [0.0, 0.5, 1.0, 1.5, 3.0])
def test_the_guided_embedding_and_its_reward_are_the_papers(omega: float) -> None:
    e_text, e_img, b_v = unit(fixed(0, 5, D)), unit(fixed(1, 5, D)), 0.7 * fixed(2, D)
    ours = guided_embedding(e_text, b_v, omega)
    for i in range(5):
        plus = (e_text[i] + b_v) / sum(float(x) ** 2 for x in e_text[i] + b_v) ** 0.5
        minus = (e_text[i] - b_v) / sum(float(x) ** 2 for x in e_text[i] - b_v) ** 0.5
        tilde = minus + omega * (plus - minus)
        torch.testing.assert_close(ours[i], tilde, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close((e_img[i] * ours[i]).sum(), torch.dot(e_img[i], tilde), rtol=1e-12, atol=1e-14)
    ends = {0.0: unit(e_text - b_v), 0.5: (unit(e_text - b_v) + unit(e_text + b_v)) / 2, 1.0: unit(e_text + b_v)}
    if omega in ends:
        torch.testing.assert_close(ours, ends[omega], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(guided_embedding(e_text, 0 * b_v, omega), e_text, rtol=1e-12, atol=1e-14)


def test_stage_1_takes_adams_steps_up_the_guided_reward() -> None:
    """Two steps by hand: the gradient by finite differences of the transcription, then Adam's update."""
    reward: Any = Embedder()
    e_img, e_text, owner = unit(fixed(0, 9, D)), unit(fixed(1, 3, D)), torch.arange(9) % 3
    rate, omega = 0.01, 1.5

    def loss(b: torch.Tensor, rows: torch.Tensor) -> float:
        text = e_text[owner[rows]]
        minus, plus = unit(text - b), unit(text + b)
        return -float((e_img[rows] * (minus + omega * (plus - minus))).sum(-1).mean())

    from diffrl.seeds import generator

    b, m, v = torch.zeros(D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64), torch.zeros(D).double()
    for step in range(2):
        rows = torch.randint(9, (4,), generator=generator(7, "d2align", step))
        slopes = [(loss(b + 1e-6 * e, rows) - loss(b - 1e-6 * e, rows)) / 2e-6 for e in torch.eye(D).double()]
        gradient = torch.tensor(slopes, dtype=torch.float64)
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        b = b - rate * (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
    settings: dict[str, Any] = {"omega": omega, "learning_rate": rate, "batch_size": 4, "seed": 7}
    ours, course = learn(reward, e_img, e_text, owner, steps=2, **settings)
    torch.testing.assert_close(ours, b, rtol=1e-6, atol=1e-9)
    assert course[0] == pytest.approx([0, -loss(0 * b, torch.arange(9)), 0.0])
    assert course[-1] == pytest.approx([2, -loss(b, torch.arange(9)), float(b.norm())])
    # A long way up, to where no small step helps any more.
    far, course = learn(reward, e_img, e_text, owner, steps=300, **{**settings, "batch_size": 64})
    assert [int(step) for step, _, _ in course] == list(range(0, 301, 5))  # its course has 60 points
    everything = torch.arange(9)
    assert all(loss(far, everything) < loss(far + 0.3 * fixed(s, D), everything) for s in range(20))


@pytest.mark.parametrize("process", [FlowMatching(), VariancePreserving(torch.linspace(0.999, 0.01, 50).double())])
def test_true_noise_and_a_perfect_velocity_give_x0_back(process: Any) -> None:
    x0, eps = fixed(0, 5, *SHAPE), fixed(1, 5, *SHAPE)
    t = torch.tensor([1.0, 0.9, 0.5, 0.2, 0.05], dtype=torch.float64)
    t_next = torch.tensor([0.9, 0.5, 0.2, 0.05, 0.0], dtype=torch.float64)
    x_t = process.add_noise(x0, eps, t)
    perfect = Prediction(x0=x0, eps=eps, v=process.velocity(x0, eps, t))
    torch.testing.assert_close(one_step(x_t, perfect, t, t_next, eps, process), x0, rtol=1e-11, atol=1e-12)


def test_reconstruction_is_the_papers_step_by_step() -> None:
    x0, eps, wrong = fixed(0, 4, *SHAPE), fixed(1, 4, *SHAPE), fixed(2, 4, *SHAPE)
    t, t_next = torch.tensor([1.0, 0.8, 0.5, 0.1]).double(), torch.tensor([0.8, 0.5, 0.1, 0.0]).double()
    process, rows = FlowMatching(), []
    for i in range(4):
        x_t = (1 - t[i]) * x0[i] + t[i] * eps[i]
        v = eps[i] - x0[i] + wrong[i]
        x_next = x_t + (t_next[i] - t[i]) * v
        rows.append((x_next - t_next[i] * eps[i]) / (1 - t_next[i]))
        # and the law that the docstring states
        by_law = x0[i] + (t_next[i] - t[i]) / (1 - t_next[i]) * wrong[i]
        torch.testing.assert_close(rows[-1], by_law, rtol=1e-11, atol=1e-12)
    x_t = process.add_noise(x0, eps, t)
    prediction = process.from_velocity(x_t, eps - x0 + wrong, t)
    torch.testing.assert_close(one_step(x_t, prediction, t, t_next, eps, process), torch.stack(rows))


def test_stage_1_can_embed_what_algorithm_1_does() -> None:
    """x0 with its own eps at a uniform level of the schedule, one step of the pretrained model, the noise out."""
    schedule, count = torch.tensor([1.0, 0.8, 0.5, 0.1, 0.0], dtype=torch.float64), 400
    x0, seen = fixed(0, count, *SHAPE), []

    class Frozen:
        process = FlowMatching()

        def predict(self, x_t, t, cond, guidance):
            seen.append((x_t, t, guidance, self.asked))
            return self.process.from_velocity(x_t, 0.3 * x_t + 1, t)

        @contextlib.contextmanager
        def adapter(self, name):
            self.asked = name
            yield

    names = [(7, "d2align", "a red dog", member) for member in range(count)]
    policy: Any = Frozen()
    found = reconstructed(policy, x0, None, names, schedule, 2.5)  # type: ignore[arg-type]
    (x_t, t, guidance, snapshot), following = seen[0], dict(zip(schedule.tolist(), schedule.tolist()[1:], strict=False))
    assert guidance == 2.5 and snapshot is None
    assert stats.chisquare([int((t == level).sum()) for level in schedule[:-1]]).pvalue > 0.01
    eps = torch.stack([(x_t[i] - (1 - t[i]) * x0[i]) / t[i] for i in range(count)])
    assert stats.kstest(eps.flatten().numpy(), "norm").pvalue > 0.01 and len(eps.unique(dim=0)) == count
    for i in range(20):
        t_next = following[float(t[i])]
        x_next = x_t[i] + (t_next - t[i]) * (0.3 * x_t[i] + 1)
        torch.testing.assert_close(found[i], (x_next - t_next * eps[i]) / (1 - t_next), rtol=1e-9, atol=1e-9)
    alone = reconstructed(policy, x0[5:6], None, names[5:6], schedule, 2.5)  # type: ignore[arg-type]
    torch.testing.assert_close(alone, found[5:6])  # an image's level and noise are its own


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Any:
    return load_policy(str(tiny_model), lora=SPEC)


def row_of(policy: Any, dtype: torch.dtype = torch.float32) -> Rows:
    x0, t, cond = inputs(policy, rows=4)
    eps = torch.randn(x0.shape, generator=torch.Generator().manual_seed(5))
    x0, eps, t = x0.to(dtype), eps.to(dtype), t.to(dtype)
    groups = torch.tensor([0, 0, 1, 1])
    prompts = [Prompt("red a"), Prompt("blue b")]
    x_t = policy.process.add_noise(x0, eps, t)
    pairs = torch.zeros(4, 2, dtype=torch.int64)
    rows = DirectRows(
        x0, x_t, t, cond, torch.zeros(4, 1), groups, False, pairs, t_next=t - 0.15, eps=eps, prompts=prompts
    )
    cond.embeds, cond.pooled = cond.embeds.to(dtype), cond.pooled.to(dtype)
    return rows


def test_the_loss_is_minus_the_reward_of_the_reconstruction(tiny: Any) -> None:
    rewards = {"a": Embedder(seed=1), "b": Embedder(seed=2, only="blue")}
    objective = Direct(rewards, [1.0, 0.5])
    rows = row_of(tiny)
    phi = objective.scalars(tiny, rows)
    with torch.no_grad():
        x0 = one_step(rows.x_t, rows.prediction, rows.t, rows.t_next, rows.eps, tiny.process)  # type: ignore[arg-type]
        images = tiny.decode(x0)
        texts = ["red a", "red a", "blue b", "blue b"]
        a, b = (reward(images, texts, [{}] * 4) for reward in rewards.values())
        expected = a + 0.5 * b * torch.tensor([0.0, 0.0, 1.0, 1.0])  # b does not judge "red a"
    torch.testing.assert_close(phi[:, 0].detach(), expected)
    torch.testing.assert_close(objective.loss(phi, rows).detach(), -expected.sum()[None])
    objective.rule = replace(objective.rule, columns="each+rewards")
    each = objective.scalars(tiny, rows)
    torch.testing.assert_close(each.detach(), torch.stack([a, 0.5 * b * torch.tensor([0.0, 0.0, 1.0, 1.0])], dim=1))
    assert objective.loss(each, rows).shape == (2,)


def in_float64(policy: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A copy, scrambled: where it and the network ask for float32, as they do in training, they get float64."""
    policy = copy.deepcopy(policy)
    scramble(policy, std=0.1)
    policy.network.double()
    policy.vae.double()
    names = {name: getattr(torch, name) for name in ("cat", "set_grad_enabled", "no_grad", "autocast")}
    monkeypatch.setattr(policy_base, "torch", SimpleNamespace(**names, float32=torch.float64))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return policy


def test_gradients_through_decode_and_reward_are_the_slopes(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole chain in float64: LoRA, velocity, reconstruction, decoder, corrected reward."""
    policy = in_float64(tiny, monkeypatch)
    reward: Any = Corrected(Embedder())
    reward.direction, reward._vector = SimpleNamespace(norm=1.0), 0.5 * fixed(9, D)
    rows = row_of(policy, torch.float64)
    objective = Direct({"tiny": reward}, [1.0])

    def total() -> torch.Tensor:
        return objective.loss(objective.scalars(policy, rows), rows).sum()

    parameters = [parameter for _, parameter in policy.trainable]
    gradients = torch.autograd.grad(total(), parameters)
    assert gradients[0].dtype == torch.float64
    directions = [fixed(i, *p.shape) for i, p in enumerate(parameters)]
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True))
    values = []
    with torch.no_grad():
        for h in (1e-6, -1e-6):
            for p, d in zip(parameters, directions, strict=True):
                p.add_(h * d)
            values.append(float(total()))
            for p, d in zip(parameters, directions, strict=True):
                p.sub_(h * d)
    assert abs(slope) > 1e-3
    assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope, rel=1e-5)


def test_chunks_and_checkpoints_do_not_change_the_gradient(tiny: Any) -> None:
    policy = copy.deepcopy(tiny)
    scramble(policy, std=0.1)
    parameters = [parameter for _, parameter in policy.trainable]

    def gradient(objective: Direct) -> torch.Tensor:
        rows = row_of(policy)
        objective.before_step(policy, None)  # type: ignore[arg-type]
        loss = objective.loss(objective.scalars(policy, rows), rows).sum()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])

    whole = gradient(Direct({"tiny": Embedder()}, [1.0]))
    assert not policy.vae.is_gradient_checkpointing
    parts = gradient(Direct({"tiny": Embedder()}, [1.0], decode_chunk=3))
    assert policy.vae.is_gradient_checkpointing
    assert whole.norm() > 0
    torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-6 * float(whole.abs().max()))


def test_stage_one_resumes_to_the_bit_from_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffrl.methods.d2align.direction.SAVE_EVERY", 3)
    e_img, e_text = unit(fixed(0, 24, D)).float(), unit(fixed(1, 6, D)).float()
    settings: dict[str, Any] = {"omega": 1.5, "steps": 10, "learning_rate": 1e-2, "batch_size": 4, "seed": 3}
    kept: list[tuple[int, tuple[dict[str, torch.Tensor], dict[str, Any]]]] = []

    def keep(step: int, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        kept.append((step, ({name: x.detach().clone() for name, x in tensors.items()}, copy.deepcopy(state))))

    owner = torch.arange(24) // 4
    vector, course = learn(Embedder(), e_img, e_text, owner, **settings, keep=keep)
    assert [step for step, _ in kept] == [3, 6, 9] and len(course) == 11
    for _, resume in kept:
        again, told = learn(Embedder(), e_img, e_text, owner, **settings, resume=resume)
        assert torch.equal(again, vector) and told == course


def test_chunks_of_the_decoder_are_as_large_as_asked() -> None:
    sizes: list[int] = []

    def decode(part: torch.Tensor, chunk: int | None, grad: bool) -> torch.Tensor:
        sizes.append(len(part))
        assert grad and chunk == (None if len(part) == 5 else len(part))
        return part

    class Mean:
        def __call__(self, images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
            return images.mean(dim=(1, 2, 3))

    latents, prompts = fixed(4, 5, *SHAPE), [Prompt(str(i)) for i in range(5)]
    policy: Any = SimpleNamespace(decode=decode)
    for chunk, wanted in ((None, [5]), (2, [2, 2, 1])):
        sizes.clear()
        scores = Direct({"mean": Mean()}, [1.0], decode_chunk=chunk).scores(policy, latents, prompts)  # type: ignore[dict-item]
        assert sizes == wanted
        torch.testing.assert_close(scores[:, 0], latents.mean(dim=(1, 2, 3)))


def test_a_words_direction_is_what_it_adds_on_average() -> None:
    reward, texts = Embedder(), ["a red dog", "two cats", "a hat"]
    with_word = torch.stack([reward.embed_text([f"{text}, real"])[0] for text in texts])
    plain = torch.stack([reward.embed_text([text])[0] for text in texts])
    found = word_direction(reward, texts, "real")  # type: ignore[arg-type]
    torch.testing.assert_close(found, (with_word - plain).sum(0) / 3)
    assert float(found.norm()) > 0.1
