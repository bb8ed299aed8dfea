"""Votes on the disk and the reward that waits for them: nothing lost, nothing twice, nothing that nobody said."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.image_sets.reading import read_set
from diffrl.methods import ballots
from diffrl.methods.groups import ImageGroup
from diffrl.methods.votes import agreement, linspace_indices
from diffrl.reward_tools.check import examine
from diffrl.rewards import load_reward
from diffrl.rewards.protocol import RewardError
from diffrl.rewards.scoring import Scorer


def groups(count: int = 2, members: int = 3) -> list[ImageGroup]:
    draw = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (count, members, 3, 8, 8), generator=draw, dtype=torch.uint8)
    scores = {"clip": [float(i) for i in range(members)]}
    return [ImageGroup(f"prompt {i}", images, scores) for i, images in enumerate(pictures)]


def quiet(text: str) -> None: ...


def ask(run: Path, answer: Any = None, epoch: int = 1, shown: Any = None, **arguments: Any) -> Any:
    """The reward's answers; `answer` is called, in another thread, when the groups are shown."""
    reward, shown = load_reward("votes", **{"wait": 20.0, **arguments}), shown or groups()
    (run / "config.yaml").touch()

    def vote() -> None:
        while ballots.open_epoch(run) is None:
            time.sleep(0.01)
        answer(shown)

    if answer is not None:
        threading.Thread(target=vote, daemon=True).start()
    return reward.ask(run, epoch, shown, quiet)


def test_rankings_become_scores_and_the_image_set_reads_them(tmp_path: Path) -> None:
    def answer(shown: list[ImageGroup]) -> None:
        assert ballots.add_vote(tmp_path, "a" * 8, "me", shown[0].identity, [[2], [0]])
        assert not ballots.add_vote(tmp_path, "a" * 8, "me", shown[0].identity, [[2], [0]])  # sent again
        assert ballots.add_vote(tmp_path, "b" * 8, "me", shown[1].identity, [[0, 1, 2]])

    found = ask(tmp_path, answer)
    best, middle, worst = found.scores[0][2], found.scores[0][0], found.scores[0][1]
    assert best > middle > worst and sum(found.scores[0]) == pytest.approx(0, abs=1e-6)
    assert found.scores[1] == pytest.approx([0, 0, 0]) and found.note == ""
    assert found.figures["votes"] == 2 and found.figures["answered"] == 2 and found.figures["interval"] > 0
    assert agreement(groups(), found) == {"clip": pytest.approx(2 / 3)}  # 2 over 0 and over 1, not 0 over 1
    group = read_set(str(tmp_path / "votes")).groups[0]
    assert group.prompt == "prompt 0" and group.scores["preference"] == (1, 0, 2) and len(group.pictures) == 3


def test_a_resumed_epoch_counts_the_same_votes_and_asks_nobody(tmp_path: Path) -> None:
    first = ask(tmp_path, lambda shown: [vote(tmp_path, one, [[1]]) for one in shown])
    asked = time.monotonic()
    assert ask(tmp_path).scores == first.scores and time.monotonic() - asked < 5
    # Votes that came before a kill, while nothing was closed, count for the same images and for no others.
    (tmp_path / "votes" / "epoch-0001" / "closed.json").unlink()
    assert ask(tmp_path).scores == first.scores
    other = [ImageGroup("other", one.images, one.scores) for one in groups()]
    found = ask(tmp_path, shown=other, wait=0.1)
    assert found.scores == [[None] * 3] * 2
    assert {len(group.pictures) for group in read_set(str(tmp_path / "votes")).groups} == {3}  # their images stay


def vote(run: Path, group: ImageGroup, order: list[list[int]]) -> None:
    ballots.add_vote(run, group.identity, "me", group.identity, order)


def test_nobody_votes_and_the_run_may_be_told_to_go_on(tmp_path: Path) -> None:
    found = ask(tmp_path, wait=0.2)
    assert found.scores == [[None] * 3] * 2 and "no vote came within 0.2 s" in found.note
    assert not list(tmp_path.rglob("*.png"))  # nothing refers to them

    def answer(shown: list[ImageGroup]) -> None:
        vote(tmp_path, shown[0], [[1]])
        ballots.go_on(tmp_path, 2)

    found = ask(tmp_path, answer, epoch=2)
    assert None not in found.scores[0] and found.scores[1] == [None] * 3 and found.figures["answered"] == 1
    assert len(list(tmp_path.rglob("*.png"))) == 3
    with pytest.raises(ballots.NotAsked):
        ballots.go_on(tmp_path, 2)


def test_votes_that_are_none_and_lines_that_are_torn(tmp_path: Path) -> None:
    shown = groups()
    ballots.ask(tmp_path, 1, shown, time.time() + 60)
    name = shown[0].identity
    for order in ([[3]], [[-1]], [[0], [0]], []):
        with pytest.raises(ballots.NotAsked, match="places from 0 to 2"):
            ballots.add_vote(tmp_path, "a", "me", name, order)
    with pytest.raises(ballots.NotAsked, match="not voted on any more"):
        ballots.add_vote(tmp_path, "a", "me", "0" * 12, [[0]])
    vote(tmp_path, shown[0], [[0]])
    with pytest.raises(ballots.NotAsked, match="already"):
        ballots.add_vote(tmp_path, "again", "me", name, [[1]])
    file = tmp_path / "votes" / "votes.jsonl"
    with file.open("a") as stream:
        stream.write('{"images": ["epo')  # a kill
    assert len(ballots.read_votes(tmp_path)) == 1
    assert ballots.add_vote(tmp_path, "b", "you", name, [[2]])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["voter"] for line in lines] == ["me", "you"]
    with file.open("a") as stream:  # of other programs: a copy, and one whose images are no names
        stream.writelines(json.dumps(line) + "\n" for line in (lines[0], lines[0] | {"vote": "c", "images": [1, 2, 3]}))
    assert ballots.read_votes(tmp_path) == lines
    identities = [group.identity for group in shown]
    ballots.close(tmp_path, 1, identities, lines)  # the training run itself: it ended here
    closed = tmp_path / "votes" / "epoch-0001" / "closed.json"
    closed.write_text(json.dumps(json.loads(closed.read_text()) | {"votes": [["a"], "b"]}))
    assert load_reward("votes", wait=1.0).answered(tmp_path, 1, shown).figures["votes"] == 1


def test_votes_of_many_at_once_are_all_kept(tmp_path: Path) -> None:
    shown = groups(1)
    ballots.ask(tmp_path, 1, shown, time.time() + 60)
    orders = [[[i % 3]] for i in range(24)]
    threads = [
        threading.Thread(target=ballots.add_vote, args=(tmp_path, f"v{i}", f"p{i}", shown[0].identity, orders[i]))
        for i in range(24)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({vote["vote"] for vote in ballots.read_votes(tmp_path)}) == 24


def test_it_is_no_plain_reward() -> None:
    reward = load_reward("votes")
    with pytest.raises(RewardError, match="a training run alone"):
        reward(torch.zeros(1, 3, 4, 4), ["a"], [{}])
    scorer = Scorer({"votes": reward})
    assert scorer.asking == ["votes"] and scorer.groupwise == [] and scorer.later == []
    assert [result.title for result in examine(reward)] == ["asks"]
    for arguments, said in (({"wait": 4000}, "wait: expected 0 to 3600"), ({"groups": 0}, "groups: expected"),
                            ({"votes": 1.5}, "votes: expected"), ({"prior": 0}, "prior: expected")):  # fmt: skip
        with pytest.raises(UserError, match=said):
            load_reward("votes", **arguments)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["watch.votes.wait=3"], "put it under rewards"),
        (["rewards.votes.wait=3", "rollout.scout.images=32"], "scouts"),
        (["rewards.votes.wait=3", "objective=direct", "direct.timesteps=2"], "not differentiable"),
    ],
)
def test_configs_that_would_ask_nobody_are_refused(changes: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_config("playground/nft", changes)


def test_groups_are_spread_evenly() -> None:
    assert (
        linspace_indices(3, 8) == [0, 1, 2]
        and linspace_indices(8, 4) == [0, 2, 4, 6]
        and linspace_indices(10, 3) == [0, 3, 6]
    )
