"""LoRAs that a user names: the same words at every door (`--lora`, `--merge`, teachers, `load`, ...), and their reader.

`diffrl.loras` finds, reads and merges them. A package adds a reader by an entry point of the group
`diffrl.lora_readers`: that of the name `studio` gets the LoRAs that are called `studio:...`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from diffrl.errors import UserError
from diffrl.plugins import installed, load

OTHERS = ("pissa", "olora", "corda", "eva", "loftq", "lora_ga", "milora")  # peft's other starts


class LoraReader(Protocol):
    """What is done with LoRAs that a user names. `diffrl.loras.files.LoraFiles` does all of it: a reader is a class
    under that one, with another `find` and `file`.

    Every method raises UserError where there is no such LoRA, or it does not fit.
    """

    def find(self, name: str) -> Path | tuple[str, str | None]:
        """The file; of one on the hub the repository, and the file where one is named. Nothing is fetched."""

    def file(self, name: str) -> Path:
        """The file, fetched where it is not here; beside peft's there is its adapter_config.json then."""

    def merge(self, backbone: Any, loras: Sequence[tuple[str, float]]) -> Callable[[Any, bool], None]:
        """Add LoRAs to the weights of a model, each with its weight. What it returns is `without` of a `Policy`."""

    def begin(self, name: str, backbone: Any, lora: Any, **kind: Any) -> Any:
        """A `Policy(backbone, lora=lora, **kind)` whose LoRA begins as this one; text encoders wear their part of it.

        `lora` may have a larger rank, another scale and more layers; None: all of them are the file's. Where it names
        no targets, the family's and the file's get a LoRA.
        """

    def load(self, name: str, policy: Any, snapshot: str) -> None:
        """Set a LoRA of the policy to this one, of its rank at most; what it has not gets no effect."""


def reader_of(name: str | Path) -> LoraReader:
    """Of the package that the name begins with, else of files."""
    package = str(name).partition(":")[0]
    return cast(LoraReader, load("LoRA reader", package if package in installed("LoRA reader") else "diffrl:files")())


def find_lora(name: str | Path) -> Path | tuple[str, str | None]:
    """Where a LoRA lies, see `LoraReader.find`. UserError: there is none."""
    return reader_of(name).find(str(name))


def lora_file(name: str | Path) -> Path:
    """Its file, fetched where it is not here. UserError: there is none, or it cannot be had."""
    return reader_of(name).file(str(name))


def weighted(text: str) -> tuple[str, float]:
    """Name and weight of `LORA[=WEIGHT]`; a weight is from -100 to 100, 1 where there is none.

    Raises:
        UserError: what follows the "=" is no such number.
    """
    name, equals, number = text.rpartition("=")
    if not equals or Path(text).expanduser().exists():
        return text, 1.0
    try:
        weight = float(number)
    except ValueError:
        weight = float("nan")
    if not abs(weight) <= 100:
        raise UserError(f'"{text}": expected LORA=WEIGHT with a number from -100 to 100, got "{number[:40]}"')
    return name, weight


def as_list(given: Any) -> list[str]:
    """LoRAs that are merged, each `LORA[=WEIGHT]`: of one or several, each such a text or {file: LORA, weight: NUMBER}.

    Raises:
        UserError: it is none of that.
    """
    several = [] if given is None else [given] if isinstance(given, str | Path | dict) else given
    if not isinstance(several, Sequence):
        raise UserError("expected LORA, {file: LORA, weight: NUMBER}, or a list of them")
    texts = []
    for one in several:
        if isinstance(one, dict):
            if "file" not in one or one.keys() - {"file", "weight"}:
                raise UserError(f"expected file and weight, got {', '.join(map(str, one))}")
            one = f"{one['file']}={one['weight']}" if "weight" in one else one["file"]
        if not isinstance(one, str | Path):
            raise UserError(f"expected LORA or {{file: LORA, weight: NUMBER}}, got {one}")
        weighted(str(one))
        texts.append(str(one))
    return texts
