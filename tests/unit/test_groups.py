"""Runs that differ by their seed: intervals, paired tests and tables, against transcriptions and by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from diffrl.cli.main import main
from diffrl.errors import UserError
from diffrl.report import compare
from diffrl.report.groups import Group, best, differences, find_runs, group
from diffrl.report.tables import as_file, as_text, notes
from diffrl.stats import interval

PROMPTS = 6


def make(folder: Path, seed: int, gain: float, **config: Any) -> Path:
    """A run on a reward `clip`, which `gold` watches: the scores of prompts before and after, drawn from the seed."""
    folder.mkdir(parents=True)
    values = {"model": "playground", "objective": "nft", "seed": seed, "run_dir": str(folder), "rewards": {"clip": {}}}
    values |= {
        "watch": {"gold": {}},
        "prompts": {"test": "t"},
        "evaluate": {"prompts": PROMPTS, "per_prompt": 2},
    } | config
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    random = np.random.default_rng(seed)
    before = random.normal(0.5, 0.1, PROMPTS)
    noise = np.random.default_rng([seed, round(1000 * gain)]).normal(0, 0.01, PROMPTS)
    rows, held = [], []
    for epoch in range(3):
        clip = before + epoch / 2 * (gain + noise)
        gold: list[float | None] = [None, *(0.3 - 0.01 * epoch * clip[1:])]
        row: dict[str, Any] = {"epoch": epoch, "samples": 100 * epoch, "eval/diversity": 0.4 - 0.01 * epoch}
        row |= {"eval/clip": float(clip.mean()), "eval/gold": float(np.mean(gold[1:])), "seconds": 10.0 * epoch}
        rows.append(row)
        held.append({"epoch": epoch, "values": {"clip": clip.tolist(), "gold": gold}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held))
    return folder


@pytest.fixture
def two(tmp_path: Path) -> list[Group]:
    """Groups "low" and "high" of three seeds."""
    for name, gain in (("low", 0.01), ("high", 0.2)):
        for seed in range(3):
            make(tmp_path / "s" / name / f"seed-{seed}", seed, gain, nft={"beta": gain})
    return group(find_runs([tmp_path / "s" / "low", tmp_path / "s" / "high"]))


def test_runs_that_differ_by_their_seed_are_a_group(two: list[Group], tmp_path: Path) -> None:
    assert [(one.name, sorted(one.runs)) for one in two] == [("low", [0, 1, 2]), ("high", [0, 1, 2])]
    flat = [make(tmp_path / f"nft2-{seed}", seed, 0.1) for seed in (10, 11)]
    twice = make(tmp_path / "again", 10, 0.1)  # config and seed of an earlier one: a run again, not a seed more
    assert [one.name for one in group([*flat, twice])] == ["nft2", "again"]
    with pytest.raises(UserError, match=r"nft2-10: this run is given twice"):
        group([flat[0], flat[1], flat[0]])
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="none is not a run's folder"):
        find_runs([tmp_path / "none"])


def test_means_and_differences_are_paired_by_seed_and_prompt(two: list[Group]) -> None:
    low, high = two
    held = {
        one.name: np.array([run.held.epochs[2]["clip"] for run in one.runs.values()]) for one in two
    }  # (seeds, prompts)
    first = np.array([run.held.epochs[0]["clip"] for run in low.runs.values()])
    value, gain, against = high.value("clip"), high.gain("clip"), high.against(low, "clip")
    assert value is not None and gain is not None and against is not None
    assert (value.mean, value.half) == pytest.approx(interval(held["high"].mean(1).tolist()))
    assert (gain.value.mean, gain.value.half) == pytest.approx(interval((held["high"] - first).mean(1).tolist()))
    assert gain.p == pytest.approx(stats.ttest_rel(held["high"].mean(0), first.mean(0)).pvalue, rel=1e-6)
    apart = held["high"] - held["low"]
    assert (against.value.mean, against.value.half) == pytest.approx(interval(apart.mean(1).tolist()), abs=1e-12)
    low_by_gold = low.gain("gold")
    assert low_by_gold is not None and low_by_gold.p is not None, "the prompt that gold does not judge is left out"
    of_diversity = high.against(low, "diversity")
    assert of_diversity is not None and of_diversity.p is None, "nothing is known of single prompts"


def test_what_draws_other_prompts_is_not_paired(two: list[Group], tmp_path: Path) -> None:
    runs = [make(tmp_path / "else" / f"seed-{seed}", seed, 0.1, prompts={"test": "other"}) for seed in range(3)]
    other = group(runs)[0]
    assert other.against(two[0], "clip") is None and differences([two[0], other])["clip"] == [None]
    assert any("other prompts or another model" in note for note in notes([two[0], other]))
    alone = group([make(tmp_path / "alone" / "seed-7", 7, 0.1, nft={"beta": 0.01})])[0]
    assert alone.against(two[0], "clip") is None, "no seed in common"


@pytest.mark.parametrize(
    ("key", "paired", "told"),
    [
        ("prompts.test (texts and number)", False, True),  # another text in the same file
        ("gold (code and files)", True, True),  # the same judge by its name only
        ("evaluate (solver and size)", True, False),  # whose keys the config tells
        ("", True, False),
    ],
)
def test_what_runs_measured_otherwise_is_said(tmp_path: Path, key: str, paired: bool, told: bool) -> None:
    runs = [make(tmp_path / name, 0, 0.1, nft={"beta": float(name)}) for name in "12"]
    for run in runs:
        facts = {"clip (code and files)": "0", key: run.name} if key else {"clip (code and files)": "0"}
        (run / "environment.json").write_text(json.dumps([{"evaluations": {key: "old"}}, {"evaluations": facts}]))
    one, other = group(runs)
    assert one.pairs_with(other) == paired
    sentence = f"Evaluations have another {key}: part of a difference is the measuring's."
    assert (sentence in compare.text_of(runs)) == told and "clip (code" not in compare.text_of(runs)


def test_unequal_numbers_of_images_are_said_on_the_terminal_too(tmp_path: Path) -> None:
    runs = [make(tmp_path / name, 0, 0.1, nft={"beta": float(name)}) for name in "12"]
    assert "numbers of images" not in compare.text_of(runs)
    lines = (runs[1] / "metrics.jsonl").read_text().splitlines()
    (runs[1] / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    said = "The numbers of images differ (1 200, 2 100): read the values beside them."
    assert said in compare.text_of(runs) and said in as_file(group(runs), ".md")


def test_the_best_is_named_only_where_intervals_part(two: list[Group], tmp_path: Path) -> None:
    assert best(two, "clip") is two[1] and best(two, "diversity") is None
    two[1].runs[1].metrics[-1]["eval/clip"] -= 0.3  # one seed that failed
    assert best(two, "clip") is None
    two[1].runs[1].metrics[-1]["eval/clip"] += 0.3
    for one in two:
        for run in one.runs.values():
            run.lower = frozenset({"clip"})
    assert best(two, "clip") is two[0] and best(two[:1], "clip") is None


def test_tables(two: list[Group], tmp_path: Path) -> None:
    text = as_file(two, ".md")
    lines = text.splitlines()
    assert lines[0] == "| run | seeds | images | time | clip | gold | diversity |"
    assert lines[2].startswith("| before training |  | 0 |  | 0.5") and lines[3].startswith("| low | 3 | 200 | 0:30 |")
    assert lines[6].startswith("| minus low | clip |") and "(p < 1e-6)" not in lines[2]
    assert lines[8].startswith("| high | +0.1")
    tex = as_file(two, ".tex")
    assert tex.count(r"\begin{tabular}") == 2 and r"$\pm$" in tex and "±" not in tex.split(r"\begin", 1)[1]
    rows = [line for line in tex.splitlines() if line.endswith("\\")]
    assert [row.count("&") for row in rows] == [6, 6, 6, 6, 3, 3]
    assert "high" in as_text(two) and "clip:" in as_text(two)
    two[0].name = "a_b%"
    assert r"a\_b\% & 3 &" in as_file(two, ".tex")


def test_the_page_and_the_command(two: list[Group], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep, page, table = str(tmp_path / "s"), tmp_path / "p" / "c.html", tmp_path / "c.tex"
    assert main(["compare", sweep, "--out", str(page), "--table", str(table)]) == 0
    assert capsys.readouterr().out == f"report: {page}\ntable: {table}\n"
    assert main(["compare", sweep]) == 0
    said = capsys.readouterr().out.splitlines()
    assert sorted(said) == sorted(as_text(two).splitlines()), "on the terminal, where nothing is to be written"
    text = page.read_text()
    assert "2 groups of 6 runs compared" in text and "Differences" in text and text.count("<svg") == 2 * 3
    assert r"\toprule" in table.read_text()
    for words, message in (
        (["nowhere"], 'compare: no folder "nowhere"'),
        ([sweep, "--table", "c.csv"], '--table: "c.csv": its name must end with .md or .tex'),
        ([f"{sweep}/low/seed-0", "--table", "c.md"], "compare: name at least two runs"),
        ([f"{sweep}/low/seed-0", sweep, "--table", "c.md"], "seed-0: this run is given twice"),
    ):
        assert main(["compare", *words]) == 2
        assert message in capsys.readouterr().err


def test_a_run_that_was_not_evaluated_has_a_page_and_no_table(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"epoch": 1, "samples": 5}\n')
    runs = [tmp_path / "a", tmp_path / "b"]
    assert compare.write_comparison(runs, tmp_path / "c.html").is_file()
    with pytest.raises(UserError, match="nothing of it was evaluated"):
        compare.write_table(runs, tmp_path / "c.md")


def test_a_sweeps_runs_come_in_its_order(two: list[Group], tmp_path: Path) -> None:
    rows = [{"name": name, "seed": seed} for name in ("low", "high") for seed in (2, 1, 0)]
    (tmp_path / "s" / "sweep.json").write_text(json.dumps({"runs": rows}))
    found = find_runs([tmp_path / "s"])
    assert [(run.parent.name, run.name) for run in found] == [(row["name"], f"seed-{row['seed']}") for row in rows]
    assert r"& $-$0.1" in as_file(group(found)[::-1], ".tex")
    (tmp_path / "s" / "sweep.json").write_text("[]")
    with pytest.raises(UserError, match=r"sweep.json: not what diffrl writes there"):
        find_runs([tmp_path / "s"])
