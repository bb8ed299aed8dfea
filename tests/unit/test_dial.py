"""The healthy point of a LoRA: the rule, the two sets of prompts, and the LoRA with its strength folded in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import diffrl
from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.policy import load_policy
from diffrl.run.train import train
from diffrl_lab import dial as module
from diffrl_lab.dial import healthiest, split_prompts


def entry(way: str, gain: float, *alarms: str) -> dict[str, Any]:
    return {"way": way, "gain": gain, "alarms": dict.fromkeys(alarms, "")}


def test_the_rule_takes_the_largest_gain_before_the_first_alarm_of_a_way() -> None:
    base = entry("strength", 0.0)
    turned = [entry("strength", 0.2), entry("strength", 0.4, "parted/clip"), entry("strength", 0.9)]
    passed = [entry("checkpoints", 0.3), entry("checkpoints", 0.5, "diversity")]
    assert healthiest([base, *turned, *passed]) == 4
    assert healthiest([base, *turned]) == 1
    assert healthiest([base, entry("strength", -0.1)]) == 0


@pytest.mark.long
def test_dial_writes_the_point_as_a_plain_lora(config_file, monkeypatch, capsys) -> None:
    path = config_file("run")
    config = load_config(path)
    train(config)
    folder = Path(config.run_dir)
    chosen, judged = split_prompts(config, None, None)
    assert len(chosen) == 2 and not {p.text for p in chosen} & {p.text for p in judged}
    monkeypatch.setattr(module, "healthiest", lambda entries: 2)  # strength 0.5, whatever three epochs have made
    assert main(["dial", str(folder), "--out", str(folder)]) == 2  # whose lora/ it would replace
    capsys.readouterr()
    (folder / "dial" / "pictures").mkdir(parents=True)
    (folder / "dial" / "pictures" / "99-00.png").touch()  # of an earlier time
    assert main(["dial", str(folder), "--diversity", "0.75"]) == 0
    assert not (folder / "dial" / "pictures" / "99-00.png").exists()
    text, said = capsys.readouterr()
    assert "warning" not in said.lower() and "Beside the last checkpoint strength 0.5 is" in " ".join(text.split())
    assert max(map(len, text.splitlines()[:-2])) <= 80 and "> strength 0.5" in text
    result = json.loads((folder / "dial" / "dial.json").read_text())
    assert [point["title"] for point in result["points"]][:3] == ["base model", "strength 0.25", "strength 0.5"]
    assert result["points"][-1]["title"] == "epoch 2"  # two checkpoints are kept, the newest is strength 1
    base, last = result["points"][0]["values"], result["points"][4]["values"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert base["redness"]["mean"] == lines[0]["eval/redness"] and last["redness"]["mean"] == lines[-1]["eval/redness"]
    model = diffrl.load_config(folder / "config.yaml").model
    whole, folded = (load_policy(model, start=at / "lora") for at in (folder, folder / "dial"))
    assert whole.lora.spec == folded.lora.spec
    for name, tensor in whole.state().items():
        assert torch.equal(folded.state()[name], tensor * 0.5 if "lora_B" in name else tensor)
    assert "<svg" in (folder / "dial" / "dial.html").read_text()


@pytest.mark.parametrize(
    ("held", "word"),
    [
        ((-0.1, 0.04, 0.01), "worse"),
        ((0.1, 0.04, 0.01), "better"),
        ((0.1, 0.09, 0.3), "noise"),
        ((0.1, None, None), "noise"),
    ],
)
def test_the_sentence_says_what_a_paired_test_supports(held: tuple[Any, ...], word: str) -> None:
    point = {"title": "epoch 2", "way": "checkpoints", "strength": 1.0}
    about = dict(zip(("difference", "error", "p"), held, strict=True)) | {"better": 2, "worse": 1}
    assert module.sentence({"points": [point], "chosen": 0, "held_out": about}).endswith(f"{word}.")


def test_one_limit_for_collapse(config_file) -> None:
    config = load_config(config_file("run", guard={"diversity": 0.6}))
    assert module._strict(config).guard.diversity == 0.6 and module._strict(config).guard.evaluations == 1


def test_prompts_of_the_choice_never_judge(config_file, capsys) -> None:
    config = load_config(config_file("run", evaluate={"prompts": 6}))
    with pytest.raises(ValueError, match="--judge"):
        split_prompts(config, None, None)
    assert main(["dial", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
