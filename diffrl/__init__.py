"""diffrl: reinforcement learning for text-to-image models that shows reward hacking while it happens.

`train`, `load`, `evaluate`, `Config` and `Run` are the Python interface (see `diffrl.api`); they are imported when they
are first used, so that `import diffrl` and the command line stay fast.
"""

from __future__ import annotations

import logging as _logging
from typing import TYPE_CHECKING, Any

from diffrl.version import __version__ as __version__

if TYPE_CHECKING:
    from diffrl.api import Config, Model, Run, evaluate, load, load_config, save_config, train
    from diffrl.errors import UserError

# transformers and peft import it wherever it is installed; without a GPU it then asks, in every process, for a package
# ("kernels") that is not needed here.
_logging.getLogger("bitsandbytes").setLevel(_logging.ERROR)

__all__ = ["Config", "Model", "Run", "UserError", "evaluate", "load", "load_config", "save_config", "train"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from importlib import import_module

        return getattr(import_module("diffrl.errors" if name == "UserError" else "diffrl.api"), name)
    raise AttributeError(f"module 'diffrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
