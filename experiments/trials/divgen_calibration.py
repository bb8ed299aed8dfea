"""Are `divgen report`'s tests honest? False alarms where nothing differs, and the power to see a planted collapse.

    python -m experiments.trials.divgen_calibration --out assets/results/divgen_calibration.json

False alarms: pairs of sets from one source, compared as the report compares them. A set has some of the prompts
(`MISSING` lack), 2 to 6 images of each, and copies of some (`COPIES`). Power: of the second set every image lies nearer
to one point, by a share, at equal numbers of images. Features are drawn, so no model is needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from diffrl.divgen.fair import SetOf, make_fair
from diffrl.divgen.metrics import difference
from diffrl.divgen.observe import Item, Seen, Sight
from diffrl.divgen.reference import Reference
from diffrl.divgen.score import METRICS, score
from diffrl.divgen.store import _once
from diffrl.prompts import Prompt
from diffrl.version import __version__
from experiments.league.results import commit

PROMPTS = (12, 20, 40)
MISSING, COPIES = 0.1, 0.1
WIDTH = 24  # of features
SHARES = (0.0, 0.05, 0.1, 0.2, 0.4)  # of the way to the collapsed point
EXTRACTORS = {"identity": "drawn", "style": "drawn", "layout": "drawn", "features": "drawn", "lpips": "drawn"}


def drawn(rng: np.random.Generator, texts: Mapping[str, np.ndarray], unequal: bool, share: float) -> SetOf:
    """A set of the source whose prompts have these centres (WIDTH,)."""
    items: list[Item] = []
    for text in texts:
        if unequal and rng.random() < MISSING:
            continue
        for member in range(int(rng.integers(2, 7)) if unequal else 4):
            items.append(Item(Prompt(text), member, Path(f"/{text}-{member}"), stated=False))
            if unequal and rng.random() < COPIES:
                items.append(Item(Prompt(text), member, Path(f"/{text}-{member}-copy"), stated=False))
    digests = {item: str(item.path).removesuffix("-copy").encode() for item in items}
    left, copies = _once(items, digests)
    seen, distances = [], {}
    features: dict[str, list[np.ndarray]] = {}
    for item in left:
        own = (1 - share) * (texts[item.prompt.text] + rng.normal(size=WIDTH)) + share
        boxes = np.sort(np.clip(0.5 + (1 - share) * (rng.random((2, 4)) - 0.5), 0, 1), 1)[:, [0, 1, 2, 3]]
        boxes = np.stack([boxes[:, 0], boxes[:, 1], boxes[:, 2] + 0.1, boxes[:, 3] + 0.1], 1)
        tones = 0.5 + 0.1 * (1 - share) * own[:3]
        values: dict[str, np.ndarray | None] = {
            "identity": own,
            "style": own,
            "layout": boxes,
            "features": own,
            "tones": tones,
        }
        seen.append(Seen(item, values))
        features.setdefault(item.prompt.text, []).append(own)
    for text, group in features.items():
        pairs = [np.linalg.norm(a - b) for i, a in enumerate(group) for b in group[:i]]
        if pairs:
            distances[text] = (float(np.mean(pairs)), len(group))
    real = np.random.default_rng(0).normal(size=(600, WIDTH)) * 2**0.5
    reference = Reference(real[:400], real[400:], "drawn", "drawn")
    sight = Sight(seen, distances, copies=copies)
    scores = score(sight, reference)
    scores.about = {"extractors": EXTRACTORS, "reference": {"source": "drawn"}}
    return SetOf("", scores, sight, reference)


def compared(rng: np.random.Generator, count: int, unequal: bool, share: float = 0.0) -> dict[str, float]:
    """The p-value of each score for two sets of `count` prompts."""
    texts = {f"prompt {i}": rng.normal(size=WIDTH) for i in range(count)}
    sets = [drawn(rng, texts, unequal, 0.0), drawn(rng, texts, unequal, share)]
    make_fair(sets)
    found = {}
    for name in METRICS:
        a, b = (one.fair[name] for one in sets)
        if a.value is None or b.value is None:
            continue
        paired = bool(a.units) and a.units == b.units
        gap = difference(a.value, b.value, np.array(a.deviations), np.array(b.deviations), paired)
        if gap is not None:
            found[name] = gap.p
    return found


def share_below(values: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """By score, the share of p-values below 0.05, and of how many."""
    table = {}
    for name in METRICS:
        own = [row[name] for row in values if name in row]
        if own:
            table[name] = {"share": round(float(np.mean(np.array(own) < 0.05)), 4), "pairs": len(own)}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--power-pairs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=34, help="of the pairs; each has a stream of its own")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for i in range(args.pairs):
        count = PROMPTS[i % len(PROMPTS)]
        rows.append((count, compared(np.random.default_rng([args.seed, i]), count, True)))
    rng = np.random.default_rng([args.seed, args.pairs])
    result = {
        "command": " ".join(["python -m experiments.trials.divgen_calibration", *sys.argv[1:]]),
        "commit": commit(),
        "diffrl_version": __version__,
        "seed": args.seed,
        "standard error of 0.05": round((0.05 * 0.95 / max(args.pairs, 1)) ** 0.5, 4),
        "false alarms": share_below([row for _, row in rows]),
        "false alarms by prompts": {n: share_below([row for count, row in rows if count == n]) for n in PROMPTS},
        "power": {
            count: {
                share: share_below([compared(rng, count, False, share) for _ in range(args.power_pairs)])
                for share in SHARES
            }
            for count in (8, 40, 200)
        }
        if args.power_pairs
        else {},
    }
    text = json.dumps(result, indent=1) + "\n"
    print(text) if args.out is None else args.out.write_text(text)


if __name__ == "__main__":
    main()
