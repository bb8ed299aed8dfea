"""From a config to the parts of a run: rewards, objective, optimiser, and what the config adds to a plain run.

`Build` is what an addition reads and fills; additions are imported only where the config asks for them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from diffrl.config import Config
from diffrl.config.base import Method
from diffrl.config.reward import auxiliary_names, read_on_training_images, spatial
from diffrl.errors import UserError
from diffrl.features import default_features
from diffrl.objectives.gradients import Gradients, SumOfLosses
from diffrl.objectives.minibatches import AUTO_ROWS
from diffrl.objectives.objective import BuildContext, Objective
from diffrl.plugins import load, load_value
from diffrl.policy import Policy
from diffrl.rewards.building import Entry, around, build_rewards
from diffrl.rewards.compose import ScoreTransform
from diffrl.rewards.kinds import kind_of
from diffrl.rewards.protocol import Reward
from diffrl.rewards.scoring import Scorer
from diffrl.rollout import SamplerSpec
from diffrl.run.evaluation import Evaluation
from diffrl.run.folder import RunFolder
from diffrl.run.hooks import Monitor, RunHook
from diffrl.run.loop import LoopSettings
from diffrl.run.processes import Processes
from diffrl.run.rate import LearningRate
from diffrl.run.source import EpochSource, Rollouts

if TYPE_CHECKING:
    from diffrl.objectives.credit import Credit


def build_objective(
    config: Config, spec: SamplerSpec, rewards: Mapping[str, Reward] | None = None, lower: Collection[str] = ()
) -> Objective:
    """The objective that the config names, with what is wrapped around it.

    `rewards` are for those that need them; `lower`: names of rewards of which a lower score is better.
    """
    optimised = {name: reward for name, reward in (rewards or {}).items() if name in config.rewards}
    given = BuildContext(config, spec, optimised, build_credit(config))
    objective: Objective = _trainer(config.method, config.objective).of(config.objective_section, given)
    if config.optimise.noise == "path":
        objective.noising.path, objective.keep_trajectory = True, "path"
    if names := spatial(config.rewards):
        cast(Any, objective).see_regions([list(config.rewards).index(name) for name in names], names)
    for section in config.sections:
        section.around(objective, config, lower)
    return objective


def build_credit(config: Config) -> Credit | None:
    """Credit over the steps, if the config asks for one."""
    for method in config.methods:
        if method.kind == "credit":
            credit: Credit = _trainer(method).of(getattr(config, method.name), config)
            return credit
    return None


def _trainer(method: Method, objective: str = "") -> Any:
    """The class that a method is built from: the one that it names, or the one that the config's objective leads to."""
    return load_value("objective", method.name, method.trainer) if method.trainer else load("objective", objective)


def build_gradients(config: Config) -> Gradients:
    """How the losses of a micro-batch become the LoRA's gradient."""
    found = (section.combiner(config) for section in config.sections)
    return next((combiner for combiner in found if combiner is not None), SumOfLosses())


def build_scorers(config: Config, device: torch.device) -> tuple[Scorer, Scorer]:
    """What scores training images: rewards, then auxiliary ones; and what judges held-out ones: all that is watched."""
    entries = {**config.rewards, **config.watch}
    asked = {
        name: Entry(entry.plugin or name, entry.arguments, entry.cache, entry.offload, entry.column)
        for name, entry in entries.items()
    }
    built = build_rewards(asked, device)
    further = {  # judges that optimised rewards bring, each with its reward's name
        f"{name}_{what}": (name, judge)
        for name in config.rewards
        for what, judge in kind_of(built[name]).judges(built[name]).items()
    }
    owners = {**entries, **{judge: entries[name] for judge, (name, _) in further.items()}}
    limits: dict[str, Any] = {
        "retries": {name: entry.retries for name, entry in owners.items()},
        "timeout": {name: entry.timeout for name, entry in owners.items()},
        "unscored": {name: entry.unscored for name, entry in owners.items()},
        "plugins": {name: entry.plugin or further.get(name, [name])[0] for name, entry in owners.items()},
    }
    optimised, watched = ({name: built[name] for name in table} for table in (config.rewards, config.watch))
    watched |= {name: judge for name, (_, judge) in further.items()}
    for section in config.sections:
        section.correct(optimised)
    read = {name: watched[name] for name in read_on_training_images(config)}
    for name in spatial(config.rewards):
        try:
            read[name] = around("spatial", optimised[name], True, asked[name])
        except UserError as error:
            raise UserError(f"rewards.{name}.spatial: {error}") from error
    beside = device.type == "cuda"  # only other silicon than that which samples scores beside sampling
    scorer = Scorer({**optimised, **read}, overlap=beside, **limits)
    judges = {name: reward for name, reward in {**optimised, **watched}.items() if name not in scorer.asking}
    return scorer, Scorer(judges, **limits)


def build_composition(config: Config) -> ScoreTransform:
    """From the columns of the training scorer to those of the optimised and the auxiliary rewards."""
    steps = {name: entry.shape.steps() for name, entry in {**config.watch, **config.rewards}.items()}
    columns = [*config.rewards, *read_on_training_images(config)]
    return ScoreTransform(columns, steps, len(config.rewards) + len(auxiliary_names(config)))


def loop_settings(config: Config) -> LoopSettings:
    optimise, total = config.optimise, config.epochs * config.optimiser_steps
    return LoopSettings(
        seed=config.seed,
        group_size=config.rollout.group_size,
        batch_size=optimise.batch_size,
        micro_batch=AUTO_ROWS if optimise.micro_batch == "auto" else optimise.micro_batch,
        inner_epochs=optimise.inner_epochs,
        max_grad_norm=optimise.max_grad_norm,
        ema=optimise.ema.decay,
        ema_every=optimise.ema.every,
        ema_warmup=optimise.ema.warmup,
        rate=LearningRate(optimise.learning_rate, optimise.schedule, optimise.warmup, total),
    )


def build_optimiser(config: Config, policy: Policy) -> torch.optim.Optimizer:
    """AdamW on the trained LoRA."""
    parameters = [parameter for _, parameter in policy.trainable]
    optimise = config.optimise
    arguments: dict[str, Any] = {"betas": optimise.betas, "weight_decay": optimise.weight_decay}
    optimiser: torch.optim.Optimizer
    if config.engine.optimiser == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        optimiser = cast(torch.optim.Optimizer, AdamW8bit(parameters, optimise.learning_rate, **arguments))
    else:
        optimiser = torch.optim.AdamW(parameters, optimise.learning_rate, **arguments)
    optimiser.register_step_post_hook(policy.lora.fused.forget)  # 8-bit kernels write past torch's count of changes
    return optimiser


def features_name(config: Config) -> str:
    """The feature space of the diversity measure."""
    name = config.evaluate.features
    return default_features(config.model) if name == "auto" else name


@dataclass
class Build:
    """What an addition reads, and where it puts its parts: around `source`, or behind the other `hooks`."""

    config: Config
    policy: Policy
    objective: Objective
    scorer: Scorer  # of training images
    compose: ScoreTransform
    weights: Tensor  # (K,) of the optimised rewards
    rollouts: Rollouts
    source: EpochSource
    processes: Processes
    monitor: Monitor
    folder: RunFolder
    evaluation: Evaluation
    lower: frozenset[str]  # rewards of which a lower score is better
    hooks: list[RunHook] = field(default_factory=list)

    @property
    def lower_metrics(self) -> frozenset[str]:
        """Of evaluations, those that are better if lower: rewards, and what hooks add."""
        return self.lower.union(*(hook.lower for hook in self.hooks))

    @property
    def asked(self) -> list[str]:
        """The optimised rewards that people answer."""
        return [name for name in self.scorer.asking if name in self.config.rewards]

    def add(self, hook: RunHook) -> None:
        """A hook, which is the new source where it is one."""
        self.hooks.append(hook)
        if callable(hook):
            self.source = cast(EpochSource, hook)
