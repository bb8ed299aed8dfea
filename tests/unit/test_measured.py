"""What pages say of measurements, on results written by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "figures"))
import divgen_table
import reproduce
import results_table
import sentences
import tables


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
