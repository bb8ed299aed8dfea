"""The files of a local model folder, looked at before anything is loaded: in which form its weights are there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKL

from diffrl.errors import UserError, nearest

PART = re.compile(r"(transformer|unet|vae|text_encoder)(_\d+)?")  # with weights that training needs
PLAIN = ("diffusion_pytorch_model", "model")  # diffusers' and transformers' names
POINTER = b"version https://git-lfs"


def parts_with_weights(index: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, class) of the parts of model_index.json that have weights and are needed for training."""
    for name, entry in index.items():
        if PART.fullmatch(name) and isinstance(entry, list) and entry[1]:
            yield name, entry[1]


def find_variant(folder: Path, index: Mapping[str, Any]) -> str | None:
    """The `variant` to load a folder with: None where its plain weights are there, else such as "fp16".

    Raises:
        UserError: if a part is not there, or its weights are in a form that cannot be read; the part, the form and what
            to do are named.
    """
    variants = set()
    for name, kind in parts_with_weights(index):
        part = folder / name
        if not part.is_dir():
            text = f'model_index.json names "{name}", and there is no folder {part}'
            raise UserError(f'model: {text}; a model without it says "{name}": [null, null]')
        files = {file.name: file for file in part.iterdir()}
        weights = [file for file in files if file.endswith(".safetensors") and file.startswith(PLAIN)]
        for file in weights:
            if _is_pointer(files[file]):
                raise UserError(
                    f"model: {files[file]} is a git-lfs pointer, not the weights; run git lfs pull in {folder}"
                )
        if any(_variant(file) is None for file in weights):
            continue
        if weights:
            variants.add(min(str(_variant(file)) for file in weights))
            continue
        _refuse_other_form(part, files, kind)
    if len(variants) > 1:
        raise UserError(f"model: the parts of {folder} are saved as different variants: {', '.join(sorted(variants))}")
    return variants.pop() if variants else None


def refuse_missing(index: Mapping[str, Any]) -> None:
    """UserError for a part of model_index.json whose class the installed diffusers or transformers has not."""
    for name, entry in index.items():
        if not isinstance(entry, list) or entry[0] not in ("diffusers", "transformers"):
            continue
        library = import_module(entry[0])
        if not hasattr(library, str(entry[1])):
            near = nearest(str(entry[1]), (one for one in dir(library) if one[0].isupper()))
            text = (
                f'model: model_index.json: {name}: the installed {entry[0]} {library.__version__} has no "{entry[1]}"'
            )
            raise UserError(f"{text}{near}; a newer {entry[0]} may")


def refuse_quantised(source: str, index: Mapping[str, Any]) -> None:
    """UserError if the network's weights are in fewer bits already: a LoRA is put in, and merged, over full ones."""
    from diffrl.hub import pinned

    where, at = pinned(source)
    for name in ("transformer", "unet"):
        if index.get(name, [None])[0] is not None:
            settings = AutoencoderKL.load_config(where, subfolder=name, **at).get("quantization_config")
            if settings is not None:
                method = settings.get("quant_method", "some way") if isinstance(settings, dict) else "some way"
                text = f'model: the {name} of "{source}" is quantised already ({method}); give the full model'
                raise UserError(f"{text}, and engine.base: int8, fp8 or nf4")


def refuse_file(path: Path) -> None:
    """UserError where a single file was given as the model, with the way to a folder."""
    convert = f"diffusers' PIPELINE.from_single_file({str(path)!r}).save_pretrained(FOLDER)"
    raise UserError(f"model: {path} is a file, expected a folder in diffusers' format; {convert} makes one")


def _refuse_other_form(part: Path, files: Mapping[str, Path], kind: str) -> None:
    pickles = sorted(file for file in files if file.endswith((".bin", ".ckpt", ".pt", ".pth")))
    gguf = sorted(file for file in files if file.endswith(".gguf"))
    if pickles:
        text = f"{part} has {pickles[0]} only, a pickle, which is not read"
        save = f"{kind}.from_pretrained({str(part)!r}, use_safetensors=False).save_pretrained({str(part)!r})"
        raise UserError(f"model: {text}; {save} writes safetensors")
    if gguf:
        raise UserError(f"model: {part} has {gguf[0]} only, which is quantised; give the full model, and engine.base")
    raise UserError(f"model: {part} has no weights; expected {PLAIN[0]}.safetensors or {PLAIN[1]}.safetensors")


def _variant(file: str) -> str | None:
    """Of "model.fp16-00001-of-00002.safetensors": "fp16"; None of a plain name."""
    middle = file.removesuffix(".safetensors").split(".")[1:]
    return middle[0].split("-")[0] if middle else None


def _is_pointer(file: Path) -> bool:
    if file.stat().st_size > 1024:
        return False
    return file.read_bytes().startswith(POINTER)
