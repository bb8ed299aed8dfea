"""What evaluations measure, on the model and on its students, and the alarms on it."""

from __future__ import annotations

import re
from typing import Any

from pydantic import FiniteFloat

from diffrl.config.base import Base, PathText, Problem, Resolution, Section, Share, key

STEPS, GUIDANCE = 8, 1.0  # of a distilled model
TAKEN = ("saturation",)  # there is eval/saturation/std


class Student(Section):
    """A model of the trained one's architecture, such as its distilled form; or the same one over another base."""

    model: PathText = key(
        "",
        "a folder in diffusers' format, or a hub id: a model that takes the trained one's LoRA; not given: the trained "
        "model itself, with `merge` or over another `base`",
    )
    merge: PathText | None = key(
        None,
        "a LoRA that is merged into its weights first, such as one that makes it a few-step model: playground/turbo, a "
        "file, a folder, or OWNER/NAME[:FILE]",
    )
    base: Base = key("full", "its frozen weights, as engine.base has it for the trained model: full, int8, fp8, nf4")
    steps: int = key(STEPS, "sampling steps, of the solver that its plain pipeline uses", "steps", ge=1)
    guidance_scale: FiniteFloat = key(GUIDANCE, "its guidance; 1 is none, as distilled models want it", ge=1, le=1000)

    def source(self, trained: str) -> str:
        """Its model; that of the training, where none is given."""
        return self.model or trained

    @property
    def same(self) -> bool:
        """Is it the trained model over another base? Then it draws as that does: steps and guidance are not its own."""
        return not (self.model or self.merge)

    def drawn(self, config: Any) -> Any:
        """The trained model's config with this one's model, base and guidance."""
        guidance = config.rollout.guidance_scale if self.same else self.guidance_scale
        size = config.evaluate.resolution or config.rollout.resolution
        rollout = config.rollout.model_copy(update={"guidance_scale": guidance, "resolution": size})
        engine = config.engine.model_copy(update={"base": self.base})
        update = {"model": self.source(config.model), "rollout": rollout, "engine": engine}
        return config.model_copy(update=update)


class Evaluate(Section):
    every: int = key(10, "evaluate after every so many epochs, and before the first and after the last", "epochs", ge=1)
    prompts: int = key(64, "how many of the test prompts are used, at most", "prompts", ge=1)
    per_prompt: int = key(4, "images per prompt; diversity needs two", "images", ge=2)
    steps: int | None = key(None, "sampling steps; null: rollout.steps", "steps", ge=1)
    resolution: Resolution | None = key(
        None, "side of the judged images, or [width, height]; null: rollout.resolution", "pixels"
    )
    features: str = key(
        "auto", "feature space of diversity: pixels, clip (the playground's) or a vision model's hub id"
    )
    also: dict[str, Student] = key(
        {},
        "students of the model, NAME: {model: ..., steps: 8}: the trained LoRA is loaded into each of them in every "
        "evaluation, and its values there are reported as eval/NAME/...",
    )

    def check(self, config: Any) -> None:
        for name, student in self.also.items():
            where = f"evaluate.also.{name}"
            if not re.fullmatch(r"[\w-]+", name):
                raise Problem(where, f'a student\'s name has letters, digits, "_" and "-" only, got "{name}"')
            if name in TAKEN:
                raise Problem(where, f"eval/{name} has a meaning of its own; choose another name, such as turbo")
            if student.same and student.base == config.engine.base:
                text = "not given; name a folder or a hub id of the model's architecture, merge a LoRA, or another base"
                raise Problem(f"{where}.model", text)
            if student.same and (student.steps, student.guidance_scale) != (STEPS, GUIDANCE):
                text = "the same model over another base draws as evaluate and rollout say: no steps, no guidance_scale"
                raise Problem(where, text)


class GuardRails(Section):
    evaluations: int | None = key(
        3,
        "alarm when what is trained rises and a watched value is worse than its best in so many evaluations in a row; "
        "null: never",
        "evaluations",
        ge=1,
    )
    diversity: Share | None = key(0.5, "alarm below this share of the base model's diversity; null: never")
    stop: bool = key(False, "end the run at an alarm; RUN_DIR/healthy is the LoRA of the last evaluation without one")
