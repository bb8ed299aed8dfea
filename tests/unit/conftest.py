"""Fixtures of the policy's tests: one tiny pipeline, loaded once a module and copied for each test."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from tiny import SPEC

from diffrl.policy import Policy, load_policy

DRAWN = ("d2align", "dial", "disks", "foreign_files", "gardo", "groups", "marble_method", "report", "verdict")


@pytest.fixture(autouse=True)
def _blank(request: pytest.FixtureRequest) -> None:
    """Reports of whole runs have no lines in their charts, but in tests of reports."""
    if request.path.stem.removeprefix("test_") not in DRAWN:
        request.getfixturevalue("blank_charts")


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> str:
    return str(tiny_model)


@pytest.fixture(scope="module")
def loaded(model: str) -> Policy:
    return load_policy(model, lora=SPEC)


@pytest.fixture
def policy(loaded: Policy) -> Policy:
    return copy.deepcopy(loaded)
