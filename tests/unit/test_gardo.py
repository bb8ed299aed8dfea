"""GARDO around an objective: what it leaves alone, what it runs, when it resets, and what it refuses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import some
from tiny import scramble

from diffrl.config import dump, load_config
from diffrl.errors import UserError
from diffrl.methods.gardo.gallery import Gallery, gallery
from diffrl.methods.gardo.penalty import Gardo
from diffrl.methods.nft.objective import NFT
from diffrl.objectives.advantages import ScoredBatch
from diffrl.objectives.minibatches import sample_pairs
from diffrl.objectives.objective import OptimiserStep
from diffrl.prompts import Prompt
from diffrl.records.tracking import Tracker
from diffrl.report import write_report
from diffrl.run.hooks import RunHook
from diffrl.run.train import Run

BLUE = """
class Blueness:
    name = "blue"
    def __call__(self, images, prompts, metadata):
        return images[:, 2].mean(dim=(1, 2))
"""
OFF = {"advantage_std": None, "beta": None, "diversity": "off", "gate": "all", "reset": {"kl": None, "steps": None}}
SAMPLERS = {"nft": "dpm2", "grpo": "flow_sde", "crd": "dpm2"}


@pytest.fixture
def make(config_file: Callable[..., Path], tmp_path: Path) -> Callable[..., Run]:
    """A run of the tiny model with GARDO (None: without); the auxiliary reward `blue` is watched."""
    plugin = tmp_path / "blue.py"
    plugin.write_text(BLUE)

    def build(gardo: dict[str, Any] | None, *overrides: str, objective: str = "nft", **sections: Any) -> Run:
        sections = {"watch": {"blue": {"plugin": f"{plugin}:Blueness"}}, "objective": objective, **sections}
        sections["rollout"] = {"sampler": SAMPLERS[objective], **sections.get("rollout", {})}
        if gardo is not None:
            sections["gardo"] = {"auxiliary": ["blue"], **gardo}
        return Run(load_config(config_file("gardo", **sections), overrides))

    return build


def gardo_of(run: Run) -> Gardo:
    gardo = run.objective.penalty
    assert isinstance(gardo, Gardo)
    return gardo


def first_step(run: Run) -> tuple[Gardo, OptimiserStep]:
    """A rollout of a policy that has left its reference, judged, and one optimiser step before its first backward."""
    gardo = gardo_of(run)
    scramble(run.policy)
    run.objective.after_step(run.policy, 1)
    rollout, scores, features = run.loop.source(0)
    scored = ScoredBatch(scores[:, :1], torch.ones(1), torch.arange(16) // 4, features, scores[:, 1:])
    parts = sample_pairs(torch.arange(16), run.objective.rows_per_sample(rollout)).split(8)
    step = OptimiserStep(rollout, run.objective.shaped(scored), parts, (0, 0, 0), lambda values: values)
    run.objective.before_step(run.policy, step)
    gardo.before_step(run.policy, step)
    return gardo, step


@pytest.mark.parametrize("objective", some(["nft", "grpo", "crd"], "nft"))
def test_with_everything_off_the_steps_are_the_bases_to_the_bit(make, objective: str) -> None:
    """With the base's own beta, and with beta as GARDO's; the auxiliary reward is scored and changes nothing."""
    beta = {"nft": 0.01, "grpo": 0.04, "crd": 0.1}[objective]
    loras = []
    for gardo in (None, OFF, {**OFF, "beta": beta}):
        base = f"{objective}.beta=0" if gardo is not None and gardo["beta"] else f"{objective}.beta={beta}"
        run = make(gardo, base, objective=objective, optimise={"inner_epochs": 2 if objective == "grpo" else 1})
        for epoch in range(2):
            metrics = run.loop.run_epoch(epoch)
        assert metrics["kl"] > 0 and ("watch/blue" in metrics) == (gardo is not None)
        loras.append(run.policy.state("default"))
    for other in loras[1:]:
        assert all(torch.equal(value, other[key]) for key, value in loras[0].items())


@pytest.mark.parametrize(
    "option",
    some(
        ["gate=batch", "diversity=raw", "advantage_std=none", "reset.steps=1", "beta=0.5"],
        "gate=batch",
        "reset.steps=1",
    ),
)
def test_each_part_changes_the_steps(make, option: str) -> None:
    """The comparison above could pass on options that do nothing: they do something."""
    loras = []
    for overrides in ([], [f"gardo.{option}", "gardo.share=0.2"]):
        run = make(OFF, "nft.beta=0.01", *overrides) if option != "beta=0.5" else make(OFF, *overrides)
        for epoch in range(2):
            run.loop.run_epoch(epoch)
        loras.append(run.policy.state("default"))
    assert any(not torch.equal(value, loras[1][key]) for key, value in loras[0].items())


@pytest.mark.parametrize("objective", some(["nft", "grpo", "crd"], "nft"))
@pytest.mark.parametrize("gate", ["batch", "group"])
def test_penalty_is_the_bases_divergence_on_gated_rows_and_zero_elsewhere(make, objective: str, gate: str) -> None:
    run = make({"gate": gate, "share": 0.2, "beta": 0.5}, objective=objective)
    gardo, step = first_step(run)
    assert gardo.judged is not None and 0 < int(gardo.judged.gate.sum()) < 16
    for part in step.parts:
        rows = run.objective.rows(step.rollout, step.advantages, part, step.key)
        run.objective.scalars(run.policy, rows)
        penalty = gardo(run.policy, rows)
        kl = gardo.gated.penalty.divergence(run.policy, rows, gardo.gated.penalty.anchor(run.policy, rows))
        gated = gardo.judged.gate[part[:, 0]]
        assert (penalty is None) == (not gated.any())
        if penalty is not None:
            assert torch.allclose(penalty, torch.where(gated, 0.5 * kl, 0.0), rtol=1e-4, atol=1e-9)
            assert penalty[gated].min() > 0
            ours, theirs = (
                torch.autograd.grad(total, [p for _, p in run.policy.trainable], retain_graph=True)
                for total in (penalty.sum(), (0.5 * kl)[gated].sum())
            )
            assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-7) for a, b in zip(ours, theirs, strict=True))


def test_normalised_over_gated_rows_the_penalty_is_their_mean(make) -> None:
    totals, gated = [], 0.0
    for normalise in ("rows", "gated"):
        run = make({"normalise": normalise, "share": 0.2}, "nft.timesteps=1")
        gardo, step = first_step(run)
        total = 0.0
        for part in step.parts:
            rows = run.objective.rows(step.rollout, step.advantages, part, step.key)
            run.objective.scalars(run.policy, rows)
            penalty = gardo(run.policy, rows)
            total += float(penalty.detach().sum()) if penalty is not None else 0.0
        totals.append(total)
        assert gardo.judged is not None
        gated = float(gardo.judged.gate.double().mean())
    assert totals[1] == pytest.approx(totals[0] / gated, rel=1e-5)


def test_normalised_over_gated_rows_they_are_those_of_all_processes(make) -> None:
    """Another process with as many rows, none of them penalised, doubles each row's weight; one with none, nothing."""
    run = make({"normalise": "gated", "share": 0.2}, "nft.timesteps=1")
    gardo, step = first_step(run)
    assert gardo.judged is not None
    penalised = int(gardo.judged.gate.sum())
    for others, weight in (((0.0, 0.0), 1.0), ((16.0, 0.0), 2.0), ((16.0, float(penalised)), 1.0)):
        gardo.before_step(run.policy, replace(step, reduce=lambda counts, more=others: counts + torch.tensor(more)))
        assert float(gardo.gated._weight) == pytest.approx(gardo.beta * 16 / penalised * weight)


def count_forwards(run: Run, monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Rows that go through the network, by adapter; and the number of calls of the reference."""
    seen: Counter = Counter()
    forward = run.policy.backbone.forward

    def counting(network, x_t, t, cond, guidance):
        active = run.policy.lora._active
        seen[active[0] if active else "pretrained"] += len(x_t)
        seen["reference calls"] += active == ["reference"]
        return forward(network, x_t, t, cond, guidance)

    monkeypatch.setattr(run.policy.backbone, "forward", counting)
    return seen


def test_reference_runs_for_gated_rows_only_and_in_one_batch(make, monkeypatch) -> None:
    run = make({"share": 0.2}, "optimise.micro_batch=0.25", "optimise.batch_size=16")
    seen = count_forwards(run, monkeypatch)
    metrics = run.loop.run_epoch(0)
    gardo = gardo_of(run)
    assert gardo.judged is not None
    gated = int(gardo.judged.gate.sum())
    assert 0 < gated * 3 <= 12  # a micro-batch's rows
    assert seen == {"old": 16 * 3, "default": 16 * 3, "reference": gated * 3, "reference calls": 1}
    assert metrics["gardo/forwards_saved"] == pytest.approx(1 - gated / 16)
    assert metrics["gardo/penalised"] == pytest.approx(gated / 16)
    assert metrics["gardo/gate"] == pytest.approx(0.2)
    seen.clear()
    run.loop.run_epoch(1)
    assert gardo.judged.gate.sum() * 3 == seen["reference"]


def test_no_reference_is_kept_or_run_without_a_weight(make, monkeypatch) -> None:
    run = make({"beta": 0.0})
    seen = count_forwards(run, monkeypatch)
    metrics = run.loop.run_epoch(0)
    assert "reference" not in run.policy.adapters and set(seen) <= {"old", "default", "reference calls"}
    assert "gardo/kl_gated" not in metrics and metrics["gardo/uncertainty"] > 0


def test_auxiliary_rewards_are_scored_on_training_images_and_not_optimised(make) -> None:
    run = make({})
    assert run.scorer.names == ["redness", "blue"]
    metrics = run.loop.run_epoch(0)
    assert {"reward/redness", "watch/blue", "gardo/nearest", "gardo/resets"} <= metrics.keys()
    assert {"eval/redness", "eval/blue", "eval/diversity"} <= set(run.evaluation.scores())


def test_an_auxiliary_reward_of_which_less_is_better_counts_the_other_way() -> None:
    proxy, auxiliary = torch.tensor([[3.0], [1.0], [2.0]]), torch.tensor([[3.0], [1.0], [2.0]])
    scored = ScoredBatch(proxy, torch.ones(1), torch.zeros(3, dtype=torch.int64), torch.eye(3), auxiliary)
    judged = []
    for lower in ([], ["a"]):
        gardo = Gardo(NFT(), auxiliary=["a"], lower=lower)
        gardo.see_epoch(scored)
        assert gardo.judged is not None
        judged.append(gardo.judged.u.tolist())
    assert judged == [[0.0, 0.0, 0.0], [1.0, -1.0, 0.0]]


def reference_is_theta(run: Run) -> bool:
    ours, theirs = run.policy.state("reference"), run.policy.state("default")
    return all(torch.equal(value, theirs[key]) for key, value in ours.items())


def test_reference_is_reset_after_so_many_steps(make) -> None:
    run = make({"reset": {"kl": None, "steps": 3}})
    history = []
    after_step = gardo_of(run).after_step

    def watching(policy, step):
        before = policy.state("reference")
        after_step(policy, step)
        kept = all(torch.equal(value, before[key]) for key, value in policy.state("reference").items())
        history.append("reset" if reference_is_theta(run) else "kept" if kept else "torn")

    gardo_of(run).after_step = watching  # type: ignore[method-assign]
    for epoch in range(4):
        metrics = run.loop.run_epoch(epoch)
    assert history == ["kept", "kept", "reset"] * 2 + ["kept", "kept"]
    assert metrics["gardo/resets"] == 2


def test_reference_is_reset_when_the_gated_rows_have_left_it(make) -> None:
    resets = []
    for limit in (1e-12, 1e6):
        run = make({"share": 0.2, "reset": {"kl": limit, "steps": None}})
        for epoch in range(3):
            metrics = run.loop.run_epoch(epoch)
        resets.append((metrics["gardo/resets"], metrics["gardo/kl_gated"] > 0))
    assert resets[0][0] >= 2 and resets[1] == (0, True)


def test_state_survives_json(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffrl.methods.gardo.gate.WINDOW", 3)
    run = make({})
    for epoch in range(4):
        run.loop.run_epoch(epoch)
    state = json.loads(json.dumps(gardo_of(run).state_dict()))
    assert len(state["window"]) == 3 and {"old_is_theta"} == run.objective.state_dict().keys()
    other = gardo_of(make({}))
    other.load_state_dict(state)
    assert other.state_dict() == state == gardo_of(run).state_dict()


def test_report_shows_what_the_gate_caught(make) -> None:
    run = make({"share": 0.2}, epochs=2)
    run.folder.path.mkdir(parents=True)
    dump(run.config, run.folder.path / "config.yaml")
    with Tracker(run.folder.path) as tracker:
        for epoch in range(2):
            tracker.log(run.loop.run_epoch(epoch) | {"epoch": epoch + 1})
    rows = json.loads((run.folder.path / "gardo" / "epoch-0002.json").read_text())
    assert not (run.folder.path / "gardo" / "epoch-0001.json").exists()  # evaluate.every is 2
    u = [row["uncertainty"] for row in rows]
    assert len(rows) == 8 and u == sorted(u, reverse=True) and rows[0]["penalised"]
    assert rows[0]["scores"].keys() == {"proxy", "blue"} and rows[0]["prompt"].startswith("red")
    page = write_report(run.folder.path).read_text()
    assert "what the gate caught" in page and rows[0]["prompt"] in page and "nft + gardo" in page
    assert page.count("data:image/png") >= 8 and "held back" in page


def test_an_image_of_the_gallery_is_the_one_that_was_scored(make) -> None:
    run = make({"share": 0.2})
    shown = {}

    class Look(RunHook):
        def after_rollout(self, epoch, rollout, scored):
            caught = gallery(gardo_of(run), run.policy, rollout, lambda values: values, 4)
            return shown.update(zip(("images", "rows"), caught, strict=True)) or {}

    run.hooks.append(Look())
    run.loop.run_epoch(0)
    scores = run.scorer.score(shown["images"], [Prompt(row["prompt"], {}) for row in shown["rows"]])
    for row, score in zip(shown["rows"], scores.tolist(), strict=True):
        assert list(row["scores"].values()) == pytest.approx(score, abs=1e-5)


REFUSED = [
    ({"auxiliary": []}, {}, "gardo.auxiliary: empty"),
    ({"auxiliary": ["blu"]}, {}, 'gardo.auxiliary: "blu" is not under watch (nearest: "blue")'),
    ({"auxiliary": ["redness"]}, {}, 'gardo.auxiliary: "redness" is in rewards'),
    ({"auxiliary": ["blue", "blue"]}, {}, "named twice"),
    ({"auxiliary": ["red_again"]}, {}, 'is the optimised reward "redness" by another name'),
    ({"share": 1.5}, {}, "gardo.share: expected at most 1"),
    ({"gate": "bach"}, {}, 'gardo.gate: expected one of batch, group, all, got "bach" (nearest: "batch")'),
    ({}, {"nft": {"beta": 0.02}}, "nft.beta: 0.02, but gardo.beta 0.04 takes its place"),
    ({}, {"rollout": {"group_size": 1}}, "rollout.group_size: expected at least 2"),
]


@pytest.mark.parametrize(("gardo", "others", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_cannot_work_is_refused_in_one_line(config_file, tmp_path, gardo, others, message: str) -> None:
    (tmp_path / "blue.py").write_text(BLUE)
    red = str(Path(__file__).parents[1] / "data" / "redness.py") + ":Redness"
    watch = {"blue": {"plugin": f"{tmp_path / 'blue.py'}:Blueness"}, "red_again": {"plugin": red}}
    with pytest.raises(UserError) as caught:
        load_config(config_file("bad", watch=watch, gardo={"auxiliary": ["blue"], **gardo}, **others))
    assert message in str(caught.value) and "\n" not in str(caught.value)


SHIPPED = {
    "playground/gardo": [],
    "sd35/gardo_ocr": [],
    "sd35/gardo_geneval": ["rewards.geneval.plugin={red}"],
    "flux/gardo_hpsv2": [],
}


@pytest.mark.parametrize("name", some(SHIPPED, "playground/gardo", "sd35/gardo_geneval"))
def test_shipped_recipes_load_and_survive_a_resume(name: str, tmp_path: Path) -> None:
    red = str(Path(__file__).parents[1] / "data" / "redness.py") + ":Redness"
    overrides = [text.format(red=red) for text in SHIPPED[name]]
    config = load_config(Path(__file__).parents[2] / "configs" / f"{name}.yaml", overrides, world=1)
    assert config.gardo is not None and set(config.gardo.auxiliary) <= set(config.watch)
    dump(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml", world=1) == config


def test_a_gate_that_lets_every_suspect_go_is_said_once(make, monkeypatch) -> None:
    run = make({"share": 0.2})
    (hook,) = (hook for hook in run.loop.hooks if isinstance(hook, Gallery))
    assert not hook.after_epoch(run.loop.run_epoch(0))
    monkeypatch.setattr("diffrl.methods.gardo.penalty.gate_of", lambda u, *_: torch.zeros_like(u, dtype=torch.bool))
    metrics = run.loop.run_epoch(1)
    assert metrics["gardo/penalised"] == 0 < metrics["gardo/suspected"]
    (line,) = hook.after_epoch(metrics)
    assert "no row of this epoch is penalised" in line and f"{round(16 * metrics['gardo/suspected'])} images" in line
    assert not hook.after_epoch(metrics)


def test_a_rule_that_most_images_pass_is_penalised_on_the_gates_share(make) -> None:
    """The proxy likes all images but one: its suspects tie, and the lot among them is of an image, not of its place."""
    run = make({"share": 0.2})
    gardo = gardo_of(run)
    proxy, features = torch.ones(16, 1), torch.eye(16)
    auxiliary = (torch.arange(16) % 2).float()[:, None]
    proxy[1] = 0.0
    names = [(0, 0, "a prompt", i) for i in range(16)]
    order, chosen = torch.arange(16).flip(0), []
    for places in (torch.arange(16), order):
        tables = (values[places] for values in (features, auxiliary))
        scored = ScoredBatch(proxy[places], torch.ones(1), places // 4, *tables, names=[names[i] for i in places])
        gardo.see_epoch(scored)
        assert gardo.judged is not None
        chosen.append(gardo.judged.gate[places.argsort()])
    assert torch.equal(*chosen) and 1 <= int(chosen[0].sum()) <= 3 and not chosen[0][1::2].any()
