"""Trackers of other makers, accelerate's: they get copies of what `metrics.jsonl` and `samples` have."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from diffrl.errors import UserError, in_one_line
from diffrl.records.disk import write_text

log = logging.getLogger("diffrl")


class Trackers:
    """Those that a run asked for, by accelerate's names.

    One that fails (its server is gone, its disk full, its login revoked) is named once and asked again: the run, whose
    own files have everything, goes on. Raises `UserError` for one that cannot be started.
    """

    def __init__(self, names: Sequence[str], run_dir: Path, config: Mapping[str, Any]) -> None:
        self._trackers = {name: _open(name, run_dir, config) for name in dict.fromkeys(names)}
        self._failed: set[str] = set()

    @contextlib.contextmanager
    def _passing(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of foreign code, which need not be like any other's
            if name not in self._failed:
                text = "tracking: %s failed (%s); the run goes on, and its metrics.jsonl has what is missing there"
                log.warning(text, name, in_one_line(error, most=200))
            self._failed.add(name)

    def log(self, epoch: Any, numbers: Mapping[str, float]) -> None:
        """An epoch's numbers."""
        for name, tracker in self._trackers.items():
            with self._passing(name):
                tracker.log(numbers, step=epoch)

    def images(self, epoch: int, images: Sequence[Image.Image], captions: Sequence[str], names: Sequence[str]) -> None:
        """Sample images, in TensorBoard by their names and in Weights & Biases with their captions."""
        if "wandb" in self._trackers:
            with self._passing("wandb"):
                import wandb  # accelerate's own way knows no captions

                shown = [wandb.Image(image, caption=caption) for image, caption in zip(images, captions, strict=True)]
                self._trackers["wandb"].log({"images": shown}, step=epoch)
        if "tensorboard" in self._trackers:
            with self._passing("tensorboard"):
                import numpy as np

                rows = {
                    f"samples/{i:02d}-{name}": np.asarray(image.convert("RGB"))[None]
                    for i, (image, name) in enumerate(zip(images, names, strict=True))
                }
                self._trackers["tensorboard"].log_images(rows, step=epoch, dataformats="NHWC")
                self._trackers["tensorboard"].tracker.flush()

    def close(self) -> None:
        """Ends all of them."""
        for name, tracker in self._trackers.items():
            with self._passing(name):
                tracker.finish()


def _open(name: str, run_dir: Path, config: Mapping[str, Any]) -> Any:
    """A tracker of accelerate's, started, with the config's plain values."""
    if name in ("wandb", "tensorboard"):
        try:
            importlib.import_module(name)
        except ImportError:
            text = f'tracking.{name}: {name} is not installed: pip install "diffrl[{name}]"'
            raise UserError(text) from None
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    kind = LOGGER_TYPE_TO_CLASS[name]
    try:
        # Their first argument is a project, which holds runs; TensorBoard's and DVCLive's write into the run's folder.
        if name == "wandb":
            tracker = kind(os.environ.get("WANDB_PROJECT", "diffrl"), **_wandb_options(run_dir, config))
        elif kind.requires_logging_directory:
            tracker = kind(name, str(run_dir))
        else:
            tracker = kind("diffrl")
        if hasattr(tracker, "start"):
            tracker.start()
        if name not in ("wandb", "tensorboard"):  # W&B has it as it is; TensorBoard would show it as one more run
            tracker.store_init_configuration(_flat(config) | {"run_dir": run_dir.resolve().name})
    except Exception as error:  # each has its own; what is missing is a login, a server or a package
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        hint = " (or set WANDB_MODE=offline)" if name == "wandb" else ""
        raise UserError(f"tracking: {name} could not be started: {reason}{hint}") from error
    return tracker


def _wandb_options(run_dir: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Of `wandb.init`; a resumed run continues the same Weights & Biases run."""
    import wandb

    remembered = run_dir / "wandb" / "run-id.txt"
    resumed = remembered.exists()
    identity = remembered.read_text().strip() if resumed else uuid.uuid4().hex[:12]
    remembered.parent.mkdir(exist_ok=True)
    write_text(remembered, identity + "\n")  # whole: an empty one is no identity, at every later start
    offline = os.environ.get("WANDB_MODE") == "offline"
    return {
        "name": run_dir.resolve().name,
        "id": identity,
        "resume": "allow" if resumed and not offline else None,  # offline, wandb joins the parts when they are synced
        "dir": str(run_dir),
        "config": dict(config),
        # wandb would otherwise record every redraw of the live table as a line of output.
        "settings": wandb.Settings(console="off", quiet=True),
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys with numbers and texts, which is what all trackers take."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= _flat(value, f"{prefix}{key}.")
        else:
            result[prefix + key] = value if isinstance(value, bool | int | float | str) else str(value)
    return result
