"""The words of the section `lora`: what its LoRA is, and whether the LoRAs that it names are there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffrl.config.base import Problem
from diffrl.errors import UserError, nearest

KINDS = ("lora", "rslora", "dora")
STARTS: dict[str, str | bool] = {"gaussian": "gaussian", "kaiming": True, "orthogonal": "orthogonal"}


def kind_of(text: str) -> str:
    """The words of `lora.kind`, each of them known, at most one of them a start."""
    words = str(text).split("+")
    for word in words:
        if word not in KINDS and word not in STARTS:
            from diffrl.lora_files import OTHERS

            if word.partition("_niter")[0] in OTHERS:
                raise UserError(
                    f'"{word}" changes the frozen weights or reads data first: its file would fit no base model'
                )
            raise UserError(f'unknown "{word}"{nearest(word, [*KINDS, *STARTS])}')
    if sum(word in STARTS for word in words) > 1 or len({*words}) < len(words) or ("lora" in words and len(words) > 2):
        raise UserError(f'"{text}": a word is too many; lora, rslora, dora or dora+rslora, and one start')
    return text


def targets_of(value: Any) -> Any:
    """`lora.targets` as a list: `attention+mlp` is [attention, mlp]."""
    return value.split("+") if isinstance(value, str) else value


def merged(value: Any) -> list[str]:
    """`lora.merge` as a list of `LORA[=WEIGHT]`."""
    from diffrl.lora_files import as_list

    return as_list(value)


def spec_of(lora: Any) -> Any:
    """The `LoraSpec` of a section `lora`, or of its plain table in a run's config."""
    from diffrl.policy.lora import LoraSpec

    values = lora if isinstance(lora, Mapping) else lora.model_dump()
    words = str(values.get("kind", "lora")).split("+")
    (rank, ranks), (alpha, alphas) = (_by_word(values[name]) for name in ("rank", "alpha"))
    start = next((STARTS[word] for word in words if word in STARTS), "gaussian")
    more: dict[str, Any] = {"targets": values.get("targets"), "ranks": ranks, "alphas": alphas}
    return LoraSpec(int(rank), float(alpha), dora="dora" in words, rslora="rslora" in words, init=start, **more)


def told(value: Any) -> str:
    """A rank or an alpha in words."""
    default, others = _by_word(value)
    return ", ".join([f"{default:g}", *(f"{number:g} in {word}" for word, number in others.items())])


def _by_word(value: Any) -> tuple[float, dict[str, float]]:
    if not isinstance(value, Mapping):
        return value, {}
    return value["default"], {word: number for word, number in value.items() if word != "default"}


def check_given(config: Any) -> None:
    """Problem where a LoRA of the section `lora` is not there, or is of a run with others merged than this one."""
    from diffrl.lora_files import find_lora, weighted
    from diffrl.records.drawing import trained_at

    if "orthogonal" in config.lora.kind.split("+"):
        ranks = config.lora.rank.values() if isinstance(config.lora.rank, dict) else [config.lora.rank]
        if config.optimise.precision != "fp32" or any(rank % 2 for rank in ranks):
            raise Problem("lora.kind", "orthogonal begins without effect at even ranks and in fp32 only; use kaiming")
    names = {"lora.merge": [weighted(one)[0] for one in config.lora.merge], "lora.start": [config.lora.start]}
    for key, name in ((key, name) for key, several in names.items() for name in several if name is not None):
        try:
            find_lora(name)
        except UserError as error:
            raise Problem(key, str(error)) from None
    over = trained_at(config.lora.start, config.model).get("merge") if config.lora.start is not None else None
    if over is not None and over != config.lora.merge:
        text = f"{config.lora.start} was trained over merged LoRAs: set lora.merge to [{', '.join(over)}]"
        raise Problem("lora.start", text)


def files_of(lora: Any) -> dict[str, Path | str]:
    """The files of a section `lora`: a resume must find the same."""
    if not lora.merge and lora.start is None:
        return {}
    from diffrl.lora_files import lora_file, weighted

    named = {f"lora.merge (file {number})": weighted(one)[0] for number, one in enumerate(lora.merge, 1)}
    named |= {} if lora.start is None else {"lora.start (file)": lora.start}
    return {key: lora_file(name) for key, name in named.items()}
