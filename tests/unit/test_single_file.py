"""Models in one file: read by every door as the folder that has the same weights; what cannot be read is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import diffusers
import pytest
import torch
import transformers
import yaml
from ldm_names import original as original_sd
from safetensors.torch import load_file, save_file
from tiny import SPEC, tiny_sd, velocity
from tiny_models.recent import make
from torch import Tensor

from diffrl.additions.single_weights import _text_encoder
from diffrl.cli.main import main
from diffrl.config import check_model
from diffrl.errors import UserError
from diffrl.policy import Policy, find_model, load_policy
from diffrl.run.identity import contents


@pytest.fixture(scope="module")
def z_image(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Tensor]]:
    """A model's folder, a base of another seed without the network's weights, and the network's tensors."""
    folder = tmp_path_factory.mktemp("z")
    model, base = make("z-image", folder / "model"), folder / "base"
    shutil.copytree(model, base)
    file = base / "transformer/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    file.unlink()
    return model, base, tensors


def original(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """In the layout that Z-Image was published in, which ComfyUI reads, too."""
    result = {}
    for key, value in tensors.items():
        for here, there in (
            ("all_x_embedder.2-1", "x_embedder"),
            ("all_final_layer.2-1", "final_layer"),
            ("norm_q", "q_norm"),
            ("norm_k", "k_norm"),
            ("attention.to_out.0", "attention.out"),
        ):
            key = key.replace(here, there)
        result[f"model.diffusion_model.{key}"] = value
    for key in [key for key in result if ".to_q." in key]:
        parts = [result.pop(key.replace("to_q", f"to_{part}")) for part in "qkv"]
        result[key.replace("to_q", "qkv")] = torch.cat(parts)
    return result


def gguf_file(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Written by gguf's own writer, in 8 bits where rows are of whole blocks; returns what the blocks say."""
    gguf = pytest.importorskip("gguf", reason="pip install 'diffrl[gguf]'")
    writer, told = gguf.GGUFWriter(str(path), "z_image"), {}
    for key, value in tensors.items():
        kind, data = gguf.GGMLQuantizationType.F32, value.float().numpy()
        if value.ndim == 2 and value.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            data = gguf.quants.quantize(data, kind)
        writer.add_tensor(key, data, raw_dtype=kind)
        told[key] = torch.from_numpy(gguf.quants.dequantize(data, kind).copy()).reshape(value.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return told


@pytest.mark.parametrize("form", ["diffusers", "original", "gguf", "original gguf"])
def test_the_network_of_a_file_is_that_of_the_folder(z_image, form: str, tmp_path: Path) -> None:
    model, base, tensors = z_image
    file = tmp_path / ("net.gguf" if "gguf" in form else "net.safetensors")
    written = original(tensors) if "original" in form else tensors
    wanted = tensors
    if "gguf" in form:
        told = gguf_file(file, written)
        wanted = {key: told[key] for key in tensors} if form == "gguf" else {}
    else:
        save_file({key: value.contiguous() for key, value in written.items()}, file)
    policy = load_policy(f"{base}+{file}", lora=SPEC)
    network = policy.backbone.network
    for key, value in wanted.items():
        layer = key.removesuffix(".weight")
        name = f"{layer}.base_layer.weight" if f"{layer}.base_layer.weight" in dict(network.named_parameters()) else key
        # diffusers multiplies a block's scale in half precision
        torch.testing.assert_close(network.state_dict()[name], value, rtol=1e-3 if "gguf" in form else 0, atol=0)
    expected = velocity(load_policy(str(model), lora=SPEC))
    difference = float((velocity(policy) - expected).norm() / expected.norm())
    assert difference == 0 if "gguf" not in form else 0 < difference < 0.05


def test_the_text_encoder_of_a_checkpoint_is_read(tmp_path: Path) -> None:
    model = tiny_sd(tmp_path / "model")
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(model)
    text = {key: value + 0.1 for key, value in pipe.text_encoder.state_dict().items() if value.is_floating_point()}
    prefix = "cond_stage_model.transformer.text_model."
    tensors = {prefix + key.removeprefix("text_model."): value for key, value in text.items()}
    entry = ["transformers", "CLIPTextModel"]
    found = _text_encoder(tensors, entry, "text_encoder", str(model), torch.float32).state_dict()
    assert all(torch.equal(found[key], value) for key, value in text.items())
    assert _text_encoder({"x": torch.zeros(2)}, entry, "text_encoder", str(model), torch.float32) is None


def wide_xl(folder: Path, seed: int) -> Path:
    """SDXL, whose second text encoder is wider than the first: by their widths diffusers knows them in a file."""
    tiny_sd(folder, xl=True, seed=seed)
    clip, unet = (json.loads((folder / part / "config.json").read_text()) for part in ("text_encoder_2", "unet"))
    size = clip["hidden_size"]
    clip = transformers.CLIPTextConfig(**clip | {"hidden_size": 2 * size, "projection_dim": 2 * size})
    unet |= {"cross_attention_dim": 3 * size, "projection_class_embeddings_input_dim": 6 * 8 + 2 * size}
    torch.manual_seed(seed)
    transformers.CLIPTextModelWithProjection(clip).save_pretrained(folder / "text_encoder_2")
    diffusers.UNet2DConditionModel.from_config(unet).save_pretrained(folder / "unet")
    return folder


@pytest.mark.parametrize("xl", [False, True], ids=["SD 1.5", "SDXL"])
def test_all_parts_of_a_whole_checkpoint_are_read_under_their_original_names(xl: bool, tmp_path: Path) -> None:
    model, base = (wide_xl(tmp_path / n, i) if xl else tiny_sd(tmp_path / n, seed=i) for i, n in enumerate("ab"))
    kind = diffusers.StableDiffusionXLPipeline if xl else diffusers.StableDiffusionPipeline
    tensors = original_sd(kind.from_pretrained(model)) | {"alphas_cumprod": torch.ones(9)}
    file = tmp_path / "whole.safetensors"

    def read(changed: dict[str, Tensor], folder: Path = base) -> Policy:
        save_file(changed, file)
        return load_policy(f"{folder}+{file}", lora=SPEC)

    got, wanted = read(tensors), load_policy(str(model), lora=SPEC)
    for part in ("unet", "vae", "text_encoder", *(["text_encoder_2"] if xl else [])):
        here, there = (getattr(policy.backbone.pipe, part).state_dict() for policy in (got, wanted))
        assert here.keys() == there.keys() and all(torch.equal(here[k], there[k]) for k in here if "lora" not in k), (
            part
        )
    with pytest.raises(UserError, match=r"is not a whole vae of .*: it lacks tensors"):
        read({key: value for key, value in tensors.items() if "decoder.mid" not in key})
    odd = "conditioner.embedders.1." if xl else "text_model."
    with pytest.raises(UserError, match="text encoder under names that are not read, such as"):
        read({key.replace(odd, "" if not xl else "x."): value for key, value in tensors.items()})
    marks = {"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}
    with pytest.raises(
        UserError, match='with "prediction_type": "v_prediction", "rescale_betas_zero_snr": true, which'
    ):
        read(tensors | marks)
    path = base / "scheduler/scheduler_config.json"
    right = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    path.write_text(json.dumps(json.loads(path.read_text()) | right))
    assert read(tensors | marks).backbone.pipe.scheduler.config.prediction_type == "v_prediction"


@pytest.mark.long
def test_training_doctor_sample_and_evaluate_read_it_by_one_loader(z_image, config_file, tmp_path, capsys) -> None:
    _, base, tensors = z_image
    file = tmp_path / "net.safetensors"
    save_file(tensors, file)
    model = f"{base}+{file}"
    path = config_file(epochs=1, evaluate={"every": 1, "prompts": 2, "per_prompt": 2}, rollout={"resolution": 16})
    config = yaml.safe_load(path.read_text()) | {"model": model}
    path.write_text(yaml.safe_dump(config))
    assert main(["train", str(path)]) == 0
    assert main(["doctor", str(path)]) == 0
    run, prompts = config["run_dir"], config["prompts"]["test"]
    words = ["--lora", f"{run}/lora", "--prompts", prompts, "--limit", "1", "--steps", "2"]
    assert main(["sample", model, *words, "--out", str(tmp_path / "out")]) == 0
    assert (
        main(
            [
                "evaluate",
                model,
                *words,
                "--rewards",
                config["rewards"]["redness"]["plugin"],
                "--out",
                str(tmp_path / "scores.json"),
            ]
        )
        == 0
    )
    from diffrl import load_config

    loaded = load_config(path)
    before = contents(loaded)["model (one file)"]
    save_file(tensors | {"cap_pad_token": tensors["cap_pad_token"] + 1}, file)
    assert contents(loaded)["model (one file)"] != before, "another file is another model"


def test_what_cannot_be_read_is_said_in_one_line(z_image, tiny_model: Path, tmp_path: Path) -> None:
    _, base, tensors = z_image
    file = tmp_path / "net.safetensors"
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"Z-Image.* not in this machine's cache.*with a folder of them: FOLDER\+"):
        find_model(str(file))
    odd = tmp_path / "odd.safetensors"
    save_file({"x": torch.zeros(2)}, odd)
    with pytest.raises(UserError, match=r"of which model is not known; write BASE\+"):
        find_model(str(odd))
    with pytest.raises(UserError, match="no file"):
        check_model(f"{base}+{tmp_path / 'none.safetensors'}")
    with pytest.raises(UserError, match="is not a SD3Transformer2DModel of"):
        load_policy(f"{tiny_model}+{file}")
    scaled = tmp_path / "fp8.safetensors"
    save_file({"x.weight": torch.zeros(2), "x.scale_weight": torch.ones(1)}, scaled)
    with pytest.raises(UserError, match="scales beside them"):
        load_policy(f"{base}+{scaled}")
    part = tmp_path / "part.safetensors"
    save_file({key: value for key, value in tensors.items() if "layers.1." not in key}, part)
    with pytest.raises(UserError, match=r"is not a|has no transformer"):
        load_policy(f"{base}+{part}")
    pickle = tmp_path / "model.ckpt"
    pickle.write_bytes(b"")
    for name in (str(pickle), f"{base}+{pickle}"):
        with pytest.raises(UserError, match=r'^[^+]*model.ckpt" is a pickle.*from_single_file'):
            check_model(name)


def test_what_a_download_has_left_instead_of_weights_is_named(z_image, tmp_path: Path) -> None:
    """As a model's part, as a model in one file, over a base, and as a LoRA: one line, before anything loads."""
    model, base, tensors = z_image
    good = tmp_path / "good.safetensors"
    save_file(tensors, good)
    whole = good.read_bytes()
    part = Path(shutil.copytree(model, tmp_path / "model")) / "transformer/diffusion_pytorch_model.safetensors"
    file = tmp_path / "x.safetensors"
    for content, said in (
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a git-lfs pointer, not the weights"),
        (b"\n<!DOCTYPE html><html>Sign in</html>", "is a web page, not weights"),
        (b"PK\x03\x04 torch.save", "is a pickle under another name"),
        (b"\x80\x02}q\x00.", "is a pickle under another name"),
        (whole[:5], r"is cut off, or no safetensors file \(5 bytes\)"),
        (whole[:50], r"is cut off, or no safetensors file \(50 bytes\)"),
        (whole[:-1], f"is cut off: {len(whole) - 1:,} of its {len(whole):,} bytes"),
        ((4).to_bytes(8, "little") + b"none", "has no readable header"),
    ):
        part.write_bytes(content), file.write_bytes(content)
        for door in (str(part.parents[1]), str(file), f"{base}+{file}"):
            with pytest.raises(UserError, match=rf'(x|_model).safetensors"? {said}') as caught:
                load_policy(door)
            assert len(str(caught.value).splitlines()) == 1
        with pytest.raises(UserError, match=f"x.safetensors {said}"):
            load_policy(str(model), start=file)


def test_a_lora_in_the_place_of_a_model_is_said_to_be_one(z_image, tmp_path: Path) -> None:
    file, (model, _, _) = tmp_path / "x.safetensors", z_image
    for key in (
        "lora_unet_a_b.lora_down.weight",
        "transformer.a.lora_A.weight",
        "unet.a.processor.to_q_lora.up.weight",
    ):
        save_file({key: torch.zeros(2, 2)}, file)
        for door in (str(file), f"{model}+{file}"):
            with pytest.raises(UserError, match=r'^model: "\S+x.safetensors" is a LoRA \(.*; name its model, .*start$'):
                load_policy(door)


def test_a_folder_that_lacks_a_file_of_its_weights_is_named(z_image, tmp_path: Path) -> None:
    model, _, tensors = z_image
    part = Path(shutil.copytree(model, tmp_path / "model")) / "transformer"
    (part / "diffusion_pytorch_model.safetensors").unlink()
    halves = {f"diffusion_pytorch_model-0000{n}-of-00002.safetensors": [*tensors][n - 1 :: 2] for n in (1, 2)}
    for name, keys in halves.items():
        save_file({key: tensors[key] for key in keys}, part / name)
    index = part / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {key: n for n, keys in halves.items() for key in keys}}))
    load_policy(str(tmp_path / "model"))
    second = part / [*halves][1]
    second.rename(tmp_path / "second")
    with pytest.raises(UserError, match=r"transformer lacks 1 of its 2 files of weights: .*-00002-of-00002"):
        load_policy(str(tmp_path / "model"))
    (tmp_path / "second").rename(second)
    index.write_text("<html></html>")
    with pytest.raises(UserError, match=r"index.json is no list of weights \(JSONDecodeError"):
        load_policy(str(tmp_path / "model"))
    (tmp_path / "model" / "model_index.json").write_text("<html></html>")
    with pytest.raises(UserError, match=r"model: .*model_index.json: not diffusers' JSON"):
        load_policy(str(tmp_path / "model"))


@pytest.mark.parametrize("named", [{"_class_name": ["pipeline", "Mine"]}, {"transformer": ["my_net", "Net"]}])
def test_a_folder_with_code_of_its_own_is_refused(
    tiny_model: Path, tmp_path: Path, named: dict[str, list[str]]
) -> None:
    index = json.loads((tiny_model / "model_index.json").read_text()) | named
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"brings code of its own \((pipeline|my_net)\.py\), which is not run"):
        find_model(str(tmp_path))


class Shifted:
    """A form of another package: `shifted:MODEL`, whose network has other weights."""

    def __init__(self, base: str) -> None:
        self.base, self.file = base, Path(base) / "model_index.json"
        self.find = lambda find: find(base)

    def load(
        self, source: str, index: dict[str, list[str]], types: dict[str, torch.dtype]
    ) -> dict[str, torch.nn.Module]:
        kind = getattr(diffusers, index["unet"][1])
        unet = kind.from_pretrained(source, subfolder="unet", torch_dtype=types["default"])
        for parameter in unet.parameters():
            parameter.data += 1
        return {"unet": unet}


def read_shifted(model: str) -> Shifted | None:
    return Shifted(model.removeprefix("shifted:")) if model.startswith("shifted:") else None


def test_a_form_of_another_package_is_read(tmp_path: Path, installed) -> None:
    plain = str(tiny_sd(tmp_path / "model"))
    installed("shifted", f"{__name__}:read_shifted", "diffrl.model_forms")
    check_model(f"shifted:{plain}")
    with pytest.raises(UserError, match='no folder "/nowhere/model"'):
        check_model("shifted:/nowhere/model")
    networks = [load_policy(name, lora=SPEC).backbone.network.state_dict() for name in (f"shifted:{plain}", plain)]
    names = [name for name in networks[0] if "lora_" not in name]
    assert names and all(torch.equal(networks[0][name], networks[1][name] + 1) for name in names)
