"""The other objectives and credits on a tiny pipeline of the true classes: what they run, keep and refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from children import on_two
from launching import joined
from test_equivalence import same_lora
from tiny import count_forwards

from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.records import checkpoint
from diffrl.run import hooks
from diffrl.run.resuming import restore
from diffrl.run.train import Run

GRPO = {"objective": "grpo", "rollout": {"sampler": "flow_sde", "steps": 4, "same_noise": True}}
CREDITS: dict[str, dict[str, Any]] = {
    "dense": {"dense": {}},
    "branches": {"branches": {"steps": [0, 2], "strides": [1, 2]}},
    "tree": {"tree": {"splits": [0, 2]}},
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {"dpo": {"follow": 2}},
    "rwr": {"rwr": {"tau": 0.1}},
    "acflow": {"acflow": {"beta": 0.1}},
    "sft": {"objective": "rwr", "rwr": {"weights": "best"}},
    "gdro": {},
    "awm": {},
    "dgpo": {"dgpo": {"sample_old": 2}},
    "prdp": {"rollout": GRPO["rollout"]},
    "fdfo": {"rollout": {"sampler": "cps", "steps": 4, "same_noise": True, "noise_level": 0.05}},
}
ALL: dict[str, dict[str, Any]] = {name: {"objective": name, **more} for name, more in OBJECTIVES.items()}
ALL |= {name: {**GRPO, **more} for name, more in CREDITS.items()}
ALL["dppo"] = {**GRPO, "grpo": {"delta": 1e-4}}
ALL["srpo"] = {
    "objective": "direct",
    "direct": {"align": {}, "pair": {}, "cap": 0.3},
    "rewards": {"redness": {"plugin": str(Path(__file__).parents[1] / "data" / "embedder.py") + ":Embedder"}},
}
ALL["seppo"] = {"objective": "dpo", "dpo": {"ring": 2, "follow": 1, "flip": True}}
ALL["guard"] = {**GRPO, "grpo": {"ratio": "normalised", "weighting": "even", "clip": 1e-3}}


@pytest.fixture
def make(config_file: Callable[..., Path]) -> Callable[..., Run]:
    def build(name: str, *overrides: str, **sections: Any) -> Run:
        return Run(load_config(config_file(name.replace(" ", "_"), **sections), overrides))

    return build


def go_on(run: Run, tensors: dict[str, Any], state: dict[str, Any]) -> None:
    """Give a new run what another one would have saved."""
    run.policy.load_state("default", tensors["lora"])
    for snapshot in run.snapshots:
        run.policy.load_state(snapshot, tensors[snapshot])
    run.loop.load_state_dict(state["loop"])
    restore(run.hooks, tensors, state["hooks"])
    run.objective.load_tensors(tensors.get("objective", {}))
    checkpoint.optimiser_from_tensors(run.optimiser, tensors["optimiser"], state["optimiser"])


def weights(run: Run) -> list[torch.Tensor]:
    return [p.detach().clone() for _, p in run.policy.trainable]


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in ("awm", "prdp", "branches", "guard")),
        *("dpo", "acflow", "dgpo", "fdfo", "dense", "tree", "dppo", "srpo"),
    ],
)
def test_it_trains_and_a_resume_is_exact(make: Callable[..., Run], name: str) -> None:
    whole = make(name, **ALL[name])
    lines = [whole.loop.run_epoch(0)]
    tensors, state = whole._state()
    lines.append(whole.loop.run_epoch(1))
    assert all(line["loss"] is not None and line["grad_norm"] > 0 for line in lines)
    again = make(f"{name} again", **ALL[name])
    go_on(again, tensors, state)
    line = again.loop.run_epoch(1)
    assert line["loss"] == lines[1]["loss"]
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(again), strict=True))


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in ("rwr", "gdro", "awm", "guard", "acflow", "seppo")),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("prdp", "fdfo", "dppo")),
        *(
            "dgpo",
            "tree",
            "srpo",
        ),  # pairs and groups, edges of trees, pixels; each loss by itself: test_mean_over_rows.py
    ],
)
def test_micro_batches_do_not_change_the_step(make: Callable[..., Run], name: str) -> None:
    found = []
    for pieces in (1, 4):
        # Short steps: an element of A whose gradient is all rounding may go either way, by one of them.
        optimise = {
            "micro_batch": None if pieces == 1 else 1 / pieces,
            "inner_epochs": 2,
            "batch_size": 16,
            "learning_rate": 1e-4,
        }
        run = make(f"{name} {pieces}", **{**ALL[name], "optimise": optimise})
        run.loop.run_epoch(0)
        found.append(run.policy.state("default"))
    assert same_lora(*found)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=3e-5)


def _train(paths: dict[str, Path], folder: Path, world: int) -> None:
    """An epoch of each kind: pairs that are measured first, gains of views, edges of trees."""
    for name, path in paths.items():
        run = Run(load_config(path, ["optimise.inner_epochs=2"], world=world))
        run.begin()
        metrics = run.loop.run_epoch(0)
        if run.main:
            torch.save((run.policy.state("default"), metrics), folder / f"{name}{world}.pt")


def _process(rank: int, paths: dict[str, Path], folder: Path) -> None:
    """One of two processes."""
    with joined(rank, folder):
        _train(paths, folder, world=2)


@pytest.mark.long
def test_one_process_equals_two(config_file: Callable[..., Path], tmp_path: Path) -> None:
    kinds = {name: ALL[name] for name in ("dpo", "acflow", "dgpo", "fdfo", "dense", "tree", "dppo", "srpo")}
    paths = {name: config_file(name, **sections) for name, sections in kinds.items()}
    _train(paths, tmp_path, world=1)
    on_two(_process, paths, tmp_path)
    for name in kinds:
        told = ("grpo/divergence/p50", "grpo/divergence/p99") if name == "dppo" else ()
        (one, line), (two, other) = (torch.load(tmp_path / f"{name}{world}.pt") for world in (1, 2))
        difference = sum(float((one[k] - two[k]).square().sum()) for k in one)
        assert (difference / sum(float(v.square().sum()) for v in one.values())) ** 0.5 < 1e-4, name
        for key in ("loss", "rollout/forwards", "reward/redness"):
            assert line[key] == pytest.approx(other[key], rel=2e-3, abs=1e-6), (name, key)
        for key in told:  # to the bin beside
            assert 0 < line[key] == pytest.approx(other[key], rel=0.13), (name, key)


def test_calibrated_noise_is_found_before_training_and_resumed(make: Callable[..., Run]) -> None:
    dense = {**GRPO, "rollout": {**GRPO["rollout"], "sampler": "dance"}, "dense": {"calibrate": 2}}
    run = make("calibrated", **dense)
    run.begin()
    found = run.rollouts.spec.noise_levels
    schedule = run.policy.timesteps(4).tolist()
    start = [0.7 * (t / (1 - (schedule[1] if t == 1 else t))) ** 0.5 for t in schedule[:-1]]
    assert found is not None and all(
        abs(abs(a - b) - 0.02) < 1e-6 or abs(a - b) < 1e-6 for a, b in zip(found, start, strict=True)
    )
    run.begin()
    assert run.rollouts.spec.noise_levels == found  # once
    line = run.loop.run_epoch(0)
    assert [line[f"rollout/level/{i}"] for i in range(4)] == list(found)
    again = make("calibrated again", **dense)
    restore(again.hooks, *hooks.states(run.hooks))
    assert again.rollouts.spec.noise_levels == found


def test_no_forward_whose_result_is_unused(make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """4 groups of 4 images, 3 steps (4 where stochastic), all in one optimiser step."""
    one = {"optimise": {"batch_size": 16}}
    drawn = {("default", False): 16 * 3}
    for name, trained, more in (
        ("sft", 4 * 3, {}),  # the best of each group
        ("dpo", 8 * 3, {("default", False): 16 * 3 + 8 * 3, ("pretrained", False): 8 * 3}),  # its pair, measured first
        ("gdro", 16 * 3, {("default", False): 16 * 3 + 16 * 3, ("pretrained", False): 16 * 3}),
        ("awm", 16 * 3, {("pretrained", False): 16 * 3, ("average", False): 16 * 3}),  # on policy: no old
        ("dgpo", 16 * 3, {("default", False): 16 * 3 + 16 * 3, ("pretrained", False): 2 * 16 * 3}),  # and its KL
    ):
        best = {"objective": "rwr", "rwr": {"weights": "best"}}
        run = make(name, **(best if name == "sft" else {"objective": name}), **one)
        seen = count_forwards(run, monkeypatch)
        run.loop.run_epoch(0)
        assert seen == drawn | {("default", True): trained} | more, name
    for name, forwards, trained in (
        ("dense", 16 * (4 + 2 + 1), 16 * 4),  # views behind steps 1 and 2 cost 2 and 1; the others are there
        ("branches", 4 * 3 + 16 * (3 + 2 + 1 + 1), 16 * 2),
        ("tree", 4 * (1 + 2 + 2 + 4), 4 * (2 + 2 + 4 + 4)),
        ("srpo", 16 * 3, 16 * 2),  # both branches of one level
    ):
        run = make(name, **{**ALL[name], **one})
        seen = count_forwards(run, monkeypatch)
        line = run.loop.run_epoch(0)
        assert seen == {("default", False): forwards, ("default", True): trained}, name
        assert line["rollout/forwards"] == forwards


@pytest.mark.parametrize("name", ["fdfo", "dppo", "guard"])
def test_old_means_are_computed_only_once_theta_has_moved(
    make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    run = make(name, **ALL[name], optimise={"batch_size": 8})
    seen = count_forwards(run, monkeypatch)
    run.loop.run_epoch(0)
    assert seen == {("default", False): 16 * 4, ("default", True): 16 * 4, ("old", False): 8 * 4}
    assert run.objective.cost(run.config.rollout, False, 2).forwards == 0.5 and not caplog.records
    make(f"{name} one", **ALL[name], optimise={"batch_size": 16})  # which is plain GRPO without a clip
    assert ("grpo.delta" in caplog.text) == (name == "dppo")


@pytest.mark.parametrize(
    "name",
    [
        *("dgpo", "tree", "dppo"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("dpo", "awm", "fdfo", "dense", "guard")),
    ],
)
def test_gardo_and_marble_go_with_it(make: Callable[..., Run], name: str) -> None:
    plugin = Path(__file__).parents[1] / "data" / "warmth.py"
    gardo: dict[str, Any] = {"auxiliary": ["warm"], "share": 0.5}
    gardo["diversity"] = "off" if name == "dpo" else "group_mean"
    watch = {"warm": {"plugin": f"{plugin}:Warmth"}}
    line = make(name, **{**ALL[name], "gardo": gardo, "watch": watch}).loop.run_epoch(0)
    assert line["gardo/kl_gated"] >= 0 and line["gardo/penalised"] > 0
    redness = Path(__file__).parents[1] / "data" / "redness.py"
    rewards = {"redness": {"plugin": f"{redness}:Redness"}, "warm": {"plugin": f"{plugin}:Warmth"}}
    line = make(f"{name} marble", **{**ALL[name], "marble": {"mode": "fresh"}, "rewards": rewards}).loop.run_epoch(0)
    assert line["marble/alpha/warm"] > 0 and line["grad_norm"] > 0


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"dense": {}}, 'dense: gives every stochastic step its own credit, but objective "nft"'),
        ({**GRPO, "dense": {}, "tree": {}}, "dense: tree is on, too"),
        ({**GRPO, "dense": {}, "grpo": {"timesteps": 2}}, "grpo.timesteps: 2, but dense says which steps are trained"),
        ({**GRPO, "dense": {"calibrate": 3}}, 'dense.calibrate: gives s = psi(t) itself, which is the sampler "dance"'),
        ({**GRPO, "branches": {"steps": [2, 1]}}, "branches.steps: [2, 1]: expected rising numbers within 0 to 3"),
        ({**GRPO, "branches": {"seeds": 3}}, "branches.seeds: 3 paths do not divide the 4 images of a group"),
        ({**GRPO, "branches": {"seeds": 2}}, "rollout.same_noise: true, but branches starts from 2 noises a group"),
        (
            {**GRPO, "tree": {"splits": [0, 1, 2]}},
            "rollout.group_size: 4, but a tree with 3 splits into 2 has 8 leaves",
        ),
        ({**GRPO, "tree": {"splits": [0, 4]}}, "tree.splits: [0, 4]: expected rising numbers within 0 to 3"),
        ({**GRPO, "grpo": {"delta": 1e-7, "clip": 1e-3}}, "grpo.clip: has no effect with grpo.delta"),
        ({**GRPO, "grpo": {"ratio": "normalised"}}, "grpo.clip: 0.0001 is for the plain ratio and hardly ever"),
        ({"objective": "dpo", "advantages": {"agree": "floor"}}, 'objective "dpo" ranks or weighs a group by itself'),
        ({"objective": "gdro", "optimise": {"batch_size": 2}}, '"gdro" keeps whole'),
        ({"objective": "prdp"}, 'rollout.sampler: "dpm2" is deterministic, but objective "prdp" needs log-prob'),
    ],
)
def test_what_cannot_work_names_both_sides(config_file: Any, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(config_file("refused", **sections))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["awm", "prdp"])
def test_what_is_computed_beside_a_row_is_what_estimates_count(
    make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Two steps an epoch: the first one's rows are on policy. A penalty towards the pretrained model is not counted."""
    run = make(name, **ALL.get(name, {"objective": name}), optimise={"batch_size": 8})
    rows = 16 * (4 if name == "prdp" else 3)
    seen = count_forwards(run, monkeypatch)
    run.loop.run_epoch(0)
    trained, silent = seen.pop(("default", True)), sum(seen.values()) - rows
    assert trained == rows and seen["pretrained", False] == rows
    counted = run.objective.cost(run.config.rollout, False, 2).forwards + (name == "awm")
    assert counted == silent / rows == 2.5 - (name == "prdp")
