"""What mkdocs calls while it builds the site: pages from the code, figures from assets/results, equations as MathML.

In a page, `[[ results("gardo", "GARDO=clip_gardo.json", columns="clip strict") ]]` is a call of a function, below or in
`measured.py`, that is marked with `@page_function`; an unknown file or key fails the build.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "docs")]

from measured import FUNCTIONS, page_function  # noqa: E402

from diffrl.cli.main import _parser  # noqa: E402
from diffrl.config.help import reference  # noqa: E402

# --- what mkdocs calls -----------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave out entries of the navigation whose page is not written, or not made here."""
    os.environ.setdefault("COLUMNS", "110")  # the width of the command line's help
    made = {"reference/cli.md", "reference/config.md", "reference/contributing.md", "reference/changelog.md"}

    def kept(entries: list[Any]) -> list[Any]:
        found: list[Any] = []
        for entry in entries:
            ((title, value),) = entry.items()
            if isinstance(value, list):
                found += [{title: inner}] if (inner := kept(value)) else []
            elif value in made or (Path(config.docs_dir) / value).is_file():
                found.append(entry)
        return found

    config.nav = kept(config.nav or [])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from the code, and the pictures that lie beside the documentation."""
    pages = {
        "reference/cli.md": command_line(),
        "reference/config.md": "# Config keys\n\n" + CONFIG_INTRODUCTION + reference(),
        "reference/contributing.md": (ROOT / "CONTRIBUTING.md").read_text(),
        "reference/changelog.md": (ROOT / "CHANGELOG.md").read_text(),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    for image in sorted((ROOT / "assets" / "images").glob("*.png")):
        files.append(File.generated(config, f"images/{image.name}", abs_src_path=str(image)))
    for page in sorted((ROOT / "assets" / "examples").glob("*.html")):
        files.append(File.generated(config, f"examples/{page.name}", abs_src_path=str(page)))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Fill in the figures."""
    made = page.file.src_uri.startswith("reference/") and page.file.generated_by
    there = {file.src_uri for file in files}
    folder = Path(page.file.src_uri).parent
    markdown = RELATIVE.sub(lambda match: _link(match, folder, there), markdown)
    markdown = PICTURE.sub(lambda match: f"]({os.path.relpath('images', folder)}/{match[1]})", markdown)
    if made:
        return markdown
    environment = jinja2.Environment(
        variable_start_string="[[",
        variable_end_string="]]",
        block_start_string="[%",
        block_end_string="%]",
        comment_start_string="[#!",
        comment_end_string="!#]",
        undefined=jinja2.StrictUndefined,
    )
    text = environment.from_string(markdown).render(**FUNCTIONS, has=lambda name: name in there)
    return text.replace(" ± ", "\u00a0±\u00a0")  # a value stays on one line with its deviation


PICTURE = re.compile(r"\]\((?:\.\./)+assets/images/([^)]+)\)")  # as GitHub shows the page; the site has them in images/
RELATIVE = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def _link(match: re.Match[str], folder: Path, there: set[str]) -> str:
    """A link to a file of the repository that is no page becomes the file's name: the site does not carry it."""
    target = os.path.normpath(folder / match[2])
    outside = os.path.normpath(Path("docs") / target)
    if target in there or not ((ROOT / outside).exists() or (ROOT / match[2]).exists()):
        return match[0]
    name = outside if (ROOT / outside).exists() else match[2]
    return f"{match[1]} (`{name}`)" if match[1].strip("`") != name else f"`{name}`"


def on_page_content(content: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Equations as MathML, which browsers draw themselves: no script, no fonts."""

    def formula(match: re.Match[str]) -> str:
        text = html.unescape(match[2]).strip()
        display = "block" if text.startswith("\\[") else "inline"
        made = convert(text[2:-2].strip(), display=display)
        if "\\" in made:  # a command that latex2mathml does not know would be shown as it is written
            raise PluginError(f"{page.file.src_uri}: no MathML for {text}")
        return made

    return re.sub(r'<(div|span) class="arithmatex">(.*?)</\1>', formula, content, flags=re.DOTALL)


# --- pages from the code ---------------------------------------------------------------------------------------------

CONFIG_INTRODUCTION = """Made from the schema that checks every config (`diffrl train --help-config` prints the same).
A config is one YAML file; `section.key=value` on the command line, or `section={"key": value}` in Python, overrides it.
A key that is not listed is an error that names the nearest one.

"""


def command_line() -> str:
    """The help of every command, from the parsers themselves."""
    parser = _parser()
    parts = [
        "# Command line\n\nMade from the commands' own help. Exit codes: 0 success; 1 a run that could not go on, or a "
        "check that failed; 2 bad input, in one line that says what and where; 75 ended by a signal with everything "
        "saved; 130 interrupted.\n"
    ]
    for name, command in walk(parser):
        parts.append(
            f"{'##' if name.count(' ') == 1 else '###'} {name}\n\n```text\n{command.format_help().rstrip()}\n```\n"
        )
    return "\n".join(parts)


def walk(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield command.prog, command
                yield from walk(command)


# --- parts of the repository --------------------------------------------------------------------------------------


@page_function
def recipe(name: str) -> str:
    """A shipped config, with its header that says where each value is from."""
    return f'```yaml title="configs/{name}.yaml"\n{(ROOT / "configs" / f"{name}.yaml").read_text().rstrip()}\n```\n'


@page_function
def recipes() -> str:
    """Every shipped config with the first sentence of its header."""
    lines = ["| recipe | what it is |", "| --- | --- |"]
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        words = " ".join(line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#"))
        first = re.split(r"(?<=[.:])\s", words, maxsplit=1)[0].rstrip(":")
        lines.append(f"| `{path.relative_to(ROOT / 'configs').with_suffix('')}` | {first.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


@page_function
def keys(section: str) -> str:
    """The config keys of one section."""
    return reference(only=section)


@page_function
def reward_cards() -> str:
    from diffrl.rewards.cards import markdown

    return markdown()


@page_function
def models() -> str:
    """The support table of `diffrl models list --markdown`."""
    from diffrl.conformance.table import markdown

    return markdown()


@page_function
def exists(path: str) -> bool:
    """Whether the repository has this file."""
    return (ROOT / path).exists()


@page_function
def include(path: str, start: str = "", end: str = "") -> str:
    """Text of a file of the repository, from a line that begins with `start` up to one that begins with `end`."""
    lines = (ROOT / path).read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(start))
    last = next((i for i, line in enumerate(lines) if i > first and end and line.startswith(end)), len(lines))
    return "\n".join(lines[first:last])
