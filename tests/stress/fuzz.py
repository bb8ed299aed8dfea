"""Mutate configs a thousand times, by the schema, and see whether each is read or refused in one line.

    python tests/stress/fuzz.py --mutations 1000 --dry-runs 20 --out assets/results/fuzz.json

A mutation puts hostile values at keys of the schema, into the file or on the command line, breaks the file's text, or
gives it another name. What comes out is a config that can be written and read back as the same, or a `UserError` of one
line; anything else is a failure, kept with what caused it. Of those that are accepted some are tried with `--dry-run`,
which may not refuse them (a reward that cannot be built aside), end in a traceback or leave a file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from diffrl import __version__
from diffrl.config import dump, load_config
from diffrl.config.schema import walk
from diffrl.errors import UserError

BASE: dict[str, Any] = {
    "model": "playground",
    "prompts": {"train": "playground/compositional/train", "test": "playground/compositional/test"},
    "rollout": {"groups": 4, "group_size": 4, "steps": 3, "batch_size": 8},
    "rewards": {"playground": {}, "jpeg": {"weight": 0.5}},
    "watch": {"artefact": {}},
    "optimise": {"batch_size": 8, "micro_batch": 0.5},
    "evaluate": {"prompts": 2, "per_prompt": 2},
}
METHODS: list[dict[str, Any]] = [
    {},
    {"objective": "grpo", "rollout": {**BASE["rollout"], "sampler": "flow_sde"}},
    {"objective": "crd"},
    {"marble": {}},
    {"gardo": {"auxiliary": ["artefact"]}},
]
LONG = "x" * 5000
NUMBERS = (0, 1, -1, 2, 3, 7, 10**6, 10**9, 2**31, 2**63, -(2**63), 10**30, 10**4000, 1.5, -0.5, 0.0, 1.0, 0.999999)
EXTREMES = (1e30, 1e-300, -1e30, 1e308, float("nan"), float("inf"), float("-inf"))
WORDS = (
    *("", " ", "null", "on", "~", "/", ".", "..", "~/", "a/b", "a/b/c", LONG, "a" * 300, "\0", "\u202e", "\ud7ff"),
    *("nan", "1e400", "0x" + "f" * 6000, "9" * 6000, "clip", "playground", "no_such", "x.py:X", "d2:clip"),
    "http://a:b@c/",
)
NESTED: tuple[Any, ...] = (
    [],
    [1],
    [1, 2],
    ["a"],
    [[]],
    {},
    {"a": 1},
    {"": 0},
    {"playground": {}},
    {"x": {"plugin": "playground"}},
)
VALUES: list[Any] = [None, True, False, *NUMBERS, *EXTREMES, *WORDS, *NESTED]
LAUGHS = "".join(f"{c}: &{c} [{', '.join(['*' + p] * 8)}]\n" for p, c in zip("abcdefg", "bcdefgh", strict=True))
TEXTS = (  # of a whole file
    *("", "a", "[]", "- a", "a: &a [*a]", "a: &a {b: *a}", "rewards: &r {playground: *r}", "a: *b", "a: b: c", "\t"),
    *("%", "a: !x 1", "seed: 0x" + "f" * 6000, "seed: " + "9" * 6000, "a: " * 300, "{" * 3000, "\ufeffseed: 1"),
    *("seed: 1\nseed: 2", "rewards:\n" + "  x: 1\n" * 50, "a: &a [x, x, x, x]\n" + LAUGHS, "? {a: b}\n: 1"),
)
NAMES = ("run.yaml", "run", LONG, "a" * 300 + ".yaml", "\0", "", "/", "run.yaml/x")
Choose = Callable[[Sequence[Any]], Any]


@dataclass
class Mutation:
    """A config file's name and text, and words of the command line."""

    name: str
    text: str
    words: list[str]


def mutation(choose: Choose) -> Mutation:
    """One of them; `choose` takes one of a sequence, at random or as a search likes."""
    if choose(range(12)) == 0:
        return Mutation(choose(NAMES), choose(TEXTS), [])
    values = json.loads(json.dumps({**BASE, **choose(METHODS)}))
    fields = [(key, field) for key, field, _ in walk()]
    words: list[str] = []
    for _ in range(choose((1, 1, 1, 2, 3))):
        key, field = choose(fields)
        path = [
            part if part != "NAME" else choose(["playground", "jpeg", "artefact", "new"]) for part in key.split(".")
        ]
        if choose(range(10)) == 0:
            path[-1] = path[-1][: choose(range(1, len(path[-1]) + 1))] + choose(["", "x", "_"])
        value = choose(VALUES)
        default = field.get_default(call_default_factory=True)
        if choose((True, False)):  # near what is allowed
            number = type(default) in (int, float)
            value = default * choose((0.5, 1, 2, 10)) if number else default if _plain(default) else value
        if choose((True, False, False)):
            words.append(".".join(path) + choose(["=", "=", "=", "=", "", "=="]) + shown(value))
        else:
            put(values, path, value)
    return Mutation("run.yaml", text_of(values), words)


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | str)


def put(values: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a value deep inside, over whatever is in the way."""
    for name in path[:-1]:
        if not isinstance(values.get(name), dict):
            values[name] = {}
        values = values[name]
    values[path[-1]] = value


def text_of(values: dict[str, Any]) -> str:
    sys.set_int_max_str_digits(0)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def shown(value: Any) -> str:
    """A value as somebody would write it on the command line."""
    sys.set_int_max_str_digits(0)
    return value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).split("\n...")[0].strip()


def verdict(one: Mutation, folder: Path) -> tuple[str, str]:
    """("accepted" | "refused" | "FAILED", what was said). A config that is accepted can be written and read back."""
    path = folder / one.name if one.name and "\0" not in one.name and not one.name.startswith("/") else Path(one.name)
    if one.name in ("run.yaml", "run"):
        path.write_bytes(one.text.encode("utf-8", "surrogatepass"))
    try:
        config = load_config(path, one.words)
        dump(config, folder / "again.yaml")
        again = load_config(folder / "again.yaml")
        if again.resolved() != config.resolved():
            return "FAILED", "written and read back it is another config"
        return "accepted", ""
    except UserError as error:
        said = str(error)
        fine = said and "\n" not in said and len(said) < 2000
        return ("refused", said) if fine else ("FAILED", f"not one short line: {said[:300]!r}")
    except BaseException as error:
        return "FAILED", f"{type(error).__name__}: {str(error)[:200]} {traceback.format_exc()[-600:]}"


def dry_run(one: Mutation, folder: Path) -> tuple[int, str]:
    """`--dry-run` of an accepted mutation: (exit code, what was said); -1 for a traceback."""
    import contextlib
    import io

    from diffrl.cli.main import main

    (folder / "run.yaml").write_text(one.text, encoding="utf-8")
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["train", str(folder / "run.yaml"), *one.words, "--dry-run"])
    except BaseException as error:
        return -1, f"{type(error).__name__}: {str(error)[:300]}"
    return code, err.getvalue()[-400:]


def trial(mutations: int, dry_runs: int, seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    counts: Counter[str] = Counter()
    failures: list[dict[str, str]] = []
    tried: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chdir(folder)
        for _ in range(mutations):
            one = mutation(chance.choice)
            kind, said = verdict(one, folder)
            counts[kind] += 1
            if kind == "FAILED":
                failures.append({"said": said, "text": one.text[:400], "words": " ".join(one.words)[:400]})
            elif kind == "accepted" and len(tried) < dry_runs and one.text != text_of(BASE):
                before = sorted(folder.rglob("*"))
                code, told = dry_run(one, folder)
                left = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path not in before]
                tried.append({"code": code, "said": told, "left": left, "words": " ".join(one.words)[:200]})
    bad = [one for one in tried if one["left"] or (one["code"] not in (0, 1) and "error: reward " not in one["said"])]
    return {
        "mutations": mutations,
        "seed": seed,
        "counts": dict(counts),
        "failures": failures,
        "dry_runs": {"tried": len(tried), "codes": dict(Counter(str(one["code"]) for one in tried)), "bad": bad},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=1000)
    parser.add_argument(
        "--dry-runs", type=int, default=0, help="accepted mutations that are tried with --dry-run, at most"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    out = args.out.resolve()
    found = trial(args.mutations, args.dry_runs, args.seed)
    result = {"command": shlex.join(["python", *sys.argv]), "diffrl_version": __version__, **found}
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(found["counts"], found["dry_runs"]["codes"])
    raise SystemExit(1 if found["failures"] or found["dry_runs"]["bad"] else 0)


if __name__ == "__main__":
    main()
