"""What a published LoRA does beside its base model, from the same noise: scores with intervals, and a gallery."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from diffrl.config import Config
from diffrl.evaluation import Evaluator
from diffrl.features import load_features
from diffrl.policy import Policy
from diffrl.prompts import Prompt
from diffrl.rollout import SamplerSpec, generate
from diffrl.run.build import build_scorers, features_name
from diffrl.run.evaluation import evaluation_spec
from diffrl.stats import differences, interval, p_value
from diffrl.tools.progress_bar import progress

STRENGTHS = (0.0, 0.5, 1.0, 1.5)
SMALL, LARGE = 192, 512  # pixels: narrower pictures of the gallery are enlarged, wider ones reduced


@dataclass(frozen=True)
class Row:
    """A value on held-out prompts: base, trained, and the gain's 95 % interval over prompts (None: not known)."""

    name: str
    role: str  # "trained", "held out"
    base: float
    trained: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    lower_is_better: bool = False


@contextmanager
def strength(policy: Policy, factor: float) -> Iterator[None]:
    """Inside, the trained LoRA counts `factor` times (0: the base model)."""
    state = policy.state()
    policy.load_state("default", {k: v * factor if k.endswith("lora_B.weight") else v for k, v in state.items()})
    try:
        yield
    finally:
        policy.load_state("default", state)


def measure(config: Config, policy: Policy, prompts: Sequence[Prompt], lower: frozenset[str]) -> list[Row]:
    """Every reward of the config, and diversity, of base model and LoRA: the same noise, pairs of prompts compared."""
    _, judges = build_scorers(config, policy.device)
    features = load_features(features_name(config), policy.device)
    per_prompt, batch_size = config.evaluate.per_prompt, config.rollout.batch_size
    evaluator = Evaluator(policy, judges, features, evaluation_spec(config), per_prompt, batch_size)
    with progress("measuring", 2 * len(prompts) * per_prompt) as advance:
        result = [evaluator.score(prompts, name, config.seed, advance=advance) for name in (None, "default")]
    judges.close()
    rows = []
    for k, name in enumerate(judges.names):
        base, trained = (one.scores[:, k].view(len(prompts), per_prompt).nanmean(1) for one in result)
        role = "trained" if name in config.rewards else "held out"
        rows.append(paired(name, role, base, trained, name in lower))
    before, after = (one.breadth() for one in result)
    rows += [
        Row(name, "held out", before[name], after[name], lower_is_better=name == "unreadable")
        for name in before
        if name in after
    ]
    return rows


def paired(name: str, role: str, base: Tensor, trained: Tensor, lower: bool = False) -> Row:
    """A row from the means of P prompts, (P,) each, NaN where a reward does not apply; paired t-test over prompts."""
    known = ~(base.isnan() | trained.isnan())
    base, trained = base[known].double(), trained[known].double()
    if len(base) == 0:
        return Row(name, role, float("nan"), float("nan"), lower_is_better=lower)
    gain = differences(base, trained)
    middle, half = interval(gain)
    low, high = (None, None) if half is None else (middle - half, middle + half)
    return Row(name, role, float(base.mean()), float(trained.mean()), low, high, p_value(gain), lower)


def gallery(policy: Policy, prompts: Sequence[Prompt], spec: SamplerSpec, *, seed: int, batch_size: int) -> Image.Image:
    """One row for each prompt, one column for each strength of `STRENGTHS`; a row's pictures start from one noise."""
    columns = []
    for factor in STRENGTHS:
        with strength(policy, factor):
            drawn = generate(policy, prompts, spec, seed=seed, per_prompt=1, batch_size=batch_size)
            columns.append(torch.cat([images.float().cpu() for _, images in drawn]))
    tall, wide = columns[0].shape[-2:]
    factor = SMALL / wide if wide < SMALL else min(1.0, LARGE / wide)
    shown = (round(wide * factor), round(tall * factor))
    head, gap, label = 24, 6, 20
    width, height = len(STRENGTHS) * (shown[0] + gap) + gap, shown[1] + gap + label
    sheet = Image.new("RGB", (width, head + len(prompts) * height + gap), "white")
    pen = ImageDraw.Draw(sheet)
    for c, times in enumerate(STRENGTHS):
        left = gap + c * (shown[0] + gap)
        pen.text((left, 6), "base model" if times == 0 else f"strength {times:g}", fill="black")
        for r, image in enumerate(columns[c]):
            pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
            tile = Image.fromarray(pixels).resize(shown, Image.Resampling.NEAREST if factor > 1 else None)
            sheet.paste(tile, (left, head + r * height + label))
    for r, prompt in enumerate(prompts):
        pen.text((gap, head + r * height + 4), prompt.text[: width // 7], fill="black")
    return sheet
