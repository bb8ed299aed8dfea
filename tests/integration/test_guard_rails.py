"""The guard rails in a run: alarms in metrics and console, the last healthy LoRA, an early end, and a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diffrl.config import load_config
from diffrl.records.tracking import read_metrics
from diffrl.report import read_run
from diffrl.report.data import warnings_of
from diffrl.run.evaluation import Evaluation
from diffrl.run.train import train

PROXY = [0.1, 0.2, 0.3, 0.4, 0.5]
TRUTH = [0.5, 0.6, 0.5, 0.4, 0.3]  # best at epoch 1; has parted twice in a row at epoch 3


@pytest.fixture
def hacked(config_file, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config of four epochs whose evaluations say that the proxy rises and the truth falls."""

    def scores(self: Evaluation) -> dict[str, float]:
        epoch = len(self.past)
        return {"eval/redness": PROXY[epoch], "eval/truth": TRUTH[epoch], "eval/diversity": 0.4}

    monkeypatch.setattr(Evaluation, "scores", scores)
    reward = str(Path(__file__).parents[1] / "data" / "warmth.py") + ":Warmth"
    sections = {"watch": {"truth": {"plugin": reward}}, "epochs": 4, "evaluate": {"every": 1}}
    return config_file("hacked", guard={"evaluations": 2}, **sections)


def alarms(folder: Path) -> dict[int, list[str]]:
    return {m["epoch"]: [key for key in m if key.startswith("alarm/")] for m in read_metrics(folder)}


def test_alarms_are_logged_and_the_last_healthy_lora_is_kept(hacked: Path, capsys) -> None:
    config = load_config(hacked)
    train(config)
    folder = Path(config.run_dir)
    assert alarms(folder) == {0: [], 1: [], 2: [], 3: ["alarm/parted/truth"], 4: ["alarm/parted/truth"]}
    assert capsys.readouterr().out.count("ALARM: truth, which is only watched") == 2
    assert json.loads((folder / "healthy" / "evaluation.json").read_text())["epoch"] == 2
    healthy, last = (load_file(folder / name / "pytorch_lora_weights.safetensors") for name in ("healthy", "lora"))
    assert healthy.keys() == last.keys() and any(not torch.equal(healthy[k], last[k]) for k in last)


LOWER = """
from diffrl.rewards.protocol import Card

class Chill:
    name = "chill"
    card = Card("cold", (0, 1), "", "", "", "", "", better="lower")

    def __call__(self, images, prompts, metadata):
        return images[:, 2].mean(dim=(1, 2))
"""


def test_a_plugin_in_a_file_says_that_lower_is_better(hacked: Path, tmp_path: Path) -> None:
    """The truth falls, and that is good; the report knows it without running the file."""
    plugin = tmp_path / "chill.py"
    plugin.write_text(LOWER)
    config = load_config(hacked, [f"watch.truth.plugin={plugin}:Chill"])
    train(config)
    folder = Path(config.run_dir)
    assert alarms(folder) == {0: [], 1: [], 2: [], 3: [], 4: []}
    plugin.unlink()
    assert read_run(folder).lower == {"truth"}


def test_an_alarm_can_end_the_run_and_a_resume_remembers(hacked: Path, capsys) -> None:
    config = load_config(hacked, ["guard.stop=true"])
    train(config)
    folder = Path(config.run_dir)
    assert list(alarms(folder)) == [0, 1, 2, 3]
    assert "ended after epoch 3; the last healthy LoRA is" in capsys.readouterr().out
    # Someone looked, and goes on without the early end: the fourth evaluation knows the first ones.
    train(load_config(hacked, ["guard.stop=false"]), resume=folder)
    assert alarms(folder)[4] == ["alarm/parted/truth"]


def test_without_a_guard_there_is_none(hacked: Path) -> None:
    config = load_config(hacked, ["guard.evaluations=null"])
    train(config)
    assert not any(alarms(Path(config.run_dir)).values())


def test_a_lora_after_which_nothing_can_be_read_is_not_healthy(hacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TRUTH", [0.5, 0.6, None, None, None])
    config = load_config(hacked)
    train(config)
    folder = Path(config.run_dir)
    assert alarms(folder) == {0: [], 1: [], **{epoch: ["alarm/missing/truth"] for epoch in (2, 3, 4)}}
    assert json.loads((folder / "healthy" / "evaluation.json").read_text())["epoch"] == 1


CHANGES = {
    **dict.fromkeys(["evaluate.prompts=1", "evaluate.per_prompt=3", "texts"], "prompts.test (texts and number)"),
    **dict.fromkeys(["code", "watch.warmth.scale=2"], " warmth (code and files)"),
    "evaluate.steps=2": "evaluate (solver and size)",
    "": "",
}


@pytest.mark.parametrize("changed", CHANGES)
def test_a_resume_that_measures_something_else_is_told_in_the_report(config_file, tmp_path: Path, changed: str) -> None:
    """Means before and after it are of other images or another judge, whose file or arguments may change, too."""
    test, judge = tmp_path / "test.txt", tmp_path / "judge.py"
    test.write_text("a red heart\na blue star\n")
    judge.write_text("def warmth(images, scale=1.0):\n    return scale * images[:, 2].mean(dim=(1, 2))\n")
    sections = {"prompts": {"test": str(test)}, "watch": {"warmth": {"plugin": f"{judge}:warmth"}}}
    config = config_file("changed", epochs=1, evaluate={"every": 1}, **sections)
    train(load_config(config))
    folder = Path(load_config(config).run_dir)
    assert not any("A resume changed" in text for text in warnings_of(read_run(folder)))
    if changed == "texts":
        test.write_text("a red heart\na green star\n")
    if changed == "code":
        judge.write_text(judge.read_text().replace("[:, 2]", "[:, 0]"))
    words = [changed] if "=" in changed else []
    train(load_config(config, ["epochs=2", *words]), resume=folder)
    told = [text for text in warnings_of(read_run(folder)) if "A resume changed" in text]
    assert len(told) == bool(changed) and all(CHANGES[changed] in text for text in told)
