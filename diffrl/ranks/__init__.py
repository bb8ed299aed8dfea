"""The ranks of one training: how they meet, and watch that each of them lives. `diffrl.run.train` is given them."""

from __future__ import annotations

import os

from diffrl.run.peers import Peers

COUNTS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # as accelerate reads them


def joined() -> Peers:
    """The other processes, once all have met: before one of them reads what may differ between machines, such as a
    config, prompts, a plugin, a token or a cache, so that an error of one ends all, and is said on each machine.

    Raises:
        UserError: not all came, or they have other versions or launch settings; which, and on which machine.
    """
    if all(os.environ.get(name, "1") == "1" for name in COUNTS):
        return Peers()
    from diffrl.ranks.hello import Hello

    with Hello() as hello:
        from diffrl.ranks.meeting import join

        return join(hello)
