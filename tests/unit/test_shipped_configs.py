"""Every shipped recipe reads without a complaint, with nothing but what is shipped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from diffrl.config import dump, load_config
from diffrl.config.presets import MODELS
from diffrl.plugins import installed
from diffrl.policy.registry import find_family
from diffrl.resources import shipped, shipped_configs
from experiments.figures import recipe_table

RECIPES = shipped_configs()


# What the released configurations say, so that a recipe that is meant to be one of them cannot drift from it.
RELEASED: dict[str, dict[str, Any]] = {
    "sd35/nft_ocr": {"nft.b": 0.1, "nft.old": [75, 0.0, 0.0075, 0.999]},
    "sd35/nft_geneval": {"nft.b": 1.0, "nft.old": [0, 0.0, 0.001, 0.5], "optimise.batch_size": 1152},
    "sd35/grpo_ocr": {
        "grpo.published": ["kl", "first", "skip_zero", "guidance"],
        "grpo.beta": 0.04,
        "grpo.timesteps": 9,
    },
    "sd35/grpo_guard_ocr": {"grpo.clip": 2e-6, "grpo.beta": 0.0, "grpo.timesteps": 9, "optimise.learning_rate": 1e-4},
    "sd35/dppo_pickscore": {"grpo.delta": 1e-7, "rollout.noise_level": 0.8, "rollout.window": 3},
    "sd35/tempflow_pickscore": {
        "grpo.published": ["skip_zero"],
        "grpo.beta": 0.001,
        "branches.scope": "seed",
        "optimise.ema.every": 8,
        "optimise.ema.warmup": True,
    },
    "sd35/dense_pickscore": {"optimise.batch_size": 1152},
    "sd35/dpo_ocr": {"dpo.timestep_sampling": "logit_normal_3", "dpo.b": 100.0},
    "sd35/rwr_ocr": {"rwr.timestep_sampling": "logit_normal_3", "optimise.ema.every": 8, "optimise.ema.warmup": True},
    "sd35/sft_ocr": {"rwr.weights": "best", "rwr.timestep_sampling": "logit_normal_3"},
    "sd35/hicogen_noise_ocr": {"optimise.ema.every": 8, "grpo.published": ["kl", "first", "skip_zero"]},
    "flux/branch_hpsv2": {
        "rollout.shift": 3.0,
        "rollout.resolution": 720,
        "grpo.clip": 1e-3,
        "grpo.advantage_std": "sample",
    },
    "flux/g2rpo_hpsv2": {"rollout.shift": 3.0, "rollout.resolution": 720, "grpo.advantage_std": "sample"},
    "flux/mixgrpo_flash": {
        "rollout.shift": 3.0,
        "rollout.resolution": 720,
        "rollout.window_range": [0, 23],
        "rollout.window_move": [20, 1],
        "optimise.batch_size": 48,
        "grpo.advantage_std": "sample",
    },
    "flux/gdro_ocr": {"lora.rank": 32, "optimise.learning_rate": 3e-4, "gdro.b": 12.0},
    "sd35/awm_geneval": {
        "awm.weighting": "ghuber",
        "awm.beta": 1e-3,
        "awm.beta_average": 1.0,
        "awm.timesteps": [6, 0.857],
        "optimise.batch_size": 1728,
        "optimise.ema": {"decay": 0.99, "every": 1, "warmup": True},
    },
    "sd35/fdfo_pickscore": {"fdfo.epsilon": 0.03, "rollout.steps": 40},
    "flux/nft_scout_imagereward": {"rollout.scout": {"images": 96, "steps": 6}, "rollout.group_size": 24},
    "sd35/dgpo_ocr": {
        "dgpo.sample_old": 200,
        "dgpo.timesteps": [4, 0.7],
        "lora.rank": 64,
    },
    "sd35/gardo_ocr": {
        "grpo.clip": 1e-4,
        "grpo.published": ["kl", "first", "skip_zero"],
        "grpo.timesteps": 8,
        "gardo.beta": 0.04,
    },
    "sd35/gardo_geneval": {
        "grpo.clip": 1e-4,
        "grpo.published": ["kl", "first", "skip_zero"],
        "grpo.timesteps": 8,
        "gardo.beta": 0.07,
    },
    "flux/gardo_hpsv2": {"grpo.clip": 1e-4, "grpo.published": ["kl", "first", "skip_zero"], "grpo.timesteps": 4},
    "sd35/crd_ocr": {
        "crd.old": [0, 0.25, 0.005, 0.999],
        "crd.anchor_guidance": 4.5,
        "crd.timesteps": 0.8,
    },
    "sd35/crd_geneval": {"crd.timesteps": 0.8, "crd.beta": [1e-4, 0.1]},
    "sd35/d2align_clip": {
        "d2align.omega": 1.5,
        "d2align.steps": 3000,
        "d2align.learning_rate": 5e-6,
        "d2align.embed": "reconstructed",
    },
    "flux/d2align_hpsv2": {
        "rollout.shift": 3.0,
        "d2align.omega": 1.5,
        "d2align.embed": "reconstructed",
        "optimise.learning_rate": 5e-6,
        "optimise.max_grad_norm": 0.1,
    },
    "flux/srpo_hpsv2": {
        "rollout.shift": 3.0,
        "rollout.guidance_scale": 1.0,
        "direct.guidance_scale": 3.5,
        "direct.align": {"range": [0.75, 0.964]},
        "direct.cap": 0.7,
        "optimise.learning_rate": 5e-6,
        "optimise.max_grad_norm": 0.1,
    },
    "flux/nft_pickscore": {"nft.old": [0, 0.0, 0.001, 0.5], "nft.beta": 1e-4},
    "sdxl/nft_pickscore": {"nft.old": [0, 0.0, 0.001, 0.5], "nft.beta": 1e-4},
    "sd15/grpo_aesthetic": {"rollout.noise_level": 1.0, "rollout.guidance_scale": 5.0, "grpo.advantage_std": "group"},
    "sd35/opd_3teachers": {"opd.target": "step", "opd.start": "merge", "lora.rank": 32, "optimise.learning_rate": 3e-4},
    "sd35/marble_5r": {"rollout.steps": 25, "nft.old": [0, 0.0, 0.001, 0.95], "optimise.batch_size": 1152},
}


def test_there_are_recipes() -> None:
    assert {"playground", "sd35", "flux", "sdxl", "sd15"} <= {path.parent.name for path in RECIPES}


def test_a_recipe_says_where_every_value_comes_from() -> None:
    for recipe in recipe_table.recipes():
        assert tuple(sorted(recipe.facts)) == tuple(sorted(recipe_table.FACTS)), f"{recipe.name}: the header's lines"
        assert re.match(r"not verified; tried: \S|(runs|reproduces) \(", recipe.facts["evidence"]), recipe.name
        unknown = [value.key for value in recipe.values if not value.origin]
        assert not unknown, f"{recipe.name}: every value's line ends with # paper, # code or # ours"
        text = shipped("configs", *f"{recipe.name}.yaml".split("/")).read_text(encoding="utf-8")
        assert text.startswith("#"), f"{recipe.name}: a recipe says what it is"
        ours = recipe.name.startswith("playground/")
        assert not ours or "# evidence:" in text, f"{recipe.name}: what is said of the others was not tried with it"
        assert ours or "# values:" not in text, f"{recipe.name}: elsewhere every line says it itself"
        origins = {origin for value in recipe.values for origin in value.origin.split(", ")} - {"ours"}
        assert all(f"{origin} = " in recipe.facts["sources"] for origin in origins), recipe.name


def test_the_page_of_recipes_has_all_of_them() -> None:
    text = recipe_table.page(recipe_table.recipes())
    assert all(
        f"\n## {name}\n" in text for name in ({path.parent.name + "/" + path.stem for path in RECIPES} | {*RELEASED})
    )


def test_recipes_have_the_released_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """That each of them is valid, with every value as it was: test_resolved.py."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    wrong: list[str] = []
    for name, released in RELEASED.items():
        config = load_config(shipped("configs", *f"{name}.yaml".split("/")))
        assert config.rewards and config.epochs
        for key, expected in released.items():
            found: Any = config.resolved()
            for part in key.split("."):
                found = found[part]
            if found != expected:
                wrong.append(f"{name}: {key} is {found}, released {expected}")
    assert not wrong
    assert "geneval" in load_config(shipped("configs", "sd35", "marble_5r.yaml")).rewards


def test_a_models_preset_has_the_steps_that_its_family_knows() -> None:
    known = {one.name: one.steps for pipeline in installed("family") for one in find_family(pipeline).known}
    assert {name: steps for name, (_, steps) in MODELS.items() if name in known and known[name] != steps} == {}
    assert MODELS.keys() - known.keys() == {"krea/Krea-2"}  # the family has no hub id of it


def test_a_preset_fills_what_a_config_does_not_say(tmp_path: Path) -> None:
    """By the file's model, also where another one is trained; a value that is given stays, null included."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: black-forest-labs/FLUX.1-dev\nrewards: {pickscore: {}}\nprompts: {train: ocr/train, test: ocr/test}\n"
        "optimise: {precision: fp32}\nevaluate: {steps: null}\n"
    )
    for overrides in ([], ["model=stabilityai/stable-diffusion-3.5-medium"], ["model=playground"]):
        config = load_config(file, overrides)
        assert (config.optimise.precision, config.evaluate.steps, config.rollout.resolution) == ("fp32", None, 512)
        assert (config.evaluate.prompts, config.evaluate.features) == (256, "facebook/dinov2-base")
        dump(config, tmp_path / "again.yaml")
        assert load_config(tmp_path / "again.yaml") == config
    assert load_config(file, ["evaluate=null"]).evaluate.steps == 28
    assert load_config(shipped("configs", "playground", "nft.yaml")).evaluate.features == "auto"
