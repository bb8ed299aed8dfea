"""The support table: every family with its models, guidance, sizes, evidence and restrictions."""

from __future__ import annotations

import re
from typing import Any

from diffrl.errors import UserError, nearest
from diffrl.plugins import installed
from diffrl.policy.registry import find_family

COLUMNS = (
    "pipeline",
    "models: steps, guidance",
    "guidance",
    "sizes",
    "engines",
    "evidence",
    "restrictions",
)
ENGINES = "one process, DDP, FSDP2"


def rows() -> list[list[str]]:
    """One row per family, with the pipeline classes that it serves, in the order of `COLUMNS`."""
    lines: list[list[str]] = []
    shown: dict[Any, list[str]] = {}  # a family's row
    for pipeline in installed("family"):
        try:
            family: Any = find_family(pipeline)
            if family in shown:
                shown[family][0] += f", {pipeline}"
                continue
        except UserError as error:
            lines.append([pipeline, str(error)] + [""] * (len(COLUMNS) - 2))
            continue
        known = "; ".join(
            f"{model.name}: {model.steps}, {model.guidance:g}" + (f" ({model.note})" if model.note else "")
            for model in getattr(family, "known", ())
        )
        rest = "; ".join(getattr(family, "restrictions", ())) or "none"
        sizes = f"multiples of {getattr(family, 'multiple', '?')}"
        about = (getattr(family, "guidance_rule", ""), sizes, ENGINES, getattr(family, "evidence", "none"))
        lines.append([pipeline, known, *about, rest])
        shown[family] = lines[-1]
    return lines


def overview(width: int = 80) -> str:
    """One line for each family: its first pipeline class and its models, cut to `width` characters."""
    found = [(pipeline.split(", ")[0], known) for pipeline, known, *_ in rows()]
    first = max((len(pipeline) for pipeline, _ in found), default=0) + 2
    lines = [
        f"{pipeline:<{first}}{'; '.join(part.split(':')[0] for part in known.split('; '))}" for pipeline, known in found
    ]
    lines = [line if len(line) <= width else f"{line[: width - 4]} ..." for line in lines]
    return "\n".join(
        [*lines, "", "`diffrl models show NAME` has the rest: steps, guidance, sizes, evidence, restrictions."]
    )


def shown(name: str) -> str:
    """What is known of the families whose pipeline class or model is called so. UserError where none is."""
    known = rows()
    wanted, words = _letters(name), [_letters(word) for word in re.split(r"[\W_]+", name) if word]
    found = [row for row in known if wanted in map(_letters, _names(row))]
    found = found or [row for row in known if any(wanted and wanted in _letters(one) for one in _names(row))]
    found = found or [row for row in known if any(all(word in _letters(one) for word in words) for one in _names(row))]
    if not found or not words:
        names = [one for row in known for one in _names(row)]
        raise UserError(f'no family has a pipeline or a model "{name}"{nearest(name, names)}')
    width = max(map(len, COLUMNS)) + 2
    return "\n\n".join(
        "\n".join(f"{column:<{width}}{cell}" for column, cell in zip(COLUMNS, row, strict=True) if cell)
        for row in found
    )


def _letters(name: str) -> str:
    """sd3.5, SD 3.5 and stable-diffusion-3.5, sd15 and stable-diffusion-v1-5 are written alike."""
    return re.sub(r"[\W_]", "", name.lower()).replace("stablediffusion", "sd").replace("sdv", "sd")


def _names(row: list[str]) -> list[str]:
    """What a family may be called: its pipeline classes, with and without "Pipeline", and its models."""
    classes = row[0].split(", ")
    return [
        *classes,
        *(one.removesuffix("Pipeline") for one in classes),
        *(one.split(":")[0] for one in row[1].split("; ")),
    ]


def markdown() -> str:
    """As a Markdown table, for the docs: narrow enough for a page, without the engines, which are every family's."""
    head = ("pipeline", "models: steps, guidance", "guidance", "sizes, restrictions", "evidence")
    lines = [head, ("---",) * len(head)]
    for pipeline, known, guidance, sizes, _, evidence, restrictions in rows():
        limits = sizes if restrictions == "none" else "; ".join(filter(None, (sizes, restrictions)))
        lines.append((pipeline, known, guidance, limits, evidence))
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
