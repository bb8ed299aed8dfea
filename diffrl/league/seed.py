"""`python -m diffrl.league.seed TASK.json`: one seed of an experiment, in a process of its own; see `running`.

The file has the keys of a `Task`, and `out`: where the seed's part of a result goes. Exit codes as of `diffrl`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from diffrl.config import load_config
from diffrl.errors import UserError, say
from diffrl.league.judge import Task, one_seed
from diffrl.league.results import result_of, write
from diffrl.run.interrupt import EXIT_CODE, Interrupted


def main(file: Path) -> int:
    values = json.loads(file.read_text(encoding="utf-8"))
    out, strip = Path(values.pop("out")), values.pop("strip")
    for key in ("folder", "runs"):
        values[key] = Path(values[key])
    task = Task(**values, strip=None if strip is None else Path(strip))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        part = one_seed(task)
    except Interrupted as ended:
        say(f"diffrl: {ended}: saved")
        return EXIT_CODE
    except UserError as error:
        say(f"diffrl: error: {error}")
        return 2
    settings = {"prompts": task.prompts, "per_prompt": task.per_prompt}
    config = load_config(task.config, task.overrides).resolved()
    write(out, result_of([part], "", config, settings))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
