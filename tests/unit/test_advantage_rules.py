"""The door of advantage rules: a function or a class in one file, an installed one, and the shipped one alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diffrl.additions.advantages import find_rule
from diffrl.advantages import group_advantages
from diffrl.config import Config, load_config
from diffrl.errors import UserError
from diffrl.objectives.estimates import Checked, Estimator
from diffrl.run.build import build_objective
from diffrl.run.identity import contents
from diffrl.run.start import config_identity

MINE = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Literal
import torch
from torch import Tensor
from diffrl.advantages import group_advantages, group_mean

def median(scores, groups, std, *, scale: float = 1.0, side: Literal["low", "high"] = "low"):
    return ((scores - group_mean(scores, groups)) * scale).nan_to_num(0.0)

@dataclass
class Flipped:
    floor: float = 0.5
    def __call__(self, scores: Tensor, groups: Tensor, std: str = "group") -> Tensor:
        return -group_advantages(scores, groups, std, self.floor)
"""
SECTION = """
from typing import ClassVar
from diffrl.config.base import key
from diffrl.additions.advantages import Advantages

class Small(Advantages):
    made: ClassVar[str] = "my_rules:Flipped"
    floor: float = key(0.5, "least std", gt=0)
"""
SCORES = torch.tensor([[1.0], [3.0], [2.0], [2.5], [torch.nan], [torch.nan]])
GROUPS = torch.tensor([0, 0, 1, 1, 2, 2])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rules.py"
    path.write_text(MINE)
    return path


def estimate_of(config: Config) -> Any:
    return build_objective(config, config.rollout).rule.estimate


@pytest.mark.parametrize("objective", ["nft", "crd"])
def test_a_function_and_its_keys(file: Path, config_file: Any, objective: str) -> None:
    section = {"rule": f"{file}:median", "scale": 2}
    config = load_config(config_file("run", objective=objective, advantages=section))
    assert config.advantages.model_dump() == section | {"side": "low", "scale": 2.0}  # type: ignore[union-attr]
    found = estimate_of(config)(SCORES, GROUPS, "group")
    assert found.flatten().tolist() == [-2.0, 2.0, -0.5, 0.5, 0.0, 0.0]


def test_a_class_and_its_keys(file: Path, config_file: Any) -> None:
    config = load_config(config_file("run", advantages={"rule": f"{file}:Flipped", "floor": 0.25}))
    assert torch.equal(estimate_of(config)(SCORES, GROUPS), -group_advantages(SCORES, GROUPS, "group", 0.25))
    assert Config(**config.resolved()).resolved() == config.resolved()  # and a program reads it again


def test_gardo_uses_the_rule(file: Path, config_file: Any) -> None:
    more = {"advantages": {"rule": f"{file}:Flipped"}, "watch": {"jpeg": {}}, "gardo": {"auxiliary": ["jpeg"]}}
    assert estimate_of(load_config(config_file("run", **more))).name.endswith("Flipped")


def test_the_shipped_rule_comes_through_the_same_table(config_file: Any) -> None:
    """A config that names it, one that does not, and the rule by hand are the same."""
    named = load_config(config_file("run", advantages={"rule": "groups", "agree": "leave_out"}))
    plain = load_config(config_file("run", advantages={"agree": "leave_out"}))
    assert named == plain and type(named) is type(plain) and isinstance(named.advantages, find_rule("groups"))
    scores = SCORES.where(GROUPS[:, None] > 0, 0.5)  # the first group agrees
    by_hand = Estimator("leave_out")(scores, GROUPS)
    assert not by_hand[GROUPS == 0].any() and by_hand[GROUPS > 0].any()
    assert torch.equal(estimate_of(plain)(scores, GROUPS), by_hand)
    assert type(estimate_of(plain).rule) is Estimator


def test_an_installed_rule_has_its_name(file: Path, config_file: Any, installed: Any, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(file.parent)
    installed("flip", "my_rules:Flipped", "diffrl.advantages")
    config = load_config(config_file("run", advantages={"rule": "flip"}))
    assert estimate_of(config).rule.floor == 0.5


def test_a_section_may_name_its_rule(file: Path, config_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As shipped rules do: keys with limits and meanings, and nothing heavy to read a config."""
    file.with_name("rules.py").write_text(SECTION)
    monkeypatch.syspath_prepend(file.parent)
    section = {"rule": str(file.with_name("rules.py")) + ":Small", "floor": 0.125}
    assert estimate_of(load_config(config_file("run", advantages=section))).rule.floor == 0.125
    with pytest.raises(UserError, match=r"run\.yaml:\d+: advantages\.floor: expected more than 0"):
        load_config(config_file("run", advantages=section | {"floor": 0.0}))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"rule": "{file}:medain"}, r'advantages\.rule: no "medain" in .* \(nearest: "median"\)'),
        ({"rule": "{file}x.py:median"}, r"advantages\.rule: no advantage rule file"),
        (
            {"rule": "gruops"},
            r'advantages\.rule: unknown advantage rule "gruops" \(nearest: "groups"\); one',
        ),
        ({"rule": "{file}:torch"}, r"advantages\.rule: .* is not called with \(scores, groups, std\)"),
        ({"rule": "{file}:median", "scael": 1.0}, r'advantages\.scael: unknown key \(nearest: "advantages\.scale"\)'),
        ({"rule": "{file}:median", "scale": "x"}, r"advantages\.scale: expected a number"),
        ({"rule": "{file}:median", "side": "hihg"}, r'advantages\.side: expected one of low, high.*"high"'),
        ({"rule": "{file}:median", "agree": "floor"}, r"advantages\.agree: unknown key"),
        ({"agreee": "floor"}, r'advantages\.agreee: unknown key \(nearest: "advantages\.agree"\)'),
    ],
)
def test_what_is_wrong_is_one_line_at_its_key(file: Path, config_file: Any, section: dict[str, Any], said: str) -> None:
    section = {key: value.format(file=file) if key == "rule" else value for key, value in section.items()}
    with pytest.raises(UserError, match=rf"run\.yaml:\d+: {said}") as error:
        load_config(config_file("run", advantages=section))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def f(scores, groups): ...", r"is not called with \(scores, groups, std\)"),
        ("class f: ...", r"is not called with"),
        ("class f:\n    def __call__(self, scores, groups): ...", r"is not called with"),
        ("def f(scores, groups, std, *, a: float): ...", r"its parameter a has no default"),
        ("def f(scores, groups, std, *, a=1.0): ...", r"its parameter a has no type"),
        ("def f(scores, groups, std, *, rule: str = 'x'): ...", r"its parameter rule has a name that no key can have"),
        ("def f(scores, groups, std, *, a: 'Missing' = 1.0): ...", r"types of its keys cannot be read"),
        ("class f:\n    def __init__(self, **k): ...\n    def __call__(self, s, g, std): ...", "cannot be given by"),
        ("1 / 0", "cannot be imported: ZeroDivisionError"),
    ],
)
def test_what_is_no_rule_is_told_what_it_lacks(tmp_path: Path, code: str, said: str) -> None:
    (tmp_path / "odd.py").write_text(code + "\n")
    with pytest.raises(UserError, match=said):
        find_rule(f"{tmp_path / 'odd.py'}:f")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (lambda s, g, std: s[:1], r"expected floats of the scores' shape \(6, 1\), got torch.float32 of \(1, 1\)"),
        (lambda s, g, std: [0.0], "got list"),
        (lambda s, g, std: torch.zeros(6, 1, dtype=torch.int64), r"expected floats"),
        (lambda s, g, std: s / 0, "an advantage is not finite"),
        (lambda s, g, std: s, r"a score that does not apply \(NaN\) has to give 0"),
    ],
)
def test_what_a_rule_returns_is_checked(rule: Any, said: str) -> None:
    with pytest.raises(UserError, match=f'advantage rule "mine": .*{said}'):
        Checked(rule, "mine")(SCORES, GROUPS)


def test_a_run_remembers_rule_keys_and_code(file: Path, config_file: Any) -> None:
    config = load_config(config_file("run", advantages={"rule": f"{file}:median"}))
    before = config_identity(config) | contents(config)
    assert before["advantages.scale"] == 1.0 and before["advantages.rule"].endswith(":median")
    file.write_text(file.read_text() + "# another\n")
    after = contents(load_config(config_file("run", advantages={"rule": f"{file}:median"})))
    assert after["advantages (code)"] != before["advantages (code)"]


def test_a_rule_of_ones_own_is_refused_where_no_rule_is_used(file: Path, config_file: Any) -> None:
    with pytest.raises(UserError, match=r'advantages: .* objective "rwr" ranks or weighs'):
        load_config(config_file("run", objective="rwr", advantages={"rule": f"{file}:median"}))
