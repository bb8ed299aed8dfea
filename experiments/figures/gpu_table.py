"""The page's table of what `scripts/gpu_proof.py` found on a GPU, for `tables.py`."""

from __future__ import annotations

from typing import Any

KEYS = ("images_per_second_rollout", "rows_per_second_optimise", "share_of_bare_loop", "peak_gib", "counted_gib")


def table(found: dict[str, Any] | None) -> str:
    """That nothing was measured yet where there is no file, or one of the tiny size."""
    parts = {name: part for name, part in (found or {}).get("parts", {}).items() if part["status"] == "done"}
    if found is None or found["tiny"] or not parts:
        return "**Not measured**: nobody has run `scripts/gpu_proof.py` on a GPU and committed its figures yet."
    lines = [f"| part | {' | '.join(key.replace('_', ' ') for key in KEYS)} |", "| --- " * (len(KEYS) + 1) + "|"]
    for name, part in parts.items():
        cells = [f"{part[key]:g}" if key in part else "" for key in KEYS]
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    gains = [
        f"| {name.split('/')[1]} | {', '.join(f'{key} {value:g}' for key, value in part['relative'].items())} |"
        for name, part in parts.items()
        if "relative" in part
    ]
    options = ["", "| option | beside the plain run |", "| --- | --- |", *gains] if gains else []
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in ("diffrl", "torch", "diffusers"))
    return "\n".join([*lines, *options]) + f"\n\nDevice: {found['machine']['gpu']}; {versions}."
