"""Prose of the pages at 80 columns, as raw Markdown: tables, code, pictures, equations and made blocks stay.

python -m experiments.figures.wrap              # writes the pages that are not
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 80
# What is not cut: code between backticks, a short link, a link's address, a value with its deviation.
WORD = re.compile(r"(?:`[^`]*`|\[(?=[^)]{1,58}\))[^\[\]]*\]\([^)\s]*\)|\]\([^)\s]*\)|\S ± (?=\S)|\S)+")
ITEM = re.compile(r"(\s*(?:[-*+]|\d+\.)\s+)(.*)")
KEPT = re.compile(r"\s*(\||<|#|!\[|>|---|\$\$|\\\[|!!! |\?\?\? |=== |\[[^\]]+\]:)|\s*$|    ")
MARK = re.compile(r"([-*+>|]|\d+\.|#+|=+)$")  # at a line's begin it would be more than a word


def pages() -> list[Path]:
    named = ("README.md", "AGENTS.md", "CONTRIBUTING.md", "rewards/README.md")
    return [*(ROOT / name for name in named), *sorted((ROOT / "docs").rglob("*.md"))]


def wrapped(text: str) -> str:
    """The page with its paragraphs and items filled."""
    out: list[str] = []
    block: list[str] = []
    first = rest = ""
    code = made = False
    for line in [*text.splitlines(), ""]:
        item = ITEM.fullmatch(line)
        indent = len(line) - len(line.lstrip())
        opens = bool(re.match(r"\s*(```|~~~)", line))
        starts = bool(re.match(r"<!-- \S+\.py", line))
        goes_on = bool(block) and indent == len(rest) and not item and not re.match(r"\s*(\||<|#|>|!\[|$)", line)
        if not code and not made and not opens and goes_on:
            block.append(line.strip())
            continue
        if block and not code and not made:
            out += _filled(" ".join(block), first, rest)
            block = []
        if code or made or opens or starts:
            code, made = code ^ opens, (made or starts) and "<!-- end -->" not in line
            out.append(line)
        elif item and not line.startswith("    "):
            first, rest, block = item[1], " " * len(item[1]), [item[2]]
        elif KEPT.match(line) or indent:
            out.append(line)
        else:
            first, rest, block = "", "", [line.strip()]
    return "\n".join(out).rstrip("\n") + "\n"


def _filled(text: str, first: str, rest: str) -> Iterator[str]:
    line, fresh = first, True
    for word in WORD.findall(text):
        if not fresh and len(line) + 1 + len(word) > WIDTH and not MARK.match(word):
            yield line
            line, fresh = rest, True
        line, fresh = line + ("" if fresh else " ") + word, False
    yield line


if __name__ == "__main__":
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := wrapped(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))
