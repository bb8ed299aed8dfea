"""Rewards with several named columns: asked once, each column an entry of its own; and rewards of the whole batch."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from diffrl.advantages import decoupled_advantages
from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.prepare.dry_run import without_caches
from diffrl.prompts import Prompt
from diffrl.reward_tools.check import examine
from diffrl.rewards.building import Entry, build_rewards
from diffrl.rewards.kinds import Asked
from diffrl.rewards.protocol import RewardError, Wrapper, missing_of_instance
from diffrl.rewards.registry import load_reward
from diffrl.rewards.scoring import Scorer

pytestmark = pytest.mark.usefixtures("one_call")

CPU = torch.device("cpu")
IMAGES = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
PROMPTS = [Prompt(text, {}) for text in ("a word", "a red circle", "a word", "a red circle", "a word", "a red circle")]
PLUGIN = """
import torch

class Judge:
    name = "judge"
    columns = ("light", "text")
    batch_size = 4

    def __init__(self, gain: float = 1.0):
        self.gain, self.calls = gain, []

    def __call__(self, images, prompts, metadata):
        self.calls.append(len(images))
        light = self.gain * images.mean((1, 2, 3))
        text = torch.where(torch.tensor(["word" in p for p in prompts]), images[:, 0].mean((1, 2)), torch.nan)
        return torch.stack([light, text], 1)

class Batch:
    name = "batch"
    batchwise = True
    width = 3

    def describe(self, images, prompts, metadata):
        return images.mean((2, 3))

    def applies(self, prompt, metadata):
        return "circle" in prompt

    def gains(self, rows, wanted):
        return (rows[wanted] - rows.mean(0)).norm(dim=1), float(len(rows))

    def __call__(self, images, prompts, metadata):
        return self.gains(self.describe(images, prompts, metadata), torch.arange(len(images)))[0]
"""


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(PLUGIN)
    return str(tmp_path / "mine.py")


def refused(plugin: str, **given: Any) -> str:
    with pytest.raises(UserError) as error:
        build_rewards({"one": Entry(plugin, **given)}, CPU)
    assert "\n" not in str(error.value)
    return str(error.value)


def expected() -> tuple[Tensor, Tensor]:
    text = IMAGES[:, 0].mean((1, 2))
    text[1::2] = torch.nan
    return IMAGES.mean((1, 2, 3)), text


@pytest.mark.parametrize("cached", [False, True])
def test_columns_are_asked_once_and_scored_as_rewards_of_their_own(plugin: str, tmp_path: Path, cached: bool) -> None:
    cache = str(tmp_path / "scores") if cached else None
    judge = f"{plugin}:Judge"
    entries = {name: Entry(judge, cache=cache, column=name) for name in ("text", "light")}
    entries["bright"] = Entry(judge, {"gain": 2.0}, cache, column="light")
    rewards: dict[str, Any] = build_rewards(entries, CPU)
    inner = rewards["light"].reward
    assert rewards["text"].reward is inner is not rewards["bright"].reward
    scorer = Scorer(rewards)
    scores = scorer.score(IMAGES, PROMPTS)
    light, text = expected()
    assert torch.allclose(scores, torch.stack([text, light, 2 * light], 1), equal_nan=True)
    calls = (inner.reward if cached else inner).calls
    assert calls == [4, 2]
    assert torch.equal(scorer.score(IMAGES, PROMPTS).nan_to_num(-1), scores.nan_to_num(-1))
    assert calls == ([4, 2] if cached else [4, 2, 4, 2])


def test_gdpo_normalises_each_column_and_a_missing_one_gives_no_signal(plugin: str) -> None:
    """NaN of a column: advantage 0, and the others of the image count as ever (float64)."""
    scorer = Scorer(build_rewards({n: Entry(f"{plugin}:Judge", column=n) for n in ("light", "text")}, CPU))
    scores, groups = scorer.score(IMAGES, PROMPTS).double(), torch.tensor([0, 1, 0, 1, 0, 1])
    found = decoupled_advantages(scores, torch.tensor([1.0, 1.0], dtype=torch.float64), groups, "none")[:, 0]
    light, text = (column.double() for column in expected())
    for i in range(6):
        mates = [j for j in range(6) if j % 2 == i % 2]
        value = light[i] - light[mates].mean() + (text[i] - text[mates].mean() if i % 2 == 0 else 0.0)
        assert float(found[i]) == pytest.approx(float(value), abs=1e-7)


def test_what_columns_are_asked_of(plugin: str) -> None:
    judge = f"{plugin}:Judge"
    assert "has the columns light, text; choose one" in refused(judge)
    assert 'no column "ligth" (nearest: "light")' in refused(judge, column="ligth")
    assert "has one score alone" in refused(f"{plugin}:Batch", column="text")
    assert build_rewards({"one": Entry(judge, {"column": "text"})}, CPU)["one"].index == 1  # type: ignore[attr-defined]
    reward = load_reward(judge)
    reward.columns = "light"  # type: ignore[attr-defined]
    assert missing_of_instance(reward) == ["`columns` is not a list of different names"]


def test_a_row_of_another_width_or_with_an_infinity_stops_the_run(plugin: str) -> None:
    rewards: dict[str, Any] = build_rewards({"text": Entry(f"{plugin}:Judge", column="text")}, CPU)
    judge = rewards["text"].reward
    table = torch.zeros(6, 2)
    table[2, 0] = torch.inf
    scorer = Scorer(rewards, plugins={"text": "judge"})
    for answer, message in ((table, 'returned inf for the prompt "a word"'), (table[:, :1], r"shape \(4, 1\) instead")):
        type(judge).__call__ = lambda self, images, prompts, metadata, answer=answer: answer[: len(images)]
        with pytest.raises(RewardError, match=message):
            scorer.score(IMAGES, PROMPTS)


def test_the_conformance_check_looks_at_every_column(plugin: str) -> None:
    results = examine(load_reward(f"{plugin}:Judge"), IMAGES, [p.text for p in PROMPTS], [{}] * 6)
    assert {"light: deterministic", "text: independent of the batch"} <= {one.title for one in results}
    assert all(one.passed for one in results), [one for one in results if not one.passed]


def test_one_batch_of_two_processes_is_one_batch_of_one(plugin: str) -> None:
    """Gathered rows, images to which it does not apply left out: scores and figure of all."""
    scorer = Scorer(build_rewards({"batch": Entry(f"{plugin}:Batch")}, CPU))
    groups, empty = torch.arange(6), torch.full((6, 1), torch.nan)
    assert scorer.later == ["batch"]
    whole = scorer.finish(empty, [IMAGES], PROMPTS, groups)
    assert scorer.figures == {"batch": 3.0}
    assert whole[::2].isnan().all()
    rows = IMAGES[1::2].mean((2, 3))
    assert torch.allclose(whole[1::2, 0], (rows - rows.mean(0)).norm(dim=1))
    assert torch.equal(scorer.score(IMAGES, PROMPTS, groups).nan_to_num(-1), whole.nan_to_num(-1))
    described: list[Tensor] = []
    cuts = [slice(0, 1), slice(1, 6), slice(6, 6)]  # one without an image that it judges, one without any
    for part in cuts:
        with pytest.raises(AssertionError, match="enough"):
            scorer.finish(empty[part], [IMAGES[part]], PROMPTS[part], groups[part], everyone=_spy(described))
    for part in cuts:
        together = torch.cat(described)
        found = scorer.finish(
            empty[part],
            [IMAGES[part]],
            PROMPTS[part],
            groups[part],
            everyone=lambda r, p=part, t=together: (t, p.start),
        )
        assert torch.equal(found.nan_to_num(-1), whole[part].nan_to_num(-1)) and scorer.figures == {"batch": 3.0}


def _spy(rows: list[Tensor]) -> Any:
    def everyone(own: Tensor) -> tuple[Tensor, int]:
        rows.append(own)
        raise AssertionError("enough")

    return everyone


CASES = {
    "cache": ({"rewards": {"vendi": {"cache": "scores"}}}, None),
    "direct": ({"objective": "direct"}, '"vendi" (judges whole batches|is not differentiable)'),
    "scout": ({"rollout": {"scout": {"images": 8, "steps": 2}}}, "leave out rollout.scout"),
    "credit": ({"objective": "grpo", "rollout": {"sampler": "flow_sde"}, "dense": {}}, "scores others, too"),
    "set": ({"image_set": {"source": "."}}, "leave out image_set"),
}


@pytest.mark.parametrize("case", CASES)
def test_where_a_batch_is_none_it_is_refused(case: str, config_file: Any) -> None:
    sections, message = CASES[case]
    path = config_file("refused", **{key: value for key, value in sections.items() if key != "rewards"})
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "rewards": {"vendi": {"model": "playground"}}}))
    if message is None:
        with pytest.raises(UserError, match=r"cache: the reward .* judges whole batches"):
            build_rewards({"vendi": Entry("vendi", cache="scores")}, CPU)
        cached = {"vendi": {"model": "playground", "cache": "scores"}}
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "rewards": cached}))
        with pytest.raises(UserError, match=r"cache: the reward .* judges whole batches"):
            without_caches(load_config(path))  # a dry run, which builds none
        return
    with pytest.raises(UserError, match=message):
        load_config(path)


def test_a_server_refuses_a_batch_and_columns(plugin: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, message in (("Batch", "judges whole batches"), ("Judge", "answers in columns (light, text)")):
        assert main(["rewards", "serve", f"{plugin}:{name}"]) == 2
        assert message in (said := capsys.readouterr().err) and said.count("\n") == 1, said


def test_entries_share_their_arguments_by_an_alias(tmp_path: Path) -> None:
    """YAML's `<<`: what the entry says itself counts more."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "rewards:\n  color: &facts {plugin: playground_facts, column: color, weight: 0.5}\n"
        "  count: {<<: *facts, column: count}\n"
    )
    rewards = load_config(path).rewards
    assert [(r.plugin, r.column, r.weight) for r in rewards.values()] == [
        ("playground_facts", "color", 0.5),
        ("playground_facts", "count", 0.5),
    ]
    path.write_text("rewards:\n  color: &facts {<<: *facts}\n")
    with pytest.raises(UserError, match="nested too deeply, or an alias that holds itself"):
        load_config(path)


def test_a_cap_stops_the_gradient_above_it(tmp_path: Path) -> None:
    """OneReward's relu(lambda - R), in float64: -1 below, 0 above; without one -R."""
    from diffrl.methods.direct.objective import Direct

    phi = torch.tensor([[0.2], [0.8], [0.5]], dtype=torch.float64, requires_grad=True)
    rows: Any = None
    loss = Direct(cap=0.6).loss(phi, rows)
    assert float(loss.detach()) == pytest.approx(0.4 + 0.0 + 0.1, abs=1e-12)
    assert torch.autograd.grad(loss.sum(), phi)[0].flatten().tolist() == [-1.0, 0.0, -1.0]
    assert float(Direct().loss(phi, rows).detach()) == pytest.approx(-1.5, abs=1e-12)


class Twice(Wrapper):
    def __call__(self, images: Tensor, prompts: Any, metadata: Any) -> Tensor:
        return 2 * self.reward(images, prompts, metadata)


class Ranked(Asked):
    """What a stranger's kind does: an answer is two numbers, the score is their difference, and the first is kept."""

    width, when = 2, "drawn"

    def ask(self, images: Tensor, prompts: Any, metadata: Any) -> object:
        return self.reward.both(images)

    def scores(self, answers: Tensor) -> Tensor:
        self.kept = answers[:, 0]
        return answers[:, 0] - answers[:, 1]

    def take(self) -> Tensor:
        return self.kept


STRANGER = """
class Between:
    name, ranks = "between", True

    def __call__(self, images, prompts, metadata):
        raise RuntimeError("its kind asks in another way")

    def both(self, images):
        return images[:, :2].mean((2, 3))

class Light:
    name = "light"

    def __call__(self, images, prompts, metadata):
        return images.mean((1, 2, 3))
"""


def test_a_package_brings_a_kind_of_reward_and_what_is_put_around_one(
    installed, config_file, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs.py").write_text(STRANGER)
    between, light = (
        Entry(f"{tmp_path}/theirs.py:{name}", more) for name, more in (("Between", {}), ("Light", {"twice": True}))
    )
    with pytest.raises(UserError, match='unknown parameter "twice"'):
        build_rewards({"light": light}, CPU)
    with pytest.raises(RewardError, match="its kind asks in another way"):
        Scorer(build_rewards({"between": between}, CPU)).score(IMAGES, PROMPTS)
    stranger = SimpleNamespace(Ranked=Ranked, twice=lambda reward, value, entry: Twice(reward) if value else reward)
    monkeypatch.setitem(sys.modules, "of_a_stranger", stranger)
    installed("ranks", "of_a_stranger:Ranked", "diffrl.reward_kinds")
    with pytest.raises(UserError, match='unknown parameter "twice"'):
        build_rewards({"light": light}, CPU)
    scorer = Scorer(build_rewards({"between": between}, CPU))
    assert torch.equal(scorer.score(IMAGES, PROMPTS)[:, 0], IMAGES[:, 0].mean((1, 2)) - IMAGES[:, 1].mean((1, 2)))
    assert torch.equal(scorer.take_kept()["between"], IMAGES[:, 0].mean((1, 2)))
    installed("twice", "of_a_stranger:twice", "diffrl.reward_options")
    rewards = {"light": {"plugin": light.plugin, "twice": True}}
    entry = load_config(config_file(rewards=rewards)).rewards["light"]
    built = build_rewards({"light": Entry(str(entry.plugin), entry.arguments)}, CPU)
    torch.testing.assert_close(Scorer(built).score(IMAGES, PROMPTS)[:, 0], 2 * IMAGES.mean((1, 2, 3)))
