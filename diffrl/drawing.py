"""What a command draws: a model, perhaps with a LoRA, its prompts, and how; `diffrl sample` and `diffrl evaluate`."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor

from diffrl.errors import UserError
from diffrl.evaluation import Evaluated, Evaluator, summarise
from diffrl.features import default_features, load_features
from diffrl.launched import join_processes
from diffrl.loras.recorded import recorded
from diffrl.policy import Policy, load_policy
from diffrl.policy.backbone import Backbone
from diffrl.policy.pipelines import Resolution
from diffrl.prompts import Prompt, load_prompts
from diffrl.records.disk import replacing, write_json, write_text
from diffrl.records.tracking import save_image, slug
from diffrl.rewards.building import Entry, build_rewards
from diffrl.rewards.scoring import Scorer
from diffrl.rollout import SamplerSpec, generate
from diffrl.stats import differences, interval, known, p_value, standard_error
from diffrl.tools.given_prompts import PromptLike, given_prompts
from diffrl.tools.pictures import grid
from diffrl.tools.progress_bar import progress
from diffrl.version import __version__
from diffrl.worlds import worlds

SHOWN, ROWS = 64, "images.jsonl"  # pictures of a grid, at most; the list of a folder's images

log = logging.getLogger("diffrl")


@dataclass(frozen=True)
class Drawing:
    """What commands draw: a model, with a LoRA if one is given, and how.

    What is None is settled in one place for all of them: by the run `like`; guidance, shift, size and text also by the
    run that trained the LoRA (`diffrl.loras.recorded`); else as the authors draw it, where the family knows the model,
    or with 10 steps and without guidance. Solver: the plain pipeline's, without noise. So a LoRA and its base are drawn
    alike.
    """

    model: str
    prompts: str | Sequence[PromptLike] = ""
    lora: str | None = None
    seed: int = 0
    per_prompt: int = 1
    steps: int | None = None
    limit: int | None = None
    sampler: str | None = None
    guidance_scale: float | None = None
    shift: float | None = None  # of the schedule, as rollout.shift
    resolution: Resolution = None
    text_length: int | None = None
    batch_size: int = 32
    family: str | None = None  # path/to/file.py:Class; None: by the pipeline's class
    merge: str | Sequence[str] | None = None  # LoRAs that become part of the model first; see `diffrl.lora_files`
    like: str | None = None  # the folder of a run

    def __post_init__(self) -> None:
        for key, least in {"seed": 0, "per_prompt": 1, "steps": 1, "limit": 1, "batch_size": 1}.items():
            value = getattr(self, key)
            if value is not None and (not isinstance(value, Integral) or value < least):
                raise UserError(f"{key}: expected a whole number of {least} or more, got {value!r}")
        sides = self.resolution if isinstance(self.resolution, list | tuple) else (self.resolution,) * 2
        if self.resolution is not None and (len(sides) != 2 or not all(isinstance(side, Integral) for side in sides)):
            raise UserError(f"resolution: expected pixels, or (width, height), got {self.resolution!r}")
        if isinstance(self.resolution, list | tuple):
            object.__setattr__(self, "resolution", tuple(int(side) for side in self.resolution))
        for key, value in vars(self).items():  # NumPy's numbers, from a loop over an array
            if isinstance(value, Real) and not isinstance(value, bool):
                object.__setattr__(self, key, int(value) if isinstance(value, Integral) else float(value))
        for key, value in recorded(vars(self)).items():
            object.__setattr__(self, key, value)

    def policy(self, **other: Any) -> Policy:
        """The model on this process's device; bf16 on an accelerator. `other` keys of `load_policy` go on top."""
        device = join_processes().device
        precision = "fp32" if device.type == "cpu" else "bf16"
        kind: dict[str, Any] = {key: getattr(self, key) for key in ("resolution", "family", "merge", "text_length")}
        try:
            policy = load_policy(self.model, start=self.lora, precision=precision, device=device, **kind | other)
        except UserError as error:
            if str(error).startswith("rollout.resolution: "):
                raise UserError(str(error).removeprefix("rollout.")) from error
            raise
        if device.type == "cuda" and policy.texts.bytes > torch.cuda.mem_get_info(device)[0]:
            policy.texts.room = policy.offloaded  # the encoders have no room beside the network
        return policy

    def settled(self, backbone: Backbone) -> Drawing:
        """With a solver, steps and a guidance."""
        if None not in (self.sampler, self.steps, self.guidance_scale):
            return self  # not made again: that would read the LoRA's record again
        known = {one.name: one for one in getattr(backbone, "known", ()) if self.merge is None}.get(self.model)
        steps, guidance = (10, 1.0) if known is None else (known.steps, known.guidance)
        return replace(
            self,
            sampler=self.sampler or backbone.solver,
            steps=steps if self.steps is None else self.steps,
            guidance_scale=guidance if self.guidance_scale is None else self.guidance_scale,
        )

    def spec(self, policy: Policy) -> SamplerSpec:
        own = self.settled(policy.backbone)
        keys: dict[str, Any] = {key: getattr(own, key) for key in ("sampler", "steps", "guidance_scale", "shift")}
        return SamplerSpec(**keys | ({"noise_level": 0.0} if own.sampler == "ddim" else {}))

    def amount(self) -> dict[str, Any]:
        return {"seed": self.seed, "per_prompt": self.per_prompt, "batch_size": self.batch_size}

    def chosen(self) -> Sequence[Prompt]:
        known = load_prompts(self.prompts) if isinstance(self.prompts, str) else given_prompts(self.prompts)
        chosen = known[: self.limit]
        if self.model in worlds() and (line := worlds()[self.model].foreign([prompt.text for prompt in chosen])):
            log.warning("%s", line)
        return chosen


def sample(
    *, out: Path, rewards: Mapping[str, Mapping[str, Any] | Entry] | None = None, base: bool = False, **drawing: Any
) -> dict[str, Any]:
    """Write a `Drawing`'s images as PNG (prompt and seed in the file) and `images.jsonl` to the folder `out`, and the
    first `SHOWN` of them with their prompts as one picture, `grid.png`. Returns how they were drawn.

    Pictures of an earlier call in the folder are removed: those that its `images.jsonl` lists.

    Args:
        rewards: as in `evaluate`; each line of `images.jsonl` then has its image's `scores`.
        base: also draw the model without its LoRA, from the same noise, into `out/base`; the grid shows both.
    """
    job = Drawing(**drawing)
    scorer = scorer_for(job.model, rewards or {}, join_processes().device)
    chosen, policy = job.chosen(), job.policy()
    job = job.settled(policy.backbone)
    sides = [(None, out / "base", "base: ")] * base + [("default", out, "")]
    for folder in (out / "base", out):
        _clear(folder)
    with progress("drawing", len(chosen) * job.per_prompt * len(sides)) as advance:
        rows = [_draw(job, policy, chosen, scorer, on, folder, advance) for on, folder, _ in sides]
    each, pictures, captions = job.per_prompt, list[Image.Image](), list[str]()
    for start in range(0, min(len(rows[0]), SHOWN // len(sides)), each):
        for (_, folder, mark), side in zip(sides, rows, strict=True):
            for row in side[start : start + each]:
                with Image.open(folder / row["file"]) as image:
                    pictures.append(ImageOps.contain(image, (256, 256)) if max(image.size) > 256 else image.copy())
                captions.append(mark + row["prompt"])
    with replacing(out / "grid.png") as temporary:
        columns = each * len(sides)
        grid(pictures, captions, columns if columns > 1 else 0).save(temporary, format="png")
    return asdict(job) | {"base": base}


def _clear(folder: Path) -> None:
    """Remove the pictures of an earlier call, by its list."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        for line in (folder / ROWS).read_text(encoding="utf-8").strip().split("\n"):
            if re.fullmatch(r"\d{5,}-\d{2,}-[^/\\]*\.png", name := json.loads(line)["file"]):
                (folder / name).unlink(missing_ok=True)
        (folder / ROWS).unlink()


def _draw(
    job: Drawing,
    policy: Policy,
    chosen: Sequence[Prompt],
    scorer: Scorer,
    snapshot: str | None,
    out: Path,
    advance: Callable[[int], None],
) -> list[dict[str, Any]]:
    """Write the images of a snapshot and their list, whose lines are returned."""
    rows: list[dict[str, Any]] = []
    for i in range(len(chosen) * job.per_prompt):
        prompt, member = chosen[i // job.per_prompt], i % job.per_prompt
        name = f"{i // job.per_prompt:05d}-{member:02d}-{slug(prompt.text)}.png"
        rows.append({"file": name, "prompt": prompt.text, "member": member, "seed": job.seed})
    out.mkdir(parents=True, exist_ok=True)
    _list(out, rows)  # first, so that the next call knows what this one has left, however it ends
    parts: list[Any] = []
    kept: list[Tensor] = []
    for index, images in generate(policy, chosen, job.spec(policy), snapshot=snapshot, **job.amount()):
        parts.append(scorer.submit(images, [chosen[i // job.per_prompt] for i in index.tolist()]))
        if scorer.later:
            kept.append(images.cpu())
        for i, image in zip(index.tolist(), images, strict=True):
            about = {key: str(rows[i][key]) for key in ("prompt", "seed", "member")}
            save_image(image, out / rows[i]["file"], about)
        advance(len(images))
    if scorer.names:
        groups = torch.arange(len(chosen)).repeat_interleave(job.per_prompt)
        owners = [chosen[int(i)] for i in groups]
        scores = scorer.finish(
            torch.cat([part.result() for part in parts]), kept, owners, groups, lambda: policy.offloaded()
        )
        for row, values in zip(rows, scores.tolist(), strict=True):
            row["scores"] = {name: _known(value) for name, value in zip(scorer.names, values, strict=True)}
        _list(out, rows)
    return rows


def _list(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    write_text(folder / ROWS, "".join(f"{json.dumps(row)}\n" for row in rows))


def _known(score: float) -> float | None:
    """None for NaN: the reward does not apply."""
    return None if score != score else round(score, 6)


def _entries(rewards: Mapping[str, Mapping[str, Any] | Entry]) -> dict[str, Entry]:
    return {name: given if isinstance(given, Entry) else Entry(name, given) for name, given in rewards.items()}


def scorer_for(model: str, rewards: Mapping[str, Mapping[str, Any] | Entry], device: torch.device) -> Scorer:
    """Of the rewards by name; UserError for one that is another model's stand-in (`diffrl.tools.stand_ins`)."""
    from diffrl.tools.stand_ins import check_reward

    entries = _entries(rewards)
    for entry in entries.values():
        check_reward(model, entry.plugin, entry.arguments)
    return Scorer(build_rewards(entries, device))


class Scores(dict[str, Any]):
    """What `evaluate` returns; its text is a small table of the means, and of what the LoRA changes where the base was
    judged, too.
    """

    def __str__(self) -> str:
        rows = []
        for name, mean in [*self["mean"].items(), ("diversity", self["diversity"])]:
            text = "applies to none of the prompts" if mean is None else f"{mean:.4f}"
            text += _error(None if mean is None else self["standard_error"].get(name))
            if change := self.get("change", {}).get(name):
                before = self["base"]["mean"].get(name, self["base"]["diversity"])
                moved = f"{change['mean']:+.4f}{_error(change['standard_error'])}"
                text = f"{text:<19}  base {before:.4f}  change {moved}"
            rows.append(f"{name:<24}{text}")
        return "\n".join(rows)

    __repr__ = __str__


def _error(value: float | None) -> str:
    return "" if value is None else f" +- {value:.4f}"


def evaluate(
    *,
    rewards: Mapping[str, Mapping[str, Any] | Entry],
    out: Path | None = None,
    policy: Policy | None = None,
    base: bool = False,
    **drawing: Any,
) -> Scores:
    """Score a `Drawing`; returns, and writes if asked, means, standard errors, diversity and every image's scores.

    Args:
        rewards: the parameters of each plugin by its name (or `path/to/file.py:Class`), or its `Entry`.
        out: the JSON file.
        policy: the model of the drawing, where it is loaded already.
        base: also judge the model without its LoRA, on the same prompts and noise: "base" has its means, their errors
            and diversity, "change" the mean of the paired differences, its standard error and the p-value of a t-test.
        drawing: the keys of `Drawing`.
    """
    started = time.perf_counter()
    job = Drawing(**drawing)
    scorer = scorer_for(job.model, rewards, join_processes().device)
    chosen, policy = job.chosen(), policy or job.policy()
    job = job.settled(policy.backbone)
    features = load_features(default_features(job.model), policy.device)
    with progress("drawing and scoring", len(chosen) * job.per_prompt * (1 + base)) as advance:
        evaluator = Evaluator(policy, scorer, features, job.spec(policy), job.per_prompt, job.batch_size)
        found = evaluator.score(chosen, "default", job.seed, advance=advance)
        before = evaluator.score(chosen, None, job.seed, advance=advance) if base else None
    scores = found.scores
    result = Scores()
    result |= {
        "diffrl_version": __version__,
        **asdict(job),
        "prompts": job.prompts if isinstance(job.prompts, str) else [prompt.text for prompt in chosen],
        "rewards": {name: dict(entry.arguments) for name, entry in _entries(rewards).items()},
        "prompts_count": len(chosen),
        "seconds": round(time.perf_counter() - started, 2),
        **_means(scorer.names, found, job.per_prompt),
        "parts": {name: float(column.nanmean()) for name, column in found.parts.items()},
        "scores": {name: [_known(score) for score in scores[:, k].tolist()] for k, name in enumerate(scorer.names)},
    }
    if before is not None:
        one, two = (side.by_prompt(scorer.names, job.per_prompt) for side in (before, found))
        pairs = {name: differences(one[name], two[name]) for name in [*scorer.names, "diversity"]}
        result["base"] = _means(scorer.names, before, job.per_prompt)
        result["change"] = {
            name: {"mean": interval(gap)[0], "standard_error": standard_error(gap), "p": p_value(gap)}
            for name, gap in pairs.items()
            if len(known(gap))
        }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, result)
    return result


def _means(names: Sequence[str], found: Evaluated, per_prompt: int) -> dict[str, Any]:
    """Of each reward, with its standard error; images of one prompt are not independent: the error is over prompts."""
    columns = found.by_prompt(names, per_prompt)
    errors = {name: standard_error(columns[name]) for name in names}
    return {"mean": summarise(names, found.scores), "standard_error": errors, **found.breadth()}
