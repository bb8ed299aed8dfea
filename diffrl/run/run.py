"""`Run`: a training from its first epoch to its last. What it leaves behind is `RunFolder`'s."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from diffrl.config import Config
from diffrl.errors import TrainingError
from diffrl.records import saving
from diffrl.records.disk import write_json
from diffrl.run.clock import close_line
from diffrl.run.folder import RunFolder
from diffrl.run.hooks import states
from diffrl.run.interrupt import Interrupted
from diffrl.run.logger import RunLogger
from diffrl.run.peers import Peers
from diffrl.run.prefetch import TextPrefetcher
from diffrl.run.processes import check_agreement
from diffrl.run.setup import build, check, load, preflight
from diffrl.run.start import Start


class Run:
    """What trains: policy, loop and evaluation. `folder`: by default the config's `run_dir`; `peers`: none."""

    def __init__(self, config: Config, folder: RunFolder | None = None, peers: Peers | None = None) -> None:
        checked = check(config, folder, peers or Peers())
        rewards = preflight(checked)
        loaded = load(checked, rewards)
        built, self.loop, self.identity = build(checked, rewards, loaded)
        self.config, self.spec = loaded.config, loaded.config.rollout
        self.accelerator, self.folder, self.peers = checked.accelerator, checked.folder, checked.peers
        self.main = self.accelerator.is_main_process
        self.scorer, self.judges = rewards.scorer, rewards.judges
        self.policy, self.objective = loaded.policy, loaded.objective
        self.snapshots, self.judged = loaded.snapshots, loaded.judged
        self.rollouts, self.hooks, self.monitor = built.rollouts, built.hooks, built.monitor
        self.source, self.optimiser = self.loop.source, self.loop.optimiser
        self.evaluation, self.features = built.evaluation, built.evaluation.features
        self.lower = built.lower_metrics
        self.prefetcher = self._prefetcher()
        self.epoch = 0
        self._kept: tuple[dict[str, dict[str, Tensor]], dict[str, Any]] | None = None
        self.peers.on_failure = self.leave

    def set_interrupt_check(self, check: Callable[[], None]) -> None:
        """Ask `check`, which may raise, wherever the run can be left: between batches, and while a reward is busy."""
        self.monitor.check = self.scorer.check = self.judges.check = check

    def _prefetcher(self) -> TextPrefetcher:
        config = self.config
        files = {key: value for key, value in self.identity.items() if key.startswith(("model", "family"))}
        key = f"{files} {config.text_length} {config.optimise.precision} {torch.__version__} {transformers.__version__}"
        tests = [prompt.text for prompt in self.evaluation.prompts]
        return TextPrefetcher(
            self.policy, self.source.stream, tests, config.epochs, self.accelerator, self.folder.path, key
        )

    def save(self) -> None:
        """A complete checkpoint of everything that shapes the future, and the LoRA for others to load."""
        with self.peers.lock:
            if self.main:
                self.folder.save(*self._state(), self.config.checkpoint.keep, self.identity)
            self._kept = None
        self.folder.save_lora(self.policy, self.judged)
        self.accelerator.wait_for_everyone()

    def _state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Copies of the tensors, and the rest."""
        tensors = {"lora": self.policy.state("default")}
        tensors |= {name: self.policy.state(name) for name in self.snapshots}
        moments, optimiser = saving.optimiser_to_tensors(self.optimiser)
        tensors["optimiser"] = {key: value.to("cpu", copy=True) for key, value in moments.items()}
        added, hooks = states(self.hooks)
        tensors |= added
        if own := self.objective.tensors():
            tensors["objective"] = own
        tensors["rng"], rng = saving.rng_state()
        state = {
            "epoch": self.epoch,
            "loop": self.loop.state_dict(),
            "hooks": hooks,
            "optimiser": optimiser,
            "rng": rng,
        }
        return tensors, copy.deepcopy(state)

    def prepare(self) -> None:
        """Before a checkpoint is restored, and before anything is trained."""
        for hook in self.hooks:
            hook.prepare()

    def begin(self) -> None:
        """Before the first epoch that is trained here, and before the evaluation of the untrained model."""
        for hook in self.hooks:
            hook.begin(self.epoch)
        for number in range(0 if self.epoch else self.objective.warmup):
            self.monitor.status("the objective learns from the model's own images")
            self.loop.warm_up(self.rollouts.beside(f"warm-up {number}"), f"warm-up {number}")

    def begin_epoch(self) -> None:
        """Keep in memory what the epoch goes back to if it is broken off, unless that is on the disk."""
        on_disk = self.epoch % self.config.checkpoint.every == 0
        self._kept = self._state() if self.main and not on_disk else None

    def leave(self, error: TrainingError | Interrupted) -> None:
        """The epoch is broken off: its beginning goes to the disk, and what is known of a failure beside it.

        It does not wait for the other processes: they may have ended already.
        """
        if not self.main:
            return
        if self._kept is not None:
            self.folder.save(*self._kept, self.config.checkpoint.keep, self.identity)
        if isinstance(error, TrainingError) and error.details:
            write_json(self.folder.path / "nonfinite.json", {"error": str(error), **error.details})
        for hook in self.hooks if isinstance(error, Interrupted) else ():
            hook.left()

    def restore(self, start: Start | None = None) -> None:
        """Continue where `start` says (None: at the newest intact checkpoint); from the beginning if it has no path."""
        if start is None:
            from diffrl.records.checkpoint import latest

            path = latest(self.folder.path)
        else:
            path = start.path
            start.compare(self.identity)
        step = None if path is None else path.name
        check_agreement(self.accelerator, {"--resume": step}, "RUN_DIR must be on a shared disk")
        if path is None:
            return
        from diffrl.run.resuming import resume

        resume(self, path)

    def train(self, logger: RunLogger) -> None:
        """Every epoch that is left, the evaluation before the first one, and what is saved in between."""
        config, begun = self.config, [self.peers.began, time.monotonic()]
        self.monitor.status, self.monitor.note = logger.status, logger.note
        logger.status("encoding prompts")
        self.prefetcher.ensure(self.epoch, self.monitor.check)
        begun.append(time.monotonic())
        self.begin()
        if self.epoch == 0:  # line 0 of the metrics: the model before training
            metrics: dict[str, Any] = {"epoch": 0, "step": 0, "samples": 0}
            self.evaluation.measure(metrics)
            logger.log(metrics | self.loop.clock.first_image(begun, logger.note))
        line = time.perf_counter()
        while self.epoch < config.epochs:
            self.begin_epoch()
            saved = time.perf_counter()
            self.prefetcher.ensure(self.epoch, self.monitor.check)
            encoded = time.perf_counter()
            metrics = self.loop.run_epoch(self.epoch) | self.loop.clock.first_image(begun, logger.note)
            self.epoch = metrics["epoch"] = self.epoch + 1  # counted from 1
            notes = [text for hook in self.hooks for text in hook.after_epoch(metrics)]
            last = self.epoch == config.epochs
            alarms = self.evaluation.measure(metrics, self.epoch % config.evaluate.every == 0 or last)
            line = close_line(metrics, line, saved, encoded)
            # The line first, then the checkpoint: killed in between, the epoch is trained again and its line is kept.
            logger.log(metrics)
            for text in notes:
                logger.note(text)
            stop = bool(alarms) and config.guard.stop and not last
            if self.epoch % config.checkpoint.every == 0 or last or stop:
                self.save()
            for text in alarms:
                logger.note(f"ALARM: {text}")
            for hook in self.hooks:
                hook.end_epoch(metrics, last or stop)
            if stop:
                healthy = self.folder.path / "healthy"
                logger.note(f"guard.stop: ended after epoch {self.epoch}; the last healthy LoRA is {healthy}")
                break
        self.prefetcher.end()

    def close(self) -> None:
        """Drop what waits to be scored."""
        self.scorer.close()
        self.judges.close()
