"""A run's rewards: built once, offloaded, kept on disk, and what a config may ask of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.reward_kinds.cached import Cached
from diffrl.reward_kinds.offloading import Offloaded, modules_of
from diffrl.rewards import RewardError
from diffrl.rewards.building import Entry, build_rewards
from diffrl.rewards.identity import identity_of, stamp
from diffrl.run.build import build_scorers

CPU = torch.device("cpu")
IMAGES = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
PLUGIN = """
import torch

class Linear:
    name = "linear"

    def __init__(self, gain: float = 1.0, device: str | None = None, weights: str = ""):
        self.device = device
        self.model = torch.nn.Linear(3, 1)
        torch.nn.init.constant_(self.model.weight, gain)
        self.calls = []

    def __call__(self, images, prompts, metadata):
        self.calls.append(len(images))
        self.seen = {str(p.device) for p in self.model.parameters()}
        return images.mean((1, 2, 3)) * self.model.weight.sum().to(images)
"""


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(PLUGIN)
    return f"{tmp_path / 'mine.py'}:Linear"


def test_equal_rewards_are_built_once(plugin: str) -> None:
    entries = {
        "a": Entry(plugin, {"gain": 2.0}),
        "b": Entry(plugin, {"gain": 2.0}),
        "c": Entry(plugin, {"gain": 3.0}),
        "d": Entry(plugin, {"gain": 2.0, "device": "meta"}),
    }
    rewards: dict[str, Any] = build_rewards(entries, CPU)
    assert rewards["a"] is rewards["b"] and len(set(map(id, rewards.values()))) == 3
    assert (rewards["a"].device, rewards["d"].device) == ("cpu", "meta")


def test_training_and_evaluation_share_rewards(plugin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(
        f"rewards: {{a: {{plugin: '{plugin}', gain: 2.0}}}}\nwatch: {{b: {{plugin: '{plugin}', gain: 2.0}}}}\n"
    )
    scorer, judges = build_scorers(load_config("run.yaml"), CPU)
    assert scorer.names == ["a"] and judges.names == ["a", "b"]
    assert scorer.rewards["a"] is judges.rewards["a"] is judges.rewards["b"]


class Owner:
    """A reward whose weights lie two objects deep, seen by two names."""

    name, device = "owner", "meta"

    def __init__(self, module: nn.Module) -> None:
        self.parts = {"inner": [module]}
        self.again = module
        self.here: set[str] = set()

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        self.here = {parameter.device.type for parameter in self.again.parameters()}
        return images.mean((1, 2, 3))


def test_modules_are_found_once_and_outermost() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert modules_of(Owner(module)) == [module]
    assert modules_of(object()) == []


def test_offloaded_weights_come_with_a_phases_first_call_and_leave_at_its_end() -> None:
    """On the meta device, which keeps no values: the host's own tensors must be what is there afterwards."""
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    weight, reward = module[0].weight, Owner(module)
    offloaded, beside = Offloaded(reward), Offloaded(Owner(module))  # as rewards on one CLIP share it
    assert offloaded.bytes == sum(v.nbytes for v in before.values())
    torch.testing.assert_close(offloaded(IMAGES, [""] * 6, [{}] * 6), IMAGES.mean((1, 2, 3)))
    there = module[0].weight
    assert reward.here == {"meta"} and offloaded.seconds > 0
    beside(IMAGES, [""] * 6, [{}] * 6)
    assert module[0].weight is there, "copied once"
    monkey = reward.__class__.__call__
    try:
        Owner.__call__ = lambda *a: 1 / 0  # type: ignore[assignment, method-assign]
        with pytest.raises(ZeroDivisionError):
            offloaded(IMAGES, [""] * 6, [{}] * 6)
    finally:
        Owner.__call__ = monkey  # type: ignore[method-assign]
    offloaded.leave()
    assert module[0].weight is weight
    beside.leave()
    beside(IMAGES, [""] * 6, [{}] * 6)  # what one sends away another one that shares it fetches again
    assert {p.device.type for p in module.parameters()} == {"meta"}
    beside.leave()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    with pytest.raises(UserError, match='"owner" has no torch modules'):
        Offloaded(Owner("no module"))  # type: ignore[arg-type]


def test_weights_that_are_more_than_numbers_move_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    class Packed(nn.Parameter):
        pass

    module, moves = nn.Linear(2, 2), list[str]()
    module.weight = Packed(module.weight.detach())
    reward = Offloaded(Owner(module))
    monkeypatch.setattr(module, "to", lambda device: moves.append(str(device)))
    reward(IMAGES, [""] * 6, [{}] * 6)
    reward.leave()
    assert moves == ["meta", "cpu"] and type(module.weight) is Packed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_offloading_frees_the_accelerator(plugin: str) -> None:
    reward: Any = build_rewards({"a": Entry(plugin, {"gain": 2.0}, offload=True)}, torch.device("cuda"))["a"]
    scores = reward(IMAGES.cuda(), [""] * 6, [{}] * 6).cpu()
    torch.testing.assert_close(scores, IMAGES.mean((1, 2, 3)) * 6)
    assert reward.reward.seen == {"cuda:0"}
    reward.leave()
    assert {p.device.type for p in reward.reward.model.parameters()} == {"cpu"}


def test_on_the_cpu_nothing_is_offloaded_and_shared_weights_only_together(plugin: str) -> None:
    asked = Entry(plugin, {}, offload=True)
    assert not isinstance(build_rewards({"a": asked}, CPU)["a"], Offloaded)
    elsewhere = {"device": "meta"}
    entries = {"a": Entry(plugin, elsewhere, offload=True), "b": Entry(plugin, elsewhere)}
    with pytest.raises(UserError, match='a: offload: its weights are shared with "b"'):
        build_rewards(entries, CPU)


def scored(reward: Any, images: Tensor, prompt: str = "a", metadata: dict | None = None) -> Tensor:
    return reward(images, [prompt] * len(images), [metadata or {}] * len(images))


def test_a_cached_score_is_computed_once(plugin: str, tmp_path: Path) -> None:
    def build(**arguments: Any) -> Any:
        return build_rewards({"a": Entry(plugin, arguments, cache=str(tmp_path / "kept"))}, CPU)["a"]

    first = build(gain=2.0)
    twice = torch.cat([IMAGES[:4], IMAGES[:2]])
    torch.testing.assert_close(scored(first, twice), twice.mean((1, 2, 3)) * 6)
    assert first.reward.calls == [4] and (first.hits, first.misses) == (2, 4)
    again = build(gain=2.0)  # as another process would
    torch.testing.assert_close(scored(again, IMAGES), IMAGES.mean((1, 2, 3)) * 6)
    assert again.reward.calls == [2]
    torch.testing.assert_close(scored(again, IMAGES), scored(first, IMAGES), rtol=0, atol=0)
    assert again.reward.calls == [2] and first.reward.calls == [4]
    # Whatever may change a score is another key.
    for other in (
        lambda: scored(again, IMAGES[:1], "b"),
        lambda: scored(again, IMAGES[:1], "a", {"n": 1}),
        lambda: scored(again, IMAGES[:1] + 1e-7),
        lambda: scored(again, IMAGES[:1].mT.contiguous()),
    ):
        before = len(again.reward.calls)
        other()
        assert len(again.reward.calls) == before + 1
    assert scored(build(gain=3.0), IMAGES[:1]).item() == pytest.approx(9 * IMAGES[0].mean().item())


def test_the_key_follows_code_arguments_and_files(plugin: str, tmp_path: Path) -> None:
    reward = build_rewards({"a": Entry(plugin)}, CPU)["a"]
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"1")
    plain = identity_of(plugin, {"weights": str(weights)}, reward)
    assert plain == identity_of(plugin, {"weights": str(weights), "device": "cuda:3", "batch_size": 4}, reward)
    assert plain != identity_of(plugin, {"weights": str(weights), "gain": 2.0}, reward)
    assert stamp("") == [] != stamp(str(tmp_path))  # no path, and not the folder where the process runs
    weights.write_bytes(b"22")
    assert plain != (changed := identity_of(plugin, {"weights": str(weights)}, reward))
    assert changed != identity_of(plugin, {"weights": str(tmp_path)}, reward)
    os.utime(weights, (0, 0))  # a copy on another machine
    assert changed == identity_of(plugin, {"weights": str(weights)}, reward)
    (tmp_path / "mine.py").write_text(PLUGIN + "\n# another version\n")
    assert changed != identity_of(plugin, {"weights": str(weights)}, reward)


def test_failures_are_not_kept(tmp_path: Path) -> None:
    class Bad:
        name = "bad"
        answer: Any = torch.full((6,), torch.inf)

        def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Any:
            return self.answer

    reward = Bad()
    cached = Cached(reward, tmp_path, "")
    for answer, said in ((reward.answer, "returned inf"), (torch.ones(5), r"shape \(5,\)"), (None, "NoneType")):
        reward.answer = answer
        with pytest.raises(RewardError, match=said):
            scored(cached, IMAGES)
    reward.answer = torch.ones(6)
    assert scored(cached, IMAGES).eq(1).all()


def test_a_cache_that_finds_no_room_is_no_failure_of_the_reward(tmp_path: Path, caplog) -> None:
    class Bright:
        name = "bright"

        def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
            return images.mean((1, 2, 3))

    cached = Cached(Bright(), tmp_path, "")
    cached._store.execute("PRAGMA max_page_count = 2")  # "database or disk is full" behind the first rows
    for seed in range(3):
        images = torch.rand(200, 3, 2, 2, generator=torch.Generator().manual_seed(seed))
        scores = cached(images, ["p"] * 200, [{}] * 200)
        assert torch.equal(scores, images.mean((1, 2, 3)))
    assert [record.getMessage() for record in caplog.records] == [
        f"cache: {tmp_path / 'scores.sqlite'}: scores are not kept (database or disk is full)"
    ]


def test_what_cannot_be_cached_is_said(plugin: str, tmp_path: Path) -> None:
    class Group:
        name, groupwise = "group", True

        def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
            return images.mean((1, 2, 3))

    with pytest.raises(UserError, match='"group" compares the images of a group'):
        Cached(Group(), tmp_path, "")
    (tmp_path / "scores.sqlite").write_text("no database, but long enough to be looked at as one" * 20)
    with pytest.raises(UserError, match=r"a: cache: .*scores.sqlite cannot be used: file is not a database"):
        build_rewards({"a": Entry(plugin, cache=str(tmp_path))}, CPU)


def test_a_run_composes_and_reports_the_plain_scores(config_file: Callable[..., Path], tmp_path: Path) -> None:
    import json

    from diffrl.run.train import train

    red = str(Path(__file__).parents[1] / "data" / "redness.py") + ":Redness"
    shape = {"bound": {"at": 1000.0}, "modulate": {"by": "power", "base": 0.0}}  # 0: no signal at all
    config = load_config(
        config_file(
            epochs=1,
            objective="grpo",
            grpo={"beta": 0.0},
            rollout={"sampler": "flow_sde"},
            rewards={"redness": {"plugin": red, "shape": shape, "cache": str(tmp_path / "kept")}},
            watch={
                "power": {"plugin": red, "power": 0.5, "shape": {"bound": {"at": 0.0}}},
                "unread": {"plugin": red, "power": 0.25},
            },
            tracking={"samples": 0},
        )
    )
    train(config)
    first, last = (json.loads(line) for line in (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines())
    assert last["reward/redness"] > 0 and last["reward/redness/std"] > 0  # measured as it is, although it is bounded
    assert last["watch/power"] > 0 and "watch/unread" not in last and {"eval/power", "eval/unread"} <= set(last)
    assert last["grad_norm"] == 0  # nothing is better than anything else
    assert first["eval/redness"] is not None


def test_a_reward_file_imports_what_lies_beside_it(tmp_path: Path) -> None:
    """From any folder, also in its calls; a change there is one of the reward; no file hides a package."""
    project = tmp_path / "project"
    (project / "inner_parts").mkdir(parents=True)
    (project / "beside_it.py").write_text("FACTOR = 2.0\n")
    (project / "inner_parts" / "__init__.py").write_text("from inner_parts.later import SHIFT\n")
    (project / "inner_parts" / "later.py").write_text("SHIFT = 0.5\n")
    (project / "numpy.py").write_text("raise RuntimeError('not numpy')\n")
    (project / "reward.py").write_text(
        "import numpy\nfrom beside_it import FACTOR\n\n"
        "def bright(images, prompts, metadata):\n"
        "    import inner_parts\n    return numpy.asarray(FACTOR * images.mean(dim=(1, 2, 3)) + inner_parts.SHIFT)\n"
    )
    plugin = f"{project / 'reward.py'}:bright"
    reward = build_rewards({"a": Entry(plugin)}, CPU)["a"]
    assert reward(torch.ones(1, 3, 4, 4), ["a"], [{}]).tolist() == [2.5]
    before = identity_of(plugin, {}, reward)
    (project / "inner_parts" / "later.py").write_text("SHIFT = 0.25\n")
    assert identity_of(plugin, {}, reward) != before
    other = tmp_path / "other"
    other.mkdir()
    (other / "beside_it.py").write_text("FACTOR = 3.0\n")
    (other / "reward.py").write_text((project / "reward.py").read_text())
    with pytest.raises(UserError, match=r"imports \"beside_it\", which is .*project/beside_it.py already"):
        build_rewards({"a": Entry(f"{other / 'reward.py'}:bright")}, CPU)
