"""FLUX, Stable Diffusion 1 and XL on tiny random pipelines of the true classes: equal to the plain pipelines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from covering import some
from diffusers import DiffusionPipeline, EulerDiscreteScheduler, PNDMScheduler
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import PROMPTS, SPEC, inputs, scramble, tiny_flux, tiny_sd, velocity
from torch import Tensor

from diffrl.errors import UserError
from diffrl.families.latents import pack, unpack
from diffrl.forward import FlowMatching
from diffrl.policy import Policy, load_policy
from diffrl.policy.resizing import drawing_at, resized
from diffrl.samplers import ode_step, schedule
from diffrl.sampling import SamplerSpec

FAMILIES: dict[str, Callable[[Path], Path]] = {
    "flux-dev": lambda folder: tiny_flux(folder, dev=True),
    "flux-schnell": lambda folder: tiny_flux(folder, dev=False),
    "sd": tiny_sd,
    "sd-v": lambda folder: tiny_sd(folder, prediction_type="v_prediction"),
    "sdxl": lambda folder: tiny_sd(folder, xl=True),
}


@pytest.fixture(scope="module", params=some(FAMILIES, "flux-dev", "sd", "sdxl"))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Name and folder of one tiny model."""
    return request.param, str(FAMILIES[request.param](tmp_path_factory.mktemp("family") / request.param))


def plain_pipeline(model: str) -> Any:
    pipe = DiffusionPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(policy: Policy, latents: Tensor, steps: int, guidance: float) -> Tensor:
    """Images of `PROMPTS` by the deterministic sampler that the plain pipeline has."""
    cond, x, schedule = policy.encode(PROMPTS), latents, policy.timesteps(steps)
    name = "euler" if isinstance(policy.process, FlowMatching) else "ddim"
    with torch.no_grad():
        for levels in zip(schedule[:-1].tolist(), schedule[1:].tolist(), strict=True):
            t, t_next = (x.new_full((len(x),), level) for level in levels)
            prediction = policy.predict(x, t, cond, guidance)
            x, _ = ode_step(name, x, prediction, t, t_next, None, policy.process)
        return policy.decode(x)


@pytest.mark.parametrize("guidance", [1.0, 3.5])
def test_saved_lora_in_the_plain_pipeline_gives_the_same_picture(
    family: tuple[str, str], tmp_path: Path, guidance: float
) -> None:
    _, model = family
    policy = load_policy(model, lora=SPEC, resolution=16)
    scramble(policy)
    policy.save_lora(tmp_path)
    latents = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(3))
    mine = draw(policy, latents, 4, guidance)
    pipe = plain_pipeline(model)
    arguments = policy.backbone.plain_arguments(PROMPTS, latents, guidance) | {"num_inference_steps": 4}
    without = pipe(**arguments).images
    pipe.load_lora_weights(str(tmp_path))
    plain = pipe(**arguments).images
    assert (plain - mine).abs().max() < 1e-3
    assert (plain - without).abs().max() > 0.02, "the LoRA has to show for this test to say anything"


def test_a_merged_lora_gives_the_picture_of_the_plain_pipeline_that_wears_it(
    family: tuple[str, str], tmp_path: Path
) -> None:
    """On every linear layer, as a turbo LoRA is, not only on those that diffrl trains; alpha is not its rank."""
    _, model = family
    pipe = plain_pipeline(model)
    part = "unet" if hasattr(pipe, "unet") else "transformer"
    network = getattr(pipe, part)
    plain = load_policy(model, lora=SPEC, resolution=16)
    latents = torch.randn(2, *plain.latent_shape, generator=torch.Generator().manual_seed(3))
    arguments = plain.backbone.plain_arguments(PROMPTS, latents, 1.0) | {"num_inference_steps": 4}
    without = pipe(**arguments).images
    network.add_adapter(LoraConfig(r=2, lora_alpha=3, target_modules="all-linear"))
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    theirs = pipe(**arguments).images
    words = {f"{part}_lora_layers": get_peft_model_state_dict(network)}
    words |= {f"{part}_lora_adapter_metadata": network.peft_config["default"].to_dict()}
    type(pipe).save_lora_weights(tmp_path, weight_name="turbo.safetensors", **words)
    for name in (tmp_path, tmp_path / "turbo.safetensors"):
        policy = load_policy(model, lora=SPEC, resolution=16, merge=str(name))
        assert (draw(policy, latents, 4, 1.0) - theirs).abs().max() < 1e-3
    assert (theirs - without).abs().max() > 0.02
    assert policy.state().keys() == plain.state().keys(), "what is trained is what it was"


def test_at_another_size_it_draws_as_a_policy_made_for_that_size(family: tuple[str, str]) -> None:
    _, model = family
    policy, other = (load_policy(model, lora=SPEC, resolution=size) for size in (16, (24, 32)))
    larger = resized(policy.backbone, (24, 32), "evaluate.resolution")
    latents = torch.randn(2, *other.latent_shape, generator=torch.Generator().manual_seed(3))
    with drawing_at(policy, larger):
        assert policy.latent_shape == other.latent_shape
        assert torch.equal(draw(policy, latents, 2, 3.5), draw(other, latents, 2, 3.5))
    assert policy.latent_shape[-1] * policy.backbone.scale == 16 and resized(policy.backbone, None, "") is None
    with pytest.raises(UserError, match=r"^evaluate.resolution: 17 pixels is not a multiple of \d+ \(nearest: 16\)$"):
        resized(policy.backbone, 17, "evaluate.resolution")


def test_a_lora_that_fits_in_part_is_not_merged(family: tuple[str, str], tmp_path: Path) -> None:
    """diffusers leaves out, silently, what names no layer; `--lora` refuses the same file."""
    _, model = family
    policy = load_policy(model, lora=SPEC, resolution=16)
    scramble(policy)
    policy.save_lora(tmp_path)
    path = tmp_path / "pytorch_lora_weights.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert load_policy(model, lora=SPEC, resolution=16, merge=str(path)) is not None
    other = next(key for key in tensors if key.endswith("to_k.lora_A.weight")).removesuffix(".lora_A.weight")
    for matrix in ("lora_A", "lora_B"):
        tensors[f"{other}_more.{matrix}.weight"] = tensors[f"{other}.{matrix}.weight"].clone()
    save_file(tensors, path)
    with pytest.raises(UserError, match=r"merged .*to_k_more has no place in \w+ \(1 of its \d+"):
        load_policy(model, lora=SPEC, resolution=16, merge=str(path))


def test_a_lora_that_cannot_be_merged_is_said(tmp_path: Path) -> None:
    model = str(tiny_flux(tmp_path / "flux", dev=True))
    (tmp_path / "empty").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"rubbish")
    for merge, message in (
        ("playground/turbi", 'no LoRA "playground/turbi".* .nearest: "playground/turbo".'),
        (str(tmp_path / "empty"), "has no pytorch_lora_weights.safetensors"),
        (str(tmp_path), "has several: a.safetensors, b.safetensors; name one of them"),
        (str(tmp_path / "a.safetensors"), 'a.safetensors" cannot be merged into the model: '),
        ("playground/turbo", "cannot be merged|has no layer of FluxTransformer2DModel"),
        ("owner/name:file.safetensors", '"owner/name:file.safetensors" cannot be merged into the model: '),
    ):
        with pytest.raises(UserError, match=message) as caught:
            load_policy(model, lora=SPEC, resolution=16, merge=merge)
        assert len(str(caught.value).splitlines()) == 1


def test_noise_levels_are_the_plain_pipelines(family: tuple[str, str]) -> None:
    name, model = family
    policy, pipe = load_policy(model, lora=SPEC, resolution=16), plain_pipeline(model)
    for steps in (1, 4, 10):
        pipe("a dog", num_inference_steps=steps, height=16, width=16, output_type="latent", guidance_scale=1.0)
        levels = policy.timesteps(steps)
        if name.startswith("flux"):
            assert torch.equal(levels, pipe.scheduler.sigmas)
        else:
            assert torch.equal(policy.process.index(levels[:-1]).round(), pipe.scheduler.timesteps.float())
        assert levels[-1] == 0 and (levels.diff() < 0).all()


def test_a_shift_is_that_of_a_plain_scheduler_which_is_told_it(family: tuple[str, str]) -> None:
    name, model = family
    policy, pipe = load_policy(model, lora=SPEC, resolution=16), plain_pipeline(model)
    if not name.startswith("flux"):
        with pytest.raises(UserError, match=r"rollout\.shift: is not defined for a VariancePreserving model"):
            schedule(policy, SamplerSpec("dpm2", 4, shift=3.0))
        return
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, shift=3.0, use_dynamic_shifting=False)
    for steps in (1, 4, 16):
        pipe("a dog", num_inference_steps=steps, height=16, width=16, output_type="latent", guidance_scale=1.0)
        levels = schedule(policy, SamplerSpec("euler", steps, shift=3.0))
        torch.testing.assert_close(levels, pipe.scheduler.sigmas, rtol=0, atol=1e-6)
        assert torch.equal(schedule(policy, SamplerSpec("euler", steps)), policy.timesteps(steps))


def test_sd_keeps_the_grid_of_other_solvers(tmp_path: Path) -> None:
    """Stable Diffusion 1.5 comes with PNDM, SDXL with Euler: same model, same steps."""
    policy = load_policy(str(tiny_sd(tmp_path)), lora=SPEC)
    config = policy.backbone.pipe.scheduler.config
    grid = policy.process.index(policy.timesteps(10)[:-1]).round().numpy()
    for kind in (PNDMScheduler, EulerDiscreteScheduler):
        more = {"skip_prk_steps": True} if kind is PNDMScheduler else {"timestep_spacing": "leading"}
        scheduler = kind.from_config(config, **more)
        scheduler.set_timesteps(10)
        assert np.array_equal(np.unique(scheduler.timesteps.numpy())[::-1], grid)


def test_without_lora_it_is_the_plain_network(family: tuple[str, str]) -> None:
    name, model = family
    policy = load_policy(model, lora=SPEC, resolution=16)
    x, t, cond = inputs(policy)
    pipe = plain_pipeline(model)
    with torch.no_grad():
        p = policy.predict(x, t, cond)
        if name.startswith("flux"):
            return  # the picture of the plain pipeline has shown it; its network wants packed tokens
        more = {}
        if name == "sdxl":
            sizes = pipe._get_add_time_ids((16, 16), (0, 0), (16, 16), torch.float32, 16)
            more = {"added_cond_kwargs": {"text_embeds": cond.pooled, "time_ids": sizes.expand(2, -1)}}
        plain = pipe.unet(x, t * 1000 - 1, encoder_hidden_states=cond.embeds, return_dict=False, **more)[0]
    expected = p.v if name == "sd-v" else p.eps
    torch.testing.assert_close(expected, plain, rtol=1e-3, atol=1e-4)


def test_all_three_forms_agree(family: tuple[str, str]) -> None:
    policy = load_policy(family[1], lora=SPEC, resolution=16)
    x, t, cond = inputs(policy)
    p = policy.predict(x, t, cond)
    torch.testing.assert_close(policy.process.add_noise(p.x0, p.eps, t), x, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(policy.process.velocity(p.x0, p.eps, t), p.v, rtol=1e-3, atol=1e-3)
    assert p.v.requires_grad


def test_a_step_moves_every_trained_matrix(family: tuple[str, str]) -> None:
    policy = load_policy(family[1], lora=SPEC, resolution=16)
    scramble(policy)
    before = policy.state()
    optimiser = torch.optim.SGD([p for _, p in policy.trainable], lr=0.1)
    policy.predict(*inputs(policy)).v.square().mean().backward()
    optimiser.step()
    after = policy.state()
    assert [k for k in before if torch.equal(before[k], after[k])] == []


def test_packing_is_the_pipelines() -> None:
    from diffusers import FluxPipeline

    x = torch.randn(2, 4, 6, 8)
    assert torch.equal(pack(x), FluxPipeline._pack_latents(x, 2, 4, 6, 8))
    assert torch.equal(unpack(pack(x), 6, 8), x)


def test_flux_hands_guidance_to_the_network_only_where_it_was_distilled(tmp_path: Path) -> None:
    dev = load_policy(str(tiny_flux(tmp_path / "dev")), lora=SPEC, resolution=16)
    assert not dev.backbone.classifier_free
    assert (velocity(dev, 1.0) - velocity(dev, 3.5)).abs().max() > 1e-4
    schnell = load_policy(str(tiny_flux(tmp_path / "schnell", dev=False)), lora=SPEC, resolution=16)
    assert schnell.backbone.classifier_free


def test_the_empty_prompt_of_sdxl_is_zero_as_in_the_plain_pipeline(tmp_path: Path) -> None:
    policy = load_policy(str(tiny_sd(tmp_path, xl=True)), lora=SPEC)
    assert not policy.encode([""]).embeds.any() and policy.encode(["a dog"]).embeds.any()


def test_resolution_and_messages(tmp_path: Path) -> None:
    flux = str(tiny_flux(tmp_path / "flux"))
    assert load_policy(flux, lora=SPEC, resolution=32).latent_shape == (4, 16, 16)
    with pytest.raises(UserError, match=r"18 pixels is not a multiple of 4 .nearest: 16"):
        load_policy(flux, lora=SPEC, resolution=18)
    odd = str(tiny_sd(tmp_path / "odd", prediction_type="sample"))
    with pytest.raises(
        UserError, match=r'scheduler_config.json: prediction_type "sample"; supported: epsilon, v_prediction'
    ):
        load_policy(odd, lora=SPEC)
