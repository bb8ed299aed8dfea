"""Seeds derived from names, so that any single image's noise can be drawn again alone, on any number of processes.

PyTorch's CPU generator keeps the low 32 bits of a seed only: some two of an epoch's n images share their noise with
probability n^2 / 2^33 (1,152 images: 0.015 %), which is harmless, and the same on every machine.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # prompts are read before torch is
    import torch

Part = int | str


def seed_of(*parts: Part) -> int:
    """A stable 63-bit hash (blake2b) of the parts, in [0, 2^63).

    Order, types and boundaries count: (1, 2), (2, 1), (12,) and ("12",) differ.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = f"s{part}" if isinstance(part, str) else f"i{operator.index(part)}"
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little") >> 1


def generator(*parts: Part, device: str | torch.device = "cpu") -> torch.Generator:
    """A fresh generator on `device`, seeded with `seed_of(*parts)`."""
    import torch

    return torch.Generator(device=device).manual_seed(seed_of(*parts))


def noise(shape: Sequence[int], keys: Sequence[Sequence[Part]]) -> torch.Tensor:
    """Standard Gaussian noise (len(keys), *shape), float32, on the CPU; row i is drawn from `generator(*keys[i])`."""
    import torch

    out = torch.empty((len(keys), *shape), dtype=torch.float32)
    source = torch.Generator()  # one for all rows: seeding anew is cheaper than a new generator, and the same
    for row, key in zip(out, keys, strict=True):
        row.normal_(generator=source.manual_seed(seed_of(*key)))
    return out
