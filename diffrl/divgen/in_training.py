"""`evaluate.divgen`: DivGenBench's small version, measured while a run trains."""

from __future__ import annotations

from diffrl.divgen.prompts import world_of
from diffrl.divgen.run import SmallBenchmark
from diffrl.policy.resizing import drawing_at
from diffrl.run.evaluation import Evaluation, evaluation_spec
from diffrl.run.hooks import Measured, RunHook


class SmallDivGen(RunHook):
    """Every so many epochs, before training and at the end."""

    lower = frozenset({"divgen/ids"})  # how alike the faces are

    def __init__(self, evaluation: Evaluation) -> None:
        config = evaluation.config
        self.evaluation = evaluation
        device = evaluation.accelerator.device
        self.benchmark = SmallBenchmark(world_of(config.model), config.evaluate.per_prompt, device)

    def on_evaluate(self, epoch: int, evaluated: bool) -> Measured | None:
        evaluation, config = self.evaluation, self.evaluation.config
        every = config.evaluate.divgen
        if not every or (epoch % every and epoch != config.epochs):
            return None
        evaluation.monitor.status("evaluating, DivGenBench")
        with drawing_at(evaluation.policy, evaluation.backbone):
            found = self.benchmark.measure(
                evaluation.policy,
                evaluation_spec(config),
                seed=config.seed,
                batch_size=config.rollout.batch_size,
                accelerator=evaluation.accelerator,
                snapshot=evaluation.snapshot,
            )
        return Measured(found, {})
