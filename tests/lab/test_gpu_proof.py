"""`scripts/gpu_proof.py` without a GPU: the same code at tiny size, and its bookkeeping."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts" / folder) for folder in ("", "proof", "benchmarks")]

import checks  # noqa: E402
import gpu_proof  # noqa: E402
import learning  # noqa: E402
import recipes  # noqa: E402
import training  # noqa: E402
from estimates import Estimates  # noqa: E402
from journal import Journal, Part, Tell, TimeUp, plan, run_parts  # noqa: E402
from networks import POOL  # noqa: E402

from diffrl.errors import UserError  # noqa: E402

GARDO = "recipe/sd35/gardo_ocr"


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two parts at tiny size."""
    path = tmp_path_factory.mktemp("proof") / "proof.json"
    words = ["--out", str(path), "--tiny", "--minutes", "9", "--only", "train/sd35/marble-5", GARDO]
    assert gpu_proof.prove(words) == 0
    return path


def test_a_tiny_proof_measures_and_is_not_repeated(proof: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(proof.read_text())
    assert found["tiny"] is True and found["machine"]["cores"] and found["versions"]["torch"] == torch.__version__
    assert list(found["parts"]) == ["train/sd35/marble-5", GARDO], "in the order that was asked for"
    for part in found["parts"].values():
        assert (
            part["status"] == "done" and part["images_per_second_rollout"] > 0 and part["rows_per_second_optimise"] > 0
        )
        assert part["accounted"] == pytest.approx(1.0, abs=0.05), "an epoch's seconds add up"
        assert 0 < part["mfu_optimise"] < 1 and 0 < part["roofline"]["seconds"] < part["epoch"]["seconds"]
        assert part["peft"]["seconds"] > 0 and part["of_the_epoch"].keys() == {"calls", "peft", "roofline"}
        assert part["counted_gib"] > 0
    before = proof.read_text()
    assert gpu_proof.prove(["--out", str(proof), "--tiny", "--only", "train/sd35/marble-5"]) == 0
    assert json.loads(proof.read_text())["parts"] == json.loads(before)["parts"]
    shown = capsys.readouterr().out
    assert "..." not in shown.replace("marble-5", "")  # nothing ran
    assert "train/sd35/marble-5" in shown


@pytest.mark.long
def test_the_playground_learns_and_the_suite_runs_in_a_tiny_proof(tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    assert gpu_proof.prove(["--out", str(path), "--tiny", "--only", "learn/playground", "suite"]) == 0
    parts = json.loads(path.read_text())["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {"learn/playground": "done", "suite": "done"}
    learnt = parts["learn/playground"]
    assert (learnt["recipe"], learnt["epochs"], learnt["images"]) == ("playground/nft", 1, 8)
    assert len(learnt["rewards"]) == 1 and 0 < learnt["rewards"][0] < 1
    assert learnt["before"].keys() == learnt["after"].keys() == set(learning.SHOWN)
    assert all(0 <= value <= 1 for when in ("before", "after") for value in learnt[when].values())
    assert learnt["epoch"]["seconds"] > learnt["epoch"]["seconds/optimise"] > 0
    assert learnt["cpu"] == {}, "the CPU's curves have no point at so few images"
    said = parts["suite"]["pytest"]
    assert re.search(r"\d+ (passed|skipped)", said) and not re.search("failed|error", said), said


@pytest.mark.long
def test_compiled_blocks_in_a_tiny_proof(tmp_path: Path) -> None:
    path, name = tmp_path / "proof.json", "recipe/sd35/nft_ocr+compiled"
    assert gpu_proof.prove(["--out", str(path), "--tiny", "--only", name]) == 0
    part = json.loads(path.read_text())["parts"][name]
    assert part["status"] == "done" and part["beside"] == "recipe/sd35/nft_ocr"
    assert "engine.compile=true" in part["overrides"]
    assert part["of_the_epoch"].keys() == {"calls", "peft_compiled"}, "the counter sees no compiled operations"
    assert 0 < part["mfu_rollout"] < 1 and 0 < part["mfu_optimise"] < 1
    assert part["relative"].keys() >= {"images_per_second_rollout", "rows_per_second_optimise"}
    assert all(factor > 0 for factor in part["relative"].values())


def test_a_part_that_loses_the_device_leaves_the_rest_to_another_process(tmp_path: Path) -> None:
    def failing(limit: float, tell: Tell) -> dict[str, Any]:
        raise RuntimeError("an illegal memory access")

    parts = [Part(name, run, 1.0) for name, run in (("a", lambda limit, tell: {}), ("b", failing), ("c", failing))]
    journal = Journal(tmp_path / "proof.json", {}, "digest")
    assert run_parts(parts, journal, 60.0, lambda text: None, lost=lambda: True) == ["c"]
    assert {name: entry["status"] for name, entry in journal.parts.items()} == {"a": "done", "b": "failed"}
    assert journal.parts["b"]["at"][-1].endswith(" failing"), "where it failed"
    assert run_parts(parts, journal, 60.0, lambda text: None) == []
    assert journal.parts["c"]["status"] == "failed"


def test_a_recipe_keeps_its_shapes() -> None:
    gardo = recipes.sections(GARDO, tiny=False)
    rollout, optimise = gardo["rollout"], gardo["optimise"]
    assert (rollout["resolution"], rollout["steps"], rollout["guidance_scale"], rollout["batch_size"]) == (
        512,
        10,
        4.5,
        12,
    )
    assert (rollout["groups"], rollout["group_size"]) == (1, 24)
    assert (optimise["batch_size"], optimise["micro_batch"]) == (12, 12), "two optimiser steps, as the recipe's"
    assert set(gardo["watch"]) == {"aesthetic", "imagereward"} and set(gardo["rewards"]) == {"patch0"}


def test_lent_networks_share_their_weights_and_nothing_else() -> None:
    def make() -> Any:
        made.append(1)
        return SimpleNamespace(transformer=torch.nn.Linear(2, 2), scheduler={"steps": 4})

    made: list[int] = []
    try:
        one, two = (POOL.lend("folder/model", torch.float32, make) for _ in range(2))
        assert len(made) == 1 and one.transformer is not two.transformer
        assert one.transformer.weight is two.transformer.weight
        one.transformer.weight, one.scheduler["steps"] = torch.nn.Parameter(torch.zeros(2, 2)), 8
        assert two.transformer.weight.any() and two.scheduler == {"steps": 4}
        assert POOL.unused(one.transformer) == 16 and POOL.unused(two.transformer) == 0
        POOL.lend("folder/other", torch.float32, make)
        assert len(made) == 2, "one at a time"
    finally:
        POOL.drop()


def test_the_suites_verdict_is_the_line_that_counts() -> None:
    output = "....\n12 passed, 3 deselected in 34.70s\n\nslowest 15 durations\n(4 durations < 0.005s hidden.)"
    assert checks.verdict(output) == "12 passed, 3 deselected in 34.70s"


def test_a_tree_that_is_not_installed_has_its_entry_points(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "import importlib.metadata as m; from pathlib import Path\n"
        "def missing(name): raise m.PackageNotFoundError(name)\n"
        "m.distribution = missing\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'scripts' / 'proof')!r}]\n"
        f"import installed; assert installed.provide(Path({str(tmp_path)!r}))\n"
        "import diffrl_zoo, diffrl_playground\n"
        "names = {point.name for point in m.entry_points(group='diffrl.rewards')}\n"
        "assert {'playground', 'clip'} <= names, names\n"
        "print(diffrl_zoo.__path__[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout


def test_what_cannot_work_is_said_in_one_line(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "proof.json")]
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA device here; --tiny runs the same code"):
            gpu_proof.prove(out)
    with pytest.raises(UserError, match=r'--only: no part "train/sd35/nf".*train/sd35/nft'):
        gpu_proof.prove([*out, "--tiny", "--only", "train/sd35/nf"])
    with pytest.raises(UserError, match="--out: give the JSON file"):
        gpu_proof.prove(["--tiny"])
    (tmp_path / "proof.json").write_text("[]")
    with pytest.raises(UserError, match="not a file that this command wrote"):
        gpu_proof.prove([*out, "--tiny", "--only", "environment"])


def test_counts_travel_and_those_of_another_version_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "counts.json"
    only = ["--tiny", "--only", "train/sd35/nft"]
    assert gpu_proof.prove(["--count", str(path), *only]) == 0
    assert "train/sd35/nft: 0.5 GiB" in capsys.readouterr().out
    monkeypatch.setattr("estimates.estimate", None)
    reading = ["--out", str(tmp_path / "proof.json"), "--estimates", str(path)]
    assert gpu_proof.prove([*reading, *only]) == 0
    with pytest.raises(UserError, match=r"counted at size tiny, here it is true: --count it again"):
        gpu_proof.prove(["--count", str(path)])
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | {"facts": found["facts"] | {"code": "another"}}))
    assert gpu_proof.prove([*reading, *only]) == 0, "a count of other code is better than none"
    assert "counted with code another" in capsys.readouterr().out
    path.write_text(json.dumps({"facts": 1}))
    with pytest.raises(UserError, match="not a file that --count"):
        gpu_proof.prove([*reading, *only])


def test_what_nobody_has_counted_is_guessed_by_the_card() -> None:
    guessing = Estimates({"size": "true"}, guess=True)
    config: Any = None
    assert guessing.fitting("train/sd35/nft", config, 75 * 2**30) == ([], None)
    saving, fit = guessing.fitting("train/sd35/nft", config, 24 * 2**30)
    assert fit is None and "optimise.gradient_checkpointing=true" in saving


def test_eight_minutes_hold_what_is_worth_most(capsys: pytest.CaptureFixture[str]) -> None:
    parts = gpu_proof.all_parts(None)
    names = [part.name for part in parts]
    assert names[: len(gpu_proof.FIRST)] == gpu_proof.FIRST and len(set(names)) == len(names)
    assert all(part.measured for part in parts[: len(gpu_proof.FIRST)]), "the plan of the first call is no guess"
    assert gpu_proof.prove(["--plan", "--minutes", "8"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert not [name for name in gpu_proof.FIRST if "does not fit" in lines[name]]
    assert "does not fit" in lines["train/qwen-1024/nft"]
    on_one = [part.network for part in parts[: len(gpu_proof.FIRST)] if part.network]
    assert sum(a != b for a, b in pairwise(on_one)) == 2, "three networks, each made once"


def test_a_plan_counts_a_network_once(tmp_path: Path) -> None:
    def run(limit: float, tell: Tell) -> dict[str, Any]:
        return {}

    parts = [Part("a", run, 10.0, "net"), Part("b", run, 10.0, "net"), Part("c", run, 10.0, "other")]
    planned = plan(parts, 60.0, {"net": 20.0, "other": 20.0})
    assert [(needed, fits) for _, needed, fits in planned] == [(30.0, True), (10.0, True), (30.0, False)]


def test_quantised_bases_are_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(training.quantised()) == ["fp8", "int8", "nf4"]
    monkeypatch.setattr(training, "installed", lambda kind: {"int4": kind})
    assert training.quantised() == ["int4"] and "option/base-int4" in training._cases()


def journal(path: Path, digest: str = "a") -> Journal:
    return Journal(path / "journal.json", {}, digest)


def test_parts_are_resumed_repeated_for_other_code_and_skipped_with_a_reason(tmp_path: Path) -> None:
    ran: list[str] = []

    def part(name: str, seconds: float = 0.0, error: BaseException | None = None) -> Part:
        def run(limit: float, tell: Tell) -> dict[str, Any]:
            ran.append(name)
            if error is not None:
                raise error
            return {"figure": 1.5}

        return Part(name, run, seconds)

    parts = [
        part("fails", error=RuntimeError("broken")),
        part("refuses", error=UserError("not here")),
        part("works"),
        part("long", seconds=100.0),
    ]
    run_parts(parts, journal(tmp_path), 20.0, lambda text: None)
    found = json.loads((tmp_path / "journal.json").read_text())["parts"]
    assert ran == ["fails", "refuses", "works"]
    assert [found[p.name]["status"] for p in parts] == ["failed", "refused", "done", "skipped"]
    assert "RuntimeError: broken" in found["fails"]["reason"] and "it takes about 100 s" in found["long"]["reason"]
    assert found["works"]["figure"] == 1.5
    ran.clear()
    run_parts(parts, journal(tmp_path), 200.0, lambda text: None)  # what failed comes after what never ran
    assert ran == ["long", "fails"]
    ran.clear()
    run_parts(parts[2:3], journal(tmp_path, digest="b"), 20.0, lambda text: None)
    assert ran == ["works"]


def test_a_part_is_broken_off_in_time_and_a_dead_process_leaves_the_others_figures(tmp_path: Path) -> None:
    def hangs(limit: float, tell: Tell) -> dict[str, Any]:
        tell({"figure": 3})
        try:
            time.sleep(30)
        except Exception:
            raise AssertionError("time is up is nobody's failure") from None
        return {}

    mark = time.monotonic()
    run_parts([Part("hangs", hangs, 0.0)], journal(tmp_path), 6.0, lambda text: None)
    assert time.monotonic() - mark < 5
    assert (
        json.loads((tmp_path / "journal.json").read_text())["parts"]["hangs"].items()
        >= {"status": "part", "figure": 3}.items()
    )

    def dies(limit: float, tell: Tell) -> dict[str, Any]:
        raise KeyboardInterrupt

    first = Part("works", lambda limit, tell: {"figure": 2}, 0.0)
    with pytest.raises(KeyboardInterrupt):
        run_parts([first, Part("dies", dies, 0.0)], journal(tmp_path), 20.0, lambda text: None)
    found = json.loads((tmp_path / "journal.json").read_text())["parts"]
    assert found["works"]["figure"] == 2 and found["dies"]["status"] == "running"
    assert issubclass(TimeUp, BaseException) and not issubclass(TimeUp, Exception)
