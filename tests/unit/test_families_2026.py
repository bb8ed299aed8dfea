"""All families on tiny pipelines of their true classes, and `diffrl models`.

Every check of every family is `make test-long`; `make test` has a covering set: each family's picture beside the plain
pipeline's once, the checks that take a second on six families, and the others on the family where they could go wrong
most easily.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from covering import some
from PIL import Image
from tiny import averages
from tiny_models.classic import tiny_flux, tiny_sd, tiny_sd3
from tiny_models.recent import TINY, make
from torch import Tensor

from diffrl.cli.main import main
from diffrl.config import Config
from diffrl.conformance.check import CHECKS, Failed, Subject, scramble
from diffrl.errors import UserError
from diffrl.methods.grpo.objective import GRPO
from diffrl.policy import Policy, find_family, load_policy
from diffrl.prompts import Prompt
from diffrl.rollout import collect
from diffrl.run.device import prepare_engine
from diffrl.samplers import SamplerSpec
from diffrl.user_files import import_file

MAIN = [name for name in TINY if not name.endswith(("-turbo", "-distilled"))]
OLDER: dict[str, Callable[[Path], Path]] = {
    "sd3": lambda folder: tiny_sd3(folder, t5=True, dual_attention=True, max_sequence_length=24),
    "flux": tiny_flux,
    "flux-schnell": lambda folder: tiny_flux(folder, dev=False),
    "sd": tiny_sd,
    "sdxl": lambda folder: tiny_sd(folder, xl=True),
}
CHEAP = ("levels", "company", "lora", "checkpointing")
EXAMPLE = Path(__file__).parents[2] / "examples" / "families" / "auraflow.py"
COVERING = [("z-image", "bf16"), ("krea2", "ratio"), ("sd", "memory")]


@pytest.fixture(scope="session")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    """The tiny model of a name, made when it is first asked for."""
    made: dict[str, Subject] = {}

    def find(name: str) -> Subject:
        if name not in made:
            folder = tmp_path_factory.mktemp("families") / name
            (OLDER[name] if name in OLDER else partial(make, name))(folder)
            made[name] = Subject(str(folder), TINY[name].resolution if name in TINY else None)
        return made[name]

    return find


@pytest.mark.parametrize("check", CHEAP)
@pytest.mark.parametrize("name", ["sd3", "flux", "sd", "qwen-image", "sana", "hidream"])
def test_cheap_checks(subject: Callable[[str], Subject], name: str, check: str) -> None:
    CHECKS[check](subject(name))


@pytest.mark.parametrize("name", MAIN)
def test_the_same_picture(subject: Callable[[str], Subject], name: str) -> None:
    CHECKS["picture"](subject(name))


@pytest.mark.parametrize(("name", "check"), COVERING)
def test_covering(subject: Callable[[str], Subject], name: str, check: str) -> None:
    CHECKS[check](subject(name))


def test_recomputing_takes_the_mask_of_its_own_forward(subject: Callable[[str], Subject]) -> None:
    found = subject("chroma")
    x, t = found.noise(2), torch.tensor([0.8, 0.4])

    def gradients(policy: Policy) -> list[Tensor]:
        scramble(policy)
        cond = policy.encode(["a hat", "two cats, a hat and a long table with nine chairs"])
        first, second = (policy.predict(x, t, cond.select(torch.tensor(rows))).v for rows in ([0, 1], [1, 0]))
        (first.square().mean() + second.square().mean()).backward()
        return [parameter.grad for _, parameter in policy.trainable if parameter.grad is not None]

    recomputed = found.policy()
    recomputed.enable_gradient_checkpointing()
    torch.testing.assert_close(gradients(recomputed), gradients(found.policy()))


@pytest.mark.long
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", [*OLDER, *TINY])
def test_everything(subject: Callable[[str], Subject], name: str, check: str) -> None:
    CHECKS[check](subject(name))


@pytest.mark.parametrize(("turbo", "base"), [("krea2-turbo", "krea2"), ("z-image-turbo", "z-image")])
def test_distilled_students_have_schedules_of_their_own(
    subject: Callable[[str], Subject], turbo: str, base: str
) -> None:
    CHECKS["levels"](subject(turbo))
    fast, slow = (subject(name).policy().timesteps(8) for name in (turbo, base))
    assert not torch.allclose(fast, slow)


# ---- the checks find what is wrong


def broken(subject: Subject, monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> Subject:
    """A fresh subject whose family has another `name`."""
    family = type(subject.fp32.backbone)
    monkeypatch.setattr(family, name, value)
    return Subject(subject.model, subject.resolution)


def test_checks_find_a_wrong_sign(subject: Callable[[str], Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    found = subject("z-image")
    forward = type(found.fp32.backbone).forward
    wrong = broken(found, monkeypatch, "forward", lambda *arguments: -forward(*arguments))
    with pytest.raises(Failed, match="pictures differ"):
        CHECKS["picture"](wrong)


def test_checks_find_dead_layers(subject: Callable[[str], Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    found = Subject(subject("qwen-image").model, 16)
    found.fp32  # noqa: B018
    last = "transformer_blocks.1.attn.to_q"
    monkeypatch.setattr(found.fp32.backbone, "dead_targets", (last,))
    with pytest.raises(Failed, match=f"{last}, but it has a gradient"):
        CHECKS["lora"](found)


def test_checks_find_padding_that_counts(subject: Callable[[str], Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    from diffrl.policy import Conditioning

    monkeypatch.setattr(Conditioning, "padded", property(lambda self: False))
    with pytest.raises(Failed, match="differs by"):
        CHECKS["company"](subject("qwen-image"))


# ---- strangers


FAMILY = '''
from diffrl.families.z_image import ZImage


class Mine(ZImage):
    """A stranger's own."""


class Odd:
    pass
'''

FLIPPED = """

class Flipped(Mine):
    def from_vae(self, decoded):
        return super().from_vae(decoded).flip(-2)
"""


def test_a_family_of_ones_own(subject: Callable[[str], Subject], tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FAMILY)
    found = subject("z-image")
    policy = load_policy(found.model, lora=None, resolution=16, family=f"{path}:Mine")
    assert type(policy.backbone).__name__ == "Mine"
    for name, message in (
        (f"{path}:Odd", "is not a model family: it has no load, encode, forward"),
        (f"{path}:Mein", 'no "Mein" in .* .nearest: "Mine".'),
        ("nowhere.py:Mine", 'no family file "nowhere.py"'),
        ("mine", 'unknown family "mine".*path/to/file.py:NAME'),
    ):
        with pytest.raises(UserError, match=message):
            find_family("ZImagePipeline", name)
    with pytest.raises(UserError, match=r'QwenImagPipeline is of no known family .nearest: "QwenImagePipeline".'):
        find_family("QwenImagPipeline")


def test_the_command(subject: Callable[[str], Subject], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FAMILY)
    words = ["models", "check", subject("z-image").model, "--resolution", "16", "--only", "levels,lora"]
    assert main([*words, "--family", f"{path}:Mine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok     levels") and lines[-1] == "2 of 2 checks passed"
    assert main(["models", "list", "--markdown"]) == 0
    text = capsys.readouterr().out
    assert all(f"| {pipeline} |" in text for pipeline in ("QwenImagePipeline", "SanaPipeline", "FluxPipeline"))
    for words, message in (
        (["models", "check"], "required: FOLDER|FILE.py:CLASS"),
        (["models", "chek", "x"], 'nearest: "check"'),
        (["models", "list", "--only", "x"], 'unknown option "--only"'),
        (["models", "check", "z-imag"], "z-imag"),
        (["models", "check", "z-image", "--only", "level"], 'nearest: "levels"'),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_sample_and_evaluate_take_a_family_of_ones_own(
    subject: Callable[[str], Subject], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A family that draws its pictures upside down: its own, and not the one of the pipeline's class, was asked."""
    path, prompts = tmp_path / "mine.py", tmp_path / "prompts.txt"
    path.write_text(FAMILY + FLIPPED)
    prompts.write_text("a red dog\n")
    common = [subject("z-image").model, "--prompts", str(prompts), "--resolution", "16", "--steps", "1"]
    for name, more in (("plain", []), ("own", ["--family", f"{path}:Flipped"])):
        assert main(["sample", *common, "--out", str(tmp_path / name), *more]) == 0
    plain, own = (
        torch.from_numpy(np.array(Image.open(next((tmp_path / name).glob("00000-00-*.png")))))
        for name in ("plain", "own")
    )
    assert torch.equal(own, plain.flip(0)) and not torch.equal(own, plain)
    scores = ["evaluate", *common, "--rewards", "jpeg", "--per-prompt", "1", "--out", str(tmp_path / "scores.json")]
    assert main([*scores, "--family", f"{path}:Flipped"]) == 0
    assert json.loads((tmp_path / "scores.json").read_text())["family"] == f"{path}:Flipped"
    capsys.readouterr()
    assert main([*scores, "--family", f"{path}:Fliped"]) == 2
    assert 'no "Fliped"' in capsys.readouterr().err


@pytest.mark.parametrize("check", ["levels", "company", "lora", "picture"])
def test_the_example_of_a_family_outside_the_package(stranger: Subject, check: str) -> None:
    """The families in examples, written by following docs/add-a-model.md."""
    CHECKS[check](stranger)


@pytest.mark.slow
@pytest.mark.parametrize("check", ["ratio", "checkpointing", "bf16", "memory"])
def test_the_example_passes_every_check(stranger: Subject, check: str) -> None:
    CHECKS[check](stranger)


@pytest.fixture(scope="session", params=["AuraFlow", "CogView4"])
def stranger(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    file = EXAMPLE.with_name(f"{request.param.lower()}.py")
    folder = tmp_path_factory.mktemp("families") / file.stem
    return Subject(str(folder), import_file(file, "family").tiny(folder), family=f"{file}:{request.param}")


def test_a_file_that_brings_its_tiny_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "check", f"{EXAMPLE}:AuraFlow", "--only", "levels"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 1 checks passed"
    (tmp_path / "mine.py").write_text(FAMILY)
    for words, message in (
        ([f"{tmp_path}/mine.py:Mine"], 'the file has no function "tiny(folder)"; name a folder'),
        ([f"{EXAMPLE}:AuraFlo"], 'nearest: "AuraFlow"'),
        ([f"{EXAMPLE}:AuraFlow", "--family", "mine.py:Mine"], "names the family already"),
    ):
        assert main(["models", "check", *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", some([*OLDER, *MAIN], "sd3", "flux", "qwen-image", "sana"))
def test_the_encoder_s_latents_are_the_decoder_s(subject: Callable[[str], Subject], name: str) -> None:
    policy = subject(name).policy()
    latents = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(policy.backbone.from_encoder(policy.backbone.to_vae(latents)), latents)
    encoded = policy.encode_images(policy.decode(latents))
    assert encoded.shape == latents.shape and bool(encoded.isfinite().all())


# What a network rounds to bf16 itself, in diffusers' own forward: noise levels, FLUX's guidance (3500 becomes 3504).
# Then the pretrained model is another one in bf16, and fp32's gradient is compared at what it sees.
ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "flux": lambda x: (x.bfloat16() * 1000).float() / 1000,
    "flux-schnell": lambda x: (x.bfloat16() * 1000).float() / 1000,
    "chroma": lambda x: (x.bfloat16() * 1000).float() / 1000,
    "qwen-image": lambda x: x.bfloat16().float(),
    "qwen-image-2.1": lambda x: x.bfloat16().float(),
}
CLOSE = {"sana": 0.9}  # linear attention: with weights that are rounded alone 0.985


def first_gradient(found: Subject, sampler: str, precision: str, checkpointing: bool = False) -> tuple[Tensor, float]:
    """GRPO's first gradient after a rollout of the untrained LoRA, in a network set up as a run does, and the mean
    difference of the log-probabilities."""
    noise_level = 1.0 if sampler == "ddim" else 0.7
    resolution = found.resolution or 16
    spec = SamplerSpec(sampler=sampler, steps=3, guidance_scale=3.5, noise_level=noise_level)
    optimise = {"precision": precision, "gradient_checkpointing": checkpointing}
    policy = replace(found, resolution=resolution).policy(precision)
    prepare_engine(Config.model_validate({"model": found.model, "objective": "grpo", "optimise": optimise}), policy)
    if checkpointing:
        policy.enable_gradient_checkpointing()
    if precision == "fp32" and (rounded := ROUNDED.get(Path(found.model).name)) is not None:
        forward = policy.backbone.forward

        def at_rounded(network: Any, x: Tensor, t: Tensor, cond: Any, guidance: float) -> Tensor:
            return forward(network, x, rounded(t), cond, float(rounded(torch.tensor(guidance))))

        policy.backbone.forward = at_rounded  # type: ignore[method-assign]
    objective = GRPO(spec)
    prompts = [Prompt("a hat"), Prompt("two cats, a hat and a long table with nine chairs")]
    rollout = collect(
        policy, prompts, spec, seed=0, epoch=0, group_size=2, batch_size=4, keep_trajectory=True, keep_images=False
    )
    advantages = torch.tensor([[1.0], [-1.0], [0.5], [-0.5]])
    for number in range(objective.rows_per_sample(rollout)):
        pairs = torch.stack([torch.arange(4), torch.full((4,), number)], dim=1)
        rows = objective.rows(rollout, advantages, pairs, (0, 0, 0))
        objective.loss(objective.scalars(policy, rows), rows).sum().backward()
    gradient = torch.cat([p.grad.flatten() for _, p in policy.trainable if p.grad is not None])
    return gradient, averages(objective.means)["rollout/mismatch"]


@pytest.mark.parametrize("name", some([*OLDER, *MAIN], "sd", "sd3"))
def test_in_bf16_training_sees_the_noise_that_was_drawn(subject: Callable[[str], Subject], name: str) -> None:
    """The rollout's arithmetic is training's: its first gradient is fp32's, with and without checkpointing."""
    found = subject(name)
    for sampler in ("ddim",) if name in ("sd", "sdxl") else ("ddim", "flow_sde"):
        exact, same = first_gradient(found, sampler, "fp32")
        assert same == 0
        for checkpointing in (False, True):
            gradient, mismatch = first_gradient(found, sampler, "bf16", checkpointing)
            cosine = torch.nn.functional.cosine_similarity(gradient, exact, 0)
            assert mismatch == 0 and cosine > CLOSE.get(name, 0.99), (sampler, checkpointing, mismatch, cosine)
