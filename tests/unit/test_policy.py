"""The policy on a tiny random SD3 of the true classes: equal to the plain pipeline, and only what should move moves."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from safetensors.torch import load_file
from tiny import PROMPTS, SPEC, inputs, scramble, tiny_sd3, velocity
from torch import Tensor

from diffrl.errors import UserError
from diffrl.hub_access import hub_failure
from diffrl.policy import Conditioning, Policy, load_policy
from diffrl.policy import text_cache as texts
from diffrl.samplers import euler_step
from diffrl.worlds import worlds


def plain_pipeline(model: str) -> StableDiffusion3Pipeline:
    pipe = StableDiffusion3Pipeline.from_pretrained(model, text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def euler(policy: Policy, latents: Tensor, cond: Conditioning, steps: int, guidance: float) -> Tensor:
    x, schedule = latents, policy.timesteps(steps)
    with torch.no_grad():
        for t, t_next in zip(schedule[:-1].tolist(), schedule[1:].tolist(), strict=True):
            t, t_next = torch.full((len(x),), t), torch.full((len(x),), t_next)
            x = euler_step(x, policy.predict(x, t, cond, guidance).v, t, t_next)
        return policy.decode(x)


# ---- the plain pipeline


@pytest.mark.parametrize(("guidance", "steps"), [(1.0, 5), (4.5, 4)])
def test_saved_lora_in_a_plain_pipeline_gives_the_same_picture(
    policy: Policy, model: str, tmp_path: Path, guidance: float, steps: int
) -> None:
    scramble(policy)
    policy.add_snapshot("old")
    scramble(policy, "old", seed=2)
    policy.save_lora(tmp_path)
    latents = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(3))
    mine = euler(policy, latents, policy.encode(PROMPTS), steps, guidance)

    pipe = plain_pipeline(model)
    arguments = {
        "prompt": PROMPTS,
        "latents": latents,
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "output_type": "pt",
        **policy.backbone.plain_call,
    }
    without = pipe(**arguments).images
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.load_lora_weights(str(tmp_path))
    plain = pipe(**arguments).images
    assert (plain - mine).abs().max() < 1e-4
    assert (plain - without).abs().max() > 0.05, "the LoRA has to show for this test to say anything"
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_lora_weights.safetensors"]
    assert all("default" not in key for key in load_file(tmp_path / "pytorch_lora_weights.safetensors"))


@pytest.mark.parametrize(
    "settings", [{"shift": 1.0}, {"shift": 3.0}, {"use_dynamic_shifting": True, "base_shift": 0.3}]
)
def test_noise_levels_are_the_plain_pipelines(policy: Policy, model: str, settings: dict[str, float]) -> None:
    pipe = plain_pipeline(model)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(**settings)
    policy.backbone.pipe.scheduler = FlowMatchEulerDiscreteScheduler(**settings)
    for steps in (1, 2, 5, 10, 28):
        pipe("a dog", num_inference_steps=steps, guidance_scale=1.0, max_sequence_length=0, output_type="latent")
        mine = policy.timesteps(steps)
        assert mine.shape == (steps + 1,)
        assert torch.equal(mine, pipe.scheduler.sigmas)
        assert mine[-1] == 0 and (mine.diff() < 0).all()


def test_timesteps_leave_the_pipelines_scheduler_alone(policy: Policy) -> None:
    before = policy.backbone.pipe.scheduler.sigmas.clone()
    policy.timesteps(3)
    assert torch.equal(policy.backbone.pipe.scheduler.sigmas, before)


def test_with_a_t5_and_nothing_recorded_encoding_is_the_plain_default(tmp_path: Path) -> None:
    directory = tiny_sd3(tmp_path, t5=True, max_sequence_length=None)
    policy = load_policy(str(directory), lora=SPEC)
    pipe = StableDiffusion3Pipeline.from_pretrained(directory)
    with torch.no_grad():
        embeds, _, pooled, _ = pipe.encode_prompt(PROMPTS[0], None, None, do_classifier_free_guidance=False)
    cond = policy.encode(PROMPTS[:1])
    assert cond.embeds.shape[1] == 16 + 256
    assert torch.equal(cond.embeds, embeds) and torch.equal(cond.pooled, pooled)


def test_recorded_sequence_length_is_used(policy: Policy) -> None:
    assert policy.backbone.plain_call == {"max_sequence_length": 0}
    assert policy.encode(PROMPTS).embeds.shape == (2, 16, 32)


def test_without_lora_it_is_the_plain_transformer(policy: Policy, model: str) -> None:
    x, t, cond = inputs(policy)
    transformer = SD3Transformer2DModel.from_pretrained(model, subfolder="transformer")
    with torch.no_grad():
        plain = transformer(x, cond.embeds, cond.pooled, t * 1000, return_dict=False)[0]
    assert torch.equal(velocity(policy), plain), "B starts at zero: a new LoRA changes nothing"
    scramble(policy)
    with policy.adapter(None):
        assert torch.equal(velocity(policy), plain)
    assert (velocity(policy) - plain).abs().max() > 0.05


# ---- prediction


def test_prediction_is_flow_matching_in_fp32(policy: Policy) -> None:
    x, t, cond = inputs(policy)
    p = policy.predict(x, t, cond)
    level = t[:, None, None, None]
    torch.testing.assert_close(p.x0, x - level * p.v)
    torch.testing.assert_close(p.eps - p.x0, p.v, atol=1e-5, rtol=1e-5)
    assert p.v.dtype == torch.float32 and p.v.requires_grad


def test_t_is_not_truncated(policy: Policy) -> None:
    x, _, cond = inputs(policy)
    with torch.no_grad():
        a, b = (policy.predict(x, torch.full((2,), t), cond).v for t in (0.5004, 0.5))
    assert (a - b).abs().max() > 1e-5


def test_guidance_is_one_forward_and_equals_two(policy: Policy) -> None:
    scramble(policy)
    x, t, cond = inputs(policy)
    rows: list[int] = []
    policy.network.register_forward_pre_hook(
        lambda _m, _a, kwargs: rows.append(len(kwargs["timestep"])), with_kwargs=True
    )
    with torch.no_grad():
        guided = policy.predict(x, t, cond, guidance=4.5).v
        assert rows == [4]
        positive = policy.predict(x, t, cond).v
        assert rows == [4, 2]
        negative = policy.predict(x, t, policy.encode(["", ""])).v
    torch.testing.assert_close(guided, negative + 4.5 * (positive - negative), atol=1e-4, rtol=1e-4)
    assert (guided - positive).abs().max() > 0.05


# ---- text


def test_every_prompt_is_encoded_once(policy: Policy) -> None:
    calls: list[int] = []
    for encoder in policy.backbone.text_encoders:
        encoder.register_forward_pre_hook(lambda _m, a, _k: calls.append(len(a[0])), with_kwargs=True)
    cond = policy.encode(["a red dog", "an ox", "a red dog"])
    assert calls == [1] * 6, "two encoders, two prompts and the empty one"
    assert len(cond) == 3 and torch.equal(cond.embeds[0], cond.embeds[2])
    assert not torch.equal(cond.embeds[0], cond.embeds[1])
    assert policy.texts.visits == 1
    again = policy.encode(["an ox", "a red dog", ""])
    assert len(calls) == 6 and policy.texts.visits == 1
    assert torch.equal(again.embeds[:2], cond.embeds[[1, 0]]) and torch.equal(again.pooled[:2], cond.pooled[[1, 0]])
    policy.encode(["new", "an ox"])
    assert len(calls) == 8


def test_an_embedding_does_not_depend_on_its_company(policy: Policy, model: str) -> None:
    alone = policy.encode(["a red dog"])
    among = load_policy(model, lora=SPEC).encode([*(f"prompt {i}" for i in range(9)), "a red dog"])
    assert torch.equal(alone.embeds[0], among.embeds[-1]) and torch.equal(alone.pooled[0], among.pooled[-1])


def test_the_cache_has_a_limit(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    one = policy.encode([""])
    monkeypatch.setattr(texts, "CACHE_BYTES", 3 * (one.embeds.nbytes + one.pooled.nbytes))
    cond = policy.encode(["a", "b", "c", "d"])
    assert len(cond) == 4 and list(policy.texts._rows) == ["", "c", "d"]
    assert torch.equal(policy.encode(["b"]).embeds[0], cond.embeds[1])


def test_selecting_rows() -> None:
    cond = Conditioning(torch.arange(6.0).view(3, 2, 1), torch.arange(3.0).view(3, 1))
    picked = cond.select(torch.tensor([2, 0, 2]))
    assert picked.embeds.flatten().tolist() == [4, 5, 0, 1, 4, 5] and picked.pooled.flatten().tolist() == [2, 0, 2]


# ---- images


def test_decode_in_chunks(policy: Policy) -> None:
    latents = torch.randn(5, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    whole = policy.decode(latents, chunk=5)
    with torch.no_grad():
        plain = policy.vae.decode(latents / 1.5 + 0.06).sample
    torch.testing.assert_close(whole, (plain / 2 + 0.5).clamp(0, 1))
    for chunk in (1, 2, None):
        torch.testing.assert_close(policy.decode(latents, chunk=chunk), whole, atol=1e-5, rtol=0)
    assert whole.shape == (5, 3, 16, 16) and whole.dtype == torch.float32
    assert whole.std() > 0.05 and whole.min() >= 0 and whole.max() <= 1
    assert not policy.decode(latents.requires_grad_()).requires_grad
    policy.decode(latents, chunk=2, grad=True).sum().backward()
    assert latents.grad is not None and (latents.grad.flatten(1).abs().sum(1) > 0).all()


def test_resolution(model: str) -> None:
    assert load_policy(model, lora=SPEC, resolution=8).latent_shape == (4, 4, 4)
    with pytest.raises(UserError, match=r"resolution: 18 pixels is not a multiple of 4 \(nearest: 16\)"):
        load_policy(model, resolution=18)


# ---- precision


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_base_keeps_an_fp32_lora(policy: Policy, model: str, precision: str) -> None:
    narrow = load_policy(model, lora=SPEC, precision=precision)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    narrow.add_snapshot("old")
    for name, parameter in narrow.network.named_parameters():
        assert parameter.dtype == (torch.float32 if "lora_" in name else dtype), name
    assert {p.dtype for e in narrow.backbone.text_encoders for p in e.parameters()} == {dtype}
    assert narrow.vae.dtype == dtype and narrow.encode(PROMPTS).embeds.dtype == dtype
    scramble(narrow, std=0.1)
    scramble(policy, std=0.1)
    for guidance in (1.0, 2.0):
        torch.testing.assert_close(velocity(narrow, guidance), velocity(policy, guidance), atol=0.1, rtol=0.05)
    assert velocity(narrow).dtype == torch.float32
    images = narrow.decode(inputs(narrow)[0])
    assert images.dtype == torch.float32
    torch.testing.assert_close(images, policy.decode(inputs(policy)[0]), atol=0.05, rtol=0)
    narrow.predict(*inputs(narrow)).v.square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for _, p in narrow.trainable)


def test_autocast_only_below_fp32(policy: Policy, model: str) -> None:
    seen: list[bool] = []
    for p in (policy, load_policy(model, lora=SPEC, precision="bf16")):
        p.network.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
        p.predict(*inputs(p))
        p.predict(*inputs(p), guidance=2.0)
    assert seen == [False, False, True, True]
    assert not torch.is_autocast_enabled("cpu")


def test_vae_stays_fp32_where_its_config_says_so(tmp_path: Path) -> None:
    policy = load_policy(str(tiny_sd3(tmp_path, force_upcast=True)), lora=SPEC, precision="bf16")
    assert policy.vae.dtype == torch.float32 and policy.network.proj_out.weight.dtype == torch.bfloat16
    assert policy.decode(torch.randn(1, 4, 8, 8)).dtype == torch.float32


# ---- what a user may get wrong


def test_messages(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r'no folder "playgruond".*\(nearest: "playground"\)'):
        load_policy("playgruond")
    with pytest.raises(UserError, match=r'no folder "\./models/none"'):
        load_policy("./models/none")
    with pytest.raises(UserError, match=r"has no model_index.json"):
        load_policy(str(tmp_path))
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    with pytest.raises(
        UserError,
        match=r"a WanPipeline is of no known family .* supported are ChromaPipeline, Flux2",
    ):
        load_policy(str(tmp_path))
    (tmp_path / "model_index.json").write_text("{")
    with pytest.raises(UserError, match=r"model_index.json: not diffusers' JSON \(JSONDecodeError"):
        load_policy(str(tmp_path))
    with pytest.raises(UserError, match=r'optimise.precision: unknown "bf17" \(nearest: "bf16"\)'):
        load_policy(model, precision="bf17")

    broken = tiny_sd3(tmp_path / "broken")
    (broken / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"broken/transformer has no weights; expected diffusion_pytorch_model"):
        load_policy(str(broken))
    torn = broken / "text_encoder" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:1000])
    (broken / "transformer").rename(broken / "other")
    (tiny_sd3(tmp_path / "whole") / "transformer").rename(broken / "transformer")
    with pytest.raises(UserError, match=r"broken/text_encoder/model.safetensors is cut off"):
        load_policy(str(broken))

    def refused(*_: object) -> None:
        raise OSError("cannot reach the hub\nlong story")

    monkeypatch.setattr("diffrl.policy.files.DiffusionPipeline.load_config", refused)
    with pytest.raises(UserError, match=r'no folder "someone/model", and the hub does not give it: '):
        load_policy("someone/model")
    monkeypatch.setattr(type(worlds()["playground"]), "pipeline", tmp_path / "absent")
    with pytest.raises(UserError, match="playground's weights are missing"):
        load_policy("playground")


def test_without_a_network_a_hub_name_is_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # discard: nobody listens
    monkeypatch.setattr("urllib.request.getproxies", dict)
    hub_failure.cache_clear()
    try:
        with pytest.raises(UserError, match=r'no folder "owner/name".*127\.0\.0\.1 cannot be reached') as error:
            load_policy("owner/name")
        assert "\n" not in str(error.value) and constants.HF_HUB_OFFLINE
    finally:
        hub_failure.cache_clear()
