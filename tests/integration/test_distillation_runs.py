"""On-policy distillation on a tiny pipeline of the true classes: who teaches whom, what is kept and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from diffrl.config import load_config
from diffrl.conformance.check import scramble
from diffrl.errors import UserError
from diffrl.memory import fit
from diffrl.objectives.rows import Rows
from diffrl.policy import LoraSpec, load_policy
from diffrl.run.train import Run, train


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    files = {"one.txt": "red a\nred b\n", "two.txt": "red c on d\nred and e\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return [str(tmp_path / name) for name in files]


@pytest.fixture
def teacher(tmp_path: Path, tiny_model: Path) -> Callable[..., str]:
    """A run's folder with a LoRA that shows, and the config that says of which model it is."""

    def make(name: str, rank: int = 4, std: float = 0.1, model: str | None = None) -> str:
        policy = load_policy(str(tiny_model), lora=LoraSpec(rank, 2.0 * rank))
        scramble(policy, std)
        folder = tmp_path / name
        policy.save_lora(folder / "lora")
        (folder / "config.yaml").write_text(yaml.safe_dump({"model": model or str(tiny_model)}))
        return str(folder)

    return make


@pytest.fixture
def build(config_file: Callable[..., Path], sources: list[str]) -> Callable[..., Path]:
    def written(name: str, teachers: dict[str, Any], rollout: dict[str, Any] | None = None, **opd: Any) -> Path:
        prompts = {"train": {sources[0]: 1, sources[1]: 1}}
        rollout = {"sampler": "euler", "steps": 3, **(rollout or {})}
        return config_file(name, objective="opd", opd={"teachers": teachers, **opd}, prompts=prompts, rollout=rollout)

    return written


def seen(run: Run) -> list[tuple[Rows, torch.Tensor]]:
    """The first epoch's rows with their phi."""
    found: list[tuple[Rows, torch.Tensor]] = []
    scalars = run.objective.scalars

    def watched(policy: Any, rows: Rows) -> torch.Tensor:
        phi = scalars(policy, rows)
        found.append((rows, phi.detach()))
        return phi

    run.objective.scalars = watched  # type: ignore[method-assign]
    run.loop.run_epoch(0)
    return found


def test_a_student_that_is_its_teacher_has_no_gradient(build: Any, teacher: Any) -> None:
    run = Run(load_config(build("same", {"all": {"lora": teacher("a")}})))
    run.policy.copy("teacher_all", "default")
    line = run.loop.run_epoch(0)
    assert line["loss"] == pytest.approx(0, abs=1e-12) and line["opd/all"] == pytest.approx(0, abs=1e-12)
    assert line["grad_norm"] < 1e-5


@pytest.mark.long
def test_each_row_has_the_target_of_its_prompts_teacher(build: Any, teacher: Any, sources: list[str]) -> None:
    """A row's error with two teachers is, to the bit, its error where its teacher has all prompts; none is mixed up."""
    a, b = teacher("a"), teacher("b", rank=2, std=0.2)
    own = {"a": {"lora": a, "prompts": [sources[0]]}, "b": {"lora": b, "prompts": [sources[1]]}}
    rows = seen(Run(load_config(build("both", own), ["optimise.micro_batch=1"])))
    alone = {
        name: seen(Run(load_config(build(name, {name: {"lora": folder}}), ["optimise.micro_batch=1"])))
        for name, folder in (("a", a), ("b", b))
    }
    lookup = {name: {(float(r.t), float(r.x_t.sum())): phi for r, phi in found} for name, found in alone.items()}
    compared = 0
    for row, phi in rows[: 8 * 3]:  # of the first optimiser step: then the students part
        key = (float(row.t), float(row.x_t.sum()))
        name = "ab"[int(row.owner)]
        compared += key in lookup[name]
        assert key not in lookup[name] or torch.equal(phi, lookup[name][key])
        other = lookup["ba"[int(row.owner)]].get(key)
        assert other is None or not torch.equal(phi, other)
    assert compared == 24 and {int(row.owner) for row, _ in rows[:24]} == {0, 1}


def test_rows_are_sorted_by_teacher_and_all_steps_are_trained(build: Any, teacher: Any, sources: list[str]) -> None:
    own = {"a": {"lora": teacher("a"), "prompts": [sources[0]]}, "b": {"prompts": [sources[1]], "guidance": 3.0}}
    rows = seen(Run(load_config(build("order", own))))
    teachers = torch.cat([row.owner for row, _ in rows[:2]]).tolist()
    assert teachers == sorted(teachers) and len(teachers) == 8 * 3
    assert len({float(t) for row, _ in rows for t in row.t}) == 3


@pytest.mark.parametrize("target", ["step", "kl"])
def test_every_target_trains(build: Any, teacher: Any, target: str) -> None:
    sampler = {"sampler": "cps"} if target == "kl" else {"sampler": "dpm2"}
    path = build(target, {"a": {"lora": teacher("a")}}, target=target, rollout=sampler, timesteps=2)
    line = Run(load_config(path)).loop.run_epoch(0)
    assert line["grad_norm"] > 0 and line["opd/a"] > 0 and line["loss"] != pytest.approx(line["opd/a"], rel=1e-3)


def test_an_anchor_is_everywhere(build: Any, teacher: Any, sources: list[str]) -> None:
    own = {"a": {"lora": teacher("a")}, "taste": {"lora": teacher("t", std=0.2), "prompts": [], "everywhere": 0.5}}
    line = Run(load_config(build("anchored", own))).loop.run_epoch(0)
    assert line["loss"] == pytest.approx(line["opd/a"] + 0.5 * line["opd/taste/everywhere"], rel=1e-4)
    mean = {name: {**one, "prompts": [], "everywhere": 0.5} for name, one in own.items()}
    line = Run(load_config(build("mean", mean))).loop.run_epoch(0)
    assert line["loss"] == pytest.approx((line["opd/a/everywhere"] + line["opd/taste/everywhere"]) / 2, rel=1e-4)


@pytest.mark.long
def test_teachers_are_read_and_not_kept_and_a_resume_is_of_the_same_ones(build: Any, teacher: Any) -> None:
    folder = teacher("a", rank=2)
    path = build("run", {"a": {"lora": folder}}, start="merge")
    config = load_config(path, ["epochs=2"])
    train(load_config(path, ["epochs=1"]))
    checkpoint = next((Path(config.run_dir) / "checkpoints").glob("step-*"))
    assert {file.stem for file in checkpoint.glob("*.safetensors")} == {"lora", "ema", "optimiser", "rng"}
    train(config, resume=Path(config.run_dir))
    whole = load_config(path, ["epochs=2", f"run_dir={config.run_dir}-whole"])
    train(whole)
    ours, theirs = (
        load_file(Path(one.run_dir) / "lora" / "pytorch_lora_weights.safetensors") for one in (config, whole)
    )
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    teacher("a", rank=2, std=0.3)  # trained on
    with pytest.raises(UserError, match=r"opd.teachers.a.lora: the file changed since .*; a resume may change"):
        train(load_config(path, ["epochs=3"]), resume=Path(config.run_dir))


def test_the_student_begins_as_the_teachers_mean(build: Any, teacher: Any) -> None:
    run = Run(load_config(build("merged", {"a": {"lora": teacher("a", rank=2)}}, start="merge")))
    mine, theirs = (run.policy.state(name) for name in ("default", "teacher_a"))
    for key in [key for key in mine if key.endswith("lora_A.weight")]:
        up = key.replace("lora_A", "lora_B")
        torch.testing.assert_close(mine[up] @ mine[key], theirs[up] @ theirs[key], rtol=1e-4, atol=1e-5)
    assert all(torch.equal(mine[key], value) for key, value in run.policy.state("ema").items())


def test_what_does_not_fit_is_one_line(build: Any, teacher: Any, sources: list[str], tmp_path: Path) -> None:
    def refused(teachers: dict[str, Any], match: str, *words: str, **opd: Any) -> None:
        with pytest.raises(UserError, match=match):
            Run(load_config(build("refused", teachers, **opd), words))

    refused({"a": {"lora": str(tmp_path / "nothing")}}, r"opd.teachers.a.lora: no LoRA \".*nothing\"")
    refused({"a": {"lora": teacher("a", model="org/other")}}, "was trained on org/other, and this run's model is")
    refused({"a": {"lora": teacher("b", rank=8)}}, r"opd.teachers.a.lora: .*: its LoRA has rank 8; set lora.rank to 8")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused({"a": {"lora": str(empty)}}, r"opd.teachers.a.lora: .*has no pytorch_lora_weights.safetensors")
    refused({}, "opd.teachers: empty; name at least one")
    refused({"a": {"prompts": [sources[0]]}}, 'two.txt" of prompts.train has no teacher')
    refused({"a": {"prompts": [sources[0] + "x"]}}, r"opd.teachers.a.prompts: .* is not in prompts.train \(nearest")
    refused({"a": {}, "b": {}}, "is taught by a, too; a source has one teacher")
    refused({"a": {}, "b": {"prompts": []}}, "opd.teachers.b.prompts: empty, and everywhere is 0")
    refused({"a": {}}, 'opd.start: "merge", but no teacher has a LoRA', start="merge")
    refused({"a": {}}, 'no step of "euler" is stochastic', target="kl")
    refused({"a": {}}, "opd.timesteps: 4 steps, but only 3", timesteps=4)
    refused({"a b": {}}, "a teacher's name has letters")
    for words in (["gardo.beta=0.1"], ["marble.mode=fresh"], ["advantages.agree=keep"], ["d2align.omega=1"]):
        refused({"a": {}}, r'objective "opd" (has|learns from none|does not use)|"opd" does not use', *words)


def test_doctor_counts_the_teachers_and_their_forwards(build: Any, teacher: Any, sources: list[str]) -> None:
    own = {"a": {"lora": "not/there", "prompts": [sources[0]]}, "b": {"prompts": [sources[1]], "guidance": 3.0}}
    config = load_config(build("count", own | {"c": {"lora": "nor/this", "prompts": [], "everywhere": 0.1}}))
    run_of = fit.build_objective(config, config.rollout, {})
    assert fit.silent_forwards(run_of, True, run_of.cost(config.rollout, False, 1)) == pytest.approx(0.5 + 0.5 * 2 + 1)
    assert "LoRA, 4 of them" in fit.estimate(config).parts  # the trained one, its average, and two teachers
