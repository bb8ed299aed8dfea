"""What `diffrl doctor` counts for every part, made beforehand on any machine and read where the GPU is.

A network of true size takes one core half a minute to count, in which the GPU would wait: where nothing is counted, a
guess has to do, and the part has no `counted_gib`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from diffrl.config import Config
from diffrl.errors import UserError
from diffrl.memory.advice import advise
from diffrl.memory.fit import GIB, Fit, estimate

ROOMY = 70 * GIB  # a card on which the parts were tried as they are
SMALLER = ["optimise.gradient_checkpointing=true", "optimise.micro_batch=1", "rollout.batch_size=1"]


class Estimates:
    """For each part its fits: of the config as it is, and of what doctor has advised instead, with those overrides.

    Args:
        facts: what the counts depend on. Those of another size are refused; `stale` names what else differs.
        path: read if it is there.
        guess: count nothing here.
    """

    def __init__(self, facts: dict[str, str], path: Path | None = None, guess: bool = False) -> None:
        self.facts, self.guess, self.fits = facts, guess, dict[str, list[tuple[list[str], Fit]]]()
        self.stale: list[str] = []
        if path is None:
            return
        try:
            found: Any = json.loads(path.read_text(encoding="utf-8"))
            other = dict(found["facts"])
            self.fits = {n: [(words, Fit(**fit)) for words, fit in pairs] for n, pairs in found["fits"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: not a file that --count wrote ({type(error).__name__})") from error
        if other.get("size") != facts["size"]:
            raise UserError(
                f"{path}: counted at size {other.get('size')}, here it is {facts['size']}: --count it again"
            )
        self.stale = [f"{name} {other.get(name)}" for name, value in facts.items() if other.get(name) != value]

    def write(self, path: Path) -> None:
        fits = {n: [(words, dataclasses.asdict(fit)) for words, fit in pairs] for n, pairs in self.fits.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"facts": self.facts, "fits": fits}, indent=1) + "\n", encoding="utf-8")

    def fitting(self, name: str, config: Config, free: float) -> tuple[list[str], Fit | None]:
        """Overrides with which the part's config fits into `free` bytes, and its count; UserError if nothing helps."""
        known = self.fits.setdefault(name, [])
        if not known and self.guess:
            return [] if free >= ROOMY else SMALLER, None
        if not known:
            known.append(([], estimate(config)))
        for overrides, fit in known:
            if fit.total <= free:
                return overrides, fit
        found = advise(config, int(free), fit=known[0][1])
        if found is None:
            raise UserError(f"doctor: it does not fit into {free / GIB:.0f} GiB, whatever is saved")
        known.append((found[1], found[0]))
        return known[-1]
