"""What `diffrl doctor` counts for every part, made beforehand on any machine and read where the GPU is.

A network of true size takes one core half a minute to count, in which the GPU would wait.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from diffrl.config import Config
from diffrl.errors import UserError
from diffrl.run.advice import advise
from diffrl.run.fit import Fit, estimate


class Estimates:
    """For each part its fits: of the config as it is, and of what doctor has advised instead, with those overrides.

    Args:
        facts: what the counts depend on. A file of others is refused.
        path: read if it is there.
    """

    def __init__(self, facts: dict[str, str], path: Path | None = None) -> None:
        self.facts, self.fits = facts, dict[str, list[tuple[list[str], Fit]]]()
        if path is None:
            return
        try:
            found: Any = json.loads(path.read_text(encoding="utf-8"))
            other = found["facts"]
            self.fits = {n: [(words, Fit(**fit)) for words, fit in pairs] for n, pairs in found["fits"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: not a file that --count wrote ({type(error).__name__})") from error
        for name, value in facts.items():
            if other.get(name) != value:
                raise UserError(f"{path}: counted with {name} {other.get(name)}, here it is {value}: --count it again")

    def write(self, path: Path) -> None:
        fits = {n: [(words, dataclasses.asdict(fit)) for words, fit in pairs] for n, pairs in self.fits.items()}
        path.write_text(json.dumps({"facts": self.facts, "fits": fits}, indent=1) + "\n", encoding="utf-8")

    def fitting(self, name: str, config: Config, free: float) -> tuple[list[str], Fit]:
        """Overrides with which the part's config fits into `free` bytes, and its count; UserError if nothing helps."""
        known = self.fits.setdefault(name, [])
        if not known:
            known.append(([], estimate(config)))
        for overrides, fit in known:
            if fit.total <= free:
                return overrides, fit
        found = advise(config, int(free), fit=known[0][1])
        if found is None:
            raise UserError(f"doctor: it does not fit into {free / 2**30:.0f} GiB, whatever is saved")
        known.append((found[1], found[0]))
        return known[-1]
