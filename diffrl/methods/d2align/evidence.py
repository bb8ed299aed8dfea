"""What a learned direction means: how it ranks images anew, and the words that it points to (D2-Align).

Symbols as in `direction.py`: N images, P prompts; e_img (N, D), e_text (P, D), owner (N,), vector (D,).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from diffrl.methods.d2align.corrected import guided_embedding
from diffrl.rewards.protocol import Embedder
from diffrl.stats import rank_correlation

EXAMPLES = 6  # images whose rank falls, and rises, most
WORDS = 15
# Beside the prompts' own words: what generators are said to drift towards, and its opposites.
GENERAL = (
    *("realistic", "photo", "glossy", "smooth", "sharp", "detailed", "cinematic", "dramatic", "vivid", "saturated"),
    *("colourful", "bright", "dark", "dull", "blurry", "grainy", "flat", "simple", "clean", "beautiful", "ugly"),
    *("anime", "cartoon", "painting", "sketch", "render", "portrait", "landscape", "studio", "centred", "empty"),
    *("crowded", "warm", "cold", "soft", "contrast", "quality", "masterpiece"),
)


def evidence(
    reward: Embedder, e_img: Tensor, e_text: Tensor, owner: Tensor, vector: Tensor, omega: float, texts: Sequence[str]
) -> dict[str, Any]:
    """What the direction does, as plain values: ranks of the N images under both rewards, and the words it points to.

    Rank 1 is the highest score. `fallen` and `risen`: the images whose rank changes most. `words`: cosines of b_v with
    the embeddings of single words, which are those of the prompts and some general ones.
    """
    with torch.no_grad():
        plain = reward.score(e_img, e_text[owner]).float().cpu()
        corrected = reward.score(e_img, guided_embedding(e_text, vector, omega)[owner]).float().cpu()
        known = Counter(word for text in texts for word in re.findall(r"[^\W\d_]{3,}", text.lower()))
        words = list(dict.fromkeys([*(word for word, _ in known.most_common(600)), *GENERAL]))
        parts = [reward.embed_text(words[i : i + 64]).float() for i in range(0, len(words), 64)]
        cosines = F.cosine_similarity(torch.cat(parts), vector[None], dim=-1).cpu()
    ranks = torch.stack([_ranks(plain), _ranks(corrected)])
    change = ranks[1] - ranks[0]
    order = change.argsort(stable=True).tolist()  # risen first: their rank number gets smaller

    def row(i: int) -> dict[str, Any]:
        scores = {"plain": float(plain[i]), "corrected": float(corrected[i])}
        return {"image": i, **scores, "rank_plain": int(ranks[0, i]), "rank_corrected": int(ranks[1, i])}

    by_word = [[words[i], float(cosines[i])] for i in cosines.argsort(descending=True, stable=True).tolist()]
    return {
        "images": len(plain),
        "spearman": rank_correlation(plain, corrected),
        "ranks": ranks.T.tolist(),
        "fallen": [row(i) for i in reversed(order[-EXAMPLES:]) if change[i] > 0],
        "risen": [row(i) for i in order[:EXAMPLES] if change[i] < 0],
        "words": {"nearest": by_word[:WORDS], "farthest": by_word[: -WORDS - 1 : -1]},
    }


def _ranks(scores: Tensor) -> Tensor:
    """1 for the highest; the earlier one of equals first."""
    return scores.argsort(descending=True, stable=True).argsort() + 1
