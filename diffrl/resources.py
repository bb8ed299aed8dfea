"""Where the shipped folders (`configs`, `assets`) are: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def shipped(folder: str, *parts: str) -> Path:
    """Path of a shipped file or folder, for example `shipped("assets", "playground")`.

    The path is returned whether or not it exists; callers give the message that fits their case.
    """
    checkout = _PACKAGE.parent / folder
    root = checkout if (_PACKAGE.parent / "pyproject.toml").exists() and checkout.exists() else _PACKAGE / f"_{folder}"
    return root.joinpath(*parts)
