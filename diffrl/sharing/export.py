"""`diffrl export`: which LoRAs of a run, at which strength, go into merged weights or into ComfyUI's file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from diffrl.config.loras import spec_of
from diffrl.errors import UserError, nearest
from diffrl.lora_files import find_lora, weighted
from diffrl.loras.encoders import outline, read_texts
from diffrl.loras.reading import read_lora
from diffrl.policy import LoraSpec, find_model
from diffrl.records import checkpoint
from diffrl.records.disk import replacing
from diffrl.resources import file_of_run, owner_of
from diffrl.sharing.keys import for_comfyui
from diffrl.sharing.merged import SHARD, Weighted, merge


def export_merged(
    source: str, out: Path, dtype: str | None = None, shard: int = SHARD, **choice: Any
) -> dict[str, Any]:
    """Write a model with a run's LoRA, and others, in its weights; see `diffrl.sharing.merged.merge`.

    Args:
        source, choice: as `choose` takes them.

    Raises:
        UserError: there is no such LoRA, checkpoint or snapshot, or the LoRA does not fit.
    """
    return merge(*choose(source, **choice), out, dtype, shard)


def export_comfyui(source: str, file: Path, **choice: Any) -> None:
    """Write one file in ComfyUI's names; several LoRAs become one whose rank is the sum of theirs.

    Raises:
        UserError: as `export_merged`, or what `file` would replace is read: a LoRA, or a file of the run or the model.
    """
    _check_out(source, choice.get("loras", ()), file)
    model, chosen = choose(source, **choice)
    state: dict[str, Tensor] = {}
    for lora in chosen:
        if lora.part is not None:
            raise UserError(
                f'export: "{lora.name}" changes the {lora.part}, too, which no file is written for; use --merged'
            )
        for name, value in lora.state.items():
            up = name.endswith("lora_B.weight")
            value = value.float() * (lora.scale if up else 1.0)
            state[name] = torch.cat([state[name], value], dim=int(up)) if name in state else value
    family = str(find_model(model)[1].get("_class_name"))
    tensors = for_comfyui(family, state, LoraSpec(rank=1, alpha=1.0))
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as unfinished:
        save_file(tensors, unfinished, metadata={"format": "pt"})


def _check_out(source: str, loras: Sequence[tuple[str, float]], file: Path) -> None:
    """UserError where a new file at `file` would take the place of a LoRA, or of weights of the run or the model."""
    if not file.exists():
        return
    place, read = file.resolve(), [path for name, _ in loras if isinstance(path := find_lora(name), Path)]
    of_model = place.is_relative_to(Path(source).resolve()) and (place.parent / "config.json").is_file()
    if of_model or owner_of(place) or any(path.samefile(file) for path in read):
        raise UserError(f'--comfyui: "{file}" is one of the files that are read, or a run\'s own; name another file')


def choose(
    source: str,
    loras: Sequence[tuple[str, float]] = (),
    strength: float = 1.0,
    step: int | None = None,
    snapshot: str | None = None,
) -> tuple[str, list[Weighted]]:
    """The model, and the LoRAs that are chosen; of a run also those that were merged before it was trained.

    Args:
        source: a run's folder, or a model; of a run its LoRA comes first.
        loras: more of them, each with its strength.
        strength: of the run's LoRA.
        step: of one of the run's checkpoints; None: the newest LoRA, RUN/lora.
        snapshot: the checkpoint's "default" or "ema" or another; None: what the run evaluates.
    """
    chosen, model, run = [], source, Path(source)
    if (run / "config.yaml").is_file() and not (run / "model_index.json").is_file():
        from diffrl.config import load_config

        config = load_config(file_of_run(run, "config.yaml", "export"))
        model, loras = config.model, [*(weighted(one) for one in config.lora.merge), *loras]
        if step is None and snapshot is None:
            chosen += _read(str(run / "lora"), model, strength)
        else:
            name, state = _of_checkpoint(run, step, snapshot, spec_of(config.lora))
            chosen.append(Weighted(name, state, strength, strength))
            if config.lora.start is not None:  # its part for text encoders is not trained, and in no checkpoint
                chosen += _read(config.lora.start, model, strength)[1:]
    elif step is not None or snapshot is not None or strength != 1.0:
        raise UserError(f'export: --step, --snapshot and --strength are of a run; "{source}" is no run\'s folder')
    for name, weight in loras:
        chosen += _read(name, model, weight)
    if not chosen:
        raise UserError(f'export: "{source}" is no run\'s folder: name a LoRA with --lora')
    return model, chosen


def _read(name: str, model: str, strength: float) -> list[Weighted]:
    """The LoRA of the network, and those of text encoders beside."""
    backbone = outline(model)
    read = read_lora(name, backbone)
    texts = read_texts(read.texts, name, backbone)
    first = Weighted(name, read.state, strength * read.spec.scale, strength)
    return [
        first,
        *(Weighted(name, one.state, strength * one.spec.scale, strength, part) for part, one in texts.items()),
    ]


def _of_checkpoint(run: Path, step: int | None, snapshot: str | None, spec: LoraSpec) -> tuple[str, dict[str, Tensor]]:
    """The LoRA's name, and its matrices with the scale of their layer in B."""
    path = checkpoint.latest(run) if step is None else checkpoint.of_step(run, step)
    if path is None:
        raise UserError(f'export: "{run}" has no intact checkpoint')
    tensors, _ = checkpoint.load(path)
    snapshots = {"default": tensors["lora"]}
    snapshots |= {name: state for name, state in tensors.items() if set(state) == set(tensors["lora"])}
    del snapshots["lora"]
    name = ("ema" if "ema" in snapshots else "default") if snapshot is None else snapshot
    if name not in snapshots:
        raise UserError(f'--snapshot: no "{name}"{nearest(name, snapshots)}; there are {", ".join(snapshots)}')
    layers = {key: key.rpartition(".lora_")[::2] for key in snapshots[name]}
    scales = {key: spec.of(layer)[1] if kind == "B.weight" else 1.0 for key, (layer, kind) in layers.items()}
    return f"{path}:{name}", {key: value * scales[key] for key, value in snapshots[name].items()}
