"""A model in Python: `diffrl.load` gives a `Model`, which draws. Part of the interface in `diffrl.api`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffrl.config import check_model, load_config
from diffrl.errors import UserError
from diffrl.lora_files import as_list, find_lora, weighted
from diffrl.prompts import Prompt, check_source
from diffrl.resources import file_of_run
from diffrl.switches import as_torch_starts
from diffrl.tools.given_prompts import PromptLike

if TYPE_CHECKING:
    from PIL.Image import Image

    from diffrl.policy import Policy
    from diffrl.policy.pipelines import Resolution


def prompts_of(given: str | Path | PromptLike | Sequence[PromptLike]) -> str | Sequence[PromptLike]:
    """A set, a file or a data set of the hub, checked; a text that names none is a prompt itself."""
    if isinstance(given, Path):
        given = str(given)
    if not isinstance(given, str):
        if isinstance(given, Mapping | Prompt):
            return [given]
        return list(given) if isinstance(given, Iterable) else given
    named = given.startswith("hub:") or given.endswith((".txt", ".jsonl"))
    if not named and ("/" not in given or any(sign.isspace() for sign in given)):
        return [given]
    check_source(given)
    return given


def name_of(model: object) -> str:
    """A model's name or folder as text."""
    if not isinstance(model, str | Path):
        raise UserError(f"model: expected a name, a folder or a run, got a {type(model).__name__}")
    return str(model)


@dataclass(eq=False, repr=False)
class Model:
    """A text-to-image model, perhaps with a LoRA, ready to draw; made by `load`.

    `name`: what it was loaded from. `policy`: the library's own form of it; `pipe`: its diffusers pipeline.
    """

    name: str
    policy: Policy
    lora: str | None = None
    resolution: Resolution = None
    merge: str | Sequence[str] | None = None

    @property
    def pipe(self) -> Any:
        """The diffusers pipeline; its network carries the LoRA."""
        return self.policy.backbone.pipe

    @as_torch_starts()
    def draw(
        self,
        prompts: str | Path | PromptLike | Sequence[PromptLike],
        *,
        seed: int = 0,
        per_prompt: int = 1,
        steps: int | None = None,
        sampler: str | None = None,
        guidance_scale: float | None = None,
        batch_size: int = 32,
    ) -> list[Image]:
        """PIL images, `per_prompt` for each prompt, one prompt's side by side; what `diffrl sample` draws.

        Args:
            prompts: a text or several, or a set or file as in a config.
            seed: of the noise, which depends on seed, prompt and place in the group only.
            per_prompt: images of each prompt.
            steps: sampling steps; None: as the model's authors draw, 10 where they are not known.
            sampler: "euler", "dpm2" or "ddim"; None: the plain pipeline's own.
            guidance_scale: classifier-free guidance, 1 is none; None: what the LoRA was trained at, else the authors'.
            batch_size: images per forward.
        """
        from PIL import Image

        from diffrl.drawing import Drawing
        from diffrl.rollout import generate

        drawing = Drawing(
            self.name,
            prompts_of(prompts),
            lora=self.lora,
            merge=self.merge,
            seed=seed,
            per_prompt=per_prompt,
            steps=steps,
            sampler=sampler,
            guidance_scale=guidance_scale,
            batch_size=batch_size,
        )
        images = []
        for _, batch in generate(self.policy, drawing.chosen(), drawing.spec(self.policy), **drawing.amount()):
            pixels = (batch.detach().float().clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
            images += [Image.fromarray(image) for image in pixels]
        return images

    def __repr__(self) -> str:
        return f'Model("{self.name}"{f", lora={self.lora!r}" if self.lora else ""})'


@as_torch_starts()
def load(
    model: Any = "playground",
    lora: str | Path | None = None,
    resolution: Resolution = None,
    family: str | None = None,
    merge: str | Sequence[str] | None = None,
) -> Model:
    """A model to draw with, on this process's device (bf16 on an accelerator).

    Args:
        model: "playground", a folder in diffusers' format, or a hub id OWNER/NAME; or a run, as a `Run` or its folder:
            then its model with its LoRA.
        lora: a LoRA, for example `run.lora`: a file in any of the forms that people have, a folder, a run, or
            OWNER/NAME[@REVISION][:FILE] on the hub.
        resolution: side of the square images in pixels, or (width, height); None: what the LoRA was trained at, else
            the model's own.
        family: `path/to/file.py:Class` of a model family of your own; None: the run's, or by the pipeline's class.
        merge: a LoRA that becomes part of the model first, such as "playground/turbo", with which it draws in 4 steps,
            or several: each LORA[=WEIGHT], named as `lora` is.

    Raises:
        UserError: there is no such model, run or LoRA, or they do not fit.
    """
    folder = Path(name_of(getattr(model, "folder", model)))
    if hasattr(model, "folder") or (folder / "metrics.jsonl").is_file():
        config = load_config(file_of_run(folder, "config.yaml", "load"))
        if lora is None:
            lora = file_of_run(folder / "lora", "pytorch_lora_weights.safetensors", "load").parent
        model, family = config.model, family or config.family
    check_model(str(model))
    for name in (lora, *(weighted(one)[0] for one in as_list(merge))):
        if name is not None:
            find_lora(name)
    from diffrl.drawing import Drawing

    words = None if lora is None else str(lora)
    drawing = Drawing(str(model), lora=words, resolution=resolution, family=family, merge=merge)
    return Model(str(model), drawing.policy(), words, drawing.resolution, drawing.merge)
