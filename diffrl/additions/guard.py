"""The guard rails of a run: every evaluation is judged, and the LoRA of the last one without an alarm is kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from diffrl.additions.verdict import Guard
from diffrl.records.disk import inside, write_json
from diffrl.run.build import Build
from diffrl.run.hooks import RunHook


class GuardRails(RunHook):
    """`RUN_DIR/healthy` has the last LoRA without an alarm for diffusers to load, and what was measured of it."""

    def __init__(self, build: Build) -> None:
        self.build = build

    @cached_property  # when all hooks are there, which say what is better if lower
    def _guard(self) -> Guard:
        return Guard.of(self.build.config.resolved(), self.build.lower_metrics)

    def alarms(self, metrics: dict[str, Any]) -> Sequence[str]:
        build = self.build
        alarms = self._guard.alarms(build.evaluation.past, build.evaluation.held)
        metrics |= {f"alarm/{alarm.key}": alarm.text for alarm in alarms}
        if metrics["epoch"] and not alarms and build.folder.main:
            healthy = inside(build.folder.path, "healthy")
            build.policy.save_lora(healthy, build.evaluation.snapshot)
            measured = {key: value for key, value in metrics.items() if key.startswith(("eval/", "epoch", "step"))}
            write_json(healthy / "evaluation.json", measured)
        return [alarm.text for alarm in alarms]
