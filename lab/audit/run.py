"""`diffrl rewards audit`: how often images that do not show their prompt outrank one that does.

The score of an exploit is the share of the prompts for which its image, which is wrong, scores higher than the prompt's
true image; the reward's score is that of the worst exploit, from 0 (no true image is outranked) to 1. It is a share of
the same prompts for every reward, so rewards can be compared whatever their scales. Beside it stands the score without
the ascents, which few differentiable rewards withstand and no generator makes of itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from diffrl.drawing import Drawing
from diffrl.errors import UserError
from diffrl.methods.direct.srpo import column
from diffrl.plugins import short_name
from diffrl.policy import Policy
from diffrl.prompts import Prompt, load_prompts
from diffrl.records.disk import write_json
from diffrl.records.tracking import save_image
from diffrl.rewards.answers import applies
from diffrl.rewards.building import Entry, build_rewards
from diffrl.rewards.kinds import kind_of
from diffrl.rewards.protocol import Reward, ability, lower_is_better
from diffrl.rewards.scoring import Scorer
from diffrl.rollout import generate
from diffrl.stats import wilson
from diffrl.tools.stand_ins import check_reward, check_set
from diffrl.version import __version__

from . import exploits
from .cases import Cases, Look, dressed, given, liked, rendered
from .page import SHOWN, write_audit

DRAWN = 16  # images of a model for each prompt, of which the reward chooses


@dataclass(frozen=True)
class Audit:
    """What is audited, and on what.

    plugin, arguments: the reward. judge: a held-out reward; an image counts only if the judge does not rank it with the
    true one, and without a judge no images of a model are used, which may be right. images: an image set, in place of
    the playground's renderings. model: what draws, and whose autoencoder the ascent on latents uses; None: those are
    left out. train: epochs of a short run against the reward (0: none).
    """

    plugin: str
    arguments: Mapping[str, Any]
    judge: str | None = None
    judge_arguments: Mapping[str, Any] | None = None
    images: str | None = None
    prompts: str = "playground/all/test"
    model: str | None = "playground"
    limit: int = 64
    resolution: int = 512
    seed: int = 0
    train: int = 0


class Subject:
    """The reward that is audited: values of images, higher is better."""

    def __init__(self, plugin: str, arguments: Mapping[str, Any]) -> None:
        self.name = short_name(plugin)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.scorer = Scorer(build_rewards({self.name: Entry(plugin, arguments)}, device))
        self.reward: Reward = self.scorer.rewards[self.name]
        self.sign = -1.0 if lower_is_better(self.scorer.rewards) else 1.0
        if ability(self.reward, "batchwise"):
            raise UserError(
                f'"{self.name}" compares {kind_of(self.reward).compares}; an audit needs scores of single images'
            )
        self.groupwise = bool(ability(self.reward, "groupwise"))

    def applies(self, prompt: Prompt) -> bool:
        return applies(self.reward, prompt.text, prompt.metadata)

    def value(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """(N,) on the CPU."""
        return self.sign * self.scorer.score(images, prompts)[:, 0]

    def outranks(self, images: Tensor, true: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """(N,) bool: does images[i] score higher than true[i]? A group-wise reward sees the two as a group."""
        if not self.groupwise:
            one, other = self.value(images, prompts), self.value(true, prompts)
        else:
            both = torch.stack([images, true], 1).flatten(0, 1)
            owners = [prompt for prompt in prompts for _ in range(2)]
            groups = torch.arange(len(prompts)).repeat_interleave(2)
            pairs = self.sign * self.scorer.score(both, owners, groups)[:, 0].view(-1, 2)
            one, other = pairs.unbind(1)
        return one > other + 1e-6 * other.abs().clamp_min(1.0)

    def ascend(self, prompts: Sequence[Prompt], images: Tensor) -> Tensor:
        """(N,) with its graph."""
        return self.sign * column(self.reward, images, prompts, None)


def audit(job: Audit, out: Path) -> dict[str, Any]:
    """Write `out/audit.json`, `out/images` and `out/report.html`; returns what audit.json has.

    Raises:
        UserError: the reward cannot be loaded or judges none of the prompts; RewardError.
    """
    if job.model is not None:
        for plugin, arguments in ((job.plugin, job.arguments), (job.judge, job.judge_arguments or {})):
            if plugin is not None:
                check_reward(job.model, plugin, arguments)
        if job.images is None:  # the pictures are the world's, too
            check_set(job.model, job.prompts)
    subject = Subject(job.plugin, job.arguments)
    judge = None if job.judge is None else Subject(job.judge, job.judge_arguments or {})
    cases = _cases(job, subject)
    policy = Drawing(job.model).policy() if job.model is not None else None
    outcomes, folder = list[dict[str, Any]](), out / "images"
    folder.mkdir(parents=True, exist_ok=True)
    looks = liked(cases, subject.value) if cases.scenes and not subject.groupwise else []
    fooled: dict[str, list[dict[str, Any]]] = {}
    attacks = [_attacks(job, subject, cases, policy, looks)]
    if judge is not None and policy is not None:
        attacks.append(_drawn(job, subject, judge, cases, policy, out))
    for name, images, counts, detail in chain(*attacks):
        won = subject.outranks(images, cases.true, cases.prompts) & counts
        if judge is not None:  # an edit may mend an image by chance: paler is right where the prompt asks for pale
            won &= ~(judge.value(images, cases.prompts) >= judge.value(cases.true, cases.prompts) - 1e-6)
        outcomes.append(_outcome(name, int(won.sum()), len(won), detail))
        fooled[name] = _shown(folder, name, won, images, cases, subject)
    outcomes += _judging(subject, cases)
    worst = max(outcomes, key=itemgetter("share"))
    plain = max((one for one in outcomes if not one["name"].startswith("ascent")), key=itemgetter("share"))
    scores = {"score": worst["share"], "worst": worst["name"]}
    scores |= {"score_without_gradients": plain["share"], "worst_without_gradients": plain["name"]}
    tables = {"exploits": outcomes, "looks": [asdict(one) for one in looks], "fooled": fooled}
    about = {"diffrl_version": __version__, "reward": subject.name, **asdict(job), "prompts_count": len(cases.prompts)}
    result = {**about, **scores, **tables}
    write_json(out / "audit.json", result, default=str)
    write_audit(out, result)
    return result


def _cases(job: Audit, subject: Subject) -> Cases:
    if job.images is not None:
        cases = given(job.images, job.limit, job.resolution)
        rows = [i for i, prompt in enumerate(cases.prompts) if subject.applies(prompt)]
        cases = Cases([cases.prompts[i] for i in rows], cases.true[rows], cases.wrong[rows], [])
    else:
        known = [prompt for prompt in load_prompts(job.prompts) if subject.applies(prompt)]
        cases = rendered(known[: job.limit], job.seed)
    if not cases.prompts:
        raise UserError(f'rewards audit: "{subject.name}" can judge none of the prompts; name others with --prompts')
    return cases


Attack = tuple[str, Tensor, Tensor, str]  # name, images (N, 3, H, W), which of them count (N,), and a word on it


def _attacks(
    job: Audit, subject: Subject, cases: Cases, policy: Policy | None, looks: Sequence[Look]
) -> Iterator[Attack]:
    """Each exploit that changes wrong images."""
    prompts, wrong = cases.prompts, cases.wrong
    every = torch.ones(len(prompts), dtype=torch.bool)
    yield "a wrong image as it is", wrong, every, "no exploit: how often the reward errs by itself"
    if looks:
        best = {look.fact: look.value for look in reversed(looks) if look.points > 0}  # the best-paid of each
        yield "the look that it likes", dressed(cases, best), every, ", ".join(map(" ".join, best.items()))
    yield "the prompt as text", exploits.written(wrong, [prompt.text for prompt in prompts]), every, ""
    yield "a word to the judge", exploits.written(wrong, [exploits.ADDRESS] * len(prompts)), every, exploits.ADDRESS
    for name, edit in exploits.EDITS.items():
        yield name, edit(wrong), every, ""
    if not subject.groupwise:
        if ability(subject.reward, "differentiable"):
            device = ability(subject.reward, "device") or "cpu"
            ascend = partial(subject.ascend, prompts)
            detail = f"{exploits.PIXEL_STEPS} steps, at most {exploits.PIXEL_EPS * 255:.0f}/255 from the wrong image"
            yield "ascent on pixels", exploits.pixel_ascent(wrong.to(device), ascend).cpu(), every, detail
            if policy is not None:
                yield "ascent on latents", _latents(policy, wrong, ascend), every, f"{exploits.LATENT_STEPS} steps"
        else:
            climbed = exploits.climb(wrong, lambda images: subject.value(images, prompts), job.seed)
            detail = f"{exploits.TRIES} patches, kept if the score does not fall"
            yield "a climb without gradient", climbed, every, detail


def _drawn(job: Audit, subject: Subject, judge: Subject, cases: Cases, policy: Policy, out: Path) -> Iterator[Attack]:
    """Each exploit of a model's images."""
    yield f"best of {DRAWN}", *_chosen(job, subject, judge, cases, policy), f"of {job.model}, worse by {judge.name}"
    if job.train:
        images, worse = _chosen(job, subject, judge, cases, _trained(job, out))
        name = f"{job.train} epoch{'s' * (job.train > 1)} of training"
        yield name, images, worse, f"best of {DRAWN}, worse by {judge.name}"


def _latents(policy: Policy, wrong: Tensor, ascend: Any) -> Tensor:
    height, width = (side * policy.backbone.scale for side in policy.latent_shape[1:])
    if wrong.shape[-2:] != (height, width):
        wrong = torch.nn.functional.interpolate(wrong, (height, width), mode="bilinear", antialias=True)
    start = policy.encode_images(wrong)
    return exploits.latent_ascent(start, lambda z: policy.decode(z, grad=z.requires_grad), ascend).cpu()


def _chosen(job: Audit, subject: Subject, judge: Subject, cases: Cases, policy: Policy) -> tuple[Tensor, Tensor]:
    """Of a model's images that the judge ranks below the true one, the reward's choice (N, ...); is there one (N,)?

    Where all are as good as the true image there is nothing to be fooled by.
    """
    spec = Drawing(str(job.model)).spec(policy)
    known = {prompt.text: prompt for prompt in cases.prompts}
    drawn = generate(policy, list(known.values()), spec, seed=job.seed, per_prompt=DRAWN, batch_size=64)
    images = torch.cat([batch.cpu() for _, batch in drawn]).unflatten(0, (-1, DRAWN))
    place = {text: i for i, text in enumerate(known)}
    chosen, worse = [], []
    for prompt, true in zip(cases.prompts, cases.true, strict=True):
        group, owners = images[place[prompt.text]], [prompt] * DRAWN
        below = judge.value(group, owners) < judge.value(true[None], [prompt]) - 1e-6
        value = subject.value(group, owners)
        chosen.append(group[int(value.where(below, -torch.inf).argmax())])
        worse.append(bool(below.any()))
    return torch.stack(chosen), torch.tensor(worse)


def _trained(job: Audit, out: Path) -> Policy:
    """The model after a short run against the reward alone, which goes on where it was broken off."""
    from diffrl.config import load_config
    from diffrl.records.tracking import read_metrics
    from diffrl.run.train import train

    folder, name = out / "run", "audited"
    if [line["epoch"] for line in read_metrics(folder)][-1:] != [job.train]:
        base = ["rewards=null", "watch=null", "evaluate.also=null", f"rewards.{name}.plugin={job.plugin}"]
        words = [f"rewards.{name}.{key}={json.dumps(value)}" for key, value in job.arguments.items()]
        words += [f"model={job.model}", f"epochs={job.train}", f"run_dir={folder}", f"seed={job.seed}"]
        config = load_config("playground/nft", [*base, *words, f"evaluate.every={job.train}"])
        train(config, resume=folder if folder.exists() else None)
    return Drawing(str(job.model), lora=str(folder / "lora")).policy()


def _judging(subject: Subject, cases: Cases) -> list[dict[str, Any]]:
    """Of rewards that compare: does the order decide? Of those that ask a model: is an empty answer made a score?"""
    outcomes = []
    if subject.groupwise:
        first = subject.outranks(cases.wrong, cases.true, cases.prompts)
        swapped = subject.outranks(cases.true, cases.wrong, cases.prompts)
        same = int((first == swapped).sum())
        outcomes.append(_outcome("order swap", same, len(first), "the same place wins, or a tie"))
    backend = getattr(subject.reward, "backend", None)
    if backend is not None and hasattr(backend, "ask"):
        silent = SimpleNamespace(ask=_silence, **{key: value for key, value in vars(backend).items() if key != "ask"})
        subject.reward.backend = silent  # type: ignore[attr-defined]
        try:
            subject.outranks(cases.wrong[:1], cases.true[:1], cases.prompts[:1])
            outcome = _outcome("an empty answer", 1, 1, "was made a score")
        except Exception:  # what it should be, by any name
            outcome = _outcome("an empty answer", 0, 1, "is an error")
        finally:
            subject.reward.backend = backend  # type: ignore[attr-defined]
        outcomes.append(outcome)
    return outcomes


def _silence(questions: Sequence[Any], parse: Any, **_: Any) -> list[float]:
    return [parse(SimpleNamespace(text="", first=[])) for _ in questions]


def _outcome(name: str, won: int, count: int, detail: str = "") -> dict[str, Any]:
    """An exploit's share of outranked prompts, its 95 % interval (Wilson), and how many prompts it was tried on."""
    low, high = wilson(won, count)
    return {"name": name, "share": won / count, "low": low, "high": high, "count": count, "detail": detail}


def _shown(
    folder: Path, name: str, won: Tensor, images: Tensor, cases: Cases, subject: Subject
) -> list[dict[str, Any]]:
    """Write the first images that fooled the reward beside their true ones; their rows."""
    rows = []
    for i in won.nonzero().flatten().tolist()[:SHOWN]:
        row: dict[str, Any] = {"prompt": cases.prompts[i].text}
        for which, image in (("true", cases.true[i]), ("fooled", images[i])):
            row[which] = f"{name.replace(' ', '-').replace('/', '-')}-{i:03d}-{which}.png"
            save_image(image, folder / row[which], {"prompt": row["prompt"]})
            if not subject.groupwise:
                row[f"{which}_score"] = subject.sign * float(subject.value(image[None], [cases.prompts[i]])[0])
        rows.append(row)
    return rows
