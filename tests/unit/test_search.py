"""Search: its limits are plain sampling to the bit, every forward is counted, and a search goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from broken import broken_after
from children import on_two
from launching import joined
from test_rollout import Known
from torch import Tensor

from diffrl.cli.main import main
from diffrl.errors import UserError
from diffrl.forward import VariancePreserving
from diffrl.prompts import Prompt
from diffrl.rollout import generate
from diffrl.sampling import SamplerSpec
from diffrl_lab.search import methods
from diffrl_lab.search.methods import Bench, Finished, Generation
from diffrl_lab.search.run import Settings, search

PROMPTS = [Prompt("red a"), Prompt("red b"), Prompt("red c")]
REDNESS = f"{Path(__file__).parents[1] / 'data' / 'redness.py'}:Redness"
SDE, ODE = SamplerSpec("cps", 6), SamplerSpec("euler", 6)


def redness(images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
    return (images[:, 0] - images[:, 1]).mean((1, 2))


def bench(spec: SamplerSpec = ODE, policy: Any = None, batch_size: int = 12) -> Bench:
    def score(images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        return redness(images, prompts)[:, None]

    if policy is None:
        policy = Known()
        policy.decode = lambda latents, grad=False: latents.sigmoid()
    return Bench(policy, spec, 3, batch_size, "default", score, lambda scores: scores[..., 0].double(), redness)


def by_prompt(finished: Sequence[Finished]) -> list[Tensor]:
    """Each prompt's images in their order."""
    rows = [[f.images[i] for f in finished for i, owner in enumerate(f.prompt) if owner == p] for p in range(3)]
    return [torch.stack(images) for images in rows]


def plain(spec: SamplerSpec, per_prompt: int) -> Tensor:
    one = bench(spec)
    drawn = generate(one.policy, PROMPTS, spec, seed=3, per_prompt=per_prompt, batch_size=12)
    return torch.cat([images for _, images in drawn]).unflatten(0, (3, per_prompt))


def test_one_particle_and_a_temperature_without_end_are_plain_sampling_to_the_bit() -> None:
    one, alone = by_prompt(list(methods.particles(bench(SDE), PROMPTS, 6, 1, 0.01))), plain(SDE, 1)
    hot, wanted = by_prompt(list(methods.particles(bench(SDE), PROMPTS, 4 * 6, 4, 1e9))), plain(SDE, 4)
    cold = by_prompt(list(methods.particles(bench(SDE), PROMPTS, 4 * 6, 4, 0.01)))
    for p in range(3):
        assert torch.equal(one[p], alone[p]) and torch.equal(hot[p], wanted[p])
        assert not torch.equal(cold[p], wanted[p])


def test_best_of_n_is_sample_s_images_and_evolution_without_generations() -> None:
    wanted = plain(ODE, 4)
    drawn = by_prompt(list(methods.best_of_n(bench(), PROMPTS, 4 * 6 + 5)))
    evolved = by_prompt(list(methods.evolution(bench(), PROMPTS, [Generation(0, 4)])))
    unguided = by_prompt(list(methods.gradient(bench(), PROMPTS, 4 * 6, 0.0)))
    for p in range(3):
        assert torch.equal(drawn[p], wanted[p]) and torch.equal(evolved[p], wanted[p])
        torch.testing.assert_close(unguided[p], wanted[p])


def test_refining_draws_again_from_what_the_critic_writes_and_keeps_the_prompt_as_the_yardstick() -> None:
    """With the prompt itself as the answer it is best-of-N; what is good is left alone, at no further cost."""
    asked: list[list[str]] = []

    def rewrite(images: Tensor, prompts: Sequence[Prompt]) -> list[str]:
        asked.append([prompt.text for prompt in prompts])
        return [f"{prompt.text}!" for prompt in prompts]

    wanted = plain(ODE, 3)
    same = by_prompt(list(methods.refine(bench(), PROMPTS, 3 * 6, lambda images, prompts: [p.text for p in prompts])))
    for p in range(3):
        torch.testing.assert_close(same[p], wanted[p])
    finished = list(methods.refine(bench(), PROMPTS, 3 * 6 + 5, rewrite))
    texts = [prompt.text for prompt in PROMPTS]
    assert [f.origin for f in finished] == [["drawn"] * 3] + [[f"from: {text}!" for text in texts]] * 2
    assert asked == [texts] * 3 and [f.forwards[0] for f in finished] == [6, 12, 18]
    first = redness(finished[0].images, [])
    torch.testing.assert_close(torch.stack([images[0] for images in by_prompt(finished)]), wanted[:, 0])
    good = float(first.sort().values[1])
    later = list(methods.refine(bench(), PROMPTS, 2 * 6, rewrite, good))[1]
    assert later.prompt == [int(first.argmin())]


def test_one_text_for_two_prompts_is_drawn_once() -> None:
    finished = list(methods.refine(bench(), PROMPTS, 12, lambda images, prompts: ["red z"] * len(prompts)))
    assert torch.equal(finished[1].images[0], finished[1].images[2]) and finished[1].prompt == [0, 1, 2]


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("method", ["best-of-n", "particles", "evo", "gradient"])
def test_every_forward_is_counted(method: str, guidance: float) -> None:
    spec = (SDE if method == "particles" else ODE).model_copy(update={"guidance_scale": guidance})
    one, budget = bench(spec), 200
    plan = methods.generations(budget, 6, one.cost)
    finished = {
        "best-of-n": lambda: methods.best_of_n(one, PROMPTS, budget),
        "particles": lambda: methods.particles(one, PROMPTS, budget, 5, 0.5),
        "evo": lambda: methods.evolution(one, PROMPTS, plan),
        "gradient": lambda: methods.gradient(one, PROMPTS, budget, 1.0),
    }[method]()
    spent = [0, 0, 0]
    for batch in finished:
        for prompt, forwards in zip(batch.prompt, batch.forwards, strict=True):
            assert forwards >= spent[prompt]
            spent[prompt] = forwards
    rows = sum(call["size"] * (2 if call["guidance"] != 1 else 1) for call in one.policy.calls)  # type: ignore[attr-defined]
    assert rows == sum(spent) and max(spent) <= budget and min(spent) > budget - 6 * one.cost


def test_what_follows_the_value_finds_more_of_it_than_chance() -> None:
    budget = 40 * 6

    def best(finished: Sequence[Finished]) -> float:
        return float(torch.stack([redness(images, []).max() for images in by_prompt(finished)]).mean())

    chance = best(list(methods.best_of_n(bench(), PROMPTS, budget)))
    assert best(list(methods.evolution(bench(), PROMPTS, methods.generations(budget, 6, 1)))) > chance
    assert best(list(methods.gradient(bench(), PROMPTS, budget, 200.0))) > chance
    steered = list(methods.particles(bench(SDE), PROMPTS, budget, 8, 0.3))
    level = float(torch.cat([f.scores for f in steered]).mean())
    assert level > float(redness(plain(SDE, 8).flatten(0, 1), []).mean())


def test_ddpm_models_are_searched_too() -> None:
    policy = Known(process=VariancePreserving(torch.linspace(0.999, 0.01, 50)))
    spec = SamplerSpec("ddim", 6, noise_level=0.0)
    one = bench(spec, policy)
    assert len(list(methods.evolution(one, PROMPTS, methods.generations(300, 6, 1)))) == 5
    stochastic = bench(SamplerSpec("ddim", 6, noise_level=1.0), policy)
    assert len(list(methods.particles(stochastic, PROMPTS, 60, 5, 0.5))) >= 2


# ---- the command


def settings(**more: Any) -> Settings:
    return Settings(rewards={REDNESS: {}}, budget=24, methods=("best-of-n", "evo"), **more)


def run(model: str, out: Path, prompts: Path, **more: Any) -> dict[str, Any]:
    given = {"model": model, "prompts": str(prompts), "steps": 4, "batch_size": 8}
    return search(settings(watch={"jpeg": {}}), out=out, **{**given, **more})


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("red a\nred b\nred c\n")
    return path


def test_a_search_is_the_same_when_it_goes_on(model: str, prompts: Path, tmp_path: Path) -> None:
    whole = run(model, tmp_path / "whole", prompts)
    assert list(whole["arms"]) == ["best-of-n", "evo"] and whole["arms"]["best-of-n"]["forwards_spent"] == 24
    first, last = (whole["arms"]["evo"]["curve"][i] for i in (0, -1))
    assert last["Redness"] >= first["Redness"] and last["forwards"] == 24 and "jpeg" in last
    assert len(list((tmp_path / "whole" / "images").glob("*.png"))) == 12
    page = (tmp_path / "whole" / "report.html").read_text()
    assert "Redness" in page and "red b" in page and page.count("data:image/png") == 12

    with broken_after(4):
        run(model, tmp_path / "broken", prompts)
    with pytest.raises(UserError, match="another seed"):
        run(model, tmp_path / "broken", prompts, seed=1)
    again = run(model, tmp_path / "broken", prompts)
    assert again["arms"] == whole["arms"]
    one, other = ((tmp_path / name / "search.jsonl").read_text() for name in ("whole", "broken"))
    assert one == other and not (tmp_path / "broken" / "parts").exists()


def _process(rank: int, model: str, prompts: Path, folder: Path) -> None:
    with joined(rank, folder):
        run(model, folder / "two", prompts)


@pytest.mark.long
def test_one_process_equals_two(model: str, prompts: Path, tmp_path: Path) -> None:
    on_two(_process, model, prompts, tmp_path)
    run(model, tmp_path / "one", prompts)
    one, two = (
        [json.loads(x) for x in (tmp_path / n / "search.jsonl").read_text().splitlines()] for n in ("one", "two")
    )
    for a, b in zip(one, two, strict=True):
        assert (a["arm"], a["prompt"], a["candidates"]["forwards"]) == (
            b["arm"],
            b["prompt"],
            b["candidates"]["forwards"],
        )
        assert a["candidates"]["values"] == pytest.approx(b["candidates"]["values"], abs=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "3"], "--budget: 3 forwards for each prompt, but one image takes 4: 4 steps of 1 forward"),
        (["--method", "evolution"], '--method: unknown method "evolution" (nearest: "evo")'),
        (["--method", "gradient"], '--method: gradient needs differentiable rewards, and "Redness" is not one'),
        (["--method", "particles", "--batch-size", "4"], "--population: 8 particles are resampled together, but"),
        (["--base"], "--base: compares with the model without its LoRA; name one with --lora"),
        (["--watch", "diversity", "diversity.model=playground"], '--watch: "diversity" compares the images of a group'),
        (["Redness.weight=0"], "weight: expected a number that is not 0, got 0"),
        (["--sampler", "dpm2"], "--sampler: evo goes on from single states"),
        (["--temperature", "0"], 'expected a number above 0, got "0"'),
    ],
)
def test_refusals_are_one_line(
    words: list[str], message: str, model: str, prompts: Path, tmp_path: Path, capsys: Any
) -> None:
    given = ["--rewards", REDNESS, "--prompts", str(prompts), "--budget", "24", "--steps", "4", "--out"]
    assert main(["search", model, *given, str(tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "out").exists()
