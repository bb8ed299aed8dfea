"""Do the tests notice wrong mathematics? Small changes to the modules that compute, one at a time, each with its tests.

    pip install -c constraints.txt -e ".[dev,mutations]"
    python scripts/trials/mutations.py                                   # all of them: hours
    python scripts/trials/mutations.py --modules simplex gate --sample 20 --out mutations.json

The changes are cosmic-ray's operators (another operator, another number, a comparison turned round, `not` put in, a
loop that is left at once). Changes of annotations and docstrings are not counted. What a test run needs of other
libraries is imported once; every change then runs in a forked process of its own, which gets the changed source for the
module, and the file on disk stays as it is. A mutant is killed if its tests fail or take longer than `--limit` seconds.

The result has, for each module, how many places could be changed, how many were tried and killed, and every survivor as
a diff. Why a survivor is harmless is kept in `mutations_harmless.yaml` beside this script: {module: {"- line | + line":
reason}}. Not part of `make test`.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import importlib.abc
import importlib.util
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
HARMLESS = Path(__file__).with_name("mutations_harmless.yaml")
N, U = "tests/numerics/test_", "tests/unit/test_"
TESTS = {
    "forward": [f"{N}forward.py"],
    "samplers": [f"{N}samplers.py", f"{N}mathematics.py"],
    "advantages": [f"{N}advantages.py"],
    "trainers/gradients": [f"{U}gradients.py", f"{N}marble.py"],
    "trainers/simplex": [f"{N}marble.py"],
    "trainers/rows": [f"{N}mathematics.py", f"{N}losses.py"],
    "trainers/grpo": [f"{N}mathematics.py", f"{N}grpo_kl.py", f"{N}losses.py"],
    "trainers/nft": [f"{N}mathematics.py", f"{N}losses.py", f"{N}marble.py"],
    "trainers/crd": [f"{N}crd_loss.py", f"{U}crd.py"],
    "trainers/centring": [f"{N}crd_loss.py", f"{U}crd.py"],
    "trainers/gate": [f"{N}gate.py", f"{N}mathematics.py"],
    "trainers/gardo": [f"{U}gardo.py"],
    "trainers/gated": [f"{U}gardo.py"],
    "trainers/marble": [f"{N}marble.py", f"{U}marble_method.py"],
    "trainers/bank": [f"{N}marble.py", f"{U}marble_method.py"],
    **{
        f"trainers/{name}": [f"{N}second_ring.py", f"{N}mean_over_rows.py"]
        for name in ("coupled", "dpo", "rwr", "gdro", "prdp")
    },
    **{f"trainers/{name}": [f"{N}second_ring.py"] for name in ("dense", "branches", "tree")},
    "trainers/direct": [f"{N}guided_reward.py", f"{N}mathematics.py", f"{U}d2align.py"],
    "trainers/d2align": [f"{N}guided_reward.py", f"{U}d2align.py"],
    "divgen/metrics": [f"{N}divgen_metrics.py"],
    "rewards/direction": [f"{N}guided_reward.py", f"{U}d2align.py"],
}
WARM = (
    *("torch", "scipy.stats", "scipy.optimize", "pydantic", "yaml", "rich", "peft", "accelerate", "diffusers"),
    *("transformers", "open_clip"),
)


class Stripped(ast.NodeTransformer):
    """A module without what does not run: annotations and docstrings."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)


def meaning(code: str) -> str | None:
    """What runs of a module, in one form; None if it is no Python."""
    try:
        return ast.dump(Stripped().visit(ast.parse(code)))
    except SyntaxError:
        return None


def places(code: str) -> list[tuple[str, int]]:
    """(operator, occurrence) of every place that an operator would change."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    found, nodes = [], list(ast_nodes(get_ast(code)))
    for name in operator_names():
        try:
            operator = get_operator(name)()
        except TypeError:  # one that needs to be told what to replace
            continue
        count = sum(len(list(operator.mutation_positions(node))) for node in nodes)
        found += [(name, occurrence) for occurrence in range(count)]
    return found


def mutants(code: str, order: list[tuple[str, int]]) -> Iterator[tuple[str, str]]:
    """(operator, changed source) of the places in this order, each change that runs once."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    seen = {meaning(code), None}
    for name, occurrence in order:
        changed = mutate_code(code, get_operator(name)(), occurrence)
        if changed is not None and (form := meaning(changed)) not in seen:
            seen.add(form)
            yield name.rpartition("/")[2], changed


def change(before: str, after: str) -> str:
    """The changed lines, as `- line | + line`."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return " | ".join(f"{line[0]} {line[1:].strip()}" for line in list(lines)[2:] if line[0] in "+-")


class Served(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one module a source of our own."""

    def __init__(self, name: str, path: Path, code: str) -> None:
        self.name, self.path, self.code = name, path, code

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def create_module(self, spec: Any) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.code, str(self.path), "exec"), module.__dict__)


def survives(module: str, code: str, limit: float) -> bool:
    """Whether the module's tests pass with this source, in a process of their own."""
    child = os.fork()
    if child == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        import pytest

        sys.meta_path.insert(0, Served(f"diffrl.{module.replace('/', '.')}", ROOT / "diffrl" / f"{module}.py", code))
        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *TESTS[module]])))
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def trial(module: str, sample: int | None, seed: int, limit: float, reasons: dict[str, str]) -> dict[str, Any]:
    code = (ROOT / "diffrl" / f"{module}.py").read_text(encoding="utf-8")
    if not survives(module, code, 10 * limit):
        raise SystemExit(f"{module}: its tests fail without any change")
    order = places(code)
    if sample is not None:
        random.Random(seed).shuffle(order)
    chosen = list(itertools.islice(mutants(code, order), sample))
    left = [(name, change(code, changed)) for name, changed in chosen if survives(module, changed, limit)]
    survivors = [{"operator": name, "change": text, "harmless": reasons.get(text)} for name, text in left]
    harmless = sum(bool(entry["harmless"]) for entry in survivors)
    result = {"places": len(order), "tried": len(chosen), "killed": len(chosen) - len(left), "harmless": harmless}
    print(f"{module:<22}{result}", flush=True)
    return result | {"survivors": survivors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [name.rpartition("/")[2] for name in TESTS]
    parser.add_argument("--modules", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--sample", type=int, help="so many random mutants of each module; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a mutant's tests")
    parser.add_argument("--out", type=Path, help="JSON file")
    arguments = parser.parse_args()
    if importlib.util.find_spec("cosmic_ray") is None:
        raise SystemExit('the changes are made by cosmic-ray: pip install -c constraints.txt -e ".[dev,mutations]"')
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    for name in WARM:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)  # before any parallel region, so that processes may fork
    reasons = yaml.safe_load(HARMLESS.read_text(encoding="utf-8")) if HARMLESS.is_file() else {}
    results: dict[str, dict[str, Any]] = {}
    for module in TESTS:
        if module.rpartition("/")[2] in arguments.modules:
            known = (reasons or {}).get(module, {})
            results[module] = trial(module, arguments.sample, arguments.seed, arguments.limit, known)
            if arguments.out is not None:  # after each, so that a run that is ended early leaves what it has found
                arguments.out.write_text(json.dumps(summary(results), indent=1) + "\n", encoding="utf-8")
    whole = summary(results)
    print(f"killed {whole['killed']} of {whole['tried']}, {whole['harmless']} harmless: {whole['share']:.1%}")


def summary(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What goes into the file; `share` is that of the killed among those that are not harmless."""
    counts = {key: sum(found[key] for found in results.values()) for key in ("places", "tried", "killed", "harmless")}
    share = counts["killed"] / max(counts["tried"] - counts["harmless"], 1)
    machine = {"cores": os.cpu_count(), "torch": importlib.import_module("torch").__version__}
    command = " ".join(["python", "scripts/trials/mutations.py", *sys.argv[1:]])
    return {"command": command, "machine": machine, **counts, "share": share, "modules": results}


if __name__ == "__main__":
    main()
