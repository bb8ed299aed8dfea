"""What the zoo's rewards share to load models: precisions, devices, files, bytes, errors."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffrl.errors import UserError
from diffrl.hub import pinned
from diffrl.memory.footprint import footprint
from diffrl.rewards.protocol import Reward
from diffrl.rewards.registry import load_reward, takes
from diffrl_zoo.inputs import check_choice

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HALVES = {"siglip": "SiglipVisionModel", "clip": "CLIPVisionModel"}  # of image and text: what has the image's half


def dtype_of(precision: str, reward: str) -> torch.dtype:
    """The weights' type by its short name: fp32, bf16 or fp16."""
    check_choice("precision", precision, PRECISIONS, reward)
    return PRECISIONS[precision]


def pick_device(device: str | None) -> torch.device:
    """`device`, or for None this process's CUDA device, or the CPU."""
    if device is not None:
        try:
            return torch.device(device)
        except RuntimeError as error:
            raise UserError(f'unknown device "{device}" (for example cpu, cuda, cuda:1)') from error
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def cannot_load(reward: str, name: str, kind: str = "") -> Iterator[None]:
    """What loading a model raises, as one line: UserError 'REWARD: cannot load KIND"NAME": ...'."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise UserError(f'{reward}: cannot load {kind}"{name}": {" ".join(str(error).split())}') from error


def from_pretrained(kind: Any, model: str, **options: Any) -> Any:
    """`kind.from_pretrained` of a folder, or of a hub id at the commit that this process has of it."""
    source, at = pinned(model)
    return kind.from_pretrained(source, **at, **options)


def frozen(kind: Any, model: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The model of transformers' class `kind` on a device, without gradients for its weights."""
    return from_pretrained(kind, model, dtype=dtype).eval().requires_grad_(False).to(device)


def hub_file(repository: str, file: str, reward: str, key: str) -> Path:
    """A repository's file, from the hub's cache or the hub; UserError, which says to name it as `key`, if it is not."""
    from huggingface_hub import hf_hub_download

    source, at = pinned(repository)
    try:
        return Path(hf_hub_download(source, file, **at))
    except (OSError, ValueError) as error:  # no hub, and not in its cache
        text = f"cannot download {file} of {repository}; name its file as `{key}`"
        raise UserError(f"{reward}: {text} ({' '.join(str(error).split())})") from error


def weights_file(path: str | None, repository: str, file: str, reward: str) -> Path:
    """The file of weights `path`, or for None the published one; UserError if there is none."""
    if path is None:
        return hub_file(repository, file, reward, "weights")
    if not Path(path).is_file():
        raise UserError(f'{reward}: no file of weights "{path}"')
    return Path(path)


def channels(device: torch.device, *values: Sequence[float]) -> Iterator[Tensor]:
    """Each of the `values`, one for each colour, as (3, 1, 1)."""
    return (torch.tensor(value, device=device).view(3, 1, 1) for value in values)


def transformers_bytes(kind: str, model: str, precision: str, half: bool = False) -> int | None:
    """Of the weights that transformers' `kind` loads for a model, by its config alone; None if there is none here.

    half: of models of image and text the image's half alone.
    """
    import transformers

    try:
        config = from_pretrained(transformers.AutoConfig, model)
        if half and config.model_type in HALVES:
            config = config.vision_config
        with torch.device("meta"):
            made = getattr(transformers, kind).from_config(config)
        return sum(parameter.numel() for parameter in made.parameters()) * PRECISIONS[precision].itemsize
    except (OSError, ValueError, KeyError):
        return None


def footprint_of(parameters: Mapping[str, int], kind: str | None = None) -> Any:
    """The `footprint` of a reward that loads a `model` in a `precision`, by the published models' `parameters`.

    Of other models by their config, as transformers' class `kind`; without a `kind` it cannot say.
    """

    def footprint(model: str, precision: str, **_: Any) -> int | None:
        named = model.partition("@")[0]
        if named in parameters and precision in PRECISIONS:
            return parameters[named] * PRECISIONS[precision].itemsize
        return None if kind is None else transformers_bytes(kind, model, precision)

    return staticmethod(footprint)


class MadeOfAnother:
    """A reward that is made of the reward `reward`, whose parameters it takes beside its own."""

    @classmethod
    def footprint(cls, reward: str, **arguments: Any) -> int | None:
        """Bytes of the other reward's weights, without copies of what learns."""
        own = inspect.signature(cls).parameters
        return footprint(reward, {key: value for key, value in arguments.items() if key not in own})


def inner(reward: str, device: str | None, arguments: Mapping[str, Any]) -> Reward:
    """The reward that another one is made of, on `device` if it takes one."""
    given = {"device": device} if device is not None and takes(reward, "device") else {}
    return load_reward(reward, **{**arguments, **given})
