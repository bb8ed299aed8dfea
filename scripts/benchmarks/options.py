"""What each memory and speed option gives: images/s in sampling, samples/s in optimising, memory; the loop's own cost.

    OMP_NUM_THREADS=1 python scripts/benchmarks/options.py --model small --out assets/results/options.json
    python scripts/benchmarks/options.py --model sd35-medium --out options_sd35.json        # or flux-dev; a CUDA device

Whole epochs of the real loop on a network of the published size with random weights, its text embeddings random, too;
the reward costs nothing. Options change one thing of "base", which runs before and after each of them: `relative`
speeds are to the mean of the two, and `base_runs` shows how steady the machine was. `share_of_bare_loop`: seconds of
the same forwards, backwards and decodings in a plain loop, by the epoch's seconds. Memory is measured on a GPU;
elsewhere it is what `diffrl doctor` counts for a training micro-batch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from bare import Recorder

from diffrl import __version__
from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.resources import shipped
from diffrl.run.fit import estimate
from diffrl.run.train import Run

REWARD = """
import torch

class Constant:
    name = "constant"

    def __call__(self, images, prompts, metadata):
        return images.mean((1, 2, 3))
"""
FAMILIES = Path(__file__).resolve().parent / "random_weights.py"
RESOLUTION = {"small": 64, "sd35-medium": 512, "flux-dev": 512}
PUBLISHED = {"sd35-medium": "stable-diffusion-3.5-medium", "flux-dev": "FLUX.1-dev"}
# For a laptop: SD3's architecture, 6 blocks of width 192, 64 pixels, no text encoders.
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer": (
        "SD3Transformer2DModel",
        {
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 6,
            "attention_head_dim": 32,
            "num_attention_heads": 6,
        }
        | {
            "joint_attention_dim": 512,
            "caption_projection_dim": 192,
            "pooled_projection_dim": 512,
            "pos_embed_max_size": 32,
        },
    ),
    "vae": (
        "AutoencoderKL",
        {"block_out_channels": [32, 64, 64], "layers_per_block": 2, "latent_channels": 4, "use_quant_conv": False}
        | {"down_block_types": ["DownEncoderBlock2D"] * 3, "up_block_types": ["UpDecoderBlock2D"] * 3}
        | {"use_post_quant_conv": False, "force_upcast": True},
    ),
    "scheduler": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
}
OPTIONS = {
    "base": [],  # what the others are compared with
    "gradient checkpointing": ["optimise.gradient_checkpointing=true"],
    "bf16": ["optimise.precision=bf16"],
    "fp16 (on a GPU)": ["optimise.precision=fp16"],
    "micro-batches of half the size": ["optimise.accumulation=HALF"],
    "LoRA on queries and values": ["lora.targets=[attn.to_q,attn.to_v]"],
    "compiled blocks": ["engine.compile=true"],
    "LoRA not merged": ["engine.merge=off"],
    "bf16, rollouts on merged weights": ["optimise.precision=bf16", "engine.merge=all"],
    "rollouts with taylorseer": ["rollout.cache.kind=taylorseer"],
    "attention by xformers": ["engine.attention=xformers"],
    "attention by flash": ["engine.attention=flash"],
    "8-bit moments": ["engine.optimiser=adamw8bit"],
    "autoencoder off the device": ["engine.offload_vae=true"],
    "tiled decoding": ["engine.tile_vae=true"],
}


def model_of(name: str, folder: Path) -> Path:
    """A published architecture, or `folder` with the small one's configs, in diffusers' format."""
    if name in PUBLISHED:
        return shipped("assets", "architectures", PUBLISHED[name])
    index: dict[str, Any] = {"_class_name": "StableDiffusion3Pipeline"}
    index |= {part: [None, None] for part in ("text_encoder", "text_encoder_2", "text_encoder_3")}
    files: dict[str, Any] = {"tokenizer/tokenizer_config.json": {"model_max_length": 77}}
    for part, (kind, config) in SMALL.items():
        index[part] = ["diffusers", kind]
        file = "scheduler_config.json" if part == "scheduler" else "config.json"
        files[f"{part}/{file}"] = config | {"_class_name": kind}
    files |= {"diffrl.json": {"max_sequence_length": 0}, "model_index.json": index}  # no T5, no room for its tokens
    for file, content in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(json.dumps(content))
    return folder


def write_config(folder: Path, args: argparse.Namespace, cuda: bool) -> Path:
    """An epoch of `--groups` groups of 24 in one optimiser step, the paper's sizes otherwise."""
    images = args.groups * 24
    objective: dict[str, Any] = {"objective": args.objective}
    rollout = {"groups": args.groups, "group_size": 24, "steps": 6, "batch_size": args.batch}
    rollout |= {"resolution": RESOLUTION[args.model]}
    if args.objective == "grpo":
        rollout |= {"sampler": "flow_sde", "window": 2}
    (folder / "reward.py").write_text(REWARD)
    (folder / "prompts.txt").write_text("".join(f"prompt {i}\n" for i in range(args.groups)))
    (folder / "test.txt").write_text("another prompt\n")
    rows = images * (2 if args.objective == "grpo" else 6)
    config = objective | {
        "model": str(model_of(args.model, folder / "model")),
        "family": f"{FAMILIES}:{'Flux' if args.model.startswith('flux') else 'SD3'}",
        "prompts": {"train": str(folder / "prompts.txt"), "test": str(folder / "test.txt")},
        "rollout": rollout,
        "rewards": {"constant": {"plugin": f"{folder / 'reward.py'}:Constant"}},
        "optimise": {"batch_size": images, "accumulation": rows // args.batch, "precision": "bf16" if cuda else "fp32"},
        "evaluate": {"features": "pixels"},
        "run_dir": str(folder / "run"),
    }
    path = folder / "benchmark.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def measure(path: Path, overrides: list[str], args: argparse.Namespace, bare: bool) -> dict[str, Any]:
    config = load_config(path, overrides)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = Run(config)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    epochs = []
    shares = []
    for epoch in range(args.warm + args.repeats):  # old equals the trained LoRA in the first epoch only
        recorder = Recorder(run.policy)
        if bare and epoch >= args.warm:
            with recorder:
                measured = run.loop.run_epoch(epoch)
            shares.append(recorder.replay() / measured["seconds"])
        else:
            measured = run.loop.run_epoch(epoch)
        if epoch >= args.warm:
            epochs.append(measured)
    images = config.rollout.groups * config.rollout.group_size
    middle = {key: statistics.median(e[f"seconds/{key}"] for e in epochs) for key in ("rollout", "optimise")}
    result = {
        "images_per_second_sampling": round(images / middle["rollout"], 3),
        "samples_per_second_optimising": round(images / middle["optimise"], 3),
    }
    if device.type == "cuda":
        result["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    else:
        peaks = estimate(config).peaks
        result["training_micro_batch_mib"] = round(max(v for k, v in peaks.items() if k[:8] == "training") / 2**20, 1)
    if shares:
        result["share_of_bare_loop"] = round(statistics.median(shares), 3)
    run.close()
    return result


def table(result: dict[str, Any]) -> str:
    """What each option gives beside the plain run."""
    lines = ["| option | sampling | optimising | MiB of a training micro-batch, counted |", "| --- " * 4 + "|"]
    plain = f"{result['base']['training_micro_batch_mib']:g}"
    lines.append(f"| none | 1 | 1 | {plain} |")
    for name, row in result["options"].items():
        if "relative" in row:
            speeds = " | ".join(f"{row['relative'][phase]:.2f}" for phase in ("sampling", "optimising"))
            lines.append(f"| {name} | {speeds} | {row['training_micro_batch_mib']:g} |")
    return "\n".join(lines) + f"\n\n`{result['command']}`, {result['device']}, torch {result['torch']}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(RESOLUTION), default="small")
    parser.add_argument("--objective", choices=["nft", "grpo"], default="nft")
    parser.add_argument("--groups", type=int, default=2, help="prompts of an epoch, 24 images each")
    parser.add_argument("--batch", type=int, default=12, help="rows of a forward")
    parser.add_argument("--warm", type=int, default=2, help="epochs before the measured ones")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--options", nargs="+", choices=list(OPTIONS)[1:], default=list(OPTIONS)[1:], metavar="OPTION")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "options")}
    result: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "device": device, **settings}
    result |= {"diffrl_version": __version__, "torch": torch.__version__, "load": os.getloadavg()[0], "options": {}}
    before = result["base"] = try_option("base", args, cuda, bare=True)
    print(f"{'base':<32} {before}", flush=True)
    runs = result["base_runs"] = [speeds(before)]
    for option in args.options:
        if "GPU" in option and not cuda:
            continue
        measured = try_option(option, args, cuda)
        if "refused" not in measured:
            runs.append(speeds(try_option("base", args, cuda)))
            around = [(one + two) / 2 for one, two in zip(*runs[-2:], strict=True)]
            phases = zip(("sampling", "optimising"), speeds(measured), around, strict=True)
            measured["relative"] = {phase: round(speed / base, 3) for phase, speed, base in phases}
        result["options"][option] = measured
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{option:<32} {measured}", flush=True)


def speeds(measured: dict[str, Any]) -> list[float]:
    """Images a second in sampling and samples a second in optimising."""
    return [measured["images_per_second_sampling"], measured["samples_per_second_optimising"]]


def try_option(option: str, args: argparse.Namespace, cuda: bool, bare: bool = False) -> dict[str, Any]:
    """What `measure` finds for the option, or why it cannot run here."""
    with tempfile.TemporaryDirectory() as work:
        path = write_config(Path(work), args, cuda)
        accumulation = load_config(path).optimise.accumulation
        overrides = [text.replace("HALF", str(2 * accumulation)) for text in OPTIONS[option]]
        try:
            return measure(path, overrides, args, bare=bare)
        except UserError as error:
            return {"refused": str(error)}


if __name__ == "__main__":
    main()
