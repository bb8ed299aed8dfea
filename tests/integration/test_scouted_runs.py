"""Scouts: what is chosen is what a rollout without scouts draws, on one process or two, and after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from children import on_two
from launching import joined
from test_objective_runs import go_on
from tiny import count_forwards

from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.methods.scout import EPOCHS, CandidateSelection
from diffrl.rollout import collect
from diffrl.run.train import Run

SCOUT: dict[str, Any] = {"rollout": {"steps": 4, "scout": {"images": 10, "steps": 2}}}


@pytest.fixture
def make(config_file: Callable[..., Path]) -> Callable[..., Run]:
    def build(name: str, *overrides: str, **sections: Any) -> Run:
        return Run(load_config(config_file(name, **{**SCOUT, **sections}), overrides))

    return build


def test_chosen_images_are_those_of_a_rollout_without_scouts(make: Callable[..., Run]) -> None:
    """Of all ten members drawn in full, the four that two steps show as the best and the worst, to the bit; one image a
    batch, since rounding differs with what else is in it."""
    run = make("scouted", "rollout.batch_size=1", "rollout.groups=2")
    rollout, scores, _ = run.loop.source(3)
    assert rollout.forwards == 2 * 10 * 2 + 2 * 4 * 4
    few, full = (
        collect(
            run.policy, rollout.prompts, run.spec.model_copy(update={"steps": steps}), seed=run.config.seed, epoch=3,
            group_size=10, batch_size=1,
        )
        for steps in (2, 4)
    )  # fmt: skip
    owners = [rollout.prompts[i] for i in few.prompt_index.tolist()]
    assert few.images is not None and full.images is not None
    table = run.scorer.score(few.images, owners)[:, 0].view(2, 10)
    for prompt, row in enumerate(table):
        order = row.argsort(descending=True)
        want = sorted([*order[:2].tolist(), *order[-2:].tolist()])
        here = rollout.prompt_index == prompt
        assert rollout.member[here].tolist() == want
        places = torch.tensor(want) + 10 * prompt
        assert torch.equal(rollout.latents[here], full.latents[places])
    alone = collect(
        run.policy, rollout.prompts, run.spec, seed=run.config.seed, epoch=3, group_size=4, batch_size=1,
        members=rollout.member.view(2, 4),
    )  # fmt: skip
    assert torch.equal(alone.latents, rollout.latents) and alone.images is not None
    assert torch.equal(run.scorer.score(alone.images, [p for p in rollout.prompts for _ in range(4)]), scores)


def test_scouts_of_all_steps_and_all_members_are_the_images(make: Callable[..., Run]) -> None:
    run = make("all", "rollout.scout.images=4", "rollout.scout.steps=4")
    line = run.loop.run_epoch(0)
    plain = make("plain", rollout={"steps": 4})
    other = plain.loop.run_epoch(0)
    assert line["scout/rank_correlation"] == pytest.approx(1) and line["scout/spread"] == pytest.approx(1)
    assert line["loss"] == other["loss"] and line["reward/redness"] == other["reward/redness"]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(run.policy.trainable, plain.policy.trainable, strict=True))
    assert line["rollout/forwards"] == 2 * other["rollout/forwards"] and not any("scout" in key for key in other)


def test_a_resume_is_exact(make: Callable[..., Run]) -> None:
    """Scouts are drawn by the snapshots that were saved, so the same candidates are chosen."""
    whole = make("whole")
    whole.loop.run_epoch(0)
    tensors, state = whole._state()
    line = whole.loop.run_epoch(1)
    again = make("again")
    go_on(again, tensors, state)
    other = again.loop.run_epoch(1)
    keys = ("loss", "scout/rank_correlation", "scout/break_even", "scout/spread", "reward/redness", "rollout/forwards")
    assert all(line[key] == other[key] for key in keys)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(whole.policy.trainable, again.policy.trainable, strict=True))


def _train(path: Path, folder: Path, world: int) -> None:
    run = Run(load_config(path, ["optimise.inner_epochs=2", "rollout.batch_size=4"], world=world))
    lines = [run.loop.run_epoch(epoch) for epoch in range(2)]
    members = torch.stack([run.loop.source(5)[0].member])
    everything = run.loop.processes.gather(members[0])
    if run.main:
        torch.save((run.policy.state("default"), lines, everything), folder / f"{world}.pt")


def _process(rank: int, path: Path, folder: Path) -> None:
    with joined(rank, folder):
        _train(path, folder, world=2)


@pytest.mark.long
def test_one_process_equals_two(config_file: Callable[..., Path], tmp_path: Path) -> None:
    """Three groups of four, so the second one is split, and its ten candidates are, too."""
    path = config_file(
        "run", rollout={"groups": 3, "steps": 4, "scout": {"images": 10, "steps": 2}}, optimise={"batch_size": 12}
    )
    _train(path, tmp_path, world=1)
    on_two(_process, path, tmp_path)
    (one, lines, mine), (two, others, theirs) = (torch.load(tmp_path / f"{world}.pt") for world in (1, 2))
    assert torch.equal(mine, theirs)
    for line, other in zip(lines, others, strict=True):
        assert line["scout/rank_correlation"] == other["scout/rank_correlation"]
        assert line["rollout/forwards"] == other["rollout/forwards"]
        for key in ("loss", "scout/spread", "scout/break_even"):
            assert line[key] == pytest.approx(other[key], rel=2e-3, abs=1e-6)
    difference = sum(float((one[k] - two[k]).square().sum()) for k in one)
    assert (difference / sum(float(v.square().sum()) for v in one.values())) ** 0.5 < 1e-4


def test_the_snapshot_that_draws_scouts_too(make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = make("snapshot", optimise={"batch_size": 16})  # DiffusionNFT's images come from "old"
    seen = count_forwards(run, monkeypatch)
    run.loop.run_epoch(0)
    drawn = {key: count for key, count in seen.items() if not key[1]}
    assert drawn[("old", False)] >= 4 * 10 * 2 + 4 * 4 * 4 and ("default", False) not in drawn


def test_every_objective_with_advantages_takes_them(make: Callable[..., Run]) -> None:
    plugin = Path(__file__).parents[1] / "data" / "warmth.py"
    watch = {"warm": {"plugin": f"{plugin}:Warmth"}}
    for name in ("crd", "dpo"):
        assert make(name, objective=name).loop.run_epoch(0)["scout/spread"] > 1
    line = make("gardo", gardo={"auxiliary": ["warm"], "share": 0.2}, watch=watch).loop.run_epoch(0)
    assert line["gardo/penalised"] > 0 and line["scout/spread"] > 1
    redness = f"{Path(__file__).parents[1] / 'data' / 'redness.py'}:Redness"
    rewards = {"redness": {"plugin": redness}, "warm": watch["warm"]}
    line = make("marble", marble={"mode": "fresh"}, rewards=rewards).loop.run_epoch(0)
    assert line["marble/alpha/warm"] > 0 and line["scout/rank_correlation"] is not None


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"objective": "grpo", "rollout": {"sampler": "flow_sde", "scout": {"images": 10, "steps": 2}}},
            'rollout.sampler: "flow_sde" draws noise on the way, of which the candidates of rollout.scout say nothing',
        ),
        ({"rollout": {"scout": {"images": 3, "steps": 2}}}, "rollout.scout.images: 3 candidates for groups of 4"),
        (
            {"rollout": {"scout": {"images": 8, "steps": 9}}},
            "rollout.scout.steps: 9 steps of a candidate, but an image",
        ),
        (
            {"rollout": {"scout": {"images": 8, "steps": 2}}, "rewards": {"diversity": {"model": "playground"}}},
            'rollout.scout: the reward "diversity" judges whole groups',
        ),
        (
            {
                "rollout": {"scout": {"images": 8, "steps": 2}},
                "rewards": {"clip": {"offload": "apart", "model": "playground"}},
            },
            "rewards.clip.offload: apart: it scores after the sampling",
        ),
        ({"rollout": {"scout": {"image": 8}}}, "rollout.scout.image: unknown key"),
    ],
)
def test_what_cannot_be_scouted(config_file: Callable[..., Path], sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(config_file("run", **sections))
    assert message in str(error.value)


def test_processes_divide_the_candidates(config_file: Callable[..., Path]) -> None:
    path = config_file(
        "run", rollout={"groups": 1, "group_size": 6, "scout": {"images": 7, "steps": 2}}, optimise={"batch_size": 6}
    )
    with pytest.raises(UserError, match=r"rollout\.scout\.images: 2 processes do not divide the 1 x 7 candidates"):
        load_config(path, world=2)


def test_the_warning_is_said_once_where_the_order_falls_below_what_pays() -> None:
    scouting, order = CandidateSelection(*[cast(Any, None)] * 3, 8, 2, cost=1.5), torch.arange(8.0).expand(3, 8)
    scouting._chosen, scouting._spread = order, 2.0  # so that 0.816 pays
    for _ in range(EPOCHS):
        assert scouting.warning() is None
        assert scouting.metrics(order.flatten())["scout/rank_correlation"] == pytest.approx(1)
    assert scouting.warning() is None
    texts = []
    for _ in range(2 * EPOCHS):
        assert scouting.metrics(order.flip(1).flatten())["scout/rank_correlation"] == pytest.approx(-1)
        texts.append(scouting.warning())
    (text,) = [text for text in texts if text]
    assert texts[0] == text and "rank correlation 0.60 over 5 epochs" in text and "from 0.82 on" in text
