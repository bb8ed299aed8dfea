"""The playground's stand-ins are refused for a model of another kind, wherever the model is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import diffrl
from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.reward_tools.head import Head, save_head
from diffrl.rewards.registry import available
from diffrl.tools.stand_ins import check_reward
from diffrl.worlds import worlds

OTHER = "stabilityai/stable-diffusion-3.5-medium"
REAL: dict[str, dict[str, Any]] = {  # the same, as a person would give them for a real model
    "clip": {"model": "ViT-H-14", "pretrained": "laion2b_s32b_b79k"},
    "aesthetic": {"head": "v2"},
    "diversity": {"features": "transformers", "model": "facebook/dinov2-base"},
    "vendi": {"features": "transformers", "model": "facebook/dinov2-base"},
    "frechet": {"model": "ViT-H-14", "exemplars": "pictures"},
    "similarity": {"model": "ViT-H-14", "references": "pictures"},
    "adversarial": {"model": "ViT-H-14", "references": "pictures"},
    "adversarial_preference": {"reward": "pickscore", "references": "pictures"},
    "reform": {"reward": "pickscore", "references": "pictures", "preferences": "pairs"},
    "preference": {"model": "folder"},
}


@pytest.mark.parametrize("name", sorted(worlds()["playground"].stand_ins))
def test_a_stand_in_is_the_playground_s_alone(name: str) -> None:
    check_reward("playground", name, {})
    with pytest.raises(UserError, match=f'"{name}".* playground.s own and means nothing for .*; give '):
        check_reward(OTHER, name, {})
    if name in REAL:
        check_reward(OTHER, name, REAL[name])


def test_names_of_other_forms_are_looked_at(tmp_path: Path) -> None:
    """A class by its module is the reward of that class; a file over the playground's model is the playground's."""
    for name in ("diffrl_zoo.clip:Clip", "diffrl_zoo.playground:Artefact"):
        with pytest.raises(UserError, match=r"playground.s own"):
            check_reward(OTHER, name, {})
    save_file({"weight": torch.zeros(1)}, file := tmp_path / "net.safetensors")
    check_reward(f"playground+{file}", "clip", {})
    with pytest.raises(UserError, match=r"playground.s own"):
        check_reward(f"{OTHER}+{file}", "clip", {})


def test_every_reward_with_a_default_of_the_playground_is_known() -> None:
    """Whatever names the world in a default of its constructor would leak into another model's run."""
    import inspect

    from diffrl.rewards.registry import load_class

    known = worlds()["playground"].stand_ins
    for name in available():
        leaks = {
            key for key, one in inspect.signature(load_class(name)).parameters.items() if one.default == "playground"
        }
        assert leaks <= set(known[name].keys if name in known else ()), name


def test_what_a_reward_is_made_of_is_looked_at(tmp_path: Path) -> None:
    head = tmp_path / "head.safetensors"
    save_head(Head(torch.zeros(3), torch.zeros(()), torch.zeros(3), "clip", {}, {}), head)
    for name, arguments in (("d2:clip", {}), ("d2", {"reward": "clip"}), ("fitted", {"head": str(head)})):
        with pytest.raises(UserError, match="without `model`"):
            check_reward(OTHER, name, arguments)
    check_reward(OTHER, "d2", {"reward": "clip", **REAL["clip"], "direction": "x"})
    check_reward(OTHER, "remote:clip", {})


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rewards.clip.weight=1", r"rewards.clip: .*ViT-H-14"),
        ("watch.aesthetic.batch_size=4", r"watch.aesthetic: .*head: v2"),
        (
            "prompts.train=playground/compositional/train",
            r"prompts.train: .*language of playground.*one prompt on each",
        ),
        ("prompts=null", r"prompts.train: .*language of playground"),
        ("evaluate.features=clip", r"evaluate.features: .*dinov2"),
    ],
)
def test_a_config_of_another_model(config_file: Callable[..., Path], override: str, said: str) -> None:
    overrides = ["prompts.test=playground/compositional/test"] if override.startswith("prompts.train") else []
    with pytest.raises(UserError, match=said):
        load_config(config_file(), [override, *overrides])


def test_a_model_may_say_that_it_was_trained_in_a_world(config_file: Callable[..., Path], tiny_model: Path) -> None:
    import shutil

    model = shutil.copytree(tiny_model, config_file().parent / "model")
    (model / "diffrl.json").write_text(json.dumps({"world": "playground"}))
    load_config(config_file(), [f"model={model}", "rewards.clip.weight=1", "evaluate.features=clip"])


def test_commands_and_python(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("a hat\n")
    words = ["--prompts", str(prompts), "--rewards", "clip", "--out"]
    for command, out in (("evaluate", "s.json"), ("sample", "drawn"), ("search", "found"), ("draw-set", "set")):
        more = ["--budget", "64"] if command == "search" else []
        assert main([command, str(tiny_model), *words, str(tmp_path / out), *more]) == 2, command
        assert "ViT-H-14" in capsys.readouterr().err, command
    with pytest.raises(UserError, match="head: v2"):
        diffrl.evaluate(str(tiny_model), ["aesthetic"], str(prompts))
    assert main(["rewards", "audit", "jpeg", "--model", str(tiny_model), "--out", str(tmp_path / "audit")]) == 2
    assert "language of playground" in capsys.readouterr().err
