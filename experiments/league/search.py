"""Search without training, as an entry: of several images of the base for each judged one, the best by the proxies.

A training spends its images once, and then every image costs one; a search spends as many on the judged images alone.
The first candidate of each has the judgement's own noise, so that a search among one is the base itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from diffrl.advantages import weighted_sum
from diffrl.prompts import Prompt, load_prompts
from diffrl.rollout import generate
from diffrl.run.evaluation import evaluation_spec
from diffrl.run.train import Run
from experiments.league.checks import alike, before_training
from experiments.league.judge import NOISE, SHOWN, Judged, Task, base_strip, judge, judge_base, judgement, save_strip
from experiments.league.results import commit


def candidates(run: Run, prompts: list[Prompt], per_prompt: int, number: int, seed: int) -> tuple[Tensor, Tensor]:
    """The `number`th images (N, 3, H, W) of the base for N judged ones, prompt by prompt, and their values (N,): the
    weighted sum of the rewards that a training would be on."""
    images, values = list[Tensor](), list[Tensor]()
    amount: Any = {"per_prompt": per_prompt, "batch_size": run.config.rollout.batch_size, "snapshot": None}
    noise: Any = {"seed": NOISE} if number == 0 else {"seed": NOISE + 1 + seed, "first_member": number * per_prompt}
    for index, part in generate(run.policy, prompts, evaluation_spec(run.config), **amount, **noise):
        scores = run.scorer.submit(part, [prompts[int(i) // per_prompt] for i in index]).result()
        images.append(part.cpu())
        values.append(weighted_sum(scores[:, : len(run.loop.weights)], run.loop.weights)[:, 0])
    return torch.cat(images), torch.cat(values).nan_to_num(-torch.inf)


def best_so_far(run: Run, task: Task, prompts: list[Prompt]) -> Iterator[tuple[int, Tensor]]:
    """(how many candidates each judged image has had, the best images (N, 3, H, W)), one candidate after another."""
    best, value = candidates(run, prompts, task.per_prompt, 0, task.seed)
    yield 1, best
    for number in range(1, task.search):
        images, values = candidates(run, prompts, task.per_prompt, number, task.seed)
        better = values > value
        best[better], value = images[better], torch.maximum(value, values)
        yield number + 1, best


def searched(task: Task) -> dict[str, Any]:
    """A seed's part of a result, as `one_seed` gives it: the base, and the best of `task.search` images."""
    prompts = load_prompts(task.read.prompts.test)[: task.prompts]
    run, started = Run(task.read), time.perf_counter()
    try:
        base = found = judge_base(run, None, task)
        judging, curve, images = 0.0, list[dict[str, Any]](), torch.empty(0)
        size = run.config.rollout.batch_size
        for count, images in best_so_far(run, task, prompts):
            if count == 1:
                _show(images, task, base=True)
            elif count & (count - 1) == 0 or count == task.search:  # powers of two, and all
                mark = time.perf_counter()
                drawn = zip(torch.arange(len(images)).split(size), images.split(size), strict=True)
                found = judge(run, None, prompts, task.per_prompt, drawn=drawn)
                judging += time.perf_counter() - mark
            else:
                continue
            curve.append({"samples": count * len(images), **_logged(found)})
        _show(images, task)
        checked = before_training(run.config, task.track, task.prompts)
        alike(run, task, checked)
        return {
            "seed": task.seed,
            "commit": commit(),
            **judgement(run, task, base, found),
            "images": task.search * len(images),
            "forwards": task.search * len(images) * evaluation_spec(run.config).steps,
            "optimiser_steps": 0,
            "training_seconds": 0.0,
            "search_seconds": round(time.perf_counter() - started - judging, 1),
            "evaluation_seconds": round(judging, 1),
            "overhead_share": None,
            "logged": {},
            "curve": curve,
            "check": checked.as_json(),
        }
    finally:
        run.close()


def _show(images: Tensor, task: Task, base: bool = False) -> None:
    """The first image of each of the first prompts, as `write_strips` shows a trained model's."""
    if task.strip is not None:
        save_strip(images[:: task.per_prompt][:SHOWN], base_strip(task.strip) if base else task.strip)


def _logged(judged: Judged) -> dict[str, float]:
    return {f"eval/{name}": round(value, 5) for name, value in judged.means.items() if value is not None}
