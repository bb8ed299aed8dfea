"""A run's output may be closed, lose its reader or be a terminal that goes away; and no text of others steers it."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from children import in_child, signal_at
from rich.console import Console

from diffrl.cli.main import main
from diffrl.config import load_config
from diffrl.errors import printable
from diffrl.records import checkpoint
from diffrl.records.tracking import read_metrics
from diffrl.run import interrupt
from diffrl.run.interrupt import EXIT_CODE, Interrupts, Output


def _with_output(path: Path, kind: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)  # a pipe that nobody reads any more
    sys.stdout = None if kind == "closed" else open(1, "w", closefd=False)  # noqa: SIM115
    sys.exit(main(["train", str(path)]))


@pytest.mark.parametrize("kind", ["closed", "dead pipe"])
def test_a_run_goes_on_without_its_output(config_file, kind: str) -> None:
    path = config_file("mute", epochs=1)
    assert in_child(_with_output, path, kind) == 0
    assert [m["epoch"] for m in read_metrics(load_config(path).run_dir)] == [0, 1]


def test_letters_that_the_output_has_not_end_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.txt").write_text("zwei Häuser")
    monkeypatch.setattr(sys, "stdout", written := io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    monkeypatch.setenv("COLUMNS", "0")  # where rich prints nothing
    assert main(["prompts", "show", str(tmp_path / "p.txt")]) == 0
    assert written.buffer.getvalue() == b"zwei H\\xe4user\n" and Console().width > 0  # type: ignore[attr-defined]


def _hung_up(path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)  # as a terminal that is closed
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    signal_at("diffrl.run.loop:Loop._step", 3, signal.SIGHUP)
    sys.exit(main(["train", str(path)]))


def test_a_closed_terminal_loses_nothing(config_file) -> None:
    path = config_file("hung", checkpoint={"every": 3})
    assert in_child(_hung_up, path) == EXIT_CODE
    kept = checkpoint.latest(load_config(path).run_dir)
    assert kept is not None and checkpoint.load(kept)[1]["epoch"] == 1


def test_under_nohup_a_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            interrupts.check()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_lost_reader_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(interrupt.log, "warning", lambda text, *words: told.append(text % words))
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        output = Output()
        output.write("read\n")
        assert os.read(reader, 9) == b"read\n" and output.encoding == stream.encoding
        os.close(reader)
        for _ in range(3):
            output.write("lost\n")
            output.flush()
    assert told == ["the output was closed (Broken pipe): the run continues without it"]


def test_an_output_that_a_plugin_has_closed_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(interrupt.log, "warning", lambda text, *words: told.append(text % words))
    stream = open(os.devnull, "w")  # noqa: SIM115 (closed by what is tested)
    monkeypatch.setattr(sys, "stdout", stream)
    output = Output()
    stream.close()
    for _ in range(3):
        output.write("lost\n")
        output.flush()
    sys.stdout.flush()  # as the command does at its end
    assert told == ["a reward or another plugin has closed the output: the run continues without it"]
    with pytest.raises(ValueError, match="of the text"):
        output._do(lambda: (_ for _ in ()).throw(ValueError("of the text")))


def test_what_steers_a_terminal_is_spelled_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printable("a\x1b[31m\u202eb\ud800\tc\né") == "a\\x1b[31m\\u202eb\\ud800\tc\né"
    (tmp_path / "a.yaml").write_text('"\\e]0;title\\a": 1\n')
    assert main(["train", str(tmp_path / "a.yaml")]) == 2
    assert main(["train", "\x1b[31m"]) == 2
    error = capsys.readouterr().err
    assert "\\x1b" in error and "\x1b" not in error
    logging.getLogger("diffrl").handlers.clear()


def test_help_with_a_closed_output_is_no_traceback() -> None:
    command = f"{sys.executable} -m diffrl --help >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Traceback" not in done.stderr


def test_a_reward_that_lets_every_logger_speak_hears_its_own(tmp_path: Path) -> None:
    """`logging.basicConfig(level=DEBUG)` in its file showed five lines for each picture that was written."""
    (tmp_path / "mine.py").write_text(
        "import logging\nlogging.basicConfig(level=logging.DEBUG)\n"
        "def mine(images):\n    logging.debug('its own')\n"
        "    logging.getLogger('matplotlib.font_manager').info('generated new fontManager')\n"
        "    return images.mean((1, 2, 3))\n"
    )
    words = [
        "sample",
        "playground",
        "--prompt",
        "a red heart",
        "--steps",
        "1",
        "--rewards",
        "mine.py:mine",
        "--out",
        "o",
    ]
    command = [sys.executable, "-m", "diffrl", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith(("DEBUG:", "INFO:"))]
    assert done.returncode == 0 and "DEBUG:root:its own" in lines, done.stderr
    assert not [line for line in lines if line.split(":")[1].partition(".")[0] in ("PIL", "matplotlib", "filelock")]
