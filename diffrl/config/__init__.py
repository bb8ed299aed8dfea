"""The config: one YAML file per run, strictly checked before anything heavy is imported.

Who has a `Config` already, such as a run, loads nothing that reads or checks one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from diffrl.config.schema import Config

if TYPE_CHECKING:
    from diffrl.config.checks import check_model, check_plugin
    from diffrl.config.load import dump, find_config, load_config, make_config
    from diffrl.config.overrides import read_parameters

__all__ = [
    "Config",
    "check_model",
    "check_plugin",
    "dump",
    "find_config",
    "load_config",
    "make_config",
    "read_parameters",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    home = "checks" if name.startswith("check_") else "overrides" if name == "read_parameters" else "load"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
