"""The metrics file, the sample images, the outside trackers and the terminal's table."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from PIL import Image
from rich.console import Console

from diffrl.additions import trackers
from diffrl.config import Config, load_config
from diffrl.config.base import Problem
from diffrl.errors import UserError
from diffrl.records.held_out import HeldOut, read_held_out
from diffrl.records.progress import count, duration
from diffrl.records.tracking import ProgressTable, Tracker, read_metrics, record_environment, save_samples
from diffrl.report.summary import summary


def test_lines_are_strict_json(tmp_path: Path) -> None:
    with Tracker(tmp_path) as tracker:
        tracker.log({"epoch": 1, "loss": float("nan"), "kl": torch.tensor(0.25), "std": np.float32(0.5), "x": -np.inf})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    row = json.loads(line, parse_constant=refuse)
    assert row == {"epoch": 1, "loss": None, "kl": 0.25, "std": 0.5, "x": None}
    with Tracker(tmp_path) as tracker, pytest.raises(TypeError, match="'loss' is a list"):
        tracker.log({"epoch": 2, "loss": [1.0]})


def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_one(tmp_path: Path) -> None:
    rows = [{"epoch": epoch, "loss": 1 / (epoch + 3)} for epoch in range(5)]
    with Tracker(tmp_path / "whole") as tracker:
        for row in rows:
            tracker.log(row)
    with Tracker(tmp_path / "resumed") as tracker:
        for row in rows[:3]:
            tracker.log(row)
    path = tmp_path / "resumed" / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"epoch": 3, "lo')  # killed while it wrote
    assert read_metrics(tmp_path / "resumed") == rows[:3]
    with Tracker(tmp_path / "resumed") as tracker:  # the checkpoint was one epoch older than the file
        for row in rows[2:]:
            tracker.log(row)
    assert path.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert read_metrics(tmp_path / "resumed") == rows


def test_a_last_line_of_zeros_is_cut_and_a_broken_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"epoch": 0}\n\0\0\0\0\n')
    Tracker(tmp_path).close()
    assert path.read_bytes() == b'{"epoch": 0}\n'
    path.write_bytes(b'{"epoch": 0}\n{"step": 1}\n{"epoch": 2}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl, line 2: not a JSON object with an epoch"):
        read_metrics(tmp_path)
    assert read_metrics(tmp_path / "nowhere") == []


def test_each_line_is_on_the_disk_when_log_returns(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from diffrl.records.tracking import Tracker; t = Tracker(sys.argv[1]);"
        "t.log({'epoch': 0}); t.log({'epoch': 1}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert [row["epoch"] for row in read_metrics(tmp_path)] == [0, 1]


def test_samples_carry_prompt_and_seed(tmp_path: Path) -> None:
    images = torch.zeros(2, 3, 4, 6)
    images[0, 0] = 1.0
    images[1] = 0.5
    images[1, 2] = 1.7  # clamped
    prompts = ['the word "kup" in red', "ein Würfel 立方体" + "x" * 99]
    paths = save_samples(tmp_path, 7, images, prompts, [11, 2**62])
    assert [path.parent for path in paths] == [tmp_path / "samples" / "epoch-0007"] * 2
    assert paths[0].name == "00-the-word-kup-in-red.png"
    assert len(paths[1].name) <= 55
    for path, prompt, seed in zip(paths, prompts, (11, 2**62), strict=True):
        with Image.open(path) as image:
            assert image.size == (6, 4)
            assert image.text == {"prompt": prompt, "seed": str(seed)}  # type: ignore[attr-defined]
    assert np.asarray(Image.open(paths[0]))[0, 0].tolist() == [255, 0, 0]
    assert np.asarray(Image.open(paths[1]))[0, 0].tolist() == [128, 128, 255]
    assert [path.name for path in paths[0].parent.iterdir() if path.suffix != ".png"] == []


def test_environment_lists_every_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/opt/bin/diffrl", "train", "my config.yaml"])
    record_environment(tmp_path, processes=2)
    record_environment(tmp_path)
    first, second = json.loads((tmp_path / "environment.json").read_text())
    assert first["command"] == "diffrl train 'my config.yaml'"
    assert first["processes"] == 2 and "processes" not in second
    for words in ([], [""]):  # of a program that holds an interpreter, and of a prompt
        monkeypatch.setattr(sys, "argv", words)
        record_environment(tmp_path)
        assert json.loads((tmp_path / "environment.json").read_text())[-1]["command"] == "python"
    assert first["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]


class Told:
    """A run's metrics file and its trackers: lines that are written reach them, and pictures."""

    def __init__(self, tracker: Tracker, outside: trackers.Trackers) -> None:
        self.tracker, self.outside = tracker, outside

    def log(self, metrics: Mapping[str, Any]) -> None:
        if (line := self.tracker.log(metrics)) is not None:
            self.outside.on_line(line)

    def image(self, epoch: int, color: str, caption: str) -> None:
        Image.new("RGB", (5, 4), color).save(self.tracker.run_dir / "one.png")
        self.outside.on_samples(epoch, [self.tracker.run_dir / "one.png"], [caption])


@contextmanager
def told(folder: Path, names: Sequence[str], config: Mapping[str, Any] | None = None) -> Iterator[Told]:
    outside = trackers.Trackers(names, folder, config or {})
    outside.before_run()
    with Tracker(folder) as tracker:
        yield Told(tracker, outside)
    assert outside.after_run(None) == ()


def test_a_tracker_of_another_package_gets_all_and_its_pictures_are_closed(
    installed, config_file, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Book:
        pages: list[Any] = []  # noqa: RUF012

        def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
            self.pages.append((run_dir, config["epochs"]))

        def log(self, epoch: int, numbers: Mapping[str, float]) -> None:
            self.pages.append((epoch, dict(numbers)))

        def images(self, epoch: int, images: Sequence[Image.Image], captions: Sequence[str]) -> None:
            self.pages.extend((epoch, one, one.size, caption) for one, caption in zip(images, captions, strict=True))

        def close(self) -> None:
            self.pages.append("closed")

    monkeypatch.setitem(sys.modules, "of_a_stranger", SimpleNamespace(Book=Book))
    path = config_file(tracking={"trackers": ["book"]})
    with pytest.raises(UserError, match=r'tracking.trackers: unknown tracker "book"'):
        load_config(path)
    installed("book", "of_a_stranger:Book", "diffrl.trackers")
    config = load_config(path)
    with told(tmp_path, config.tracking.trackers, config.resolved()) as run:
        run.image(0, "red", "a red square")
        run.log({"epoch": 0, "loss": 0.5, "alarm/x": "text"})
    start, (_, picture, size, caption), line, end = Book.pages
    assert start == (tmp_path, config.epochs) and end == "closed"
    assert (size, caption) == ((5, 4), "a red square") and picture.fp is None
    assert line == (0, {"epoch": 0, "loss": 0.5})


def test_a_check_of_another_package_is_asked(installed, config_file, monkeypatch: pytest.MonkeyPatch) -> None:
    def even(config: Config) -> None:
        if config.seed % 2:
            raise Problem("seed", "odd ones bring bad luck")

    monkeypatch.setitem(sys.modules, "of_a_stranger", SimpleNamespace(even=even))
    installed("even", "of_a_stranger:even", "diffrl.checks")
    load_config(config_file(seed=2))
    with pytest.raises(UserError, match="seed: odd ones bring bad luck"):
        load_config(config_file(seed=3))


def test_tensorboard_gets_scalars_and_images(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with told(tmp_path, ["tensorboard"]) as run:
        run.log({"epoch": 3, "reward/clip": 0.25, "loss": float("nan")})
        run.log({"epoch": 3, "reward/clip": 9.0})  # already written
        run.image(3, "red", "a red circle")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/clip")] == [(3, 0.25)]
    assert "loss" not in events.Tags()["scalars"]
    (image,) = events.Images("samples/00-a-red-circle")
    assert (image.width, image.height) == (5, 4)


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    PartialState()  # accelerate's trackers write their own log by it
    monkeypatch.setenv("WANDB_MODE", "offline")
    with told(tmp_path, ["wandb"], {"seed": 3}) as run:
        run.log({"epoch": 0, "loss": 0.5})
        run.image(0, "black", "a red circle")
    (written,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    identity = (tmp_path / "wandb" / "run-id.txt").read_text().strip()
    assert written.name == f"run-{identity}.wandb"
    assert written.stat().st_size > 0
    assert list(written.parent.glob("files/media/images/images_*.png"))


@pytest.mark.parametrize("extra", ["wandb", "tensorboard"])
def test_a_missing_tracker_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(UserError, match=rf'{extra} is not installed: pip install "diffrl\[{extra}\]"'):
        trackers.Trackers([extra], tmp_path, {}).before_run()


def test_outside_trackers_are_not_imported_unasked(tmp_path: Path) -> None:
    code = (
        "import sys; from diffrl.records.tracking import Tracker; Tracker(sys.argv[1]).log({'epoch': 0});"
        "print([m for m in ('wandb', 'tensorboard', 'torch', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- the terminal --------------------------------------------------------------------------------------------------

NAMES = ["clip", "aesthetic_laion", "ocr"]


def epochs(number: int, names: list[str]) -> list[dict[str, Any]]:
    rows = []
    for epoch in range(1, number + 1):
        row: dict[str, Any] = {"epoch": epoch, "samples": epoch * 1152, "diversity": 0.412, "seconds": 10.0}
        row |= {"seconds/rollout": 5.0, "seconds/reward": 1.25, "seconds/optimise": 3.5}
        row |= {f"reward/{name}": 0.3 + 0.01 * epoch for name in names}
        if epoch in (1, 6):
            row |= {"eval/playground": 0.4 + 0.02 * epoch, "eval/diversity": 0.5}
        rows.append(row)
    return rows


def shown(width: int, names: list[str], number: int = 9) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    table = ProgressTable(40, names, title="runs/clip", console=console)
    for row in epochs(number, names):
        table.add(row)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


def test_three_rewards_fit_80_columns() -> None:
    lines = shown(80, NAMES)
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    header = next(line for line in lines if "epoch " in line)
    assert header.split() == ["epoch", "images", "clip", "aesthetic_l…", "ocr", "diversity", "s/epoch"]
    assert " 9/40   10.4k  0.390 +0.080  0.390 +0.080  0.390 +0.080      0.412     10.0" in text
    assert " 1/40" not in text and " 2/40" in text  # the last eight epochs
    assert "held out, epoch 6:" in text and "playground 0.520 +0.100" in text
    assert "rollout 5.0, reward 1.2, optimise 3.5, other 0.2" in text and "5:10 to go" in text


def test_narrow_terminals_lose_changes_then_rewards() -> None:
    lines = shown(60, NAMES)
    assert any(" 9/40   10.4k    0.390    0.390    0.390      0.412     10.0" in line for line in lines)
    lines = shown(60, [f"reward{i}" for i in range(7)])
    assert all(len(line) <= 60 for line in lines)
    assert any("and 4 more rewards in metrics.jsonl" in line for line in lines)


def test_plain_lines_when_not_a_terminal() -> None:
    file = io.StringIO()
    rows = epochs(7, ["clip"])
    rows[4]["reward/clip"] = None
    with ProgressTable(40, ["clip"], console=Console(width=80, file=file), history=rows[:4]) as table:
        table.status("sampling 1/2")
        for row in rows[4:]:
            table.add(row)
    lines = file.getvalue().splitlines()
    assert len(lines) == 4 and all(len(line) <= 120 for line in lines)
    assert lines[0].startswith("epoch 5/40  images 5.8k  clip -  diversity 0.412  10.0 s")
    assert lines[1] == ("epoch 6/40  images 6.9k  clip 0.360 (+0.050)  diversity 0.412  10.0 s  ETA 5:40")
    assert lines[2] == "  held out: playground 0.520 (+0.100), diversity 0.500 (+0.000)"
    file.getvalue().encode("ascii")  # logs are read with anything


def test_a_log_says_what_the_first_minute_is_for() -> None:
    file = io.StringIO()
    with ProgressTable(40, ["clip"], title="runs/my", console=Console(width=80, file=file)) as table:
        table.status("evaluating")
        table.add(epochs(1, ["clip"])[0])
        table.status("sampling 96/192")
    lines = file.getvalue().splitlines()
    assert lines[0] == "evaluating ..." and lines[1].startswith("epoch 1/40") and len(lines) == 3


def test_live_table_draws_and_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    with ProgressTable(40, ["clip"], console=console) as table:
        table.status("sampling 96/192")
        for row in epochs(2, ["clip"]):
            table.add(row)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "sampling 96/192" in text
    assert "sampling" not in text[text.rindex("images") :]  # the last frame is only the table
    assert "2/40" in text[text.rindex("images") :]


def test_summary_says_what_changed() -> None:
    first = {"epoch": 0, "samples": 0, "eval/diversity": 0.5, "eval/gold": 0.4, "eval/clip": 0.25, "eval/gone": None}
    last = {"epoch": 40, "samples": 46080, "eval/diversity": 0.45, "eval/gold": 0.4, "eval/clip": 0.375, "eval/gone": 1}
    console = Console(width=80, file=io.StringIO())
    console.print(summary(first, last, trained=["clip"]))
    lines = [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert lines[0] == ["After", "40", "epochs", "and", "46,080", "images:"]
    assert lines[3] == ["clip", "0.250", "0.375", "+0.125", "trained"]
    assert lines[4] == ["gold", "0.400", "0.400", "+0.000"]
    assert lines[5] == ["diversity", "0.500", "0.450", "-0.050"]
    assert " ".join(word for line in lines[7:] for word in line) == (
        "clip +0.125; diversity 90% of the untrained model's (0.50 to 0.45)."
    ), "of no value is known what the choice of prompts explains"


def test_lower_is_better_is_green_when_it_falls() -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="standard")
    first, last = {"epoch": 0, "eval/fid": 0.5, "eval/gold": 0.5}, {"epoch": 1, "eval/fid": 0.4, "eval/gold": 0.4}
    held = HeldOut()
    for epoch, value in ((0, 0.5), (1, 0.4)):
        held.add(epoch, {"fid": [value, value], "gold": [value, value]})
    console.print(summary(first, last, trained=["gold"], lower={"fid"}, held=held))
    table = ProgressTable(1, [], console=console, history=[first], lower={"fid"})
    table.metrics.append(last)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    green, red = "\x1b[32m", "\x1b[31m"
    fid, gold = (next(line for line in text.splitlines() if line.startswith(name)) for name in ("fid", "gold"))
    assert f"{green}-0.100" in fid and "lower is better" in fid
    assert f"{red}-0.100" in gold and "trained" in gold
    assert f"fid 0.400{green} -0.100" in text and f"gold 0.400{red} -0.100" in text


def test_an_epochs_lines_stay_short_whatever_there_is_to_say() -> None:
    names = [f"a_reward_of_some_length_{i}" for i in range(9)]
    row = {"epoch": 3, "samples": 1152, "seconds": 1234.5, "diversity": 0.4}
    row |= {f"reward/{name}": 0.5 for name in names} | {f"eval/{name}": 0.5 for name in names}
    table = ProgressTable(40, names, console=Console(width=80, file=io.StringIO()), history=[row])
    epoch, held = table.line(row).splitlines()
    assert len(epoch) <= 120 and epoch.endswith("ETA 12:41:16") and "and 8 more" in epoch
    assert len(held) <= 120 and held.startswith("  held out: a_reward_of_some_length_0 0.500, ") and "more" in held


def test_the_end_has_errors_over_prompts_and_says_what_is_noise() -> None:
    held = HeldOut()
    held.add(0, {"gold": [0.2, 0.4, 0.6, 0.8], "clip": [0.1, 0.2, 0.3, 0.4], "turbo/gold": [0.5, 0.5, 0.5, None]})
    held.add(8, {"gold": [0.4, 0.6, 0.7, 0.9], "clip": [0.0, 0.3, 0.2, 0.4], "turbo/gold": [0.2, 0.2, 0.3, None]})
    first = {"epoch": 0, "samples": 0, "eval/gold": 0.5, "eval/clip": 0.25, "eval/turbo/gold": 0.5}
    last = {"epoch": 8, "samples": 96, "eval/gold": 0.65, "eval/clip": 0.225, "eval/turbo/gold": 0.233}
    first |= {"eval/diversity": 0.5, "eval/variety": 1.0, "eval/saturation": 0.1}
    last |= {"eval/diversity": 0.25, "eval/variety": 0.9, "eval/saturation": 0.3}
    console = Console(width=80, file=io.StringIO())
    console.print(summary(first, last, trained=["gold"], held=held))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "0.500 ± 0.129  0.650 ± 0.104  +0.150 ± 0.029" in text.replace("   ", "  ")
    assert " ".join(text.split()).endswith(
        "gold +0.150 ± 0.029 (better); worse: turbo/gold -0.267; variety 90% of the untrained model's (1.00 to 0.90)."
    )
    narrow = Console(width=40, file=io.StringIO())
    narrow.print(summary(first, last, trained=["gold"], held=held))
    lines = narrow.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[0] for line in lines if line.startswith(("gold  ", "clip  ", "turbo/gold  "))] == [
        "gold", "clip", "turbo/gold",
    ], "a value without its name"  # fmt: skip
    plain = Console(width=80, file=io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict"))
    plain.print(summary(first, last, trained=["gold"], held=held))  # a log in the C locale


def test_held_out_values_of_prompts_survive_a_torn_line(tmp_path: Path) -> None:
    held = HeldOut()
    for epoch, value in ((0, 0.5), (8, 0.75), (8, 0.25)):  # the second of an epoch counts
        held.add(epoch, {"gold": [value, None, 2 * value]})
        held.write(tmp_path, epoch)
    with (tmp_path / "held_out.jsonl").open("a") as file:
        file.write('{"epoch": 9, "val')
    assert read_held_out(tmp_path).epochs == held.epochs and set(held.epochs) == {0, 8}
    held.add(16, {"gold": [1.0, None, 0.5]})
    held.write(tmp_path, 16)  # once more room is there
    assert read_held_out(tmp_path).epochs == held.epochs, "the torn line swallows the next one"
    assert read_held_out(tmp_path / "none").epochs == {}
    assert held.change_error("gold", 0, 8) == pytest.approx(0.125)
    assert held.change_error("gold", 0, 9) is None and held.error("gone", 0) is None


def test_short_numbers() -> None:
    assert [count(n) for n in (None, 960, 9216, 999_949, 999_951, 1_250_000)] == [
        "-", "960", "9.2k", "999.9k", "1.00M", "1.25M",
    ]  # fmt: skip
    assert [duration(s) for s in (None, 42.4, 725, 11220)] == ["-", "0:42", "12:05", "3:07:00"]


def test_metrics_are_forced_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    tracker = Tracker(tmp_path)
    monkeypatch.setattr(os, "fsync", synced.append)
    tracker.log({"epoch": 0})
    tracker.close()
    assert len(synced) == 1


def test_accelerate_s_trackers_get_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with told(tmp_path, ["tensorboard"], {"epochs": 2, "lora": {"rank": 4}}) as run:
        run.log({"epoch": 1, "loss": 0.25, "reward/a": 0.5, "alarm/x": "text"})
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("reward/a")] == [(1, 0.5)]
    assert not list(tmp_path.rglob("hparams.yml"))  # it would stand beside the run as another one

    def refuses(*words: object) -> object:
        raise RuntimeError("no login\nmore")

    monkeypatch.setitem(sys.modules["accelerate.tracking"].LOGGER_TYPE_TO_CLASS, "tensorboard", refuses)
    monkeypatch.setattr(refuses, "requires_logging_directory", False, raising=False)
    with pytest.raises(UserError, match=r"tracking: tensorboard could not be started: no login$"):
        trackers._open("tensorboard", tmp_path, {})


def test_a_tracker_that_fails_later_is_named_once_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that goes away for an epoch: all others reach it, and the run's own file has every one."""
    seen: list[Any] = []

    class Flaky:
        requires_logging_directory = False

        def __init__(self, project: str) -> None: ...

        def store_init_configuration(self, values: Mapping[str, Any]) -> None: ...

        def log(self, numbers: Mapping[str, float], step: int) -> None:
            if step == 2:
                raise ConnectionError("gone\nfor now")
            seen.append((step, numbers["loss"]))

        def finish(self) -> None:
            raise OSError

    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "mlflow", Flaky)
    with told(tmp_path, ["mlflow"]) as run:
        for epoch in (1, 2, 3):
            run.log({"epoch": epoch, "loss": 0.5})
    assert seen == [(1, 0.5), (3, 0.5)] and [row["epoch"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("tracking: mlflow failed (ConnectionError: gone for now); the run goes on")
