"""The command `diffrl objectives`: list them, check one; and the file that `diffrl init --objective` writes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from diffrl.cli.arguments import subcommand
from diffrl.errors import UserError

OBJECTIVE = '''"""The objective `{name}`: regression to what is better than its group. Put yours in its place.

    L = (exp(A / tau) - 1) mean (v_theta - v)^2
"""

from __future__ import annotations

from torch import Tensor

from diffrl.config.base import Method, key
from diffrl.config.methods import ForwardProcess
from diffrl.policy import Policy
from diffrl.objectives.objective import Objective
from diffrl.objectives.rows import Noising, Rows


class Keys(ForwardProcess):
    """The config's section `{name}`: what stands here may be set, with these defaults and limits."""

    method = Method(
        "{name}",
        title="{cls}",
        papers={{"{cls}": "2501.00000"}},  # name: arXiv number
        about="one line that help, reports and model cards show",
    )
    tau: float = key(1.0, "temperature of the advantages", gt=0)
    beta: float = key(0.0, "weight of mean (v_theta - v_ref)^2; 0 runs no reference forward", ge=0)


class {cls}(Objective):
    """Built from its section of the config."""

    section = Keys

    def __init__(self, keys: Keys) -> None:
        super().__init__(beta=keys.beta, advantage_std="group", noising=Noising.of(keys))
        self.tau = keys.tau

    def scalars(self, policy: Policy, rows: Rows) -> Tensor:
        """phi (b, 1): the error of the velocity, differentiable."""
        rows.prediction = policy.predict(rows.x_t, rows.t, rows.cond, rows.guidance)
        return (rows.prediction.v - rows.velocity(policy.process)).square().flatten(1).mean(1, keepdim=True)

    def loss(self, phi: Tensor, rows: Rows) -> Tensor:
        """(K,) summed over the rows; advantages (b, K) have a column for each reward that is balanced, or one."""
        return self.plain(phi, rows.advantages)

    def plain(self, phi: Tensor, advantages: Tensor) -> Tensor:
        """The equation alone: `diffrl objectives check` compares it in float64."""
        return (((advantages / self.tau).exp() - 1) * phi).sum(0)
'''

TEST = '''"""`{name}` does what the loop, a resume and other methods count on."""

from pathlib import Path

import pytest

from diffrl.conformance.objective import CHECKS, Case

FILE = Path(__file__).with_name("{name}.py")


@pytest.mark.parametrize("what", CHECKS)
def test_it_conforms(what: str, tmp_path: Path) -> None:
    print(CHECKS[what](Case(f"{{FILE}}:{cls}", tmp_path)))
'''


def add(add: Callable[..., Any]) -> None:
    """Register the command and its actions with the command line's `add`."""
    text = "objectives and their wrappers: list them, or check one of your own"
    command = add(
        "objectives", None, text, "diffrl objectives list", "diffrl objectives check my_objective.py:MyObjective"
    )
    action = partial(subcommand, command.add_subparsers(metavar="list|check", required=True))
    action("list", _list, "list the objectives and their wrappers", "diffrl objectives list")
    text = "check what the loop, a resume and other methods require"
    check = action("check", _check, text, "diffrl objectives check my_objective.py:MyObjective")
    check.add_argument("objective", metavar="NAME|FILE.py:CLASS", help="an objective's name, or a file of your own")


def _check(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.config.door import find_objective

    find_objective(arguments.objective)
    from diffrl.conformance.objective import check

    bad = 0
    for what, holds, seen in check(arguments.objective):
        print(f"{'ok    ' if holds else 'FAILED'} {what}: {seen}", flush=True)
        bad += not holds
    return 1 if bad else 0


def _list(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.config.door import methods
    from diffrl.plugins import installed

    kinds = {"objective": "", "credit": " (credit over the steps)"}
    for name, method in methods().items():
        print(f"{name:<12} {method.meaning()}{kinds.get(method.kind, ' (around an objective)')}")
    for name, entry in installed("method").items():
        if name not in methods():
            print(f"{name:<12} installed: {entry.value}")
    return 0


def write_objective(name: str, folder: Path) -> list[Path]:
    """`NAME.py` and its test in a folder; UserError for a name that is taken or none, or a file that is there."""
    from diffrl.config.door import is_method
    from diffrl.config.schema import INSIDE

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f'init: --objective: "{name}": small letters, digits and "_", beginning with a letter')
    if name in INSIDE or is_method(name):
        raise UserError(f'init: --objective: "{name}" is a section of every config already; choose another name')
    cls = "".join(word.capitalize() for word in name.split("_"))
    texts = {folder / f"{name}.py": OBJECTIVE, folder / f"test_{name}.py": TEST}
    for file in texts:
        if file.exists():
            raise UserError(f'init: --objective: "{file}" exists already; choose another name')
    for file, text in texts.items():
        file.write_text(text.format(name=name, cls=cls), encoding="utf-8")
    return list(texts)
