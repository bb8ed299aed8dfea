"""The league's page: ranks, fronts, curves and verdicts by hand; pages of what is there, and of what is not."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from html_checker import Checker
from league_file import league_of_brakes
from PIL import Image

from diffrl.errors import UserError
from diffrl.report.groups import Value
from experiments.figures import league_table
from experiments.league import plan
from experiments.league.__main__ import run as main
from experiments.league.charts import clear_of
from experiments.league.data import front, hacking_curve, ranks, read_league, turned, verdict
from experiments.league.page import KINDS, write_league, write_league_table
from experiments.league.table import LIMITS, headlines, rows

EVIL = "<script>alert('x')</script>"


@pytest.fixture(scope="module")
def brakes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return league_of_brakes(tmp_path_factory.mktemp("brakes"))


def result(track: str = "t", entry: str = "a", **more: Any) -> dict[str, Any]:
    """The least that a result has."""
    value = {"before": 0.5, "after": 0.75, "gain": 0.25, "half": None, "se_prompts": None, "by_seed": [0.25]}
    least = {"track": track, "entry": entry, "seeds": [0], "values": {"clip": value}, "curve": []}
    return least | {"variety_kept": None, "gap": None, "strip": None} | more


def league(*results: dict[str, Any], **more: Any) -> dict[str, Any]:
    tracks = {name: {"proxy": ["clip"], "gold": ["strict"]} for name in dict.fromkeys(r["track"] for r in results)}
    entries = {name: {"title": name.upper()} for name in dict.fromkeys(r["entry"] for r in results)}
    return {"schema": 1, "tracks": tracks, "entries": entries, "results": list(results)} | more


def evaluations(clip: list[float], strict: list[float], half: float | None = 0.01) -> list[dict[str, Any]]:
    pairs = enumerate(zip(clip, strict, strict=True))
    return [
        {"images": 10 * i, "values": {"clip": {"mean": a, "half": half}, "strict": {"mean": b, "half": half}}}
        for i, (a, b) in pairs
    ]


def written(folder: Path, facts: Any) -> Path:
    path = folder / "league.json"
    path.write_text(facts if isinstance(facts, str) else json.dumps(facts))
    return path


def drawn(folder: Path, facts: Any) -> str:
    """The page, which must be whole, self-contained, and let no script run but its own."""
    text = write_league(written(folder, facts), folder / "league.html").read_text()
    checker = Checker()
    checker.feed(text)
    assert checker.open == [] and all(url.startswith("data:") for url in checker.loaded)
    assert "http://" not in text and "https://" not in text and checker.seen["script"] == 1
    assert max(checker.ids.values(), default=1) == 1 and checker.references <= {f"#{name}" for name in checker.ids}
    assert re.search(r"default-src 'none'; [^\"]*script-src 'sha256-[\w+/]{43}='\"", text)
    return text


def test_ranks_differ_only_where_intervals_part() -> None:
    values = [Value(3, 0.5, 3), Value(2, 0.6, 3), Value(0, 0.1, 3), Value(0.05, 0.1, 3), None, Value(9, None, 1)]
    assert ranks(values) == [(1, 2), (1, 2), (3, 4), (3, 4), None, None]
    assert ranks(values, lower=True) == [(3, 4), (3, 4), (1, 2), (1, 2), None, None]
    wide = [Value(3, 0.1, 3), Value(2, 0.1, 3), Value(1, 2.5, 3)]  # it may be the best, and may be the worst
    assert ranks(wide) == [(1, 2), (2, 3), (1, 3)]
    assert ranks([]) == [] and ranks([Value(1, 0.0, 2)]) == [(1, 1)]


def test_the_front_is_what_nothing_dominates() -> None:
    points = [(0.5, 1.0), (1.0, 0.0), (0.4, 1.2), (0.9, -0.1), (0.5, 0.9), (0.4, 1.2)]
    assert front(points) == [2, 5, 0, 1]  # by x; of equal points both
    assert front([]) == []


def test_the_curve_by_which_hacking_shows(tmp_path: Path) -> None:
    curve = evaluations([1.0, 2.0, 3.0, 4.0], [0.5, 0.7, 0.6, 0.4])
    curve[1]["values"].pop("clip")
    one = read_league(written(tmp_path, league(result(curve=curve)))).results[0]
    assert hacking_curve(one, "clip", "strict") == [pytest.approx(p) for p in [(0, 0), (2, 0.1), (3, -0.1)]]
    assert hacking_curve(one, "clip", "variety") == []
    assert turned(one, "strict") == 1, "0.7 is above 0.4 by more than both intervals"
    unsure = read_league(written(tmp_path, league(result(curve=evaluations([1, 2], [0.5, 0.4], 0.06))))).results[0]
    assert turned(unsure, "strict") is None and turned(unsure, "variety") is None
    single = read_league(written(tmp_path, league(result(curve=evaluations([1, 2], [0.5, 0.4], None))))).results[0]
    assert turned(single, "strict") is None, "one seed has no interval"


def test_a_claim_is_decided_by_the_interval(tmp_path: Path) -> None:
    value = {"clip": {"before": 0, "after": 1, "gain": -0.2, "half": 0.1}}
    facts = league(result(values=value), result(entry="b"), result(entry="c"))
    facts["paired"] = [{"track": "t", "a": "b", "b": "a", "name": "clip", "difference": 0.3, "half": 0.1, "p": 0.01}]
    one = read_league(written(tmp_path, facts))

    def word(against: str | None, more: bool = True, of: str = "a") -> str | None:
        return verdict(one, one.entries[of], {"track": "t", "name": "clip", "against": against, "more": more})[0]

    assert word("b") == "the opposite holds" and word("b", more=False) == "holds" and word("a", of="b") == "holds"
    assert word("c") is None and word("nobody") is None and word(None) == "the opposite holds"
    assert word(None, of="b") is None, "one seed has no interval"
    facts["paired"][0]["half"] = 0.4
    facts["results"][2]["check"] = {"seeds": 1, "passed": False, "lines": ["x"]}
    one = read_league(written(tmp_path, facts))
    assert word("b") == "not parted" and word(None, of="c") is None, "what was caught decides nothing"


def test_the_shipped_claims_can_be_tested() -> None:
    league = plan.read_league()
    for entry in league.entries.values():
        for one in entry.expects:
            there = [entry, *([] if one.against is None else [league.entries[one.against]])]
            assert all(each.on(one.track) is not None for each in there)
            assert one.name in (*league.tracks[one.track].proxy, *league.tracks[one.track].gold, "variety")


def test_a_legend_groups_entries_by_kind(tmp_path: Path) -> None:
    facts = league(*(result(entry=name) for name in ("a", "b", "c")))
    for name, kind in (("a", "base"), ("b", "wrapper"), ("c", "base")):
        facts["entries"][name]["kind"] = kind
    legend = drawn(tmp_path, facts).split('<div class="keys">')[1].split("</div>")[0]
    groups = {line.split("<")[0]: re.findall(r'data-entry="(.)"', line) for line in legend.split('class="group">')[1:]}
    assert groups == {KINDS["base"]: ["1", "3"], KINDS["wrapper"]: ["2"]}
    kinds = get_args(plan.Entry.model_fields["kind"].annotation)
    assert {*kinds} - {plan.PART} == KINDS.keys()


def test_the_page_of_the_finished_results(brakes: dict[str, Any], tmp_path: Path) -> None:
    text = drawn(tmp_path, brakes)
    assert "<h1>The league</h1>" in text and "14 entries" in text and "3 seeds each" in text
    for title in ("preference against variety", "strict against preference", "variety at equal cost"):
        assert f"<figcaption>{title}" in text
    assert text.count('class="entry" data-entry="14"') > 8, "every chart's curve is found by its number"
    assert text.count("No entry of this track has seconds") == 3
    assert all(line.partition("'")[0] in text for line in LIMITS)
    assert '<b class="good">holds</b>, preference: more preference than Flow-GRPO: +0.260 ± 0.054' in text
    assert "preference: more strict than Flow-GRPO" in text and "not parted" in text
    unmeasured = [one | {"drift": None, "check": None} for one in brakes["results"]]
    table = rows(read_league(written(tmp_path, brakes | {"results": unmeasured})))
    assert "drift" not in table.heads and "check" not in table.heads, "columns without a value are left out"
    places = {one.entry.name: cells for one, cells in zip(table.results, table.cells, strict=True)}
    column = table.heads.index("rank by variety")
    assert places["grpo_guard"][column] == ["1"] and places["awm_on_policy"][column] == ["8–14"]
    ((track, sentence),) = headlines(read_league(tmp_path / "league.json"))
    assert track.name == "preference"
    assert sentence.startswith(
        "Of 14 entries (12.3k images each) 14 raise preference, 0 raise strict, 14 lose variety."
    )
    assert "Most variety kept: GRPO-Guard." in sentence
    assert "Furthest on strict" not in sentence, "who gains nothing is not ranked in words"


def test_the_table_as_a_file(brakes: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path, brakes)
    markdown = write_league_table(path, tmp_path / "t.md").read_text()
    assert "| GRPO-Guard | preference | +0.799 ± 0.066 | 14 |" in markdown
    latex = write_league_table(path, tmp_path / "t.tex").read_text()
    assert r"\begin{tabular}{lrrr" in latex and r"$-$0.101 $\pm$ 0.072" in latex and "–" not in latex


def test_the_pages_of_the_docs_read_the_same_file(
    brakes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(league_table, "FILE", tmp_path / "league.json")
    assert league_table.summary() == league_table.table() == "Not run yet."
    written(tmp_path, brakes)
    assert league_table.summary().startswith("- **preference**: Of 14 entries (12.3k images each) 14 raise preference,")
    assert "| DiffusionNFT | +1.533 ± 0.027 | 5–10 |" in league_table.table(), "the track stands above its table"


def test_a_league_of_hardly_anything_has_a_page(tmp_path: Path) -> None:
    assert "No result yet." in drawn(tmp_path, league())
    text = drawn(tmp_path, league(result()))
    assert "1 track · 1 entry · 1 result · 1 seed each" in text and "+0.250" in text
    nothing = dict.fromkeys(("gap", "variety_kept", "drift", "stability", "cost", "strip", "check", "curve"))
    values = {"clip": None, "strict": {"before": None, "after": None, "gain": None, "half": None}}
    facts = league(result(**nothing | {"values": values, "commit": None}), paired=None, left_out=None)
    assert "<h2>t</h2>" in drawn(tmp_path, facts)
    nan = league(result(curve=evaluations([1.0, math.nan, math.inf], [0.1, 0.2, 0.3])))
    assert "strict at equal cost" in drawn(tmp_path, nan)


def test_what_is_known_is_shown_and_escaped(tmp_path: Path) -> None:
    more = {
        "check": {"seeds": 3, "passed": True, "lines": []},
        "gap": {"mean": 0.3, "half": 0.1},
        "drift": 0.012,
        "variety_kept": {"mean": 0.9, "half": 0.1},
    }
    more |= {
        "stability": {"std": 0.02, "collapsed": 1},
        "cost": {"images": 10, "forwards": 1e6, "seconds": 90, "mib": 800},
    }
    facts = league(
        result(**copy.deepcopy(more), curve=evaluations([0, 1], [0, 1])),
        result(
            entry="cheat",
            **more | {"check": {"seeds": 3, "passed": False, "lines": ["seed 0: it trained on the noise."]}},
        ),
        result(track="two", curve=evaluations([0, 1], [1, 0])),
        left_out=[f"SRPO {EVIL}"],
    )
    facts["entries"]["a"] |= {"title": f"A {EVIL}", "claim": f"It is fast {EVIL}", "page": "docs/a.md", "trials": 4}
    facts["entries"]["a"]["expects"] = [{"track": "t", "name": "clip", "against": None, "more": True}]
    facts["tracks"]["two"] |= {"proxy": ["clip", "strict"], "gold": ["strict"], "prompts": [EVIL]}
    Image.new("RGB", (256, 64), "red").save(tmp_path / "strip.webp")
    facts["results"][2]["strip"] = "strip.webp"
    text = drawn(tmp_path, facts)
    assert EVIL not in text and "A &lt;script&gt;" in text
    assert "seed 0: it trained on the noise." in text and '<b class="bad">caught</b>' in text and ">passed<" in text
    assert text.count("data:image/png") == 1 and 'width="256" height="64" class="pixels"' in text
    assert '<option value="two">' in text and "+0.250 clip<br>–" in text, "one line for each of several proxies"
    table = rows(read_league(tmp_path / "league.json"), only="t")
    assert {"hacking gap", "drift", "collapsed seeds", "memory (MiB)", "trials"} <= {*table.heads}
    cheat = table.cells[1]
    assert cheat[table.heads.index("check")] == ["caught"]
    assert cheat[table.heads.index("rank by variety")] == ["–"], "a cheater has no rank"


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ("{", "not JSON"),
        ("[" * 10**5, "not JSON"),
        ([], "schema None; this diffrl reads schema 1"),
        ({"schema": 2}, "schema 2; this diffrl reads schema 1"),
        ({"schema": 1}, "not what diffrl writes there (KeyError: 'tracks')"),
        (league(result()) | {"entries": {"b": {}}}, 'results.0: unknown entry "a" (choose from: b)'),
        (league(result(gap={"mean": "much"})), "not what diffrl writes there (ValueError"),
        (league(result(strip="../other/secret.png")), 'strip "../other/secret.png" is not in the folder'),
    ],
)
def test_bad_input_is_one_line(facts: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.html"
    assert main(["report", str(written(tmp_path, facts)), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and not out.exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, league(result()))
    out, table = tmp_path / "new" / "l.html", tmp_path / "l.md"
    assert main(["report", str(path), "--out", str(out), "--table", str(table)]) == 0
    assert out.is_file() and table.is_file() and capsys.readouterr().out == f"page: {out}\ntable: {table}\n"
    for words, message in (
        ([str(tmp_path / "leage.json"), "--out", "x.html"], 'leage.json" (nearest: "league.json")'),
        ([str(path)], "name what to write: --out FILE.html or --table FILE.md|FILE.tex"),
        ([str(path), "--table", "t.txt"], "its name must end with .md or .tex"),
        ([str(path), "--out", str(tmp_path)], "is a folder; name a file such as"),
    ):
        assert main(["report", *words]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert main(["report", "--out", "x.html"]) == 2
    assert 'no file "assets/results/league.json"' in capsys.readouterr().err


def test_an_unknown_name_is_an_error_in_python_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file"):
        read_league(tmp_path / "league.json")


def test_labels_keep_clear_of_each_other() -> None:
    places, sizes = [(50.0, 50.0), (51.0, 51.0), (52.0, 50.0), (200.0, 50.0)], [(10.0, 8.0)] * 4
    offsets = clear_of(places, sizes, (210.0, 100.0))
    boxes = [(x + dx, y + dy) for (x, y), (dx, dy) in zip(places, offsets, strict=True)]
    for i, (a, b) in enumerate(boxes):
        assert all(abs(a - c) >= 10 or abs(b - d) >= 8 for c, d in boxes[:i])
    assert offsets[3][0] < 9, "alone it would stand to the right, where there is no room"
