"""`diffrl search`: every prompt's best image under rewards, for a budget of network forwards; resumable, also by many.

A prompt is searched once for each *arm*: a method, on the model or, to compare, on the model without its LoRA. An arm's
candidates come in one order, so the best image so far is known at every budget up to the whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffrl.drawing import Drawing, scorer_for
from diffrl.errors import UserError
from diffrl.launched import join_processes
from diffrl.methods.direct.srpo import column
from diffrl.plugins import short_name
from diffrl.policy import Policy
from diffrl.prompts import Prompt
from diffrl.records.disk import write_json
from diffrl.records.tracking import save_image
from diffrl.report.sections import pick
from diffrl.rewards.answers import applies
from diffrl.rewards.building import Entry
from diffrl.rewards.kinds import kind_of
from diffrl.rewards.protocol import Reward, ability, lower_is_better
from diffrl.rewards.scoring import Scorer
from diffrl.sampling import SamplerSpec
from diffrl.tools.progress_bar import progress
from diffrl.tools.sharded_jsonl import ShardedJsonl
from diffrl.version import __version__

from . import methods
from .methods import Bench, Finished
from .page import write_search

ROWS = "search.jsonl"
Row = Mapping[str, Any]  # of that file: one prompt's search by one arm


@dataclass(frozen=True)
class Settings:
    """What is searched for, and how.

    rewards, watch: the parameters of each plugin by its name; watched ones are measured and never searched for.
    weights: of the rewards in the value, 1 unless given; a reward whose card says that lower is better counts negative.
    budget: network forwards for each prompt. population, temperature: of particles; strength: of the gradient.
    good: the value from which on refine leaves a prompt alone; None: it takes every round.
    base: also search the model without its LoRA, from the same noise.
    """

    rewards: Mapping[str, Mapping[str, Any]]
    budget: int
    methods: tuple[str, ...] = ("evo",)
    watch: Mapping[str, Mapping[str, Any]] | None = None
    weights: Mapping[str, float] | None = None
    population: int = 8
    temperature: float = 0.5
    strength: float = 100.0
    base: bool = False
    good: float | None = None

    def arms(self) -> list[tuple[str, str, str | None]]:
        """(name, method, snapshot) of each."""
        models = (("base", None), ("trained", "default")) if self.base else (("", "default"),)
        return [(f"{method} {name}".strip(), method, on) for name, on in models for method in self.methods]


def search(settings: Settings, *, out: Path, **drawing: Any) -> dict[str, Any]:
    """Write `out/images/*.png`, `out/search.jsonl`, `out/search.json` and `out/report.html`; returns search.json.

    Args:
        drawing: the keys of `Drawing`, without `per_prompt`: the budget decides how many images are drawn.

    Raises:
        UserError: a budget below one image, a reward that cannot be searched for, a folder with another search.
    """
    job, accelerator = Drawing(**drawing), join_processes()
    scorer, watcher = (
        scorer_for(job.model, {short_name(name): Entry(name, more) for name, more in given.items()}, accelerator.device)
        for given in (settings.rewards, settings.watch or {})
    )
    chosen, policy = job.chosen(), job.policy()
    job = job.settled(policy.backbone)
    _check(settings, scorer.rewards, watcher.rewards, chosen)
    benches = _benches(settings, job, policy, scorer)
    tasks = [(arm, place) for arm in benches for place in range(len(chosen))]
    pieces = ShardedJsonl(out, ROWS, "search")
    record = _record(settings, job, chosen)
    if accelerator.is_main_process:
        pieces.claim(record)
        (out / "images").mkdir(exist_ok=True)
    accelerator.wait_for_everyone()
    mine, _ = pieces.share(len(tasks), accelerator)
    with progress("searching", len(mine)) as advance:
        for arm in benches:
            places = [tasks[i][1] for i in mine if tasks[i][0] == arm]
            at_once = max(job.batch_size // max(settings.budget // benches[arm][1].image(), 1), 1)
            for start in range(0, len(places), at_once):
                part = places[start : start + at_once]
                logs = _searched(settings, *benches[arm], [chosen[i] for i in part])
                for place, log in zip(part, logs, strict=True):
                    row = log.row(out, arm, place, chosen[place], scorer.names, watcher, job.seed)
                    pieces.add(accelerator.process_index, list(benches).index(arm) * len(chosen) + place, row)
                advance(len(part))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        pieces.gather(len(tasks))
        rows = list(pieces.rows().values())
        record["prompts"] = job.prompts if isinstance(job.prompts, str) else None
        result = {**record, **_summary(settings, rows, scorer, watcher, benches)}
        write_json(out / "search.json", result)
        write_search(out, result, rows)
    accelerator.wait_for_everyone()
    return dict(json.loads((out / "search.json").read_text(encoding="utf-8")))


def _benches(settings: Settings, job: Drawing, policy: Policy, scorer: Scorer) -> dict[str, tuple[str, Bench]]:
    """Each arm's method, and what it draws and judges with. Raises UserError for a budget below one image."""
    value, critic = Value(scorer, settings.weights or {}), _critic(scorer.rewards)
    judged = (scorer.score, value, value.ascend, critic)
    benches = {
        name: (method, Bench(policy, _spec(job, policy, method), job.seed, job.batch_size, on, *judged))
        for name, method, on in settings.arms()
    }
    for _, bench in benches.values():
        _check_budget(settings, bench)
    return benches


class Value:
    """The weighted sum (...,) float64 of the scores (..., R), higher is better; one that does not apply counts 0."""

    def __init__(self, scorer: Scorer, weights: Mapping[str, float]) -> None:
        lower, self.rewards = lower_is_better(scorer.rewards), scorer.rewards
        self.weights = [weights.get(name, 1.0) * (-1 if name in lower else 1) for name in scorer.names]

    def __call__(self, scores: Tensor) -> Tensor:
        return (scores.double() * torch.tensor(self.weights, dtype=torch.float64)).nansum(-1)

    def ascend(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """The value (n,) of images (n, 3, H, W), with its graph; of rewards that are differentiable."""
        columns = [column(reward, images, prompts, None) for reward in self.rewards.values()]
        return torch.stack([weight * one for weight, one in zip(self.weights, columns, strict=True)]).sum(0)


def _spec(job: Drawing, policy: Any, method: str) -> SamplerSpec:
    """As the model is sampled otherwise; particles need noise on the way, which they draw by cps or DDIM."""
    spec = job.spec(policy)
    if method != "particles":
        return spec
    name = "cps" if spec.sampler != "ddim" else "ddim"
    level = methods.LEVEL if name == "cps" else 1.0
    return spec.model_copy(update={"sampler": name, "noise_level": level})


def _check(
    settings: Settings, rewards: Mapping[str, Reward], watched: Mapping[str, Reward], prompts: Sequence[Prompt]
) -> None:
    for option, given in (("--rewards", rewards), ("--watch", watched)):
        for name, reward in given.items():
            if what := kind_of(reward).compares:
                raise UserError(f'{option}: "{name}" compares {what}; a search needs a score of each image')
    if "gradient" in settings.methods:
        for name, reward in rewards.items():
            if not ability(reward, "differentiable"):
                able = "`diffrl rewards list` says which are"
                raise UserError(f'--method: gradient needs differentiable rewards, and "{name}" is not one; {able}')
    if "refine" in settings.methods and _critic(rewards) is None:
        raise UserError("--rewards: refine needs one that rewrites prompts, such as vlm")
    for prompt in prompts:
        if not any(applies(reward, prompt.text, prompt.metadata) for reward in rewards.values()):
            raise UserError(f'--rewards: none of {", ".join(rewards)} can judge the prompt "{prompt.text}"')


def _check_budget(settings: Settings, bench: Bench) -> None:
    if settings.budget < bench.image():
        text = f"{bench.image()}: {bench.spec.steps} steps of {bench.cost} forward{'s' * (bench.cost > 1)}"
        raise UserError(f"--budget: {settings.budget} forwards for each prompt, but one image takes {text}")
    if "particles" in settings.methods and settings.population > bench.batch_size:
        text = f"{settings.population} particles are resampled together"
        raise UserError(f"--population: {text}, but --batch-size is {bench.batch_size}")
    if "evo" in settings.methods and bench.spec.sampler == "dpm2":
        raise UserError("--sampler: evo goes on from single states, and dpm2 needs the step before; use euler or ddim")


def _searched(settings: Settings, method: str, bench: Bench, prompts: Sequence[Prompt]) -> list[Log]:
    """One arm's search of some prompts."""
    logs, budget = [Log() for _ in prompts], settings.budget
    if method == "particles":
        found = methods.particles(bench, prompts, budget, settings.population, settings.temperature)
    elif method == "evo":
        found = methods.evolution(bench, prompts, methods.generations(budget, bench.spec.steps, bench.cost))
    elif method == "gradient":
        found = methods.gradient(bench, prompts, budget, settings.strength)
    elif method == "refine":
        assert bench.rewrite is not None, "checked before anything is drawn"
        found = methods.refine(bench, prompts, budget, bench.rewrite, settings.good)
    else:
        found = methods.best_of_n(bench, prompts, budget)
    for finished in found:
        value = bench.value(finished.scores)
        for i, prompt in enumerate(finished.prompt):
            logs[prompt].add(finished, i, float(value[i]))
    return logs


def _critic(rewards: Mapping[str, Reward]) -> methods.Rewrite | None:
    """The first of the rewards that can rewrite a prompt."""
    for reward in rewards.values():
        if (rewrite := ability(reward, "rewrite")) is not None:
            return lambda images, prompts: rewrite(images, [p.text for p in prompts], [p.metadata for p in prompts])
    return None


class Log:
    """One prompt's candidates in their order, and those that were the best so far, with their images."""

    def __init__(self) -> None:
        self.forwards: list[int] = []
        self.values: list[float] = []
        self.records: list[dict[str, Any]] = []
        self.images: list[Tensor] = []

    def add(self, finished: Finished, i: int, value: float) -> None:
        forwards = finished.forwards[i]
        self.forwards.append(forwards)
        self.values.append(value)
        if self.records and value <= self.records[-1]["value"]:
            return
        if self.records and self.records[-1]["forwards"] == forwards:  # of those that end together one is the best
            self.records.pop(), self.images.pop()
        scores = finished.scores[i].tolist()
        self.records.append({"forwards": forwards, "value": value, "scores": scores, "origin": finished.origin[i]})
        self.images.append(finished.images[i].cpu())

    def row(
        self, out: Path, arm: str, place: int, prompt: Prompt, names: Sequence[str], watcher: Scorer, seed: int
    ) -> dict[str, Any]:
        """Write the first record's and the best image; the row of the file. Watched rewards judge the records alone."""
        watched = watcher.score(torch.stack(self.images), [prompt] * len(self.images)).tolist()
        for record, more in zip(self.records, watched, strict=True):
            pairs = [*zip(names, record.pop("scores"), strict=True), *zip(watcher.names, more, strict=True)]
            record["scores"] = {name: None if score != score else score for name, score in pairs}
        files = {}
        for which, image in (("first", self.images[0]), ("best", self.images[-1])):
            files[which] = f"images/{place:05d}-{arm.replace(' ', '-')}-{which}.png"
            save_image(image, out / files[which], {"prompt": prompt.text, "seed": str(seed), "search": arm})
        candidates = {"forwards": self.forwards, "values": self.values}
        return {"arm": arm, "prompt": prompt.text, "files": files, "records": self.records, "candidates": candidates}


def _record(settings: Settings, job: Drawing, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What decides the images, as JSON."""
    keys = ("model", "family", "merge", "lora", "seed", "steps", "sampler", "guidance_scale", "shift", "resolution")
    texts = [[prompt.text, dict(prompt.metadata)] for prompt in prompts]
    drawn = {key: getattr(job, key) for key in keys}
    return {"diffrl_version": __version__, **drawn, **vars(settings), "prompts": texts}


def _summary(
    settings: Settings, rows: Sequence[Row], scorer: Scorer, watcher: Scorer, benches: Mapping[str, tuple[str, Bench]]
) -> dict[str, Any]:
    """Means over the prompts of the best image so far, at every budget where some prompt's changes (at most 40)."""
    arms, names = dict[str, Any](), [*scorer.names, *watcher.names]
    for arm, (method, bench) in benches.items():
        mine = [row for row in rows if row["arm"] == arm]
        marks = sorted({record["forwards"] for row in mine for record in row["records"]})
        first = max(row["records"][0]["forwards"] for row in mine)
        marks = sorted({*pick([mark for mark in marks if mark >= first], 39), settings.budget})
        spent = max(row["candidates"]["forwards"][-1] for row in mine)
        points = [{"forwards": mark, **_means(mine, names, mark)} for mark in marks]
        about = {"method": method, "base": bench.snapshot is None and settings.base, "sampler": bench.spec.sampler}
        counts = {"steps": bench.spec.steps, "forwards_an_image": bench.image(), "forwards_spent": spent}
        arms[arm] = {**about, **counts, "images": len(mine[0]["candidates"]["values"]), "curve": points}
    count, lower = len({row["prompt"] for row in rows}), lower_is_better({**scorer.rewards, **watcher.rewards})
    return {"prompts_count": count, "trained_on": scorer.names, "lower_is_better": sorted(lower), "arms": arms}


def _means(rows: Sequence[Row], names: Sequence[str], budget: int) -> dict[str, float | None]:
    """Of each score, over the prompts to which it applies."""
    best = [[r for r in row["records"] if r["forwards"] <= budget][-1]["scores"] for row in rows]
    means = {}
    for name in names:
        known = [scores[name] for scores in best if scores[name] is not None]
        means[name] = sum(known) / len(known) if known else None
    return means
