"""The healthy point of a LoRA: the rule, the two sets of prompts, and the LoRA with its strength folded in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.policy import read_lora
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
    assert main(["dial", str(folder)]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines()[:-2])) <= 80 and "> strength 0.5" in text
    result = json.loads((folder / "dial" / "dial.json").read_text())
    assert [point["title"] for point in result["points"]][:3] == ["base model", "strength 0.25", "strength 0.5"]
    assert result["points"][-1]["title"] == "epoch 2"  # two checkpoints are kept, the newest is strength 1
    base, last = result["points"][0]["values"], result["points"][4]["values"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert base["redness"]["mean"] == lines[0]["eval/redness"] and last["redness"]["mean"] == lines[-1]["eval/redness"]
    whole, folded = read_lora(folder / "lora"), read_lora(folder / "dial" / "lora")
    assert whole[1] == folded[1]
    for name, tensor in whole[0].items():
        assert torch.equal(folded[0][name], tensor * 0.5 if "lora_B" in name else tensor)
    assert "<svg" in (folder / "dial" / "dial.html").read_text()


def test_prompts_of_the_choice_never_judge(config_file, capsys) -> None:
    config = load_config(config_file("run", evaluate={"prompts": 6}))
    with pytest.raises(ValueError, match="--judge"):
        split_prompts(config, None, None)
    assert main(["dial", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
