"""DivGenBench on a model: its images to a folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from diffrl.config.loras import spec_of
from diffrl.divgen.observe import MANIFEST, Item
from diffrl.divgen.scoring import JOB, read_job
from diffrl.drawing import Drawing
from diffrl.errors import UserError, foreign
from diffrl.launched import join_processes
from diffrl.lora_files import as_list, lora_file
from diffrl.policy import Policy
from diffrl.prompts import Prompt
from diffrl.records import checkpoint
from diffrl.records.disk import write_text
from diffrl.records.tracking import save_image
from diffrl.rollout import SamplerSpec, generate
from diffrl.tools.progress_bar import progress
from diffrl.version import __version__


@dataclass(frozen=True)
class Job:
    """What a folder of images was drawn with. A folder is continued only by the same job."""

    drawing: Drawing
    world: str = "general"
    checkpoint: str | None = None

    def policy(self) -> Policy:
        """The model with the LoRA, or with the averaged LoRA of a run's checkpoint (its trained one without one)."""
        if self.checkpoint is None:
            return self.drawing.policy()
        folder = Path(self.checkpoint)
        tensors, _ = checkpoint.load(folder)
        config = folder.parents[1] / "config.yaml"
        try:
            lora = yaml.safe_load(config.read_text(encoding="utf-8"))["lora"]
        except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
            raise UserError(f"--checkpoint: {folder} has no readable {config} ({error})") from error
        with foreign(config):
            layers = dict.fromkeys(key.rpartition(".lora_")[0] for key in tensors["lora"])
            spec = spec_of({**lora, "targets": [*layers]})
        merge = [*(lora.get("merge") or ()), *as_list(self.drawing.merge)]
        policy = self.drawing.policy(lora=spec, merge=merge)
        policy.load_state("default", tensors.get("ema", tensors["lora"]))
        return policy

    def record(self, prompts: Sequence[Prompt], spec: SamplerSpec) -> dict[str, Any]:
        """What decides the images, as JSON."""
        drawing = self.drawing
        lines = "\n".join(prompt.text for prompt in prompts)
        return {
            "diffrl_version": __version__,
            "model": drawing.model,
            "lora": drawing.lora,
            "merge": drawing.merge,
            "checkpoint": self.checkpoint,
            "weights": _digest(self.checkpoint, drawing.lora),
            "world": self.world,
            "seed": drawing.seed,
            "per_prompt": drawing.per_prompt,
            "steps": spec.steps,
            "sampler": spec.sampler,
            "guidance_scale": spec.guidance_scale,
            "shift": spec.shift,
            "resolution": list(drawing.resolution) if isinstance(drawing.resolution, tuple) else drawing.resolution,
            "prompts": hashlib.sha256(lines.encode()).hexdigest()[:16],
        }


def _digest(checkpoint: str | None, lora: str | None) -> str | None:
    """Of a checkpoint's or a LoRA's tensors: a path alone would not tell that a run went on."""
    if checkpoint is None and lora is None:
        return None
    paths = sorted(Path(checkpoint).glob("*.safetensors")) if checkpoint is not None else [lora_file(str(lora))]
    total = hashlib.sha256()
    for path in paths:
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()[:16]


def generate_images(job: Job, prompts: Sequence[Prompt], out: Path) -> int:
    """Write `DIR/images/DIMENSION/NNNNN-MM.png`, `manifest.jsonl` and `job.json`; returns how many images were drawn.

    What is there already is kept, so an interrupted call goes on where it stopped; every process draws its share of
    what is missing. A prompt of which an image is missing is drawn again as a whole.

    Raises:
        UserError: the folder holds images of another job; the keys that differ are named.
    """
    accelerator = join_processes()
    policy = job.policy()
    spec, each = job.drawing.spec(policy), job.drawing.per_prompt
    items = [Item(prompt, m, image_file(out, i, prompt, m)) for i, prompt in enumerate(prompts) for m in range(each)]
    if accelerator.is_main_process:
        _prepare(out, job.record(prompts, spec), items)
    accelerator.wait_for_everyone()  # the folder is looked at before anyone writes images to it
    there = [item.file.is_file() for item in items]
    missing = [i for i in range(len(prompts)) if not all(there[i * each : (i + 1) * each])]
    accelerator.wait_for_everyone()
    rank, world = accelerator.process_index, accelerator.num_processes
    todo = [prompts[i] for i in missing]
    amount = {**job.drawing.amount(), "rank": rank, "world": world}
    batches = generate(policy, todo, spec, **amount) if todo else iter(())
    with progress("drawing", (rank + 1) * len(todo) * each // world - rank * len(todo) * each // world) as advance:
        for index, images in batches:
            for i, image in zip(index.tolist(), images, strict=True):
                _write(image, items[missing[i // each] * each + i % each], job.drawing.seed)
            advance(len(images))
    accelerator.wait_for_everyone()
    return len(todo) * each


def image_file(out: Path, index: int, prompt: Prompt, member: int) -> Path:
    """Where `generate_images` writes an image of the prompt at this place."""
    folder = str(prompt.metadata.get("dimension") or "all")
    return out / "images" / folder / f"{index:05d}-{member:02d}.png"


def _prepare(out: Path, record: Mapping[str, Any], items: Sequence[Item]) -> None:
    """Folders, the job and the manifest; the manifest says what will be there when all is drawn."""
    path = out / JOB
    if path.is_file():
        before = read_job(out)
        keys = [key for key in record if key != "diffrl_version" and before.get(key) != record[key]]
        if keys:
            differences = ", ".join(f"{key} {before.get(key)} there and {record[key]} here" for key in keys)
            raise UserError(f"--out: {out} holds images of another job ({differences}); choose another folder")
    for folder in {item.file.parent for item in items}:
        folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for item in items:
        entry = {"file": str(item.file.relative_to(out)), "prompt": item.prompt.text, "member": item.member}
        lines.append(json.dumps({**entry, **item.prompt.metadata}, ensure_ascii=False))
    for name, text in ((MANIFEST, "\n".join(lines)), (JOB, json.dumps(record, indent=1))):
        write_text(out / name, text + "\n")


def _write(image: torch.Tensor, item: Item, seed: int) -> None:
    text = {"prompt": item.prompt.text, "seed": str(seed), "member": str(item.member)}
    text |= {key: value for key in ("dimension", "keyword") if (value := str(item.prompt.metadata.get(key, "")))}
    save_image(image, item.file, text)
