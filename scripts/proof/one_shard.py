"""An epoch of a config over a network that FSDP2 shards over one process, and the same epoch without it.

`python one_shard.py CONFIG.yaml OUT.json`, with the variables that a launcher sets. A plain run leaves a single process
unsharded, since it gains nothing: here it is asked for, to run the sharded path on a machine with one device.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor

import diffrl.run.assembly as assembly
from diffrl.config import load_config


def epochs(path: Path) -> tuple[bool, dict[str, Tensor], dict[str, Any]]:
    """Was the network sharded, the LoRA after two epochs, the second epoch's metrics."""
    run = assembly.Run(load_config(path))
    try:
        lines = [run.loop.run_epoch(i) for i in range(2)]
        return run.policy.sharded, run.policy.state("default"), lines[-1]
    finally:
        run.close()


def main() -> None:
    path, out = Path(sys.argv[1]), Path(sys.argv[2])
    plain, reference, line = epochs(path)
    assembly.plugin_of = lambda accelerator: FullyShardedDataParallelPlugin(fsdp_version=2)
    torch.cuda.empty_cache()
    sharded, found, other = epochs(path)
    if plain or not sharded:
        raise SystemExit(f"sharded: {plain} without FSDP2 and {sharded} with it")
    size = max(float(value.abs().max()) for value in reference.values())
    away = max(float((found[name] - value).abs().max()) for name, value in reference.items())
    result = {"largest_difference": away, "largest_number": size}
    result |= {"epoch_seconds": round(other["seconds"], 3), "epoch_seconds_unsharded": round(line["seconds"], 3)}
    if away > 0.05 * size:
        raise SystemExit(f"the sharded run's LoRA is another one: {result}")
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
