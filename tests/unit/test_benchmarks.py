"""Benchmarks whose settings stand in the script follow the recipes that they measure."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "benchmarks"))
from compiling import compared
from memory import BASES, CASES, MODELS, ONE_ROW, RECIPES, loaded, without_rewards
from method_cost import METHODS
from options import OPTIONS, write_config

from diffrl.config import load_config
from diffrl.resources import shipped
from diffrl.run.fit import GIB, estimate


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_a_counted_recipe_is_valid_on_so_many_processes(case: tuple[str, str, str, int, bool, list[str]]) -> None:
    _, config, model, processes, _, overrides = case
    prompts = ["prompts.train=playground/words/train", "prompts.test=playground/words/test"]
    assert load_config(config, [*overrides, *prompts], world=processes).model
    assert shipped("assets", "architectures", model, "model_index.json").is_file()


def test_the_table_of_cards_is_what_doctor_counts() -> None:
    """Every recipe and model in it is there; one cell, of encoders apart, is counted anew."""
    result = json.loads((Path(__file__).parents[2] / "assets" / "results" / "memory.json").read_text(encoding="utf-8"))
    assert [(row["label"], (row["config"], row["model"])) for row in result["cards"]] == list(MODELS.items())
    for config, model in MODELS.values():
        assert loaded(config, model, [ONE_ROW]).optimise.micro_batch == 1
    row = next(row for row in result["cards"] if row["label"] == "SD3.5-Medium")
    found = row["fits"]["16"]
    assert found["overrides"][0] == f"engine.base={BASES[0]}" and "engine.encoders=apart" in found["overrides"]
    counted = estimate(loaded(row["config"], row["model"], [ONE_ROW, *found["overrides"]]))
    assert round(counted.total / GIB, 1) == found["gib"] <= 16


def test_recipes_made_for_one_card_are_counted() -> None:
    """All that are shipped; and where the file has them, they fit their card."""
    made = {
        path.relative_to(shipped("configs")).with_suffix("").as_posix() for path in shipped("configs").rglob("*gb.yaml")
    }
    assert made == set(RECIPES)
    for config, (card, model) in RECIPES.items():
        assert config.endswith(f"_{card}gb") and loaded(config, model, []).engine.encoders == "apart"
    result = json.loads((Path(__file__).parents[2] / "assets" / "results" / "memory.json").read_text(encoding="utf-8"))
    assert all(row["total_gib"] <= row["card"] == RECIPES[row["config"]][0] for row in result.get("recipes", []))
    assert without_rewards("flux/nft_pickscore_16gb") == ["rewards.pickscore.device=cpu", "watch.clip.device=cpu"]


def test_every_method_has_a_playground_recipe_and_a_base() -> None:
    for base, methods in METHODS.items():
        for name in (base, *methods):
            assert load_config(f"playground/{name}").objective


def test_the_options_that_are_compared_are_valid(tmp_path: Path) -> None:
    path = write_config(tmp_path, Namespace(model="small", groups=1, batch=12, objective="nft"), cuda=False)
    for name, words in OPTIONS.items():
        assert load_config(path, [word.replace("HALF", "24") for word in words]).objective == "nft", name


def test_compiling_has_paid_when_what_it_saves_is_what_it_cost() -> None:
    """By hand: 6 forwards of 3 s instead of 4 and 2 steps of 3 s instead of 5 save 10 s an epoch; 25 s were spent."""
    found = {
        "plain": {"first forward": 4.0, "forward": 4.0, "first step": 5.0, "step": 5.0},
        "compiled": {"first forward": 13.0, "forward": 3.0, "first step": 18.0, "step": 3.0},
        "slower, compiled": {"first forward": 13.0, "forward": 5.0, "first step": 18.0, "step": 5.0},
    }
    compared(found, Namespace(images=2, steps=6, batch=2, trained=1, rows=1))
    assert found["compiled"]["seconds to compile"] == 25.0 and found["compiled"]["epochs until it has paid"] == 2.5
    assert found["compiled"]["speed of a step"] == pytest.approx(5 / 3, abs=1e-3)
    assert found["slower, compiled"]["epochs until it has paid"] is None
