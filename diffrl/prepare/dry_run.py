"""What `--dry-run` tries beyond reading the config: the first scores. Nothing is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from diffrl.config import Config
from diffrl.errors import printable
from diffrl.records.disk import check_writable
from diffrl.rewards.answers import applies
from diffrl.rewards.building import check_movable
from diffrl.rewards.registry import found
from diffrl.rollout import generate
from diffrl.run.describe import describe
from diffrl.run.evaluation import evaluation_spec
from diffrl.run.folder import RunFolder
from diffrl.run.peers import Peers
from diffrl.run.run import Run
from diffrl.run.start import find_start


def try_out(config: Config, folder: RunFolder, resumed: bool, override: Sequence[str], peers: Peers) -> None:
    """A run up to its first epoch, and the first scores."""
    folder.check_free()
    start = find_start(config, folder.path, resumed, override)
    run = Run(without_caches(config), folder, peers)
    start.compare(run.identity)
    try:
        if run.main:
            lines = [describe(run), *first_scores(run)]
            Console().print(printable("\n".join(lines)), soft_wrap=True, highlight=False, markup=False)
    finally:
        run.close()


def without_caches(config: Config) -> Config:
    """The config without its rewards' caches, which are files; UserError where one could not be made."""
    tables: dict[str, dict[str, Any]] = {}
    for table in ("rewards", "watch"):
        tables[table] = {}
        for name, reward in getattr(config, table).items():
            if reward.cache is not None:
                check_writable(Path(reward.cache), f"{table}.{name}.cache")
                plugin = reward.plugin or name
                check_movable(name, plugin, "cache", found(plugin))
            tables[table][name] = reward.model_copy(update={"cache": None})
    return config.model_copy(update=tables)


def first_scores(run: Run) -> Iterator[str]:
    """One line for each optimised reward: its scores of one group of the model before training, and their spread.

    Raises:
        RewardError: a reward cannot judge the model's images.
    """
    config, size = run.config, run.config.rollout.group_size
    names = [name for name in run.scorer.names if name in config.rewards and name not in run.scorer.asking]
    stream = run.source.stream
    prompts = [stream.prompts[i] for i in stream.batch(0)]
    done: set[str] = set()
    for prompt in prompts:
        fresh = [
            name
            for name in names
            if name not in done and applies(run.scorer.rewards[name], prompt.text, dict(prompt.metadata))
        ]
        if not fresh:
            continue
        parts = generate(
            run.policy,
            [prompt],
            evaluation_spec(config),
            seed=config.seed,
            per_prompt=size,
            batch_size=config.rollout.batch_size,
        )
        images = torch.cat([images for _, images in parts])
        scores = run.scorer.score(images, [prompt] * size, torch.zeros(size, dtype=torch.int64))
        for name in fresh:
            done.add(name)
            column = scores[:, run.scorer.names.index(name)]
            mean, std = float(column.mean()), float(column.std(correction=0))
            line = f'{name}: {mean:.4g} +- {std:.3g} over {size} images of "{prompt.text}"'
            flat = std <= 1e-6 * abs(mean)
            yield f"WARNING: {line}: no spread, so nothing would be learned from them" if flat else line
    for name in names:
        if name not in done:
            yield f"WARNING: {name}: applies to none of the first epoch's prompts"
