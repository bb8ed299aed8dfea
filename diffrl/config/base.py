"""What the config's sections share: keys and strict models (`diffrl.keys`), and what they read of one another."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator
from pydantic_core import PydanticKnownError

from diffrl.keys import (
    AS_IS,
    LARGEST,
    PAIR,
    PathText,
    Problem,
    PromptSource,
    Resolution,
    Share,
    at_key,
    key,
    one_or_two,
    section,
)
from diffrl.keys import Section as PlainSection
from diffrl.plugins import find, installed
from diffrl.sampling import STOCHASTIC
from diffrl.sampling import SamplerSpec as Sampling  # what a method's section reads of `rollout`

__all__ = [
    "AS_IS",
    "LARGEST",
    "PAIR",
    "STOCHASTIC",
    "Base",
    "PathText",
    "Problem",
    "PromptSource",
    "Resolution",
    "Sampling",
    "Section",
    "Share",
    "at_key",
    "key",
    "one_or_two",
    "section",
]

KINDS = ("objective", "credit", "wrapper", "reward")  # what a method is: in this order they are put together
NO_ROLLOUT = "reads images and rewards of a rollout, which an image set does not have; leave one out"
GIVEN = "given"  # in `Method.options`: a section that is off unless it is there


def _base(value: str) -> str:
    if value != "full" and find("engine.base", value) is None:
        known = ", ".join(f"'{name}'" for name in ("full", *installed("engine.base")))
        raise PydanticKnownError("literal_error", {"expected": known})
    return value


Base = Annotated[str, AfterValidator(_base)]  # what frozen weights are kept as


@dataclass(frozen=True)
class Method:
    """What is to be known of a method without importing it; the class of its section has it as `method`.

    Card, report, help, `diffrl init` and the checks read it here, and nowhere else is any of it said again.
    """

    name: str  # of the section; an objective's is also what `objective:` names
    title: str  # as papers call it
    papers: Mapping[str, str] = field(default_factory=dict)  # {name: arXiv number}
    options: Mapping[tuple[str, str | bool], Mapping[str, str]] = field(default_factory=dict)  # papers of (key, value)
    about: str = ""  # one line for help; by default the title
    kind: Literal["objective", "credit", "wrapper", "reward"] = "objective"
    trainer: str = ""  # `module:Class` that is built from the section; "": the class that has the section
    takes_credit: bool = False  # an objective whose steps may get a credit each
    advantages: Literal["any", "own", "none"] = "any"  # from any estimate; its own ranks or weights; or not used
    spatial: bool = False  # its loss is a mean over latent cells, each of which an advantage of its own may weigh
    decodes: bool = False  # an objective that calls the rewards on images that it decodes itself
    needs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of other sections, for `diffrl init`
    # That it works with; unused: they are scored and logged, and it learns from something else.
    rewards: Literal["any", "differentiable", "embeds", "several", "unused"] = "any"
    state: bool = False  # a wrapper or credit that keeps a state in checkpoints: no resume switches it on or off

    def cites(self, section: Any) -> dict[str, str]:
        """{name: arXiv number} of the method, and of the options that its section has on."""
        values = ((getattr(section, name), value, papers) for (name, value), papers in self.options.items())
        used = (papers for ours, value, papers in values if ours == value or (value == GIVEN and ours is not None))
        return dict(self.papers) | {name: number for papers in used for name, number in papers.items()}

    def meaning(self) -> str:
        """One line for help."""
        cited = [f"{name}, arXiv {number}" for name, number in self.papers.items() if name != self.title]
        paper = [f"arXiv {self.papers[self.title]}"] if self.title in self.papers else []
        named = self.about and self.title not in self.about and paper
        text = f"{self.title}: {self.about}" if named else self.about or self.title
        return text + (f" ({'; '.join([*paper, *cited])})" if self.papers else "")


class Section(PlainSection):
    """A section of a config: strict, frozen, every key with a default, and what is to be known of a method with it."""

    method: ClassVar[Method | None] = None  # of a method's section
    about: ClassVar[str] = ""  # one line for help, of a package's section that is no method's

    @classmethod
    def of(cls, keys: Self | None, values: Mapping[str, Any]) -> Self:
        """`keys`, or without them a section of these values: in a program a method is built from either."""
        return cls(**values) if keys is None else keys

    @classmethod
    def made_for(cls, values: Any) -> type[Section]:
        """The class of a section of these plain values: where what they name has keys of its own. Raises Problem."""
        return cls

    def contents(self, config: Any) -> Mapping[str, Path | str]:
        """What its keys name outside of the config, as `KEY (what)`: a file, or a digest. A resume finds the same.

        Raises Problem or UserError where it is not to be had.
        """
        return {}

    def plain(self, config: Any) -> dict[str, tuple[str, tuple[str, ...]]]:
        """{reward: why, and which of its keys} must be left out, for a reward that the method itself reads."""
        return {}

    def correct(self, rewards: dict[str, Any]) -> None:
        """Put rewards of a method's own in the place of some of the optimised `rewards` {name: reward}."""

    def around(self, objective: Any, config: Any, lower: Collection[str]) -> None:
        """Give an objective what the method puts around it: another rule, a penalty, a transform of its advantages.

        `lower`: rewards of which a lower score is better.
        """

    def combiner(self, config: Any) -> Any:
        """How the losses of a micro-batch become one gradient (`diffrl.objectives.gradients`); None: as without it."""
        return None

    def gives(self, config: Any) -> int:
        """Of an epoch's `rollout.groups`, those whose images it gives, which are not drawn from the policy."""
        return 0

    def check_world(self, config: Any, world: int) -> None:
        """Raise Problem for what `world` processes could not share."""

    def build(self, build: Any) -> None:
        """Add to a run what it needs beside its objective; see `diffrl.run.build.Build`."""


def given_section(kind: type[Section]) -> Any:
    """The key of a package's section: an objective's is there by default, another one is on if it is given."""
    if kind.method is not None and kind.method.kind == "objective":
        return section(kind, kind.method.meaning())
    return key(None, f"{kind.method.meaning() if kind.method else kind.about}; present = on")
