"""The shipped prompt sets: sizes, splits, metadata as the rewards read it; and data sets of the hub."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from diffrl.additions.prompt_sets import SPLITS, file_of, prompts
from diffrl.cli.main import main
from diffrl.errors import UserError
from diffrl.prompts import Prompt, check_source, load_prompts
from diffrl_zoo.geneval_rules import COLORS, NUMBERS, RELATIONS, TAGS, parse_prompt
from diffrl_zoo.ocr import Ocr, quotes
from scripts.prompts import geneval
from scripts.prompts.__main__ import frozen
from scripts.prompts.words import none_of, one, plurals, words

SIZES = {
    "geneval": (5440, 620),
    "ocr": (9000, 600),
    "general": (10000, 600),
    "compositional": (6000, 400),
    "atoms": (6000, 400),
    "animals": (45, 30),
}


def rows(name: str, split: str) -> list[tuple[str, dict[str, Any]]]:
    return [(prompt.text, prompt.metadata) for prompt in prompts(name, split)]


@pytest.mark.parametrize("name", SIZES)
def test_train_and_test_share_no_prompt(name: str) -> None:
    train, test = ({text.lower() for text, _ in rows(name, split)} for split in SPLITS)
    assert (len(train), len(test)) == SIZES[name], "as many different texts as there are prompts"
    assert not train & test
    assert all(text == text.strip() and "  " not in text for text in train | test)


@pytest.mark.long
def test_the_sets_are_what_the_grammars_make() -> None:
    """And a digest of every set's first prompts: another Python, numpy or word list would show."""
    assert {key: gzip.decompress(file_of(*key).read_bytes()) for key in frozen()} == frozen()
    text = json.dumps([rows(name, split)[:200] for name in SIZES for split in SPLITS])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "f9fd84caa8dfd390"


def test_geneval_metadata_is_what_its_prompts_say() -> None:
    """The zoo's own reader of GenEval's templates finds the metadata that the grammar wrote."""
    names, read = list(plurals()), Counter()
    assert len(names) == 80 and tuple(words()["colours"]) == COLORS
    for split in SPLITS:
        for text, metadata in rows("geneval", split):
            found = parse_prompt(text, names)
            if found is None:  # other wordings and better plurals of counting
                assert metadata["tag"] == "counting"
                (asked,) = metadata["include"]
                assert f"{NUMBERS[asked['count']]} {plurals()[asked['class']]}" in text
            else:
                assert found == metadata, text
                read[metadata["tag"]] += 1
    assert set(read) == set(TAGS) and read["counting"] > 100


def test_no_geneval_task_is_trained_and_tested() -> None:
    train, test = ([data for _, data in rows("geneval", split)] for split in SPLITS)
    keys = {geneval.task_key(data) for data in test}
    assert not keys & {geneval.task_key(data) for data in train}
    assert len(geneval.published()) == 552 and not geneval.published() & {geneval.key_hash(data) for data in train}
    counts = Counter(data["tag"] for data in train)
    assert {tag: counts[tag] / 320 for tag in counts} == geneval.SHARES
    assert Counter(data["tag"] for data in test) == geneval.TEST


def test_a_task_is_the_same_with_its_objects_turned_round() -> None:
    def key(row: tuple[str, dict]) -> str:
        return geneval.task_key(row[1])

    assert key(geneval.position("cat", "left of", "dog")) == key(geneval.position("dog", "right of", "cat"))
    assert key(geneval.position("cat", "left of", "dog")) != key(geneval.position("dog", "left of", "cat"))
    assert key(geneval.two("cat", "dog")) == key(geneval.two("dog", "cat"))
    assert key(geneval.coloured("cat", "red")) != key(geneval.coloured("cat", "blue"))
    # The published benchmark's first lines, by hand: their hashes are among the shipped ones.
    assert geneval.key_hash(geneval.counting("wine glass", 2)[1]) in geneval.published()
    assert geneval.key_hash(geneval.position("cow", "right of", "laptop")[1]) in geneval.published()
    assert geneval.key_hash(geneval.counting("wine glass", 6)[1]) not in geneval.published()


def test_ocr_prompts_quote_their_text() -> None:
    reward = Ocr.__new__(Ocr)
    reward.targets, reward.case = "joined", False
    lengths = Counter()
    for split in SPLITS:
        for text, metadata in rows("ocr", split):
            assert quotes(text) == [metadata["text"]] and len(metadata["text"].split()) == metadata["words"]
            assert reward.applies(text, metadata) and reward.applies(text, {})
            lengths[metadata["words"]] += 1
    assert set(lengths) == {1, 2, 3, 4, 5, 6} and min(lengths.values()) > 1500
    train, test = ({data["text"].lower() for _, data in rows("ocr", split)} for split in SPLITS)
    assert not train & test


def test_compositional_metadata_can_be_judged() -> None:
    classes = {}
    for split in SPLITS:
        classes[split] = set()
        for text, data in rows("compositional", split):
            clauses = data["include"]
            for i, clause in enumerate([*clauses, *data.get("exclude", ())]):
                assert clause["class"] in plurals() and clause["count"] >= 1
                assert clause.get("color", "red") in COLORS
                if "position" in clause:
                    assert clause["position"][0] in RELATIONS and clause["position"][1] < i
                word = plurals()[clause["class"]] if 1 < clause["count"] < 5 else clause["class"]
                word = none_of(clause["class"]) if clause not in clauses and data["kind"] == "negation" else word
                if clause in clauses or data["kind"] == "negation":
                    assert word in text, (text, clause)
            if data["kind"] == "negation":
                assert data["exclude"][0]["class"] != clauses[0]["class"]
            classes[split].add((data["kind"], *sorted(clause["class"] for clause in clauses)))
    assert not classes["train"] & classes["test"]
    kinds = Counter(data["kind"] for _, data in rows("compositional", "train"))
    assert len(kinds) == 4 and min(kinds.values()) > 1300


def test_atoms_have_a_question_each() -> None:
    """Every part of a prompt is asked about, by the words in which the prompt says it."""
    for split in SPLITS:
        for text, data in rows("atoms", split)[::7]:
            skills, asked = Counter(data["skills"]), data["vqa_list"]
            assert len(asked) == len(data["skills"]) and 3 <= data["atom_count"] <= 10
            singles = sum(answer == "one" for _, answer in asked)
            assert sum(skills.values()) - singles == data["atom_count"] and skills["count"] == skills["object"]
            for (question, answer), skill in zip(asked, data["skills"], strict=True):
                if skill == "count" and answer != "one":
                    many = question.removeprefix("How many ").removesuffix(" does the picture show?")
                    assert f"{answer} " in text and many in text
                assert skill == "count" or answer == "Yes"
                if skill in ("position", "verb"):
                    link = re.sub(r"^(Is|Are) the ", "", question.rstrip("?")).split(" the ")[0]
                    assert link.split()[-1] in text
    known = {json.dumps(sorted(q for q, _ in d["vqa_list"] if q.startswith("Does"))) for _, d in rows("atoms", "train")}
    several = [d for _, d in rows("atoms", "test") if d["skills"].count("object") > 1]
    assert several and not any(
        json.dumps(sorted(q for q, _ in d["vqa_list"] if q.startswith("Does"))) in known for d in several
    )


def test_things_have_their_article_and_pairs_are_pairs() -> None:
    assert [one("scissors", "red"), one("skis"), one("broccoli"), one("orange"), one("dog", "orange")] == [
        "a pair of red scissors", "a pair of skis", "a broccoli floret", "an orange", "an orange dog",
    ]  # fmt: skip
    assert [none_of(name) for name in ("scissors", "person", "sheep", "dog")] == ["scissors", "people", "sheep", "dogs"]
    texts = [text for name in ("ocr", "general", "compositional") for split in SPLITS for text, _ in rows(name, split)]
    wrong = r"\ban? (scissors|skis|broccoli(?! floret))\b|\ba [aeio]\w|\ban [^aeiou\W]|no person\b"
    assert not [text for text in texts if re.search(wrong, text) and not re.search('"', text)]
    quoted = [data["text"].lower() for split in SPLITS for _, data in rows("ocr", split)]
    assert not [text for text in quoted if re.search(r"after (now|daily|today)|\bare (winter|summer|daily)", text)]


def test_a_picture_does_not_contradict_itself() -> None:
    """No weather indoors, and no candle that lights a landscape."""
    lists = words()["general"]
    weather = set(lists["lights"]) - set(lists["lights_indoors"])
    for split in SPLITS:
        for text, _ in rows("general", split):
            inside = any(f" {place} " in f"{text} " for place in lists["indoors"])
            assert not (inside and any(f" {light}" in text for light in weather)), text
            view = any(subject in text for subject in lists["views"])
            assert not (view and any(f" {light}" in text for light in lists["lights_near"])), text


def test_a_set_works_where_a_file_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_source("ocr/train") is None
    prompt = load_prompts("ocr/test")[3]
    assert prompt.metadata["text"] in prompt.text
    assert main(["prompts", "list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{name} " in listed for name in SIZES) and "10000" in listed
    assert main(["prompts", "show", "ocr/test", "--limit", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3] == f"{prompt.text}   [text: {prompt.metadata['text']}]" and lines[5] == "... 600 prompts in all"
    assert main(["prompts", "show", "geneval/test", "--limit", "1", "--metadata"]) == 0
    assert json.loads(capsys.readouterr().out)["include"]
    assert main(["prompts", "show", "ocr/tset"]) == 2


class Numbers:
    """A set of another package: `numbers:3` are three prompts."""

    def split(self, source: str) -> str:
        if not source.removeprefix("numbers:").isdecimal():
            raise UserError(f'prompts "{source}": write numbers:COUNT')
        return "all"

    def prompts(self, source: str) -> list[str | Prompt]:
        self.split(source)
        return [str(number) for number in range(int(source.removeprefix("numbers:")) - 1)] + [Prompt("x", {"n": 1})]


COUNTED = Numbers()


def test_a_set_of_another_package_has_its_name(installed, capsys: pytest.CaptureFixture[str]) -> None:
    installed("numbers", f"{__name__}:COUNTED", "diffrl.prompts")
    assert check_source("numbers:3") is None
    assert [(prompt.text, prompt.metadata) for prompt in load_prompts("numbers:3")] == [
        ("0", {}),
        ("1", {}),
        ("x", {"n": 1}),
    ]
    for source, said in (("numbers:x", "write numbers:COUNT"), ("numbers/p.txt", 'no folder "numbers"')):
        with pytest.raises(UserError, match=said):
            check_source(source)
    assert main(["prompts", "show", "numbers:2"]) == 0 and capsys.readouterr().out == "0\nx\n"
    assert main(["prompts", "list"]) == 0


@pytest.fixture
def pets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set of the library's own form: a folder OWNER/NAME, which it reads as it reads the hub's."""
    pytest.importorskip("datasets")
    folder = tmp_path / "org" / "pets"
    folder.mkdir(parents=True)
    data = [
        {"caption": "a cat", "size": 3, "tags": ["small", "furry"], "name": None},
        {"caption": " a cat ", "size": 4, "tags": [], "name": "Tom"},
        {"caption": "", "size": 5, "tags": [], "name": "x"},
        {"caption": "a dog", "size": 9, "tags": ["big"], "name": "Rex"},
    ]
    (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in data))
    (folder / "test.jsonl").write_text(json.dumps({"caption": "a bird"}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return folder


def test_a_data_set_of_the_hub_is_a_source(pets: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert check_source("hub:org/pets") is None, "nothing is read before the run begins"
    prompts = load_prompts("hub:org/pets")
    assert [prompt.text for prompt in prompts] == ["a cat", "a dog"]
    assert prompts[0].metadata == {"size": 3, "tags": ["small", "furry"]}
    assert "2 rows without a text or with a repeated one" in caplog.text
    assert [prompt.text for prompt in load_prompts("hub:org/pets:test:caption")] == ["a bird"]
    (pets / "train.jsonl").unlink()
    assert len(load_prompts("hub:org/pets")) == 2, "the second time it is read from the cache"


def test_a_shipped_set_is_made_once_and_each_caller_has_a_list_of_its_own() -> None:
    first = load_prompts("geneval/test")
    kept = list(first)
    first.clear()
    again = load_prompts("geneval/test")
    assert len(again) == len(kept) and all(one is other for one, other in zip(again, kept, strict=True))
    assert [(prompt.text, prompt.metadata) for prompt in again] == list(rows("geneval", "test"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hub:org/pets:train:captoin", 'no text column "captoin" (nearest: "caption"); there are: caption, size'),
        ("hub:org/pets:validation", "cannot be read (Bad split: validation"),
        ("hub:org/nothing", "not found on the hub, or no network, and nothing kept of an earlier run"),
    ],
)
def test_what_a_data_set_lacks_is_said(pets: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as caught:
        load_prompts(source)
    assert message in str(caught.value), caught.value
    assert not list(pets.parent.parent.glob("cache/diffrl/prompts/*")), "no broken file is kept"
