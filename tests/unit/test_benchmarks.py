"""Benchmarks whose settings stand in the script follow the recipes that they measure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "benchmarks"))
from memory import CASES
from published_models import MODELS
from ring import RING

from diffrl.config import load_config


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_a_counted_recipe_is_valid_on_so_many_processes(case: tuple[str, str, str, int, bool, list[str]]) -> None:
    _, config, model, processes, _, overrides = case
    prompts = ["prompts.train=playground/words/train", "prompts.test=playground/words/test"]
    assert load_config(config, [*overrides, *prompts], world=processes).model and model in MODELS


def test_every_method_of_the_ring_has_a_playground_recipe_and_a_base() -> None:
    for base, methods in RING.items():
        for name in (base, *methods):
            assert load_config(f"playground/{name}").objective
