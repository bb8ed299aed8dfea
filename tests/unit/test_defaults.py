"""A trainer built in Python without arguments is the one that a config without keys builds."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from diffrl.config import methods, preferences
from diffrl.config.credit import TreeSection
from diffrl.trainers.crd import CRD
from diffrl.trainers.direct import Direct
from diffrl.trainers.dpo import DPO
from diffrl.trainers.gardo import Gardo
from diffrl.trainers.gdro import GDRO
from diffrl.trainers.grpo import GRPO
from diffrl.trainers.marble import Marble
from diffrl.trainers.nft import NFT
from diffrl.trainers.prdp import PRDP
from diffrl.trainers.rwr import Regression
from diffrl.trainers.tree import Branched

PAIRS: list[tuple[Any, Any]] = [
    (GRPO, methods.GRPO),
    (NFT, methods.NFT),
    (CRD, methods.CRD),
    (Direct, methods.Direct),
    (Marble, methods.Marble),
    (Gardo, methods.GARDO),
    (DPO, preferences.DPO),
    (GDRO, preferences.GDRO),
    (PRDP, preferences.PRDP),
    (Regression, preferences.RWR),
    (Branched, TreeSection),
]
# The paper's (by group), where the config takes what the authors released (over the batch): docs/differences.md.
APART = {("GRPO", "advantage_std"), ("CRD", "advantage_std")}


@pytest.mark.parametrize(("trainer", "section"), PAIRS, ids=lambda part: part.__name__)
def test_a_trainers_defaults_are_the_configs(trainer: Any, section: Any) -> None:
    compared = []
    for name, parameter in inspect.signature(trainer).parameters.items():
        field = section.model_fields.get(name)
        if field is None or parameter.default is inspect.Parameter.empty or field.is_required():
            continue
        if field.default_factory is None and (trainer.__name__, name) not in APART:
            mine, theirs = (list(x) if isinstance(x, tuple) else x for x in (parameter.default, field.default))
            assert mine == theirs, name
            compared.append(name)
    assert compared


def test_gardos_reference_is_reset_as_often_as_the_configs() -> None:
    assert inspect.signature(Gardo).parameters["reset_steps"].default == methods.GARDO().reset.steps
