"""`evaluate.also`: the trained LoRA on a student of the model, as a user would load it there; nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from tiny import tiny_flux, tiny_sd3

from diffrl.additions.verdict import Guard
from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.evaluation import Evaluator, summarise
from diffrl.features import load_features
from diffrl.memory import fit
from diffrl.methods.students import students_of
from diffrl.policy import load_policy
from diffrl.report.compare import write_comparison
from diffrl.report.data import read_run
from diffrl.rollout import SamplerSpec
from diffrl.run.describe import describe
from diffrl.run.train import Run, train


@pytest.fixture(scope="module")
def turbo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the architecture of `tiny_model`, with other weights."""
    return tiny_sd3(tmp_path_factory.mktemp("student") / "turbo", seed=7)


def with_turbo(turbo: Path, **more: Any) -> dict[str, Any]:
    return {"every": 1, "also": {"turbo": {"model": str(turbo), "steps": 2, **more}}}


def lines(config: Any) -> list[dict[str, Any]]:
    """Of metrics.jsonl, without times."""
    rows = [json.loads(line) for line in (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("seconds")} for row in rows]


@pytest.mark.long
def test_a_run_judges_its_lora_on_the_student_and_resumes_exactly(
    config_file, turbo: Path, tmp_path: Path, charts: None
) -> None:
    sections = {"epochs": 2, "evaluate": with_turbo(turbo), "tracking": {"samples": 0}}
    whole, plain, broken = (load_config(config_file(name, **sections)) for name in ("whole", "plain", "broken"))
    train(whole)
    train(plain.model_copy(update={"evaluate": plain.evaluate.model_copy(update={"also": {}})}))
    seen, without = lines(whole), lines(plain)
    for row, other in zip(seen, without, strict=True):  # beside, and nothing else changes
        there = {key: row.pop(key) for key in list(row) if key.startswith("eval/turbo/")}
        assert set(there) == {"eval/turbo/redness", "eval/turbo/diversity"} and row == other
    seen = lines(whole)
    values = [row["eval/turbo/redness"] for row in seen]
    assert len(set(values)) == 3 and values[0] != seen[0]["eval/redness"]

    train(broken.model_copy(update={"epochs": 1}))
    train(broken, resume=Path(broken.run_dir))
    assert lines(broken) == seen

    policy = load_policy(str(turbo), start=Path(whole.run_dir) / "lora")  # as `diffrl evaluate --lora RUN_DIR/lora`
    run = Run(whole)
    spec = SamplerSpec(sampler="euler", steps=2, guidance_scale=1.0, noise_level=0.0)
    amount = whole.evaluate.per_prompt, whole.rollout.batch_size
    evaluator = Evaluator(policy, run.judges, load_features("pixels"), spec, *amount)
    found = evaluator.score(run.evaluation.prompts, "default", whole.seed)
    assert summarise(run.judges.names, found.scores)["redness"] == pytest.approx(values[-1], abs=1e-6)
    _reports(whole, plain, tmp_path)


def _reports(whole: Any, plain: Any, tmp_path: Path) -> None:
    """The student's value is a line in the reward's own chart, and a row of a comparison."""
    page = (Path(whole.run_dir) / "report.html").read_text()
    assert "on turbo" in page and "turbo/redness" in page and read_run(whole.run_dir).students == ["turbo"]
    compared = write_comparison([whole.run_dir, plain.run_dir], tmp_path / "both.html").read_text()
    assert "turbo/redness" in compared


def test_it_waits_in_main_memory(config_file, turbo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(load_config(config_file("run", evaluate=with_turbo(turbo))))
    (student,) = students_of(run.hooks)
    moves: list[str] = []
    monkeypatch.setattr(student.policy.vae, "to", lambda device: moves.append(str(device)))
    assert all(not p.is_meta for p in student.policy.network.parameters())
    first = run.evaluation.added(0, True)
    assert moves == ["cpu", "cpu"] and first == run.evaluation.added(0, True), (
        "to the device and back, and the same again"
    )


def test_a_student_may_be_the_model_itself_with_a_merged_lora(config_file, tiny_model: Path, tmp_path: Path) -> None:
    """As most turbo models are: the LoRA becomes part of the weights, the trained one comes on top of it."""
    pipe = StableDiffusion3Pipeline.from_pretrained(tiny_model, text_encoder_3=None, tokenizer_3=None)
    pipe.transformer.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["ff.net.2", "proj_out"]))
    for name, parameter in pipe.transformer.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(parameter, 0.1)
    pipe.save_lora_weights(tmp_path / "turbo", transformer_lora_layers=get_peft_model_state_dict(pipe.transformer))
    also = {"turbo": {"merge": str(tmp_path / "turbo"), "steps": 2}, "plain": {"model": str(tiny_model), "steps": 2}}
    config = load_config(config_file("run", evaluate={"every": 1, "also": also}))
    run = Run(config)
    networks = {student.name: student.policy.network for student in students_of(run.hooks)}
    turbo, plain = networks["turbo"], networks["plain"]
    for layer in ("transformer_blocks.0.ff.net.2", "proj_out"):
        added = turbo.get_submodule(layer).weight - plain.get_submodule(layer).weight
        module = pipe.transformer.get_submodule(layer)
        assert torch.allclose(added, module.lora_B["default"].weight @ module.lora_A["default"].weight, atol=1e-6)
    found = run.evaluation.added(0, True)[0].metrics
    assert found["eval/turbo/redness"] != found["eval/plain/redness"]
    peaks = fit.estimate(config).peaks
    assert peaks["sampling 8 rows on turbo"] == peaks["sampling 8 rows on plain"]
    assert "with " + str(tmp_path / "turbo") + ", too, as turbo" in describe(run)


def test_guard_rails_watch_the_student(config_file, turbo: Path) -> None:
    config = load_config(config_file("run", evaluate=with_turbo(turbo)))
    guard = Guard.of(config.resolved(), ())
    past = [{"epoch": i, "eval/redness": i, "eval/turbo/redness": 1 - 0.2 * i} for i in range(5)]
    assert [alarm.key for alarm in guard.alarms(past)] == ["parted/turbo/redness"]
    assert Run(config).lower == frozenset()


def test_doctor_counts_it(config_file, turbo: Path) -> None:
    config = load_config(config_file("run", evaluate=with_turbo(turbo)))
    found = fit.estimate(config)
    without = fit.estimate(load_config(config_file("run")))
    run = Run(config)
    (student,) = students_of(run.hooks)
    weights = sum(p.nbytes for m in (student.policy.network, student.policy.vae) for p in m.parameters())
    texts = sum(p.nbytes for encoder in student.policy.backbone.text_encoders for p in encoder.parameters())
    key = "sampling 8 rows on turbo"
    assert found.parts == without.parts and found.peaks.keys() - without.peaks.keys() == {key}
    assert found.peaks[key] > found.peaks["decoding"] and found.host - without.host == texts + weights


def test_what_does_not_fit_is_said_before_anything_is_trained(config_file, turbo: Path, tmp_path: Path) -> None:
    deeper, flux = tiny_sd3(tmp_path / "deeper", layers=3), tiny_flux(tmp_path / "flux")
    for also, message in (
        (
            {"turbo": {"model": str(deeper)}},
            r"also.turbo.model: .*deeper has num_layers 3, .* 2: its LoRA does not fit",
        ),
        (
            {"turbo": {"model": str(flux)}},
            r"a FluxPipeline, .* StableDiffusion3Pipeline: .* .models of its family: stab",
        ),
        ({"turbo": {}}, "also.turbo.model: not given; name a folder .* merge a LoRA, or another base"),
        ({"turbo": {"merge": "playground/turb"}}, 'also.turbo.merge: no LoRA .* .nearest: "playground/turbo".'),
        ({"turbo": {"model": str(turbo), "stepz": 4}}, r'unknown key .nearest: "evaluate.also.turbo.steps".'),
        ({"turbo": {"model": str(turbo) + "x"}}, 'also.turbo.model: no folder .* .nearest: "turbo".'),
        ({"saturation": {"model": str(turbo)}}, "eval/saturation has a meaning of its own"),
        ({"a/b": {"model": str(turbo)}}, "letters, digits"),
    ):
        with pytest.raises(UserError, match=message):
            load_config(config_file("run", evaluate={"also": also}))
    assert load_config(config_file("run", evaluate=with_turbo(turbo)), ["evaluate.also.turbo=null"]).evaluate.also == {}
    with pytest.raises(UserError, match=r'no evaluate.also.turbi to take out .nearest: "turbo".'):
        load_config(config_file("run", evaluate=with_turbo(turbo)), ["evaluate.also.turbi=null"])


def test_what_the_configs_cannot_say_is_said_when_it_is_loaded(
    config_file, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deeper = tiny_sd3(tmp_path / "deeper", layers=3)
    monkeypatch.setattr("diffrl.methods.student_checks._check_shapes", lambda name, config: None)
    config = load_config(config_file("run", evaluate=with_turbo(deeper)))
    with pytest.raises(
        UserError,
        match=r"evaluate.also.turbo: LoRA state: transformer_blocks.1.attn.add_q_proj.lora_A.weight is missing",
    ):
        Run(config)
