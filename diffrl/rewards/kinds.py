"""How a scorer asks a reward, and what becomes of its answers: the plain kind, and how the others are found; and what
an evaluation reports beside scores.

Shapes: B images of a batch, N of a phase of scoring, W numbers of an answer to one image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from diffrl.plugins import by_package, load
from diffrl.rewards.protocol import Metadata, Reward, Wrapper

if TYPE_CHECKING:
    from diffrl.prompts import Prompt

# Of several processes: the rows of one to those of all, and the place of its first
Everyone = Callable[[Tensor], tuple[Tensor, int]] | None


class Phase(NamedTuple):
    """The N images of a phase on this process, and how the reward `name` of a scorer is asked of them.

    images (N, 3, H, W); groups (N,) int64, None where there are none. each: answers (N,) or (N, W) in batches of the
    reward's size, NaN where it does not apply. calls: the answers to parts of the images, given by their numbers, one
    call a part. guarded: around other code of the reward's author.
    """

    name: str
    images: Tensor
    prompts: Sequence[Prompt]
    groups: Tensor | None
    everyone: Everyone
    each: Callable[[], Tensor]
    calls: Callable[[Sequence[Sequence[int]]], Iterable[Tensor]]
    guarded: Callable[[], AbstractContextManager[None]]


class Asked(Wrapper):
    """A reward as a scorer asks it, of the plain kind: a call says the score of each of its images, batch by batch.

    Another kind is a subclass that a package publishes in the group `diffrl.reward_kinds` under the name of an ability:
    rewards that declare it are of that kind, the first by name. An option may put one around a reward, too.

    when: "drawn": the reward is asked of each batch; "finished": `finish` is, of all images of a phase; "never": its
    scores are NaN. width: W; None: an answer is a score. whole: a call compares its images, and is not divided.
    collective: all processes come to `finish`, with images or without. observes: it sees what trains. figure: of the
    last phase, None if there is none. compares: what else a score depends on, in words. fixed: why its scores cannot be
    kept, nor its weights moved.
    """

    when: ClassVar[Literal["drawn", "finished", "never"]] = "drawn"
    whole: ClassVar[bool] = False
    collective: ClassVar[bool] = False
    observes: ClassVar[bool] = False
    compares: ClassVar[str] = ""
    fixed: ClassVar[str] = ""
    width: int | None = None
    figure: float | None = None

    def __init__(self, reward: Any) -> None:
        self.reward: Any = reward
        self.name = getattr(reward, "name", "?")

    @staticmethod
    def judges(reward: Any) -> Mapping[str, Reward]:
        """Further judges of held-out images that an optimised reward brings, by what follows `NAME_`."""
        return {}

    @property
    def source(self) -> object:
        """What answers: rewards of one source are asked once."""
        return self

    def ask(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> object:
        """Answers (B,) or (B, W) to images (B, 3, H, W), not yet checked."""
        return self.reward(images, prompts, metadata)

    def scores(self, answers: Tensor) -> Tensor:
        """(B,) of the answers to a batch (B,) or (B, W), float32 on the CPU."""
        return answers

    def finish(self, phase: Phase) -> Tensor:
        """Scores (N,) of a phase's images."""
        raise NotImplementedError

    def observe(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata], keys: Sequence[int]
    ) -> None:
        """Images that train, right after they were scored, with a number of each for its random choices."""

    def take(self) -> Tensor | None:
        """(N, ...) that was kept of the images since this was last asked, beside their scores."""
        return None


def kind_of(reward: object) -> type[Asked]:
    """The kind that a reward, or its class, declares; `UserError` where two packages have one of that name."""
    able = (name for name in sorted(by_package("reward kind")) if getattr(reward, name, None))
    return next((load("reward kind", name) for name in able), Asked)


class Reported:
    """Looks at the images of one evaluation. A package publishes a subclass, of (judges, prompts, world, images of each
    prompt), in the group `diffrl.reported` under the name of what rewards or a world declare.

    names: of its M columns.
    """

    names: Sequence[str] = ()

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """(B, M) on the CPU of a batch (B, 3, H, W) in [0, 1]; NaN where there is nothing to say of an image."""
        return torch.empty(len(images), 0)

    def figures(
        self, prompts: Sequence[Prompt], first: int, total: int, together: Callable[[Tensor], Tensor]
    ) -> Mapping[str, float]:
        """Of all images, by name, when all of this process's `prompts` were seen, which stand from `first` on among
        `total`. together: the sum of a tensor over processes; all come to it."""
        return {}


def find_reported(judges: Mapping[str, Any], prompts: Sequence[Prompt], world: Any, per_prompt: int) -> list[Reported]:
    """What the judges, by name, and the world, or None, have to report of an evaluation of these prompts."""
    owners = [*judges.values(), world]
    names = (name for name in sorted(by_package("reported")) if any(getattr(one, name, None) for one in owners))
    return [load("reported", name)(judges, prompts, world, per_prompt) for name in names]
