"""What rewards take of a device and of main memory, and the bytes that an epoch copies for those that are offloaded.

By what their classes say of their arguments (`footprint`): nothing is loaded. Weights that rewards share are counted
for each of them; what scoring itself takes, a batch's activations, is not counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from diffrl.config import Config
from diffrl.config.reward import Watched, read_on_training_images
from diffrl.errors import UserError
from diffrl.memory.footprint import footprint
from diffrl.rewards.kinds import kind_of
from diffrl.rewards.registry import load_class, takes

RATE = 10e9  # bytes a second between main memory and a device: PCIe 4.0 with 16 lanes; assumed, not measured


@dataclass(frozen=True)
class RewardMemory:
    """Bytes by the rewards' names: `resident` on the device all the time; `offloaded` until they score beside sampling;
    `exclusive`: offloaded, too, and alone on the device while they score (`offload: apart`).

    unknown: those on the device that do not say what they take. keys: `offload` of those that do and can be moved, by
    the config's. trained: names of those that score training images, too; evaluations ask the others alone.
    """

    resident: Mapping[str, int]
    offloaded: Mapping[str, int]
    exclusive: Mapping[str, int]
    unknown: tuple[str, ...]
    keys: tuple[str, ...]
    trained: frozenset[str]

    @property
    def host(self) -> int:
        """Of main memory."""
        return sum(self.offloaded.values()) + sum(self.exclusive.values())

    def copied(self, network: int) -> int:
        """In an epoch without its evaluation; a network of so many bytes makes room for those that are apart."""
        weights = sum(size for name, size in {**self.offloaded, **self.exclusive}.items() if name in self.trained)
        return weights + (2 * network if self.trained & self.exclusive.keys() else 0)


def reward_memory(config: Config) -> RewardMemory:
    """All rewards of a config, optimised and watched, each of those that are alike once: an evaluation asks them all.

    Raises UserError for a plugin that cannot be imported, or that refuses its arguments.
    """
    entries: dict[str, Watched] = {**config.rewards, **config.watch}
    places: dict[str, dict[str, int]] = {"beside": {}, "apart": {}, "stays": {}}
    unknown, keys, sizes = list[str](), list[str](), dict[str, int | None]()
    for name, entry in entries.items():
        plugin = entry.plugin or name
        if not takes(plugin, "device") or (entry.arguments.get("device") or "cuda") != "cuda":
            continue  # on the CPU, or a device that it was given
        key = json.dumps([plugin, entry.arguments], sort_keys=True, default=repr)
        again = key in sizes
        try:
            size = sizes[key] = sizes[key] if again else footprint(plugin, entry.arguments)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        if size is None:
            unknown.append(name)
        elif size:
            if not kind_of(load_class(plugin)).fixed:
                keys.append(f"{'rewards' if name in config.rewards else 'watch'}.{name}.offload")
            place = places["apart" if entry.offload == "apart" else "beside" if entry.offload else "stays"]
            place |= {} if again else {name: size}
    trained = frozenset([*config.rewards, *read_on_training_images(config)])
    return RewardMemory(places["stays"], places["beside"], places["apart"], tuple(unknown), tuple(keys), trained)
