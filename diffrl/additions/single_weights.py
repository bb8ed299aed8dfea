"""Models in one file, `.safetensors` or GGUF, read by diffusers' converters over the configs of a base model.

A checkpoint of a whole pipeline (SD, SDXL) gives all that it has, a file of the network alone the network; the rest
comes from the base. GGUF's blocks become numbers when they are read: a LoRA is trained over full weights, which
`engine.base` quantises again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.loaders import single_file_utils
from torch import Tensor

from diffrl.errors import UserError, in_one_line
from diffrl.hub import pinned

LORA = re.compile(r"\.lora[._](A|B|up|down)\.|_lora\.(up|down)\.|^lora_(unet|te)")
AUTOENCODER = ("first_stage_model.", "vae.")
TEXTS = ("cond_stage_model.", "conditioner.")
# Empty tensors, by which a checkpoint says how it was trained, and the scheduler's field that says it in diffusers.
MARKS = {"v_pred": ("prediction_type", "v_prediction"), "ztsnr": ("rescale_betas_zero_snr", True)}
SCALED = ("scaled_fp8", ".scale_weight", ".weight_scale", ".comfy_quant", ".absmax", ".quant_state", ".qweight")


def find_own(file: Path, find: Callable[[str], Any]) -> Any:
    """What `find` says of the model on the hub whose configs diffusers takes for a file.

    Raises:
        UserError: it is none that diffusers knows, or `find` has none.
    """
    tensors = _read(file, None)
    found = single_file_utils.fetch_diffusers_config(tensors)["pretrained_model_name_or_path"]
    default = single_file_utils.DIFFUSERS_DEFAULT_PIPELINE_PATHS["v1"]["pretrained_model_name_or_path"]
    # Looked at, as diffusers takes whatever it does not know for Stable Diffusion 1.5.
    if found == default and not any("input_blocks.0.0.weight" in key for key in tensors):
        raise UserError(f'"{file}": of which model is not known; write BASE+{file}, BASE a folder or OWNER/NAME')
    try:
        return find(str(found))
    except UserError as error:
        text = f'"{file}" is read over the configs of its model; with a folder of them: FOLDER+{file}'
        raise UserError(f"{error}; {text}") from None


def load_file(file: Path, source: str, index: Mapping[str, Any], types: Mapping[str, torch.dtype]) -> dict[str, Any]:
    """The modules that a file has, by their names in the pipeline.

    Args:
        file: the file.
        source: the base's folder, or OWNER/NAME[@COMMIT].
        index: its model_index.json.
        types: "vae", of the autoencoder, and "default", of the rest.

    Raises:
        UserError: the file cannot be read, or is not of this model.
    """
    dtype = types["default"]
    tensors = _read(file, dtype)
    where, at = pinned(source)
    words: dict[str, Any] = {"config": where, **({"config_revision": at["revision"]} if at else {})}
    name = next(name for name in ("transformer", "unet") if index.get(name, [None])[0] is not None)
    modules: dict[str, Any] = {}
    _check_prediction(file, tensors, index, source)
    part = "vae"
    try:
        if any(key.startswith(AUTOENCODER) for key in tensors):
            kind = getattr(diffusers, index["vae"][1])
            modules["vae"] = kind.from_single_file(dict(tensors), subfolder="vae", torch_dtype=types["vae"], **words)
        for part in ("text_encoder", "text_encoder_2", "text_encoder_3"):
            if (module := _text_encoder(tensors, index.get(part), part, where, dtype)) is not None:
                modules[part] = module
        part, kind = name, getattr(diffusers, index[name][1])
        modules[name] = kind.from_single_file(dict(tensors), subfolder=name, torch_dtype=dtype, **words)
    except UserError:
        raise
    except NotImplementedError as error:  # torch's, where what the file has not is given its type
        raise UserError(f'model: "{file}" is not a whole {part} of {source}: it lacks tensors') from error
    except Exception as error:  # diffusers' converters, on a file that may be anybody's
        text = f'model: "{file}" is not a {index[name][1]} of {source}: {in_one_line(error, most=200)}'
        raise UserError(text) from error
    for part, module in modules.items():
        if empty := [key for key, value in module.state_dict().items() if value.is_meta]:
            raise UserError(f'model: "{file}" has no {part}.{empty[0]} ({len(empty)} such tensors) of {source}')
    return modules


def _check_prediction(file: Path, tensors: Mapping[str, Tensor], index: Mapping[str, Any], source: str) -> None:
    """UserError where the file says by MARKS that it predicts what the base's scheduler does not read."""
    wanted = dict(field for mark, field in MARKS.items() if mark in tensors)
    if not wanted:
        return
    where, at = pinned(source)
    config = getattr(diffusers, index["scheduler"][1]).load_config(where, subfolder="scheduler", **at)
    if missing := {key: value for key, value in wanted.items() if config.get(key) != value}:
        raise UserError(
            f'model: "{file}" was trained with {json.dumps(missing)[1:-1]}, which the scheduler of {source} '
            "has not; write BASE+FILE, BASE being a model whose scheduler/scheduler_config.json has it"
        )


def _text_encoder(tensors: Mapping[str, Tensor], entry: Any, name: str, config: str, dtype: torch.dtype) -> Any:
    """A CLIP or T5 of the file, or None."""
    if not isinstance(entry, list) or entry[0] != "transformers":
        return None
    import transformers

    kind = getattr(transformers, entry[1])
    words = {"checkpoint": dict(tensors), "config": config, "subfolder": name, "torch_dtype": dtype}
    if single_file_utils.is_clip_model_in_single_file(kind, tensors) and "CLIP" in kind.__name__:
        return single_file_utils.create_diffusers_clip_model_from_ldm(kind, **words)
    if "CLIP" in kind.__name__ and (unread := next((key for key in tensors if key.startswith(TEXTS)), None)):
        raise UserError(f'model: the file has a text encoder under names that are not read, such as "{unread}"')
    if single_file_utils.is_t5_in_single_file(tensors) and "T5" in kind.__name__:
        return single_file_utils.create_diffusers_t5_model_from_checkpoint(kind, **words)
    return None


def _read(file: Path, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The file's tensors by name; GGUF's as numbers of this type, None: as blocks."""
    if file.suffix.lower() == ".gguf":
        try:
            import gguf  # noqa: F401
        except ImportError:
            raise UserError(f"model: {file}: pip install 'diffrl[gguf]' reads GGUF") from None
    try:
        tensors = single_file_utils.load_single_file_checkpoint(str(file))
    except Exception as error:  # safetensors', gguf's
        raise UserError(f"model: {file}: not a readable file ({in_one_line(error)})") from error
    for key in tensors:
        if LORA.search(key):
            raise UserError(
                f'model: "{file}" is a LoRA ({key}); name its model, and the LoRA with --lora or lora.start'
            )
        if key.endswith(SCALED):
            raise UserError(
                f"model: {file}: quantised weights with scales beside them ({key}) are not read; give full ones"
            )
    if file.suffix.lower() != ".gguf" or dtype is None:
        return dict(tensors)
    from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

    return {key: dequantize_gguf_tensor(tensor).to(dtype) for key, tensor in tensors.items()}
