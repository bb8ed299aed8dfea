"""The parts of the live page, each as HTML, made anew where the files behind it have changed.

The run may be writing them meanwhile, on another machine: what cannot be read yet is said in the part's place, and read
again when it has changed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from diffrl.errors import UserError, foreign, in_one_line
from diffrl.methods import ballots
from diffrl.methods.groups import FOLDER, INDEX, Listed, epochs_of, read_groups, read_json
from diffrl.records.lock import renewed
from diffrl.report.data import read_run
from diffrl.report.page import escape, section
from diffrl.report.sections import curves, headline, optimisation, samples
from diffrl.reward_tools.bradley_terry import NORMAL

_LOADER = ChoiceLoader([PackageLoader("diffrl.watch"), PackageLoader("diffrl.report")])  # whose style sheet it is
TEMPLATES = Environment(loader=_LOADER, autoescape=True, undefined=StrictUndefined)
NAMES = ("votes", "run", "answered", "groups", "samples")  # of the methods that make the parts
MOST_SCORES = 4  # under an image


@dataclass
class Parts:
    """The parts of a run's page; `make` is called in one thread at a time: charts are not made in two."""

    run_dir: Path
    _made: dict[str, tuple[str, str]] = field(default_factory=dict)

    def stamps(self) -> dict[str, str]:
        """By a part's name what changes when its files do."""
        run, drawn = self.run_dir, epochs_of(self.run_dir, "samples")
        kept, asked = epochs_of(run, FOLDER), epochs_of(run, ballots.FOLDER)
        waits = asked[0][1] if asked else run / "none"
        files = {
            "votes": [waits / INDEX, waits / ballots.CLOSED],
            "answered": [waits / INDEX, waits / ballots.CLOSED],
            "run": [run / "metrics.jsonl", run / "config.yaml"],
            "groups": [path / INDEX for _, path in kept[:1]],
            "samples": [path for _, path in drawn[:1]],
        }
        stamps = {name: " ".join(map(_stamp, paths)) for name, paths in files.items()}
        stamps["votes"] += f" {ballots.open_epoch(run) is not None}"  # as long as the run waits
        stamps["run"] += f" {renewed(run)}"  # running, or stopped
        return stamps

    def make(self, name: str, stamp: str) -> str:
        """The part's HTML; the one that was made, if it is of this stamp."""
        if name not in self._made or self._made[name][0] != stamp:
            try:
                with foreign(self.run_dir):
                    text = getattr(self, name)()
            except (UserError, OSError) as error:
                reason = str(error) if isinstance(error, UserError) else in_one_line(error)
                text = f'<p class="warning">{escape(reason)}</p>'
            self._made[name] = stamp, text
        return self._made[name][1]

    def run(self) -> str:
        if not (self.run_dir / "metrics.jsonl").exists():
            return f'<h1>{escape(self.run_dir.resolve().name)}</h1><p class="note">No epoch has ended yet.</p>'
        data = read_run(self.run_dir)
        return headline(data) + curves(data) + optimisation(data)

    def samples(self) -> str:
        return samples(read_run(self.run_dir))

    def groups(self) -> str:
        for epoch, path in epochs_of(self.run_dir, FOLDER):
            if groups := read_groups(path):
                body = "".join(_strip(group, FOLDER, self._captions(group)) for group in groups)
                return section(f"Newest groups: epoch {epoch}", body, "Images that this epoch was trained on.")
        note = "This run keeps no groups of its training images; tracking.groups=4 keeps four of the newest epoch."
        return f'<p class="note">{note}</p>'

    def votes(self) -> str:
        """What is asked now."""
        asked = ballots.open_epoch(self.run_dir)
        return "" if asked is None else TEMPLATES.get_template("ask.html.j2").render(asked=asked, folder=ballots.FOLDER)

    def answered(self) -> str:
        """The last epoch that was voted on."""
        for epoch, path in epochs_of(self.run_dir, ballots.FOLDER):
            ended = read_json(path / ballots.CLOSED)
            if not ended.get("votes"):
                continue
            body = "".join(self._answered(read_groups(path), ended))
            note = "Bradley-Terry scores of the votes, with 95 % intervals, in logits."
            return section(f"Voted on: epoch {epoch}", body, note)
        return ""

    def _captions(self, group: Listed) -> list[str]:
        names = list(group.scores)[:MOST_SCORES]
        values = [[(name, group.scores[name][i]) for name in names] for i in range(len(group.images))]
        return [" · ".join(f"{name} {value:.3g}" for name, value in row if value is not None) for row in values]

    def _answered(self, groups: Sequence[Listed], ended: dict[str, Any]) -> list[str]:
        rows = []
        try:
            for group, scores, errors in zip(groups, ended["scores"], ended["errors"], strict=True):
                if None not in scores:
                    pairs = zip(scores, errors, strict=True)
                    captions = [f"{score:+.2f} ± {NORMAL * error:.2f}" for score, error in pairs]
                    rows.append(_strip(group, ballots.FOLDER, captions))
        except (LookupError, TypeError, ValueError):  # half of a folder that is being copied
            return []
        return rows

    def state(self) -> dict[str, Any]:
        """What the page asks for every other second."""
        asked = ballots.open_epoch(self.run_dir)
        waits = None
        if asked is not None:
            waits = {"epoch": asked.epoch, "left": round(asked.until - time.time()), "groups": len(asked.groups)}
        return {"parts": self.stamps(), "asked": waits}


def _strip(group: Listed, folder: str, captions: Sequence[str]) -> str:
    return TEMPLATES.get_template("strip.html.j2").render(
        group=group, folder=folder, cells=list(zip(group.images, captions, strict=True))
    )


def _stamp(path: Path) -> str:
    try:
        facts = path.stat()
    except OSError:
        return "-"
    return f"{path.parent.name}/{path.name}:{facts.st_mtime_ns}:{facts.st_size}"


def page(run: Path, locked: bool) -> str:
    """The page itself, which fetches its parts; `locked`: one that asks for the token."""
    name = run.resolve().name
    return TEMPLATES.get_template("watch.html.j2").render(name=name, locked=locked, parts=NAMES)
