"""Full disks and folders that disappear: the path, what is intact, and no half of anything."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diffrl.cli.main import main
from diffrl.config import dump, make_config
from diffrl.errors import UserError
from diffrl.records import disk, saving
from diffrl.records.disk import DiskError, check_writable, write_text
from diffrl.records.history import read_history, saved
from diffrl.records.tracking import Tracker, read_metrics, save_samples
from diffrl.run.past import drop_lines
from diffrl.tools.outputs import out_file
from diffrl.tools.sharded_jsonl import ShardedJsonl


class Full:
    """A file on a disk that takes `room` more bytes."""

    def __init__(self, file, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        written = self.file.write(data[: self.room])
        if not written:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written

    def __getattr__(self, name: str):
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 5])
def test_a_line_of_metrics_is_whole_or_absent(tmp_path: Path, room: int) -> None:
    tracker = Tracker(tmp_path)
    tracker.log({"epoch": 0, "loss": 1.0})
    good = tracker._file
    tracker._file = Full(good, room)  # type: ignore[assignment]
    with pytest.raises(DiskError) as caught:
        tracker.log({"epoch": 1, "loss": 2.0})
    said = str(caught.value)
    assert str(tmp_path / "metrics.jsonl") in said and said.endswith("MB free)")
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"epoch": 0, "loss": 1.0}\n'
    tracker._file = good  # somebody made room
    tracker.log({"epoch": 1, "loss": 2.0})
    tracker.close()
    assert [row["epoch"] for row in read_metrics(tmp_path)] == [0, 1]


@pytest.mark.parametrize("gone", ["folder", "file"])
def test_a_deleted_run_is_noticed_at_the_next_line(tmp_path: Path, gone: str) -> None:
    folder = tmp_path / "run"
    tracker = Tracker(folder)
    tracker.log({"epoch": 0})
    if gone == "folder":
        shutil.rmtree(folder)
    else:
        (folder / "metrics.jsonl").unlink()
    with pytest.raises(DiskError, match=r"its folder .*run is gone" if gone == "folder" else "No such file"):
        tracker.log({"epoch": 1})
    tracker.close()


def test_a_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    write_text(path, "old")

    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk.os, "fsync", fail)
    with pytest.raises(DiskError, match=r"report.html: could not be written: No space left on device \("):
        write_text(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@contextlib.contextmanager
def _room(size: int) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes, whoever writes it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_finds_no_room_says_where_and_leaves_the_old_one(tmp_path: Path, policy) -> None:
    config = make_config("playground/demo")
    images = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    writers = {
        tmp_path / "lora" / "pytorch_lora_weights.safetensors": lambda: policy.save_lora(tmp_path / "lora"),
        tmp_path / "samples" / "epoch-0001" / "00-a.png": lambda: save_samples(tmp_path, 1, images, ["a"], [0]),
        tmp_path / "config.yaml": lambda: dump(config, tmp_path / "config.yaml"),
    }
    for path, write in writers.items():
        write()
        before = path.read_bytes()
        with _room(1000), pytest.raises(DiskError) as caught:
            write()
        assert str(caught.value).startswith(f"{path}: could not be written: File too large (")
        assert path.read_bytes() == before and list(path.parent.glob("*.tmp")) == []


@pytest.mark.parametrize(
    "words",
    [
        ["rewards", "new", "mine", "--out", "new"],
        ["init", "--objective", "mine"],
        ["init", "my.yaml", "--model", "playground", "--rewards", "playground"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_what_finds_no_room_is_written_by_the_next_try(tmp_path: Path, monkeypatch, capsys, words: list[str]) -> None:
    """The half that was left was "exists already" then, and the line named no file."""
    monkeypatch.chdir(tmp_path)
    with _room(700):  # the shortest of each has more, or comes after one that has
        assert main(words) == 1
    assert re.search(r"error: \S+\.(py|yaml): could not be written: File too large \(", capsys.readouterr().err)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert main(words) == 0


@pytest.mark.parametrize("words", [["rewards", "new", "mine", "--out", "/proc/mine"], ["init", "/proc/my.yaml"]])
def test_a_place_that_takes_no_files_is_bad_input(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = r"diffrl: error: (rewards new: --out|init): nothing can be written to /proc \(.*\)\n"
    assert re.fullmatch(said, capsys.readouterr().err)


def test_a_row_that_finds_no_room_names_its_file(tmp_path: Path) -> None:
    rows = ShardedJsonl(tmp_path, "rows.jsonl", "search")
    rows.claim({})
    with _room(10), pytest.raises(DiskError, match=r"parts/0000.jsonl: could not be written: File too large"):
        rows.add(0, 0, {"a": "b" * 99})
    rows.add(0, 0, {"a": 1})
    assert rows.rows() == {0: {"a": 1}}


def test_a_folder_that_was_deleted_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"run/samples/epoch-0001: could not be written: its folder .* is gone"):
        save_samples(tmp_path / "run", 1, torch.zeros(1, 3, 4, 4), ["a"], [0])
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_finds_no_room_says_what_is_left(tmp_path: Path, monkeypatch) -> None:
    tensors = {"lora": {"a": torch.ones(2)}}

    def fail(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(saving, "_write", fail)
        with pytest.raises(saving.CheckpointError, match=r"MB free\); there is no other checkpoint"):
            saving.save(tmp_path, 1, tensors, {}, keep=2)
    first = saving.save(tmp_path, 1, tensors, {}, keep=2)
    with monkeypatch.context() as full:
        full.setattr(saving, "_write", fail)
        with pytest.raises(saving.CheckpointError, match=f"; intact: {first}; make room and continue"):
            saving.save(tmp_path, 2, tensors, {}, keep=2)


def test_a_report_survives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffrl import report

    (tmp_path / "report.html").write_text("old")
    monkeypatch.setattr(report, "read_run", lambda folder: SimpleNamespace(name="new"))
    monkeypatch.setattr(report, "sections", [])
    monkeypatch.setattr(report, "_LAST", ())
    monkeypatch.setattr(report, "write_text", lambda path, text: (_ for _ in ()).throw(DiskError("full")))
    with pytest.raises(DiskError):
        report.write_report(tmp_path)
    assert (tmp_path / "report.html").read_text() == "old"


def test_whether_a_folder_can_be_written_to_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable(tmp_path / "a" / "b", "run_dir")
    assert not list(tmp_path.iterdir())
    file = tmp_path / "file"
    file.write_text("")
    for name in (file, file / "run"):
        with pytest.raises(UserError, match=r'run_dir: ".*file" is a file'):
            check_writable(name, "run_dir")

    def refuse(**options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(disk.tempfile, "TemporaryFile", refuse)
    with pytest.raises(UserError, match=r"run_dir: nothing can be written to .* \(Read-only file system\)"):
        check_writable(tmp_path / "a", "run_dir")


def test_lines_of_another_past_are_taken_out(tmp_path: Path) -> None:
    with Tracker(tmp_path) as tracker:
        for epoch in range(4):
            tracker.log({"epoch": epoch})
    assert drop_lines(tmp_path, after=1) == 2 and drop_lines(tmp_path, after=1) == 0
    assert [row["epoch"] for row in read_metrics(tmp_path)] == [0, 1]


def test_a_history_survives_a_torn_line(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    path = tmp_path / "history.jsonl"
    path.write_bytes(path.read_bytes() + b'{"event": "sav')
    assert [event["step"] for event in read_history(tmp_path)] == [1]
    from diffrl.records import history

    history.started(tmp_path, {"seed": 0})
    assert [event["event"] for event in read_history(tmp_path)] == ["saved", "started"]


def test_a_file_is_written_through_links_and_never_over_a_device_or_fifo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As root `--out /dev/null` took the device away from the machine."""
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "metrics.jsonl").write_text('{"epoch": 0, "eval/diversity": 1.0}\n')
    compare = ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--out"]
    fifo, link, target = tmp_path / "fifo", tmp_path / "link.html", tmp_path / "target.html"
    os.mkfifo(fifo)
    link.symlink_to(target)
    for special, kind in ((fifo, "FIFO"), (Path("/dev/null"), "device")):
        assert main([*compare, str(special)]) == 2
        assert f'--out: "{special}" is a {kind}; name a file such as compare.html' in capsys.readouterr().err
    with pytest.raises(DiskError, match="it is a FIFO, not a file"):
        write_text(fifo, "x")
    assert fifo.is_fifo() and Path("/dev/null").is_char_device()
    assert main([*compare, str(link)]) == 0
    assert link.is_symlink() and "</html>" in target.read_text()
    assert main(["evaluate", "playground", "--rewards", "playground", "--prompts", "x.txt", "--out", str(fifo)]) == 2
    assert main(["divgen", "prompts", "--out", str(tmp_path)]) == 2
    assert out_file(link, "--out", "x.html") == target
    capsys.readouterr()
    assert main([*compare, str(link)]) == 0
    assert "link.html is there already and will be replaced" in capsys.readouterr().err
    assert out_file(tmp_path / "new", "--out", "x.html") == tmp_path / "new"
    assert out_file(tmp_path / "x.txt", "out", "scores") == tmp_path / "x.txt", "an example without a kind takes any"
    with pytest.raises(UserError, match=r'^out: "\S+target.html" is a file; name a folder$'):
        out_file(target / "x.html", "out", "x.html")
    pdf = tmp_path / "x.pdf"
    assert main([*compare, str(pdf)]) == 2 and not pdf.exists()
    assert "is a .html file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a" * 300, "b/" + "c" * 300 + "/d", "e/" * 3000, "a\0b", "a\ud800b"])
def test_a_name_that_no_file_can_have_is_said_with_its_option(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for check in (check_writable, lambda path, what: out_file(path, what, "x.html")):
        with pytest.raises(UserError, match=r'^--out: ".*" can be no file\'s name \(') as caught:
            check(Path(name), "--out")
        assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 300
    assert not list(tmp_path.iterdir())
    longest = "x" * 250  # and what stands around it while it is written
    assert out_file(Path(longest), "--out", "x") == Path(longest)
    write_text(Path(longest), "")


def test_a_link_that_leads_nowhere_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("link", "loop", "loop/inner"):
        with pytest.raises(UserError, match=r'--out: ".*(link|loop)" is a link that leads nowhere; name a folder'):
            check_writable(tmp_path / name, "--out")
    assert out_file(tmp_path / "link", "--out", "x") == tmp_path / "gone"  # a file is made where the link leads
