"""Files: where the shipped folders (`configs`, `assets`), LoRAs, and files of a run are.

The shipped folders lie beside the package in a checkout, inside it in a wheel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from diffrl.errors import UserError, nearest

_PACKAGE = Path(__file__).resolve().parent
LORAS = ("lora", "healthy", "dial", "checkpoints")  # folders of a run with LoRAs


def shipped(folder: str, *parts: str) -> Path:
    """Path of a shipped file or folder, for example `shipped("assets", "playground")`.

    The path is returned whether or not it exists; callers give the message that fits their case.
    """
    checkout = _PACKAGE.parent / folder
    root = checkout if (_PACKAGE.parent / "pyproject.toml").exists() and checkout.exists() else _PACKAGE / f"_{folder}"
    return root.joinpath(*parts)


def shipped_configs() -> list[Path]:
    """The files of the shipped configs, sorted."""
    return sorted(shipped("configs").rglob("*.yaml"))


def table_beside(module: str, name: str) -> Any:
    """What a YAML file beside a module has, whose `__file__` is given. By libyaml, where it is: ten times as fast."""
    text = Path(module).parent.joinpath(name).read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def file_of_run(run: Path, name: str, what: str) -> Path:
    """The file of a run's folder; UserError if there is no such folder or file, or nothing in it."""
    if not run.is_dir():
        folders = [folder.name for folder in run.parent.iterdir() if folder.is_dir()] if run.parent.is_dir() else []
        raise UserError(f'{what}: no folder "{run}"{nearest(run.name, folders)}')
    if not (run / name).is_file():
        raise UserError(f'{what}: "{run}" is not a run\'s folder: it has no {name}')
    if not (run / name).stat().st_size:
        raise UserError(f"{what}: {run / name}: the file is empty")
    return run / name


def holds_run(folder: Path) -> bool:
    """Does it have what a run writes as it trains, or is it a checkpoint?"""
    return any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints", "manifest.json"))


def owner_of(place: Path) -> str:
    """Whose a file or folder of that name is, which a command may not write over: "a run", "a LoRA" of a run; or ""."""
    place = place.resolve()
    if holds_run(place):
        return "a run"
    runs = (folder for folder in place.parents if (folder / "config.yaml").is_file() and holds_run(folder))
    return "a LoRA" if any(place.relative_to(run).parts[0] in LORAS for run in runs) else ""
