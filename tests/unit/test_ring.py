"""SePPO's references: which states of the policy are kept, and which is drawn."""

from __future__ import annotations

from typing import Any

from diffrl.methods.dpo.objective import DPO
from diffrl.methods.dpo.reference_history import ReferenceHistory


class States:
    """A policy whose LoRA is a number, the step; untrained ones are 0."""

    def __init__(self, ring: ReferenceHistory) -> None:
        self.kept = dict.fromkeys(ring.names, 0)
        self.step = 0

    def ema_update(self, name: str, decay: float) -> None:
        assert decay == 0.0
        self.kept[name] = self.step


def chosen(size: int, every: int, steps: int, seed: int = 0, an_epoch: int = 5) -> list[tuple[int, int]]:
    """(step, the state drawn) after each epoch."""
    ring = ReferenceHistory(size, every, seed)
    policy, result = States(ring), []
    for step in range(1, steps + 1):
        policy.step = step
        ring.after_step(policy, step)  # type: ignore[arg-type]
        if step % an_epoch == 0:
            ring.after_epoch(step)
            result.append((step, policy.kept[ring.chosen]))
    return result


def test_the_newest_states_are_kept_and_all_of_them_are_drawn() -> None:
    """Of K = 3 states, one every 10 steps, the untrained one being the first."""
    seen: dict[int, set[int]] = {}
    for seed in range(40):
        for step, state in chosen(3, 10, 60, seed):
            seen.setdefault(step // 10, set()).add(state)
    assert seen == {
        0: {0},
        1: {0, 10},
        2: {0, 10, 20},
        3: {10, 20, 30},
        4: {20, 30, 40},
        5: {30, 40, 50},
        6: {40, 50, 60},
    }
    assert chosen(3, 10, 60, 1) == chosen(3, 10, 60, 1) != chosen(3, 10, 60, 2)


def test_a_ring_of_one_is_online_dpo_s_reference() -> None:
    assert chosen(1, 10, 40, an_epoch=10) == [(10, 10), (20, 20), (30, 30), (40, 40)]


def test_the_reference_draws_the_images_and_is_in_the_state() -> None:
    one, other = DPO(ring=4, follow=1, flip=True, seed=3), DPO(ring=4, follow=1, flip=True, seed=3)
    assert one.snapshots == ("past0", "past1", "past2", "past3") and one.samples_from == one.anchor == "past0"

    class Still(States):
        def __init__(self) -> None: ...
        def ema_update(self, name: str, decay: float) -> None: ...

    policy: Any = Still()
    for step in range(1, 9):
        one.after_step(policy, step)
        one.after_epoch(policy, step)
        other.load_state_dict(one.state_dict())
        assert other.samples_from == other.anchor == one.anchor in one.snapshots
    assert DPO().snapshots == () and DPO().samples_from == "default" and DPO(follow=2).anchor == "old"
