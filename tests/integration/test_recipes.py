"""Shipped recipes pass `--dry-run` and `doctor` on a tiny pipeline of their family: what their page calls tried.

The rewards are stand-ins that need no weights, and so is a teacher without a LoRA; everything else is the recipe's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from covering import some
from PIL import Image
from tiny import tiny_flux, tiny_sd, tiny_sd3
from tiny_models.recent import TINY, make

from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.config.reward import read_on_training_images
from diffrl.memory.fit import estimate
from diffrl.memory.selection import micro_batches
from diffrl.memory.step_profile import ImageItself
from diffrl.resources import shipped_configs
from diffrl.run.build import build_objective

DATA = Path(__file__).parents[1] / "data"
FAMILIES: dict[str, Callable[[Path], Path]] = {
    "sd35": tiny_sd3,
    "flux": tiny_flux,
    "sd15": tiny_sd,
    "sdxl": lambda folder: tiny_sd(folder, xl=True),
}
RECENT = {"flux2": "flux2-klein", "qwen_image": "qwen-image", "qwen_image21": "qwen-image-2.1", "z_image": "z-image"}
RECENT |= {name: name for name in ("chroma", "hidream", "krea2", "lumina2", "sana")}
FAMILIES |= {name: partial(make, tiny) for name, tiny in RECENT.items()}
EVERYWHERE = [path for path in shipped_configs() if path.parent.name != "playground"]


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
    embeds = "d2align" in values or values.get("direct", {}).get("pair") is not None
    for section, plugin in kinds:
        for name, entry in values.get(section, {}).items():
            weight = {"weight": entry.get("weight", 1.0)} if section == "rewards" else {}
            values[section][name] = {"plugin": f"{DATA}/embedder.py:Embedder" if embeds else plugin} | weight
    for teacher in values.get("opd", {}).get("teachers", {}).values():
        teacher["lora"], values["opd"]["start"] = None, "pretrained"  # nobody has trained them
    return values


def write_set(values: dict[str, Any], folder: Path) -> None:
    """A set of pictures for a recipe that trains on one, whose epoch becomes small."""
    folder.mkdir()
    members, lines = range(values["rollout"]["group_size"]), []
    values["rollout"]["groups"], values["optimise"]["batch_size"] = 4, len(members)
    for number in range(4):
        for member in members:
            Image.new("RGB", (16, 16), (number, member, 0)).save(folder / f"{number}-{member}.png")
        scores = {name: [float(member) for member in members] for name in values["rewards"]}
        pictures = [f"{number}-{member}.png" for member in members]
        lines.append(json.dumps({"images": pictures, "prompt": f"prompt {number}", "scores": scores}))
    (folder / "images.jsonl").write_text("\n".join(lines) + "\n")
    values["image_set"]["source"] = str(folder)


def _covering(recipes: list[Path], without: tuple[str, ...] = ()) -> list[Any]:
    """One recipe of each model in `make test`, but of those `without` it; all of them where there is more time."""
    firsts = {path.parent: path for path in reversed(recipes) if path.parent.name not in without}.values()
    return some(recipes, *firsts)


@pytest.mark.parametrize(
    "recipe", _covering(EVERYWHERE, (*RECENT, "sdxl", "sd15")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_a_recipe_can_start(
    recipe: Path, models: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = stand_in(load_config(recipe).resolved())
    values["model"] = str(models(recipe.parent.name))
    family = RECENT.get(recipe.parent.name)
    values["rollout"]["resolution"] = TINY[family].resolution if family else 16
    values["evaluate"]["features"] = "pixels"
    if values["evaluate"]["steps"] is not None:  # the recipe's own number has been read, and many draw as few do
        values["evaluate"]["steps"] = min(values["evaluate"]["steps"], 4)
    values["run_dir"] = str(tmp_path / "run")
    if "image_set" in values:
        write_set(values, tmp_path / "set")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    assert main(["train", str(path), "--dry-run"]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert load_config(path).method.title in said and not (tmp_path / "run").exists()
    assert main(["doctor", str(path)]) == 0
    assert "it fits" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", _covering(EVERYWHERE), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_micro_batches_are_no_larger_on_fewer_processes(recipe: Path) -> None:
    """What a device has to hold does not depend on how many there are, and the step's rows are the recipe's."""
    found, config = set(), load_config(recipe, world=8 if recipe.parent.name != "sd15" else 1)
    rewards = {name: ImageItself(name) for name in config.rewards} if config.method.decodes else {}
    objective = build_objective(config, config.rollout, rewards)
    for world in (1, 2, 4, 8):
        sizes = micro_batches(config, objective, world)
        found.add(max(sizes))
        if not objective.selects:
            trained = config.objective_section.trained_steps(config.rollout)
            assert sum(sizes) * world == config.optimise.batch_size * trained
    most = config.optimise.micro_batch
    assert found == {most} or (objective.selects and max(found) <= most)  # few selected rows may be fewer


@pytest.mark.parametrize("recipe", EVERYWHERE, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_large_recipe_is_watched_by_a_judge_that_it_does_not_train_on(recipe: Path) -> None:
    """Neither the reward in another form, nor what advantages or gates are made of."""
    config = load_config(recipe, world=8 if recipe.parent.name != "sd15" else 1)
    trained = {entry.plugin or name for name, entry in config.rewards.items()}
    read = read_on_training_images(config)
    judges = {name: e for name, e in config.watch.items() if name not in read and (e.plugin or name) not in trained}
    assert judges
    if "# hardware: one GPU" in recipe.read_text():  # there is room for one visitor at a time
        assert all(entry.offload for entry in config.watch.values())


ONE_CARD = [path for path in EVERYWHERE if "# hardware: one GPU" in path.read_text()]


@pytest.mark.long
@pytest.mark.parametrize("recipe", ONE_CARD, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_doctor_s_count_fits_the_card_that_a_recipe_names(recipe: Path) -> None:
    card = re.search(r"# hardware: one GPU of (\d+) GB", recipe.read_text())
    assert card is not None and estimate(load_config(recipe)).total <= int(card[1]) * 1e9
