"""Shipped recipes pass `--dry-run` and `doctor` on a tiny pipeline of their family: what their headers call evidence.

The rewards are stand-ins that need no weights, and so is a teacher without a LoRA; everything else is the recipe's own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import tiny_flux, tiny_sd, tiny_sd3

from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.resources import shipped

DATA = Path(__file__).parents[1] / "data"
FAMILIES: dict[str, Callable[[Path], Path]] = {
    "sd35": tiny_sd3,
    "flux": tiny_flux,
    "sd15": tiny_sd,
    "sdxl": lambda folder: tiny_sd(folder, xl=True),
}
RECIPES = sorted(path for family in FAMILIES for path in shipped("configs", family).glob("*.yaml"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = FAMILIES[family](tmp_path_factory.mktemp("families") / family)
        return made[family]

    return folder


def stand_in(values: dict[str, Any]) -> dict[str, Any]:
    """The recipe's rewards under their names, all without weights; different ones for what is watched."""
    kinds = (("rewards", f"{DATA}/warmth.py:Warmth"), ("watch", f"{DATA}/warmth.py:Brightness"))
    for section, plugin in kinds:
        for name, entry in values.get(section, {}).items():
            weight = {"weight": entry.get("weight", 1.0)} if section == "rewards" else {}
            values[section][name] = {
                "plugin": f"{DATA}/embedder.py:Embedder" if "d2align" in values else plugin
            } | weight
    for teacher in values.get("opd", {}).get("teachers", {}).values():
        teacher["lora"], values["opd"]["start"] = None, "pretrained"  # nobody has trained them
    return values


def _covering() -> list[Any]:
    """One recipe of each model in `make test`, all of them where there is more time."""
    firsts = {path.parent: path for path in reversed(RECIPES)}.values()
    return [pytest.param(path, marks=[] if path in firsts else [pytest.mark.long]) for path in RECIPES]


@pytest.mark.parametrize("recipe", _covering(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_recipe_can_start(
    recipe: Path, models: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = stand_in(load_config(recipe).resolved())
    values["model"] = str(models(recipe.parent.name))
    values["rollout"]["resolution"], values["evaluate"]["features"] = 16, "pixels"
    values["run_dir"] = str(tmp_path / "run")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    assert main(["train", str(path), "--dry-run"]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert values["objective"] in said.lower() and not (tmp_path / "run").exists()
    assert main(["doctor", str(path)]) == 0
    assert "it fits" in capsys.readouterr().out
