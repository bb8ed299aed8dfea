"""Does a config fit into memory? The real modules run on fake tensors: shapes flow, nothing is computed or stored.

So every family, resolution, LoRA and option is counted as it is, on any machine: the largest sum of bytes that are
alive at one time in a rollout's forward, a decoding and a training micro-batch; and beside the first two the rewards'
weights, by what they say of themselves. What is not seen: the allocator's gaps, the device's own context, the rewards'
activations. The arithmetic of an epoch is counted in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import psutil
import torch
from accelerate import Accelerator
from torch import Tensor

from diffrl.config import Config
from diffrl.config.measuring import Student
from diffrl.memory.buffers import held
from diffrl.memory.counted import Counted
from diffrl.memory.reward_memory import reward_memory
from diffrl.memory.selection import micro_batches, rollout_forwards
from diffrl.memory.step_profile import ImageItself, Keyed, StepProfile
from diffrl.objectives.minibatches import AUTO_ROWS
from diffrl.objectives.objective import Cost, Objective
from diffrl.policy import PRECISIONS
from diffrl.policy.merged import KEPT
from diffrl.policy.resizing import resized
from diffrl.run.build import build_objective

GIB = 2**30
CONTEXT = GIB // 2  # of a CUDA process before its first tensor, roughly
SLACK = 1.1  # the allocator's gaps
# What should stay free beside that. Of ten peaks of an H200 ("peak_gib" in assets/results/gpu) eight are 0.997 to 1.003
# times the count before the gaps, and FLUX.1's 1.02 and 1.04: they may be its decoding, for which cuDNN takes workspace
# where there is room (9.5 GiB for SD3.5's 6.1). At one peak the allocator had reserved 1.5 % more.
MARGIN = 1.06
EPOCH = "the epoch's latents, steps and texts"
ENCODING, SCORING, APART = "encoding", "scoring, offloaded rewards beside sampling", "scoring, a reward apart"
REWARDS = "rewards that stay"
PICTURE = "encoding a picture of the set"
JUDGING = "evaluating at its own size"  # `evaluate.resolution`


@dataclass(frozen=True)
class Fit:
    """Bytes. `parts` are on the device all the time; `peaks` come on top of them, one at a time."""

    parts: Mapping[str, int]
    peaks: Mapping[str, int]
    rows: int  # of a training micro-batch
    host: int  # of main memory: text encoders, what else waits there; as pages of files processes share it
    work: Mapping[str, float]  # floating-point operations of an epoch by phase, text encoders and rewards left out
    # Of one batch, one chunk and one micro-batch, keyed as `peaks`.
    operations: Mapping[str, int] = field(default_factory=dict)
    read: int = 0  # from the disk into main memory, where all of the model is for a moment, in the run's type
    copied: int = 0  # between main memory and the device in an epoch, for offloaded rewards
    unknown: tuple[str, ...] = ()  # rewards on the device that do not say what they take
    # Where texts keep their own lengths: the tokens counted for each, and whether the run's longest prompt has so many.
    text: tuple[int, bool] | None = None

    def evaluating(self, config: Config, world: int) -> float:
        """Floating-point operations of one evaluation's images on each device, without their judges."""
        evaluate, rollout = config.evaluate, config.rollout
        share = -(-evaluate.prompts // world) * evaluate.per_prompt
        own = any(name.startswith(JUDGING) for name in self.operations)
        batch = min(rollout.batch_size, share) if own else rollout.batch_size
        step, decoding = list(self.operations.values())[PICTURE in self.operations :][:2]
        images = (1 + len(config.evaluate.also)) * evaluate.prompts * evaluate.per_prompt / world
        return images * ((evaluate.steps or rollout.steps) * step / batch + decoding)  # in chunks of 1, at most

    @property
    def total(self) -> int:
        """What a device should have free."""
        return CONTEXT + int(SLACK * (sum(self.parts.values()) + max(self.peaks.values())))


def merged_part(copies: int = KEPT) -> str:
    """The name of the part that so many merged weights of each layer are."""
    return f"merged weights, {copies} of them"


class Estimator:
    """Counts what one process of `world` needs for a config, of which only the model's configs are read, no weights.

    `sharded`: FSDP2 spreads the network over them; the block that runs is whole, and so is the next one on its way.
    `tell` hears which phase is being counted, and how many there are. Raises UserError as loading the model would.
    """

    def __init__(
        self,
        config: Config,
        world: int = 1,
        sharded: bool = False,
        counted: Counted | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.config, self.world, self.tell = config, world, tell
        self.sharded = sharded and world > 1
        self.counted = counted or Counted()
        self.hollow = self.counted.hollow(config)
        self.backbone, self.lora = self.hollow.backbone, self.hollow.lora
        self.merging = not (config.engine.compile or self.sharded)  # what is compiled does not merge
        stand_ins = {name: ImageItself(name) for name in config.rewards} if config.method.decodes else {}
        self.objective = build_objective(config, config.rollout, stand_ins)
        self.sizes = micro_batches(config, self.objective, world)
        split = any(size % config.rollout.group_size for size in self.sizes)
        self.cost = self.objective.cost(config.rollout, split, config.optimiser_steps)
        self.phases = StepProfile(self.backbone, config)
        self.judges = reward_memory(config)

    def fit(self, known: Fit | None = None) -> Fit:
        """`known`: a fit whose `peaks` are not to be counted again."""
        config, backbone, objective = self.config, self.backbone, self.objective
        parts, peaks, operations = self._parts(), dict[str, int](), dict[str, int]()
        text = backbone.blank(1, PRECISIONS[config.optimise.precision]).nbytes
        beside = held(config, backbone, objective, self.lora, text, self.world)
        parts[EPOCH], away = beside.always, 0
        phases = self._phases()
        if kept := self.merged():
            # Two references push the trained LoRA's out of the cache, and the graph still has them.
            copies = KEPT + len(objective.penalties) - 1
            parts[merged_part(copies)] = away = copies * sum(tensor.nbytes for tensor in kept)
        for number, (name, phase) in enumerate(phases.items(), start=1):
            if known is not None and name in known.peaks:
                peaks[name], operations[name] = known.peaks[name], known.operations[name]
                continue
            self.tell(f"counting {name} ({number} of {len(phases)})")
            count = self.hollow.count(self.phases, phase, self.merging)
            # What an epoch keeps, beside what a phase needs itself: known peaks have it already.
            operations[name], peaks[name] = count.operations, count.peak + getattr(beside, name.split()[0], 0)
        work = self._work(operations)
        encoders = self.hollow.encoders
        waits, judges = parts["network"] + away, self.judges
        # Encoders, and rewards, that are smaller than what makes room for them need nothing on top of the parts.
        peaks[ENCODING] = max(encoders - (waits if config.engine.encoders == "apart" else 0), 0)
        students = self._add_students(peaks)
        if judges.resident:
            parts[REWARDS] = sum(judges.resident.values())
        if judges.offloaded:
            most = max(size for name, size in peaks.items() if name.startswith(("sampling", "decoding", JUDGING)))
            peaks[SCORING] = most + sum(judges.offloaded.values())
        if judges.exclusive:
            # While a student's images are judged, it is the student that makes room.
            peaks[APART] = max(max(judges.exclusive.values()) - (0 if config.evaluate.also else waits), 0)
        # The network lies there before it is spread over devices, and while others take its place.
        room = config.engine.encoders == "apart" or judges.exclusive
        below = self.hollow.network if self.sharded or room else 0
        host = below + encoders + students + judges.host
        copied = judges.copied(parts["network"])
        length = (backbone.max_length, backbone.prompts_length is not None) if backbone.own_lengths else None
        return Fit(
            parts, peaks, max(self.sizes), host, work, operations, self.hollow.read, copied, judges.unknown, length
        )

    def merged(self) -> list[Tensor]:
        """Weights with the LoRA in them, which rollouts keep."""
        return self.hollow.merged() if self.merging else []

    def _parts(self) -> dict[str, int]:
        hollow, optimise = self.hollow, self.config.optimise
        copies = 1 + len(self.objective.snapshots) + self.cost.loras + bool(optimise.ema.decay)
        copies += self.config.lora.start is not None and self.config.lora.reference == "start"
        frozen = hollow.network
        if self.sharded and hollow.block:
            frozen = frozen // self.world + 2 * hollow.block
        return {
            "network": frozen,
            "positions and other tables of the network": hollow.tables * PRECISIONS[optimise.precision].itemsize,
            "autoencoder": hollow.autoencoder,
            f"LoRA, {copies} of them": copies * self.lora,
            "gradient and Adam's moments": 3 * self.lora,
        }

    def _phases(self) -> dict[str, Keyed]:
        """By name; the first word is that of `Held`. Where nothing is drawn to train on, evaluations still draw."""
        rollout, objective, rows, phases = self.config.rollout, self.objective, max(self.sizes), self.phases
        free, guidance = self.backbone.classifier_free, rollout.guidance_scale
        batch, trained = (
            count * (2 if free and scale != 1 else 1)
            for count, scale in ((rollout.batch_size, guidance), (rows, objective.guidance_scale))
        )
        found: dict[str, Keyed] = {PICTURE: phases.picture} if self.config.image_set is not None else {}
        if (judged := resized(self.backbone, self.config.evaluate.resolution, "evaluate.resolution")) is not None:
            evaluate = self.config.evaluate
            images = min(rollout.batch_size, -(-evaluate.prompts // self.world) * evaluate.per_prompt)
            drawn = rollout.model_copy(update={"batch_size": images})
            larger = StepProfile(judged, self.config.model_copy(update={"rollout": drawn}))
            found[f"{JUDGING} {images * batch // rollout.batch_size} rows"] = larger.sampling(images, guidance)
            found[f"{JUDGING}, decoding"] = larger.decoding
        return found | {
            f"sampling {batch} rows": phases.sampling(rollout.batch_size, guidance),
            "decoding": phases.decoding,
            f"training {trained} rows": phases.training(rows, objective, guidance_beside(objective, self.cost)),
        }

    def _work(self, operations: Mapping[str, int]) -> dict[str, float]:
        """Of an epoch, from what one batch, one chunk and one micro-batch take."""
        config, objective, rollout = self.config, self.objective, self.config.rollout
        sampling, decoding, training = (
            operations[name] for name in operations if name != PICTURE and not name.startswith(JUDGING)
        )
        # Of an epoch's images, those that are drawn.
        rival = config.image_set is not None and config.image_set.rival
        drawn = 0.5 if rival else config.drawn_groups / rollout.groups
        steps = config.objective_section.trained_steps(rollout)
        images, passes = drawn * rollout.images / self.world, config.optimise.inner_epochs * steps
        batch = rollout.batch_size * (2 if self.backbone.classifier_free and rollout.guidance_scale != 1 else 1)
        inverted = (1 - drawn) * rollout.images / self.world if config.optimise.noise == "path" else 0
        silent = sampling / batch * silent_forwards(objective, self.backbone.classifier_free, self.cost)
        work = {
            "sampling": drawn * rollout_forwards(config, objective, self.world) * sampling / rollout.batch_size,
            "inverting": inverted * rollout.steps * sampling / batch,
            "decoding": (images + rollout.candidates / self.world) * decoding / self.phases.chunk,
            "training": rollout.images / self.world * passes * self.cost.share * (training / max(self.sizes) + silent),
        }
        return {name: value for name, value in work.items() if value}

    def _add_students(self, peaks: dict[str, int]) -> int:
        """What the models of `evaluate.also` need, put into `peaks`; what of them is in main memory."""
        host, config = 0, self.config
        for name, section in config.evaluate.also.items():
            own = _drawn(section, config)
            hollow = self.counted.hollow(own)
            backbone, count, guidance = hollow.backbone, config.rollout.batch_size, own.rollout.guidance_scale
            weights = hollow.network + hollow.lora + hollow.autoencoder
            rows = count * (2 if backbone.classifier_free and guidance != 1 else 1)
            phases = StepProfile(backbone, own)
            peak = max(hollow.count(phases, one).peak for one in (phases.sampling(count, guidance), phases.decoding))
            peak += KEPT * sum(tensor.nbytes for tensor in hollow.merged())
            peaks[f"sampling {rows} rows on {name}"] = peak + weights
            host += hollow.encoders + weights
        return host


def _drawn(student: Student, config: Config) -> Config:
    """The trained model's config with a student's model, base and guidance."""
    guidance = config.rollout.guidance_scale if student.same else student.guidance_scale
    size = config.evaluate.resolution or config.rollout.resolution
    rollout = config.rollout.model_copy(update={"guidance_scale": guidance, "resolution": size})
    engine = config.engine.model_copy(update={"base": student.base})
    return config.model_copy(update={"model": student.source(config.model), "rollout": rollout, "engine": engine})


def estimate(
    config: Config,
    world: int = 1,
    sharded: bool = False,
    counted: Counted | None = None,
    known: Fit | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Fit:
    """What one process of `world` needs for this config; see `Estimator` and its `fit`."""
    return Estimator(config, world, sharded, counted, tell).fit(known)


def auto_micro_batch(config: Config, device: torch.device, accelerator: Accelerator, sharded: bool = False) -> Config:
    """The config with a number in the place of `optimise.micro_batch: auto`, the same on all processes.

    As many rows as four fifths of the free memory, less `MARGIN`, hold by the estimate, beside what is loaded already.
    """
    if config.optimise.micro_batch != "auto":
        return config
    free, world, counted = 0.8 / MARGIN * free_bytes(device), accelerator.num_processes, Counted()

    def training(rows: int) -> tuple[Config, float]:
        optimise = config.optimise.model_copy(update={"micro_batch": rows})
        tried = config.model_copy(update={"optimise": optimise})
        fit = estimate(tried, world, sharded, counted)
        peak = max(size for name, size in fit.peaks.items() if name.startswith("training"))
        to_come = fit.parts["network"] if sharded and world > 1 else 0  # it is shared out later
        return tried, SLACK * (peak + fit.parts[EPOCH] + to_come)

    found, needed = training(AUTO_ROWS)
    rows = AUTO_ROWS if needed <= free else max(int(AUTO_ROWS * free / needed), 1)
    rows = int(accelerator.gather(torch.tensor([rows], device=accelerator.device)).min())
    return found if rows == AUTO_ROWS else training(rows)[0]


def free_bytes(device: torch.device) -> int:
    """Of the device; of the machine for the CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def silent_forwards(objective: Objective, classifier_free: bool, cost: Cost) -> float:
    """Forwards without gradient for each training row: the objective's own, and those of what its penalty refers to."""
    penalty, plain, held = objective.penalty, objective.guidance_scale, _guidance_of_reference(objective)
    row, anchor = (2 if classifier_free and guidance != 1 else 1 for guidance in (plain, held))
    more = sum(count * (2 if classifier_free and guidance != 1 else 1) for count, guidance in cost.guided)
    return more + cost.forwards * row + (anchor * penalty.share if penalty.beta else 0)


def guidance_beside(objective: Objective, cost: Cost) -> float:
    """The guidance of the largest forward without gradient while a micro-batch's graph waits; 0: none does.

    References that are kept through a step come before it, and so do those that a coupled objective measures it with.
    """
    plain, held = objective.guidance_scale, _guidance_of_reference(objective)
    if objective.penalty.beta and not objective.penalty.kept:
        return plain if held == 1 else held
    return plain if cost.waiting else 0.0


def _guidance_of_reference(objective: Objective) -> float:
    """With which the penalty's reference predicts; see `Penalty.anchor`."""
    penalty = objective.penalty
    if penalty.guidance is None or penalty.reference is not None:
        return objective.guidance_scale
    return penalty.guidance
