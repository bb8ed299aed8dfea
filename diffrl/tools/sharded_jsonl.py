"""Work in pieces that goes on where it was broken off: rows that several processes write as they finish, in any order.

`FOLDER/job.json` says what the work is; `FOLDER/parts/RANK.jsonl` has a process's finished rows, each with its `place`;
when all are there they become one file in the order of their places.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffrl.errors import UserError, foreign
from diffrl.records.disk import append_line, write_json, write_text

if TYPE_CHECKING:
    from accelerate import Accelerator

JOB, PARTS = "job.json", "parts"


class ShardedJsonl:
    """The rows of a folder. `rows`: the name of the file that they become; `noun`: what a user calls it all."""

    def __init__(self, folder: Path, rows: str, noun: str) -> None:
        self.folder, self.file, self.noun = folder, folder / rows, noun

    def claim(self, record: Mapping[str, Any]) -> None:
        """Make the folder, or see that it is this work's; by one process, before any writes.

        Raises:
            UserError: the folder holds the rows of other work.
        """
        wanted = json.loads(json.dumps(record, default=str))
        job = self.folder / JOB
        if job.exists():
            with foreign(job):
                before = dict(json.loads(job.read_text(encoding="utf-8")))
            if differing := [key for key in {**before, **wanted} if before.get(key) != wanted.get(key)]:
                what = f"holds a {self.noun} that was drawn with another {', '.join(differing)}"
                raise UserError(f"--out: {self.folder} {what}; name another")
        elif self.file.exists():
            raise UserError(f"--out: {self.folder} holds a {self.noun} that diffrl has not drawn; name another folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.file.exists():
            (self.folder / PARTS).mkdir(exist_ok=True)
        write_json(job, wanted)

    def rows(self) -> dict[int, dict[str, Any]]:
        """The rows that are written, by their places; the end of a line that a kill cut off is none."""
        if self.file.exists():
            return dict(enumerate(map(json.loads, self.file.read_text(encoding="utf-8").strip().split("\n"))))
        rows: dict[int, dict[str, Any]] = {}
        for file in sorted((self.folder / PARTS).glob("*.jsonl")):
            for line in file.read_text(encoding="utf-8").split("\n"):
                try:
                    row = json.loads(line)
                    rows[int(row.pop("place"))] = row
                except (ValueError, TypeError, KeyError, AttributeError):
                    continue
        return rows

    def share(self, count: int, accelerator: Accelerator) -> tuple[list[int], int]:
        """Of `count` places those that this process is to do, and how many are left for all; all ask together."""
        there = self.rows()
        missing = [i for i in range(count) if i not in there]
        accelerator.wait_for_everyone()  # all have read what is there before anyone adds to it
        rank, world = accelerator.process_index, accelerator.num_processes
        return missing[rank * len(missing) // world : (rank + 1) * len(missing) // world], len(missing)

    def add(self, rank: int, place: int, row: Mapping[str, Any]) -> None:
        """Write a finished row; a kill may have left half a line before it. DiskError."""
        part = self.folder / PARTS / f"{rank:04d}.jsonl"
        append_line(part, json.dumps({"place": place, **row}))

    def gather(self, count: int) -> None:
        """One file of all `count` rows, by one process, after all have written theirs."""
        if (self.folder / PARTS).is_dir():
            rows = self.rows()
            write_text(self.file, "".join(json.dumps(rows[i]) + "\n" for i in range(count)))
            shutil.rmtree(self.folder / PARTS)
