"""What `diffrl train` loads before it knows its config: the number only goes down, and what has left stays out."""

from __future__ import annotations

import json
import subprocess
import sys

MOST = 14_020  # lines of ours that `import diffrl.run.train` loads, docstrings included
# Modules that no run needs before its config asks for them.
OUTSIDE = (
    "diffrl.api",
    "diffrl.cli",
    "diffrl.conformance",
    "diffrl.divgen",
    "diffrl.drawing",
    "diffrl.image_sets.reading",
    "diffrl.memory",
    "diffrl.methods",
    "diffrl.policy.quantised",
    "diffrl.policy.sharding",
    "diffrl.report",
    "diffrl.reward_tools",
    "diffrl.rewards.learning",
    "diffrl.serving",
    "diffrl.sharing",
    "diffrl.sweep",
    "diffrl.watch",
    "diffrl_lab",
    "diffrl_playground",
    "diffrl_zoo",
)
LOADED = """
import json, sys
import diffrl.run.train
ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0].startswith("diffrl")}
print(json.dumps({name: len(open(m.__file__, "rb").read().splitlines()) for name, m in ours.items() if m.__file__}))
"""


def test_what_a_training_loads_before_its_config_asks_for_more() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    lines: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    inside = sorted(name for name in lines if any(name == one or name.startswith(f"{one}.") for one in OUTSIDE))
    assert not inside, f"no run needs these before its config asks for them: {inside}"
    assert sum(lines.values()) <= MOST, f"{len(lines)} modules with {sum(lines.values())} lines; at most {MOST}"
