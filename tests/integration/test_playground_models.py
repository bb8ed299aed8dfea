"""The shipped models do what the README says, and plain diffusers draws what diffrl draws."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from diffrl.drawing import Drawing, evaluate, sample
from diffrl.evaluation import Evaluator
from diffrl.prompts import load_prompts
from diffrl.records.progress import number
from diffrl.report.drawn import write_drawn
from diffrl.resources import shipped
from diffrl.rewards.registry import load_reward
from diffrl.rewards.scoring import Scorer
from diffrl.rollout import initial_noise
from diffrl_playground.renderer import draw
from diffrl_playground.scenes import sample_caption
from scripts.playground.taste import taste

ASSETS = shipped("assets", "playground")


@pytest.fixture(scope="module")
def pictures() -> tuple[list[str], np.ndarray]:
    rng = np.random.default_rng(7)
    prompts = [sample_caption(rng, "test").text() for _ in range(128)]
    return prompts, np.stack([draw(prompt, rng) for prompt in prompts])


def as_tensor(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255


def test_weights_are_within_thirty_megabytes_and_without_pickle() -> None:
    files = [path for path in ASSETS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 30e6
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".txt", ".md"}
    record = json.loads((ASSETS / "training.json").read_text())
    assert {"autoencoder", "texts", "generator", "clip", "preference"} <= record["stages"].keys()


def test_generator_is_imperfect_as_meant() -> None:
    """It draws much better than chance, and not everything: something to learn, something to break."""
    drawing = Drawing("playground")
    policy = drawing.policy()
    spec = drawing.spec(policy)
    scorer = Scorer({"strict": load_reward("playground", mode="strict")})
    prompts = load_prompts("playground/compositional/test")[:64]
    evaluator = Evaluator(policy, scorer, lambda x: x.flatten(1)[:, :8], spec, per_prompt=1, batch_size=64)
    found = evaluator.score(prompts, "default", 3)
    assert 0.2 < float(found.scores.mean()) < 0.98


@pytest.mark.long
def test_the_distilled_student_draws_better_in_four_steps() -> None:
    """Than the model itself in four; `playground/turbo` is a LoRA that becomes part of it."""
    scorer = Scorer({"verifier": load_reward("playground"), "artefact": load_reward("artefact")})
    prompts = load_prompts("playground/compositional/test")[:64]
    found = []
    for merge in (None, "playground/turbo"):
        drawing = Drawing("playground", steps=4, merge=merge)
        policy = drawing.policy()
        evaluator = Evaluator(policy, scorer, lambda x: x.flatten(1)[:, :8], drawing.spec(policy), 2, 64)
        scores = evaluator.score(prompts, "default", 3).scores
        found.append(scores.mean(0).tolist())
    (plain, _), (turbo, _) = found
    assert turbo > plain + 0.03


def test_clip_knows_the_world(pictures) -> None:
    """Most unseen pictures are nearer to their own prompt than to nine tenths of 128 (prompts fit others, too)."""
    prompts, images = pictures
    clip = load_reward("clip")
    image = clip.embed_image(as_tensor(images))
    text = clip.embed_text(prompts)
    logits = torch.nn.functional.normalize(image, dim=1) @ torch.nn.functional.normalize(text, dim=1).T
    above = (logits > logits.diagonal()[:, None]).float().mean(1)
    assert float((above < 0.1).float().mean()) > 0.8


def test_aesthetic_head_follows_the_taste_on_true_pictures(pictures) -> None:
    prompts, images = pictures
    predicted = load_reward("aesthetic")(as_tensor(images), prompts, [{}] * len(prompts)).numpy()
    assert np.corrcoef(predicted, taste(images))[0, 1] > 0.7


def test_plain_diffusers_draws_the_same_picture(tmp_path) -> None:
    """A trained LoRA folder through diffusers' own loader gives what `diffrl sample --lora` gives."""
    from diffusers import StableDiffusion3Pipeline
    from PIL import Image

    from diffrl.policy import LoraSpec, load_policy

    policy = load_policy("playground", lora=LoraSpec(rank=4, alpha=8))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in policy.trainable:
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    policy.save_lora(tmp_path / "lora")
    prompt = "a red circle left of a blue square on white"
    (tmp_path / "prompts.txt").write_text(prompt + "\n")
    drawn = sample(
        model="playground",
        prompts=str(tmp_path / "prompts.txt"),
        lora=str(tmp_path / "lora"),
        seed=5,
        rewards={"playground": {}},
        out=tmp_path / "out",
    )
    row = json.loads((tmp_path / "out" / "images.jsonl").read_text())
    assert row["prompt"] == prompt and 0 <= row["scores"]["playground"] <= 1
    page = write_drawn(tmp_path / "out", drawn).read_text()
    assert prompt in page and page.count("<img ") == 1 and f"playground {number(row['scores']['playground'])}" in page
    ours = np.asarray(Image.open(next((tmp_path / "out").glob("00000-00-*.png")))).astype(int)
    pipe = StableDiffusion3Pipeline.from_pretrained(ASSETS / "pipeline", text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(tmp_path / "lora")
    latents = initial_noise(policy.latent_shape, [prompt], [0], seed=5)
    call = {"num_inference_steps": 10, "guidance_scale": 1.0, "max_sequence_length": 0, "height": 64, "width": 64}
    theirs = np.asarray(pipe(prompt, latents=latents, **call).images[0]).astype(int)
    assert np.abs(ours - theirs).max() <= 1  # rounding to 8 bits
    pipe.unload_lora_weights()
    plain = np.asarray(pipe(prompt, latents=latents, **call).images[0]).astype(int)
    assert np.abs(ours - plain).max() > 20  # the LoRA does something


def test_evaluate_hands_parameters_to_the_rewards(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a red circle left of a blue square on white\n")
    redness = f"{Path(__file__).parents[1] / 'data' / 'redness.py'}:Redness"
    common = {"model": "playground", "prompts": str(tmp_path / "prompts.txt"), "seed": 5, "steps": 2, "per_prompt": 2}
    plain, squared = (
        evaluate(rewards={redness: given}, out=tmp_path / "scores.json", **common) for given in ({}, {"power": 2.0})
    )
    assert squared["rewards"] == {redness: {"power": 2.0}}
    for one, two in zip(plain["scores"][redness], squared["scores"][redness], strict=True):
        assert two == pytest.approx(one**2, abs=2e-6) and two > 0
