"""A model whose scheduler, UNet or autoencoder means something else is drawn as its pipeline draws it, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

from diffrl.errors import UserError
from diffrl.families.unet import VARIANCE_PRESERVING
from diffrl.policy import LoraSpec, Policy, load_policy
from diffrl.samplers import ode_step
from tests.tiny_models.classic import tiny_flux, tiny_sd, tiny_sd3

SPEC = LoraSpec(rank=2, alpha=2)
MAKERS: dict[str, Callable[[Path], Path]] = {
    "sd": tiny_sd,
    "sdxl": lambda folder: tiny_sd(folder, xl=True),
    "sd3": tiny_sd3,
    "flux": tiny_flux,
}
PICTURE = {"sd": 0.05, "sdxl": 0.05, "sd3": 1e-3, "flux": 1e-3}  # of another solver on the same process; none is exact


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make(folder / name) for name, make in MAKERS.items()}


def plain(folder: Path) -> Any:
    """diffusers' own pipeline; it wants to be told of the parts that a folder records as absent."""
    index = json.loads((folder / "model_index.json").read_text())
    absent = {name: None for name, entry in index.items() if isinstance(entry, list) and entry[0] is None}
    return DiffusionPipeline.from_pretrained(folder, **absent)


def with_scheduler(source: Path, to: Path, name: str, **settings: Any) -> Path:
    """The model `source` with another scheduler, made by diffusers from the settings of its own."""
    pipe = plain(source)
    config = {key: value for key, value in pipe.scheduler.config.items() if not key.startswith("_")}
    pipe.scheduler = getattr(diffusers, name).from_config(config | settings)
    pipe.save_pretrained(to)
    return to


def edited(source: Path, to: Path, file: str, **settings: Any) -> Path:
    """The model `source` with other values in one of its config files."""
    plain(source).save_pretrained(to)
    config = json.loads((to / file).read_text()) | settings
    (to / file).write_text(json.dumps(config))
    return to


def draw(policy: Policy, prompt: str, latents: torch.Tensor, steps: int) -> torch.Tensor:
    cond, x, levels, state = policy.encode([prompt]), latents, policy.timesteps(steps).tolist(), None
    with torch.no_grad():
        for i in range(steps):
            t, t_next = (x.new_full((1,), levels[j]) for j in (i, i + 1))
            prediction = policy.predict(x, t, cond, 1.0)
            x, state = ode_step(policy.backbone.solver, x, prediction, t, t_next, state, policy.process)
        return policy.decode(x)


def away(folder: Path, steps: int = 10) -> float:
    """How far our picture is from the plain pipeline's, of 1, in the mean."""
    policy = load_policy(str(folder), lora=SPEC)
    latents = torch.randn(1, *policy.backbone.latent_shape, generator=torch.Generator().manual_seed(3))
    pipe = plain(folder)
    pipe.set_progress_bar_config(disable=True)
    call = policy.backbone.plain_arguments(["a dog"], latents, 1.0)
    theirs = pipe(**call, num_inference_steps=steps, generator=torch.Generator().manual_seed(0)).images
    return float((theirs - draw(policy, "a dog", latents, steps)).abs().mean())


SCHEDULERS = sorted(
    name
    for name in dir(diffusers)
    if name.endswith("Scheduler") and not getattr(getattr(diffusers, name), "_backends", None) and name[0].isupper()
)


@pytest.mark.parametrize("family", [pytest.param(one, marks=pytest.mark.long) for one in ("sd3", "sd", "sdxl", "flux")])
def test_every_scheduler_of_diffusers_is_drawn_exactly_or_refused(
    family: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """No class is taken silently for another process: a new one of diffusers is refused until it is looked at."""
    taken, wrong = [], {}
    for name in SCHEDULERS:
        try:
            folder = with_scheduler(models[family], tmp_path / name, name)
            plain(folder)
        except Exception:  # diffusers itself cannot make it of these settings, or load it
            continue
        try:
            policy = load_policy(str(folder), lora=SPEC)
            levels = policy.timesteps(4)
        except UserError as error:
            assert name in str(error) and "scheduler" in str(error), (name, str(error))
            continue
        taken.append(name)
        assert len(levels) == 5 and (levels.diff() < 0).all()
        deterministic = not any(word in name for word in ("Ancestral", "SDE", "LCM", "TCD", "DDPM", "SASolver"))
        if deterministic and (difference := away(folder, steps=30)) > PICTURE[family]:
            wrong[name] = difference
    assert not wrong
    flow = {"FlowMatchEulerDiscreteScheduler", "FlowMatchLCMScheduler"}
    assert set(taken) == (flow if family in ("sd3", "flux") else set(VARIANCE_PRESERVING) & set(SCHEDULERS))


@pytest.mark.parametrize(
    ("family", "name"),
    [("sdxl", "EDMEulerScheduler"), ("sd", "EDMDPMSolverMultistepScheduler"), ("sd3", "DDIMScheduler")],
)
def test_a_scheduler_of_another_process_is_refused(
    family: str, name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"scheduler_config.json: {name} .*; supported: "):
        load_policy(str(with_scheduler(models[family], tmp_path / name, name)), lora=SPEC)


@pytest.mark.parametrize(
    ("family", "file", "settings"),
    [
        ("sd", "scheduler/scheduler_config.json", {"prediction_type": "sample"}),
        ("sd", "scheduler/scheduler_config.json", {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}),
        ("sdxl", "scheduler/scheduler_config.json", {"clip_sample": True}),
        ("sdxl", "scheduler/scheduler_config.json", {"thresholding": True}),
        ("flux", "scheduler/scheduler_config.json", {"num_train_timesteps": 500}),
        ("sd", "unet/config.json", {"time_cond_proj_dim": 8}),
        ("sdxl", "unet/config.json", {"time_cond_proj_dim": 8}),
    ],
)
def test_a_value_that_changes_the_meaning_is_refused_with_its_file_and_key(
    family: str, file: str, settings: dict[str, Any], models: dict[str, Path], tmp_path: Path
) -> None:
    source = (
        with_scheduler(models[family], tmp_path / "ddim", "DDIMScheduler")
        if family in ("sd", "sdxl")
        else models[family]
    )
    folder = edited(source, tmp_path / "edited", file, **settings)
    if file.startswith("unet"):  # the weights that the key asks for do not matter to what is refused
        pipe = plain(source)
        pipe.unet = diffusers.UNet2DConditionModel.from_config(dict(pipe.unet.config) | settings)
        pipe.save_pretrained(folder)
    with pytest.raises(UserError, match=f"model: {file}: {next(iter(settings))}"):
        load_policy(str(folder), lora=SPEC)


def test_zero_terminal_snr_with_velocity_is_taken(tmp_path: Path) -> None:
    source = tiny_sd(tmp_path / "v", prediction_type="v_prediction")
    settings = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing", "clip_sample": False}
    assert away(with_scheduler(source, tmp_path / "zero", "DDIMScheduler", **settings)) < 1e-3


def test_sdxls_latents_have_the_autoencoders_own_mean_and_deviation(models: dict[str, Path], tmp_path: Path) -> None:
    """As the plain SDXL pipeline decodes them (Playground v2.5); the way back is the inverse."""
    source = with_scheduler(
        models["sdxl"], tmp_path / "ddim", "DDIMScheduler", clip_sample=False, set_alpha_to_one=True
    )
    mean, std = [-1.6574, 1.886, -1.383, 2.5155], [8.4927, 5.9022, 6.5498, 5.2299]
    folder = edited(source, tmp_path / "own", "vae/config.json", latents_mean=mean, latents_std=std)
    assert away(folder) < 1e-3
    backbone: Any = load_policy(str(folder), lora=SPEC).backbone
    latents = torch.randn(2, *backbone.latent_shape)
    torch.testing.assert_close(backbone.from_encoder(backbone.to_vae(latents)), latents, rtol=1e-5, atol=1e-5)
    without: Any = load_policy(str(source), lora=SPEC).backbone
    torch.testing.assert_close(without.to_vae(latents), latents / without.vae.config.scaling_factor)


def test_an_autoencoder_of_another_kind_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    pipe = plain(models["sd"])
    pipe.vae = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        latent_channels=4,
        num_encoder_blocks=(1,),
        num_decoder_blocks=(1,),
    )
    pipe.save_pretrained(tmp_path / "tiny")
    with pytest.raises(
        UserError, match=r"vae/config.json: AutoencoderTiny is no autoencoder .*; supported: AutoencoderKL"
    ):
        load_policy(str(tmp_path / "tiny"), lora=SPEC)


# ---- weights in another form


def test_a_folder_with_one_variant_only_is_read(models: dict[str, Path], tmp_path: Path) -> None:
    plain(models["sd3"]).save_pretrained(tmp_path / "fp16", variant="fp16")
    ours, theirs = (load_policy(str(folder), lora=SPEC) for folder in (tmp_path / "fp16", models["sd3"]))
    for a, b in zip(ours.backbone.network.parameters(), theirs.backbone.network.parameters(), strict=True):
        assert torch.equal(a, b)


def test_each_other_form_is_named_with_what_to_do(models: dict[str, Path], tmp_path: Path) -> None:
    def copy(name: str, **more: Any) -> Path:
        plain(models["sd3"]).save_pretrained(tmp_path / name, **more)
        return tmp_path / name

    pickles = copy("bin", safe_serialization=False)
    with pytest.raises(
        UserError, match=r"transformer has diffusion_pytorch_model.bin only, a pickle.*use_safetensors=False"
    ):
        load_policy(str(pickles), lora=SPEC)
    without = copy("without")
    for file in (without / "vae").iterdir():
        file.unlink()
    (without / "vae").rmdir()
    with pytest.raises(
        UserError, match=r'model_index.json names "vae", and there is no folder .*"vae": \[null, null\]'
    ):
        load_policy(str(without), lora=SPEC)
    pointer = copy("pointer") / "text_encoder" / "model.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(UserError, match=r"model.safetensors is a git-lfs pointer, not the weights; run git lfs pull"):
        load_policy(str(tmp_path / "pointer"), lora=SPEC)
    quantised = copy("gguf") / "transformer"
    (quantised / "diffusion_pytorch_model.safetensors").rename(quantised / "model-q8.gguf")
    with pytest.raises(UserError, match=r"transformer has model-q8.gguf only, which is quantised"):
        load_policy(str(tmp_path / "gguf"), lora=SPEC)


# ---- what is not whole


def _weights(part: str, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (file,) = (folder / part).glob("*.safetensors")
        save_file(change(load_file(file)), file, metadata={"format": "pt"})

    return edit


def _without(part: str, *files: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        for file in [folder / part / one for one in files] or list((folder / part).iterdir()):
            file.unlink()

    return edit


def _config(file: str, **settings: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | settings))


def _first_left_out(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensors[key] for key in sorted(tensors)[1:]}


def _renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"model.{key}": value for key, value in tensors.items()}


INDEX, SCHEDULE = "model_index.json", "scheduler/scheduler_config.json"


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        *((_weights(part, _first_left_out), f"{part} lacks 1 weights of ") for part in ("unet", "vae", "text_encoder")),
        (_weights("text_encoder", _renamed), r"text_encoder lacks \d+ weights of CLIPTextModel .*, \.\.\.\)"),
        *((_config(INDEX, **{part: [None, None]}), f"{part} is .null, null., and a StableDiffusionPipeline needs it")
          for part in ("scheduler", "vae", "tokenizer", "text_encoder")),
        (_config(INDEX, scheduler=["diffusers"]), "scheduler is .*, and a StableDiffusionPipeline needs it"),
        (_config(INDEX, _class_name="StableDiffusionXLPipeline"), "text_encoder_2 is null, and a StableDiffusionXL"),
        (_without("tokenizer"), "tokenizer has no vocabulary"),
        (_without("tokenizer", "tokenizer_config.json"), "tokenizer_config.json: no model_max_length"),
        (_without("unet", "config.json"), "cannot be loaded: .*unet/config.json"),
        (_config("text_encoder/config.json", quantization_config={"quant_method": "bitsandbytes"}),
         "text_encoder of .* is quantised already .bitsandbytes."),
        (_config(SCHEDULE, num_train_timesteps=0), "num_train_timesteps, .*: no signal that falls from 1"),
        (_config(SCHEDULE, beta_start=0), "beta_start, .*: no signal that falls from 1"),
        (_config(SCHEDULE, trained_betas=[0.1, 0.2]), "trained_betas: no signal that falls from 1"),
        (_config("vae/config.json", scaling_factor=None), "vae/config.json: scaling_factor null"),
        (_config("vae/config.json", scaling_factor="0.18"), "vae/config.json: scaling_factor 0.18"),
        (_config("vae/config.json", shift_factor=float("nan")), "vae/config.json: shift_factor nan"),
    ],
)  # fmt: skip
def test_a_model_that_is_not_whole_is_one_line(
    edit: Callable[[Path], None], line: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """diffusers and transformers go on with random weights, NaN or a traceback of their own."""
    folder = tmp_path / "model"
    shutil.copytree(models["sd"], folder)
    edit(folder)
    with pytest.raises(UserError, match=f"model: .*{line}") as caught:
        load_policy(str(folder), lora=SPEC)
    assert "\n" not in str(caught.value)


def test_each_part_may_be_saved_in_another_variant(models: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models["sd"], folder)
    for part, stem, variant in (("unet", "diffusion_pytorch_model", "bf16"), ("text_encoder", "model", "fp16")):
        (folder / part / f"{stem}.safetensors").rename(folder / part / f"{stem}.{variant}.safetensors")
    latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(3))
    ours, theirs = (
        draw(load_policy(str(one), lora=SPEC), "a dog", latents[..., :8, :8], 2) for one in (folder, models["sd"])
    )
    assert torch.equal(ours, theirs)


def test_a_field_that_a_scheduler_does_not_read_is_no_reason(models: dict[str, Path], tmp_path: Path) -> None:
    """Left there from another class: PNDM has neither clipping nor a rescaled signal."""
    folder = tmp_path / "model"
    shutil.copytree(with_scheduler(models["sd"], tmp_path / "pndm", "PNDMScheduler"), folder)
    _config(SCHEDULE, thresholding=True, rescale_betas_zero_snr=True, sigma_min=0.01)(folder)
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    ours, theirs = (draw(load_policy(str(one), lora=SPEC), "a dog", latents, 6) for one in (folder, tmp_path / "pndm"))
    assert torch.equal(ours, theirs)
