"""The same LoRA files at every door: a foreign form gives the picture of diffusers' own file; what is no LoRA of the
model, or would change nothing, is one line. What each form means is in test_lora_files.py."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from covering import some
from PIL import Image
from safetensors.torch import load_file, save_file
from test_lora_files import renamed
from test_search import REDNESS
from tiny import SPEC, scramble, velocity

import diffrl
from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.lora_files import find_lora, lora_file
from diffrl.loras.files import LoraFiles
from diffrl.methods.opd.teachers import load_teachers
from diffrl.methods.students import load_students
from diffrl.policy import load_policy

Door = Callable[[Any, Path, Path], Any]  # how a config is written, the LoRA's file, a new folder; what is drawn
DRAW = ("--prompt", "a red dog", "--steps", "2")


def command(*words: str) -> Callable[[Any, Path, Path], Any]:
    def door(write: Any, file: Path, out: Path) -> Any:
        (out.parent / "prompts.txt").write_text("a red dog\n")
        model = str(load_config(write("model")).model)
        named = {"MODEL": model, "FILE": str(file), "OUT": str(out), "PROMPTS": str(out.parent / "prompts.txt")}
        named["OUT.json"] = f"{out}.json"
        if main([named.get(word, word) for word in words]) != 0:
            raise UserError("said on stderr")
        if (weights := out / "transformer/diffusion_pytorch_model.safetensors").is_file():
            return torch.cat([value.float().flatten() for _, value in sorted(load_file(weights).items())])
        pictures = [np.asarray(Image.open(one), dtype=float) / 255 for one in sorted(out.rglob("*.png"))]
        return pictures[0] if pictures else Path(f"{out}.json").read_text().partition('"scores"')[2]

    return door


def loaded(write: Any, file: Path, out: Path) -> Any:
    model = diffrl.load(load_config(write("model")).model, lora=file)
    return np.asarray(model.draw("a red dog", steps=2)[0], dtype=float) / 255


def teacher(write: Any, file: Path, out: Path) -> Any:
    config = load_config(write("taught", objective="opd", opd={"teachers": {"a": {"lora": str(file)}}}))
    policy = load_policy(config.model, lora=SPEC)
    load_teachers(config, policy, ["teacher"])
    with policy.adapter("teacher"):
        return velocity(policy)


def student(write: Any, file: Path, out: Path) -> Any:
    config = load_config(write("also", evaluate={"also": {"few": {"merge": str(file), "steps": 2}}}))
    return velocity(load_students(config, load_policy(config.model, lora=SPEC))[0].policy)


DOORS: dict[str, Door] = {
    "sample --lora": command("sample", "MODEL", "--lora", "FILE", *DRAW, "--out", "OUT"),
    "sample --merge": command("sample", "MODEL", "--merge", "FILE", *DRAW, "--out", "OUT"),
    "evaluate": command("evaluate", "MODEL", "--lora", "FILE", *DRAW, "--rewards", REDNESS, "--out", "OUT.json"),
    "search": command("search", "MODEL", "--lora", "FILE", "--prompts", "PROMPTS", "--steps", "2", "--rewards", REDNESS,
                      "--budget", "4", "--out", "OUT"),
    "divgen": command("divgen", "generate", "MODEL", "--lora", "FILE", "--prompts", "PROMPTS", "--steps", "2",
                      "--per-prompt", "1", "--out", "OUT"),
    "export": command("export", "MODEL", "--lora", "FILE", "--merged", "--out", "OUT"),
    "load": loaded,
    "teacher": teacher,
    "student": student,
}  # fmt: skip


@pytest.mark.parametrize("name", some(DOORS, "sample --lora", "evaluate", "load", "student"))
def test_every_door_reads_the_same_files(
    name: str, config_file: Any, tiny_model: Path, tmp_path: Path, capfd: Any
) -> None:
    door, files = DOORS[name], {}
    policy = load_policy(str(tiny_model), lora=SPEC)
    scramble(policy, std=0.2)
    files["diffusers"] = policy.save_lora(tmp_path / "own").rename(tmp_path / "own.safetensors")
    state = policy.state()
    layer = next(key.partition(".lora_")[0] for key in state)
    a, b = (state[f"{layer}.lora_{kind}.weight"] for kind in "AB")
    for form, tensors in {
        "kohya": renamed(state, "kohya", SPEC.alpha),
        "none": {key: value * ("lora_A" in key) for key, value in state.items()},
        "lokr": {f"transformer.{layer}.lokr_w1": a, f"transformer.{layer}.lokr_w2": b},
        "unknown": {f"wonder.{layer}.lora_A.weight": a, f"wonder.{layer}.lora_B.weight": b},
    }.items():
        files[form] = tmp_path / f"{form}.safetensors"
        save_file({key: value.contiguous() for key, value in tensors.items()}, files[form])
    drawn = {form: door(config_file, files[form], tmp_path / f"out-{form}") for form in ("diffusers", "kohya", "none")}
    if isinstance(drawn["none"], str):
        assert drawn["diffusers"] == drawn["kohya"] != drawn["none"]
    else:
        gaps = [np.abs(np.asarray(drawn[one]) - np.asarray(drawn["diffusers"])).max() for one in ("kohya", "none")]
        assert gaps[0] <= 1 / 255 < 0.02 < gaps[1]
    capfd.readouterr()
    for form, words in (("lokr", "LoKr"), ("unknown", "no place|no part|no layer")):
        with pytest.raises(UserError) as caught:
            door(config_file, files[form], tmp_path / "refused")
        said = capfd.readouterr().err if "stderr" in str(caught.value) else str(caught.value)
        line = [one for one in said.split("\n") if one.strip()][-1]
        assert re.search(words, line) and "Traceback" not in said, said
    assert not [*tmp_path.glob("refused/*")]


def test_a_reader_of_another_package_finds_its_own_loras(
    installed: Any, monkeypatch: pytest.MonkeyPatch, config_file: Any, tiny_model: Path, tmp_path: Path
) -> None:
    """Of the names that begin with its own; everything else is done with them as with files."""

    class Studio(LoraFiles):
        def find(self, name: str) -> Path:
            if name != "studio:fox":
                raise UserError(f'the studio has no "{name}"')
            return tmp_path / "fox" / "pytorch_lora_weights.safetensors"

    module = ModuleType("of_a_studio")
    module.Studio = Studio
    monkeypatch.setitem(sys.modules, "of_a_studio", module)
    installed("studio", "of_a_studio:Studio", "diffrl.lora_readers")
    policy = load_policy(str(tiny_model), lora=SPEC)
    scramble(policy, std=0.2)
    file = policy.save_lora(tmp_path / "fox")
    assert find_lora("studio:fox") == lora_file("studio:fox") == file
    for door in ("start", "merge"):
        ours, theirs = (load_policy(str(tiny_model), **{door: name}) for name in ("studio:fox", str(file)))
        assert torch.equal(velocity(ours), velocity(theirs))
        config = load_config(config_file(door, lora={door: "studio:fox"}))
        assert [*config.lora.contents(config).values()] == [file]
        with pytest.raises(UserError, match=rf'lora\.{door}: the studio has no "studio:cat"'):
            load_config(config_file(door, lora={door: "studio:cat"}))
    with pytest.raises(UserError, match='no LoRA "studios:fox"'):
        find_lora("studios:fox")
