"""The house's one rule: imports run downward only. Its floors are the contracts in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[2]
UPSIDE_DOWN = """
[importlinter]
root_package = diffrl

[importlinter:contract:floors]
name = the cellar on top
type = layers
containers = diffrl
layers =
    errors
    samplers
"""


def lint(config: Path, capsys: pytest.CaptureFixture) -> tuple[int, str]:
    code = lint_imports(config_filename=str(config), no_cache=True, no_logo=True)
    return code, " ".join(capsys.readouterr().out.split())


def test_imports_run_downward_only(capsys: pytest.CaptureFixture) -> None:
    """Every import of every module, also those inside functions and those for types."""
    code, said = lint(ROOT / "pyproject.toml", capsys)
    assert code == 0, said
    assert "2 kept, 0 broken" in said


def test_an_upward_import_is_found_and_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = tmp_path / "house.ini"
    config.write_text(UPSIDE_DOWN)
    code, said = lint(config, capsys)
    assert code == 1 and "diffrl.samplers is not allowed to import diffrl.errors" in said
