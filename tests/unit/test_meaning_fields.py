"""Every field of every scheduler, changed one at a time: drawn as the plain pipeline draws it, or refused by its name.

And the fields of networks and autoencoders that a pipeline itself reads: what they mean is looked at before a new one
of diffusers passes.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import re
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import diffusers
import pytest
import torch
from covering import some
from diffusers import DiffusionPipeline
from torch import Tensor

from diffrl.conformance.check import draw
from diffrl.errors import UserError
from diffrl.plugins import installed
from diffrl.policy import LoraSpec, Policy, find_family, load_policy
from diffrl.policy.meaning import say_solver
from diffrl.policy.pipelines import settings_of
from tests.tiny_models.classic import tiny_flux, tiny_sd, tiny_sd3
from tests.tiny_models.recent import TINY, make

CLASSIC: dict[str, Any] = {
    "sd": tiny_sd,
    "sdxl": partial(tiny_sd, xl=True),
    "sd3": partial(tiny_sd3, t5=True, max_sequence_length=24),
    "flux": tiny_flux,
}
NAMES = [*CLASSIC, *(name for name in TINY if not name.endswith(("-turbo", "-distilled")))]
STEPS, GUIDANCE, CLOSE = 4, 2.5, 1e-3
# Values that a kind of field does not tell; of the others a switch is turned, a number is half as large again.
VALUES: dict[str, list[Any]] = {
    "timestep_spacing": ["linspace", "leading", "trailing"],
    "time_shift_type": ["linear"],
    "prediction_type": ["epsilon", "v_prediction", "sample", "flow_prediction"],
    "beta_schedule": ["linear", "squaredcos_cap_v2"],
    "trained_betas": [[0.001 + 0.00001 * i for i in range(1000)]],
    "final_sigmas_type": ["sigma_min"],
    "algorithm_type": ["sde-dpmsolver++"],
    "solver_type": ["heun"],
    "solver_order": [1, 3],
    "interpolation_type": ["log_linear"],
    "timestep_type": ["continuous"],
    "variance_type": ["learned_range"],
    "shift_terminal": [0.1],
    "sigma_min": [0.05],
    "sigma_max": [10.0],
    "num_train_timesteps": [500],
    "lambda_min_clipped": [-1.0],
}


class Model:
    """A tiny pipeline, kept in memory: a trial replaces parts of it, and draws with both sides."""

    def __init__(self, name: str) -> None:
        self.folder = Path(mkdtemp()) / name
        (CLASSIC[name] if name in CLASSIC else partial(make, name))(self.folder)
        index = json.loads((self.folder / "model_index.json").read_text())
        absent = {key: None for key, entry in index.items() if isinstance(entry, list) and entry[0] is None}
        self.pipe = DiffusionPipeline.from_pretrained(self.folder, **absent)
        self.family = find_family(index["_class_name"])
        self.resolution = TINY[name].resolution if name in TINY else None
        self.length = settings_of(str(self.folder)).get("max_sequence_length")

    def with_parts(self, **parts: Any) -> Any:
        names = inspect.signature(type(self.pipe).__init__).parameters
        words = {key: value for key, value in self.pipe.config.items() if key in names}
        own = {key: copy.deepcopy(self.pipe.components[key]) for key in (self.family.denoiser, "vae", "scheduler")}
        return type(self.pipe)(**words | self.pipe.components | own | copy.deepcopy(parts))

    def away(self, **parts: Any) -> float:
        """Mean difference between our picture and the plain pipeline's; UserError as loading raises it."""
        family = self.family(self.with_parts(**parts), self.resolution, self.length)
        say_solver(family)  # as loading does
        policy = Policy(family, lora=LoraSpec(rank=2, alpha=2))
        latents = torch.randn(1, *family.latent_shape, generator=torch.Generator().manual_seed(3))
        policy.timesteps(STEPS)
        plain = self.with_parts(**parts)
        plain.set_progress_bar_config(disable=True)
        family.prepare_plain(plain)
        call = family.plain_arguments(["a dog"], latents, GUIDANCE)
        theirs: Tensor = plain(**call, num_inference_steps=STEPS, generator=torch.Generator().manual_seed(0)).images
        return float((theirs - draw(policy, ["a dog"], latents, STEPS, GUIDANCE)).abs().mean())


@cache
def model(name: str) -> Model:
    return Model(name)


def changed(scheduler: Any) -> Iterator[tuple[str, Any, Any]]:
    """(field, value, scheduler) for each of its fields, one at a time."""
    own = {key: value for key, value in scheduler.config.items() if not key.startswith("_")}
    for field in list(inspect.signature(type(scheduler).__init__).parameters)[1:]:
        now = own.get(field)
        guess = [not now] if isinstance(now, bool) else [now * 1.5 + 1] if isinstance(now, (int, float)) else []
        if field == "beta_start":
            guess = [2 * own[field]]
        elif field == "beta_end":
            guess = [0.02]
        for value in VALUES.get(field, guess):
            value = int(value) if isinstance(now, int) and not isinstance(now, bool) else value
            try:
                yield field, value, type(scheduler).from_config(own | {field: value})
            except (ValueError, NotImplementedError, KeyError):  # not made by diffusers itself
                continue


@pytest.mark.parametrize(
    ("name", "kind"),
    some(
        [
            (name, kind)
            for name in NAMES
            for kind in (None, *(("EulerDiscreteScheduler", "DPMSolverMultistepScheduler") if name == "sd" else ()))
        ],
        ("sd", None),
    ),
)
def test_every_field_of_a_scheduler_is_drawn_exactly_or_refused(
    name: str, kind: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    found = model(name)
    scheduler = found.pipe.scheduler
    if kind is not None:
        scheduler = getattr(diffusers, kind).from_config(scheduler.config)
    silent, unnamed = {}, {}
    for field, value, other in changed(scheduler):
        caplog.clear()
        try:
            with caplog.at_level(logging.WARNING):
                difference = found.away(scheduler=other)
        except UserError as error:
            if not re.search(rf"scheduler_config.json: .*({field}|{type(other).__name__})", str(error)):
                unnamed[field] = str(error)
            continue
        if not difference < CLOSE and "is drawn by the solver" not in caplog.text:
            silent[f"{field}: {value}"] = difference
    assert not silent, "another picture than the plain pipeline's, without a word"
    assert not unnamed


@pytest.mark.long  # `make test` has test_meaning's of one family
@pytest.mark.parametrize("name", NAMES)
def test_every_scheduler_of_diffusers_is_drawn_exactly_or_refused_or_said(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    found, silent = model(name), {}
    own = {key: value for key, value in found.pipe.scheduler.config.items() if not key.startswith("_")}
    kinds = (one for one in dir(diffusers) if one.endswith("Scheduler") and one[0].isupper())
    for kind in kinds:
        try:
            other = getattr(diffusers, kind).from_config(own)
            other.set_timesteps(STEPS)
        except Exception:  # diffusers itself cannot make it of these settings
            continue
        caplog.clear()
        try:
            with caplog.at_level(logging.WARNING):
                difference = found.away(scheduler=other)
        except UserError as error:
            assert "scheduler_config.json" in str(error), (kind, str(error))
            continue
        if not difference < CLOSE and f"{kind} is drawn by the solver" not in caplog.text:
            silent[kind] = difference
    assert not silent


# What a pipeline reads of a network's and an autoencoder's config, beside the modules themselves and their sizes.
READ = {
    "StableDiffusion3Pipeline": [
        "transformer.in_channels",
        "transformer.joint_attention_dim",
        "transformer.patch_size",
        "transformer.sample_size",
        "vae.scaling_factor",
        "vae.shift_factor",
    ],
    "FluxPipeline": [
        "transformer.guidance_embeds",
        "transformer.in_channels",
        "vae.scaling_factor",
        "vae.shift_factor",
    ],
    "StableDiffusionPipeline": [
        "unet.in_channels",
        "unet.sample_size",
        "unet.time_cond_proj_dim",
        "vae.scaling_factor",
    ],
    "StableDiffusionXLPipeline": [
        "unet.addition_time_embed_dim",
        "unet.in_channels",
        "unet.sample_size",
        "unet.time_cond_proj_dim",
        "vae.force_upcast",
        "vae.latents_mean",
        "vae.latents_std",
        "vae.scaling_factor",
    ],
    "QwenImagePipeline": [
        "transformer.guidance_embeds",
        "transformer.in_channels",
        "vae.latents_mean",
        "vae.latents_std",
        "vae.z_dim",
    ],
    "ZImagePipeline": ["vae.scaling_factor", "vae.shift_factor"],
    "Flux2KleinPipeline": ["transformer.in_channels", "vae.batch_norm_eps"],
    "Flux2Pipeline": ["transformer.in_channels", "vae.batch_norm_eps"],
    "Krea2Pipeline": ["transformer.in_channels", "vae.latents_mean", "vae.latents_std", "vae.z_dim"],
    "QwenImage21Pipeline": [
        "transformer.causal_condition",
        "transformer.in_channels",
        "vae.latents_mean",
        "vae.latents_std",
        "vae.z_dim",
    ],
    "SanaPipeline": [
        "transformer.in_channels",
        "transformer.out_channels",
        "transformer.sample_size",
        "transformer.timestep_scale",
        "vae.encoder_block_out_channels",
        "vae.scaling_factor",
    ],
    "ChromaPipeline": ["transformer.in_channels", "vae.scaling_factor", "vae.shift_factor"],
    "Lumina2Pipeline": ["transformer.in_channels", "transformer.sample_size", "vae.scaling_factor", "vae.shift_factor"],
    "HiDreamImagePipeline": ["transformer.in_channels", "vae.scaling_factor", "vae.shift_factor"],
}
SIZES = {"unet.sample_size", "vae.block_out_channels"}  # of a transformer's pipeline: its size without a `height`


@pytest.mark.parametrize("pipeline", installed("family"))
def test_a_pipeline_reads_no_field_that_was_not_looked_at(pipeline: str) -> None:
    """One that a new version of diffusers reads is looked at before it is added here."""
    module = inspect.getmodule(getattr(diffusers, pipeline))
    assert module is not None
    read = set(re.findall(r"self\.((?:transformer|unet|vae)\.config\.\w+)", inspect.getsource(module)))
    assert {one.replace(".config", "") for one in read} - SIZES == set(READ[pipeline]) - SIZES


def test_a_guidance_that_the_pipeline_does_not_give_is_refused() -> None:
    """FLUX.2 klein's pipeline hands its network no guidance, dev's always does; a made-up number of outputs is none."""
    found = model("flux2-klein")
    for field, value in (("guidance_embeds", True), ("out_channels", 2)):
        network = type(found.pipe.transformer).from_config(dict(found.pipe.transformer.config) | {field: value})
        with pytest.raises(UserError, match=f"transformer/config.json: {field} "):
            found.away(transformer=network)


def test_a_class_that_diffusers_lacks_is_one_line(tmp_path: Path) -> None:
    source = tiny_sd3(tmp_path / "model")
    index = source / "model_index.json"
    text = index.read_text()
    index.write_text(text.replace("FlowMatchEulerDiscreteScheduler", "FlowMatchEulerDiscretScheduler"))
    with pytest.raises(UserError, match=r"model_index.json: scheduler: .* has no .*nearest: .FlowMatchEulerDiscreteS"):
        load_policy(str(source))
    index.write_text(text)
    config = source / "scheduler" / "scheduler_config.json"
    both = {"use_karras_sigmas": True, "use_beta_sigmas": True}  # which diffusers does not make
    config.write_text(json.dumps(json.loads(config.read_text()) | both))
    with pytest.raises(UserError, match=r"cannot be loaded: .*use_karras_sigmas"):
        load_policy(str(source))
