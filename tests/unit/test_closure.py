"""What `diffrl train` loads before it knows its config: the number only goes down, and what has left stays out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from children import MARK, in_child
from tiny import tiny_sd3

MOST = 11_400  # lines of ours that `import diffrl.run.train` loads, docstrings included
# Modules that no run needs before its config asks for them.
OUTSIDE = (
    "diffrl.additions",
    "diffrl.api",
    "diffrl.cli",
    "diffrl.config.in_file",
    "diffrl.config.overrides",
    "diffrl.config.reward_checks",
    "diffrl.conformance",
    "diffrl.continuations",
    "diffrl.divgen",
    "diffrl.drawing",
    "diffrl.families",
    "diffrl.hub_access",
    "diffrl.image_sets.reading",
    "diffrl.lora_files",
    "diffrl.loras",
    "diffrl.memory",
    "diffrl.methods",
    "diffrl.objectives.estimates",
    "diffrl.objectives.noising",
    "diffrl.policy.backbone",
    "diffrl.policy.engine",
    "diffrl.policy.exchange",
    "diffrl.policy.resizing",
    "diffrl.policy.sharding",
    "diffrl.policy.textfiles",
    "diffrl.prepare",
    "diffrl.pushing",
    "diffrl.records.checkpoint",
    "diffrl.report",
    "diffrl.reward_kinds",
    "diffrl.reward_tools",
    "diffrl.rewards.steps",
    "diffrl.run.past",
    "diffrl.serving",
    "diffrl.sharing",
    "diffrl.store",
    "diffrl.sweep",
    "diffrl.tools",
    "diffrl.vision_features",
    "diffrl.watch",
    "diffrl_lab",
    "diffrl_playground",
    "diffrl_zoo",
)


def _loaded_first(file: Path) -> None:
    """In a child: the lines of each module of ours that diffrl.run.train loads, the first import of its server."""
    names = list(sys.modules)
    modules = [sys.modules[name] for name in names[: names.index(MARK)] if name.partition(".")[0].startswith("diffrl")]
    lines = {one.__name__: len(Path(one.__file__).read_bytes().splitlines()) for one in modules if one.__file__}
    file.write_text(json.dumps(lines))


def test_what_a_training_loads_before_its_config_asks_for_more(tmp_path: Path) -> None:
    assert in_child(_loaded_first, tmp_path / "lines.json") == 0
    lines: dict[str, int] = json.loads((tmp_path / "lines.json").read_text())
    assert {"diffrl.run.train", "diffrl.run.loop"} <= set(lines)
    inside = sorted(name for name in lines if any(name == one or name.startswith(f"{one}.") for one in OUTSIDE))
    assert not inside, f"no run needs these before its config asks for them: {inside}"
    assert sum(lines.values()) <= MOST, f"{len(lines)} modules with {sum(lines.values())} lines; at most {MOST}"


WHOLE = 20_800  # lines of ours that a whole training on the playground loads, the world and its rewards included
TRAINED = """
import json, sys
from diffrl.cli.main import main
assert main(["train", *sys.argv[1:]]) == 0
ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0].startswith("diffrl")}
print(json.dumps({name: len(open(m.__file__, "rb").read().splitlines()) for name, m in ours.items() if m.__file__}))
"""
SMALL = (
    "epochs=1 rollout.groups=3 rollout.group_size=4 rollout.steps=3 optimise.batch_size=12 optimise.micro_batch=null"
)


@pytest.mark.long
@pytest.mark.parametrize("method", ["nft", "gardo"])
def test_what_a_whole_training_loads(method: str, tmp_path: Path) -> None:
    words = [f"playground/{method}", *SMALL.split(), "evaluate.prompts=2", "evaluate.per_prompt=2"]
    done = subprocess.run([sys.executable, "-c", TRAINED, *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    lines: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    others = [name for name in lines if name.startswith(("diffrl_lab", "diffrl.cli.d", "diffrl.report.compare"))]
    assert not others, f"no training needs these: {others}"
    assert sum(lines.values()) <= WHOLE, f"{len(lines)} modules with {sum(lines.values())} lines; at most {WHOLE}"


# Lines of ours that a training of another model loads, with one reward and no world.
OWN = {"nft": 16_500, "gardo": 17_330}  # GARDO over Flow-GRPO, with what it watches
METHODS = {
    "nft": "rollout: {groups: 2, group_size: 2, steps: 2}",
    "gardo": (
        "watch: {second: {plugin: jpeg, mode: incompressibility}}, objective: grpo, grpo: {advantage_std: none},"
        " gardo: {auxiliary: [second]},"
        " rollout: {groups: 2, group_size: 2, steps: 3, sampler: flow_sde, noise_level: 0.7}"
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_what_a_training_of_another_model_loads(method: str, tmp_path: Path) -> None:
    """Nothing of a world, although the held-out prompts are in its language: its figures are its own model's."""
    tiny_sd3(tmp_path / "model")
    prompts = ["a red heart", "two blue stars", "a dog", "a cat"]
    (tmp_path / "train.txt").write_text("\n".join(prompts[2:]))
    (tmp_path / "test.txt").write_text("\n".join(prompts[:2]))
    (tmp_path / "own.yaml").write_text(
        "{model: model, prompts: {train: train.txt, test: test.txt}, rewards: {jpeg: {}}, run_dir: run, epochs: 1,"
        f" {METHODS[method]}, optimise: {{batch_size: 4}}, evaluate: {{prompts: 2}}}}"
    )
    done = subprocess.run([sys.executable, "-c", TRAINED, "own.yaml"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    lines: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    inside = [name for name in lines if name.startswith(("diffrl_playground.", "diffrl_lab"))]
    assert not inside and sum(lines.values()) <= OWN[method], (inside, sum(lines.values()))
    assert not re.search("variety|unreadable", (tmp_path / "run" / "metrics.jsonl").read_text())
