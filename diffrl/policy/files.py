"""The files of a local model folder, looked at before anything is loaded: in which form its weights are there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKL, DiffusionPipeline, pipelines

from diffrl.errors import UserError, foreign, nearest
from diffrl.single_file import split
from diffrl.worlds import folder_of, worlds

PART = re.compile(r"(transformer|unet|vae|text_encoder)(_\d+)?")  # with weights that training needs
PLAIN = ("diffusion_pytorch_model", "model")  # diffusers' and transformers' names
POINTER = b"version https://git-lfs"


def find(model: str) -> tuple[str, dict[str, Any]]:
    """Where the model is (folder, or OWNER/NAME@COMMIT, as far as it is known), and its model_index.json, which has the
    file of `BASE+FILE`, too (see `diffrl.policy.single`).

    Raises:
        UserError: there is no such model, or it cannot be read.
    """
    if (single := split(model)) is None:
        source, index = _find(model)
        refuse_code(source, index)
        return source, index
    from diffrl.policy.single import OF_FILE, base_of

    base, file = single
    try:
        source, index = find(base or (base := base_of(file)))
    except UserError as error:
        if single[0]:
            raise
        text = f'"{file}" is read over the configs of its model; with a folder of them: FOLDER+{file}'
        raise UserError(f"{error}; {text}") from None
    return source, index | {OF_FILE: str(file)}


def _find(model: str) -> tuple[str, dict[str, Any]]:
    folder = folder_of(model)
    if folder.is_dir():
        try:
            with foreign(folder / "model_index.json"):
                return str(folder), dict(json.loads((folder / "model_index.json").read_text()))
        except FileNotFoundError:
            raise UserError(f'model: folder "{folder}" has no model_index.json (diffusers\' format)') from None
    if folder.is_file():
        raise UserError(f"model: {folder} is a file, expected a folder in diffusers' format, .safetensors or .gguf")
    if model in worlds():
        raise UserError(f'model: the {model}\'s weights are missing, no folder "{folder}"')
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        hint = nearest(model, worlds()) if "/" not in model else ""
        known = ", ".join(worlds())
        raise UserError(f'model: no folder "{model}"; give {known}, a folder, or a hub id OWNER/NAME[@REVISION]{hint}')
    from diffrl.hub import hub_failure, pinned

    failure = hub_failure()
    try:
        source, at = pinned(model)
        return "@".join([source, *at.values()]), DiffusionPipeline.load_config(source, **at)
    except OSError as error:
        reason = f"it is not in this machine's cache, and {failure}" if failure else str(error).strip().splitlines()[0]
        raise UserError(f'model: no folder "{model}", and the hub does not give it: {reason}') from None


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


def refuse_code(source: str, index: Mapping[str, Any]) -> None:
    """UserError if the model brings code of its own: a community pipeline, or a component of a file beside it."""
    known = ("diffusers", "transformers")
    named = [index.get("_class_name"), *(entry for name, entry in index.items() if not name.startswith("_"))]
    for entry in named:
        if isinstance(entry, list) and entry and isinstance(entry[0], str):
            module = entry[0]
            if (entry is named[0] or module not in known) and not hasattr(pipelines, module):
                text = f'model: "{source}" brings code of its own ({module}.py), which is not run'
                raise UserError(f"{text}; give a model of a pipeline of diffusers, or `family: FILE.py:CLASS` for one")


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
