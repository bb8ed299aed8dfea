"""The one rule: imports run downward only. The layers are the contracts in pyproject.toml."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = 15_670
UPSIDE_DOWN = """
[importlinter]
root_package = diffrl

[importlinter:contract:layers]
name = errors on top
type = layers
containers = diffrl
layers =
    errors
    samplers
"""


def lint(config: Path) -> tuple[int, str]:
    """The linter's exit code and output. In a process of its own: it switches every logger of its process off."""
    code = "import sys; from importlinter.cli import lint_imports as lint;"
    code += "sys.exit(lint(config_filename=sys.argv[1], no_cache=True, no_logo=True))"
    done = subprocess.run([sys.executable, "-c", code, str(config)], cwd=ROOT, capture_output=True, text=True)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_imports_run_downward_only() -> None:
    """Every import of every module, also those inside functions and those for types."""
    code, said = lint(ROOT / "pyproject.toml")
    assert code == 0, said
    assert "6 kept, 0 broken" in said


def test_an_upward_import_is_found_and_named(tmp_path: Path) -> None:
    config = tmp_path / "layers.ini"
    config.write_text(UPSIDE_DOWN)
    code, said = lint(config)
    assert code == 1 and "diffrl.samplers is not allowed to import diffrl.errors" in said


def test_the_picture_of_the_layers_is_the_contract() -> None:
    """CONTRIBUTING's plan has the contract's layers, in its order, with the same modules."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    drawn = (ROOT / "CONTRIBUTING.md").read_text().split("## The layers")[1].split("Inside `objectives/`")[0]
    layers = [line[:58].split() for line in drawn.splitlines() if line.startswith("    ")]
    assert layers == [re.split(r" *[|:] *", layer) for layer in contract]


def test_every_package_is_in_the_wheel() -> None:
    """That of image sets was not: pyproject.toml lists the packages one by one."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package, folder in {"diffrl": "diffrl", **listed["package-dir"]}.items():
        below = [file.parent.relative_to(ROOT / folder).parts for file in (ROOT / folder).rglob("__init__.py")]
        assert {".".join((package, *parts)) for parts in below} <= set(listed["packages"])


def test_the_core_only_shrinks() -> None:
    """All of diffrl that the core's contract does not forbid to the core: its lines, docstrings included."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][1]
    outside = [ROOT / name.replace(".", "/") for name in contract["forbidden_modules"]]
    files = [
        file
        for file in sorted((ROOT / "diffrl").rglob("*.py"))
        if not {*file.parents, file.with_suffix("")} & {*outside}
    ]
    assert ROOT / "diffrl" / "run" / "loop.py" in files
    assert sum(len(file.read_bytes().splitlines()) for file in files) <= CORE


def test_sentences_name_what_acts() -> None:
    """Ranks, tensors, clients and people do things: whoever, nobody and somebody do not."""
    vague = re.compile(r"\b(whoever|nobody|somebody)\b", re.IGNORECASE)
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for folder in ("diffrl", "rewards", "lab", "playground")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if vague.search(line)
    ]
    assert not found, found
