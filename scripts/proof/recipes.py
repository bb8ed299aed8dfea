"""Shipped recipes at their own shapes, with fewer prompts and free rewards: the parts `recipe/...`.

Resolution, steps, guidance, batches, LoRA, precision and method are the recipe's; an epoch is one group of its prompts,
in as many optimiser steps as its own. Each + of a name is a change to the recipe, which is measured beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from training import REWARDS, ROOT, patches

from diffrl.config import load_config


class Recipe(NamedTuple):
    """What a part measures."""

    recipe: str
    model: str  # in MODELS
    size: int  # images of an epoch, which are one group
    tokens: int | None = None  # of a text, at most; None: the model's own
    overrides: tuple[str, ...] = ()
    beside: str | None = None  # the part that it is compared with
    seconds: float = 60.0  # if nothing is known

    def change(self, seconds: float, *overrides: str) -> Recipe:
        return self._replace(overrides=overrides, beside=f"recipe/{self.recipe}", seconds=seconds)


QWEN = Recipe("qwen_image/grpo_ocr", "qwen", 8, 128, seconds=60.0)
FLUX = Recipe("flux/nft_pickscore", "flux", 12, seconds=60.0)
GARDO = Recipe("sd35/gardo_ocr", "sd35", 24, seconds=50.0)
NFT = Recipe("sd35/nft_ocr", "sd35", 24, seconds=40.0)
RECIPES = {f"recipe/{one.recipe}": one for one in (QWEN, FLUX, GARDO, NFT)}
RECIPES |= {
    "recipe/flux/nft_pickscore+int8": FLUX.change(40.0, "engine.base=int8"),
    "recipe/sd35/nft_ocr+compiled": NFT.change(120.0, "engine.compile=true"),
    "recipe/sd35/gardo_ocr+compiled": GARDO.change(150.0, "engine.compile=true"),
    "recipe/qwen_image/grpo_ocr+compiled": QWEN.change(150.0, "engine.compile=true"),
    "recipe/qwen_image/grpo_ocr+no-checkpointing": QWEN.change(50.0, "optimise.gradient_checkpointing=false"),
    "recipe/qwen_image/grpo_ocr+rollouts-of-8": QWEN.change(50.0, "rollout.batch_size=8"),
    "recipe/qwen_image/grpo_ocr+no-checkpointing+compiled+rollouts-of-8": QWEN.change(
        150.0, "optimise.gradient_checkpointing=false", "engine.compile=true", "rollout.batch_size=8"
    ),
    "recipe/sd35/nft_ocr+rollouts-of-24": NFT.change(40.0, "rollout.batch_size=24"),
    "recipe/sd35/nft_ocr+no-tf32": NFT.change(30.0, "engine.tf32=false"),
    "recipe/sd35/gardo_ocr+no-tf32": GARDO.change(30.0, "engine.tf32=false"),
}
LITTLE = {"rollout.batch_size": 2, "rollout.steps": 6, "optimise.micro_batch": 2}


def sections(name: str, tiny: bool) -> dict[str, Any]:
    """Of a part's config."""
    case = RECIPES[name]
    found: dict[str, Any] = load_config(ROOT / "configs" / f"{case.recipe}.yaml", []).resolved()
    steps = found["rollout"]["groups"] * found["rollout"]["group_size"] // found["optimise"]["batch_size"]
    images = 4 if tiny else case.size
    found["rollout"] |= {"groups": 1, "group_size": images}
    found["optimise"] |= {"batch_size": images // steps}
    found["optimise"]["micro_batch"] = min(found["optimise"]["micro_batch"], images // steps)
    found["rewards"] = patches(1)
    others = (found.get("gardo") or {}).get("auxiliary", [])
    found["watch"] = {other: {"plugin": f"{REWARDS}:Patch", "number": 9 + i} for i, other in enumerate(others)}
    for key, value in LITTLE.items() if tiny else ():
        section, _, word = key.partition(".")
        found[section][word] = value
    method = found[found["objective"]]
    if tiny and method.get("timesteps"):
        method["timesteps"] = 2
    return found
