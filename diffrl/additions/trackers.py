"""`tracking.trackers`: accelerate's trackers and those of other packages get what `metrics.jsonl` and `samples` have.

A package's own is an entry point of the group `diffrl.trackers`: a class of (the run's folder, the resolved config)
with `log(epoch, numbers)`, `images(epoch, images, captions)` and `close()`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from diffrl.config import Config
from diffrl.config.base import Problem
from diffrl.errors import UserError, in_one_line
from diffrl.plugins import find, load, unknown
from diffrl.records.disk import write_text
from diffrl.records.identity import flat
from diffrl.records.tracking import slug
from diffrl.run.hooks import RunHook

log = logging.getLogger("diffrl")
ACCELERATE = ("wandb", "tensorboard", "trackio", "swanlab", "mlflow", "aim", "comet_ml", "clearml", "dvclive")
EXTRAS = ACCELERATE[:2]  # those with an extra of their own


class Trackers(RunHook):
    """Those that a run asked for. They are started when the run is about to train, so that what they print is above its
    table.

    One that fails later (its server is gone, its disk full, its login revoked) is named once and asked again: the run,
    whose own files have everything, goes on.

    Args:
        names: accelerate's, of which wandb and tensorboard get the images as well, or those of installed packages.
            wandb: `WANDB_MODE=offline` is respected, `WANDB_PROJECT` names the project ("diffrl" when unset); a resumed
            run continues the same Weights & Biases run. tensorboard: event files in `RUN_DIR/tensorboard`.
        config: the resolved config, for trackers to show.
    """

    def __init__(self, names: Sequence[str], run_dir: Path, config: Mapping[str, Any]) -> None:
        self.names, self.run_dir, self.config = list(dict.fromkeys(names)), run_dir, config
        self._trackers: dict[str, Any] = {}
        self._failed: set[str] = set()

    def before_run(self) -> None:
        """Start them. UserError: one is not installed or not set up."""
        self._trackers = {name: _open(name, self.run_dir, self.config) for name in self.names}

    def on_samples(self, epoch: int, paths: Sequence[Path], prompts: Sequence[str]) -> None:
        with contextlib.ExitStack() as files:  # else each evaluation leaves as many open
            images = [files.enter_context(Image.open(path)) for path in paths]
            self._tell("images", epoch, images, prompts)

    def on_line(self, line: Mapping[str, Any]) -> None:
        numbers = {key: value for key, value in line.items() if isinstance(value, int | float)}
        self._tell("log", line["epoch"], numbers)

    def after_run(self, error: BaseException | None) -> Iterable[Any]:
        self._tell("close")
        return ()

    def _tell(self, what: str, *values: Any) -> None:
        for name, tracker in self._trackers.items():
            try:
                getattr(tracker, what)(*values)
            except Exception as error:  # of foreign code, which need not be like any other's
                if name not in self._failed:
                    text = "tracking: %s failed (%s); the run goes on, and its metrics.jsonl has what is missing there"
                    log.warning(text, name, in_one_line(error, most=200))
                self._failed.add(name)


class Accelerates:
    """A tracker of accelerate's, started, with the config's plain values."""

    def __init__(self, name: str, run_dir: Path, config: Mapping[str, Any]) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        self.name, kind = name, LOGGER_TYPE_TO_CLASS[name]
        # Their first argument is a project, which holds runs; TensorBoard's and DVCLive's write into the run's folder.
        if name == "wandb":
            self.tracker = kind(os.environ.get("WANDB_PROJECT", "diffrl"), **_wandb_options(run_dir, config))
        elif kind.requires_logging_directory:
            self.tracker = kind(name, str(run_dir))
        else:
            self.tracker = kind("diffrl")
        if hasattr(self.tracker, "start"):
            self.tracker.start()
        if name not in EXTRAS:  # W&B has it as it is; TensorBoard would show it as one more run
            values = {key: value for key, value in flat(config).items() if value != {}}  # a table with nothing in it
            plain = {key: v if isinstance(v, bool | int | float | str) else str(v) for key, v in values.items()}
            self.tracker.store_init_configuration(plain | {"run_dir": run_dir.resolve().name})

    def log(self, epoch: int, numbers: Mapping[str, float]) -> None:
        self.tracker.log(numbers, step=epoch)

    def images(self, epoch: int, images: Sequence[Image.Image], captions: Sequence[str]) -> None:
        """In TensorBoard by their names, in Weights & Biases with their captions, nowhere else."""
        if self.name == "wandb":
            import wandb  # accelerate's own way knows no captions

            shown = [wandb.Image(image, caption=caption) for image, caption in zip(images, captions, strict=True)]
            self.tracker.log({"images": shown}, step=epoch)
        elif self.name == "tensorboard":
            import numpy as np

            rows = {
                f"samples/{i:02d}-{slug(caption)}": np.asarray(image.convert("RGB"))[None]
                for i, (image, caption) in enumerate(zip(images, captions, strict=True))
            }
            self.tracker.log_images(rows, step=epoch, dataformats="NHWC")
            self.tracker.tracker.flush()

    def close(self) -> None:
        self.tracker.finish()


def check_trackers(config: Config) -> None:
    """Raise Problem for a tracker that is not known or not installed."""
    for name in config.tracking.trackers:
        if name not in ACCELERATE:
            if find("tracker", name) is None:
                raise Problem("tracking.trackers", unknown("tracker", name, ACCELERATE))
        elif importlib.util.find_spec(name) is None:
            package = f'"diffrl[{name}]"' if name in EXTRAS else name
            raise Problem("tracking.trackers", f"{name} is not installed: pip install {package}")


def _open(name: str, run_dir: Path, config: Mapping[str, Any]) -> Any:
    if name in EXTRAS:
        try:
            importlib.import_module(name)
        except ImportError:
            text = f'tracking.{name}: {name} is not installed: pip install "diffrl[{name}]"'
            raise UserError(text) from None
    kind = partial(Accelerates, name) if name in ACCELERATE else load("tracker", name)
    try:
        return kind(run_dir, config)
    except Exception as error:  # each has its own; what is missing is a login, a server or a package
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        hint = " (or set WANDB_MODE=offline)" if name == "wandb" else ""
        raise UserError(f"tracking: {name} could not be started: {reason}{hint}") from error


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
