"""Prompt files with their error messages, and the stream that every epoch's prompts come from."""

import json
import logging

import pytest

from diffrl.config import dump, load_config
from diffrl.errors import UserError
from diffrl.prompts import Prompt, PromptStream, check_source, load_prompts, stream_of

P = [Prompt(f"prompt {i}") for i in range(200)]


def test_text_file(tmp_path):
    file = tmp_path / "p.txt"
    file.write_bytes("\ufeffa red circle\r\n\r\n# a comment\n  ein gr\u00fcner Kreis  \n".encode())
    assert [p.text for p in load_prompts(str(file))] == ["a red circle", "ein gr\u00fcner Kreis"]
    assert check_source(str(file)) == 2


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig", "utf-16"])
def test_what_editors_write_is_read(tmp_path, coding, end):
    """PowerShell's and Notepad's UTF-16, line ends of three systems, none at the end; U+2028 ends no line."""
    text, objects = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_bytes(end.join(["grüner Kreis", "", "a\u2028b"]).encode(coding))
    objects.write_bytes(end.join(['{"prompt": "grüner Kreis"}', "", '{"prompt": "a\u2028b"}']).encode(coding))
    for file in (text, objects):
        assert [p.text for p in load_prompts(str(file))] == ["grüner Kreis", "a\u2028b"]


def test_json_lines_keep_their_metadata(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "words": ["x"], "n": 2}\n\n{"prompt": "b"}\n')
    assert load_prompts(str(file)) == [Prompt("a", {"words": ["x"], "n": 2}), Prompt("b")]


def test_repeated_prompts_are_used_once_and_said(tmp_path, caplog):
    file = tmp_path / "p.txt"
    file.write_text("a\nb\na\na\n")
    with caplog.at_level(logging.WARNING, "diffrl"):
        assert [p.text for p in load_prompts(str(file))] == ["a", "b"]
    assert f"{file}: 2 repeated (line 3, 4)" in caplog.text


def test_a_changed_file_is_read_again(tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("a\n")
    assert check_source(str(file)) == 1
    file.write_text("a\nb\n")
    assert check_source(str(file)) == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"# only this\n", "p.txt: no prompts in this file"),
        ("p.txt", b"a\nb\xff\n", "p.txt:2: not UTF-8 text (byte 2 of the line); save it as UTF-8"),
        ("p.txt", b"\xef\xbb\xbf\xff\n", "p.txt:1: not UTF-8 text (byte 1 of the line)"),
        ("p.txt", "a\nb".encode("utf-16-le"), "p.txt:1: not UTF-8 text (byte 2 of the line); save it"),
        ("p.txt", "a\nb".encode("utf-16") + b"c", "p.txt:2: not UTF-16 text"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "p.jsonl:2: not valid JSON"),
        ("p.jsonl", b'["a"]\n', 'p.jsonl:1: expected an object like {"prompt"'),
        ("p.jsonl", b'\n{"promt": "a"}\n', 'p.jsonl:2: expected text under "prompt" (nearest: "promt")'),
        ("p.jsonl", b'{"prompt": 3}\n', 'p.jsonl:1: expected text under "prompt"'),
        ("p.jsonl", b'{"prompt": "a", "n": 1}\n{"prompt": "a", "n": 2}\n', "p.jsonl:2: the prompt of line 1 again"),
        (
            "p.csv",
            b"a\n",
            "expected a set playground/SUBSET/SPLIT, a set NAME/SPLIT (`diffrl prompts list`), a .txt or",
        ),
    ],
)
def test_bad_files_name_file_and_line(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_bytes(content)
    for function in (load_prompts, check_source):
        with pytest.raises(UserError) as caught:
            function(str(file))
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("promts.txt", 'no such file (nearest: "prompts.txt")'),
        ("nowhere/p.txt", 'no such file, and no folder "nowhere"'),
        ("playground/wrods/train", 'unknown subset "wrods" (nearest: "words")'),
        ("playground/words/tests", 'unknown split "tests" (nearest: "test")'),
        ("playground/words", "write playground/SUBSET/SPLIT"),
        ("words", "expected a set playground/SUBSET/SPLIT"),
        ("genevl/train", '(nearest: "geneval/train")'),
        ("ocr/tst", 'unknown split "tst" (nearest: "test")'),
        ("ocr", "write ocr/train or ocr/test"),
        ("hub:nobody", "write hub:OWNER/NAME[@REVISION][:split[:column]]"),
        ("hub:a/b:train::", "write hub:OWNER/NAME[@REVISION][:split[:column]]"),
    ],
)
def test_bad_sources_name_the_nearest(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("a\n")
    with pytest.raises(UserError) as caught:
        check_source(source)
    assert message in str(caught.value)


def test_playground_sets_of_train_and_test_differ():
    train, test = (load_prompts(f"playground/heads/{split}") for split in ("train", "test"))
    assert len(train) > len(test) > 0
    assert not {p.text for p in train} & {p.text for p in test}
    assert check_source("playground/heads/train") is None  # a set is not built to be checked


@pytest.mark.parametrize(
    ("size", "groups"), [(10, 10), (10, 3), (7, 5), (8, 6), (9, 8), (13, 12), (100, 7), (5, 1), (1, 1)]
)
def test_every_prompt_comes_once_before_any_again(size, groups):
    stream = PromptStream(P[:size], groups, seed=3)
    order = [i for epoch in range(3 * size) for i in stream.batch(epoch)]
    for start in range(0, len(order) - size + 1, size):
        assert sorted(order[start : start + size]) == list(range(size))


@pytest.mark.parametrize(("size", "groups"), [(10, 10), (10, 3), (7, 5), (8, 6), (9, 8), (13, 12), (100, 7), (11, 6)])
def test_a_batch_never_repeats_a_prompt(size, groups):
    for seed in range(3):
        stream = PromptStream(P[:size], groups, seed)
        for epoch in range(30):
            assert len(set(stream.batch(epoch))) == groups


def test_a_batch_is_a_pure_function_of_seed_and_epoch():
    streams = [PromptStream(P[:11], 6, seed=1) for _ in range(2)]
    forward = [streams[0].batch(epoch) for epoch in range(20)]
    assert [streams[1].batch(epoch) for epoch in reversed(range(20))] == forward[::-1]
    assert [PromptStream(P[:11], 6, seed=2).batch(epoch) for epoch in range(20)] != forward
    # Recorded once: resumed runs go on with the same prompts, with any version of numpy.
    assert PromptStream(P[:11], 6, seed=1).batch(1) == [8, 3, 0, 5, 4, 1]


def test_prompts_are_drawn_evenly():
    stream = PromptStream(P[:50], 8, seed=0)
    first = [stream.batch(epoch)[0] for epoch in range(1000)]
    counts = [first.count(i) for i in range(50)]
    assert min(counts) > 4 and max(counts) < 45  # 20 expected


def test_a_late_epoch_costs_what_an_early_one_does(monkeypatch):
    stream = PromptStream(P[:97], 48, seed=0)
    calls = []
    raw = stream._raw
    monkeypatch.setattr(stream, "_raw", lambda number: calls.append(number) or raw(number))
    stream.batch(1_000_001)
    assert len(calls) <= 3


def test_more_groups_than_prompts():
    with pytest.raises(UserError, match=r"rollout\.groups: 5 different prompts an epoch, but there are only 4 prompts"):
        PromptStream(P[:4], 5, seed=0)


def test_metadata_survive_as_json(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": " a ", "deep": {"list": [1, None, True]}}) + "\n")
    (prompt,) = load_prompts(str(file))
    assert prompt.text == "a" and prompt.metadata == {"deep": {"list": [1, None, True]}}


@pytest.fixture
def two_files(tmp_path):
    """Sources of 12 and 5 prompts."""
    names = []
    for name, count in (("a", 12), ("b", 5)):
        file = tmp_path / f"{name}.txt"
        file.write_text("".join(f"{name}{i}\n" for i in range(count)))
        names.append(str(file))
    return names


def test_every_epoch_is_divided_by_the_shares_exactly(two_files):
    a, b = two_files
    stream = stream_of({a: 0.75, b: 0.25}, 8, seed=1)
    seen = {"a": [], "b": []}
    for epoch in range(20):
        texts = [stream.prompts[i].text for i in stream.batch(epoch)]
        assert [text[0] for text in texts] == ["a"] * 6 + ["b"] * 2
        assert len(set(texts)) == 8
        for text in texts:
            seen[text[0]].append(text)
    for name, size in (("a", 12), ("b", 5)):  # each source goes on as a stream of its own: all before any again
        for start in range(0, 40 - size + 1, size):
            assert len(set(seen[name][start : start + size])) == size
    again = stream_of({a: 3, b: 1}, 8, seed=1)  # shares are relative
    assert [again.batch(epoch) for epoch in (7, 3)] == [stream.batch(epoch) for epoch in (7, 3)]
    assert stream_of({a: 3, b: 1}, 8, seed=2).batch(0) != stream.batch(0)


def test_one_source_is_the_plain_stream(two_files):
    ours, plain = stream_of(two_files[0], 4, seed=3), PromptStream(load_prompts(two_files[0]), 4, seed=3)
    assert [ours.batch(epoch) for epoch in range(5)] == [plain.batch(epoch) for epoch in range(5)]


def test_a_mixed_list_begins_with_its_shares(two_files):
    a, b = two_files
    texts = [prompt.text for prompt in load_prompts({a: 3, b: 1})]
    assert sorted(texts) == sorted([f"a{i}" for i in range(12)] + [f"b{i}" for i in range(5)])
    assert [text[0] for text in texts[:8]].count("b") == 2 and texts[0] == "a0"
    assert [text for text in texts if text[0] == "b"] == [f"b{i}" for i in range(5)]


@pytest.mark.parametrize(
    ("shares", "groups", "message"),
    [
        ((1, 2), 8, "a.txt 2.66667 of the 8 prompts of an epoch"),
        ((1, 1000), 8, "whole number"),
        ((1, 1), 12, "takes 6 different prompts an epoch from .*b.txt, which has 5"),
    ],
)
def test_shares_that_cannot_be_are_refused(two_files, shares, groups, message):
    with pytest.raises(UserError, match=message):
        stream_of(dict(zip(two_files, shares, strict=True)), groups, seed=0)


def test_sources_that_are_mixed_may_not_share_a_prompt(two_files, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("new\na3\n")
    with pytest.raises(UserError, match=r'"a3" is in .*a.txt and in .*other.txt'):
        load_prompts({two_files[0]: 1, str(other): 1})


def test_a_config_names_several_sources(two_files, config_file):
    a, b = two_files
    path = config_file(prompts={"train": {a: 3, b: 1}, "test": {a: 1, b: 1}})
    config = load_config(path)
    assert config.prompts.train == {a: 3.0, b: 1.0}
    dump(config, path)
    assert load_config(path) == config
    assert load_config(path, [f"prompts.train={{{a}: 1, {b}: 1}}"]).prompts.train == {a: 1.0, b: 1.0}
    for overrides, message in (
        (["rollout.groups=6"], r"prompts.train: its share gives .*a.txt 4.5 of the 6 prompts"),
        (["rollout.groups=32"], r"rollout.groups: 24 different prompts an epoch, but .*a.txt has only 12"),
        ([f"prompts.train={{{a}: 1, {b}: 0}}"], "prompts.train: expected a set, a file, or a table"),
        (["prompts.train=3"], "prompts.train: expected a set, a file, or a table .* got 3"),
        ([f"prompts.test={{{a}: 1, {a}s: 1}}"], r"prompts.test: .*no such file"),
    ):
        with pytest.raises(UserError, match=message):
            load_config(path, overrides)
