"""The tables of the pages: text between two comments, from assets/results and from the code, written by this command.

    python -m experiments.figures.tables            # write what is not as the results say it
    python -m experiments.figures.tables --check    # exit code 1 and the names of what is not

A table begins behind `<!-- SCRIPT WORD ... -->` and ends at `<!-- end -->`. SCRIPT, a path of the repository, is who
writes the result: its function `table` (`SCRIPT:NAME` is another) is called with the words, where the name of a file of
assets/results stands for what the file holds. Figures inside of sentences are listed in `sentences.yaml`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "assets" / "results"
BLOCK = re.compile(r"(<!-- (?P<script>\S+\.py)(:(?P<name>\w+))?(?P<words>[^\n]*?) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "experiments").rglob("*.md"))]


def function(script: str, name: str) -> Callable[..., str]:
    """A function of a script."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    result: Callable[..., str] = getattr(importlib.import_module(script.removesuffix(".py").replace("/", ".")), name)
    return result


def made(match: re.Match[str]) -> str:
    """The block as it should be, up to its end."""
    words: list[Any] = shlex.split(match["words"])
    arguments = [read(word) if word.endswith(".json") and "=" not in word else word for word in words]
    return f"{match[1]}\n{function(match['script'], match['name'] or 'table')(*arguments).strip()}\n\n"


def read(name: str) -> Any:
    """A file of assets/results; without a first folder `assets` it is looked for there. None: it is not there."""
    path = ROOT / name if name.startswith("assets/") else RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def old() -> dict[Path, str]:
    """The pages that are not as their tables should be, and what they should be."""
    texts = {page: page.read_text(encoding="utf-8") for page in pages()}
    after = {page: BLOCK.sub(made, text) for page, text in texts.items()}
    return {page: text for page, text in after.items() if text != texts[page]}


def write() -> None:
    for page, text in old().items():
        page.write_text(text, encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: written")


# --- tables of the code ----------------------------------------------------------------------------------------------


def keys(section: str) -> str:
    """The config keys of one section."""
    from diffrl.cli.config_help import reference

    return reference(only=section)


def rewards() -> str:
    """The cards of the reward zoo."""
    from diffrl.reward_tools.cards import markdown

    return markdown()


def models() -> str:
    """The support table of `diffrl models list --markdown`."""
    from diffrl.conformance.table import markdown

    return markdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    if not parser.parse_args().check:
        write()
    elif names := [str(page.relative_to(ROOT)) for page in old()]:
        raise SystemExit(f"tables: not as the results say: {', '.join(names)}; run it without --check")


if __name__ == "__main__":
    main()
