"""A page for each family of models, from the support table, the recipes, their presets and the counted memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from diffrl.conformance.table import COLUMNS, rows
from diffrl.policy.registry import find_family

ROOT = Path(__file__).resolve().parents[2]
CARDS = ("16", "24", "48", "80")
GITHUB, HUB = "https://github.com", "https://huggingface.co"


class About(NamedTuple):
    """What the code does not know of a family; read in November 2026."""

    pipeline: str
    title: str
    licence: str
    source: str  # where the licence was read
    pitfall: str = ""  # what people met who trained it, with the place where they say so


# by folder of configs
FAMILIES = {
    "sd35": About(
        "StableDiffusion3Pipeline",
        "Stable Diffusion 3.5",
        "Stability AI Community License; accept it first",
        f"{HUB}/stabilityai/stable-diffusion-3.5-medium/blob/main/LICENSE.md",
    ),
    "flux": About(
        "FluxPipeline",
        "FLUX.1",
        "dev: FLUX.1 [dev] Non-Commercial License, accept it first; schnell: Apache-2.0",
        f"{GITHUB}/black-forest-labs/flux/tree/main/model_licenses",
        f"in fp16 the pictures are [black]({GITHUB}/kohya-ss/sd-scripts/issues/1846): keep bf16. A LoRA trained on "
        f"schnell as on dev draws [badly]({GITHUB}/huggingface/diffusers/issues/12120): roll out in its 4 steps",
    ),
    "flux2": About(
        "Flux2KleinPipeline",
        "FLUX.2",
        "klein 4B: Apache-2.0; klein 9B and dev: FLUX Non-Commercial License",
        f"{GITHUB}/black-forest-labs/flux2",
        f"train [base or dev]({GITHUB}/black-forest-labs/flux2#which-model-should-i-use), not the distilled klein",
    ),
    "qwen_image": About(
        "QwenImagePipeline",
        "Qwen-Image",
        "Apache-2.0",
        f"{GITHUB}/QwenLM/Qwen-Image#license-agreement",
        f"a LoRA whose names somebody rewrote by hand gave [NaN]({GITHUB}/QwenLM/Qwen-Image/issues/118): "
        "`lora.start` reads foreign names itself",
    ),
    "qwen_image21": About(
        "QwenImage21Pipeline",
        "Qwen-Image 2.1",
        "Qwen Research License: no commercial use",
        f"{HUB}/Qwen/Qwen-Image-2.1/blob/main/LICENSE",
    ),
    "z_image": About(
        "ZImagePipeline",
        "Z-Image",
        "Apache-2.0",
        f"{GITHUB}/Tongyi-MAI/Z-Image",
        f"a LoRA trained with a flow loss on Turbo draws [generic pictures]({GITHUB}/SceneWorks/SceneWorks/pull/126): "
        "train Z-Image, and let `evaluate.also` draw with Turbo",
    ),
    "krea2": About(
        "Krea2Pipeline",
        "Krea 2",
        "Krea 2 Community License",
        "https://www.krea.ai/krea-2-licensing",
        f"its makers [train on Raw and draw with Turbo]({HUB}/krea/Krea-2-Raw): LoRAs fit both",
    ),
    "sana": About(
        "SanaPipeline",
        "SANA",
        "NVIDIA's NSCL v2-custom; its text encoder: Gemma's terms",
        f"{HUB}/Efficient-Large-Model/Sana_1600M_1024px_diffusers",
        "its card names words, hands and crowded scenes as weak",
    ),
    "chroma": About("ChromaPipeline", "Chroma", "Apache-2.0", f"{HUB}/lodestones/Chroma1-HD"),
    "lumina2": About("Lumina2Pipeline", "Lumina-Image 2.0", "Apache-2.0", f"{HUB}/Alpha-VLLM/Lumina-Image-2.0"),
    "hidream": About(
        "HiDreamImagePipeline",
        "HiDream-I1",
        "MIT; its text encoder: Llama 3.1's terms",
        f"{GITHUB}/HiDream-ai/HiDream-I1#license",
        f"accept [Llama 3.1's licence]({GITHUB}/HiDream-ai/HiDream-I1#quick-start), too: it encodes texts",
    ),
    "sdxl": About(
        "StableDiffusionXLPipeline",
        "Stable Diffusion XL",
        "CreativeML Open RAIL++-M",
        f"{GITHUB}/Stability-AI/generative-models/blob/main/model_licenses/LICENSE-SDXL1.0",
        f"its autoencoder gives [NaN in fp16]({GITHUB}/kohya-ss/sd-scripts/issues/881): diffrl decodes in fp32",
    ),
    "sd15": About(
        "StableDiffusionPipeline",
        "Stable Diffusion 1.5",
        "CreativeML Open RAIL-M",
        f"{HUB}/stable-diffusion-v1-5/stable-diffusion-v1-5",
    ),
    "playground": About("StableDiffusion3Pipeline", "The playground's model", "Apache-2.0", ""),
}


def pages() -> dict[str, str]:
    """{path of the site: Markdown} of all families."""
    memory = json.loads((ROOT / "assets" / "results" / "memory.json").read_text(encoding="utf-8"))["cards"]
    return {f"guides/models/{name}.md": page(name, memory) for name in FAMILIES}


def page(name: str, memory: list[dict[str, Any]]) -> str:
    """Licence, sizes, text length, memory by card, recipes, and what to watch."""
    about = FAMILIES[name]
    family: Any = find_family(about.pipeline)
    row = dict(zip(COLUMNS, next(one for one in rows() if about.pipeline in one[0].split(", ")), strict=True))
    words = {"playground": "playground:", "sdxl": "xl-base", "sd15": "v1-5", "sd35": "3.5"}.get(name, "")
    known = [part for part in row["models: steps, guidance"].split("; ") if words in part]
    recipes = sorted((ROOT / "configs" / name).glob("*.yaml"))
    own = "each prompt keeps its own length" if getattr(family, "own_lengths", False) else "shorter ones are padded"
    text = "77 tokens of CLIP" if name in ("sdxl", "sd15") else f"at most {family.text_length} tokens; {own}"
    facts = {
        "licence": about.licence
        + (f" ([source]({about.source}))" if about.source else "")
        + "; it holds for the LoRA, too",
        "models: steps, guidance": "; ".join(known),
        "guidance": row["guidance"],
        "sizes": row["sizes"],
        "texts": text,
        "not possible": row["restrictions"],
    }
    lines = [
        f"# {about.title}",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {key} | {value} |" for key, value in facts.items()),
        "",
    ]
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
    if about.pitfall:
        lines += [f"**What others met**: {about.pitfall}.", ""]
    lines += [f"**Recipes**: {', '.join(f'`{name}/{path.stem}`' for path in recipes)}.", ""]
    tried = "a tiny random pipeline of its classes passes every check of `diffrl models check`; no training to the end"
    tried = "trained with every method" if name == "playground" else tried
    ends = f"**What was tried**: {tried} ([speeds](../gpu-proof.md)). What all models share: [models](../models.md)."
    return "\n".join([*lines, ends, ""])


def _fit(found: dict[str, Any] | None) -> str:
    return f"{found['gib']} GiB: {' '.join(found['overrides'])}" if found else "does not fit"
