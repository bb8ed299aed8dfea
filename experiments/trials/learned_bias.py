"""Has a preference model that learned during a training lost the bias that the playground's raters have?

    python -m experiments.trials.learned_bias "Adv-GRPO=runs/league/*-adv_preference-*" --out learned_bias.json

Each folder that a pattern finds is a run whose reward learned; the reward is taken from its last checkpoint. Its scores
of renderings of unseen prompts, some of whose facts are wrong, are regressed on what is right, stripes and pale tones,
as in `fitted_bias.py`, beside those of the published model.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fitted_bias import PLANTED, Renderings
from safetensors.torch import load_file

from diffrl import __version__
from diffrl.config import load_config
from diffrl.reward_kinds.learning import restore
from diffrl.rewards import load_reward
from experiments import command
from experiments.league.results import commit, write


def learned(folder: Path) -> Any:
    """The reward of a run that learns, as it was at the last checkpoint."""
    tensors = load_file(sorted(folder.glob("checkpoints/step-*"))[-1] / "learning.safetensors")
    name = next(iter(tensors)).partition("/")[0]
    entry = load_config(folder / "config.yaml").rewards[name]
    reward: Any = load_reward(entry.plugin or name, **entry.arguments)
    restore({name: reward}, tensors)
    return reward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="NAME=PATTERN")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--judged", type=int, default=4000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shown = Renderings(arguments.judged, np.random.default_rng(7))
    result: dict[str, Any] = {"command": command(), "diffrl_version": __version__, "commit": commit()}
    result |= {"judged": arguments.judged, "planted": PLANTED}
    result["published"] = [shown.regressed(shown.scores(load_reward("preference")))]
    for text in arguments.runs:
        name, _, pattern = text.partition("=")
        folders = [file.parent for file in sorted(Path().glob(f"{pattern}/config.yaml"))]
        if not folders:
            parser.error(f"{pattern}: no such run")
        result[name] = [shown.regressed(shown.scores(learned(folder))) for folder in folders]
    write(arguments.out, result)


if __name__ == "__main__":
    main()
