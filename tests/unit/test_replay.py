"""A training image again: to the bit, with the shares of a step's gradient summing to one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.run.source import Rollouts
from diffrl.run.train import train
from diffrl_lab.replay import replay


def trained(config_file: Any, monkeypatch: Any, *overrides: str, **sections: Any) -> tuple[Path, dict[int, list[Any]]]:
    """A run, and what its epochs were trained on: images, latents, scores."""
    seen: dict[int, list[Any]] = {}
    draw = Rollouts.draw

    def noted(rollouts: Any, prompts: Any, key: Any, members: Any = None) -> Any:
        features, pictures = rollouts.features, []
        rollouts.features = lambda images: (pictures.append(images.clone()), features(images))[1]
        result = draw(rollouts, prompts, key, members)
        rollouts.features = features
        seen[key] = [torch.cat(pictures), result[0].latents.clone(), result[1]]
        return result

    config = load_config(config_file("run", **sections), overrides)
    with monkeypatch.context() as patch:
        patch.setattr(Rollouts, "draw", noted)
        train(config)
    return Path(config.run_dir), seen


@pytest.mark.long
@pytest.mark.parametrize("objective", ["nft", "grpo"])
def test_a_replayed_image_is_the_training_image_to_the_bit(config_file, monkeypatch, objective: str) -> None:
    sections: dict[str, Any] = {"objective": objective}
    if objective == "grpo":
        sections["rollout"] = {"sampler": "flow_sde"}
    folder, seen = trained(config_file, monkeypatch, **sections)
    before = sorted(path.stat().st_mtime_ns for path in folder.rglob("*"))
    for epoch, image in ((1, 0), (3, 9)):  # from the untrained model; from a checkpoint
        result = replay(folder, epoch, image)
        images, latents, scores = seen[epoch - 1]
        assert torch.equal(result.image, images[image]) and torch.equal(result.latents, latents[image])
        assert list(result.facts["scores"].values()) == scores[image].tolist()
        assert result.facts["compared"]["values"] > 3 and not result.facts["compared"]["differ"]
        size = len(result.facts["group"])
        assert torch.equal(result.group, images[image // size * size :][:size])
    assert sorted(path.stat().st_mtime_ns for path in folder.rglob("*")) == before  # nothing was written


@pytest.mark.long
def test_shares_sum_to_one_and_leave_the_training_alone(config_file, tmp_path) -> None:
    """Every image of GARDO's step, its penalty included; the run's gradient, KL and resets stay as they were."""
    plugin = tmp_path / "blue.py"
    plugin.write_text(
        'class Blue:\n    name = "blue"\n    def __call__(self, images, prompts, metadata):\n'
        "        return images[:, 2].mean(dim=(1, 2))\n"
    )
    gardo = {"auxiliary": ["blue"], "share": 0.5, "beta": 0.5, "reset": {"kl": 1e-9}}
    path = config_file(
        "run",
        gardo=gardo,
        watch={"blue": {"plugin": f"{plugin}:Blue"}},
        rollout={"groups": 2, "group_size": 2},
        optimise={"batch_size": 4, "micro_batch": 0.5},
    )
    config = load_config(path, ["epochs=2"])
    train(config)
    folder = Path(config.run_dir)
    results = [replay(folder, 2, image).facts for image in range(4)]
    assert all(not one["compared"]["differ"] for one in results)
    shares = [one["gradient"][0]["share"] for one in results]
    assert sum(shares) == pytest.approx(1, abs=1e-4) and len(set(shares)) == 4
    assert {one["gate"]["held_back"] for one in results} == {True, False}
    with pytest.raises(UserError, match="EPOCH: 3"):
        replay(folder, 3, 0)
    with pytest.raises(UserError, match="IMAGE: 4"):
        replay(folder, 1, 4)
    file = folder / "config.yaml"
    changed = file.read_text().replace("learning_rate: 0.001", "learning_rate: 0.002")
    assert changed != file.read_text()
    file.write_text(changed)
    with pytest.raises(UserError, match=r"replay: optimise\.learning_rate: 0.002, but .* was trained with 0.001$"):
        replay(folder, 2, 0)
