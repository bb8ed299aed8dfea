"""What `diffrl replay` shows of a training image: a text for the console, and files."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from diffrl.records.disk import replacing, write_json, writing
from diffrl.records.tracking import save_image
from diffrl.tools.pictures import grid


def write(facts: Mapping[str, Any], image: Tensor, group: Tensor, out: Path) -> list[Path]:
    """The image (3, H, W), its group (G, 3, H, W) in one picture, and the facts, in the folder `out`; their paths."""
    name = f"epoch-{facts['epoch']:04d}-image-{facts['image']:05d}"
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    text = {"prompt": facts["prompt"], "seed": str(facts["seed"]), "member": str(facts["member"])}
    paths = [out / f"{name}.png", out / f"{name}-group.png", out / f"{name}.json"]
    save_image(image, paths[0], text)
    pixels = (group.float().clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    captions = []
    for one in facts["group"]:
        mark = "this one: " if one["member"] == facts["member"] else ""
        captions.append(f"{mark}{_scores(one['scores'])}, A {_signed(one['advantage'])}")
    with replacing(paths[1]) as temporary:
        grid([Image.fromarray(one) for one in pixels], captions).save(temporary, format="png")
    write_json(paths[2], facts)
    return paths


def as_text(facts: Mapping[str, Any]) -> str:
    """The facts on a console of 80 columns."""
    group, size = facts["group"], len(facts["group"])
    lines = [
        f"image      {facts['image']} of epoch {facts['epoch']}: member {facts['member']} of prompt "
        f'{facts["group_number"]}, drawn by "{facts["drawn_by"]}"',
        *textwrap.wrap(f"prompt     {facts['prompt']}", 80, subsequent_indent=" " * 11),
    ]
    for name, score in facts["scores"].items():
        known = [one["scores"][name] for one in group if one["scores"][name] is not None]
        if score is None:
            lines.append(f"score      {name}: does not apply")
            continue
        place = 1 + sum(other > score for other in known)
        mean = sum(known) / len(known)
        lines.append(f"score      {name} {score:.4g}; its group {mean:.4g} in the mean, rank {place} of {size}")
    lines.append(f"advantage  {_signed(facts['advantage'])} ({', '.join(facts['columns'])})")
    if (gate := facts["gate"]) is not None:
        held = "held back" if gate["held_back"] else "not held back"
        u = "unknown" if gate["uncertainty"] is None else f"{gate['uncertainty']:+.3f}"
        lines.append(f"gate       U {u}: {held} (the gate's share is {gate['share']:.3g})")
    if facts["gradient"] is None:
        lines.append("gradient   MARBLE balances the rewards' gradients: no share by image")
    elif not facts["gradient"]:
        lines.append("gradient   none: the objective trains none of its rows")
    for step in facts["gradient"] or ():
        lines.append(
            f"gradient   {step['share']:+.2%} of step {step['step']}'s, an equal share is {1 / step['images']:.2%}; "
            f"{step['norm']:.3f} as long"
        )
    compared = facts["compared"]
    if not compared["differ"]:
        values = f"{compared['values']} values of the epoch's line in metrics.jsonl"
        lines.append(f"equal      all {values}, to the last digit")
    else:
        name, worst = max(compared["differ"].items(), key=lambda item: item[1])
        lines.append(f"NOT equal  {len(compared['differ'])} values of metrics.jsonl, {name} by {worst:.1e} of itself:")
        then, why = compared["processes_then"], "another machine, device, version or number of threads"
        why = f"the run had {then} processes" if then > 1 else why
        lines.append(f"           {why}; the same up to rounding")
    return "\n".join(lines)


def _scores(scores: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {'-' if score is None else f'{score:.3g}'}" for name, score in scores.items())


def _signed(advantage: Sequence[Any]) -> str:
    """(columns,) or (T, columns) of them."""
    if advantage and isinstance(advantage[0], list):
        return " ".join(_signed(row) for row in advantage)
    return ", ".join(f"{value:+.3g}" for value in advantage)
