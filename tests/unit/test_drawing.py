"""What commands draw: settled in one place, the base beside its LoRA, and folders that were used before."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hub_cache import put

import diffrl
from diffrl.cli.main import main
from diffrl.drawing import Drawing, evaluate, sample
from diffrl.loras.recorded import recorded, trained_at
from diffrl.policy import LoraSpec, load_policy
from diffrl.prompts import Prompt

REWARD = str(Path(__file__).parents[1] / "data" / "redness.py") + ":Redness"
TEXTS = ["red a", "blue b", "red c"]


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps with guidance 2, and a LoRA that changes its pictures."""
    folder = tmp_path_factory.mktemp("run")
    policy = load_policy(str(tiny_model), lora=LoraSpec(rank=2, alpha=4))
    with torch.no_grad():
        for _, parameter in policy.trainable:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    policy.save_lora(folder / "lora")
    rollout = {"steps": 2, "sampler": "flow_sde", "guidance_scale": 2.0}
    config = {"model": str(tiny_model), "rewards": {"jpeg": {}}, "rollout": rollout}
    config["prompts"] = {"train": "ocr/train", "test": "ocr/test"}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "metrics.jsonl").write_text('{"epoch": 0}\n')
    return folder


def test_a_record_fills_what_is_left_open(run: Path, tiny_model: Path, tmp_path: Path) -> None:
    lora = {"model": str(tiny_model), "lora": str(run / "lora"), "guidance_scale": None, "shift": 3.0}
    assert recorded(lora) == {"guidance_scale": 2.0}
    assert recorded(lora | {"guidance_scale": 1.0}) == {}
    assert recorded({"model": "x", "like": str(run)}) == {"sampler": "dpm2", "steps": 2, "guidance_scale": 2.0}
    assert recorded(lora | {"model": "another"}) == {}
    there = trained_at(run / "lora", str(tiny_model / ".." / tiny_model.name))
    assert there["steps"] == 2, "the same folder by another name"
    published, checkpoint = tmp_path / "published", tmp_path / "checkpoints" / "step-000001"
    for place, config in ((published, published), (checkpoint, tmp_path)):
        place.mkdir(parents=True)
        (config / "config.yaml").write_text((run / "config.yaml").read_text())
        assert trained_at(place, str(tiny_model))["guidance_scale"] == 2.0
    with pytest.raises(diffrl.UserError, match="--like"):
        recorded({"like": str(tiny_model)})


def test_a_record_is_found_under_every_name_of_a_lora(
    run: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What loads a LoRA by a name, and misses its guidance, draws another one without a word."""
    published = tmp_path / "published"
    shutil.copytree(run / "lora", published)
    shutil.copy(run / "config.yaml", published)
    monkeypatch.setenv("HOME", str(run.parent))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    put(tmp_path / "cache", "me/trained", published)
    put(tmp_path / "cache", "me/bare", run / "lora")
    file = next((run / "lora").glob("*.safetensors"))
    for name in (run, file, f"~/{run.name}", f"~/{run.name}/lora", "me/trained", f"me/trained:{file.name}"):
        assert trained_at(name, str(tiny_model))["guidance_scale"] == 2.0, name
    assert trained_at("me/bare", str(tiny_model)) == trained_at("nobody/there", str(tiny_model)) == {}


def test_base_and_lora_are_drawn_by_the_same_solver_and_steps(run: Path, tiny_model: Path) -> None:
    base, lora = (Drawing(str(tiny_model), lora=given) for given in (None, str(run / "lora")))
    policy = lora.policy()
    specs = [one.spec(policy) for one in (base, lora)]
    assert [(one.sampler, one.steps) for one in specs] == [("euler", 10)] * 2
    assert [one.guidance_scale for one in specs] == [1.0, 2.0]
    policy.backbone.known = (type("Known", (), {"name": str(tiny_model), "steps": 7, "guidance": 4.5}),)
    assert (base.spec(policy).steps, base.spec(policy).guidance_scale) == (7, 4.5), "as the authors draw"


COMMANDS = {
    "sample": "sample {model} --prompts {texts} --out {out}",
    "evaluate": "evaluate {model} --prompts {texts} --rewards jpeg --out {out}.json",
    "draw-set": "draw-set {model} --prompts {texts} --rewards jpeg --out {out}",
    "search": "search {model} --prompts {texts} --rewards jpeg --budget 40 --out {out}",
    "divgen": "divgen generate {model} --limit 1 --out {out}",
}


def test_every_command_draws_a_lora_alike(run: Path, tiny_model: Path, tmp_path: Path, monkeypatch) -> None:
    seen: dict[str, Drawing] = {}
    settled = Drawing.settled

    def watched(self: Drawing, backbone: Any) -> Drawing:
        seen[name] = settled(self, backbone)
        raise diffrl.UserError("seen")

    (texts := tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    monkeypatch.setattr(Drawing, "settled", watched)
    for name, line in COMMANDS.items():
        words = line.format(model=tiny_model, texts=texts, out=tmp_path / name).split()
        assert main([*words, "--lora", str(run / "lora")]) == 2 and name in seen
    ways = {name: (one.sampler, one.steps, one.guidance_scale, one.shift, one.resolution) for name, one in seen.items()}
    assert set(ways.values()) == {("euler", 10, 2.0, None, ways["sample"][-1])}, ways


def test_base_beside_the_lora(run: Path, tiny_model: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"model": str(tiny_model), "prompts": TEXTS, "steps": 2, "per_prompt": 2}
    lora = how | {"lora": str(run / "lora")}
    sample(out=tmp_path / "both", rewards={REWARD: {}}, base=True, **lora)
    sample(out=tmp_path / "lora", **lora)
    sample(out=tmp_path / "base", guidance_scale=2.0, **how)
    for one, other in (("both", "lora"), ("both/base", "base")):
        names = [json.loads(line)["file"] for line in (tmp_path / other / "images.jsonl").read_text().splitlines()]
        assert len(names) == 6
        for name in names:
            assert (tmp_path / one / name).read_bytes() == (tmp_path / other / name).read_bytes()
    assert (tmp_path / "both" / names[0]).read_bytes() != (tmp_path / "base" / names[0]).read_bytes()
    words = ["--lora", str(run / "lora"), "--base", "--steps", "2", "--per-prompt", "2", "--rewards", REWARD]
    texts = [word for text in TEXTS for word in ("--prompt", text)]
    out = ["--out", str(tmp_path / "s.json")]
    assert main(["evaluate", str(tiny_model), *words, *texts, *out]) == 0
    found = json.loads((tmp_path / "s.json").read_text())
    alone = evaluate(rewards={REWARD: {}}, guidance_scale=2.0, **how)
    assert found["base"]["mean"] == alone["mean"]
    gap = found["mean"][REWARD] - alone["mean"][REWARD]
    assert found["change"][REWARD]["mean"] == pytest.approx(gap, abs=1e-5)
    assert 0 < found["change"][REWARD]["standard_error"] < 1 and found["change"][REWARD]["p"] <= 1


def test_a_used_folder_keeps_no_picture_of_another_call(run: Path, tiny_model: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"model": str(tiny_model), "steps": 2, "out": tmp_path}
    sample(prompts=TEXTS, lora=str(run / "lora"), base=True, **how)
    (tmp_path / "00009-00-mine.png").write_text("")
    sample(prompts=TEXTS[:1], **how)
    left = {path.name for path in tmp_path.rglob("*.png")}
    assert left == {"00000-00-red-a.png", "grid.png", "00009-00-mine.png"}


def test_a_run_is_loaded_and_a_text_is_drawn(run: Path, tiny_model: Path) -> None:
    given = [diffrl.load(one) for one in (run, str(run), diffrl.Run(run))]
    by_hand = diffrl.load(tiny_model, lora=run / "lora").draw(["red a"], steps=2, guidance_scale=2.0)[0].tobytes()
    for model in given:
        assert model.draw("red a", steps=2)[0].tobytes() == by_hand
    assert diffrl.load(tiny_model).draw("red a", steps=2)[0].tobytes() != by_hand
    texts = Path(run, "texts.txt")
    texts.write_text("red a\n")
    for one in (texts, {"prompt": "red a", "tag": 1}, Prompt("red a")):
        assert given[0].draw(one, steps=2)[0].tobytes() == by_hand
    for wrong in (None, 3, [None], [3]):
        with pytest.raises(diffrl.UserError, match=r"prompts.*: expected .*text"):
            given[0].draw(wrong)  # type: ignore[arg-type]
    with pytest.raises(diffrl.UserError, match="no such file"):
        given[0].draw("nowhere/test.txt")
    assert diffrl.evaluate(diffrl.Run(run), REWARD, "red a", per_prompt=1, steps=2)["guidance_scale"] == 2.0
