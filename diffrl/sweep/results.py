"""What a sweep came to: its summary on the terminal, and `OUT/sweep.json`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diffrl.records.disk import write_json
from diffrl.report.groups import Difference, Group, Value, group, names_of
from diffrl.report.tables import as_text
from diffrl.sweep.plan import Member
from diffrl.version import __version__

NAME = "sweep.json"


def conclude(members: Sequence[Member], failed: Collection[str], command: str, out: Path) -> str:
    """Write `out`/sweep.json and return the summary: each group's means over the seeds that are finished.

    `failed`: the names of the jobs that failed in this start.
    """
    finished = [member for member in members if member.finished]
    groups = group([member.folder for member in finished])
    names = {member.folder.resolve(): member.name for member in finished}
    for one in groups:  # by what the sweep calls them, not by their paths
        one.name = names[one.first.folder.resolve()]
    rows = [{"name": m.name, "seed": m.seed, "folder": str(m.folder), "log": str(m.log)} for m in members]
    for row, member in zip(rows, members, strict=True):
        row["state"] = "done" if member in finished else "failed" if member.job.name in failed else "not finished"
    content = {"command": command, "diffrl_version": __version__, "runs": rows, "groups": [*map(_to_json, groups)]}
    write_json(out / NAME, content)
    left = len(members) - len(finished)
    head = f"{len(finished)} of {len(members)} runs are done" + (f", {left} are not" if left else "")
    if not finished:
        return head
    what = "\nHeld-out means over seeds ± half their 95 % interval, then the change since\n"
    what += "before training (p: paired t-test over prompts, the same noise):"
    more = f"compare: diffrl compare {out} --out {out / 'sweep.html'} --table {out / 'sweep.md'}"
    return f"{head}{what}\n{as_text(groups)}\n{more}"


def _to_json(one: Group) -> dict[str, Any]:
    values = {
        name: {
            "before": _plain(one.value(name, one.epochs[0])),
            "after": _plain(one.value(name)),
            "change": _plain(one.gain(name)),
        }
        for name in names_of([one])
    }
    seconds = one.seconds(one.epoch)
    return {"name": one.name, "seeds": [*one.runs], "epoch": one.epoch, "seconds": _plain(seconds), "values": values}


def _plain(value: Value | Difference | None) -> dict[str, Any] | None:
    return None if value is None else asdict(value)
