"""What a report takes from the cards of a config's rewards, where the run itself has recorded nothing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from diffrl.errors import UserError
from diffrl.rewards.protocol import lower_is_better
from diffrl.rewards.registry import available, load_class


def lower_by_config(config: Mapping[str, Any]) -> set[str]:
    """Names among a config's `rewards` and `watch` of which lower is better, for a run that has recorded none.

    Only installed plugins are asked: to show a run must not execute a file that its config names.
    """
    classes = {}
    for table in ("rewards", "watch"):
        for name, entry in (config.get(table) or {}).items():
            plugin = (entry or {}).get("plugin") or name
            if plugin in available():
                with suppress(UserError):  # broken since the run; the report can do without
                    classes[name] = load_class(plugin)
    measuring, lower = config.get("evaluate") or {}, lower_is_better(classes)
    names = {f"{student}/{name}" for student in measuring.get("also") or {} for name in lower}
    return {*lower, *names}
