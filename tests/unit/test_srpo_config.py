"""What a config may ask of Direct-Align and SRPO, and who is cited for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diffrl.config import load_config
from diffrl.config.door import methods
from diffrl.errors import UserError
from diffrl.methods.direct import Align, DirectSection, Pair
from diffrl.sharing.card import _cited

DATA = Path(__file__).parents[1] / "data"
EMBEDDER = {"redness": {"plugin": f"{DATA}/embedder.py:Embedder"}}
WARMTH = {"redness": {"plugin": f"{DATA}/warmth.py:Warmth"}}
SRPO: dict[str, Any] = {"objective": "direct", "rewards": EMBEDDER}


def direct(**keys: Any) -> dict[str, Any]:
    given = {"align": {}, "pair": {}, **keys}
    return {**SRPO, "direct": {name: value for name, value in given.items() if value is not None}}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (direct(align=None), r"direct\.pair: its discounts run over direct\.align\.range; give direct\.align, too"),
        (direct(align={"range": [0.9, 0.7]}), r"direct\.align\.range: expected two noise levels, .* got 0\.9, 0\.7"),
        (direct(align={"range": [0.9, 1.0]}), r"direct\.align\.range: .* high < 1"),
        (direct(align={"rang": [0.7, 0.9]}), r'direct\.align\.rang: .* \(nearest: "direct\.align\.range"\)'),
        (direct(pair={"positive": []}), r"direct\.pair\.positive: expected at least one word"),
        (direct(pair={"negative": ["Oil", " "]}), r"direct\.pair\.negative: .* none that is empty"),
        (direct(pair={"form": "{word}"}), r"direct\.pair\.form: expected \{word\} and \{prompt\}, once each"),
        (direct(pair={"form": "{word}, {prompt"}), r"direct\.pair\.form: expected"),
        ({**direct(), "rewards": WARMTH}, r"rewards\.redness: .* does not embed its prompts .*; clip, pickscore"),
        ({**direct(), "d2align": {}}, r"direct\.pair: there is d2align, which takes the same difference"),
        (
            {**direct(), "rewards": {"redness": {"plugin": f"d2:{DATA}/embedder.py:Embedder", "direction": "x"}}},
            r'direct\.pair: rewards\.redness is "d2:.*the same difference',
        ),
        ({**direct(pair=None), "d2align": {"embed": "reconstructed"}}, r"d2align\.embed: .* trains at others: use"),
        ({**direct(), "gardo": {"auxiliary": ["gold"]}, "watch": {"gold": {"plugin": f"{DATA}/redness.py:Redness"}}},
         r"gardo\.diversity: group_mean shapes advantages"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_at_its_key(config_file: Any, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        load_config(config_file("mistake", **sections))
    assert "\n" not in str(caught.value)


def test_two_braces_are_all_of_the_released_code(config_file: Any) -> None:
    section = load_config(config_file("run", **direct())).direct
    assert (section.align, section.pair) == (Align(), Pair())
    assert section.trained_steps(None) == 2 and DirectSection().trained_steps(None) == 1  # type: ignore[arg-type]
    many = load_config(config_file("many", **direct(timesteps=7)))  # levels of its own, not the schedule's three
    assert many.objective_section.trained_steps(many.rollout) == 14


def test_srpo_is_cited_where_it_is_on() -> None:
    plain, on = (_cited(methods()["direct"], DirectSection(align=align)) for align in (None, Align()))
    assert "2509.06942" not in plain and "[SRPO](https://arxiv.org/abs/2509.06942)" in on
