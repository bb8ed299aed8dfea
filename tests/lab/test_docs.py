"""The documentation's own rules; that it builds strictly is checked by `make docs`."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

from experiments.figures import sentences, tables  # noqa: E402

TEXTS = [*tables.pages(), ROOT / "CONTRIBUTING.md", ROOT / "rewards" / "README.md"]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 700


def test_a_page_is_read_as_it_is_and_its_links_lead_to_files() -> None:
    for page in TEXTS:
        text = page.read_text(encoding="utf-8")
        assert "[[ " not in text and "[% " not in text, f"{page}: a macro"
        links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
        assert not [link for link in links if not (page.parent / link).exists()], page


def test_the_pages_tables_are_those_of_the_results() -> None:
    assert sum(len(tables.BLOCK.findall(page.read_text(encoding="utf-8"))) for page in tables.pages()) > 40
    assert [str(page) for page in tables.old()] == [], "run python -m experiments.figures.tables"


def test_a_table_that_is_old_is_seen_and_written(tmp_path: Path, monkeypatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- experiments/figures/results_table.py:gains NFT=nft.json -->\n| old |\n<!-- end -->\nb\n")
    monkeypatch.setattr(tables, "pages", lambda: [page])
    text = tables.old()[page]
    assert text.startswith("a\n") and text.endswith("\n<!-- end -->\nb\n") and "| NFT | 12,288 |" in text
    page.write_text(text)
    assert tables.old() == {}


def test_figures_inside_of_sentences_are_those_of_the_results(monkeypatch) -> None:
    assert sentences.missing() == []
    monkeypatch.setitem(sentences.FUNCTIONS, "together", lambda *files: "0.1234")
    assert sentences.missing()[0].startswith('docs/../experiments/notebook/more.md: "0.1234" is not in it (together ')


def test_the_page_on_resuming_lists_what_may_change() -> None:
    from diffrl.records.identity import FREE, FREE_OF_REWARDS, NOT_FREE

    page = (ROOT / "docs" / "resume.md").read_text()
    table = page.split("## What may change on its own")[1].split("## ")[0]
    listed = set(re.findall(r"`([\w.]+)`", table))
    own = set(FREE_OF_REWARDS)
    assert listed == {*FREE, *own, *(key.rpartition(".")[2] for key in NOT_FREE)}
