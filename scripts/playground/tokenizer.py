"""A true CLIP byte-pair tokenizer for a closed world: one token a grammar word, one token a letter of quoted words.

Byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909; the form of CLIP, whose last letter carries `</w>`) starts
from single letters and applies, again and again, the merge of lowest rank that fits. Every merge that is added later
has a higher rank, so it is tried only where no earlier one fits: words that are one token already stay so. What
remains to choose is the first pair of letters of each word, because that pair, wherever it occurs, is no longer
spelled. Pairs that a short pronounceable word (consonant, vowel, consonant) does not have are taken first: "gr" of
green, not "re".
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterable
from pathlib import Path

from diffrl_playground.grammar import BACKGROUNDS, COLORS, MOODS, NUMBERS, RELATIONS, SHAPES, SKINS, STYLES, TONES

BEGIN, END, UNKNOWN = "<|startoftext|>", "<|endoftext|>", "<|unknown|>"
MAX_LENGTH = 16
_LAST = "</w>"
_VOWELS = frozenset("aeiou")

Pair = tuple[str, str]


def vocabulary() -> list[str]:
    """All words and punctuation marks of the grammar, sorted, without the quoted words."""
    words = {"a", "the", "word", "in", "on", "and", "with", "no", "head", "hair", "hat", "glasses", "shape", ",", '"'}
    plurals = [f"{shape}s" for shape in (*SHAPES, "shape")]
    words.update(SHAPES, plurals, COLORS, BACKGROUNDS, STYLES, TONES, NUMBERS, SKINS, MOODS)
    words.update(*(relation.split() for relation in RELATIONS))
    return sorted(words)


def _symbols(word: str) -> list[str]:
    return [*word[:-1], word[-1] + _LAST]


def _apply(symbols: list[str], ranks: dict[Pair, int]) -> list[str]:
    """Byte-pair encoding of one word: the merge of lowest rank, at all its places from the left, until none fits."""
    while len(symbols) > 1:
        best = min(itertools.pairwise(symbols), key=lambda pair: ranks.get(pair, len(ranks)))
        if best not in ranks:
            break
        merged: list[str] = []
        i = 0
        while i < len(symbols):
            if tuple(symbols[i : i + 2]) == best:
                merged.append(best[0] + best[1])
                i += 2
            else:
                merged.append(symbols[i])
                i += 1
        symbols = merged
    return symbols


def _cost(pair: Pair) -> int:
    """How much a merge costs the quoted words: 0 if they cannot contain the pair, 2 if many do."""
    left, right = pair[0], pair[1].removesuffix(_LAST)
    if len(left) > 1 or len(right) > 1:
        return 0
    at_end = pair[1].endswith(_LAST)
    consonant_vowel = left not in _VOWELS and right in _VOWELS
    vowel_consonant = left in _VOWELS and right not in _VOWELS
    if vowel_consonant if at_end else consonant_vowel:
        return 2
    return 1 if vowel_consonant or consonant_vowel or left in _VOWELS else 0


def build_merges(words: Iterable[str]) -> list[Pair]:
    """Merges, lowest rank first, that make each of `words` one token; punctuation and single letters need none."""
    merges: list[Pair] = []
    ranks: dict[Pair, int] = {}
    for word in sorted({word for word in words if word.isalpha()}, key=lambda word: (len(word), word)):
        symbols = _apply(_symbols(word), ranks)
        while len(symbols) > 1:
            pair = min(itertools.pairwise(symbols), key=_cost)
            ranks[pair] = len(merges)
            merges.append(pair)
            symbols = _apply(symbols, ranks)
    return merges


def clashes(words: Iterable[str], spelled: Iterable[str]) -> list[str]:
    """Those of `spelled` that the tokenizer of the grammar words `words` would not spell letter by letter."""
    ranks = {pair: rank for rank, pair in enumerate(build_merges(words))}
    return [word for word in spelled if len(_apply(_symbols(word), ranks)) < len(word)]


def build_vocabulary(words: Iterable[str], letters: str = string.ascii_lowercase) -> tuple[dict[str, int], list[Pair]]:
    """`(token -> id, merges)`. Letters come first; the end token has the highest id, at which CLIP pools."""
    words = sorted(set(words))
    if odd := [word for word in words if (len(word) > 1 and not word.isalpha()) or word != word.lower()]:
        raise ValueError(f"grammar words are lower-case letters or one punctuation mark, not {odd[0]!r}")
    merges = build_merges(words)
    signs = sorted(set(letters) | set("".join(words)))
    tokens = [*signs, *(sign + _LAST for sign in signs), *(left + right for left, right in merges), UNKNOWN, BEGIN, END]
    return {token: i for i, token in enumerate(dict.fromkeys(tokens))}, merges


def write_tokenizer(
    directory: str | Path, words: Iterable[str], letters: str = string.ascii_lowercase, max_length: int = MAX_LENGTH
) -> int:
    """Writes `vocab.json`, `merges.txt` and `tokenizer_config.json` for `transformers.CLIPTokenizer.from_pretrained`.

    `words`: the grammar's words and punctuation marks, each becomes one token. `letters`: the alphabet of quoted
    words. `max_length`: tokens with begin and end (`model_max_length`). Unknown signs become `<|unknown|>`, never the
    end token. Returns the size of the vocabulary.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary, merges = build_vocabulary(words, letters)
    (directory / "vocab.json").write_text(json.dumps(vocabulary, indent=0) + "\n")
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    (directory / "merges.txt").write_text("\n".join(lines) + "\n")
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": max_length,
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "unk_token": UNKNOWN,
        "do_lower_case": True,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return len(vocabulary)
