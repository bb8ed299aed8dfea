"""Do the tests notice wrong mathematics? Small changes to the modules that compute, one at a time, each with its tests.

    pip install -c constraints.txt -e ".[dev,mutations]"
    python tests/stress/mutations.py                                   # all of them: hours
    python tests/stress/mutations.py --modules simplex gate --sample 20 --out mutations.json

The changes are cosmic-ray's operators (another operator, another number, a comparison turned round, `not` put in, a
loop that is left at once). Changes of annotations and docstrings are not counted. A change is tried against the tests
that run its line, the quickest first: which they are is measured once, by a run of the tests in `--tests` under
coverage, and kept in `--map`. A line that runs at import is tried against all tests that run the module, and those of
the methods' defaults. What a test
run needs of other libraries is imported once; every change then runs in a forked process of its own, which gets the
changed source for the module, and the file on disk stays as it is. A mutant is killed if one of its tests fails, or if
they take `--limit` seconds; so many tests are taken as need a quarter of that without a change.

The result has, for each module, how many places could be changed, how many were tried and killed, and every survivor as
a diff. Why a survivor is harmless is kept in `mutations_harmless.yaml` beside this script: {module: {"- line | + line":
reason}}. A file keeps samples under their names, so that one after another can be compared; whenever it is written, the
reasons that are known then are put to the survivors of all of them. Not part of `make test`.
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
MODULES = (
    *("forward", "samplers", "advantages", "objectives/rows", "objectives/noising"),
    *("methods/grpo/objective", "methods/nft/objective"),
    *("methods/crd/objective", "methods/crd/centring", "methods/gardo/gate", "methods/gardo/penalty"),
    *("methods/gardo/references", "methods/marble/combiner", "methods/marble/bank", "methods/marble/gradients"),
    *("methods/marble/simplex", "methods/shared/coupling", "methods/dpo/objective", "methods/rwr/objective"),
    *("methods/gdro/objective", "methods/awm/objective", "methods/dgpo/objective", "methods/fdfo/objective"),
    *("methods/prdp/objective", "methods/dense/credit", "methods/branches/credit", "methods/tree/credit"),
    *("methods/direct/objective", "methods/d2align/direction", "methods/direct/srpo"),
    *("divgen/metrics", "methods/d2align/corrected"),
)
AT_IMPORT = "tests/unit/test_defaults.py"  # reads defaults without running a line of the module
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


def change(before: str, after: str) -> tuple[str, set[int]]:
    """The changed lines, as `- line | + line`, and their numbers before the change."""
    old, new = before.splitlines(), after.splitlines()
    lines = list(difflib.unified_diff(old, new, n=0, lineterm=""))[2:]
    text = " | ".join(f"{line[0]} {line[1:].strip()}" for line in lines if line[0] in "+-")
    parts = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return text, {n + 1 for tag, first, end, *_ in parts if tag != "equal" for n in range(first, end)}


class Watched:
    """A pytest plugin: which lines of the modules each test runs, and how long it takes."""

    def __init__(self) -> None:
        import coverage

        self.seconds: dict[str, float] = {}
        files = [str(ROOT / "diffrl" / f"{module}.py") for module in MODULES]
        self.coverage = coverage.Coverage(data_file=None, include=files, config_file=False)
        self.coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.seconds[nodeid] = time.monotonic()
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.coverage.switch_context("")
        self.seconds[nodeid] = time.monotonic() - self.seconds[nodeid]

    def found(self) -> dict[str, Any]:
        """{"seconds": {test: s}, "lines": {module: {line: [tests]}}}."""
        self.coverage.stop()
        data, lines = self.coverage.get_data(), {}
        for module in MODULES:
            by_line = data.contexts_by_lineno(str(ROOT / "diffrl" / f"{module}.py"))
            lines[module] = {str(line): [test for test in tests if test] for line, tests in by_line.items()}
        return {"seconds": {test: round(s, 3) for test, s in self.seconds.items()}, "lines": lines}


def watch(tests: list[str], path: Path) -> None:
    """Write the map of lines and tests, by a run of `tests` in a process of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child == 0:
        import pytest

        watched = Watched()
        code = int(pytest.main(["-q", "-p", "no:cacheprovider", *tests], plugins=[watched]))
        if code == 0:
            path.write_text(json.dumps(watched.found()), encoding="utf-8")
        os._exit(code)
    if os.waitpid(child, 0)[1]:
        raise SystemExit("the tests fail without any change")


def tests_of(seen: dict[str, Any], module: str, lines: set[int], seconds: float) -> list[str]:
    """The tests that run one of the lines, the quickest first, as many as take `seconds`; at least one, if one does."""
    by_line: dict[str, list[str]] = seen["lines"][module]
    running = {test for line in lines for test in by_line.get(str(line), [])}
    if not running:
        running = {test for tests in by_line.values() for test in tests}
        running |= {test for test in seen["seconds"] if test.startswith(AT_IMPORT)}
    ordered = sorted(running, key=lambda test: (seen["seconds"][test], test))
    ends = itertools.accumulate(seen["seconds"][test] for test in ordered)
    return [test for k, (test, end) in enumerate(zip(ordered, ends, strict=True)) if k == 0 or end <= seconds]


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


def survives(module: str, code: str, tests: list[str], limit: float) -> bool:
    """Whether the tests pass with this source of the module, in a process of their own."""
    child = os.fork()
    if child == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        import pytest

        sys.meta_path.insert(0, Served(f"diffrl.{module.replace('/', '.')}", ROOT / "diffrl" / f"{module}.py", code))
        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])))
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def trial(module: str, seen: dict[str, Any], sample: int | None, seed: int, limit: float) -> dict[str, Any]:
    code = (ROOT / "diffrl" / f"{module}.py").read_text(encoding="utf-8")
    order = places(code)
    if sample is not None:
        random.Random(seed).shuffle(order)
    chosen = list(itertools.islice(mutants(code, order), sample))
    survivors = []
    for name, changed in chosen:
        text, lines = change(code, changed)
        tests = tests_of(seen, module, lines, limit / 4)
        if not tests or survives(module, changed, tests, limit):
            survivors.append({"operator": name, "change": text, "tests": len(tests)})
    result = {"places": len(order), "tried": len(chosen), "killed": len(chosen) - len(survivors)}
    print(f"{module:<22}{result}", flush=True)
    return result | {"survivors": survivors}


def table(told: dict[str, Any]) -> str:
    """How many changes of the mathematics the tests noticed, sample by sample."""
    lines = ["| sample | changes tried | noticed | harmless | noticed of those that matter |", "| --- " * 5 + "|"]
    for name, sample in told.items():
        cells = f"{sample['tried']} | {sample['killed']} | {sample['harmless']} | {sample['share']:.1%}"
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [name.rpartition("/")[2] for name in MODULES]
    parser.add_argument("--modules", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--sample", type=int, help="so many random mutants of each module; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for a mutant's tests")
    parser.add_argument("--tests", nargs="+", default=["tests/unit", "tests/numerics"], metavar="PATH")
    parser.add_argument("--map", type=Path, default=ROOT / "build" / "mutations_map.json", help="kept between runs")
    parser.add_argument("--out", type=Path, help="JSON file; other samples that it has are kept")
    parser.add_argument("--name", help="of the sample in it; default: by the seed")
    arguments = parser.parse_args()
    if importlib.util.find_spec("cosmic_ray") is None:
        raise SystemExit('the changes are made by cosmic-ray: pip install -c constraints.txt -e ".[dev,mutations]"')
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    for name in WARM:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)  # before any parallel region, so that processes may fork
    results: dict[str, dict[str, Any]] = {}
    if not arguments.map.is_file():
        watch(arguments.tests, arguments.map)
    seen = json.loads(arguments.map.read_text(encoding="utf-8"))
    kept = json.loads(arguments.out.read_text()) if arguments.out is not None and arguments.out.is_file() else {}
    for module in MODULES:
        if module.rpartition("/")[2] in arguments.modules:
            results[module] = trial(module, seen, arguments.sample, arguments.seed, arguments.limit)
            # After each module, so that a run that is ended early leaves what it has found.
            kept[arguments.name or f"seed {arguments.seed}"] = whole = summary(results)
            judged(kept)
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(f"killed {whole['killed']} of {whole['tried']}, {whole['harmless']} harmless: {whole['share']:.1%}")


def summary(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One sample as it is kept."""
    counts = {key: sum(found[key] for found in results.values()) for key in ("places", "tried", "killed")}
    machine = {"cores": os.cpu_count(), "torch": importlib.import_module("torch").__version__}
    command = " ".join(["python", "tests/stress/mutations.py", *sys.argv[1:]])
    return {"command": command, "machine": machine, **counts, "modules": results}


def judged(samples: dict[str, dict[str, Any]]) -> None:
    """Say of every survivor why it is harmless, if it is; `share` is that of the killed among those that are not."""
    reasons = yaml.safe_load(HARMLESS.read_text(encoding="utf-8"))
    for sample in samples.values():
        for module, found in sample["modules"].items():
            for survivor in found["survivors"]:
                survivor["harmless"] = reasons.get(module, {}).get(survivor["change"])
            found["harmless"] = sum(bool(survivor["harmless"]) for survivor in found["survivors"])
        sample["harmless"] = sum(found["harmless"] for found in sample["modules"].values())
        sample["share"] = sample["killed"] / max(sample["tried"] - sample["harmless"], 1)


if __name__ == "__main__":
    main()
