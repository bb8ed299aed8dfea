"""The conformance test finds what it is there to find, and the cards are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diffrl.cli.main import main
from diffrl.errors import UserError
from diffrl.reward_tools import cards
from diffrl.reward_tools.check import check, examine
from diffrl.reward_tools.examples import example_images
from diffrl.rewards import Card, RewardError

pytestmark = pytest.mark.usefixtures("one_call")
REDNESS = Path(__file__).parents[1] / "data" / "redness.py"
IMAGES = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
PROMPTS = [f"prompt {i}" for i in range(6)]
CARD = Card("light", (0.0, 1.0), "none", "none", "Apache-2.0", "none", "white images")


class Good:
    """Brightness, with every ability that can be checked."""

    name, card, differentiable, embeds = "good", CARD, True, True

    def embed_image(self, images: Tensor) -> Tensor:
        return images.mean((2, 3))

    def embed_text(self, prompts: list[str]) -> Tensor:
        return torch.full((len(prompts), 3), 1 / 3)

    def score(self, image: Tensor, text: Tensor) -> Tensor:
        return (image * text).sum(-1)

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        return self.score(self.embed_image(images), self.embed_text(prompts))


def failed(reward: Any) -> dict[str, str]:
    return {result.title: result.detail for result in examine(reward, IMAGES, PROMPTS) if not result.passed}


def variant(**changes: Any) -> Any:
    """`Good` with some attributes or methods replaced; without embeddings, which a changed call would contradict."""
    return type("Variant", (Good,), {"embeds": False, **changes})()


def test_a_good_reward_passes_every_check() -> None:
    results = examine(Good(), IMAGES, PROMPTS)
    assert all(result.passed for result in results), results
    assert len(results) == 13


def test_it_finds_each_fault() -> None:
    def light(images: Tensor) -> Tensor:
        return images.mean((1, 2, 3))

    calls, kept = iter(range(1000)), list[Tensor]()
    faults: dict[str, tuple[str, Any]] = {
        "shape and type": ("(6, 1)", lambda s, x, p, m: light(x)[:, None]),
        "finite where it applies": ("nan", lambda s, x, p, m: light(x).where(light(x) > light(x).min(), torch.nan)),
        "deterministic": ("differ by up to 1", lambda s, x, p, m: light(x) + next(calls)),
        "images left as they were": ("in place", lambda s, x, p, m: light(x.mul_(0.5))),
        "independent of the order": ("another order", lambda s, x, p, m: light(x) + torch.arange(len(x))),
        "independent of the batch": ("one by one", lambda s, x, p, m: light(x) - light(x).mean()),
        "declared range": ("leave the card's range 0 to 1", lambda s, x, p, m: 10 * light(x)),
        "gradient": ("no gradient", lambda s, x, p, m: light(x.detach()).requires_grad_()),
        "memory": ("keeps 2 tensors of every call", lambda s, x, p, m: kept.extend([x, light(x)]) or light(x)),
    }
    for title, (said, call) in faults.items():
        found = failed(variant(__call__=call))
        assert said in found[title], (title, found)


def test_a_remote_reward_is_asked_little_and_as_much_as_was_said(monkeypatch, capsys) -> None:
    """One on another machine costs money: 60 images in all, or as many as are allowed, and it is said before."""
    asked: list[int] = []
    call = lambda s, x, p, m: asked.append(len(x)) or x.mean((1, 2, 3)) * 0.9  # noqa: E731
    reward = variant(remote=True, differentiable=False, __call__=call)
    monkeypatch.setattr("diffrl.reward_tools.check.load_reward", lambda *_, **__: reward)
    for given, most in ((), 60), ((None, 30), 30), ((None, 16), 16):
        asked.clear()
        assert check("good", *given)
        assert most - 5 < sum(asked) <= most
        assert f"scores {sum(asked)} images" in capsys.readouterr().out
    asked.clear()
    reward.__class__.columns, call_two = ("one", "two"), lambda s, x, p, m: call(s, x, p, m)[:, None].repeat(1, 2)
    type(reward).__call__ = call_two
    assert check("good") and sum(asked) <= 60  # its columns share what it says
    with pytest.raises(UserError, match="16"):
        check("good", None, 15)
    # A nondeterministic one is still found with the fewest.
    calls = iter(range(999))
    found = examine(variant(__call__=lambda s, x, p, m: x.mean((1, 2, 3)) + next(calls)), requests=16)
    assert "deterministic" in [one.title for one in found if not one.passed]


def test_constant_scores_are_reported() -> None:
    found = failed(variant(differentiable=False, __call__=lambda s, x, p, m: torch.full((len(x),), 0.5)))
    assert found == {"finite where it applies": "all 6 images score 0.5: nothing to learn from"}


def test_embeddings_must_give_the_score() -> None:
    found = failed(
        variant(embeds=True, score=lambda s, i, t: (i * t).sum(-1), __call__=lambda s, x, p, m: x.mean((1, 2, 3)) / 2)
    )
    assert list(found) == ["embeddings"]


def test_an_exception_is_a_finding() -> None:
    found = failed(variant(__call__=lambda s, x, p, m: 1 / 0))
    assert list(found) == ["shape and type"]  # told once
    said = found["shape and type"]
    assert said.startswith(
        "raised ZeroDivisionError: division by zero (also in: finite where it applies, deterministic, "
    )
    assert "throughput" in said
    ended = failed(variant(__call__=lambda s, x, p, m: exit(3)))
    assert ended["shape and type"].startswith("raised SystemExit: 3")


def test_other_sizes_shapes_and_prompts_are_tried() -> None:
    def light(x: Tensor) -> Tensor:
        return x.mean((1, 2, 3))

    faults: dict[str, tuple[str, Any]] = {
        "swaps height and width": ("IndexError", lambda x, p: light(x) + 0 * x[:, 0, x.shape[3] - 1, x.shape[2] - 1]),
        "one size": ("RuntimeError", lambda x, p: light(x.reshape(len(x), 3, int(x[0, 0].numel() ** 0.5), -1))),
        "nan": ("get nan", lambda x, p: light(x) if x.shape[2] == x.shape[3] else light(x) * torch.nan),
    }
    for name, (said, call) in faults.items():
        found = failed(variant(differentiable=False, __call__=lambda s, x, p, m, call=call: call(x, p)))
        assert list(found) == ["other sizes and shapes"] and said in found["other sizes and shapes"], (name, found)
    assert (
        "images of 64 x 96 (height, width) raised IndexError"
        in failed(variant(__call__=lambda s, x, p, m: light(x) + 0 * x[:, 0, x.shape[3] - 1, x.shape[2] - 1]))[
            "other sizes and shapes"
        ]
    )

    words: dict[str, Any] = {
        "empty": lambda p: len(p.split()[0]),
        "non-Latin": lambda p: len(p.encode("ascii")),
        "long": lambda p: 1 / (len(p) < 400),
        "in quotes and braces": lambda p: len(p.format()),
    }
    for kind, read in words.items():
        call = lambda s, x, p, m, read=read: light(x) + 0 * torch.tensor([float(read(q)) for q in p])  # noqa: E731
        found = failed(variant(differentiable=False, __call__=call))
        assert list(found) == ["unusual prompts"] and f"prompts, {kind}, raised" in found["unusual prompts"], found


def test_a_size_refused_in_words_is_no_failure() -> None:
    def only_squares(self: Any, x: Tensor, p: list[str], m: list[dict]) -> Tensor:
        if x.shape[2] != x.shape[3]:
            raise RewardError("only square pictures")
        return x.mean((1, 2, 3))

    results = {r.title: r for r in examine(variant(__call__=only_squares), IMAGES, PROMPTS)}
    sizes = results["other sizes and shapes"]
    assert sizes.passed and sizes.detail.endswith("refused: 64 x 96 (only square pictures)")


def test_a_z_score_is_said_to_come_from_the_batch() -> None:
    def z(self: Any, x: Tensor, p: list[str], m: list[dict]) -> Tensor:
        light = x.mean((1, 2, 3))
        return (light - light.mean()) / light.std()

    found = failed(variant(differentiable=False, card=None, __call__=z))
    assert list(found) == ["independent of the batch"]
    assert found["independent of the batch"].startswith("scores one by one are nan: a score must not be computed from")


def test_prompts_with_metadata_can_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "needs.py").write_text(
        "class Needs:\n    name = 'needs'\n"
        "    def applies(self, prompt, metadata): return 'level' in metadata\n"
        "    def __call__(self, images, prompts, metadata):\n"
        "        return images.mean((1, 2, 3)) * images.new_tensor([m['level'] for m in metadata])\n"
    )
    (tmp_path / "set.jsonl").write_text('{"prompt": "a", "level": 1}\n{"prompt": "b", "level": 2}\n')
    plugin = f"{tmp_path}/needs.py:Needs"
    assert main(["rewards", "check", plugin, "--prompts", f"{tmp_path}/set.jsonl"]) == 0
    assert "conforms" in capsys.readouterr().out
    text = (tmp_path / "needs.py").read_text()
    (tmp_path / "everywhere.py").write_text("".join(line for line in text.splitlines(True) if "applies" not in line))
    assert main(["rewards", "check", f"{tmp_path}/everywhere.py:Needs", "--prompts", f"{tmp_path}/set.jsonl"]) == 0
    assert "tried: empty, " in capsys.readouterr().out  # unusual prompts come with the given ones' metadata
    assert main(["rewards", "check", plugin]) == 1
    assert "name others with --prompts" in capsys.readouterr().out
    assert main(["rewards", "check", plugin, "--prompts", "nowhere.jsonl"]) == 2


def test_a_groupwise_reward_is_checked_on_a_group() -> None:
    seen: set[str] = set()

    def win_rate(self: Any, x: Tensor, p: list[str], m: list[dict]) -> Tensor:
        assert len(set(p)) == 1
        seen.update(p)
        value = x.mean((1, 2, 3))
        return (value[:, None] > value).float().mean(1)

    assert failed(variant(groupwise=True, differentiable=False, __call__=win_rate)) == {}
    assert {prompt for prompt in seen if prompt.startswith("prompt")} == {"prompt 0"}


def test_scores_are_floats_and_applies_is_steady() -> None:
    whole = failed(variant(differentiable=False, __call__=lambda s, x, p, m: (x.mean((1, 2, 3)) * 100).long()))
    assert whole["shape and type"] == "returns torch.int64, not a floating-point type"
    answers = iter([True] * 12 + [False] * 10)
    found = failed(variant(applies=lambda s, p, m: next(answers)))
    assert found == {"says where it applies": "applies() says now this, now that of the same prompt"}
    assert "returns a int" in failed(variant(applies=lambda s, p, m: 1))["says where it applies"]
    results = examine(variant(applies=lambda s, p, m: p != "prompt 1"), IMAGES, PROMPTS)
    assert results[0].detail == "to 5 of 6 prompts; the others get no score"


def test_nothing_to_judge_is_a_failure() -> None:
    (result,) = examine(variant(applies=lambda s, p, m: False), IMAGES, PROMPTS)
    assert not result.passed and "prompt 0" in result.detail


def test_check_prints_and_returns(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(f"{REDNESS}:Redness", power=0.5) is True
    printed = capsys.readouterr().out
    assert "ok   deterministic" in printed and printed.rstrip().endswith("conforms")
    assert "images/s" in printed and "ok   loading" in printed and "ok   memory" in printed


@pytest.mark.parametrize("does", ["os._exit(0)", "setattr(sys, 'stdout', io.StringIO())"])
def test_what_ends_or_silences_the_process_is_a_finding(does: str, tmp_path: Path, capsys: Any, caplog: Any) -> None:
    """The check ended with code 0, and had printed nothing."""
    file = tmp_path / "odd.py"
    lines = [
        "import io, os, sys",
        "class Odd:",
        "    name = 'odd'",
        "    def __call__(self, images, prompts, metadata):",
    ]
    file.write_text("\n".join([*lines, f"        {does}", "        return images.mean((1, 2, 3))"]))
    exits = "exit" in does
    assert check(f"{file}:Odd") is not exits
    printed = capsys.readouterr().out
    assert ("raised SystemExit: os._exit(0) (also in: " in printed) is exits and "FAIL" * exits in printed
    assert "ok   loading" in printed and any("changes sys.stdout" in line for line in caplog.messages) is not exits


def test_examples_cover_the_world() -> None:
    images, prompts = example_images()
    assert images.shape == (len(prompts), 3, 64, 64) and 0 <= images.min() < images.max() <= 1
    assert any('"' in prompt for prompt in prompts) and any("head" in prompt for prompt in prompts)


def test_every_plugin_of_the_zoo_has_a_card() -> None:
    shown = cards.cards()
    for name in ("playground", "artefact", "clip", "aesthetic", "ocr"):
        assert isinstance(shown[name], Card), shown[name]
    assert shown["artefact"].better == "lower"  # type: ignore[union-attr]


def test_cards_as_table_and_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    light = Card("a|b", (0.0, float("inf")), *"cwloe", better="lower")
    monkeypatch.setattr(cards, "cards", lambda: {"light": light, "broken": "cannot"})
    lines = cards.markdown().splitlines()
    assert lines[0].startswith("| reward | measures | known exploits |") and len(lines) == 4
    assert lines[2] == "| light | a\\|b (score: 0 to unbounded, lower is better) | e | w; o | l |"
    assert "| broken | cannot |" in lines[3]
    assert cards.overview().splitlines()[:2] == ["light   a|b (lower is better)", "broken  cannot"]
    monkeypatch.setattr(cards, "cards", lambda: {"free": Card("a", (float("-inf"), float("inf")), *"cwloe")})
    assert "| free | a (score: unbounded) | e | w; o | l |" in cards.markdown()
