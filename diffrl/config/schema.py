"""Every key of a config: its type, default, meaning and unit; the methods' sections are in `diffrl.config.methods`.

The class `Config` is the one table of sections. A method's section says what the method is (`Method`) and has one line
in the table, `name: Name = methods_section(Name)`, or `Name | None` for what is put around an objective (present = on).
An objective from outside brings its section along (`diffrl.config.door`). What a section needs of the rest of the
config, it says in its own `check`.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, FiniteFloat, ValidationError, create_model
from pydantic.fields import FieldInfo

from diffrl.config.base import (
    PAIR,
    Method,
    PathText,
    Problem,
    PromptSource,
    Resolution,
    Section,
    Share,
    key,
    methods_section,
    section,
)
from diffrl.config.caching import CacheSection, ScoutSection
from diffrl.config.credit import BranchesSection, DenseSection, TreeSection
from diffrl.config.direct import Direct
from diffrl.config.distillation import OPD
from diffrl.config.door import find_outside
from diffrl.config.engine import Engine
from diffrl.config.estimates import Groups, find_rule
from diffrl.config.explain import explain
from diffrl.config.image_set import ImageSet
from diffrl.config.measuring import Evaluate, GuardRails
from diffrl.config.methods import CRD, GRPO, NFT, ForwardProcess
from diffrl.config.preferences import AWM, DGPO, DPO, FDFO, GDRO, PRDP, RWR, SFT, ACFlow
from diffrl.config.reward import Reward, Watched
from diffrl.config.wrappers import GARDO, D2Align, Marble
from diffrl.errors import UserError
from diffrl.sampling import SamplerSpec


class Prompts(Section):
    train: PromptSource = key(
        "playground/compositional/train",
        "prompts to train on: playground/SUBSET/SPLIT, a set of `diffrl prompts list`, FILE.txt, FILE.jsonl or "
        "hub:OWNER/NAME[:split[:column]]; or several as {SOURCE: share, ...}, which divide the prompts of every epoch "
        "by their shares",
    )
    test: PromptSource = key("playground/compositional/test", "held-out prompts; needed where train is given")
    overlap: bool = key(False, "allow test prompts that are also trained on; the report says so")


class Lora(Section):
    rank: int = key(32, "rank of the update, at most the width of a large network", ge=1, le=8192)
    alpha: FiniteFloat = key(64, "the update is scaled by alpha / rank", gt=0, le=10**5)
    targets: list[str] | None = key(None, "names of the adapted modules; null: the family's attention projections")


class Rollout(SamplerSpec):
    """With what `SamplerSpec` has: a rollout reads this very section."""

    groups: int = key(48, "prompts per epoch, over all processes", "prompts", ge=1)
    group_size: int = key(24, "images per prompt (the group that advantages compare)", "images", ge=2)
    batch_size: int = key(32, "images per forward, on each process", "images", ge=1)
    resolution: Resolution | None = key(
        None, "side of square images, or [width, height]; null: the model's own", "pixels"
    )
    cache: CacheSection = section(CacheSection, "parts of its forwards that may be left out")
    scout: ScoutSection | None = key(
        None,
        "images are the best and the worst of many that few steps show, drawn again in full (Sol-RL 2604.06916); "
        "present = on",
    )

    @property
    def images(self) -> int:
        """Images of an epoch, over all processes."""
        return self.groups * self.group_size

    @property
    def candidates(self) -> int:
        """Images of an epoch that are drawn by few steps, to choose from."""
        return 0 if self.scout is None else self.groups * self.scout.images

    def check(self, config: Config) -> None:
        self.check_sampling()
        self.cache.check_with(config)
        if self.scout is not None:
            self.scout.check_with(config)


class Optimise(Section):
    learning_rate: FiniteFloat = key(3e-4, "AdamW's step size, about how far a weight moves in a step", ge=1e-12, le=1)
    schedule: Literal["constant", "linear", "cosine"] = key(
        "constant", "the learning rate after its warm-up: as it is, or falling to 0 at the last of the run's epochs"
    )
    warmup: int = key(0, "steps over which the learning rate rises to its value", "optimiser steps", ge=0)
    batch_size: int = key(
        576, "images per optimiser step over all processes, each with all its timesteps", "images", ge=1
    )
    accumulation: int = key(
        16, "micro-batches that a process's share of an optimiser step is split into", "micro-batches", ge=1
    )
    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] | None = key(
        None,
        "rows (images x trained timesteps) of a micro-batch at most, instead of accumulation; auto: what the free "
        "memory holds, 64 at most, recorded in the run's config.yaml; null: as accumulation says",
        "rows",
    )
    inner_epochs: int = key(1, "passes over an epoch's images", "passes", ge=1)
    noise: Literal["fresh", "path"] = key(
        "fresh",
        "in images that are noised again: fresh; path: what the sampler's own path implies, so that the states "
        "are those that it passed; of an image set's pictures the path is found by inversion (InPO)",
    )
    max_grad_norm: FiniteFloat = key(1.0, "gradients are scaled down to this norm", ge=1e-6, le=1e6)
    max_skipped: int = key(
        2,
        "steps in a row that may be left out for a gradient that is not finite; one more ends it",
        "optimiser steps",
        ge=0,
    )
    precision: Literal["fp32", "bf16", "fp16"] = key(
        "fp32", "of the frozen weights and the forwards; LoRA stays in fp32"
    )
    gradient_checkpointing: bool = key(
        False, "recompute activations in the backward pass: less memory, one forward more"
    )
    ema: Share = key(0.9, "decay of the averaged LoRA that is evaluated; 0: the trained one itself")
    ema_every: int = key(1, "the average takes in every so many-th step (Flow-GRPO: 8)", "optimiser steps", ge=1)
    ema_warmup: bool = key(False, "the decay is at most (1 + step) / (10 + step), as in the released trainers")
    betas: Annotated[tuple[Share, Share], PAIR] = key((0.9, 0.999), "AdamW's decays of the two moments")
    weight_decay: FiniteFloat = key(1e-4, "AdamW's weight decay", ge=0)

    def check(self, config: Config) -> None:
        if self.warmup and self.warmup >= (total := config.epochs * config.optimiser_steps):
            raise Problem("optimise.warmup", f"{self.warmup} optimiser steps, but the whole run has {total}")
        if self.noise == "path":
            self._check_path(config)

    def _check_path(self, config: Config) -> None:
        section, rollout, where = config.objective_section, config.rollout, "optimise.noise"
        if not isinstance(section, ForwardProcess):
            raise Problem(where, f'"path" is for noised images, and objective "{config.method.name}" trains on none')
        if getattr(section, "timestep_sampling", "schedule") != "schedule":
            raise Problem(
                where, f'"path" has the schedule\'s states alone: {config.method.name}.timestep_sampling: schedule'
            )
        if rollout.stochastic_steps or rollout.tail is not None:
            raise Problem(
                where, f'"path" needs the states of an ODE, and "{rollout.sampler}" draws noise: use dpm2 or euler'
            )


class Checkpoint(Section):
    every: int = key(1, "save after every so many epochs, and after the last", "epochs", ge=1)
    keep: int = key(2, "how many of the newest are kept", "checkpoints", ge=1)
    push: str | None = key(
        None,
        "OWNER/NAME of a model on the hub, made private if it is not there, to which the run is sent, too; its newest "
        "checkpoint goes on anywhere with --resume hub:OWNER/NAME; a push that fails is told, and the run goes on",
    )
    push_every: int = key(10, "send after every so many epochs, and after the last", "epochs", ge=1)

    def check(self, config: Any) -> None:
        if self.push is not None and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", self.push):
            raise Problem("checkpoint.push", f'"{self.push}": write OWNER/NAME')


class Tracking(Section):
    trackers: list[str] = key(
        [],
        "who gets the numbers, too: wandb (WANDB_MODE=offline works) and tensorboard, images with them; trackio, "
        "swanlab, mlflow, aim, comet_ml, clearml, dvclive",
    )
    samples: int = key(8, "test prompts that are drawn with fixed seeds at every evaluation; 0: none", "images", ge=0)
    groups: int = key(
        0, "of the newest epoch's groups, how many RUN_DIR/groups keeps with their scores, for `diffrl watch`", ge=0
    )


class _OneLine(type(BaseModel)):  # type: ignore[misc]
    """`Config(...)` in a program: a mistake is the same one line as in a file."""

    if not typing.TYPE_CHECKING:  # type checkers read the keys from the class

        def __call__(cls, **values: Any) -> Config:
            kind = config_class(values.get("objective"), values.get("advantages")) if cls is Config else cls
            try:
                return super(_OneLine, kind).__call__(**values)
            except ValidationError as error:
                keys = [key for key, _, _ in walk(kind)]
                raise UserError(explain(error, lambda path: "Config", keys, [*TABLES, *INNER_TABLES])) from error


class Config(Section, metaclass=_OneLine):
    """A whole run. Made by `load_config`, which checks that the values work together, or in a program by its keys.

    Sections may be given as tables: `Config(epochs=5, rollout={"groups": 8}, rewards={"clip": {"weight": 2.0}})`.
    """

    outside: ClassVar[Method | None] = None  # of an objective that is not in this table, which has a section more
    model: PathText = key("playground", '"playground", a folder in diffusers\' format, or a hub id such as org/name')
    family: PathText | None = key(
        None, "path/to/file.py:Class of a model family of your own; null: by the pipeline's class"
    )
    prompts: Prompts = section(Prompts, "what to draw")
    seed: int = key(0, "seed of everything random", ge=0, le=2**63 - 1)
    epochs: int = key(40, "rounds of sampling, scoring and optimising", "epochs", ge=1)
    run_dir: PathText = key("", "folder of the run; the default is runs/NAME, NAME being the config file's")
    lora: Lora = section(Lora, "the trained low-rank update")
    rollout: Rollout = section(Rollout, "how an epoch's images are drawn")
    rewards: dict[str, Reward] = key({}, "what is optimised: NAME: {weight, ...}; at least one")
    watch: dict[str, Watched] = key(
        {}, "what is scored in evaluations and never optimised: NAME: {...}, a reward's keys but weight"
    )
    objective: PathText = key(
        "nft",
        "how scores become a loss: one of those below, whose section has its keys; an installed one; or your own, "
        "path/to/file.py:Class, whose section is named like it",
    )
    nft: NFT = methods_section(NFT)
    grpo: GRPO = methods_section(GRPO)
    crd: CRD = methods_section(CRD)
    dpo: DPO = methods_section(DPO)
    rwr: RWR = methods_section(RWR)
    acflow: ACFlow = methods_section(ACFlow)
    sft: SFT = methods_section(SFT)
    gdro: GDRO = methods_section(GDRO)
    awm: AWM = methods_section(AWM)
    dgpo: DGPO = methods_section(DGPO)
    prdp: PRDP = methods_section(PRDP)
    fdfo: FDFO = methods_section(FDFO)
    direct: Direct = methods_section(Direct)
    opd: OPD = methods_section(OPD)
    dense: DenseSection | None = methods_section(DenseSection)
    branches: BranchesSection | None = methods_section(BranchesSection)
    tree: TreeSection | None = methods_section(TreeSection)
    gardo: GARDO | None = methods_section(GARDO)
    marble: Marble | None = methods_section(Marble)
    d2align: D2Align | None = methods_section(D2Align)
    advantages: Groups | None = key(None, "what groups that agree give, and other estimates; present = on")
    image_set: ImageSet | None = key(
        None, "pictures with prompts and scores that are trained on in the place of a rollout's; present = on"
    )
    optimise: Optimise = section(Optimise, "the optimiser")
    engine: Engine = section(Engine, "faster or smaller forms of the same computation")
    evaluate: Evaluate = section(Evaluate, "measuring on held-out prompts")
    guard: GuardRails = section(GuardRails, "alarms against reward hacking, in every evaluation")
    checkpoint: Checkpoint = section(Checkpoint, "what a killed run continues from")
    tracking: Tracking = section(Tracking, "logs beside metrics.jsonl")

    @property
    def method(self) -> Method:  # type: ignore[override]
        """The chosen objective's."""
        return self.outside or METHODS[self.objective]

    @property
    def methods(self) -> list[Method]:
        """The objective's, then those that are put around it, in the order of the table."""
        others = (name for name, method in METHODS.items() if method.kind != "objective")
        return [self.method, *(METHODS[name] for name in others if getattr(self, name) is not None)]

    @property
    def objective_section(self) -> Any:
        """The section of the chosen objective, which has `trained_steps`."""
        return getattr(self, self.method.name)

    @property
    def groups_of_set(self) -> int:
        """Of an epoch's `rollout.groups`, those that come from the image set."""
        return 0 if self.image_set is None else round(self.rollout.groups * self.image_set.share)

    @property
    def drawn_groups(self) -> int:
        """Those that are drawn from the policy."""
        return self.rollout.groups - self.groups_of_set

    @property
    def optimiser_steps(self) -> int:
        """Of an epoch."""
        return self.rollout.images // self.optimise.batch_size * self.optimise.inner_epochs

    def resolved(self) -> dict[str, Any]:
        """Every value that has an effect, as plain YAML types: without methods that are off and other objectives.

        Reading this again gives the same config.
        """
        values = _without_off(self.model_dump(mode="json"))
        others = [name for name in OBJECTIVES if name != self.method.name]  # whose sections have no effect
        return {name: value for name, value in values.items() if value is not None and name not in others}


def _without_off(values: dict[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Without sections that are off: in a file, a name without a value is a section with its defaults."""
    return {
        name: _without_off(value, (*path, name)) if isinstance(value, dict) else value
        for name, value in values.items()
        if value is not None or not is_section((*path, name))
    }


def section_type(annotation: Any) -> type[BaseModel] | None:
    """The class behind `Name`, `Name | None` or a table of `Name`; None for a plain value."""
    for kind in (annotation, *typing.get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def methods_of(config: type[Config]) -> dict[str, Method]:
    """What each method's section says of it, by the section's name."""
    kinds = {name: section_type(field.annotation) for name, field in config.model_fields.items()}
    return {name: method for name, kind in kinds.items() if (method := getattr(kind, "method", None)) is not None}


METHODS = methods_of(Config)
OBJECTIVES = [name for name, method in METHODS.items() if method.kind == "objective"]
TABLES = [name for name, field in Config.model_fields.items() if typing.get_origin(field.annotation) is dict]


def walk(
    kind: type[BaseModel] | None = None, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo, type[BaseModel] | None]]:
    """(dotted key, field, its section's class or None) of all sections and keys; a table's are under `rewards.NAME`."""
    for name, field in (kind or Config).model_fields.items():
        inner = section_type(field.annotation)
        yield prefix + name, field, inner
        if inner is not None:
            named = typing.get_origin(field.annotation) is dict
            yield from walk(inner, f"{prefix}{name}.NAME." if named else f"{prefix}{name}.")


def method_of(values: Mapping[str, Any]) -> str:
    """The methods of a config's plain values by their names: `grpo+dense+gardo`; of a file's objective the class."""
    around = [name for name, method in METHODS.items() if method.kind != "objective"]
    objective = str(values.get("objective") or "nft").rpartition(":")[2]
    return "+".join([objective, *(name for name in around if values.get(name) is not None)])


def config_class(objective: Any = None, advantages: Any = None) -> type[Config]:
    """`Config`, with what is from outside: an objective's section more, and an advantage rule's in the place of ours.

    Raises:
        Problem: an unknown one, at its key.
    """
    given: dict[str, Any] = {}
    outside: Any = None
    if isinstance(objective, str) and objective not in OBJECTIVES:
        kind: Any = _at("objective", find_outside, objective, OBJECTIVES)
        outside = kind.method
        if outside.name in Config.model_fields:
            raise Problem("objective", f'"{objective}" is called "{outside.name}", as a section of every config is')
        given[outside.name] = (kind, methods_section(kind))
    rule = advantages.get("rule") if isinstance(advantages, Mapping) else None
    if isinstance(rule, str) and (own := _at("advantages.rule", find_rule, rule)) is not Groups:
        given["advantages"] = (own | None, Config.model_fields["advantages"])
    if not given:
        return Config
    made: Any = create_model("Config", __base__=Config, **given)
    made.outside = outside
    return made


def _at(key: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except UserError as error:
        raise Problem(key, str(error)) from error


INNER_TABLES = [  # whose keys are names of the user's, too, but not at the top
    key
    for key, field, inner in walk()
    if inner is not None and "." in key and typing.get_origin(field.annotation) is dict
]


def is_section(path: tuple[str, ...]) -> bool:
    """Whether a key holds keys of its own: `rollout`, `nft.old`, `rewards`, `rewards.clip`, `rewards.clip.params`."""
    kind: type[BaseModel] | None = Config
    annotation: Any = None
    for name in path:
        if typing.get_origin(annotation) is dict and kind is not None:  # of a table: a name of the user's
            annotation = kind
            continue
        field = kind.model_fields.get(name) if kind else None
        if field is None:
            return False
        annotation = field.annotation
        kind = section_type(annotation)
    return kind is not None or typing.get_origin(annotation) is dict
