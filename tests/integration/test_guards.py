"""What a run refuses before it harms anything, and what a resume keeps straight."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.prepare.dry_run import try_out
from diffrl.records.tracking import read_metrics
from diffrl.run.train import train

DATA = Path(__file__).parents[1] / "data"


def test_a_folder_that_holds_a_run_is_not_written_to(config_file) -> None:
    config = load_config(config_file(epochs=1))
    train(config)
    with pytest.raises(UserError, match=r"already holds a run"):
        train(config)
    (Path(config.run_dir) / "metrics.jsonl").unlink()  # checkpoints alone are a run, too
    with pytest.raises(UserError, match=r"already holds a run"):
        train(config)


def test_a_resume_with_more_epochs_goes_on_and_is_recorded(config_file) -> None:
    path = config_file(epochs=1)
    config = load_config(path)
    train(config)
    folder = Path(config.run_dir)
    train(load_config(path, ["epochs=2"]), resume=folder)
    assert [m["epoch"] for m in read_metrics(folder)] == [0, 1, 2]
    assert yaml.safe_load((folder / "config.yaml").read_text())["epochs"] == 2


def test_a_resume_with_other_prompts_is_refused(config_file) -> None:
    config = load_config(config_file(epochs=1))
    train(config)
    prompts = Path(config.prompts.train)
    prompts.write_text(prompts.read_text() + "red new\n")
    with pytest.raises(UserError, match=r"prompts\.train: the texts changed since "):
        train(config, resume=Path(config.run_dir))


def test_a_reward_that_applies_to_no_prompt_is_refused(config_file, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("\n".join(f"blue {i}" for i in "abcdef"))
    config = load_config(config_file(prompts={"train": str(other), "test": str(other)}))
    with pytest.raises(UserError, match=r"rewards\.redness: applies to none"):
        train(config)
    assert not Path(config.run_dir).exists()


def test_a_dry_run_writes_nothing(config_file, capsys) -> None:
    config = load_config(config_file())
    train(config, instead=try_out)
    assert not Path(config.run_dir).exists()
    assert "DiffusionNFT on" in capsys.readouterr().out


def test_a_failing_reward_stops_the_run_and_leaves_a_checkpoint(config_file, tmp_path: Path) -> None:
    from diffrl.records import checkpoint
    from diffrl.rewards.protocol import RewardError

    reward = tmp_path / "flaky.py"
    reward.write_text(
        "import torch\n"
        "class Flaky:\n"
        "    name, calls = 'flaky', 0\n"
        "    def __call__(self, images, prompts, metadata):\n"
        "        self.calls += 1\n"
        "        value = float('inf') if self.calls == 5 else 0.5\n"
        "        return torch.full((len(images),), value) + images.mean((1, 2, 3))\n"
    )
    config = load_config(config_file(rewards={"redness": {"plugin": f"{reward}:Flaky"}}))
    with pytest.raises(RewardError, match=r"redness.*red "):
        train(config)
    folder = Path(config.run_dir)
    found = checkpoint.latest(folder)
    assert found is not None and found.name == "step-000002"
    assert [m["epoch"] for m in read_metrics(folder)] == [0, 1]
    assert (folder / "report.html").exists()
