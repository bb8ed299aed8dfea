"""Benchmarks whose settings stand in the script follow the recipes that they measure."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "benchmarks"))
from memory import BASES, CASES, MODELS, ONE_ROW, loaded, recipes, without_rewards
from method_cost import METHODS, OPTIONS

from diffrl.config import load_config
from diffrl.memory.fit import GIB, estimate


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_a_counted_recipe_is_valid_on_so_many_processes(case: tuple[str, str, int, bool, list[str]]) -> None:
    _, config, processes, _, overrides = case
    assert Path(loaded(config, overrides, processes).model, "model_index.json").is_file()


def test_the_table_of_cards_is_what_doctor_counts() -> None:
    """Every recipe and model in it is there; one cell, of encoders apart, is counted anew."""
    result = json.loads((Path(__file__).parents[2] / "assets" / "results" / "memory.json").read_text(encoding="utf-8"))
    assert [(row["label"], row["config"]) for row in result["cards"]] == list(MODELS.items())
    for config in MODELS.values():
        assert loaded(config, [ONE_ROW]).optimise.micro_batch == 1
    row = next(row for row in result["cards"] if row["label"] == "SD3.5-Medium")
    found = row["fits"]["16"]
    assert found["overrides"][0] == f"engine.base={BASES[0]}" and "engine.encoders=apart" in found["overrides"]
    counted = estimate(loaded(row["config"], [ONE_ROW, *without_rewards(row["config"]), *found["overrides"]]))
    assert round(counted.total / GIB, 1) == found["gib"] <= 16


def test_recipes_made_for_one_card_are_counted_and_fit_it() -> None:
    result = json.loads((Path(__file__).parents[2] / "assets" / "results" / "memory.json").read_text(encoding="utf-8"))
    assert {row["config"]: row["card"] for row in result["recipes"]} == recipes()
    assert all(row["total_gib"] <= row["card"] for row in result["recipes"])
    assert all(loaded(config, []).engine.encoders == "apart" for config in recipes())
    assert without_rewards("flux/nft_pickscore_16gb") == ["rewards.pickscore.device=cpu", "watch.clip.device=cpu"]


def test_every_method_has_a_playground_recipe_and_a_base() -> None:
    for base, methods in METHODS.items():
        for name in (base, *methods):
            assert load_config(f"playground/{name}").objective


def test_the_options_that_are_compared_are_valid() -> None:
    for name, words in OPTIONS.items():
        assert load_config("playground/nft", words).objective == "nft", name
