"""What a program or the command line hands over for a training becomes a checked config.

What only a program has, prompts and rewards that are in no file, is `diffrl.prepare.handed_over`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffrl.config import Config, make_config
from diffrl.errors import UserError
from diffrl.resources import file_of_run

if TYPE_CHECKING:
    from diffrl.prepare.handed_over import Rewards

Base = str | Path | Config | Mapping[str, Any]


def prepare(
    config: Base | None,
    overrides: Sequence[str] = (),
    *,
    rewards: Rewards | None = None,
    watch: Rewards | None = None,
    resume: str | Path | None = None,
    values: Mapping[str, Any] | None = None,
    outside: str = "argument",
) -> tuple[Config, Path | None]:
    """The checked config of a training, and the folder of the run that it continues (see `train`).

    `outside`: what messages call the place of overrides and values.
    """
    changes = dict(values or {})
    for name, given in (("rewards", rewards), ("watch", watch)):
        if given is not None:
            from diffrl.prepare.handed_over import entries

            changes[name] = entries(given, name)
    if str(resume) == "auto" and config is None:
        raise UserError("--resume auto: give CONFIG, too; it says where the run's folder is (run_dir)")
    stored: Path | None = None
    if "torch" in sys.modules:  # where there are other processes they have met, so that it is here
        from diffrl.prepare.hand_on import agree

        agree(None if resume is None else str(resume))
    from diffrl.files import is_address

    if str(resume).startswith("hub:") or is_address(str(resume)):
        from diffrl.config.overrides import override
        from diffrl.config.source import Source
        from diffrl.pushing.hub import fetch

        named = Source("", {}, outside=outside)
        for word in overrides:
            if not isinstance(word, str) or word.startswith("run_dir="):
                override(named, word)  # which refuses what is no text
        given = named.data | changes
        own = None if config is None else _made(config, overrides, changes, outside).run_dir
        resume = fetch(str(resume), given.get("run_dir", own))
    if resume is not None and str(resume) != "auto":
        _hand_on(Path(resume))
        stored = file_of_run(Path(resume), "config.yaml", "--resume")
    source = stored if config is None else config
    if source is None:
        raise UserError("train: no CONFIG; name a YAML file or a shipped config such as playground/nft")
    checked = _made(source, overrides, changes, outside)
    folder = Path(checked.run_dir) if str(resume) == "auto" else None if resume is None else Path(resume)
    if is_address(str(checked.checkpoint.push)):
        from diffrl.pushing.hub import from_store

        from_store(checked.checkpoint.push, Path(checked.run_dir), folder)
    if str(resume) == "auto":
        _hand_on(Path(checked.run_dir))
    if folder is None or not (folder / "config.yaml").is_file():
        return checked, None
    return checked.model_copy(update={"run_dir": str(folder)}), folder


def _hand_on(folder: Path) -> None:
    """See `diffrl.prepare.hand_on`."""
    if "torch" in sys.modules:
        from diffrl.prepare.hand_on import hand_on

        hand_on(folder)


def _made(source: Base, overrides: Sequence[str], changes: dict[str, Any], outside: str) -> Config:
    """The config, with lists of prompts written into the run's folder, and callables known to the registry."""
    if not changes and not isinstance(source, Mapping):
        return make_config(source, overrides, changes, outside=outside)
    from diffrl.prepare.handed_over import entries, filed, lists_of

    if isinstance(source, Mapping):
        given = {name: source[name] for name in ("rewards", "watch") if source.get(name) is not None}
        source = {**source, **{name: entries(table, name) for name, table in given.items()}}
    lists, more = lists_of(source), lists_of(changes)
    if not lists and not more:
        return make_config(source, overrides, changes, outside=outside)

    def config_with(folder: Path) -> Config:
        base = filed(source, lists, folder) if isinstance(source, Mapping) else source
        return make_config(base, overrides, filed(changes, more, folder), outside=outside)

    with tempfile.TemporaryDirectory() as there:  # all of it is checked before the run's folder has anything
        run_dir = config_with(Path(there)).run_dir
    return config_with(Path(run_dir) / "prompts")
