"""What evaluations measure, on the model and on its students, and the alarms on it."""

from __future__ import annotations

from pydantic import FiniteFloat

from diffrl.config.base import Base, PathText, Resolution, Section, Share, key

STEPS, GUIDANCE = 8, 1.0  # of a distilled model


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
