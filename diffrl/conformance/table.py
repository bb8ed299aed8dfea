"""The support table: every family with its models, guidance, sizes, evidence and restrictions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffrl.errors import UserError
from diffrl.policy.registry import families, find_family

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = (
    "pipeline",
    "models: steps, guidance",
    "guidance",
    "sizes",
    "objectives",
    "engines",
    "evidence",
    "restrictions",
)
OBJECTIVES = "all"
ENGINES = "one process, DDP, FSDP2"


def rows() -> list[list[str]]:
    """One row per family, with the pipeline classes that it serves, in the order of `COLUMNS`."""
    lines: list[list[str]] = []
    shown: dict[Any, list[str]] = {}  # a family's row
    for pipeline in families():
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
        about = (getattr(family, "guidance_rule", ""), sizes, OBJECTIVES, ENGINES, getattr(family, "evidence", "none"))
        lines.append([pipeline, known, *about, rest])
        shown[family] = lines[-1]
    return lines


def table() -> Table:
    """For the terminal."""
    from rich.table import Table

    grid = Table(show_lines=True)
    for column in COLUMNS:
        grid.add_column(column, no_wrap=column == "pipeline")
    for name, *cells in rows():
        grid.add_row(name.replace(", ", ",\n"), *cells)
    return grid


def markdown() -> str:
    """As a Markdown table, for the docs."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows()]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
