"""What a run says of itself before it begins."""

from __future__ import annotations

import logging
import textwrap
from typing import TYPE_CHECKING

from diffrl.worlds import worlds

if TYPE_CHECKING:
    from diffrl.run.run import Run

log = logging.getLogger("diffrl")


def meanings(run: Run) -> str:
    """One line per evaluated value, taken from the rewards' cards; begins with a line break."""
    config, lines = run.config, []
    for name, reward in run.judges.rewards.items():
        card, entry = getattr(reward, "card", None), config.rewards.get(name) or config.watch.get(name)
        given = ", ".join(f"{key} {value}" for key, value in (entry.arguments if entry else {}).items())
        about = f"{name}{f' ({given})' if given else ''}: {getattr(card, 'measures', 'a reward without a card')}"
        lines.append(f"{about}{' (lower is better)' if name in run.lower else ''}")
    lines.append("diversity: mean distance between the images of one prompt, in a space of features")
    if config.model in worlds():
        world = worlds()[config.model]
        lines += [f"{name}: {meaning}" for name, meaning in world.meanings.items()]
        texts = [prompt.text for prompt in [*run.source.stream.prompts, *run.evaluation.prompts]]
        if line := world.foreign(list(dict.fromkeys(texts))):
            log.warning("%s", line)
    lines.append("saturation: mean of the images' colour saturation; far from the untrained model's is a warning")
    return "".join(f"\n  {textwrap.shorten(line, 116, placeholder=' ...')}" for line in lines)


def describe(run: Run) -> str:
    """One paragraph that says what is about to happen."""
    from diffrl.config.loras import told

    config, policy, spec = run.config, run.policy, run.spec
    parameters = sum(p.numel() for _, p in policy.trainable)
    rollout, images = config.rollout, config.rollout.images
    rewards = ", ".join(f"{n} x {config.rewards[n].weight:g}" for n in config.rewards)
    given = "" if config.image_set is None else f", {config.given_groups} from {config.image_set.source}"
    sharded = ", which share the network (FSDP2)" if policy.sharded else ""
    scouts = f" of {rollout.scout.images}" if rollout.scout else ""
    also = "".join(
        f"; judged on {one.source(config.model)}{f' with {one.merge}' if one.merge else ''}, too, as {name}"
        for name, one in config.evaluate.also.items()
    )
    kind = "" if config.lora.kind == "lora" else f" ({config.lora.kind}"
    kind += ")" * bool(kind) if not policy.lora.spec.dora else ", computed by peft's own layers)"
    over = f" with {', '.join(config.lora.merge)} in its weights" if config.lora.merge else ""
    return (
        f"{config.method.title} on {config.model}{over}: {config.epochs} epochs of {images} images "
        f"({rollout.groups} prompts{given} x {rollout.group_size}{scouts}), {spec.steps} steps of {spec.sampler}; "
        f"{config.optimiser_steps} optimiser steps an epoch; LoRA rank "
        f"{told(config.lora.rank)}{kind}, {parameters:,} parameters; rewards: {rewards}; "
        f"{run.accelerator.num_processes} process(es) on {policy.device}{sharded}{also}; run folder {run.folder.path}"
    )
