"""Fixtures of the policy's tests: one tiny pipeline, loaded once a module and copied for each test."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from tiny import SPEC

from diffrl.policy import Policy, load_policy


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> str:
    return str(tiny_model)


@pytest.fixture(scope="module")
def loaded(model: str) -> Policy:
    return load_policy(model, lora=SPEC)


@pytest.fixture
def policy(loaded: Policy) -> Policy:
    return copy.deepcopy(loaded)
