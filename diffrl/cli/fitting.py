"""`diffrl rewards fit` on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffrl.cli.arguments import at, number_between, only_parameters, whole_number
from diffrl.records.outputs import out_file


def add_fit(action: Callable[..., Any]) -> None:
    """Register it with the `action` of `diffrl rewards`."""
    text = "fit a head on a reward's embeddings to preferences, as a reward of your own"
    example = "diffrl rewards fit runs/nft/votes --out mine.safetensors"
    more = "diffrl rewards fit pairs.jsonl --on pickscore --out mine.safetensors"
    fit = action("fit", _fit, text, example, more, words_anywhere=True)
    fit.usage = "diffrl rewards fit SET [--on NAME [parameter=value ...]] --out FILE"
    text = "an image set with preferences: RUN_DIR/votes, a .jsonl or .parquet file, or a folder of them"
    fit.add_argument("set", metavar="SET", help=text)
    text = "a reward that embeds; its embeddings stay frozen (default clip)"
    fit.add_argument("--on", default="clip", metavar="NAME", help=text)
    fit.add_argument("--out", type=Path, required=True, metavar="FILE", help="the head, for the reward `fitted`")
    text = "the set's scores that say what is better (default preference)"
    fit.add_argument("--scores", default="preference", metavar="NAME", help=text)
    text = "share of the prompts that is held out to judge the head (default 0.2)"
    fit.add_argument("--held-out", type=number_between(0.01, 0.9), default=0.2, metavar="SHARE", help=text)
    text = "by how much the preferred one should lead, in logits (default 0)"
    fit.add_argument("--margin", type=number_between(0.0, 10.0), default=0.0, metavar="M", help=text)
    text = "of the split (default 0)"
    fit.add_argument("--seed", type=whole_number(0, 2**63 - 1), default=0, metavar="S", help=text)


def _fit(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.config import check_plugin, load_config, read_parameters
    from diffrl.resources import file_of_run
    from diffrl.stand_ins import check_reward

    only_parameters(arguments, rest)
    given = read_parameters(rest)
    at("--on", check_plugin, arguments.on)
    config = Path(arguments.set).parent / "config.yaml"
    if config.is_file():  # RUN_DIR/votes: pictures of the run's model
        model = load_config(file_of_run(config.parent, "config.yaml", "rewards fit")).model
        at("--on", lambda on: check_reward(model, on, given), arguments.on)
    out = out_file(arguments.out, "--out", "mine.safetensors")
    from diffrl.reward_tools.fit import fit_head, lines

    options = {"column": arguments.scores, "held_out": arguments.held_out, "margin": arguments.margin}
    figures = fit_head(arguments.set, out, arguments.on, given, seed=arguments.seed, **options)
    print("\n".join(lines(figures, arguments.on)))
    print(f"head: {out}; rewards: {{mine: {{plugin: fitted, head: {out}}}}}")
    return 0
