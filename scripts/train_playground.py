"""Train the playground's models from scratch and export them: autoencoder, generator, CLIP, aesthetic head, preference.

One command, resumable: every stage saves its state every minute under --work and goes on where it stopped. Each has a
schedule over its own minutes of one CPU core, with a learning rate that falls to zero at their end:

    python scripts/train_playground.py                              # everything that is not there yet
    python scripts/train_playground.py --stage generator            # up to one stage
    python scripts/train_playground.py --minutes generator=240      # with another schedule

To train the shipped generator, or the decoder, further, no state is needed: the weights and a new schedule are enough.

    python scripts/train_playground.py --from-shipped --minutes generator=240 decoder=20

The shipped generator is one that has also seen wrong captions. Such a model knows what a prompt says and often draws
something else all the same, as web captions leave a model; that is what reinforcement learning is there to mend:

    python scripts/train_playground.py --from-shipped --minutes generator=9 --wrong 0.25 --rate 0.25 --keep 0.2

Its distilled student, a LoRA with which it draws in four steps, is learned from the shipped generator, too:

    python scripts/train_playground.py --from-shipped --minutes turbo=16

A longer schedule under the same --work goes on from the state (weights, optimiser, average) with a new fall.

Stages: "pool" renders scenes with captions that say some of their facts; "autoencoder"; "texts", the text encoders,
which learn to tell what a prompt says; "generator", the transformer, on the latents of the pool with the text encoders
frozen; "decoder", the autoencoder's decoder once more, its encoder frozen; "clip"; "aesthetic"; "preference", a copy of
the CLIP tuned on the choices of raters with a known bias. "turbo" goes with --from-shipped only.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import save_file
from transformers import CLIPTokenizer

sys.path.insert(0, str(Path(__file__).parent / "playground"))

import models
from autoencoder import train_autoencoder, train_decoder
from clip_building import clip_config, load_clip, save_clip
from clips import train_aesthetic, train_clip, train_preference
from drawing import Prompts, encode_pool, train_drawing
from pool import Pool, make_pool, open_pool
from texts import Texts, train_texts
from tokenizer import vocabulary, write_tokenizer
from turbo import save_turbo, train_turbo

from diffrl_playground import grammar

SEED = 0
SCENES = 120_000
MINUTES = {
    "autoencoder": 16.0, "texts": 5.0, "generator": 61.0, "decoder": 6.0, "clip": 9.0, "aesthetic": 0.5,
    "preference": 4.0,
}  # fmt: skip
STAGES = ("pool", *MINUTES)
EVERY = MINUTES | {"turbo": 16.0}
FURTHER = {"generator", "decoder", "turbo"}  # what --from-shipped trains


class Work:
    """The folder of states, and what is built from them."""

    def __init__(self, folder: Path, out: Path, minutes: dict[str, float], scenes: int, seed: int = SEED) -> None:
        self.folder, self.out, self.minutes, self.scenes, self.seed = folder, out, minutes, scenes, seed
        folder.mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        write_tokenizer(folder / "tokenizer", vocabulary(), grammar.LETTERS)
        self.tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer")

    def pool(self) -> Pool:
        """The rendered scenes, made when they are first asked for."""
        make_pool(self.folder / "pool", self.scenes, self.seed, self.tokenizer)
        return open_pool(self.folder / "pool", self.scenes)

    def latents(self, vae: Any) -> np.ndarray:
        """The pool's latents (N, 8, 8, 8), scaled; sets the autoencoder's scaling and shift factor."""
        path = self.folder / "latents.npy"
        if not path.exists():
            np.save(path, encode_pool(self.pool(), vae))
        latents = np.load(path)
        scale = self.folder / "scale.json"
        if not scale.exists():
            values = latents.astype(np.float32)
            scale.write_text(json.dumps([float(values.mean()), float(values.std())]))
        mean, deviation = json.loads(scale.read_text())
        vae.register_to_config(scaling_factor=1.0 / deviation, shift_factor=mean)
        scaled = (latents - np.float32(mean)) * np.float32(1.0 / deviation)
        return scaled.astype(np.float16)

    def export_pipeline(self, vae: Any, texts: Any, transformer: Any) -> None:
        """Write the Stable Diffusion 3 pipeline."""
        generator = models.Generator(self.tokenizer)
        generator.transformer.load_state_dict(transformer.state_dict())
        for target, source in zip((generator.text_encoder, generator.text_encoder_2), texts.encoders, strict=True):
            target.load_state_dict(source.state_dict())
        written: Any = models.build_vae()  # a loaded one would tell in its config where it came from
        written.load_state_dict(vae.state_dict())
        written.register_to_config(scaling_factor=vae.config.scaling_factor, shift_factor=vae.config.shift_factor)
        models.save_pipeline(generator.float(), written, self.tokenizer, self.out / "pipeline")

    def export_clip(self, model: Any, name: str) -> None:
        """Write an open_clip folder, and load it again."""
        save_clip(model.float(), clip_config(len(self.tokenizer)), self.folder / "tokenizer", self.out / name)
        load_clip(self.out / name)


def shipped(work: Work) -> tuple[Any, Any, Any]:
    """The autoencoder, text encoders and transformer in --out, to go on from."""
    pipeline: Any = StableDiffusion3Pipeline.from_pretrained(
        work.out / "pipeline", text_encoder_3=None, tokenizer_3=None, image_encoder=None, feature_extractor=None
    )
    texts = Texts(work.tokenizer)
    for target, source in zip(texts.encoders, (pipeline.text_encoder, pipeline.text_encoder_2), strict=True):
        target.load_state_dict(source.state_dict())
    scale = [pipeline.vae.config.shift_factor, 1.0 / pipeline.vae.config.scaling_factor]
    (work.folder / "scale.json").write_text(json.dumps(scale))
    return pipeline.vae, texts, pipeline.transformer


def go_on(
    work: Work, stages: Sequence[str], compiled: bool = False, wrong: float = 0.0, rate: float = 1.0, keep: float = 0.0,
) -> None:  # fmt: skip
    """Train the generator or the decoder further, from the weights in --out, or the generator's distilled student."""
    pool = work.pool()
    vae, texts, drawn = shipped(work)
    if "generator" in stages:
        prompts, minutes = Prompts(pool, texts, work.tokenizer, wrong), work.minutes["generator"]
        start = drawn.state_dict()
        latents = work.latents(vae)
        drawn = train_drawing(work.folder, pool, latents, prompts, minutes, start, compiled, rate)
        drawn.load_state_dict({name: (1 - keep) * new + keep * start[name] for name, new in drawn.state_dict().items()})
        work.export_pipeline(vae, texts, drawn)
    if "decoder" in stages:
        work.export_pipeline(train_decoder(work.folder, pool, vae, work.minutes["decoder"]), texts, drawn)
    if "turbo" in stages:
        prompts = Prompts(pool, texts, work.tokenizer)
        save_turbo(train_turbo(work.folder, drawn, pool, prompts, work.minutes["turbo"]), work.out / "turbo")


def train(work: Work, last: int, compiled: bool = False) -> None:
    """Run the stages up to number `last`; what is finished is exported at once."""
    pool, minutes = work.pool(), work.minutes
    for stage in STAGES[1 : last + 1]:
        if stage == "autoencoder":
            vae = train_autoencoder(work.folder, pool, minutes[stage])
        elif stage == "texts":
            texts = train_texts(work.folder, pool, work.tokenizer, minutes[stage])
        elif stage == "generator":
            prompts = Prompts(pool, texts, work.tokenizer)
            latents = work.latents(vae)
            drawn = train_drawing(work.folder, pool, latents, prompts, minutes[stage], compiled=compiled)
            work.export_pipeline(vae, texts, drawn)
        elif stage == "decoder":
            vae = train_decoder(work.folder, pool, vae, minutes[stage])
            work.export_pipeline(vae, texts, drawn)
        elif stage == "clip":
            clip = train_clip(work.folder, pool, len(work.tokenizer), minutes[stage])
            work.export_clip(clip, "clip")
        elif stage == "aesthetic":
            head = train_aesthetic(work.folder, pool, clip, minutes[stage])
            save_head(head, work.out)
        elif stage == "preference":
            work.export_clip(train_preference(work.folder, clip, work.tokenizer, minutes[stage]), "preference")


def save_head(head: Any, out: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors, out / "aesthetic.safetensors", metadata={"activation": "relu"})


def record(work: Work, further: Sequence[str] = ()) -> None:
    """Write what was trained, with its cost, into training.json; what a person added there stays.

    The stages in `further` went on from shipped weights: their cost is added to what those had cost.
    """
    path = work.out / "training.json"
    recorded = json.loads(path.read_text()) if path.exists() else {}
    stages = {name: stage for name, stage in recorded.get("stages", {}).items() if name in EVERY}
    for name in EVERY:
        state_path = work.folder / f"{name}.pt"
        if state_path.exists() and (not further or name in further):
            state = torch.load(state_path, weights_only=True)
            before = stages.get(name, {}) if further else {}
            stages[name] = {key: round(state[key]) + before.get(key, 0) for key in ("seconds", "step", "images")}
    machine = f"one CPU core, {platform.machine()}, torch {torch.__version__}"
    commands = [*recorded.get("commands", []), shlex.join(["python", *sys.argv])]
    recorded |= {"commands": commands, "machine": machine, "stages": stages}
    if not further:
        recorded |= {"seed": work.seed, "scenes": work.scenes}
    path.write_text(json.dumps(recorded, indent=2) + "\n")


def _minutes(words: list[str]) -> dict[str, float]:
    minutes = dict(EVERY)
    for word in words:
        name, _, value = word.partition("=")
        if name not in minutes:
            raise SystemExit(f"--minutes {word}: no stage {name!r} (choose from: {', '.join(minutes)})")
        minutes[name] = float(value)
    return minutes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(".work/playground"), help="folder of states and of the pool")
    parser.add_argument("--out", type=Path, default=Path("assets/playground"), help="folder of the exported models")
    parser.add_argument("--stage", choices=STAGES, default=STAGES[-1], help="the last stage (earlier ones go on first)")
    parser.add_argument(
        "--minutes", nargs="+", default=[], metavar="STAGE=M", help="schedules other than the usual ones"
    )
    parser.add_argument("--scenes", type=int, default=SCENES, help="scenes of the pool")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of the pool: another one has other scenes")
    parser.add_argument("--compile", action="store_true", help="compile the transformer (minutes; then faster)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument(
        "--wrong", type=float, default=0.0, help="with --from-shipped: share of scenes with another scene's caption"
    )
    parser.add_argument("--rate", type=float, default=1.0, help="with --from-shipped: factor of the learning rates")
    parser.add_argument("--keep", type=float, default=0.0, help="with --from-shipped: weight of what it was before")
    parser.add_argument("--from-shipped", action="store_true", help="train what is in --out further")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    work = Work(args.work, args.out, _minutes(args.minutes), args.scenes, args.seed)
    stages: list[str] = []
    if args.wrong and not args.from_shipped:
        raise SystemExit("--wrong goes with --from-shipped")
    if args.from_shipped:
        stages = [word.partition("=")[0] for word in args.minutes]
        if not stages or not set(stages) <= FURTHER:
            raise SystemExit("--from-shipped goes with --minutes generator=M, decoder=M or turbo=M, or several of them")
        go_on(work, stages, args.compile, args.wrong, args.rate, args.keep)
    else:
        train(work, STAGES.index(args.stage), args.compile)
    record(work, stages)


if __name__ == "__main__":
    main()
