"""The documentation's own rules; that it builds strictly is checked by `make docs`."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert links and not [link for link in links if not (ROOT / link).exists()]


def test_the_readme_s_figures_are_those_of_the_shipped_model() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- (assets/\S+\.json) -->\n(.*?)<!-- end -->", text, re.DOTALL)
    assert block is not None
    figures = json.loads((ROOT / block[1]).read_text(encoding="utf-8"))["figures"]
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in block[2].splitlines())
    assert len(rows) == 3
    for row, name in zip(rows, ("guidance 1", "guidance 3", "autoencoder"), strict=True):
        found = figures[name]
        expected = [found["facts"], found["all_right"], *(found["by_prompt"][kind] for kind in head[3:-2])]
        assert row[1:-2] == [f"{value:.2f}" for value in expected]
        assert row[-2] == f"{found['artefact']:.3f}"
        assert row[-1] == (f"{found['variety']:.2f}" if "variety" in found else "")


def test_the_readme_s_table_of_trainings_is_that_of_the_results() -> None:
    module = runpy.run_path(str(ROOT / "scripts" / "figures" / "base_table.py"))
    found = module["MARKS"].search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert found is not None and found[0] == found[1] + module["table"]() + found[2]


def test_the_page_on_resuming_lists_what_may_change() -> None:
    from diffrl.records.identity import FREE, FREE_OF_REWARDS, NOT_FREE

    page = (ROOT / "docs" / "resume.md").read_text()
    table = page.split("## What may change on its own")[1].split("## ")[0]
    listed = set(re.findall(r"`([\w.]+)`", table))
    own = set(FREE_OF_REWARDS)
    assert listed == {*FREE, *own, *(key.rpartition(".")[2] for key in NOT_FREE)}
