"""The words of the section `lora`: what its LoRA is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
