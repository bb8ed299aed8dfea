"""Every key of a config: its type, default, meaning and unit. Packages bring others (`diffrl.config.door`).

The class `Config` is the table of the sections that every config has. That of a config is made for it (`config_class`):
with the section of its objective, and each other that it names, which is on if it is there (None: off). What a section
needs of the rest of the config, it says in its own `check`.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self, cast

from pydantic import BaseModel, ValidationError, create_model
from pydantic.fields import FieldInfo

from diffrl.config import door
from diffrl.config.base import (
    Method,
    PathText,
    Problem,
    Section,
    at_key,
    given_section,
    key,
    section,
)
from diffrl.config.measuring import Evaluate, GuardRails
from diffrl.config.reward import Reward, Watched
from diffrl.config.sections import Checkpoint, Engine, Lora, Optimise, Prompts, Rollout, Tracking
from diffrl.errors import UserError


class _OneLine(type(BaseModel)):  # type: ignore[misc]
    """`Config(...)` in a program: a mistake is the same one line as in a file."""

    if not typing.TYPE_CHECKING:  # type checkers read the keys from the class

        def __call__(cls, **values: Any) -> Config:
            kind = config_class(values) if cls is Config else cls
            try:
                return super(_OneLine, kind).__call__(**values)
            except ValidationError as error:
                from diffrl.config.explain import explain

                raise UserError(explain(error, lambda path: "Config", *names_of(kind))) from error


class Config(Section, metaclass=_OneLine):
    """A whole run. Made by `load_config`, which checks that the values work together, or in a program by its keys.

    Sections may be given as tables: `Config(epochs=5, rollout={"groups": 8}, rewards={"clip": {"weight": 2.0}})`. The
    section of a method that is off is None.
    """

    chosen: ClassVar[Method | None] = None  # the objective
    model: PathText = key("playground", '"playground", a folder in diffusers\' format, or a hub id such as org/name')
    family: PathText | None = key(None, "path/to/file.py:Class of a family of your own; null: by the pipeline's class")
    text_length: int | None = key(None, "of a prompt; null: the pipeline's own max_sequence_length", "tokens", ge=1)
    prompts: Prompts = section(Prompts, "what to draw")
    seed: int = key(0, "seed of everything random", ge=0, le=2**63 - 1)
    epochs: int = key(40, "rounds of sampling, scoring and optimising", "epochs", ge=1)
    run_dir: PathText = key("", "folder of the run; the default is runs/NAME, NAME being the config file's")
    lora: Lora = section(Lora, "the trained low-rank update")
    rollout: Rollout = section(Rollout, "how an epoch's images are drawn")
    rewards: dict[str, Reward] = key({}, "what is optimised: NAME: {weight, ...}; at least one")
    watch: dict[str, Watched] = key({}, "scored in evaluations, never optimised: NAME: {a reward's keys but weight}")
    objective: PathText = key(
        "nft", "how scores become a loss: one below, an installed one or path/to/file.py:Class, with a section each"
    )
    optimise: Optimise = section(Optimise, "the optimiser")
    engine: Engine = section(Engine, "faster or smaller forms of the same computation")
    evaluate: Evaluate = section(Evaluate, "measuring on held-out prompts")
    guard: GuardRails = section(GuardRails, "alarms against reward hacking, in every evaluation")
    checkpoint: Checkpoint = section(Checkpoint, "what a killed run continues from")
    tracking: Tracking = section(Tracking, "logs beside metrics.jsonl")

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        kind = config_class(obj) if cls is Config and isinstance(obj, Mapping) else cls
        return cast(Self, super(Config, kind).model_validate(obj, **options))

    def __getattr__(self, name: str) -> Any:
        if name in INSIDE or name.startswith("_") or not door.is_section(name):
            raise AttributeError(f"a config has no {name}")
        return None

    @property
    def method(self) -> Method:  # type: ignore[override]
        """The chosen objective's."""
        assert self.chosen is not None, "a config is made by its config_class()"
        return self.chosen

    @property
    def methods(self) -> list[Method]:
        """The objective's, then those that are put around it, in the order of `KINDS`."""
        around = {name: getattr(getattr(self, name), "method", None) for name in ordered(self) if name not in INSIDE}
        return [self.method, *(one for one in around.values() if one is not None and one.kind != "objective")]

    @property
    def sections(self) -> list[Section]:
        """Those that packages bring and that are on: of `methods`, in their order, and what is no method's."""
        others = [getattr(self, name) for name in ordered(self) if name not in INSIDE]
        mine = [getattr(self, method.name) for method in self.methods]
        return [*mine, *(one for one in others if one is not None and one.method is None)]

    @property
    def objective_section(self) -> Any:
        """The section of the chosen objective, which has `trained_steps`."""
        return getattr(self, self.method.name)

    @property
    def given_groups(self) -> int:
        """Of an epoch's `rollout.groups`, those whose images a section gives."""
        return sum(section.gives(self) for section in self.sections)

    @property
    def drawn_groups(self) -> int:
        """Those that are drawn from the policy."""
        return self.rollout.groups - self.given_groups

    @property
    def optimiser_steps(self) -> int:
        """Of an epoch."""
        return self.rollout.images // self.optimise.batch_size * self.optimise.inner_epochs

    def resolved(self) -> dict[str, Any]:
        """Every value that has an effect, as plain YAML types: without methods that are off and other objectives.

        Reading this again gives the same config.
        """
        values = _without_off(self.model_dump(mode="json"))
        return {name: values[name] for name in ordered(self) if values.get(name) is not None and is_on(self, name)}


INSIDE = frozenset(Config.model_fields)  # the sections and keys that every config has
TABLES = [name for name, field in Config.model_fields.items() if typing.get_origin(field.annotation) is dict]


def is_on(config: Config, name: str) -> bool:
    """Has this section an effect? That of an objective which is not chosen has none."""
    method = None if name in INSIDE else getattr(getattr(config, name), "method", None)
    return method is None or method.kind != "objective" or name == config.method.name


def ordered(config: Config | type[Config]) -> list[str]:
    """All sections and keys at the top: those that packages bring come behind the objective."""
    names = list((config if isinstance(config, type) else type(config)).model_fields)
    place = names.index("objective") + 1
    inside = [name for name in names if name in INSIDE]
    return [*inside[:place], *(name for name in names if name not in INSIDE), *inside[place:]]


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


def walk(
    kind: type[BaseModel] | None = None, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo, type[BaseModel] | None]]:
    """(dotted key, field, its section's class or None) of all sections and keys; a table's are under `rewards.NAME`.

    `kind`: by default a config with all shipped sections.
    """
    kind = kind or complete(Config)
    for name in ordered(kind) if issubclass(kind, Config) else kind.model_fields:
        field = kind.model_fields[name]
        inner = section_type(field.annotation)
        yield prefix + name, field, inner
        if inner is not None:
            named = typing.get_origin(field.annotation) is dict
            yield from walk(inner, f"{prefix}{name}.NAME." if named else f"{prefix}{name}.")


def names_of(kind: type[Config]) -> tuple[list[str], list[str], list[str]]:
    """Of all that a config of this class may name: dotted keys; tables; sections that are on when they are there."""
    whole = complete(kind)
    fields = {key: (field, inner) for key, field, inner in walk(whole)}
    tables = [key for key, (field, inner) in fields.items() if inner and typing.get_origin(field.annotation) is dict]
    return list(fields), tables, [name for name, field in whole.model_fields.items() if field.default is None]


def method_of(values: Mapping[str, Any]) -> str:
    """The methods of a config's plain values by their names: `grpo+dense+gardo`; of a file's objective the class."""
    on = [name for name in values if name not in INSIDE and values[name] is not None and door.is_method(name)]
    placed = sorted((door.place_of(door.find_section(name)), name) for name in on)
    objective = str(values.get("objective") or "nft").rpartition(":")[2]
    return "+".join([objective, *(name for place, name in placed if place)])


def config_class(values: Mapping[str, Any]) -> type[Config]:
    """The class of a config of these values: with the section of its objective, and those that it names.

    Raises:
        Problem: an unknown objective, or what a section says of its values, at its key.
    """
    sections: dict[str, type[Section]] = {}
    objective = values.get("objective", Config.model_fields["objective"].default)
    chosen: Any = None
    if isinstance(objective, str):
        kind: Any = at_key("objective", door.find_objective, objective)
        chosen = kind.method
        if chosen.name in INSIDE or (chosen.name != objective and door.is_section(chosen.name)):
            raise Problem("objective", f'"{objective}" is called "{chosen.name}", as a section of every config is')
        sections[chosen.name] = kind
    for name in values:
        if isinstance(name, str) and name not in INSIDE and name not in sections and door.is_section(name):
            sections[name] = at_key(name, door.find_section, name).made_for(values[name])
    return _made(getattr(chosen, "name", None), tuple(sections.items()))


def complete(kind: type[Config]) -> type[Config]:
    """With all shipped sections."""
    mine = {name: section_type(field.annotation) for name, field in kind.model_fields.items() if name not in INSIDE}
    sections: Any = {**door.shipped(), **mine}
    return _made(getattr(kind.chosen, "name", None), tuple(sections.items()))


@functools.lru_cache(maxsize=256)
def _made(chosen: str | None, sections: tuple[tuple[str, type[Section]], ...]) -> type[Config]:
    fields: dict[str, Any] = {}
    for name, kind in sorted(sections, key=lambda named: door.place_of(named[1])):
        fields[name] = (kind if door.place_of(kind) == 0 else kind | None, given_section(kind))
    made: Any = create_model("Config", __base__=Config, **fields)
    made.chosen = None if chosen is None else dict(sections)[chosen].method
    return cast(type[Config], made)


def _annotation(path: tuple[str, ...]) -> Any:
    """What a key holds; None for an unknown one."""
    kind: type[BaseModel] | None = Config
    annotation: Any = None
    for depth, name in enumerate(path):
        if typing.get_origin(annotation) is dict and kind is not None:  # of a table: a name of the user's
            annotation = kind
            continue
        if depth == 0 and name not in INSIDE and door.is_section(name):
            annotation = door.find_section(name)
        elif kind is None or name not in kind.model_fields:
            return None
        else:
            annotation = kind.model_fields[name].annotation
        kind = section_type(annotation)
    return annotation


def is_section(path: tuple[str, ...]) -> bool:
    """Whether a key holds keys of its own: `rollout`, `nft.old`, `rewards`, `rewards.clip`, `rewards.clip.params`."""
    annotation = _annotation(path)
    return section_type(annotation) is not None or typing.get_origin(annotation) is dict


def is_table(path: tuple[str, ...]) -> bool:
    """Whether its keys are names of the user's, each of a section: `rewards`, `evaluate.also`, `opd.teachers`."""
    annotation = _annotation(path)
    return section_type(annotation) is not None and typing.get_origin(annotation) is dict
