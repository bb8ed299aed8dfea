"""A page for each family of models, from the support table, the recipes, their presets and the counted memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from diffrl.conformance.table import COLUMNS, rows
from diffrl.policy.registry import find_family

ROOT = Path(__file__).resolve().parents[2]
CARDS = ("16", "24", "48", "80")
# folder of configs: the pipeline's class, the page's title, and the licence that the model's hub page names
FAMILIES = {
    "sd35": ("StableDiffusion3Pipeline", "Stable Diffusion 3.5", "Stability AI Community License; accept it first"),
    "flux": (
        "FluxPipeline",
        "FLUX.1",
        "dev: FLUX.1 [dev] Non-Commercial License, accept it first; schnell: Apache-2.0",
    ),
    "flux2": ("Flux2KleinPipeline", "FLUX.2", "klein 4B: Apache-2.0; dev: FLUX Non-Commercial License"),
    "qwen_image": ("QwenImagePipeline", "Qwen-Image", "Apache-2.0"),
    "qwen_image21": ("QwenImage21Pipeline", "Qwen-Image 2.1", ""),
    "z_image": ("ZImagePipeline", "Z-Image", "Apache-2.0"),
    "krea2": ("Krea2Pipeline", "Krea 2", ""),
    "sana": ("SanaPipeline", "SANA", "NVIDIA's NSCL v2-custom; its text encoder: Gemma's terms"),
    "chroma": ("ChromaPipeline", "Chroma", "Apache-2.0"),
    "lumina2": ("Lumina2Pipeline", "Lumina-Image 2.0", "Apache-2.0"),
    "hidream": ("HiDreamImagePipeline", "HiDream-I1", "MIT; its text encoder: Llama 3.1's terms"),
    "sdxl": ("StableDiffusionXLPipeline", "Stable Diffusion XL", "CreativeML Open RAIL++-M"),
    "sd15": ("StableDiffusionPipeline", "Stable Diffusion 1.5", "CreativeML Open RAIL-M"),
    "playground": ("StableDiffusion3Pipeline", "The playground's model", "Apache-2.0"),
}


def pages() -> dict[str, str]:
    """{path of the site: Markdown} of all families."""
    memory = json.loads((ROOT / "assets" / "results" / "memory.json").read_text(encoding="utf-8"))["cards"]
    return {f"guides/models/{name}.md": page(name, memory) for name in FAMILIES}


def page(name: str, memory: list[dict[str, Any]]) -> str:
    """Licence, sizes, text length, memory by card, recipes, and what to watch."""
    pipeline, title, licence = FAMILIES[name]
    family: Any = find_family(pipeline)
    row = dict(zip(COLUMNS, next(one for one in rows() if pipeline in one[0].split(", ")), strict=True))
    words = {"playground": "playground:", "sdxl": "xl-base", "sd15": "v1-5", "sd35": "3.5"}.get(name, "")
    known = [part for part in row["models: steps, guidance"].split("; ") if words in part]
    recipes = sorted((ROOT / "configs" / name).glob("*.yaml"))
    own = "each prompt keeps its own length" if getattr(family, "own_lengths", False) else "shorter ones are padded"
    text = "77 tokens of CLIP" if name in ("sdxl", "sd15") else f"at most {family.text_length} tokens; {own}"
    facts = {
        "licence": (licence or "that of its hub page") + "; it holds for the LoRA, too",
        "models: steps, guidance": "; ".join(known),
        "guidance": row["guidance"],
        "sizes": row["sizes"],
        "texts": text,
        "not possible": row["restrictions"],
    }
    lines = [f"# {title}", "", "| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in facts.items()), ""]
    first = min(recipes, key=lambda path: ("16gb" not in path.stem, "nft" not in path.stem, path.stem))
    start = f"{name}/{first.stem}"
    lines += ["```bash", f"diffrl doctor {start} --gpu 16", f"diffrl train {start} run_dir=runs/mine", "```", ""]
    counted = [one for one in memory if one["config"].startswith(f"{name}/")]
    for one in counted:
        lines += [f"Memory of `{one['config']}` with one row a micro-batch, counted by doctor, without rewards:", ""]
        lines += [f"| {' | '.join(f'{card} GB' for card in CARDS)} |", "| --- " * len(CARDS) + "|"]
        lines += [f"| {' | '.join(_fit(one['fits'][card]) for card in CARDS)} |", ""]
    watched = sorted({watch for path in recipes for watch in (yaml.safe_load(path.read_text()).get("watch") or {})})
    lines += [
        f"**Watch** (in its recipes): {', '.join(f'`{watch}`' for watch in watched) or 'nothing; add `watch:`'}.",
        "",
    ]
    lines += [f"**Recipes**: {', '.join(f'`{name}/{path.stem}`' for path in recipes)}.", ""]
    tried = "a tiny random pipeline of its classes passes every check of `diffrl models check`; no training to the end"
    tried = "trained with every method" if name == "playground" else tried
    ends = f"**What was tried**: {tried} ([speeds](../gpu-proof.md)). What all models share: [models](../models.md)."
    return "\n".join([*lines, ends, ""])


def _fit(found: dict[str, Any] | None) -> str:
    return f"{found['gib']} GiB: {' '.join(found['overrides'])}" if found else "does not fit"
