"""Every shipped recipe reads without a complaint, given files of the names that it asks its user for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from diffrl.config import load_config
from diffrl.resources import shipped

RECIPES = sorted(path for path in shipped("configs").rglob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_recipe_is_valid(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "data").mkdir()
    for name in set(re.findall(r"data/[\w.+-]+", recipe.read_text())):
        texts = [f'a sign that says "{i}"' for i in range(60)]
        lines = [json.dumps({"prompt": text}) for text in texts] if name.endswith(".jsonl") else texts
        Path(name).write_text("\n".join(lines))
    config = load_config(recipe)
    assert config.rewards and config.epochs
    assert recipe.read_text().startswith("#"), "a recipe says where its values come from"


def test_there_are_recipes() -> None:
    assert {"playground", "sd35", "flux", "sdxl", "sd15"} <= {path.parent.name for path in RECIPES}
