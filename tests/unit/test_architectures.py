"""The shipped architectures: every recipe's model has one, and they have as many parameters as the published models."""

from __future__ import annotations

import pytest
import yaml

from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.memory.meta_modules import architecture, meta_backbone
from diffrl.resources import shipped_configs

RECIPES = shipped_configs()
# Parameters of the network; the UNets' are published to the unit, the transformers' as 2.5 B (with the table of
# positions, which is no parameter) and 12 B.
PARAMETERS = {
    "sd15/grpo_aesthetic": (859_520_964, 859_520_964),
    "sdxl/nft_pickscore": (2_567_463_684, 2_567_463_684),
    "sd35/nft_ocr": (2.1e9, 2.6e9),
    "flux/nft_pickscore": (11.8e9, 12.1e9),
    "qwen_image/nft_pickscore": (20.3e9, 20.5e9),
    "z_image/nft_pickscore": (6.0e9, 6.3e9),
    "flux2/nft_pickscore": (3.8e9, 4.1e9),
    "krea2/nft_pickscore": (12e9, 13e9),
    "qwen_image21/nft_pickscore": (7e9, 7.2e9),
    "sana/nft_pickscore": (1.59e9, 1.61e9),
    "chroma/nft_pickscore": (8.8e9, 9.0e9),
    "lumina2/nft_pickscore": (2.6e9, 2.62e9),
    "hidream/nft_pickscore": (17e9, 17.2e9),
}


def test_every_recipe_has_its_architecture_in_the_package() -> None:
    models = {yaml.safe_load(recipe.read_text())["model"] for recipe in RECIPES} - {"playground"}
    assert len(models) >= 4 and all(architecture(model) is not None for model in models)
    assert architecture("somebody/another-model") is None and architecture("playground") is None


# One of each kind, a UNet and a transformer, in `make test`.
COVERING = ("sd15/grpo_aesthetic", "sd35/nft_ocr")
EACH = [pytest.param(name, marks=[] if name in COVERING else [pytest.mark.long]) for name in PARAMETERS]


@pytest.mark.parametrize("name", EACH)
def test_it_has_as_many_parameters_as_published(name: str) -> None:
    backbone = meta_backbone(load_config(name))
    low, high = PARAMETERS[name]
    assert low <= sum(p.numel() for p in backbone.network.parameters()) <= high


@pytest.mark.long  # minutes of fake tensors at full size; a tiny model's doctor is in test_fit.py
def test_doctor_reads_a_recipe_without_hub_data_and_weights(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "sd15/grpo_aesthetic"]) in (0, 1)  # it fits here or not
    said = capsys.readouterr()
    assert "GiB  on each device" in said.out and not said.err
