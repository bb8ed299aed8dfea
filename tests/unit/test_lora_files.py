"""LoRA files in the forms that people have, on tiny models of the true classes: read as diffusers reads them.

Files are written by diffusers and peft, and by the public rules of names of the other tools, never by diffrl. Every
check of every family is `make test-long`; `make test` has each form once.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import some
from diffusers import DiffusionPipeline
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from test_families_2026 import MAIN, OLDER
from test_policy_families import PROMPTS, draw
from tiny import SPEC
from tiny_models.recent import TINY, make
from torch import Tensor, nn

from diffrl.errors import UserError
from diffrl.lora_files import find_lora
from diffrl.loras.encoders import dress, outline
from diffrl.loras.reading import Texts, read_lora
from diffrl.policy import Policy, load_policy
from diffrl.sharing.export import export_comfyui, export_merged

Write = Callable[[Path, str, dict[str, Tensor]], None]  # folder, the denoiser's name, tensors by layer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The tiny model of a name, made when it is first asked for."""
    made: dict[str, str] = {}

    def find(name: str) -> str:
        if name not in made:
            path = tmp_path_factory.mktemp("lora") / name
            OLDER[name](path) if name in OLDER else make(name, path)
            made[name] = str(path)
        return made[name]

    return find


def plain(model: str, policy: Policy) -> Any:
    words = {name: None for name, part in policy.backbone.pipe.components.items() if part is None}
    pipe = DiffusionPipeline.from_pretrained(model, **words)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def adapted(network: nn.Module, policy: Policy, **more: Any) -> dict[str, Tensor]:
    """peft's LoRA on some layers of a network, with values; its tensors by layer."""
    layers = list(policy.lora.layers)[:5]
    ranks = {layers[1]: 3} if more.pop("uneven", False) else {}
    patterns = {"rank_pattern": ranks, "alpha_pattern": {layers[2]: 1.0} if ranks else {}}
    network.add_adapter(LoraConfig(r=2, lora_alpha=3, target_modules=layers, **patterns, **more))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in network.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            parameter.data.normal_(std=0.3, generator=generator)
        elif "magnitude" in name:
            parameter.data.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
    return get_peft_model_state_dict(network)


def velocity(policy: Policy) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, *policy.latent_shape, generator=generator)
    with torch.no_grad():
        return policy.predict(x, torch.tensor([0.9, 0.4]), policy.encode(PROMPTS)).v


def in_float64(policy: Policy) -> Tensor:
    """The network's own output: where rounding plays no part, two ways to one LoRA differ by nothing."""
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0)).double()
    cond = policy.encode(PROMPTS)
    wide = {"embeds": cond.embeds.double(), "pooled": cond.pooled.double()}
    wide["extra"] = tuple(part.double() if part.is_floating_point() else part for part in cond.extra)
    policy.lora.fused.forget()
    network = policy.backbone.network.double()
    with torch.no_grad():
        t = torch.tensor([0.9, 0.4], dtype=torch.float64)
        return policy.backbone.forward(network, x, t, dataclasses.replace(cond, **wide), 1.0)


def as_diffusers(pipe: Any, part: str, out: Path, metadata: bool) -> None:
    network = getattr(pipe, part)
    words = {f"{part}_lora_layers": get_peft_model_state_dict(network)}
    if metadata:
        words[f"{part}_lora_adapter_metadata"] = network.peft_config["default"].to_dict()
    type(pipe).save_lora_weights(out, **words)


def renamed(tensors: dict[str, Tensor], form: str, alpha: float | None) -> dict[str, Tensor]:
    """By the tool's rule of names: kohya and musubi, ComfyUI, ai-toolkit, plain peft."""
    made: dict[str, Tensor] = {}
    for key, value in tensors.items():
        layer, _, kind = key.removesuffix(".weight").rpartition(".")
        old = {"lora_A": "lora_down", "lora_B": "lora_up"}.get(kind, "dora_scale")
        stem, kind = {
            "kohya": ("lora_unet_" + layer.replace(".", "_"), old),
            "comfyui": (f"diffusion_model.{layer}", old),
            "ai-toolkit": (f"diffusion_model.{layer}", kind),
            "transformer": (f"transformer.{layer}", old),
        }[form]
        made[f"{stem}.{kind}" + (".weight" if kind != "dora_scale" else "")] = value.contiguous()
        if alpha is not None:
            made[f"{stem}.alpha"] = torch.tensor(alpha)
    return made


FORMS = ("diffusers", "diffusers-bare", "uneven", "dora", "rslora", "peft")
FORMS += ("kohya", "comfyui", "ai-toolkit", "transformer")
NEAR = 1  # millionths of the largest value, in fp32: what diffusers' own two ways, merged and not, differ by
HERE = [("sd3", form) for form in ("diffusers", "uneven", "dora", "peft", "comfyui")]
HERE += [("flux", "rslora"), ("z-image", "kohya"), ("qwen-image", "ai-toolkit")]
ALL = [(family, form) for family in (*OLDER, *MAIN) for form in FORMS]


@pytest.mark.parametrize(
    ("family", "form"),
    some(ALL, *HERE),
)
def test_every_form_is_read_as_diffusers_applies_it(
    folder: Callable[[str], str], family: str, form: str, tmp_path: Path
) -> None:
    model = folder(family)
    size = TINY[family].resolution if family in TINY else None
    policy = load_policy(model, lora=SPEC, resolution=size)
    part, network = policy.backbone.denoiser, policy.backbone.network
    layers = list(policy.lora.layers)
    pipe = plain(model, policy)
    more = {"uneven": {"uneven": True}, "dora": {"use_dora": True}, "rslora": {"use_rslora": True}}.get(form, {})
    tensors = adapted(getattr(pipe, part), policy, **more)
    base = velocity(policy)
    # the right value: diffusers' own network with peft's LoRA, in the place of ours
    policy.backbone.network = policy.network = getattr(pipe, part)
    policy.lora._active[:] = []
    theirs, exact = velocity(policy), in_float64(policy)
    policy.backbone.network = policy.network = network
    assert (theirs - base).abs().max() > 1e-3
    scale = 3 / 2
    if form in ("diffusers", "uneven", "dora", "rslora"):
        as_diffusers(pipe, part, tmp_path, metadata=True)
    elif form == "diffusers-bare":  # without alpha it is the rank
        bare = {k: v * scale if "lora_B" in k else v for k, v in tensors.items()}
        type(pipe).save_lora_weights(tmp_path, **{f"{part}_lora_layers": bare})
    elif form == "peft":
        config = LoraConfig(r=2, lora_alpha=3, target_modules=layers[:5])
        wrapped = get_peft_model(getattr(plain(model, policy), part), config)
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.data.copy_(tensors[name.removeprefix("base_model.model.").replace(".default", "")])
        wrapped.save_pretrained(tmp_path)
    else:
        save_file(renamed(tensors, form, 3.0), tmp_path / "anybody.safetensors")
    del pipe
    near, mine = 1e-6 * max(1, theirs.abs().max().item()), load_policy(model, start=tmp_path, resolution=size)
    gaps = [(velocity(mine) - theirs).abs().max().item()]
    gaps.append((velocity(load_policy(model, merge=str(tmp_path), resolution=size)) - theirs).abs().max().item())
    assert max(gaps) < NEAR * near, f"{gaps} of {near}"
    assert (in_float64(mine) - exact).abs().max() < 1e-7 * near / 1e-6


def test_a_lora_of_text_encoders_is_worn_and_the_base_is_drawn_without(
    folder: Callable[[str], str], tmp_path: Path
) -> None:
    """By kohya's names, whose converter is diffusers' own; saved again with what is trained."""
    model = folder("sdxl")
    policy = load_policy(model, lora=SPEC, resolution=16)
    pipe = plain(model, policy)
    tensors = adapted(pipe.unet, policy)
    file = renamed(tensors, "kohya", 3.0)
    generator = torch.Generator().manual_seed(2)
    for number, encoder in enumerate((pipe.text_encoder, pipe.text_encoder_2), 1):
        for name, layer in encoder.named_modules():
            if name.endswith(("_proj", "fc1", "fc2")):
                name = f"text_model.{name.removeprefix('text_model.')}"
                stem = f"lora_te{number}_{name.replace('.', '_')}"
                file[f"{stem}.lora_down.weight"] = 0.3 * torch.randn(2, layer.in_features, generator=generator)
                file[f"{stem}.lora_up.weight"] = 0.3 * torch.randn(layer.out_features, 2, generator=generator)
                file[f"{stem}.alpha"] = torch.tensor(1.0)
    save_file(file, tmp_path / "kohya.safetensors")
    latents = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(3))
    arguments = policy.backbone.plain_arguments(PROMPTS, latents, 3.5) | {"num_inference_steps": 4}
    pipe.unet.delete_adapters("default")
    before = pipe(**arguments).images
    pipe.load_lora_weights(str(tmp_path), weight_name="kohya.safetensors")
    theirs = pipe(**arguments).images
    pipe.text_encoder.disable_adapters(), pipe.text_encoder_2.disable_adapters()
    assert (theirs - pipe(**arguments).images).abs().max() > 0.01, "the encoders' part has to show"
    mine = load_policy(model, start=tmp_path / "kohya.safetensors", resolution=16)
    assert (draw(mine, latents, 4, 3.5) - theirs).abs().max() < 1e-3
    with mine.adapter(None):
        assert (draw(mine, latents, 4, 3.5) - before).abs().max() < 1e-3
    # in merged weights: diffrl's file of both parts, and the tool's own
    export_merged(model, tmp_path / "out", loras=[(str(tmp_path / "kohya.safetensors"), 1.0)], shard=20_000)
    written = plain(str(tmp_path / "out"), policy)
    assert (written(**arguments).images - theirs).abs().max() < 1e-3
    with pytest.raises(UserError, match="changes the text_encoder, too"):
        export_comfyui(model, tmp_path / "x.safetensors", loras=[(str(tmp_path / "kohya.safetensors"), 1.0)])
    mine.save_lora(tmp_path / "again")
    again = load_policy(model, start=tmp_path / "again", resolution=16)
    assert (draw(again, latents, 4, 3.5) - theirs).abs().max() < 1e-3
    merged = load_policy(model, merge=str(tmp_path / "kohya.safetensors"), resolution=16)
    assert (draw(merged, latents, 4, 3.5) - theirs).abs().max() < 1e-3


def of_ldm(layer: str, depth: int) -> str:
    """A layer of a UNet under its name in Stable Diffusion's own code, as kohya's trainer has it for SDXL."""
    for here, there in (
        ("conv1", "in_layers.2"),
        ("conv2", "out_layers.3"),
        ("time_emb_proj", "emb_layers.1"),
        ("conv_shortcut", "skip_connection"),
    ):
        layer = layer.replace(f".{here}", f".{there}")
    side, block, kind, number, rest = re.fullmatch(
        r"(down|up|mid)_blocks?\.(?:(\d+)\.)?(attentions|resnets)\.(\d+)\.(.*)", layer
    ).groups()
    if side == "mid":
        return f"middle_block.{1 if kind == 'attentions' else 2 * int(number)}.{rest}"
    place = int(block) * (depth + 1) + int(number) + (side == "down")
    return f"{'input' if side == 'down' else 'output'}_blocks.{place}.{int(kind == 'attentions')}.{rest}"


@pytest.mark.parametrize(("family", "ldm"), [("sd", True), ("sdxl", True), ("sdxl", False)])
def test_each_layer_of_kohya_s_file_has_its_own_rank_and_alpha(
    folder: Callable[[str], str], family: str, ldm: bool, tmp_path: Path
) -> None:
    """Convolutions and text encoders, too, of which some layers only. The right value is W + alpha / r B A, as kohya
    and ComfyUI have it: diffusers' loader gives layers one another's alphas, and passes over some of the encoders'."""
    model = folder(family)
    policy = load_policy(model, lora=SPEC, resolution=16)
    pipe, file = plain(model, policy), dict[str, Tensor]()
    generator = torch.Generator().manual_seed(7)

    def add(stem: str, layer: Any) -> None:
        rank, alpha = 2 + len(file) % 2, (1.0, 3.0, 5.0)[len(file) // 3 % 3]
        weight = layer.weight.data
        down = 0.2 * torch.randn(rank, *weight.shape[1:], generator=generator)
        up = 0.2 * torch.randn(len(weight), rank, *[1] * (weight.ndim - 2), generator=generator)
        file.update({f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up})
        file[f"{stem}.alpha"] = torch.tensor(alpha)
        weight += (alpha / rank * up.flatten(1) @ down.flatten(1)).reshape(weight.shape)

    for name, layer in pipe.unet.named_modules():
        if re.search(r"attentions.*(attn[12]\.to_|ff\.net.*(proj|2)$|proj_)|resnets.*conv", name) and hasattr(
            layer, "weight"
        ):
            name = of_ldm(name, pipe.unet.config.layers_per_block) if ldm else name
            add(f"lora_unet_{name.replace('.', '_')}", layer)
    for number, encoder in enumerate((pipe.text_encoder, getattr(pipe, "text_encoder_2", None)), 1):
        for name, layer in [] if encoder is None else encoder.named_modules():
            if name.endswith(("q_proj", "fc1")):
                name = f"text_model.{name.removeprefix('text_model.')}".replace(".", "_")
                add(f"lora_te{number if family == 'sdxl' else ''}_{name}", layer)
    assert any(value.ndim == 4 and value.shape[-1] == 3 for value in file.values()), "a convolution"
    save_file(file, tmp_path / "kohya.safetensors")
    latents = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(3))
    right = pipe(**policy.backbone.plain_arguments(PROMPTS, latents, 3.5) | {"num_inference_steps": 4}).images
    assert (draw(policy, latents, 4, 3.5) - right).abs().max() > 0.1
    for door in ("start", "merge"):
        mine = load_policy(model, **{door: str(tmp_path / "kohya.safetensors")}, resolution=16)
        assert (draw(mine, latents, 4, 3.5) - right).abs().max() < 1e-5, door


def test_layers_of_a_text_encoder_that_stay_empty_are_an_error(
    folder: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers before 5.11 leaves them, which takes the layers' names for others."""
    backbone = load_policy(folder("sd"), resolution=16).backbone
    width, layer = backbone.pipe.text_encoder.config.hidden_size, "text_encoder.text_model.encoder.layers.0.self_attn"
    a, b = torch.ones(2, width), torch.ones(width, 2)
    state = {f"{layer}.out_proj.lora_A.weight": a, f"{layer}.out_proj.lora_B.weight": b}
    load = backbone.pipe.load_lora_into_text_encoder

    def emptied(state: dict[str, Tensor], **given: Any) -> None:
        load({key: 0 * value if "lora_B" in key else value for key, value in state.items()}, **given)

    monkeypatch.setattr(type(backbone.pipe), "load_lora_into_text_encoder", staticmethod(emptied))
    with pytest.raises(UserError, match=r"my\.safetensors: of its 1 layers of the text_encoder, diffusers reads 0"):
        dress(backbone, Texts(state), "my.safetensors")


@pytest.mark.parametrize("door", some(["start", "merge"], "start"))
def test_what_is_no_lora_of_the_model_is_said(folder: Callable[[str], str], tmp_path: Path, door: str) -> None:
    model = folder("flux")
    layer, pair = "transformer_blocks.0.attn.to_q", {"A": torch.ones(2, 32), "B": torch.ones(32, 2)}
    good = {f"transformer.{layer}.lora_{kind}.weight": value for kind, value in pair.items()}
    encoder = "lora_te1_text_model_encoder_layers_0_self_attn_q_proj"
    other = {key.replace("to_q", "to_k"): value for key, value in good.items()}
    for tensors, message in (
        ({f"transformer.{layer}.lokr_w1": pair["A"]}, "LoKr"),
        ({f"lora_unet_{layer.replace('.', '_')}.hada_w1_a": pair["A"]}, "LoHa"),
        (good | {f"transformer.{layer}.diff_b": torch.ones(32)}, "full differences of weights"),
        ({f"wonder.{layer}.lora_{kind}.weight": value for kind, value in pair.items()}, "no layer|no part|no place"),
        ({key.replace("attn", "attention"): value for key, value in good.items()}, "has no place in Flux"),
        (good | {f"transformer.x.lora_{kind}.weight": value for kind, value in pair.items()}, "x has no place in Flux"),
        (good | {"notes": torch.ones(2)}, "notes .*no part|notes"),
        ({key: value for key, value in good.items() if "lora_A" in key}, "stands alone"),
        ({key: value * float("nan") for key, value in good.items()}, "no finite numbers"),
        (good | {f"lora_unet_{layer.replace('.', '_')}.alpha": torch.tensor(float("inf"))}, "no finite numbers"),
        (good | {f"lora_unet_{layer.replace('.', '_')}.alpha": torch.tensor(1e30)}, r"alpha is 1e\+30; at most 1e\+06"),
        (good | {"text_encoder.a.alpha": torch.tensor(float("nan"))}, r"a\.alpha has values that are no fin"),
        ({key: torch.ones(3, 3) for key in good}, r"lora_A.weight has the shape \(3, 3\), not \(rank, 32\)"),
        ({key: value.T for key, value in good.items()}, r"lora_A.weight has the shape \(32, 2\), not \(rank, 32\)"),
        ({key: value[:0] if "lora_A" in key else value[:, :0] for key, value in good.items()}, r"shape \(0, 32\), not"),
        ({key: value.to(torch.int8) for key, value in good.items()}, "lora_A.weight is of int8, not of floating"),
        (good | {f"diffusion_model.{layer}.lora_down.weight": pair["A"] * 2}, "to_q has two lora_A, which differ"),
        (good | other | {f"transformer.{layer}.dora_scale": torch.ones(32, 1)}, "to_k has no magnitudes"),
        (good | {f"transformer.{layer}.dora_scale": torch.ones(1, 32)}, "whose magnitudes are of inputs"),
        (good | {f"{encoder}.dora_scale": torch.ones(1, 32)}, "whose magnitudes are of inputs"),
        ({}, "no layer of Flux"),
    ):
        kept = {key: value.clone().contiguous() for key, value in tensors.items()}
        save_file(kept or {"a": torch.ones(1)}, tmp_path / "x.safetensors")
        with pytest.raises(UserError, match=message if tensors else "x.safetensors") as caught:
            load_policy(model, **{door: str(tmp_path / "x.safetensors")})
        assert len(str(caught.value).splitlines()) == 1


def test_metadata_that_change_what_the_matrices_mean(folder: Callable[[str], str], tmp_path: Path) -> None:
    """A PiSSA that peft did not convert adds to other frozen weights; metadata of a text encoder alone say nothing."""
    backbone, layer, file = outline(folder("flux")), "transformer_blocks.0.attn.to_q", tmp_path / "x.safetensors"
    tensors = {f"transformer.{layer}.lora_A.weight": torch.ones(2, 32)}
    tensors |= {f"transformer.{layer}.lora_B.weight": torch.ones(32, 2)}
    for prefix, fails in (("transformer", True), ("text_encoder", False)):
        fields = {"r": 2, "lora_alpha": 8, "init_lora_weights": "pissa_niter_4", "target_modules": [layer]}
        told = json.dumps({f"{prefix}.{key}": value for key, value in fields.items()})
        save_file(tensors, file, {"lora_adapter_metadata": told})
        message = r'x.safetensors: it began with "pissa_niter_4"'
        with pytest.raises(UserError, match=message) if fails else nullcontext():
            assert read_lora(file, backbone).spec.scale == 1.0


@pytest.mark.parametrize("text", ["<html></html>", "", "[1]"])
def test_a_config_of_peft_s_that_is_none_is_named(folder: Callable[[str], str], tmp_path: Path, text: str) -> None:
    save_file({"x.lora_A.weight": torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(UserError, match=r"adapter_config.json: not peft's JSON \(\w+Error"):
        read_lora(tmp_path, outline(folder("sd3")))


@pytest.mark.parametrize(
    "fields",
    [{"lora_alpha": 1e30}, {"alpha_pattern": {"to_k": 1e30}}, {"lora_alpha": float("nan")}, {"lora_alpha": -1e30}],
)
def test_metadata_with_an_alpha_that_no_training_has(folder: Callable[[str], str], tmp_path: Path, fields: Any) -> None:
    backbone, block, file = outline(folder("flux")), "transformer_blocks.0.attn", tmp_path / "x.safetensors"
    tensors = {f"transformer.{block}.{name}.lora_A.weight": torch.ones(2, 32) for name in ("to_q", "to_k")}
    tensors |= {f"transformer.{block}.{name}.lora_B.weight": torch.ones(32, 2) for name in ("to_q", "to_k")}
    fields = {"r": 2, "lora_alpha": 2, "target_modules": ["to_q", "to_k"], **fields}
    told = json.dumps({f"transformer.{key}": value for key, value in fields.items()})
    save_file(tensors, file, {"lora_adapter_metadata": told})
    with pytest.raises(UserError, match=r"^\S+x.safetensors: its metadata have alpha (nan|-?1e\+30); at most 1e\+06$"):
        read_lora(file, backbone)


def test_files_that_tools_write_otherwise(folder: Callable[[str], str], tmp_path: Path, caplog: Any) -> None:
    """SimpleTuner's `lycoris_`, OneTrainer's `lora_transformer_`, an alpha of shape (1,) in half precision, matrices of
    a projection that was a 1 x 1 convolution, rank 1; and one without effect, which is said."""
    model = folder("sd3")
    layer, generator = "transformer_blocks.0.attn.to_q", torch.Generator().manual_seed(0)
    size = dict(load_policy(model).network.named_modules())[layer].in_features
    a, b = torch.randn(1, size, generator=generator), torch.randn(size, 1, generator=generator)
    save_file({f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}, tmp_path / "plain.safetensors")
    theirs = velocity(load_policy(model, start=tmp_path / "plain.safetensors"))
    assert (theirs - velocity(load_policy(model))).abs().max() > 0.01
    name, file = layer.replace(".", "_"), tmp_path / "x.safetensors"
    for stem, shape in (("lycoris_", ()), ("lora_transformer_", ()), ("lora_unet_", (1, 1))):
        pair = {"lora_down": a.reshape(*a.shape, *shape), "lora_up": b.reshape(*b.shape, *shape)}
        tensors = {f"{stem}{name}.{kind}.weight": value for kind, value in pair.items()}
        save_file(tensors | {f"{stem}{name}.alpha": torch.ones(1, dtype=torch.float16)}, file)
        assert torch.equal(velocity(load_policy(model, start=file)), theirs), stem
    small = {f"{layer}.lora_{kind}.weight": value.to(torch.float8_e4m3fn) for kind, value in (("A", a), ("B", b))}
    save_file(small, file)
    theirs = velocity(load_policy(model, start=file))
    save_file({key: value.float() for key, value in small.items()}, file)
    assert torch.equal(velocity(load_policy(model, start=file)), theirs), "float8"
    save_file({f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b * 0}, file)
    load_policy(model, start=file)
    assert "it changes nothing" in caplog.text


def test_where_a_lora_lies(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "lora").mkdir(parents=True)
    for name in ("comfyui_lora.safetensors", "pytorch_lora_weights.safetensors"):
        (run / "lora" / name).touch()
    file = run / "lora" / "pytorch_lora_weights.safetensors"
    assert find_lora(run) == find_lora(run / "lora") == find_lora(file) == file
    assert find_lora("owner/name@v1.0:a/b.safetensors") == ("owner/name@v1.0", "a/b.safetensors")
    assert find_lora("owner/name") == ("owner/name", None)
    file.rename(run / "lora" / "another.safetensors")
    (tmp_path / "x.bin").touch(), (tmp_path / "empty").mkdir()
    (tmp_path / "parts").mkdir()
    for name in ("x-00001-of-00002", "x-00002-of-00002", "whole-00001-of-00001"):
        (tmp_path / "parts" / f"{name}.safetensors").touch()
    assert find_lora(tmp_path / "parts/whole-00001-of-00001.safetensors").is_file()
    for name, message in (
        (run, "has several: another.safetensors, comfyui_lora.safetensors; name one of them"),
        (tmp_path / "empty", "has no pytorch_lora_weights.safetensors"),
        (tmp_path / "x.bin", "a pickle is not read"),
        (tmp_path / "parts", "has a LoRA in several files, such as x-00001-of-00002.safetensors; write them into one"),
        (tmp_path / "parts/x-00002-of-00002.safetensors", "is one of several files of a LoRA; write them into one"),
        (tmp_path / "rum", 'nearest: "run"'),
        ("playground/turb", 'nearest: "playground/turbo"'),
    ):
        with pytest.raises(UserError, match=message):
            find_lora(name)
