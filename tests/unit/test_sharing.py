"""A published folder: plain diffusers loads it and draws the same pictures, and its card tells what was measured."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from tiny import SPEC, scramble, tiny_sd

import diffrl
from diffrl.cli.main import main
from diffrl.config.door import methods
from diffrl.errors import UserError
from diffrl.methods.grpo import GRPOSection
from diffrl.policy import load_policy
from diffrl.prepare.handed_over import register
from diffrl.records.disk import DiskError
from diffrl.rewards import local
from diffrl.rollout import initial_noise
from diffrl.sharing import publish, push
from diffrl.sharing.card import _cited, homepage
from diffrl.sharing.keys import for_comfyui
from diffrl.sharing.measure import paired, strength

PROMPTS = {"train": ["red a", "red b"], "test": ["red c", "red d", "blue e"]}


def _local() -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that no other program can import."""

    def redness(images):
        return images[:, 0].mean((1, 2))

    return redness


redness = _local()


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> diffrl.Run:
    """One epoch, and then a LoRA that changes the pictures."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    run = diffrl.train(
        {
            "model": tiny_model,
            "epochs": 1,
            "lora": {"rank": 2, "alpha": 6},
            "rollout": {"groups": 2, "group_size": 2, "steps": 2, "batch_size": 4},
            "optimise": {"batch_size": 4, "micro_batch": None},
            "evaluate": {"every": 1, "prompts": 3, "per_prompt": 2, "features": "pixels"},
        },
        prompts=PROMPTS,
        rewards={"redness": redness},
        watch=["jpeg"],
        run_dir=folder,
    )
    policy = diffrl.load(tiny_model, lora=run.lora).policy
    scramble(policy, std=0.5)
    policy.save_lora(run.lora)
    return run


@pytest.fixture(scope="module")
def folder(run: diffrl.Run) -> Path:
    return publish(run.folder)


def test_the_card_s_snippet_loads_and_draws_the_same(
    folder: Path, run: diffrl.Run, tiny_model: Path, monkeypatch
) -> None:
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert code is not None
    monkeypatch.chdir(folder)
    names: dict = {}
    exec(code[1], names)  # what a reader would paste
    assert names["image"].size == (16, 16)
    model = diffrl.load(tiny_model, lora=run.lora)
    for factor, name in ((1.0, "red c"), (0.5, "red d")):
        names["pipe"].set_adapters("rl", factor)
        noise = initial_noise(model.policy.latent_shape, [name], [0], seed=7)
        call = {"num_inference_steps": 2, "guidance_scale": 1.0, **model.policy.backbone.plain_call}
        plain = names["pipe"](name, latents=noise, output_type="np", **call).images[0]
        with strength(model.policy, factor):
            mine = np.asarray(model.draw([name], seed=7, steps=2)[0]) / 255
        assert np.abs(plain - mine).max() < 2 / 255
        assert np.abs(mine - np.asarray(diffrl.load(tiny_model).draw([name], seed=7, steps=2)[0]) / 255).max() > 0.05


def test_the_card_of_a_shifted_schedule_says_so_and_its_snippet_sets_it(run: diffrl.Run, tmp_path, monkeypatch) -> None:
    shifted = tmp_path / "mine"
    shutil.copytree(run.folder, shifted, ignore=shutil.ignore_patterns("publish"))
    config = yaml.safe_load((shifted / "config.yaml").read_text())
    config["rollout"]["shift"] = 5.0
    (shifted / "config.yaml").write_text(yaml.safe_dump(config))
    text = (publish(shifted) / "README.md").read_text()
    assert "guidance 1, schedule shift 5." in text
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    monkeypatch.chdir(shifted / "publish")
    names: dict = {}
    exec(code[1], names)
    assert names["pipe"].scheduler.sigmas.tolist() == pytest.approx([1, 5 * 0.5 / (1 + 4 * 0.5), 0])


def test_a_card_cites_the_papers_of_the_options_that_are_on() -> None:
    plain, held = (
        _cited(methods()["grpo"], GRPOSection(**keys)) for keys in ({}, {"delta": 1e-7, "weighting": "even"})
    )
    assert plain == "[Flow-GRPO](https://arxiv.org/abs/2505.05470)"
    assert "[Flow-DPPO](https://arxiv.org/abs/2606.11025), [Flash-GRPO](https://arxiv.org/abs/2605.15980)" in held


def test_the_card_links_to_the_homepage_of_the_package_s_metadata(monkeypatch) -> None:
    class Installed:
        urls: list[str] | None = None

        def get_all(self, name: str) -> list[str] | None:
            return self.urls if name == "Project-URL" else None

    monkeypatch.setattr("importlib.metadata.metadata", lambda name: Installed())
    assert homepage() is None
    Installed.urls = ["Issues, https://example.org/issues", "Homepage, https://example.org"]
    assert homepage() == "https://example.org"


def test_the_card_tells_what_was_measured(folder: Path) -> None:
    card, results = (folder / "README.md").read_text(), json.loads((folder / "results.json").read_text())
    rows = {row["name"]: row for row in results["rows"]}
    assert set(rows) == {"redness", "jpeg", "diversity"} and rows["redness"]["role"] == "trained"
    gain = rows["redness"]["trained"] - rows["redness"]["base"]
    assert abs(gain) > 1e-3 and rows["redness"]["low"] <= gain <= rows["redness"]["high"]
    assert f"{gain:+.3f} ({rows['redness']['low']:+.3f} to" in card and "3 held-out prompts with 2 images each" in card
    assert "| jpeg | held out |  | Apache-2.0 |" in card and "library_name: diffusers" in card
    assert Image.open(folder / "gallery.png").size[0] > 4 * 192
    assert diffrl.load_config(folder / "config.yaml").run_dir == "runs/mine"  # nobody's folders
    assert str(folder.parent) not in card


def test_intervals_are_those_of_a_paired_t_test() -> None:
    base = torch.tensor([0.0, 1.0, 2.0, float("nan")])
    row = paired("x", "trained", base, torch.tensor([1.0, 3.0, 5.0, 9.0]))  # gains 1, 2, 3: mean 2, error 1/sqrt(3)
    assert (row.base, row.trained) == (1.0, 3.0)
    assert row.high == pytest.approx(2 + 4.302653 / 3**0.5, abs=1e-5) and row.p == pytest.approx(0.0741799, abs=1e-6)


def test_comfyui_s_file_is_the_same_update(folder: Path, run: diffrl.Run) -> None:
    policy = load_policy(run.config.model, start=run.lora)
    state, spec = policy.state(), policy.lora.spec
    tensors = load_file(folder / "comfyui_lora.safetensors")
    layers = {key.rsplit(".lora_", 1)[0] for key in state}
    assert {key.rsplit(".", 1)[0] for key in tensors if key.endswith(".alpha")} == {f"transformer.{n}" for n in layers}
    for layer in layers:
        name = f"transformer.{layer}"
        up, down, alpha = (tensors[f"{name}.{end}"] for end in ("lora_up.weight", "lora_down.weight", "alpha"))
        theirs = alpha / down.shape[0] * up @ down  # ComfyUI's own arithmetic
        torch.testing.assert_close(
            theirs, spec.scale * state[f"{layer}.lora_B.weight"] @ state[f"{layer}.lora_A.weight"]
        )


def test_a_unet_s_file_loads_by_its_other_names(tmp_path: Path) -> None:
    """diffusers reads these names, too: the same pictures as from its own."""
    from diffusers import StableDiffusionPipeline
    from safetensors.torch import save_file

    model = tiny_sd(tmp_path / "sd")
    policy = load_policy(str(model), lora=SPEC)
    scramble(policy)
    own = policy.save_lora(tmp_path / "lora")
    tensors = for_comfyui("StableDiffusionPipeline", policy.state(), policy.lora.spec)
    assert all(key.startswith("lora_unet_") for key in tensors)
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    drawn = []
    for source in ({"pretrained_model_name_or_path_or_dict": str(own.parent)}, None):
        pipe = StableDiffusionPipeline.from_pretrained(model)
        if source is None:
            pipe.load_lora_weights(str(tmp_path), weight_name="theirs.safetensors")
        else:
            pipe.load_lora_weights(**source)
        pipe.set_progress_bar_config(disable=True)
        noise = torch.Generator().manual_seed(0)
        drawn.append(pipe("red a", num_inference_steps=2, generator=noise, output_type="np").images)
    assert np.abs(drawn[0] - drawn[1]).max() < 1e-4


def test_a_run_whose_objects_are_gone_is_published_from_its_own_evaluations(run, tmp_path, capsys, caplog) -> None:
    local.forget("python:redness")
    try:
        assert main(["publish", str(run.folder), "--out", str(tmp_path / "out")]) == 0
    finally:
        register("redness", redness)
    assert "without intervals" in (tmp_path / "out/README.md").read_text()
    assert "nothing is measured anew" in caplog.text or "nothing is measured anew" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["", "lora", "healthy", "checkpoints/step-000001", "other", "kept"])
def test_nothing_of_a_run_is_written_over(run: diffrl.Run, tmp_path: Path, place: str) -> None:
    """A run's config.yaml would get another run_dir, and a LoRA another one's weights."""
    copy, out = tmp_path / "copy", tmp_path / "copy" / place
    shutil.copytree(run.folder, copy)
    shutil.copytree(copy / "lora", copy / "other")
    shutil.copytree(next((copy / "checkpoints").iterdir()), copy / "kept")
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=rf'^--out: "{out}" is a (run|LoRA)\'s own folder; name another'):
        publish(copy, out, lora=copy / "other" if place == "other" else None, prompts=0)
    assert before == {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}


def test_a_full_disk_is_said_where_it_is_and_no_file_is_half_written(
    run: diffrl.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(DiskError, match=f"^{tmp_path}/out/pytorch_lora_weights.safetensors: could not be written: No"):
        publish(run.folder, tmp_path / "out", prompts=0)
    assert not list((tmp_path / "out").iterdir())


def test_the_card_of_an_earlier_lora_tells_of_its_own_epochs(run: diffrl.Run, tmp_path: Path) -> None:
    """RUN/healthy was evaluated before the run's end; of a LoRA from elsewhere the run's evaluations say nothing."""
    longer = tmp_path / "longer"
    shutil.copytree(run.folder, longer)
    lines = (longer / "metrics.jsonl").read_text().splitlines()
    later = json.loads(lines[-1]) | {"epoch": 2, "samples": 8, "eval/redness": 0.987}
    (longer / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(later)]) + "\n")
    shutil.copytree(longer / "lora", longer / "healthy", dirs_exist_ok=True)
    (longer / "healthy/evaluation.json").write_text('{"epoch": 1, "step": 1}')
    shutil.copytree(longer / "lora", longer / "dial/lora")

    newest, healthy, dialled = (
        (publish(longer, tmp_path / name, lora=lora and longer / lora, prompts=0) / "README.md").read_text()
        for name, lora in (("newest", None), ("earlier", "healthy"), ("other", "dial"))
    )
    trained = json.loads(lines[-1])["eval/redness"]
    assert "2 epochs, 8 images" in newest and "| 0.987 |" in newest
    assert "1 epochs, 4 images" in healthy and f"| {trained:.3f} |" in healthy and "0.987" not in healthy
    assert "0.987" not in dialled and "| redness | trained | 1 |" in dialled and "Nothing: neither" in dialled


def test_pushing_makes_the_repository_and_fails_in_one_line(folder: Path, monkeypatch, capsys) -> None:
    from huggingface_hub import HfApi

    sent: list[object] = []

    def create(self: HfApi, name: str, **rest: object) -> str:
        sent.append(name)
        return f"https://hub/{name}"

    monkeypatch.setattr(HfApi, "create_repo", create)
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **rest: sent.append(Path(rest["folder_path"])))
    assert push(folder, "me/mine") == "https://hub/me/mine" and sent == ["me/mine", folder]

    import httpx

    for error in (OSError("no network"), httpx.ConnectError("no network"), RuntimeError("no network")):

        def unreachable(self, *words, error=error, **rest):
            raise error

        monkeypatch.setattr(HfApi, "create_repo", unreachable)
        with pytest.raises(ConnectionError, match=f"me/mine could not be sent: .*no network; {folder} is complete"):
            push(folder, "me/mine")
    assert main(["publish", str(folder.parent), "--push", "me/mine"]) == 2
    assert "HF_HUB_OFFLINE" in capsys.readouterr().err, "before anything is measured"
    assert main(["publish", str(folder.parent), "--push", "mine"]) == 2
    assert capsys.readouterr().err == 'diffrl: error: --push: "mine": write OWNER/NAME\n'


def test_the_demo_takes_the_next_free_folder(run: diffrl.Run, tmp_path: Path, monkeypatch, capsys) -> None:
    """What it trains is tested from the wheel (tests/integration/test_wheel.py)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/demo/checkpoints").mkdir(parents=True)
    asked = []

    def train(*words: str) -> None:
        asked.append(words)
        shutil.copytree(run.folder, words[-1].removeprefix("run_dir="), dirs_exist_ok=True)

    monkeypatch.setattr("diffrl.api.train", train)
    assert main(["demo", "epochs=1"]) == 0 and main(["demo", "run_dir=mine"]) == 0
    assert asked == [("playground/demo", "epochs=1", "run_dir=runs/demo-2"), ("playground/demo", "run_dir=mine")]
    assert "diffrl publish mine" in capsys.readouterr().out


def test_an_interrupted_demo_says_how_to_go_on(tmp_path: Path, monkeypatch, capsys) -> None:
    from diffrl.run.interrupt import Interrupted

    def train(*words: str) -> None:
        (tmp_path / "runs/demo").mkdir(parents=True)
        (tmp_path / "runs/demo/metrics.jsonl").touch()
        raise Interrupted("SIGINT")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("diffrl.api.train", train)
    assert main(["demo"]) == 75
    assert "continue with: diffrl train --resume runs/demo  (ended by SIGINT" in capsys.readouterr().err
