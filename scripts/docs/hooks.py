"""What mkdocs calls while it builds the site: pages made from the code and the recipes, links, equations as MathML."""

from __future__ import annotations

import argparse
import html
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from diffrl.cli.config_help import reference  # noqa: E402
from diffrl.cli.main import _parser  # noqa: E402
from experiments.figures import model_pages, recipe_table  # noqa: E402

# Files of the repository that are pages of the site: a link to one of them, as the forge has it, leads to the page.
PAGES = {
    "CONTRIBUTING.md": "reference/contributing.md",
    "CHANGELOG.md": "reference/changelog.md",
    "rewards/README.md": "guides/write-a-reward.md",
    "configs": "recipes.md",
    "diffrl/config/schema.py": "reference/config.md",
    "diffrl/config/sections.py": "reference/config.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
CONFIG_INTRODUCTION = """Made from the schema that checks every config (`diffrl train --help-config` prints the same).
A config is one YAML file; `section.key=value` on the command line, or `section={"key": value}` in Python, overrides it.
A key that is not listed is an error that names the nearest one. A published model has a preset
(`diffrl/config/presets.py`) in the place of some defaults: `rollout.resolution`, `optimise.precision: bf16`, and the
prompts, images, steps and feature space of evaluations.

"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from the code and the recipes, and the pictures that lie beside the documentation."""
    os.environ.setdefault("COLUMNS", "110")  # the width of the command line's help
    pages = {page: (ROOT / name).read_text() for name, page in PAGES.items() if name.endswith(".md")}
    pages |= {
        "reference/cli.md": command_line(),
        "reference/config.md": "# Config keys\n\n" + CONFIG_INTRODUCTION + reference(),
        "recipes.md": recipe_table.page(recipe_table.recipes()),
    }
    pages |= model_pages.pages()
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    for image in sorted((ROOT / "assets" / "images").glob("*.png")):
        files.append(File.generated(config, f"images/{image.name}", abs_src_path=str(image)))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Links as the site has them, and a value on one line with its deviation."""
    name = page.file.src_uri
    origin = next((file for file, made in PAGES.items() if made == name), f"docs/{name}")
    carried = {file.src_uri for file in files}
    markdown = LINK.sub(lambda match: _link(match, Path(origin).parent, Path(name).parent, carried), markdown)
    return markdown.replace(" ± ", "\u00a0±\u00a0")


def _link(match: re.Match[str], origin: Path, folder: Path, carried: set[str]) -> str:
    """A link of the forge on the site; to a file that the site does not carry, it becomes the file's name."""
    path = os.path.normpath(origin / match[3])
    target = PAGES.get(path, path.removeprefix("docs/").removeprefix("assets/"))
    if target in carried or not (ROOT / path).exists():
        return f"{match[1]}[{match[2]}]({os.path.relpath(target, folder)}{match[4] or ''})"
    return f"{match[2]} (`{path}`)" if match[2].strip("`") != path else f"`{path}`"


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
