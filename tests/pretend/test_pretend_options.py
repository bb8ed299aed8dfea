"""Every speed option on the pretend device, against the plain path there (tests/speed_options.py is the table)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from speed_options import METHODS, OPTIONS, assert_same, first_gradient, traced

from diffrl.config import load_config


@pytest.mark.parametrize("method", METHODS)
def test_an_option_leaves_the_gradient(config_file: Any, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr("diffrl.run.device.compile_blocks", traced)

    def gradient(name: str, *words: str) -> torch.Tensor:
        path = config_file(name, **METHODS[method])
        return first_gradient(load_config(path, list(words)))

    plain = gradient("plain")
    for name, (words, tolerance) in OPTIONS.items():
        assert_same(gradient(name, *words), plain, tolerance)
    torch.compiler.reset()
