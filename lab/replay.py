"""`diffrl replay`: a training image again, with what the run made of it.

All of a run's noise comes from generators keyed by (run seed, epoch, prompt, member), and a checkpoint has all that
shapes the next epoch. So an epoch is made again from the nearest checkpoint before it, whole: an advantage needs the
other images' scores. Epochs between the checkpoint and it are trained again, too. Nothing is written into the run.

symbol  meaning
g_i     what image i's rows add to the gradient of its optimiser step, penalty included, before clipping
G       that gradient, the sum of all g_i
share   <g_i, G> / <G, G>: the shares of a step's images sum to 1; below 0, an image pulls against the others
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from diffrl.config import Config, load_config
from diffrl.errors import UserError
from diffrl.methods.asking import Answers, Asker
from diffrl.methods.gardo.penalty import Gardo
from diffrl.methods.groups import ImageGroup
from diffrl.methods.votes import HumanFeedback
from diffrl.objectives.advantages import ScoredBatch
from diffrl.objectives.gradients import SumOfLosses, penalties
from diffrl.objectives.objective import Objective
from diffrl.objectives.penalty import Penalty
from diffrl.objectives.rows import Rows
from diffrl.policy import Policy
from diffrl.prepare.dry_run import without_caches
from diffrl.prompts import MixedStream, PromptStream
from diffrl.records import checkpoint, history
from diffrl.records.tracking import read_metrics
from diffrl.resources import file_of_run
from diffrl.rollout import Rollout
from diffrl.run.folder import RunFolder
from diffrl.run.hooks import RunHook
from diffrl.run.run import Run
from diffrl.run.source import Epoch
from diffrl.run.start import Start

COMPARED = ("reward/", "watch/", "loss", "grad_norm", "diversity")  # what an epoch's line has in every run


@dataclass(frozen=True)
class Replayed:
    """`facts`: what is known, as JSON takes it. `latents` (C, h, w), `image` (3, H, W) in [0, 1]; `group` (G, 3, H, W)
    are the images of its prompt."""

    facts: dict[str, Any]
    latents: Tensor
    image: Tensor
    group: Tensor


def replay(folder: Path, epoch: int, image: int, report: Callable[[str], None] = lambda text: None) -> Replayed:
    """Make image number `image` (from 0, prompt by prompt) of epoch `epoch` (from 1) again.

    On one process, with the versions and the machine of the run, it is the training image to the bit; whether it is
    shows in `facts["compared"]`: the epoch's line of metrics.jsonl against the same numbers now. `report` is told where
    it starts.

    Raises:
        UserError: no such epoch or image, an image set's picture, several processes, or a config, a prompt file, a
            model or a reward that is not what the run was trained with.
    """
    config = without_caches(load_config(file_of_run(folder, "config.yaml", "replay")))
    lines = {line["epoch"]: line for line in read_metrics(folder)}
    _check(config, folder, epoch, image, max(lines, default=0))
    run = Run(config, RunFolder(folder, main=False))  # which writes nothing
    try:
        if run.accelerator.num_processes > 1:
            raise UserError("replay: start it as one process; it makes the images of all of them")
        start = _start(run, folder, epoch)
        begun = "the untrained model" if start.path is None else start.path.name
        report(f"epoch {epoch} from {begun}, {epoch - 1 - run.epoch} epochs trained again before it")
        differ = _forward(run, epoch, lines)
        witness = Witness(run, image)
        metrics = run.loop.run_epoch(epoch - 1)
        differ |= _differences(epoch, lines.get(epoch, {}), metrics)
        names = [name for name in lines.get(epoch, {}) if name.startswith(COMPARED)]
        processes = max((int(event.get("processes", 1)) for event in history.read_history(folder)), default=1)
        compared = {"values": len(names), "differ": differ, "processes_then": processes}
        facts = {"run": folder.name, "epoch": epoch, "from": begun, "seed": config.seed} | witness.facts()
        rollout, group = witness.rollout, torch.cat(witness.pictures)
        assert rollout is not None, "the epoch has been trained"
        return Replayed(facts | {"compared": compared}, rollout.latents[image].cpu(), group[witness.place], group)
    finally:
        run.close()


def _check(config: Config, folder: Path, epoch: int, image: int, last: int) -> None:
    if config.image_set is not None:
        raise UserError("replay: this run trains on an image set, whose pictures are files already")
    if not 1 <= epoch <= last:
        raise UserError(f"EPOCH: {epoch}, but {folder} has trained epochs 1 to {last}")
    if not 0 <= image < config.rollout.images:
        rollout = config.rollout
        text = f"{rollout.groups} prompts of {rollout.group_size}"
        raise UserError(f"IMAGE: {image}, but an epoch has images 0 to {rollout.images - 1} ({text}, prompt by prompt)")


def _start(run: Run, folder: Path, epoch: int) -> Start:
    """Restore the newest intact checkpoint that is not behind the epoch's beginning; else the run's own beginning."""
    path = next((path for path in checkpoint.intact(folder) if checkpoint.epoch_of(path) < epoch), None)
    then = history.identity_at_start(folder) if path is None else checkpoint.identity_of(path)
    start = Start(True, path, then)
    try:
        if path is None:
            start.compare(run.identity)
        else:
            run.restore(start)
    except UserError as error:  # what a resume could override is not what was trained
        raise UserError(f"replay: {str(error).partition('; ')[0]}") from error
    run.prepare()
    for hook in run.hooks:
        if isinstance(hook, HumanFeedback):  # people's answers of that time
            hook.kept = 0
            for reward in hook.asked.values():
                reward.ask = partial(_answered, reward)  # type: ignore[method-assign]
    run.begin()
    return start


def _forward(run: Run, epoch: int, lines: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
    """Train what lies between the checkpoint and the epoch, and begin it; what came out otherwise than then."""
    differ: dict[str, float] = {}
    while run.epoch < epoch - 1:
        run.begin_epoch()
        metrics = run.loop.run_epoch(run.epoch)
        run.epoch += 1
        differ |= _differences(run.epoch, lines.get(run.epoch, {}), metrics)
    run.begin_epoch()
    return differ


def _differences(epoch: int, then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, float]:
    """{"EPOCH name": relative difference} of the compared values that are not equal to the last digit."""
    differ = {}
    for name, value in then.items():
        if name.startswith(COMPARED) and value != now.get(name):
            both = [float("nan") if one is None else float(one) for one in (value, now.get(name))]
            differ[f"epoch {epoch} {name}"] = abs(both[1] - both[0]) / max(abs(both[0]), 1e-12)
    return differ


def _answered(reward: Asker, run_dir: Path, epoch: int, groups: Sequence[ImageGroup], look: Any) -> Answers:
    """`ask` of a reward with the votes that the run went on with; UserError where they are gone, or were given to other
    images."""
    answers = reward.answered(run_dir, epoch, groups)
    if answers is None:
        raise UserError(
            f"replay: in {run_dir} no votes were asked for on these images of epoch {epoch}: they are gone, or "
            "this machine draws the images with other last digits"
        )
    return answers


class Witness(RunHook):
    """Looks at one image while a run's loop trains the epoch, and leaves the training as it is."""

    def __init__(self, run: Run, image: int) -> None:
        self.run, self.number = run, image
        size = run.config.rollout.group_size
        self.place = image % size  # in its group
        self.members = range(image - self.place, image - self.place + size)
        self.pictures: list[Tensor] = []
        self.scores = self.advantages = torch.empty(0)
        self.rollout: Rollout | None = None
        self.shares: Shares | None = None
        self.source, run.loop.source = run.loop.source, self
        run.hooks.append(self)
        run.objective.transforms.append(self.note)
        if isinstance(run.loop.gradients, SumOfLosses):
            run.loop.gradients = self.shares = Shares(run, run.loop.gradients, image)

    @property
    def stream(self) -> PromptStream | MixedStream:
        return self.source.stream

    def __call__(self, epoch: int) -> Epoch:
        drawn, credit = self.source(epoch), self.run.objective.credit
        spec = drawn.rollout.spec
        self.rollout = drawn.rollout
        self.scores = drawn.scores if credit is None else drawn.scores[:, credit.plan(spec).final(spec)]
        return drawn

    def note(self, advantages: Tensor, scored: ScoredBatch) -> Tensor:
        """The last transform of the advantages, which leaves them as they are."""
        self.advantages = advantages
        return advantages

    def on_images(self, images: Tensor, first: int) -> None:
        wanted = [i - first for i in self.members if first <= i < first + len(images)]
        if wanted:
            self.pictures.append(images[wanted].detach().cpu())

    def facts(self) -> dict[str, Any]:
        """What the run made of the image."""
        run, rollout = self.run, self.rollout
        assert rollout is not None
        names = run.scorer.names
        text, member = rollout.identity(self.number)
        group = [
            {"member": int(rollout.member[i]), "scores": dict(zip(names, _plain(self.scores[i]), strict=True)),
             "advantage": _plain(self.advantages[i])}
            for i in self.members
        ]  # fmt: skip
        objective, own = run.objective, group[self.place]
        rule = objective.rule
        columns = [*(run.config.rewards if rule.each else ()), *(["all"] if rule.total is not None else [])]
        return {
            "image": self.number,
            "prompt": text,
            "member": member,
            "group_number": self.number // len(self.members),
            "drawn_by": objective.samples_from,
            "scores": own["scores"],
            "columns": columns,
            "advantage": own["advantage"],
            "gate": self._gate(objective.penalty),
            "gradient": None if self.shares is None else self.shares.steps,
            "group": group,
        }

    def _gate(self, gardo: Penalty) -> dict[str, Any] | None:
        """What GARDO's gate made of it; None without one."""
        if not isinstance(gardo, Gardo) or gardo.judged is None:
            return None
        judged = gardo.judged
        auxiliary = dict(zip(gardo.auxiliary, _plain(judged.auxiliary[self.number]), strict=True))
        uncertainty = _plain(judged.u[self.number : self.number + 1])[0]
        return {"uncertainty": uncertainty, "held_back": bool(judged.gate[self.number]),
                "share": gardo.gate_share.value, "auxiliary": auxiliary}  # fmt: skip


class Shares(SumOfLosses):
    """`base`, and beside it the gradient of one image's rows alone: `steps`, one entry for each step it was in."""

    def __init__(self, run: Run, base: SumOfLosses, image: int) -> None:
        self.run, self.base, self.image = run, base, image
        self.steps: list[dict[str, float]] = []
        self._own: Tensor | None = None  # g_i of the current step
        self._rows = 0

    def add(self, objective: Objective, policy: Policy, rows: Rows, rows_of_step: float, scaler: GradScaler) -> Tensor:
        total = self.base.add(objective, policy, rows, rows_of_step, scaler)
        mine = rows.pairs[:, 0] == self.image
        if mine.any():
            own = self._gradient(objective, policy, rows, mine, rows_of_step, scaler)
            self._own = own if self._own is None else self._own + own
            self._rows += int(mine.sum())
        return total

    def _gradient(
        self, objective: Objective, policy: Policy, rows: Rows, mine: Tensor, rows_of_step: float, scaler: GradScaler
    ) -> Tensor:
        """The gradient of the rows `mine` (b,) bool through their scalars and their penalty: a pass of its own, after
        which what the objective counts is as it was."""
        parameters = [parameter for _, parameter in policy.trainable]
        means = dict(objective.means._sums)
        gated = getattr(objective.penalty, "gated", None)  # GARDO's, whose KL decides when it resets
        kl = None if gated is None else gated.kl
        phi, on = objective.scalars(policy, rows), mine.to(policy.device)
        losses = objective.loss(phi, rows)
        (slopes,) = torch.autograd.grad(losses.sum(), phi, retain_graph=True)
        total = (phi * slopes.detach())[on].sum()
        if (penalty := penalties(objective, policy, rows)) is not None:
            total = total + penalty[on].sum()
        total = scaler.scale(total / rows_of_step)
        own = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
        objective.means._sums = means
        if gated is not None:
            gated.kl = kl
        return torch.cat([gradient.flatten() for gradient in own])

    def finish(self, parameters: Sequence[nn.Parameter], reduce: Callable[[Tensor], Tensor] | None) -> None:
        self.base.finish(parameters, reduce)
        if self._own is None:
            return
        whole = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]).double()
        own = self._own.double()
        along, size = float(own @ whole), float(whole @ whole)
        self.steps.append({
            "step": self.run.loop.step + 1,
            "rows": self._rows,
            "images": self.run.config.optimise.batch_size,
            "share": along / size if size else 0.0,
            "norm": float(own.norm()) / size**0.5 if size else 0.0,
        })  # fmt: skip
        self._own, self._rows = None, 0


def _plain(values: Tensor) -> list[Any]:
    """As JSON takes it: NaN is None."""
    if values.ndim > 1:
        return [_plain(row) for row in values]
    return [None if value != value else value for value in values.tolist()]
