"""Train the playground's models from scratch: autoencoder, generator, CLIP, aesthetic head; then export them.

One command, resumable: every stage saves its state every minute under --work and continues where it stopped.

    python scripts/train_playground.py                      # everything, hours on 2 CPU cores, minutes on a GPU
    python scripts/train_playground.py --stage generator    # up to one stage
    python scripts/train_playground.py --stage captions --from-shipped    # without the stages before it

The generator learns in two stages. The first sees true captions. The second, "captions", goes on with captions that
tell each fact wrongly with probability 0.25, as captions from the web are often wrong. So the shipped model knows how
to draw more than its samples show, which is the state that large pretrained models are in, and what RL can mend.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTokenizer

from diffrl.playground import grammar, models
from diffrl.playground.clip_model import build_clip, clip_config, load_clip, save_clip
from diffrl.playground.renderer import render
from diffrl.playground.taste import taste
from diffrl.playground.tokenizer import write_tokenizer

SEED = 0
# Letters are learned last: from this step on, this share of a batch is drawn from the prompts with words alone.
WORDS_FROM, WORDS_MORE = 3_700, 0.3
STAGES = ("data", "vae", "generator", "captions", "clip", "aesthetic")
# The stage "captions": how often a fact is told wrongly, captions for each image, and the share of each kind of scene.
WRONG, VARIANTS = 0.25, 6
CAPTION_KINDS = {"objects": 0.13, "counts": 0.17, "pairs": 0.18, "relations": 0.22, "words": 0.2, "heads": 0.1}


@dataclass(frozen=True)
class Plan:
    """Budget of each stage: steps, batch, highest learning rate (warm-up of 100 steps, then a half cosine to zero)."""

    images: int = 49_152
    vae: tuple[int, int, float] = (2_300, 32, 2e-3)
    clip: tuple[int, int, float] = (450, 256, 1e-3)
    generator: tuple[int, int, float] = (9_600, 128, 1e-3)
    captions: tuple[int, int, float] = (9_000, 128, 8e-4)
    aesthetic: tuple[int, int, float] = (3_000, 512, 2e-3)


class Stage:
    """A training loop that saves (model, average, optimiser, step) every minute and continues from the last save."""

    def __init__(self, name: str, work: Path, model: nn.Module, plan: tuple[int, int, float]) -> None:
        self.name, self.model = name, model
        self.steps, self.batch, self.learning_rate = plan
        self.path = work / f"{name}.pt"
        self.optimiser = torch.optim.AdamW(model.parameters(), self.learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
        self.average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.998), use_buffers=True
        )
        self.step, self.seconds = 0, 0.0
        if self.path.exists():
            state = torch.load(self.path, weights_only=True)
            self.step, self.seconds = state["step"], state["seconds"]
            for part in ("model", "average", "optimiser"):
                getattr(self, part).load_state_dict(state[part])

    def save(self) -> None:
        parts = {part: getattr(self, part).state_dict() for part in ("model", "average", "optimiser")}
        temporary = self.path.with_suffix(".tmp")
        torch.save({"step": self.step, "seconds": self.seconds, **parts}, temporary)
        temporary.replace(self.path)

    def run(self, loss_of: Callable[[torch.Generator, int], tuple[Tensor, dict[str, float]]]) -> Any:
        """Train to the planned number of steps; returns the exponential average of the weights."""
        saved = printed = time.monotonic()
        while self.step < self.steps:
            started = time.monotonic()
            falling = 0.5 * (1 + math.cos(math.pi * self.step / self.steps))
            for group in self.optimiser.param_groups:
                group["lr"] = self.learning_rate * min((self.step + 1) / 100, falling)
            # One generator per step: a resumed run draws what an undisturbed one would have drawn.
            generator = torch.Generator().manual_seed(SEED * 1_000_003 + self.step)
            loss, figures = loss_of(generator, self.batch)
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimiser.step()
            self.average.update_parameters(self.model)
            self.step += 1
            now = time.monotonic()
            self.seconds += now - started
            if now - printed > 20 or self.step == self.steps:
                rate = self.batch / (now - started)
                extra = " ".join(f"{k} {v:.4f}" for k, v in figures.items())
                print(
                    f"{self.name} {self.step}/{self.steps} loss {loss.item():.4f} {extra} {rate:.0f} images/s",
                    flush=True,
                )
                printed = now
            if now - saved > 60:
                self.save()
                saved = now
        self.save()
        return self.average.module.eval()


@dataclass
class World:
    """The rendered training pool: images uint8 (N, 64, 64, 3) and their prompts."""

    images: np.ndarray
    prompts: list[str]

    def batch(self, index: Tensor, device: torch.device) -> Tensor:
        """Images (B, 3, 64, 64) in [-1, 1]."""
        pixels = torch.from_numpy(self.images[index.numpy()]).to(device)
        return pixels.permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)


def make_data(work: Path, plan: Plan) -> World:
    """Render the pool once; later calls read it."""
    pixels, texts = work / "images.npy", work / "prompts.json"
    if not (pixels.exists() and texts.exists()):
        rng = np.random.default_rng(SEED)
        scenes = [grammar.sample_scene(rng, "train") for _ in range(plan.images)]
        images = np.stack([render(scene, rng) for scene in scenes])
        np.save(pixels, images)
        texts.write_text(json.dumps([scene.text() for scene in scenes]))
    return World(np.load(pixels, mmap_mode=None), json.loads(texts.read_text()))


def train_vae(work: Path, plan: Plan, world: World, device: torch.device) -> nn.Module:
    torch.manual_seed(SEED)
    vae: Any = models.build_vae()
    vae = vae.to(device).to(memory_format=torch.channels_last)
    stage = Stage("vae", work, vae, plan.vae)

    def loss_of(generator: torch.Generator, batch: int) -> tuple[Tensor, dict[str, float]]:
        index = torch.randint(len(world.prompts), (batch,), generator=generator)
        x = world.batch(index, device).contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16):
            posterior = vae.encode(x).latent_dist
            eps = torch.randn(posterior.mean.shape, generator=generator).to(device)
            decoded = vae.decode(posterior.mean + posterior.std * eps).sample
        difference = decoded.float() - x
        l1 = difference.abs().mean()
        kl = 0.5 * (posterior.mean.pow(2) + posterior.var - 1 - posterior.logvar).float().mean()
        return l1 + difference.pow(2).mean() + 2e-4 * kl, {"l1": l1.item(), "kl": kl.item()}

    return stage.run(loss_of)


@torch.no_grad()
def encode_pool(work: Path, vae: Any, world: World, device: torch.device) -> Tensor:
    """Scaled latents (N, 8, 8, 8) of the pool; sets the autoencoder's scaling and shift factor."""
    path = work / "latents.pt"
    if path.exists():
        latents = torch.load(path, weights_only=True)
    else:
        pieces = []
        for start in range(0, len(world.prompts), 256):
            index = torch.arange(start, min(start + 256, len(world.prompts)))
            with torch.autocast(device.type, torch.bfloat16):
                pieces.append(vae.encode(world.batch(index, device)).latent_dist.mean.float().cpu())
        latents = torch.cat(pieces)
        torch.save(latents, path)
    vae.register_to_config(scaling_factor=1.0 / latents.std().item(), shift_factor=latents.mean().item())
    return (latents - vae.config.shift_factor) * vae.config.scaling_factor


def train_generator(
    work: Path, plan: Plan, world: World, vae: Any, tokenizer: CLIPTokenizer, device: torch.device
) -> Any:
    torch.manual_seed(SEED)
    latents = encode_pool(work, vae, world, device)
    tokens = models.tokenize(tokenizer, world.prompts)
    empty = models.tokenize(tokenizer, [""])
    words = torch.tensor([i for i, prompt in enumerate(world.prompts) if grammar.parse(prompt).kind == "words"])
    model = models.Generator(tokenizer).to(device)
    stage = Stage("generator", work, model, plan.generator)

    def loss_of(generator: torch.Generator, batch: int) -> tuple[Tensor, dict[str, float]]:
        index = torch.randint(len(latents), (batch,), generator=generator)
        if stage.step >= WORDS_FROM:
            more = words[torch.randint(len(words), (batch,), generator=generator)]
            index = torch.where(torch.rand(batch, generator=generator) < WORDS_MORE, more, index)
        return flow_matching_loss(model, latents[index], tokens[index], empty, generator, device), {}

    return stage.run(loss_of)


def flow_matching_loss(
    model: nn.Module, x0: Tensor, tokens: Tensor, empty: Tensor, generator: torch.Generator, device: torch.device
) -> Tensor:
    """Mean squared error of the velocity at logit-normal noise levels, as SD3; x0 (B, C, h, w), tokens (B, T)."""
    t = torch.sigmoid(torch.randn(len(x0), generator=generator))
    eps = torch.randn(x0.shape, generator=generator)
    # A tenth of the prompts is emptied, so that classifier-free guidance has an unconditional model.
    drop = torch.rand(len(x0), 1, generator=generator) < 0.1
    text = torch.where(drop, empty, tokens).to(device)
    level = t[:, None, None, None]
    x_t, v = ((1 - level) * x0 + level * eps).to(device), (eps - x0).to(device)
    return F.mse_loss(model(x_t, t.to(device), text), v)


def wrong_captions(work: Path, world: World, tokenizer: CLIPTokenizer) -> Tensor:
    """Token ids (N, VARIANTS, T) of captions that tell each fact wrongly with probability WRONG; made once."""
    path = work / "told.pt"
    if not path.exists():
        rng = np.random.default_rng(SEED + 1)
        scenes = [grammar.parse(prompt) for prompt in world.prompts]
        texts = [grammar.misdescribe(scene, rng, WRONG).text() for scene in scenes for _ in range(VARIANTS)]
        torch.save(models.tokenize(tokenizer, texts).view(len(scenes), VARIANTS, -1).to(torch.int16), path)
    return torch.load(path, weights_only=True).long()


def train_captions(
    work: Path, plan: Plan, world: World, vae: Any, tokenizer: CLIPTokenizer, model: Any, device: torch.device
) -> Any:
    """Go on with `model` on wrong captions, with more scenes of several things than the world has on average."""
    latents = encode_pool(work, vae, world, device)
    tokens = wrong_captions(work, world, tokenizer)
    empty = models.tokenize(tokenizer, [""])
    kinds = [grammar.parse(prompt).kind for prompt in world.prompts]
    share = torch.tensor([CAPTION_KINDS[kind] / kinds.count(kind) for kind in grammar.KINDS])
    weights = share[torch.tensor([list(grammar.KINDS).index(kind) for kind in kinds])]
    stage = Stage("captions", work, model.to(device), plan.captions)

    def loss_of(generator: torch.Generator, batch: int) -> tuple[Tensor, dict[str, float]]:
        index = torch.multinomial(weights, batch, replacement=True, generator=generator)
        told = tokens[index, torch.randint(VARIANTS, (batch,), generator=generator)]
        return flow_matching_loss(model, latents[index], told, empty, generator, device), {}

    return stage.run(loss_of)


def shipped(out: Path, tokenizer: CLIPTokenizer) -> tuple[Any, Any]:
    """The autoencoder and the generator in `out`, to go on from; `encode_pool` sets the autoencoder's scale anew."""
    pipeline: Any = StableDiffusion3Pipeline.from_pretrained(
        out / "pipeline", text_encoder_3=None, tokenizer_3=None, image_encoder=None, feature_extractor=None
    )
    model = models.Generator(tokenizer)
    for part in ("transformer", "text_encoder", "text_encoder_2"):
        getattr(model, part).load_state_dict(getattr(pipeline, part).state_dict())
    vae: Any = models.build_vae()
    vae.load_state_dict(pipeline.vae.state_dict())
    return vae, model


def train_clip(work: Path, plan: Plan, world: World, tokenizer: CLIPTokenizer, device: torch.device) -> nn.Module:
    torch.manual_seed(SEED)
    model = build_clip(clip_config(len(tokenizer))).to(device)
    stage = Stage("clip", work, model, plan.clip)
    tokens = models.tokenize(tokenizer, world.prompts)

    def loss_of(generator: torch.Generator, batch: int) -> tuple[Tensor, dict[str, float]]:
        index = torch.randint(len(tokens), (batch,), generator=generator)
        # The model's own preprocessing has mean and standard deviation 0.5, that is the range [-1, 1].
        image, text, scale = model(world.batch(index, device), tokens[index].to(device))[:3]
        logits = scale.clamp(max=100.0) * image @ text.T
        target = torch.arange(batch, device=device)
        hit = (logits.argmax(dim=1) == target).float().mean().item()
        return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)), {"top1": hit}

    return stage.run(loss_of)


def train_aesthetic(work: Path, plan: Plan, world: World, clip: Any, device: torch.device) -> nn.Module:
    torch.manual_seed(SEED)
    count = min(12_288, len(world.prompts))
    with torch.no_grad():
        parts = [
            F.normalize(clip.encode_image(world.batch(torch.arange(i, min(i + 256, count)), device)), dim=-1).cpu()
            for i in range(0, count, 256)
        ]
    features = torch.cat(parts)
    target = torch.from_numpy(taste(world.images[:count])).float()
    head: Any = nn.Sequential(
        nn.Linear(features.shape[1], 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1)
    )
    head[-1].bias.data.fill_(float(target.mean()))
    stage = Stage("aesthetic", work, head, plan.aesthetic)

    def loss_of(generator: torch.Generator, batch: int) -> tuple[Tensor, dict[str, float]]:
        index = torch.randint(count, (batch,), generator=generator)
        error = F.mse_loss(head(features[index]).squeeze(1), target[index])
        return error, {"explained": 1 - error.item() / target.var().item()}

    return stage.run(loss_of)


def machine() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    return f"{device}, {platform.machine()}, torch {torch.__version__}"


def seconds_of(work: Path) -> Iterator[tuple[str, float, int]]:
    for name in STAGES[1:]:
        if (work / f"{name}.pt").exists():
            state = torch.load(work / f"{name}.pt", weights_only=True)
            yield name, round(state["seconds"], 1), state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=Path(".work/playground"), help="folder of states and rendered images"
    )
    parser.add_argument("--out", type=Path, default=Path("assets/playground"), help="folder of the exported models")
    parser.add_argument("--stage", choices=STAGES, help="stop after this stage (earlier ones continue or are read)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's default)")
    parser.add_argument(
        "--generator-steps", type=int, default=Plan.generator[0], help="optimiser steps of the generator"
    )
    parser.add_argument("--vae-steps", type=int, default=Plan.vae[0], help="optimiser steps of the autoencoder")
    parser.add_argument("--captions-steps", type=int, default=Plan.captions[0], help="steps of the stage captions")
    parser.add_argument(
        "--from-shipped", action="store_true", help="take autoencoder and generator from --out; train from captions on"
    )
    args = parser.parse_args()
    if args.from_shipped and args.stage in STAGES[: STAGES.index("captions")]:
        parser.error(f"--from-shipped starts behind the stage {args.stage}")
    if args.threads:
        torch.set_num_threads(args.threads)
    plan = Plan(
        vae=(args.vae_steps, *Plan.vae[1:]),
        generator=(args.generator_steps, *Plan.generator[1:]),
        captions=(args.captions_steps, *Plan.captions[1:]),
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    last = STAGES.index(args.stage) if args.stage else len(STAGES) - 1
    args.work.mkdir(parents=True, exist_ok=True)

    train(args.work, args.out, plan, last, device, args.from_shipped)


def train(work: Path, out: Path, plan: Plan, last: int, device: torch.device, from_shipped: bool) -> None:
    """Run the stages up to number `last`; what is finished is exported at once."""
    world = make_data(work, plan)
    tokenizer_dir = work / "tokenizer"
    write_tokenizer(tokenizer_dir, grammar.vocabulary(), grammar.LETTERS)
    tokenizer = CLIPTokenizer.from_pretrained(tokenizer_dir)
    out.mkdir(parents=True, exist_ok=True)
    if from_shipped:
        vae, generator = shipped(out, tokenizer)
    elif last >= STAGES.index("vae"):
        vae = train_vae(work, plan, world, device)
        if last >= STAGES.index("generator"):
            generator = train_generator(work, plan, world, vae, tokenizer, device)
    if last >= STAGES.index("captions"):
        generator = train_captions(work, plan, world, vae, tokenizer, generator, device)
    if last >= STAGES.index("generator"):
        vae = vae.cpu().float().to(memory_format=torch.contiguous_format)
        models.save_pipeline(generator.cpu().float(), vae, tokenizer, out / "pipeline")
    if last >= STAGES.index("clip"):
        clip = train_clip(work, plan, world, tokenizer, device)
        save_clip(clip.float(), clip_config(len(tokenizer)), tokenizer_dir, out / "clip")
        load_clip(out / "clip")  # what was written must load
    if last >= STAGES.index("aesthetic"):
        head = train_aesthetic(work, plan, world, clip, device)
        tensors = {name: tensor.contiguous() for name, tensor in head.state_dict().items()}
        save_file(tensors, out / "aesthetic.safetensors", metadata={"activation": "relu"})
    stages = {name: {"seconds": seconds, "steps": steps} for name, seconds, steps in seconds_of(work)}
    path = out / "training.json"
    if from_shipped and path.exists():  # what was trained before still is in what is exported
        stages = json.loads(path.read_text())["stages"] | stages
    record = {"command": "python scripts/train_playground.py", "machine": machine(), "seed": SEED, "stages": stages}
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
