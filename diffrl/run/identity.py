"""What the names in a config stand for, as digests: prompts' texts, the model's files, code of rewards
and of an objective from outside."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path

from diffrl.config import Config
from diffrl.config.door import load
from diffrl.policy import find_model
from diffrl.prompts import load_prompts
from diffrl.records.identity import Identity
from diffrl.rewards.protocol import Reward
from diffrl.rewards.wrappers import identity_of, stamp


def contents(config: Config, rewards: Mapping[str, Reward]) -> Identity:
    """The part of a run's identity that its config only names. `rewards`: as they were built.

    A model behind a hub's name is taken to stay as it is.
    """
    # An epoch's prompts are a function of seed, epoch and this list, so a resume must find the same list.
    prompts = [[prompt.text, dict(prompt.metadata)] for prompt in load_prompts(config.prompts.train)]
    found: Identity = {"prompts.train (texts)": _digest(prompts)}
    if Path(source := find_model(config.model)[0]).is_dir():
        found["model (files)"] = _digest(stamp(source))
    if config.outside is not None:
        code = inspect.getsourcefile(load(config.objective))
        found["objective (code)"] = _digest(Path(code).read_text(encoding="utf-8")) if code else ""
    for name, entry in config.rewards.items():
        identity = identity_of(entry.plugin or name, entry.arguments, rewards[name])
        found[f"rewards.{name} (code and files)"] = identity[:16]
    return found


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
