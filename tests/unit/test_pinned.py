"""`OWNER/NAME@REVISION`: one commit of a model for a whole run, known to whoever goes on with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_cache import COMMITS, point, put
from huggingface_hub import constants

from diffrl import hub, hub_access
from diffrl.cli import doctor
from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.lora_files import find_lora, lora_file
from diffrl.policy import find_model
from diffrl.rewards.registry import load_reward
from diffrl.run.identity import started_with
from diffrl.run.train import train

MODEL, (OLD, NEW) = "acme/tiny", COMMITS
JUDGE = """
from pathlib import Path
from huggingface_hub import hf_hub_download
from diffrl.hub import pinned

class Judge:
    name = "judge"
    def __init__(self, model: str = "acme/judge"):
        source, at = pinned(model)
        self.least = float(Path(hf_hub_download(source, "least.txt", **at)).read_text())
    def __call__(self, images, prompts, metadata):
        return images[:, 0].mean((1, 2)) - self.least
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    forget()
    yield folder
    forget()


def forget() -> None:
    """As another process begins."""
    hub_access.commit_at.cache_clear()
    hub._commits.clear()


def test_a_name_is_one_commit_by_branch_tag_or_commit(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    put(cache, MODEL, tmp_path / "files", OLD, "v1")
    put(cache, MODEL, tmp_path / "files", NEW)
    for name, commit in {MODEL: NEW, f"{MODEL}@main": NEW, f"{MODEL}@v1": OLD, f"{MODEL}@{OLD}": OLD}.items():
        assert hub.pinned(name) == (MODEL, {"revision": commit})
        assert hub.plain(name) == MODEL
    assert hub.commit_of(f"{MODEL}@{OLD[:8]}") == OLD
    point(cache, MODEL, OLD)
    assert hub.commit_of(MODEL) == NEW  # a process has one commit of a name
    assert hub.pinned(str(tmp_path / "files")) == (str(tmp_path / "files"), {})
    assert hub.pinned("acme/unknown") == ("acme/unknown", {})
    with pytest.raises(UserError, match='"acme/tiny@v2": this machine\'s cache has no revision "v2"'):
        hub.pinned(f"{MODEL}@v2")
    assert find_lora("acme/turbo@v1:it.safetensors") == ("acme/turbo@v1", "it.safetensors")


@pytest.fixture
def pinned_run(cache: Path, config_file: Any, tiny_model: Path, tmp_path: Path) -> Path:
    """A config of a hub's model and a hub's reward; both are here at an old commit, and then at a new one."""
    for name, source in ((MODEL, tiny_model), ("acme/judge", _judge(tmp_path, 0.0))):
        put(cache, name, source, NEW)
        put(cache, name, source, OLD)
    (tmp_path / "judge.py").write_text(JUDGE)
    rewards = {"judge": {"plugin": f"{tmp_path / 'judge.py'}:Judge"}}
    return Path(config_file(model=MODEL, rewards=rewards, epochs=1, evaluate={"prompts": 2, "per_prompt": 2}))


def _judge(tmp_path: Path, least: float) -> Path:
    folder = tmp_path / "judge"
    folder.mkdir(exist_ok=True)
    (folder / "least.txt").write_text(str(least))
    return folder


def test_a_resume_on_another_commit_is_refused_with_both(pinned_run: Path, cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(load_config(pinned_run))
    recorded = json.loads((run / "environment.json").read_text())[-1]["hub"]
    assert recorded == {MODEL: OLD, "acme/judge": OLD}
    for name, where in ((MODEL, "model"), ("acme/judge", "rewards.judge")):
        point(cache, name, NEW)
        forget()
        with pytest.raises(UserError) as refused:
            train(load_config(pinned_run, ["epochs=2"]), resume=run)
        assert str(refused.value).startswith(f"{where}: {name} is at commit {NEW}, but ")
        assert f"was trained with commit {OLD}" in str(refused.value)
        if name == MODEL:  # with the commit named it goes on, though main is another one
            pinned_run.write_text(pinned_run.read_text().replace(f"model: {MODEL}\n", f"model: {MODEL}@{OLD}\n"))
    words = ["epochs=2", f"rewards.judge.model=acme/judge@{OLD}"]
    forget()
    with pytest.raises(UserError, match=r"rewards\.judge"):  # a key that was not given, given now, is a change
        train(load_config(pinned_run, words), resume=run)
    train(load_config(pinned_run, words), resume=run, override=["rewards.judge"])
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["epoch"] == 2


def test_processes_compare_the_commits_of_all_that_they_load(pinned_run: Path, cache: Path) -> None:
    words = [f"evaluate.also.other.model={MODEL}@{NEW}", "evaluate.features=pixels"]
    table = started_with(load_config(pinned_run, words))
    assert table[f"model (commit of {MODEL})"] == OLD
    assert table[f"evaluate.also.other (commit of {MODEL})"] == NEW
    assert find_model(f"{MODEL}@main")[0] == f"{MODEL}@{OLD}"


def test_a_reward_knows_what_it_was_loaded_from_and_one_that_shares_weights_too(cache: Path, tmp_path: Path) -> None:
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    config = Dinov2Config(hidden_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14)
    Dinov2Model(config).save_pretrained(tmp_path / "dino")
    size, crop = {"shortest_edge": 36}, {"height": 28, "width": 28}
    BitImageProcessor(size=size, crop_size=crop, do_center_crop=True, resample=3).save_pretrained(tmp_path / "dino")
    put(cache, "acme/dino", tmp_path / "dino")
    for _ in range(2):
        reward: Any = load_reward("diversity", features="transformers", model=f"acme/dino@{OLD[:7]}")
        assert reward.commits == {"acme/dino": OLD}


def test_doctor_says_which_commits_are_here(pinned_run: Path, cache: Path) -> None:
    said = list(doctor.names_of_hub(load_config(pinned_run, ["watch.pickscore={}"])))
    assert f"model: {MODEL} at commit {OLD}" in said and f"rewards.judge: acme/judge at commit {OLD}" in said
    assert "watch.pickscore: yuvalkirstain/PickScore_v1 is not in this machine's cache" in said


@pytest.mark.parametrize("name", ["läufe/eins", "模型/sd3", "a--b/c", "a..b/c", "x/-y", f"{'x' * 97}/y"])
@pytest.mark.parametrize("read", [find_model, lora_file], ids=["model", "LoRA"])
def test_what_the_hub_takes_for_no_name_is_one_line(read: Any, name: str) -> None:
    """A folder that is not there, in any letters: huggingface_hub's own error is no answer to that."""
    with pytest.raises(UserError, match=f'no (folder|LoRA) "{name}"'):
        read(name)
