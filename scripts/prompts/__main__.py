"""Write assets/prompts/NAME_SPLIT.jsonl.gz of every shipped prompt set, and of what DivGenBench draws without base
prompts or in the playground: `python -m scripts.prompts` in a checkout."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable

from diffrl.additions.prompt_sets import file_of
from scripts.prompts import Row, Splits, atoms, compositional, divgen, general, geneval, ocr, playground

GRAMMARS: dict[str, Callable[[], Splits]] = {
    "geneval": geneval.splits,
    "ocr": ocr.splits,
    "general": general.splits,
    "compositional": compositional.splits,
    "atoms": atoms.splits,
    "animals": general.animals,
    "divgen": divgen.splits,
    "divgen_playground": playground.splits,
}


def frozen() -> dict[tuple[str, str], bytes]:
    """{(name, split): what its file holds}: a line of JSON for each prompt."""
    return {(name, split): _lines(rows) for name, grammar in GRAMMARS.items() for split, rows in grammar().items()}


def _lines(rows: list[Row]) -> bytes:
    lines = [json.dumps({"prompt": text, **metadata}, ensure_ascii=False) for text, metadata in rows]
    return ("\n".join(lines) + "\n").encode()


if __name__ == "__main__":
    for key, data in frozen().items():
        file_of(*key).write_bytes(gzip.compress(data, 9, mtime=0))
