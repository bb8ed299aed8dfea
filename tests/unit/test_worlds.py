"""Worlds and commands of other packages: found by their entry points, as the shipped ones are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from diffrl.cli import commands
from diffrl.cli.main import main
from diffrl.config.checks import check_model, overlap
from diffrl.errors import UserError
from diffrl.features import default_features
from diffrl.lora_files import find_lora
from diffrl.policy import find_model
from diffrl.prompts import check_source, load_prompts
from diffrl.worlds import World, world_of, worlds

Install = Callable[[str, str, str], None]


class Meadow(World):
    name = "meadow"

    def __init__(self, folder: Path) -> None:
        self.pipeline, self.loras = folder, {"meadow/fast": folder / "fast"}

    def split(self, source: str) -> str:
        if source.count("/") != 1:
            raise UserError(f'prompt set "{source}": write meadow/SPLIT')
        return source.rpartition("/")[2]

    def prompts(self, source: str) -> list[str]:
        return [f"a flower of {self.split(source)}"]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module `of_a_stranger` for entry points to name."""
    made = ModuleType("of_a_stranger")
    monkeypatch.setitem(sys.modules, "of_a_stranger", made)
    yield made
    worlds.cache_clear(), commands.installed.cache_clear()


def test_a_world_of_another_package_is_a_model_with_prompts_and_loras(
    module: ModuleType, installed: Install, tmp_path: Path
) -> None:
    module.WORLD = Meadow(tmp_path)
    installed("meadow", "of_a_stranger:WORLD", "diffrl.worlds")
    worlds.cache_clear()
    check_model("meadow")
    (tmp_path / "fast").mkdir()
    (tmp_path / "fast" / "any.safetensors").touch()
    assert find_lora("meadow/fast") == tmp_path / "fast" / "any.safetensors"
    assert [prompt.text for prompt in load_prompts("meadow/train")] == ["a flower of train"]
    assert world_of("meadow/train") is module.WORLD and world_of("meadows/train") is None
    assert overlap("meadow/train", "meadow/test") == [] and overlap("meadow/test", "meadow/test")
    assert default_features("meadow") == "pixels" and default_features("playground") == "clip"
    with pytest.raises(UserError, match="write meadow/SPLIT"):
        check_source("meadow/a/b")
    with pytest.raises(UserError, match=r"no model_index.json"):
        find_model("meadow")
    with pytest.raises(UserError, match='nearest: "meadow"'):
        check_model("meadw")


def test_a_command_of_another_package_stands_where_it_asks_to_and_a_broken_one_is_a_warning(
    module: ModuleType, installed: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    def add(add: Callable[..., object]) -> None:
        add("mow", lambda given, rest: print("mown") or 0, "cut the grass", "diffrl mow")

    module.add, module.AFTER = add, "diffrl evaluate"
    installed("mow", "of_a_stranger", "diffrl.commands")
    commands.installed.cache_clear()
    assert main(["mow"]) == 0 and capsys.readouterr().out == "mown\n"
    assert main(["lab"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("score a model") < shown.index("cut the grass") < shown.index("write a run's page")
    installed("mow", "nowhere_to_be_found", "diffrl.commands")
    commands.installed.cache_clear()
    assert main(["version"]) == 0 and 'command "mow" (nowhere_to_be_found) cannot' in capsys.readouterr().err
