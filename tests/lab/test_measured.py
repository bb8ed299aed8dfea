"""What pages say of measurements, on results written by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from experiments import reproduce
from experiments.figures import divgen_table, results_table, sentences, tables


def run(seed: int, before: float, after: float, **more: float) -> dict:
    names = ("playground", "strict", "all_right", "variety", "artefact")
    sides = {"before": dict.fromkeys(names, before), "after": dict.fromkeys(names, after)}
    return sides | {"seed": seed, "images": 96, "forwards": 576, "diffrl_version": "0"} | more


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / "pilots").mkdir()
    for name, gains in {"base": (0.10, 0.20), "method": (0.05, 0.20)}.items():
        runs = [run(seed, 0.5, 0.5 + gain) for seed, gain in enumerate(gains)]
        (tmp_path / f"pilots/{name}.json").write_text(json.dumps({"diffrl_version": "0", "runs": runs}))
    costs = {"base": {"epoch": 1.0}, "method": {"epoch": 1.52}}
    (tmp_path / "method_cost.json").write_text(json.dumps({"methods": costs}))
    return tmp_path


@pytest.mark.usefixtures("results")
def test_a_share_of_a_gain_is_paired_by_seed() -> None:
    # seeds' shares 0.5 and 1.0: mean 0.75, deviation 0.3536, half width 12.706 * 0.3536 / sqrt(2) = 3.18
    assert sentences.share_of_gain("pilots/method.json", "pilots/base.json", "strict") == "75% ± 318%"


@pytest.mark.usefixtures("results")
def test_a_method_stands_beside_its_base() -> None:
    lines = results_table.beside("base", "method").splitlines()
    assert lines[2].startswith("| the model before |  |  |  | 0.500 |")
    # against the base: -0.05 and 0, so -0.025 and a half width of 12.706 * 0.0354 / sqrt(2) = 0.318
    assert "| `method` | 96 | 576 | 1.52 | 0.625 ± 0.953 | -0.025 ± 0.318 |" in lines[4]


def test_a_method_that_began_elsewhere_is_refused(results: Path) -> None:
    other = {"diffrl_version": "0", "runs": [run(0, 0.6, 0.7)]}
    (results / "pilots" / "method.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="other prompts"):
        results_table.beside("base", "method")


def test_a_variant_that_was_not_run_is_named_and_a_share_that_was_not_logged_is_left_out(results: Path) -> None:
    """As experiments/notebook/trust.md asks for it; its first row is older than the shares."""
    words = (
        "playground grpo/stopped/positive",
        "clip=pilots/base.json",
        "mask=pilots/mask.json",
        "none=pilots/none.json",
    )
    assert results_table.table(".", words[0], words[3]) == results_table.held(".", "a", "b", words[3]) == "Not run yet."
    for name in ("base", "mask"):
        runs = [run(seed, 0.5, 0.6, training_seconds=60.0) for seed in range(3)]
        more = [{"logged": {"grpo/stopped/positive": share}} if name == "mask" else {} for share in (0.1, 0.1, 0.1)]
        told = {"diffrl_version": "0", "runs": [one | other for one, other in zip(runs, more, strict=True)]}
        (results / f"pilots/{name}.json").write_text(json.dumps(told))
    lines = results_table.table(".", *words).splitlines()
    assert lines[2:5] == [
        "| base |  |  | 0.500 |  |",
        "| clip | 96 | 60 | 0.600 ± 0.000 |  |",
        "| mask | 96 | 60 | 0.600 ± 0.000 | 0.100 ± 0.000 |",
    ]
    assert lines[-1] == "Not run yet: none."
    with pytest.raises(KeyError, match="never"):
        results_table.table(".", "never", *words[1:])


def test_a_reward_is_held_until_the_other_falls_by_more_than_its_interval(results: Path) -> None:
    def curves(gold: tuple[float, ...], spread: float) -> list[dict]:
        return [
            run(seed, 0.5, 0.6)
            | {"curve": [{"eval/p": k + 1.0, "eval/g": g + spread * seed * k} for k, g in enumerate(gold)]}
            for seed in range(3)
        ]

    for name, gold, spread in (
        ("falls", (0.5, 0.7, 0.6, 0.2), 0.001),
        ("noise", (0.5, 0.7, 0.6), 0.2),
        ("dips", (0.5, 0.7, 0.699), 0.0),
    ):
        told = {"diffrl_version": "0", "runs": curves(gold, spread)}
        (results / f"pilots/{name}.json").write_text(json.dumps(told))
    lines = results_table.held(
        "pilots", "p", "g", "falls=falls.json", "noise=noise.json", "dips=dips.json"
    ).splitlines()
    assert lines[0] == "| variant | p until g fell | g at equal gain, 2.000 | p at the end | g then |"
    # variances 1e-6 and 4e-6 of what falls and 0 of what dips: half width 2.45 sqrt(1.7e-6 / 3) = 0.002, above a dip of
    # 0.001 that is the same in all seeds; the mean of noise only rises
    assert lines[2].startswith("| falls | 1.000 ± 0.000 | 0.102 ± 0.005 | 3.000 ± 0.000 | -0.297 ")
    assert lines[3].startswith("| noise | all of 2.000 ± 0.000 | 0.500 ± 0.994 |")
    assert lines[4].startswith("| dips | all of 2.000 ± 0.000 | 0.199 ± 0.000 |")


def test_scores_are_ranked_beside_the_exact_variety() -> None:
    rows = [
        dict.fromkeys(divgen_table.COLUMNS, v) | {"variety": v, "asc": v**3, "ids": -v, "sdi": s}
        for v, s in zip((1.0, 2.0, 3.0), (1.0, 3.0, 2.0), strict=True)
    ]
    found = divgen_table.agreement(rows)
    assert [found[name]["correlation"] for name in ("asc", "ids", "sdi")] == [1.0, -1.0, 0.5]


def test_a_list_of_the_experiments_starts_none(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "--all", "--list", "--only", "gardo/ocr_gardo"])
    monkeypatch.setattr(reproduce, "run_all", lambda *args: pytest.fail("it ran"))
    reproduce.main()
    assert "gardo/ocr_gardo" in capsys.readouterr().out
