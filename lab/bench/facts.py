"""The benchmarks, by name: their facts, in `facts.yaml`, and their readers. No torch is imported, so that the command
line can show it all at once."""

from __future__ import annotations

from typing import Any

from diffrl.resources import table_beside

from . import compbench, dpg, general, geneval, unigenbench
from .items import Bench, Judge

_READERS = {
    "geneval": (geneval.read, geneval.marks),
    "geneval2": (geneval.read_second, geneval.marks_second),
    "dpg": (dpg.read, dpg.marks),
    "compbench": (compbench.read, compbench.marks),
    "unigenbench": (unigenbench.read, unigenbench.marks),
    "drawbench": (general.read_drawbench, general.marks),
    "parti": (general.read_parti, general.marks),
}
_FACTS: dict[str, Any] = table_beside(__file__, "facts.yaml")


def _bench(name: str) -> Bench:
    facts, (read, marks) = _FACTS[name], _READERS[name]
    judges = {judge: Judge(**one) for judge, one in facts.get("judges", {}).items()}
    return Bench(**{**facts, "judges": judges, "read": read, "marks": marks})


BENCHES = {name: _bench(name) for name in _READERS}
