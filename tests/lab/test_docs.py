"""The documentation's own rules; that it builds strictly is checked by `make docs`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

from experiments.figures import model_pages, sentences, tables, wrap  # noqa: E402

TEXTS = [*tables.pages(), ROOT / "CONTRIBUTING.md", ROOT / "rewards" / "README.md"]


def test_the_first_pages_are_short() -> None:
    for page, words in (("README.md", 700), ("docs/what-holds.md", 800), ("docs/start/first-real-lora.md", 300)):
        assert len((ROOT / page).read_text(encoding="utf-8").split()) <= words, page


def test_the_readme_counts_the_values_with_a_source() -> None:
    rows = len((ROOT / "tests" / "data" / "facts.csv").read_text(encoding="utf-8").splitlines()) - 1
    (said,) = re.findall(r"over (\d+) values", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert 0.9 * rows <= int(said) < rows


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


def test_the_prose_is_wrapped_at_80_columns() -> None:
    old = [str(page) for page in wrap.pages() if wrap.wrapped(page.read_text()) != page.read_text()]
    assert not old, f"run python -m experiments.figures.wrap: {old}"
    assert wrap.wrapped("a " * 60 + "`b c`\n\n- d\n  e\n") == f"{'a ' * 39}a\n{'a ' * 20}`b c`\n\n- d e\n"


# Words that crept into the texts and say nothing to a new reader.
PRIVATE = {
    "whoever": "say who: the process, the user, the rank",
    "gone on with": "continued",
    "in plain view": "visible",
    "intervals that part": "disjoint intervals",
    "not part from": "not significant",
    "holds nothing": "has no effect",
    "brake": "a penalty or a clip",
    "gold reward": "the verifier",
    "seed by seed": "paired by seed",
    "no longer only watched": "moved to training",
    "beside other work": "the machine was shared",
    "optimize": "optimise, as everywhere here",
    "color ": "colour, as everywhere here",
}
GENERATED = re.compile(r"<!-- \S+\.py.*?<!-- end -->", re.DOTALL)


def test_plain_words() -> None:
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", GENERATED.sub("", page.read_text()), flags=re.DOTALL)
        text = " ".join(text.split()).lower()
        found += [f'{page.relative_to(ROOT)}: "{word}": {why}' for word, why in PRIVATE.items() if word in text]
    assert not found, "\n".join(found)


# The same in what commands, help and reports say.
PRIVATE_TEXTS = (*PRIVATE, "nobody reads", "nobody sees", "are told", "goes on where")


def test_plain_words_on_the_console() -> None:
    found = []
    for path in (
        path for folder in ("diffrl", "lab", "rewards", "playground") for path in (ROOT / folder).rglob("*.py")
    ):
        tree = ast.parse(path.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                text = " ".join(node.value.split()).lower()
                found += [f"{path}:{node.lineno}: {word}" for word in PRIVATE_TEXTS if word in text]
    assert not found, "\n".join(found)


def test_no_table_is_wider_than_seven_columns_and_the_docs_stay_short() -> None:
    words = 0
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        wide = [line for line in text.splitlines() if re.match(r"\|( *:?-+:? *\|)+$", line) and line.count("|") > 8]
        assert not wide, page
        words += len(GENERATED.sub("", text).split())
    assert words <= 35_000


def test_every_family_has_a_page_of_its_facts() -> None:
    pages = model_pages.pages()
    assert {path.name for path in (ROOT / "configs").iterdir() if path.is_dir()} == set(model_pages.FAMILIES)
    for name, text in pages.items():
        assert 80 <= len(text.split()) <= 260 and "diffrl doctor" in text and "licence" in text, name
    assert (
        "18.2 GiB" in pages["guides/models/sd35.md"] and "stable-diffusion-v1-5" not in pages["guides/models/sdxl.md"]
    )
