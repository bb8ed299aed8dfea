"""D2-Align's stage 1 in a run: the pool of images, the learned direction in the run's folder, and its evidence.

What is learned, and how, is in `diffrl.methods.d2align.direction`; N images of P prompts, D numbers of an embedding.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from diffrl.config import Config, dump
from diffrl.errors import UserError
from diffrl.methods.d2align import D2AlignSection
from diffrl.methods.d2align.corrected import Corrected, Direction, Identity, load_direction
from diffrl.methods.d2align.direction import learn, reconstructed, word_direction
from diffrl.methods.d2align.evidence import evidence
from diffrl.policy import Conditioning, Policy
from diffrl.prompts import Prompt, PromptStream, load_prompts
from diffrl.records import checkpoint, saving
from diffrl.records.disk import write_text
from diffrl.records.tracking import save_image
from diffrl.reward_kinds.fingerprint import essential, fingerprint
from diffrl.rewards.protocol import Embedder, Reward
from diffrl.rollout import Revision, SamplerSpec, generate, remake
from diffrl.run.build import Build
from diffrl.run.hooks import RunHook
from diffrl.samplers import schedule

FOLDER, FILE, EVIDENCE = "d2align", "direction.safetensors", "evidence.json"
BLOCK = 256  # images after which the pool is saved


def pool_prompts(prompts: Sequence[Prompt], pool: int, seed: int) -> tuple[list[Prompt], int]:
    """(P different prompts, images of each) that give at least `pool` images, with as many prompts as there are."""
    count = min(pool, len(prompts))
    chosen = PromptStream(prompts, count, seed).batch(0)
    return [prompts[i] for i in chosen], math.ceil(pool / count)


def embed_images(
    policy: Policy,
    reward: Embedder,
    prompts: Sequence[Prompt],
    spec: SamplerSpec,
    *,
    seed: int,
    per_prompt: int,
    batch_size: int,
    accelerator: Accelerator,
    revise: Revision | None = None,
) -> Tensor:
    """(P per_prompt, D) embeddings of the pretrained model's images, float32 on the CPU, the same on every process.

    `revise` makes of an image's latents those that are embedded.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    amount: dict[str, Any] = {"seed": seed, "per_prompt": per_prompt, "batch_size": batch_size}
    width = reward.embed_text([prompts[0].text]).shape[-1]
    rows = torch.zeros(len(prompts) * per_prompt, width)
    device, size = getattr(reward, "device", None), getattr(reward, "batch_size", None)
    with torch.no_grad(), policy.uneven_forwards():
        for index, images in generate(
            policy, prompts, spec, **amount, rank=rank, world=world, snapshot=None, revise=revise
        ):
            parts = images.to(device or images.device).split(size or len(images))
            rows[index] = torch.cat([reward.embed_image(part).float().cpu() for part in parts])
    if world > 1:  # every image is one process's; the others hold zeros there
        rows = accelerator.reduce(rows.to(accelerator.device), reduction="sum").cpu()
    return rows


def prepare_direction(
    config: Config,
    folder: Path,
    policy: Policy,
    rewards: Mapping[str, Reward],
    spec: SamplerSpec,
    accelerator: Accelerator,
) -> Direction | None:
    """Give the corrected reward its direction: the config's file, the run folder's, or one learned now.

    Raises UserError if a direction is there that was learned for another reward model, or otherwise than the config
    says. Killed at any moment, the learning continues where it was when it is started again.
    """
    section = config.d2align
    if section is None:
        return None
    name = section.corrected(config)
    reward = rewards[name]
    assert isinstance(reward, Corrected), "build_scorers wraps the reward that d2align corrects"
    file = folder / FOLDER / FILE if section.direction is None else Path(section.direction)
    prompts = load_prompts(config.prompts.train)
    identity = identity_of(config, prompts)
    exists = torch.tensor([int(file.is_file())], device=accelerator.device)
    if not accelerator.gather(exists)[0]:  # as the main process sees it: the others may look when it has begun
        if accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            dump(config, folder / "config.yaml")  # so that --resume finds what it needs
        chosen, per_prompt = pool_prompts(prompts, section.pool, config.seed)
        texts = [prompt.text for prompt in prompts]
        place = folder / FOLDER
        _Stage1(place, config, identity, texts, chosen, per_prompt, policy, reward.base, spec, accelerator).run()
        accelerator.wait_for_everyone()
    direction = load_direction(file)
    reward.use(direction, f"rewards.{name}, {identity.name}")
    if section.direction is None:
        _check_identity(direction.identity, identity, file)
    return direction


def identity_of(config: Config, prompts: Sequence[Prompt]) -> Identity:
    """What the config's direction is learned for, and how."""
    section = config.d2align
    assert section is not None
    name = section.corrected(config)
    entry = config.rewards[name]
    digest = hashlib.sha256("\n".join(prompt.text for prompt in prompts).encode()).hexdigest()
    drawn = {"model": config.model, "sampler": config.rollout.sampler, "sampling_steps": config.rollout.steps}
    drawn["shift"] = config.rollout.shift
    learned = {key: getattr(section, key) for key in ("steps", "learning_rate", "pool", "word", "embed")}
    arguments = essential(entry.arguments)
    return Identity(entry.plugin or name, arguments, digest, config.seed, section.omega, {**drawn, **learned})


class LearnedDirection(RunHook):
    """Stage 1 of a run: before anything is trained the corrected reward gets its direction."""

    def __init__(self, build: Build) -> None:
        self.build = build

    def prepare(self) -> None:
        build = self.build
        accelerator, rewards = build.processes.accelerator, build.scorer.rewards
        prepare_direction(build.config, build.folder.path, build.policy, rewards, build.config.rollout, accelerator)


class Norm(RunHook):
    """`d2align/norm` of the epochs' metrics: the length of b_v."""

    def __init__(self, reward: Corrected) -> None:
        self.reward = reward

    def after_epoch(self, metrics: dict[str, Any]) -> Sequence[str]:
        metrics["d2align/norm"] = self.reward.norm
        return ()


def add_norm(build: Build) -> None:
    """A reward that is corrected, whether its direction is learned here or was given to it."""
    build.add(Norm(next(reward for reward in build.scorer.rewards.values() if isinstance(reward, Corrected))))


def _check_identity(learned: Identity, wanted: Identity, file: Path) -> None:
    ours, theirs = ({**asdict(i), **i.settings} for i in (wanted, learned))
    for key, value in ours.items():
        recorded = theirs.get(key)
        if key not in ("settings", "reward", "arguments") and value != recorded:
            text = f"{key} {recorded}, and the config says {value}"
            raise UserError(f"{file} was learned with {text}; remove the file, or name it as d2align.direction")


@dataclass
class _Stage1:
    """One learning: what it needs, and the embedded pool so far (N, D), which only the main process keeps."""

    folder: Path
    config: Config
    identity: Identity
    vocabulary: Sequence[str]  # all training prompts
    prompts: list[Prompt]  # those of the pool
    per_prompt: int
    policy: Policy
    reward: Embedder
    spec: SamplerSpec
    accelerator: Accelerator
    e_img: Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def section(self) -> D2AlignSection:
        assert self.config.d2align is not None
        return self.config.d2align

    def run(self) -> None:
        """Draw and embed the pool, learn the direction, find what it means, write the files; saved as it goes."""
        main = self.accelerator.is_main_process
        tensors, state = _saved(self.folder, self.identity) if main else ({}, {})
        self.e_img = tensors.get("pool", {}).get("e_img", self.e_img)
        self.draw_pool(main)
        with self.policy.uneven_forwards():  # the pictures of the evidence are the main process's alone
            if main:
                self.find(tensors, state)

    def find(self, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        """On the main process, from the embedded pool; `tensors` and `state` are what an earlier start left."""
        e_text = self.reward.embed_text([prompt.text for prompt in self.prompts]).float()
        owner = torch.arange(len(self.prompts), device=e_text.device).repeat_interleave(self.per_prompt)
        images, section, start = self.e_img.to(e_text.device), self.section, None
        if section.word is not None:
            start = word_direction(self.reward, [prompt.text for prompt in self.prompts], section.word)
        vector, course = learn(
            self.reward,
            images,
            e_text,
            owner,
            omega=section.omega,
            steps=section.steps if start is None else 0,
            learning_rate=section.learning_rate,
            seed=self.config.seed,
            initial=start,
            resume=(tensors["learned"], state["learned"]) if "learned" in tensors else None,
            keep=self.keep,
        )
        result = evidence(self.reward, images, e_text, owner, vector, section.omega, self.vocabulary)
        result |= {"reward": self.identity.name, "omega": section.omega, "word": section.word, "course": course}
        self.write(vector, result)
        how = f"learned in {section.steps:,} steps" if start is None else f'that of the word "{section.word}"'
        words = ", ".join(word for word, _ in result["words"]["nearest"][:5])
        print(
            f"D2-Align: direction of length {course[-1][2]:.3f}, {how}; mean guided reward {course[0][1]:.4f} -> "
            f"{course[-1][1]:.4f}; nearest words: {words}",
            flush=True,
        )

    def draw_pool(self, main: bool) -> None:
        """The images that are not there yet, block by block, on all processes."""
        drawn = torch.tensor([len(self.e_img)], device=self.accelerator.device)
        done = int(self.accelerator.gather(drawn)[0]) // self.per_prompt  # prompts, as the main process has them
        if main:
            total = len(self.prompts) * self.per_prompt
            print(
                f"D2-Align: {total - len(self.e_img):,} of {total:,} images of the pretrained model to draw", flush=True
            )
        step = max(BLOCK // self.per_prompt, 1)
        for first in range(done, len(self.prompts), step):
            rows = embed_images(
                self.policy,
                self.reward,
                self.prompts[first : first + step],
                self.spec,
                seed=self.config.seed,
                per_prompt=self.per_prompt,
                batch_size=self.config.rollout.batch_size,
                accelerator=self.accelerator,
                revise=None if self.section.embed == "image" else self.revised,
            )
            if main:
                self.e_img = torch.cat([self.e_img.view(-1, rows.shape[1]), rows])
                self.save(len(self.e_img), {}, {})

    def revised(self, x0: Tensor, cond: Conditioning, names: Sequence[tuple[str, int]]) -> Tensor:
        """Algorithm 1's images: noised, and reconstructed in one step with the guidance that stage 2 trains at."""
        keys = [(self.config.seed, "d2align", *name) for name in names]
        levels = schedule(self.policy, self.spec)
        return reconstructed(self.policy, x0, cond, keys, levels, self.config.direct.guidance_scale)

    def keep(self, step: int, learned: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        self.save(len(self.e_img) + step, {"learned": learned}, {"learned": numbers})

    def save(self, number: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        tensors, state = {"pool": {"e_img": self.e_img}, **tensors}, {"identity": asdict(self.identity), **state}
        saving.save(self.folder, number, tensors, state, keep=1)

    def write(self, vector: Tensor, record: dict[str, Any]) -> None:
        """The evidence with its images, made again one by one, and the direction, with which stage 1 is over."""
        for shown in (*record["fallen"], *record["risen"]):
            prompt, member = self.prompts[shown["image"] // self.per_prompt].text, shown["image"] % self.per_prompt
            latents, images = remake(self.policy, self.spec, prompt, member, seed=self.config.seed, snapshot=None)
            if self.section.embed == "reconstructed":
                latents = self.revised(latents, self.policy.encode([prompt]), [(prompt, member)])
                images = self.policy.decode(latents)
            shown |= {"prompt": prompt, "file": f"image-{shown['image']:05d}.png"}
            save_image(images[0], self.folder / shown["file"], {"prompt": prompt})
        write_text(self.folder / EVIDENCE, json.dumps(record, indent=1))
        Direction(vector.cpu(), fingerprint(self.reward), self.identity).save(self.folder / FILE)
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)


def _saved(folder: Path, identity: Identity) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """What an interrupted learning left, if it was for the same; else nothing."""
    path = checkpoint.latest(folder)
    if path is None:
        return {}, {}
    tensors, state = checkpoint.load(path)
    if state["identity"] != json.loads(json.dumps(asdict(identity))):
        shutil.rmtree(folder / "checkpoints")  # the config has changed: begin again
        return {}, {}
    return tensors, state
