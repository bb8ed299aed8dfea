"""What a command draws: a model, perhaps with a LoRA, its prompts, and how; `diffrl sample` and `diffrl evaluate`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor

from diffrl.errors import UserError
from diffrl.evaluation import Evaluator, summarise
from diffrl.features import default_features, load_features
from diffrl.forward import FlowMatching
from diffrl.pictures import grid
from diffrl.policy import Policy, load_policy, read_lora
from diffrl.policy.engine import join_processes
from diffrl.policy.pipelines import Resolution
from diffrl.prompts import Prompt, PromptLike, given_prompts, load_prompts
from diffrl.records.disk import replacing, write_text
from diffrl.records.progress_bar import progress
from diffrl.records.tracking import save_image, slug
from diffrl.rewards.building import Entry, build_rewards
from diffrl.rewards.scoring import Scorer
from diffrl.rollout import SamplerSpec, generate
from diffrl.stats import standard_error
from diffrl.version import __version__
from diffrl.worlds import worlds

SHOWN = 64  # pictures of a grid, at most

log = logging.getLogger("diffrl")


@dataclass(frozen=True)
class Drawing:
    """What `diffrl sample` and `diffrl evaluate` draw: the model, with a LoRA if one is given, and how.

    Unless said: 10 steps, without noise, of the solver that the plain pipeline uses (Euler for flow models, else DDIM);
    the model's own resolution.
    """

    model: str
    prompts: str | Sequence[PromptLike] = ""
    lora: str | None = None
    seed: int = 0
    per_prompt: int = 1
    steps: int | None = None
    limit: int | None = None
    sampler: str | None = None
    guidance_scale: float = 1.0
    shift: float | None = None  # of the schedule, as rollout.shift
    resolution: Resolution = None
    batch_size: int = 32
    family: str | None = None  # path/to/file.py:Class; None: by the pipeline's class
    merge: str | None = None  # a LoRA that becomes part of the model first; see `diffrl.worlds.find_merge`

    def policy(self) -> Policy:
        """The model on this process's device; bf16 on an accelerator."""
        device = join_processes().device
        spec = read_lora(self.lora)[1] if self.lora is not None else None
        precision = "fp32" if device.type == "cpu" else "bf16"
        kind: dict[str, Any] = {"resolution": self.resolution, "family": self.family, "merge": self.merge}
        try:
            policy = load_policy(self.model, lora=spec, precision=precision, device=device, **kind)
        except UserError as error:
            if str(error).startswith("rollout.resolution: "):
                raise UserError(str(error).removeprefix("rollout.")) from error
            if spec is None or not str(error).startswith("lora.targets: "):
                raise
            text = f'"{self.lora}" is not a LoRA of {self.model}: layers that it changes are not there'
            raise UserError(f"{text} ({str(error).removeprefix('lora.targets: ')})") from error
        if self.lora is not None:
            policy.load_lora(self.lora)
        if device.type == "cuda" and policy.texts.bytes > torch.cuda.mem_get_info(device)[0]:
            policy.texts.room = policy.apart  # the encoders have no room beside the network
        return policy

    def spec(self, policy: Policy) -> SamplerSpec:
        name = self.sampler or ("euler" if isinstance(policy.process, FlowMatching) else "ddim")
        steps = self.steps or 10
        spec = SamplerSpec(sampler=name, steps=steps, guidance_scale=self.guidance_scale, shift=self.shift)
        return spec.model_copy(update={"noise_level": 0.0}) if name == "ddim" else spec

    def amount(self) -> dict[str, Any]:
        return {"seed": self.seed, "per_prompt": self.per_prompt, "batch_size": self.batch_size}

    def chosen(self) -> Sequence[Prompt]:
        known = load_prompts(self.prompts) if isinstance(self.prompts, str) else given_prompts(self.prompts)
        chosen = known[: self.limit]
        if self.model in worlds() and (line := worlds()[self.model].foreign([prompt.text for prompt in chosen])):
            log.warning("%s", line)
        return chosen


def sample(
    *, out: Path, rewards: Mapping[str, Mapping[str, Any] | Entry] | None = None, **drawing: Any
) -> dict[str, Any]:
    """Write a `Drawing`'s images as PNG (prompt and seed in the file) and `images.jsonl` to the folder `out`, and the
    first `SHOWN` of them with their prompts as one picture, `grid.png`. Returns how they were drawn.

    `rewards`: as in `evaluate`; each line of `images.jsonl` then has its image's `scores`.
    """
    job = Drawing(**drawing)
    scorer = _scorer(rewards or {})
    chosen, policy = job.chosen(), job.policy()
    spec = job.spec(policy)
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    pictures: list[Image.Image] = []
    parts: list[Tensor] = []
    kept: list[Tensor] = []
    with progress("drawing", len(chosen) * job.per_prompt) as advance:
        for index, images in generate(policy, chosen, spec, **job.amount()):
            owners = [chosen[i // job.per_prompt] for i in index.tolist()]
            parts.append(scorer.submit(images, owners).result())
            if scorer.later:
                kept.append(images.cpu())
            for i, prompt, image in zip(index.tolist(), owners, images, strict=True):
                member = i % job.per_prompt
                name = f"{i // job.per_prompt:05d}-{member:02d}-{slug(prompt.text)}.png"
                save_image(image, out / name, {"prompt": prompt.text, "seed": str(job.seed), "member": str(member)})
                rows.append({"file": name, "prompt": prompt.text, "member": member, "seed": job.seed})
                if len(pictures) < SHOWN:
                    with Image.open(out / name) as picture:
                        pictures.append(
                            ImageOps.contain(picture, (256, 256)) if max(picture.size) > 256 else picture.copy()
                        )
            advance(len(images))
    if scorer.names:
        groups = torch.arange(len(chosen)).repeat_interleave(job.per_prompt)
        owners = [chosen[int(i)] for i in groups]
        scores = scorer.finish(torch.cat(parts), kept, owners, groups, lambda: policy.apart())
        for row, values in zip(rows, scores.tolist(), strict=True):
            row["scores"] = {name: _known(value) for name, value in zip(scorer.names, values, strict=True)}
    write_text(out / "images.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
    with replacing(out / "grid.png") as temporary:
        captions = [row["prompt"] for row in rows[: len(pictures)]]
        grid(pictures, captions, job.per_prompt if job.per_prompt > 1 else 0).save(temporary, format="png")
    return asdict(job) | {"sampler": spec.sampler, "steps": spec.steps}


def _known(score: float) -> float | None:
    """None for NaN: the reward does not apply."""
    return None if score != score else round(score, 6)


def _entries(rewards: Mapping[str, Mapping[str, Any] | Entry]) -> dict[str, Entry]:
    return {name: given if isinstance(given, Entry) else Entry(name, given) for name, given in rewards.items()}


def _scorer(rewards: Mapping[str, Mapping[str, Any] | Entry]) -> Scorer:
    return Scorer(build_rewards(_entries(rewards), join_processes().device))


class Scores(dict[str, Any]):
    """What `evaluate` returns; its text is a small table of the means."""

    def __str__(self) -> str:
        rows = []
        for name, mean in self["mean"].items():
            error = self["standard_error"][name]
            text = "applies to none of the prompts" if mean is None else f"{mean:.4f}"
            rows.append(f"{name:<24}{text}" + ("" if mean is None or error is None else f" +- {error:.4f}"))
        return "\n".join([*rows, f"{'diversity':<24}{self['diversity']:.4f}"])

    __repr__ = __str__


def evaluate(
    *,
    rewards: Mapping[str, Mapping[str, Any] | Entry],
    out: Path | None = None,
    policy: Policy | None = None,
    **drawing: Any,
) -> Scores:
    """Score a `Drawing`; returns, and writes if asked, means, standard errors, diversity and every image's scores.

    Args:
        rewards: the parameters of each plugin by its name (or `path/to/file.py:Class`), or its `Entry`.
        out: the JSON file.
        policy: the model of the drawing, where it is loaded already.
        drawing: the keys of `Drawing`.
    """
    started = time.perf_counter()
    job = Drawing(**drawing)
    scorer = _scorer(rewards)
    chosen, policy = job.chosen(), policy or job.policy()
    spec = job.spec(policy)
    features = load_features(default_features(job.model), policy.device)
    with progress("drawing and scoring", len(chosen) * job.per_prompt) as advance:
        evaluator = Evaluator(policy, scorer, features, spec, job.per_prompt, job.batch_size)
        found = evaluator.score(chosen, "default", job.seed, advance=advance)
    scores = found.scores
    # Images of one prompt are not independent: the error is over prompts.
    by_prompt = scores.view(len(chosen), job.per_prompt, -1).nanmean(dim=1)
    error = [standard_error(column) for column in by_prompt.T]
    result = Scores()
    result |= {
        "diffrl_version": __version__,
        **asdict(job),
        "prompts": job.prompts if isinstance(job.prompts, str) else [prompt.text for prompt in chosen],
        "rewards": {name: dict(entry.arguments) for name, entry in _entries(rewards).items()},
        "prompts_count": len(chosen),
        "sampler": spec.sampler,
        "steps": spec.steps,
        "seconds": round(time.perf_counter() - started, 2),
        "mean": summarise(scorer.names, scores),
        "standard_error": dict(zip(scorer.names, error, strict=True)),
        **found.breadth(),
        "parts": {name: float(column.nanmean()) for name, column in found.parts.items()},
        "scores": {name: [_known(score) for score in scores[:, k].tolist()] for k, name in enumerate(scorer.names)},
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, json.dumps(result, indent=1) + "\n")
    return result
