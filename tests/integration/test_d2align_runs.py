"""D2-Align as a user runs it: one command for both stages, killed and resumed, alone and on two processes."""

from __future__ import annotations

import html
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import train_on_two
from test_equivalence import distance, lora_of, same_lora
from test_resume import final_tensors, run_and_die

from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.methods.d2align.corrected import load_direction
from diffrl.methods.d2align.direction import reconstructed
from diffrl.methods.d2align.stage1 import embed_images, prepare_direction
from diffrl.prompts import load_prompts
from diffrl.records.tracking import read_metrics
from diffrl.run.train import Run, train

PLUGIN = str(Path(__file__).parents[1] / "data" / "embedder.py") + ":Embedder"
TWO_STAGES: dict[str, Any] = {
    "objective": "direct",
    "rewards": {"redness": {"plugin": PLUGIN}},
    "watch": {"plain": {"plugin": PLUGIN}},
    "d2align": {"steps": 30, "learning_rate": 0.01, "pool": 9},
    "epochs": 2,
}


def direction_of(run_dir: str | Path) -> torch.Tensor:
    return load_direction(Path(run_dir) / "d2align" / "direction.safetensors").vector


def frozen(run: Run) -> dict[str, torch.Tensor]:
    parts = {"network": run.policy.network, "vae": run.policy.vae}
    named = [(f"{part}.{n}", p) for part, module in parts.items() for n, p in module.named_parameters()]
    return {name: p.detach().clone() for name, p in named if "lora_" not in name}


def test_stage_1_changes_only_the_direction_and_stage_2_only_the_lora(config_file: Any) -> None:
    run = Run(load_config(config_file("stages", **TWO_STAGES)))
    base, lora, reward = frozen(run), run.policy.state("default"), run.scorer.rewards["redness"]
    assert reward.norm == 0.0 and reward is run.judges.rewards["redness"]  # type: ignore[attr-defined]
    folder, rewards = run.folder.path, run.scorer.rewards
    direction = prepare_direction(run.config, folder, run.policy, rewards, run.spec, run.accelerator)
    assert direction is not None and reward.norm == pytest.approx(direction.norm) and direction.norm > 0.05  # type: ignore[attr-defined]
    assert all(torch.equal(value, lora[key]) for key, value in run.policy.state("default").items())
    assert all(torch.equal(value, base[key]) for key, value in frozen(run).items())
    run.loop.run_epoch(0)
    run.loop.run_epoch(1)
    assert all(torch.equal(value, base[key]) for key, value in frozen(run).items())
    assert not any(torch.equal(value, lora[key]) for key, value in run.policy.state("default").items())
    assert torch.equal(direction_of(run.folder.path), direction.vector)


def test_stage_1_can_embed_what_stage_2_sees(config_file: Any) -> None:
    section = {**TWO_STAGES["d2align"], "embed": "reconstructed"}
    run = Run(load_config(config_file("algorithm_1", **{**TWO_STAGES, "d2align": section})))
    policy, spec = run.policy, run.spec
    direction = prepare_direction(run.config, run.folder.path, policy, run.scorer.rewards, spec, run.accelerator)
    assert direction is not None and direction.identity.settings["embed"] == "reconstructed"
    prompts, reward = load_prompts(run.config.prompts.train)[:2], run.scorer.rewards["redness"].base  # type: ignore[attr-defined]
    schedule = policy.timesteps(spec.steps)
    given: dict[tuple[str, int], torch.Tensor] = {}

    def revise(x0: torch.Tensor, cond: Any, names: Any) -> torch.Tensor:
        given.update(zip(names, x0, strict=True))
        return reconstructed(policy, x0, cond, [(0, *name) for name in names], schedule)

    amount: dict[str, Any] = {"seed": 0, "per_prompt": 2, "batch_size": 3, "accelerator": run.accelerator}
    rows = embed_images(policy, reward, prompts, spec, **amount, revise=revise)
    last = (prompts[1].text, 1)
    alone = reconstructed(policy, given[last][None], policy.encode([last[0]]), [(0, *last)], schedule)
    torch.testing.assert_close(rows[3:], reward.embed_image(policy.decode(alone)), rtol=1e-4, atol=1e-5)
    assert (rows - embed_images(policy, reward, prompts, spec, **amount)).abs().max() > 1e-3
    other = direction.identity.settings | {"embed": "image"}
    file = run.folder.path / "d2align" / "direction.safetensors"
    replace(direction, identity=replace(direction.identity, settings=other)).save(file)
    with pytest.raises(UserError, match="learned with embed image, and the config says reconstructed"):
        prepare_direction(run.config, run.folder.path, policy, run.scorer.rewards, spec, run.accelerator)


def test_one_command_runs_both_stages_and_reports_them(
    config_file: Any, capsys: pytest.CaptureFixture, charts: None
) -> None:
    path = config_file("recipe", **TWO_STAGES)
    config = load_config(path)
    folder = Path(config.run_dir)
    assert main(["train", str(path), "--dry-run"]) == 0 and not folder.exists()  # a dry run learns nothing
    assert main(["train", str(path)]) == 0
    vector = direction_of(folder)
    lines = read_metrics(folder)
    assert [line.get("d2align/norm") for line in lines[1:]] == [pytest.approx(float(vector.norm()))] * 2
    assert lines[-1]["eval/redness"] != pytest.approx(lines[-1]["eval/plain"])  # corrected, and as it is
    assert lines[-1]["direct/reward"] is not None and "reward/redness" in lines[-1]
    page = html.unescape((folder / "report.html").read_text())
    assert "D2-Align's direction" in page and "nearest to the direction" in page
    assert not (folder / "d2align" / "checkpoints").exists()
    capsys.readouterr()
    # The direction alone, by its own command: the same.
    alone = config_file("alone", **TWO_STAGES)
    assert main(["d2align", "learn", str(alone)]) == 0
    assert "nearest words" in capsys.readouterr().out
    assert torch.equal(direction_of(load_config(alone).run_dir), vector)
    assert (Path(load_config(alone).run_dir) / "d2align" / "report.html").is_file()


@pytest.mark.long
def test_any_objective_takes_the_corrected_reward_from_a_file(config_file: Any) -> None:
    learned = config_file("learned", **TWO_STAGES)
    assert main(["d2align", "learn", str(learned)]) == 0
    file = Path(load_config(learned).run_dir) / "d2align" / "direction.safetensors"
    rewards = {"redness": {"plugin": f"d2:{PLUGIN}", "direction": str(file)}}
    train(load_config(config_file("nft", rewards=rewards, epochs=1)))
    assert read_metrics(load_config(config_file("nft")).run_dir)[1]["d2align/norm"] > 0
    held = {"objective": "grpo", "rollout": {"sampler": "flow_sde"}, "grpo": {"delta": 1e-7}}
    train(load_config(config_file("dppo", rewards=rewards, epochs=1, **held)))
    assert read_metrics(load_config(config_file("dppo")).run_dir)[1]["d2align/norm"] > 0
    named = {**TWO_STAGES, "d2align": {"direction": str(file)}, "epochs": 1}
    config = load_config(config_file("named", **named))
    train(config)
    assert not (Path(config.run_dir) / "d2align").exists()
    # Another reward model, and other settings in the same folder, are refused.
    other = {**named, "rewards": {"redness": {"plugin": PLUGIN, "seed": 1}}}
    with pytest.raises(
        UserError, match=r"learned for the reward model .*Embedder, which is not that of rewards\.redness"
    ):
        train(load_config(config_file("other", **other)))
    with pytest.raises(UserError, match=r"was learned with omega 1\.5, and the config says 2\.0; remove the file"):
        train(load_config(learned, ["d2align.omega=2.0"]))


# Where the process kills itself: in both stages, and between them.
KILLS = {
    "diffrl.methods.d2align.stage1:embed_images": 2,
    "diffrl.records.saving:_publish": 2,
    "diffrl.methods.d2align.stage1:_Stage1.keep": 2,
    "diffrl.methods.d2align.stage1:save_image": 2,
    "diffrl.methods.d2align.stage1:Corrected.use": 1,
    "diffrl.run.loop:Loop._step": 2,
}


@pytest.mark.long
def test_killed_in_either_stage_and_resumed_it_ends_the_same(config_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"diffrl.methods.d2align.stage1:BLOCK": 4, "diffrl.methods.d2align.direction:SAVE_EVERY": 10}
    for name, value in small.items():
        monkeypatch.setattr(name.replace(":", "."), value)
    sections = {**TWO_STAGES, "epochs": 1, "evaluate": {"prompts": 1}, "tracking": {"samples": 0}}
    whole = load_config(config_file("whole", **sections))
    train(whole)
    expected = final_tensors(Path(whole.run_dir))
    for number, (target, call) in enumerate(KILLS.items()):
        broken = config_file(f"broken{number}", **sections)
        assert run_and_die(broken, target, call, **small) == -signal.SIGKILL, target
        folder = Path(load_config(broken).run_dir)
        train(load_config(broken), resume=folder)
        assert torch.equal(direction_of(folder), direction_of(whole.run_dir)), target
        evidence = [(run / "d2align" / "evidence.json").read_text() for run in (folder, Path(whole.run_dir))]
        assert evidence[0] == evidence[1], target
        ours = final_tensors(folder)
        for part in ("lora", "ema", "optimiser"):
            same = all(torch.equal(ours[part][name], tensor) for name, tensor in expected[part].items())
            assert same, f"{target}: {part} differs after a resume"


@pytest.mark.long
def test_accumulation_does_not_change_direct_alignment(config_file: Any) -> None:
    loras = []
    for pieces in (1, 8):
        optimise = {"batch_size": 8, "micro_batch": None if pieces == 1 else 1 / pieces, "learning_rate": 1e-3}
        sections = {
            **TWO_STAGES,
            "optimise": optimise,
            "direct": {"decode_chunk": 3 if pieces == 1 else None},
        }
        config = load_config(config_file(f"pieces{pieces}", **sections))
        train(config)
        loras.append(lora_of(config.run_dir))
    assert same_lora(*loras)


def test_a_direction_picked_by_hand_is_what_a_word_adds_to_the_prompts(config_file: Any, capsys: Any) -> None:
    section = {**TWO_STAGES["d2align"], "word": "glossy"}
    path = config_file("word", **{**TWO_STAGES, "d2align": section, "epochs": 1})
    assert main(["train", str(path)]) == 0
    assert 'that of the word "glossy"' in capsys.readouterr().out
    config = load_config(path)
    embed = Run(config).scorer.rewards["redness"].base.embed_text  # type: ignore[attr-defined]
    texts = [prompt.text for prompt in load_prompts(config.prompts.train)]
    expected = torch.stack([embed([f"{text}, glossy"])[0] - embed([text])[0] for text in texts]).mean(0)
    assert expected.norm() > 1e-3
    torch.testing.assert_close(direction_of(config.run_dir), expected)
    page = (Path(config.run_dir) / "report.html").read_text()
    assert "that of the word “glossy”" in page and "guided reward against steps" not in page
    with pytest.raises(UserError, match=r'd2align.word: null, but .* was trained with "glossy"'):
        train(load_config(path, ["d2align.word=null"]), resume=Path(config.run_dir))


@pytest.mark.long
def test_the_recipe_on_two_processes_is_that_on_one(config_file: Any) -> None:
    alone, shared = (config_file(name, **TWO_STAGES) for name in ("one", "two"))
    train(load_config(alone))
    train_on_two(shared)
    one, two = (load_config(path).run_dir for path in (alone, shared))
    torch.testing.assert_close(direction_of(two), direction_of(one), rtol=1e-4, atol=1e-6)
    assert distance(lora_of(two), lora_of(one)) < 1e-4
