"""The files of a local model folder, looked at before anything is loaded: in which form its weights are there."""

from __future__ import annotations

import inspect
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch
from diffusers import AutoencoderKL, DiffusionPipeline, pipelines
from transformers import CLIPTokenizer

from diffrl.errors import UserError, foreign, in_one_line, nearest
from diffrl.files import damage_of
from diffrl.worlds import folder_of, form_of, worlds

PART = re.compile(r"(transformer|unet|vae|text_encoder)(_\d+)?")  # with weights that training needs
PIECE = re.compile(r"scheduler|vae|unet|transformer|(text_encoder|tokenizer)(_\d+)?|processor")
WITHOUT = {"StableDiffusion3Pipeline": ("text_encoder_3", "tokenizer_3")}  # that pipelines draw without
UNUSED = re.compile(r"lm_head|visual|vision")  # of language models that only read a text here
WORDS = re.compile(r"vocab.*|tokenizer\.(json|model)|.*\.(model|tiktoken)")
LIBRARIES = ("diffusers", "transformers")
PLAIN = ("diffusion_pytorch_model", "model")  # diffusers' and transformers' names
# diffusers passes it on whenever it reads a config of the hub: nothing that a user can change.
warnings.filterwarnings("ignore", message="The `local_dir_use_symlinks` argument", category=UserWarning)


def find(model: str) -> tuple[str, dict[str, Any]]:
    """Where the model is (folder, or OWNER/NAME@COMMIT, as far as it is known), and its model_index.json, which has
    under "_form" what `form_of` knows of the name.

    Raises:
        UserError: there is no such model, or it cannot be read.
    """
    if (form := form_of(model)) is not None:
        source, index = form.find(find)
        return source, index | {"_form": form}
    source, index = _find(model)
    refuse_code(source, index)
    return source, index


def _find(model: str) -> tuple[str, dict[str, Any]]:
    folder = folder_of(model)
    if folder.is_dir():
        try:
            with foreign(f"model: {folder / 'model_index.json'}", "diffusers' JSON"):
                return str(folder), dict(json.loads((folder / "model_index.json").read_text()))
        except FileNotFoundError:
            raise UserError(f'model: folder "{folder}" has no model_index.json (diffusers\' format)') from None
    if folder.is_file():
        raise UserError(f"model: {folder} is a file, expected a folder in diffusers' format, .safetensors or .gguf")
    if model in worlds():
        raise UserError(f'model: the {model}\'s weights are missing, no folder "{folder}"')
    from diffrl.hub import not_name, pinned
    from diffrl.hub_access import hub_failure

    if not_name(model, "OWNER/NAME[@REVISION]"):
        hint = nearest(model, worlds()) if "/" not in model else ""
        known = ", ".join(worlds())
        raise UserError(f'model: no folder "{model}"; give {known}, a folder, or a hub id OWNER/NAME[@REVISION]{hint}')
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


def variants_of(folder: Path, index: Mapping[str, Any]) -> dict[str, str | None]:
    """The `variant` to load each part with weights with: None where plain ones are there, else such as "fp16".

    Raises:
        UserError: if a part is not there, or its weights are in a form that cannot be read; the part, the form and what
            to do are named.
    """
    variants: dict[str, str | None] = {}
    for name, entry in index.items():
        if not PIECE.fullmatch(name) or not isinstance(entry, list) or not entry[1]:
            continue
        part = _part(folder, name)
        if name.startswith("tokenizer") and not any(map(WORDS.fullmatch, os.listdir(part))):
            raise UserError(f"model: {part} has no vocabulary; expected such as tokenizer.json")
    for name, kind in parts_with_weights(index):
        files = {file.name: file for file in (folder / name).iterdir()}
        weights = [file for file in files if file.endswith(".safetensors") and file.startswith(PLAIN)]
        _check_whole(folder / name, weights)
        if not weights:
            _refuse_other_form(folder / name, files, kind)
        found = {_variant(file) for file in weights}
        variants[name] = None if None in found else min(map(str, found))
    return variants


def load_parts(folder: Path, index: Mapping[str, Any], types: Mapping[str, torch.dtype]) -> dict[str, Any]:
    """The modules with weights of a folder, by their names in the pipeline.

    Raises:
        UserError: a module has weights that its files have not; the libraries would go on with random ones.
    """
    modules = {}
    for name, variant in variants_of(folder, index).items():
        if index[name][0] not in LIBRARIES:
            continue
        words = {"dtype": types.get(name, types["default"]), "variant": variant, "use_safetensors": True}
        kind = getattr(import_module(index[name][0]), index[name][1])
        module, found = kind.from_pretrained(folder / name, output_loading_info=True, **words)
        if missing := sorted(key for key in found["missing_keys"] if not UNUSED.search(key)):
            text = f"{len(missing)} weights of {index[name][1]} ({missing[0]}{', ...' * (len(missing) > 1)})"
            raise UserError(f"model: {folder / name} lacks {text}: its files are not whole, or another model's")
        modules[name] = module
    return modules


def types_of(source: str, index: Mapping[str, Any], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """In which type each part is read: "default", and the autoencoder's, fp32 if its config says so."""
    upcast = config_of(source, "vae").get("force_upcast", index["vae"][1] == "AutoencoderKL")
    return {"default": dtype, "vae": torch.float32 if upcast else dtype}


def check_words(folder: Path, pipe: Any) -> None:
    """UserError for a tokenizer of CLIP's that does not say how long its texts are, to which it pads them."""
    for name, part in pipe.components.items():
        if isinstance(part, CLIPTokenizer) and part.model_max_length > 10**6:
            raise UserError(f"model: {folder / name}/tokenizer_config.json: no model_max_length; CLIP's is 77")


def refuse_missing(index: Mapping[str, Any], pipeline: Any) -> None:
    """UserError for a part of model_index.json that its pipeline needs and is not named, or whose class the installed
    diffusers or transformers has not."""
    for name in filter(PIECE.fullmatch, inspect.signature(pipeline.__init__).parameters):
        entry = index.get(name)
        named = isinstance(entry, list) and len(entry) == 2 and all(isinstance(one, str) for one in entry)
        if not named and not (entry in (None, [None, None]) and name in WITHOUT.get(pipeline.__name__, ())):
            text = f"model: model_index.json: {name} is {json.dumps(entry)}, and a {pipeline.__name__} needs it"
            raise UserError(f"{text}; expected [LIBRARY, CLASS], and a folder {name}")
    for name, entry in index.items():
        if not isinstance(entry, list) or entry[0] not in LIBRARIES:
            continue
        library = import_module(entry[0])
        if not hasattr(library, str(entry[1])):
            near = nearest(str(entry[1]), (one for one in dir(library) if one[0].isupper()))
            text = (
                f'model: model_index.json: {name}: the installed {entry[0]} {library.__version__} has no "{entry[1]}"'
            )
            raise UserError(f"{text}{near}; a newer {entry[0]} may")


def refuse_quantised(source: str, index: Mapping[str, Any]) -> None:
    """UserError if weights are in fewer bits already: a LoRA is put in, and merged, over full ones."""
    for name, _ in parts_with_weights(index):
        settings = config_of(source, name).get("quantization_config")
        if settings is not None:
            method = settings.get("quant_method", "some way") if isinstance(settings, dict) else "some way"
            text = f'model: the {name} of "{source}" is quantised already ({method}); give the full model'
            raise UserError(f"{text}, and engine.base: int8, fp8 or nf4")


def config_of(source: str, part: str) -> dict[str, Any]:
    """A part's config.json."""
    from diffrl.hub import pinned

    where, at = pinned(source)
    with foreign(f"model: {part}/config.json", "diffusers' JSON"):
        if Path(where).is_dir():
            return dict(json.loads((_part(Path(where), part) / "config.json").read_text()))
        return dict(AutoencoderKL.load_config(where, subfolder=part, **at))


def _part(folder: Path, name: str) -> Path:
    """A part's folder; UserError without it."""
    if not (folder / name).is_dir():
        text = f'model_index.json names "{name}", and there is no folder {folder / name}'
        raise UserError(f'model: {text}; a model without it says "{name}": [null, null]')
    return folder / name


def refuse_code(source: str, index: Mapping[str, Any]) -> None:
    """UserError if the model brings code of its own: a community pipeline, or a component of a file beside it."""
    named = [index.get("_class_name"), *(entry for name, entry in index.items() if not name.startswith("_"))]
    for entry in named:
        if isinstance(entry, list) and entry and isinstance(entry[0], str):
            module = entry[0]
            if (entry is named[0] or module not in LIBRARIES) and not hasattr(pipelines, module):
                text = f'model: "{source}" brings code of its own ({module}.py), which is not run'
                raise UserError(f"{text}; give a model of a pipeline of diffusers, or `family: FILE.py:CLASS` for one")


def _variant(file: str) -> str | None:
    """Of "model.fp16-00001-of-00002.safetensors": "fp16"; None of a plain name."""
    middle = file.removesuffix(".safetensors").split(".")[1:]
    return middle[0].split("-")[0] if middle else None


def _check_whole(part: Path, weights: list[str]) -> None:
    """UserError for a file of weights that is cut off or something else, or which an index names and is not there."""
    for file in weights:
        if damage := damage_of(part / file):
            raise UserError(f"model: {part / file} {damage}")
    for index in part.glob("*.safetensors.index*.json"):
        try:
            named = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"model: {index} is no list of weights ({in_one_line(error)})") from None
        missing = [file for file in named if not (part / file).is_file()]
        if missing and (len(missing) < len(named) or not weights):
            raise UserError(f"model: {part} lacks {len(missing)} of its {len(named)} files of weights: {missing[0]}")


def _refuse_other_form(part: Path, files: Mapping[str, Path], kind: str) -> NoReturn:
    """UserError for a part whose `files` have no safetensors: which form is there, and what to do."""
    pickles = sorted(file for file in files if file.endswith((".bin", ".ckpt", ".pt", ".pth")))
    gguf = sorted(file for file in files if file.endswith(".gguf"))
    if pickles:
        text = f"{part} has {pickles[0]} only, a pickle, which is not read"
        save = f"{kind}.from_pretrained({str(part)!r}, use_safetensors=False).save_pretrained({str(part)!r})"
        raise UserError(f"model: {text}; {save} writes safetensors")
    if gguf:
        raise UserError(f"model: {part} has {gguf[0]} only, which is quantised; give the full model, and engine.base")
    there = ", ".join(sorted(files)[:4]) or "nothing"
    raise UserError(
        f"model: {part} has no weights; expected {PLAIN[0]}.safetensors or {PLAIN[1]}.safetensors, here {there}"
    )
