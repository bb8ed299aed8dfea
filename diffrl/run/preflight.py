"""Calls each user-supplied reward once on random images before the model is loaded, so that errors surface early."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

from diffrl.errors import UserError
from diffrl.prompts import load_prompts
from diffrl.rewards.answers import applies
from diffrl.rewards.building import Entry, build_rewards
from diffrl.rewards.local import is_local
from diffrl.rewards.protocol import RewardError
from diffrl.rewards.registry import is_module
from diffrl.rewards.scoring import Scorer
from diffrl.worlds import worlds

if TYPE_CHECKING:
    from diffrl.config import Config

UNKNOWN = 512  # pixels, where only the model itself would say how large its images are


def smoke_test_rewards(config: Config, device: torch.device) -> None:
    """Score two random images of the run's size with each `path/to/file.py:Class` of the config, by itself.

    They are built for this alone, and dropped: the run builds its own, from the same state of the random numbers.

    Raises:
        UserError: a reward cannot be built, or fails; which one, how, and the command that shows more.
    """
    files = [
        (f"{table}.{name}", name, entry, entry.plugin)
        for table in ("rewards", "watch")
        for name, entry in getattr(config, table).items()
        if entry.plugin is not None and (".py:" in entry.plugin or is_local(entry.plugin) or is_module(entry.plugin))
    ]
    if not files:
        return
    from diffrl.process_state import unchanged_by

    prompts = load_prompts(config.prompts.train)
    trained = config.rollout.resolution or (worlds()[config.model].resolution if config.model in worlds() else UNKNOWN)
    judged = config.evaluate.resolution or trained
    gc.freeze()  # the collection then looks at what the rewards made alone: among all objects it takes up to a second
    try:
        for key, name, entry, plugin in files:
            given = trained if key.startswith("rewards.") else judged
            width, height = (given, given) if isinstance(given, int) else given
            images = torch.rand(2, 3, height, width, generator=torch.Generator().manual_seed(0)).to(device)
            reward = build_rewards({name: Entry(plugin, entry.arguments, column=entry.column)}, device)[name]
            scorer = Scorer({name: reward}, plugins={name: plugin}, retries=entry.retries, timeout=entry.timeout)
            try:
                with unchanged_by(name):
                    prompt = next((p for p in prompts if applies(reward, p.text, p.metadata)), None)
                if prompt is not None:  # one that applies to nothing is refused later
                    scorer.score(images, [prompt, prompt], torch.zeros(2, dtype=torch.int64))
                if scorer.writing:  # a run hands out copies, but others need not
                    raise UserError(f"{key}: it writes into the images that it is given; let it work on images.clone()")
            except RewardError as error:
                raise UserError(f"{key}: on two random images of {width} x {height} pixels, {error}") from error
            finally:
                del reward, scorer
    finally:
        gc.collect()
        gc.unfreeze()
    if device.type == "cuda":
        torch.cuda.empty_cache()
