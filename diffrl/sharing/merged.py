"""LoRAs as part of a model's weights: a folder in diffusers' format that is written tensor by tensor.

symbol   name here   meaning
W        `weight`    a layer's weight (out, in)
A, B     matrices    (r, in) and (out, r) of one LoRA's layer
s        `scale`     strength x alpha / rank

What is written is W + the sum of s B A, or of what a DoRA makes of W, in fp32 until the end. In memory is never more
than one shard.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from diffrl.errors import UserError
from diffrl.hub import not_name, plain
from diffrl.records.disk import DiskError, check_writable, nearest_folder, writing
from diffrl.version import __version__

log = logging.getLogger("diffrl")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD = 5 * 10**9  # bytes, as transformers
RECORD = "merged.json"  # what was merged; the mark of a folder that a later export may replace
NETWORKS = ("transformer", "unet")
OLDER = "-older"  # ends the name of an earlier export while the new one takes its place
PREFIX = "text_model."
WEIGHTS = re.compile(r".*\.(safetensors|bin|ckpt|pt|pth|msgpack|h5|onnx|gguf)(\.index(\.\w+)?\.json)?")
Change = Callable[[str, Tensor], Tensor | None]


@dataclass(frozen=True)
class Weighted:
    """One LoRA, keyed by layer, and how much of it is taken; `scale` is strength x alpha / rank.

    `part`: the text encoder whose it is; None: the network's.
    """

    name: str
    state: Mapping[str, Tensor]
    scale: float
    strength: float
    part: str | None = None


def merge(
    model: str, loras: Sequence[Weighted], out: Path, dtype: str | None = None, shard: int = SHARD
) -> dict[str, Any]:
    """Write the model with the LoRAs in its weights to the folder `out`; returns what `merged.json` there says, the
    peak memory of this process, and the largest file (MiB).

    The folder is there whole or not at all: it is written beside, as `.NAME.tmp-PID`, and renamed. An earlier export of
    this name is replaced, any other folder that is not empty refused.

    Args:
        model: a folder or a hub id in diffusers' format.
        loras: of the network (transformer or UNet), and of text encoders.
        dtype: of network and text encoders, "fp32", "bf16" or "fp16"; None: as they are saved.
        shard: the most bytes of a file of weights.

    Raises:
        UserError: a LoRA has a layer that the network has not, or the model is quantised, or `out` cannot be taken.
        DiskError: the disk is full or the folder cannot be written; nothing is left then.
    """
    folder, index = _folder_of(model)
    network = next((name for name in NETWORKS if index.get(name, [None])[0] is not None), None)
    if network is None:
        raise UserError(f'export: "{model}" has neither a transformer nor a UNet')
    parts = {name: _files(folder / name, index) for name in _with_weights(folder, index)}
    of = {name: [_named(lora, parts[name]) for lora in loras if (lora.part or network) == name] for name in parts}
    for name, files in parts.items():
        _check(files, of[name], model)
    _check_out(out)
    wanted = DTYPES[dtype] if dtype is not None else None
    typed = {name: wanted if _may_be_cast(folder, name, network) else None for name in parts}
    _check_room(out, sum(size for name in parts for _, size in _sizes(parts[name], typed[name]).values()))
    record: dict[str, Any] = {
        "diffrl_version": __version__,
        "model": model,
        "dtype": dtype or "as saved",
        "loras": [{"lora": lora.name, "strength": lora.strength} for lora in of[network]],
    }
    with _beside(out) as unfinished:
        _copy(folder, unfinished, parts)
        for name, files in parts.items():
            change = _added(of[name]) if of[name] else None
            stem = "diffusion_pytorch_model" if index[name][0] == "diffusers" or name == "vae" else "model"
            _write_part(files, unfinished / name, stem, typed[name], change, shard)
        (unfinished / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (unfinished / "README.md").write_text(_card(model, index, record), encoding="utf-8")
    largest = max(file.stat().st_size for file in out.rglob("*.safetensors"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return record | {"peak_mib": peak, "largest_file_mib": largest // 2**20}


def _folder_of(model: str) -> tuple[Path, dict[str, Any]]:
    """The model's folder, fetched where it is on the hub, and its model_index.json."""
    from diffrl.policy import find_model
    from diffrl.policy.files import refuse_quantised

    source, index = find_model(model)
    if "_form" in index:
        raise UserError(f'export: "{model}" is read from one file; export over a folder in diffusers\' format')
    refuse_quantised(source, index)
    if not Path(source).is_dir():
        from diffusers import DiffusionPipeline

        from diffrl.hub import pinned

        where, at = pinned(source)
        try:
            source = str(DiffusionPipeline.download(where, use_safetensors=True, **at))
        except OSError as error:
            raise UserError(f'model: "{model}" cannot be fetched: {str(error).splitlines()[0]}') from None
    return Path(source), index


def _with_weights(folder: Path, index: Mapping[str, Any]) -> list[str]:
    named = [name for name, entry in index.items() if isinstance(entry, list) and entry and entry[0] is not None]
    return [name for name in named if any(WEIGHTS.fullmatch(one.name) for one in (folder / name).glob("*"))]


def _files(part: Path, index: Mapping[str, Any]) -> dict[str, Path]:
    """Of every tensor of a part: the file that has it; of the variant that the model is loaded with."""
    from diffrl.policy.files import variants_of

    variant = variants_of(part.parent, index).get(part.name)
    files = sorted(part.glob("*.safetensors"))
    chosen = [one for one in files if _variant(one.name) == variant] or [one for one in files if not _variant(one.name)]
    if not chosen:
        raise UserError(f"model: {part} has no weights in safetensors")
    tensors: dict[str, Path] = {}
    for file in chosen:
        with safe_open(file, framework="pt") as opened:
            tensors |= dict.fromkeys(opened.keys(), file)
    return tensors


def _variant(name: str) -> str | None:
    middle = name.removesuffix(".safetensors").split(".")[1:]
    return middle[0].split("-")[0] if middle else None


def _may_be_cast(folder: Path, name: str, network: str) -> bool:
    """Network and text encoders; a quantised part stays as it is, and so does the autoencoder."""
    if name != network and not name.startswith("text_encoder"):
        return False
    config = folder / name / "config.json"
    return not (config.is_file() and "quantization_config" in json.loads(config.read_text(encoding="utf-8")))


def _sizes(files: Mapping[str, Path], dtype: torch.dtype | None) -> dict[str, tuple[Path, int]]:
    """File and bytes (once written) of every tensor; read from the headers."""
    sizes = {}
    for file in dict.fromkeys(files.values()):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                part = opened.get_slice(name)
                count, kind = math.prod(part.get_shape()), part.get_dtype()
                width = dtype.itemsize if dtype is not None and kind in FLOATS else WIDTHS.get(kind, 8)
                sizes[name] = (file, count * width)
    return sizes


FLOATS = ("F64", "F32", "F16", "BF16")
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
WIDTHS |= {"F8_E4M3": 1, "F8_E5M2": 1}


def _check(files: Mapping[str, Path], loras: Sequence[Weighted], model: str) -> None:
    """Every layer of every LoRA is a weight of the network, of its shape."""
    for lora in loras:
        for layer in _layers(lora):
            name = f"{layer}.weight"
            if name not in files:
                raise UserError(f'export: "{lora.name}" is not a LoRA of {model}: the network has no {layer}')
            with safe_open(files[name], framework="pt") as opened:
                shape = tuple(opened.get_slice(name).get_shape())
            up, down = (lora.state[f"{layer}.lora_{matrix}.weight"] for matrix in "BA")
            if (len(up), down[0].numel()) != (shape[0], torch.Size(shape[1:]).numel()):
                text = f"{layer} has shape {list(shape)} there, {[len(up), down[0].numel()]} in the LoRA"
                raise UserError(f'export: "{lora.name}" is not a LoRA of {model}: {text}')


def _named(lora: Weighted, files: Mapping[str, Path]) -> Weighted:
    """With the layers' names in the files, whose CLIP may have a prefix that its class has not, or the other way."""

    def named(key: str) -> str:
        layer = key.rpartition(".lora_")[0]
        other = layer.removeprefix(PREFIX) if layer.startswith(PREFIX) else PREFIX + layer
        known = f"{layer}.weight" in files or f"{other}.weight" not in files
        return key if known else other + key.removeprefix(layer)

    return replace(lora, state={named(key): value for key, value in lora.state.items()})


def _layers(lora: Weighted) -> list[str]:
    return list(dict.fromkeys(key.rsplit(".lora_", 1)[0] for key in lora.state))


def _added(loras: Sequence[Weighted]) -> Change:
    """The changed weight (fp32) of a tensor's name; None: no LoRA changes it."""
    layers = {layer for lora in loras for layer in _layers(lora)}

    def change(name: str, weight: Tensor) -> Tensor | None:
        layer = name.removesuffix(".weight")
        if layer not in layers or layer == name:
            return None
        full = weight.float()
        result = full
        for lora in loras:
            if (up := lora.state.get(f"{layer}.lora_B.weight")) is not None:
                down = lora.state[f"{layer}.lora_A.weight"]
                added = lora.scale * (up.float().flatten(1) @ down.float().flatten(1)).reshape(weight.shape)
                if (magnitude := lora.state.get(f"{layer}.lora_magnitude_vector.weight")) is not None:
                    turned = full + added  # m (W + s B A) / |W + s B A|, row by row; as peft adds several of them
                    rows = magnitude.float().flatten() / turned.flatten(1).norm(dim=1)
                    added = turned * rows.reshape(-1, *[1] * (weight.dim() - 1)) - full
                result = result + added
        return result

    return change


def _write_part(
    files: Mapping[str, Path], folder: Path, stem: str, dtype: torch.dtype | None, change: Change | None, most: int
) -> None:
    """The part's tensors, in files of at most `most` bytes each (one tensor, at least), with the index of several."""
    sizes = _sizes(files, dtype)
    shards = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda entry: entry[1],
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=most,
    )
    for file, names in shards.filename_to_tensors.items():
        save_file(dict(_changed(sizes, names, dtype, change)), folder / file, metadata={"format": "pt"})
        _sync(folder / file)
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / f"{stem}.safetensors.index.json").write_text(text, encoding="utf-8")


def _changed(
    sizes: Mapping[str, tuple[Path, int]], names: Sequence[str], dtype: torch.dtype | None, change: Change | None
) -> Iterator[tuple[str, Tensor]]:
    with contextlib.ExitStack() as stack:
        opened = {file: stack.enter_context(safe_open(file, "pt")) for file in {sizes[name][0] for name in names}}
        for name in names:
            weight = opened[sizes[name][0]].get_tensor(name)
            kind = dtype if dtype is not None and weight.is_floating_point() else weight.dtype
            new = None if change is None else change(name, weight)
            if new is not None and not bool(new.isfinite().all()):
                raise UserError(f"export: {name} would not be finite; take another LoRA or a smaller strength")
            yield name, (weight if new is None else new).to(kind).contiguous()


def _copy(folder: Path, out: Path, parts: Mapping[str, Any]) -> None:
    """All that is no weight in the folders that the index names: configs, tokenizers, the scheduler."""
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    for name in ("model_index.json", "diffrl.json"):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)
    for name in index:
        if not (folder / name).is_dir():
            continue
        (out / name).mkdir()
        for file in sorted((folder / name).rglob("*")):
            if file.is_file() and file.suffix != ".py" and not (name in parts and WEIGHTS.fullmatch(file.name)):
                target = out / file.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)


def _check_out(out: Path) -> None:
    check_writable(out, "--out")
    if out.is_dir() and any(out.iterdir()) and not (out / RECORD).is_file():
        raise UserError(f'--out: "{out}" is not empty and no earlier export; name another folder')


def _check_room(out: Path, size: int) -> None:
    free = shutil.disk_usage(nearest_folder(out)).free
    if size > free:
        raise DiskError(f"{out}: {size / 1e6:,.1f} MB are to be written, and {free / 1e6:,.1f} MB are free")


@contextlib.contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its place at the end, and is gone after an error; what a killed export has left
    is removed first, but for the earlier export, which is put back where it had been moved out of the way."""
    out = out.absolute()
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        for left in out.parent.glob(f".{out.name}.tmp-*"):
            earlier = left.name.endswith(OLDER)
            if not _alive(left.name.removesuffix(OLDER).rpartition("-")[2]):
                if earlier and not out.exists():
                    left.rename(out)
                shutil.rmtree(left, ignore_errors=True)
        unfinished = out.parent / f".{out.name}.tmp-{os.getpid()}"
        older = out.parent / f".{out.name}.tmp-{os.getpid()}{OLDER}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            yield unfinished
            if out.is_dir():  # an earlier export, or empty
                out.rename(older)
                unfinished.rename(out)
                shutil.rmtree(older, ignore_errors=True)
            else:
                unfinished.rename(out)
        except BaseException:
            if older.is_dir() and not out.exists():
                older.rename(out)
            shutil.rmtree(unfinished, ignore_errors=True)
            raise


def _alive(process: str) -> bool:
    return process.isdigit() and Path(f"/proc/{process}").exists() and int(process) != os.getpid()


def _sync(file: Path) -> None:
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())


def _card(model: str, index: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """A short README for the hub."""
    of_hub = not not_name(model, "OWNER/NAME[@REVISION]") and not Path(model).exists()
    base = f"base_model: {plain(model)}\nbase_model_relation: finetune\n" if of_hub else ""
    merged = "".join(f"- {Path(one['lora']).name} at strength {one['strength']:g}\n" for one in record["loras"])
    return (
        f"---\nlibrary_name: diffusers\npipeline_tag: text-to-image\n{base}tags:\n- diffrl\n---\n\n"
        f"# {index['_class_name']} with LoRAs in its weights\n\n{merged}\n"
        "Written by `diffrl export --merged`; load it with `DiffusionPipeline.from_pretrained`. "
        "The licence is the base model's.\n"
    )
