"""The report and the comparison: self-contained, escaped, complete, and warning when they must."""

from __future__ import annotations

import base64
import io
import itertools
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from html_checker import Checker
from PIL import Image

from diffrl import report
from diffrl.errors import UserError
from diffrl.records.progress import PHASES
from diffrl.records.tracking import Tracker, record_environment, save_samples
from diffrl.report import cards, compare, data
from diffrl.report.cards import lower_by_config
from diffrl.report.data import RunData, read_run
from diffrl.report.page import picture
from diffrl.report.processes import processes
from diffrl.report.sections import _verdict, facts, pick
from diffrl.rewards.protocol import Card

START = {"clip": 0.2, "gold": 0.5, "noise": 0.1}  # of every prompt before training; then two gain more than two others
EVIL = '<script>alert("&amp;")</script>'


def make_run(
    folder: Path, hack: bool = False, epochs: int = 6, prompts: tuple[str, ...] = ("a red circle", EVIL)
) -> Path:
    """A run that trains `clip` and watches `gold` and `noise` (lower is better); hacked, the watched get worse."""
    folder.mkdir(parents=True)
    table: dict[str, Any] = {"weight": 1.0, "plugin": None, "params": {}}
    config = {"model": "playground", "objective": "nft", "epochs": epochs, "rewards": {"clip": table}}
    config["watch"] = {"gold": table, "noise": table}
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "note": EVIL}))
    record_environment(folder, processes=1)
    held = []
    with Tracker(folder) as tracker:
        for epoch in range(epochs + 1):
            sign = -1 if hack else 1
            row: dict[str, Any] = {"epoch": epoch, "step": 2 * epoch, "samples": 100 * epoch}
            if epoch:
                row |= {"seconds": 10.0, "seconds/rollout": 5.0, "seconds/reward": 1.0, "seconds/optimise": 3.0}
                row |= {
                    "reward/clip": 0.2 + 0.01 * epoch,
                    "reward/clip/std": 0.1,
                    "loss": 2.0,
                    "kl": 10.0 ** (epoch - 9),
                }
                row |= {"grad_norm": None if hack and epoch == 2 else 1.0, "mine/gate": 0.1 * epoch}
                row["diversity"] = 0.4
            if epoch % 2 == 0:
                row |= {"eval/clip": 0.2 + 0.01 * epoch, "eval/gold": 0.5 + sign * 0.01 * epoch}
                row |= {"eval/noise": 0.1 - sign * 0.005 * epoch, "seconds/evaluate": 2.0}
                row["eval/diversity"] = 0.4 - (0.04 if hack else 0.001) * epoch
                each = {name: [a + f * (row[f"eval/{name}"] - a) for f in (0.9, 1.1) * 2] for name, a in START.items()}
                held.append({"epoch": epoch, "values": each})
                pictures, scores = torch.full((len(prompts), 3, 8, 8), epoch / epochs), {"clip": 0.3125, "gold": 0.9}
                save_samples(folder, epoch, pictures, prompts, [7] * len(prompts), [scores] * len(prompts))
            tracker.log(row)
    (folder / "held_out.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in held))
    return folder


@pytest.fixture(autouse=True)
def noise_is_better_low(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed plugin "noise" whose card says that lower is better, and a broken one, "gold"."""
    card = Card("noise", (0, 1), "", "", "", "", "", better="lower")

    def load(name: str) -> type:
        if name == "gold":
            raise UserError("cannot be imported")
        return type("Noise", (), {"card": card})

    monkeypatch.setattr(cards, "available", lambda: {"noise": None, "gold": None})
    monkeypatch.setattr(cards, "load_class", load)


def check(path: Path) -> tuple[str, Checker]:
    text = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert all(url.startswith("data:") for url in checker.loaded)
    assert (
        "http://" not in text
        and "https://" not in text
        and "@import" not in text
        and "url(" not in text.split("</style>")[0]
    )
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in text
    assert checker.seen["script"] == 0 and "alert(" in text, "names from the run are shown, as text"
    assert "&lt;script&gt;alert(&#34;&amp;amp;&#34;)" in text
    assert max(checker.ids.values()) == 1
    assert checker.references <= {f"#{name}" for name in checker.ids}
    return text, checker


def test_report_is_self_contained_and_complete(tmp_path: Path) -> None:
    run = make_run(tmp_path / "my-run")
    path = report.write_report(run)
    assert path == run / "report.html"
    text, checker = check(path)
    assert [name for name in run.iterdir() if name.suffix == ".tmp"] == []
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles == ["Rewards and watched values", "Samples over time", "Optimisation", "Other metrics", "Time", "Run"]
    assert "<h1>my-run</h1>" in text
    assert "nft on playground · 6 epochs · 600 images · 1:08 of training and evaluation" in text
    assert '<b>clip</b> 0.200 → 0.260 (<b class="good">+0.060</b> <span class="error">± 0.003</span>)' in text
    fell = '<b class="good">−0.0300</b> <span class="error">± 0.0017</span>'
    assert f"from 0.100, {fell}; lower is better" in text  # noise fell, which is good
    assert 'class="warning"' not in text
    assert checker.seen["img"] == 2 * 4
    assert text.count("<figcaption>epoch 6 · 0.312</figcaption>") == 2  # the trained reward's score alone
    assert "rollout 44% (0:30)" in text and "evaluate 12% (0:08)" in text and "other 9% (0:06)" in text
    # 4 values with diversity, loss, kl, norm, spread, mine/gate, seconds; and a spark line in each of 4 tiles
    assert checker.seen["svg"] == 4 + 4 + 1 + 1 + 4
    assert "mine/gate" in text


def test_warnings(tmp_path: Path) -> None:
    run = data.read_run(make_run(tmp_path / "run", hack=True))
    texts = data.warnings_of(run)
    assert texts[0] == (
        "Possible reward hacking: gold, which is only watched, fell from 0.500 in epoch 0 to 0.440 in epoch 6, while "
        "the trained clip improved: they have parted in 2 evaluations in a row. Look at the samples."
    )
    assert "noise, which is only watched, rose from 0.100 in epoch 0 to 0.130" in texts[1]
    assert texts[2] == (
        "Guard rail: diversity is 40% of the base model's (0.400 to 0.160; below the limit of 50% since epoch 6): "
        "images of one prompt become alike."
    )
    assert texts[3:] == ["grad_norm was not finite in epoch 2."]
    assert data.warnings_of(data.read_run(make_run(tmp_path / "good"))) == []


def test_hacking_needs_a_rising_proxy_and_a_real_fall(tmp_path: Path) -> None:
    def warned(proxy: list[float], watched: list[float]) -> list[str]:
        rows = [
            {"epoch": i, "samples": i, "eval/clip": a, "eval/gold": b}
            for i, (a, b) in enumerate(zip(proxy, watched, strict=True))
        ]
        return data.warnings_of(data.RunData(tmp_path, "x", rows, {"rewards": {"clip": None}}))

    assert "from 0.600 in epoch 1" in warned([0.1, 0.2, 0.3], [0.5, 0.6, 0.55])[0]
    assert warned([0.1, 0.2, 0.3], [0.5, 0.6, 0.58]) == []  # 3 % below its best: noise
    assert warned([0.3, 0.2, 0.1], [0.5, 0.6, 0.3]) == []  # both fall: something else is wrong
    assert warned([0.1, 0.3, 0.2], [0.5, 0.6, 0.3]) == []  # the proxy has not risen since the best


def test_lower_by_config_never_runs_a_file_of_the_config() -> None:
    config = {"rewards": {"mine": {"plugin": "noise"}, "x": {"plugin": "/tmp/x.py:X"}}, "watch": {"gold": None}}
    assert lower_by_config(config) == {"mine"}


def test_a_method_adds_its_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(run: report.RunData) -> str:
        return f"<section><h2>Mine</h2>last gate {run.series('mine/gate')[1][-1]:.1f}</section>"

    monkeypatch.setattr(report, "sections", [*report.sections, mine])
    text, _ = check(report.write_report(make_run(tmp_path / "run")))
    assert "last gate 0.6" in text
    assert "Other metrics" not in text  # the method's own section has read the only one


def test_a_bare_run_still_has_a_report(tmp_path: Path) -> None:
    """One epoch, no config, no evaluation, no images, a sample that was being written."""
    with Tracker(tmp_path) as tracker:
        tracker.log({"epoch": 1, "samples": 96, "reward/clip": 0.5, "reward/clip/std": 0.1, "loss": float("nan")})
    (tmp_path / "samples" / "epoch-0001").mkdir(parents=True)
    (tmp_path / "samples" / "epoch-0001" / "00-half.png").write_bytes(b"\x89PNG")
    text = report.write_report(tmp_path).read_text()
    assert "clip" in text and "loss was not finite in epoch 1." in text and "Samples" not in text


def test_what_a_start_has_none_of_is_no_row() -> None:
    start = {"command": "diffrl train x", "hub": {}, "device": "cpu", "processes": 1}
    text = facts(RunData(Path("runs/x"), "x", [{"epoch": 1, "step": 2}], {}, starts=[start]))
    assert "device" in text and "processes" in text and "hub" not in text and "{}" not in text


def test_folders_that_are_no_runs_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    good = make_run(tmp_path / "good")
    for bad, text in ((empty, "is not a run's folder"), (tmp_path / "gone", "there is no such run folder")):
        with pytest.raises(UserError, match=f"{bad}.*{text}"):
            report.write_report(bad)
        with pytest.raises(UserError, match=f"{bad}.*{text}"):
            compare.write_comparison([good, bad], tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()
    (good / "config.yaml").write_text("a: [1")
    with pytest.raises(UserError, match=r"good/config.yaml: cannot be read"):
        report.write_report(good)
    (good / "config.yaml").write_text("- 1")
    with pytest.raises(UserError, match="expected a dict, found a list"):
        report.write_report(good)
    for text in ("", "\n", "# all of it is gone\n"):
        (good / "config.yaml").write_text(text)
        with pytest.raises(UserError, match=r"good/config.yaml: the file is empty$"):
            report.write_report(good)


def test_comparison(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run", hack=True)
    out = compare.write_comparison([a, b], tmp_path / "new" / "out.html")
    text, checker = check(out)
    assert "a/run" in text and "b/run" in text  # told apart although both folders are called "run"
    assert text.count("Possible reward hacking") == 2
    row = re.search(r"<tr><th>gold</th>(.*?)</tr>", text)
    assert row is not None
    assert re.findall(r"(?<!± )[−+]?\b\d\.\d{3}", row[1]) == ["0.500", "0.560", "+0.060", "0.500", "0.440", "−0.060"]
    assert checker.seen["svg"] == 2 * 4  # four values, against images and against time
    assert "training time (seconds)" in text
    assert checker.seen["img"] == 2 * 3  # per prompt: the start and each run's last
    with pytest.raises(UserError, match="at least two"):
        compare.write_comparison([a], out)
    with pytest.raises(UserError, match=r"\./a/run|a/run: this run is given twice"):
        compare.write_comparison([a, tmp_path / "b" / ".." / "a" / "run"], out)


def test_a_comparison_says_where_the_drawing_differs(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", hack=True)]
    for run, steps in zip(runs, (6, 10), strict=True):
        config = yaml.safe_load((run / "config.yaml").read_text())
        rollout = {"sampler": "flow_sde", "steps": steps, "guidance_scale": 1.0}
        (run / "config.yaml").write_text(yaml.safe_dump({**config, "rollout": rollout}))
    compare.write_comparison(runs, tmp_path / "ab.html")
    said = "Evaluations draw with another steps (a 6, b 10)"
    assert said in compare.text_of(runs) and "+0.060" in compare.text_of(runs)
    assert said in (tmp_path / "ab.html").read_text()
    compare.write_table(runs, tmp_path / "ab.md")
    table = (tmp_path / "ab.md").read_text()
    assert said in table and "another guidance_scale" not in table and "another sampler" not in table


@pytest.mark.parametrize("share", [None, 0.5, 0.8])
def test_the_limit_is_drawn_where_it_is_judged(tmp_path: Path, share: float | None) -> None:
    config = {"rewards": {"clip": {}}, "guard": {"diversity": share}}
    metrics = [{"epoch": e, "diversity": 0.9, "eval/diversity": 0.4 - e / 10, "eval/clip": 1.0} for e in (0, 2)]
    run = RunData(tmp_path, "run", metrics, config)
    limit = run.limit("diversity")
    assert limit is None if share is None else limit is not None and limit[0] == pytest.approx(share * 0.4)
    assert bool(data.warnings_of(run)) == (limit is not None and limit[0] > 0.2) and run.limit("clip") is None
    for row in metrics:
        row["eval/variety"] = 1.0
    found = run.limit("variety")
    assert run.limit("diversity") is None and (found is None) == (share is None) == (
        not data.warnings_of(run) and not found
    )
    assert RunData(tmp_path, "run", [{"epoch": 1, "diversity": 0.9}], config).limit("diversity") is None


def test_series_skip_what_is_not_finite_and_sum_the_time(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"epoch": 0, "samples": 0, "a": 1.0},
        {"epoch": 1, "samples": 8, "a": None, "seconds": 3.0},
        {"epoch": 2, "samples": 16, "a": 2.5, "seconds": 4.0},
    ]
    run = data.RunData(tmp_path, "x", rows)
    assert run.series("a") == ([0.0, 16.0], [1.0, 2.5])
    assert run.series("a", "elapsed") == ([0.0, 7.0], [1.0, 2.5])
    assert run.ends("a") == (1.0, 2.5)
    assert run.used == {"a"}


def test_a_metric_keeps_its_colour(tmp_path: Path) -> None:
    rows = [{"epoch": 0, "samples": 0, "eval/b": 1.0, "eval/diversity": 1.0, "eval/a": 1.0}]
    run = data.RunData(tmp_path, "x", rows, {"rewards": {"a": {}}})
    assert [run.color(name) for name in ("a", "b", "diversity")] == ["c0", "c1", "c7"]


def test_small_images_are_lossless_and_large_ones_reduced(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 48, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "small.png")
    small = picture(tmp_path / "small.png")
    assert 'class="pixels"' in small and 'width="48" height="64"' in small
    decoded = Image.open(io.BytesIO(base64.b64decode(small.split("base64,")[1].split('"')[0])))
    assert np.array_equal(np.asarray(decoded), pixels)
    Image.new("RGB", (1024, 512), "teal").save(tmp_path / "large.png")
    large = picture(tmp_path / "large.png")
    assert "image/jpeg" in large and 'width="256" height="128"' in large and "pixels" not in large


def test_pick_keeps_first_and_last() -> None:
    assert pick(list(range(5)), 9) == [0, 1, 2, 3, 4]
    chosen = pick(list(range(0, 400, 10)), 9)
    assert len(chosen) == 9 and chosen[0] == 0 and chosen[-1] == 390
    assert {b - a for a, b in itertools.pairwise(chosen)} <= {40, 50}


def test_who_waits_for_whom_is_shown_for_several_processes(tmp_path: Path) -> None:
    """By hand: process 1 needs 3 s more for its images, in two of three epochs; the others wait for it."""
    assert processes(read_run(make_run(tmp_path / "alone"))) == ""
    metrics = []
    for epoch, (slow, fast) in enumerate([(1, 0), (1, 0), (0, 1)], start=1):
        row: dict[str, Any] = {"epoch": epoch, "samples": epoch, "seconds": 20.0, "seconds/wait": 1.5}
        for rank, phases in ((slow, (7, 0, 1, 0, 0.5, 3.5, 0)), (fast, (4, 0, 1, 3, 0.5, 2.5, 1))):
            row |= {f"seconds/process/{rank}/{phase}": value for phase, value in zip(PHASES, phases, strict=True)}
        metrics.append(row)
    metrics.insert(0, {"epoch": 1, "seconds/process/0/rollout": 1.0})  # of the time before a resume, with one process
    shown = processes(RunData(tmp_path, "two", metrics))
    assert "Process 1 had its images last in 2 of 3 epochs; 12.5% of" in shown
    assert shown.count("<tr>") == 2 and shown.count("12.0 s") == 2
    assert 'width: 50.00%; background: var(--rollout)" title="rollout 6.00 s"' in shown, "of process 1, of 12 seconds"


def test_test_prompts_that_are_trained_on_are_told(tmp_path):
    told = [data.warnings_of(data.RunData(tmp_path, "x", [], {"prompts": {"overlap": on}})) for on in (True, False)]
    assert any("prompts.overlap is on" in text for text in told[0]) and not told[1]
    metrics = [{"epoch": epoch, "samples": epoch, "eval/a": 0.2} for epoch in (0, 1)]
    for on, said in ((True, "On test prompts: "), (False, "On prompts that were not trained on: ")):
        config = {"prompts": {"overlap": on}, "rewards": {"a": {"weight": 1}}}
        assert said in _verdict(data.RunData(tmp_path, "x", metrics, config))


@pytest.mark.parametrize("cut", [0, 10, 60, -30])
def test_a_torn_picture_is_named_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """What a crash of the machine leaves ended every resume at its first report."""
    monkeypatch.setattr(logging.getLogger("diffrl"), "propagate", True)
    run = make_run(tmp_path / "run")
    torn = sorted(run.glob("samples/epoch-*/*.png"))[0]
    torn.write_bytes(torn.read_bytes()[:cut])
    page = report.write_report(run).read_text()
    assert str(torn) in caplog.text and "not a readable picture" in caplog.text
    assert page.count("data:image/") > 0 and page.endswith("</html>\n")


def test_sample_pictures_are_forced_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: (synced.append(os.readlink(f"/proc/self/fd/{handle}")), real(handle))
    )
    paths = save_samples(tmp_path, 1, torch.rand(2, 3, 8, 8), ["a", "lone \ud800"], [0, 0])
    assert [Path(name).name for name in synced] == [f".{path.name}.tmp" for path in paths]


ROW = {"prompt": "a", "member": 0, "uncertainty": 0.5, "penalised": True, "scores": {"proxy": 1.0}}


@pytest.mark.parametrize(
    "rows",
    [
        {},
        [1],
        [{}],
        [{**ROW, "image": 3}],
        [{**ROW, "image": "/etc/x.png"}],
        [{**ROW, "image": "../../private.png"}],
        [{**ROW, "image": "epoch-0001-00.png", "scores": {"proxy": "x"}}],
        [{**ROW, "image": "epoch-0001-00.png"}],
    ],
)
def test_gardos_table_shows_pictures_of_its_own_folder_only(tmp_path: Path, rows: Any) -> None:
    run, private = make_run(tmp_path / "run"), tmp_path / "private.png"
    Image.new("RGB", (4, 4)).save(private)
    folder = run / "gardo"
    folder.mkdir()
    (folder / "epoch-0001-00.png").symlink_to(private)
    (folder / "epoch-0001.json").write_text(json.dumps(rows))
    with pytest.raises(UserError, match=r"epoch-0001.json: (expected a list|image .* is not a picture of this folder)"):
        report.write_report(run)
    (folder / "epoch-0001-00.png").unlink()
    Image.new("RGB", (4, 4)).save(folder / "epoch-0001-00.png")
    (folder / "epoch-0001.json").write_text(json.dumps([{**ROW, "image": "epoch-0001-00.png"}]))
    assert "the most uncertain images" in report.write_report(run).read_text()


def test_a_strangers_sample_that_is_a_link_is_not_shown(tmp_path: Path) -> None:
    run, private = make_run(tmp_path / "run"), tmp_path / "00-private.png"
    Image.new("RGB", (4, 4)).save(private)
    (run / "samples" / "epoch-0099").mkdir()
    (run / "samples" / "epoch-0099" / "00-x.png").symlink_to(private)
    assert 99 not in {sample.epoch for sample in read_run(run).samples}


UNREADABLE = ("count/unreadable", "turbo/unreadable")


def test_changes_are_coloured_by_good_or_bad_and_only_beyond_noise(tmp_path: Path) -> None:
    from diffrl.records.held_out import HeldOut
    from diffrl.report.data import RunData, warnings_of
    from diffrl.report.sections import signed

    held = HeldOut()
    held.add(0, {"gold": [0.5] * 4, "clip": [0.5] * 4, "saturation": [0.1] * 4} | dict.fromkeys(UNREADABLE, [0.3] * 4))
    after = {"gold": [0.7, 0.6, 0.7, 0.6], "clip": [0.5, 0.5, 0.5, 0.3], "saturation": [0.31, 0.29] * 2}
    held.add(8, after | dict(zip(UNREADABLE, ([0.21, 0.19] * 2, [0.41, 0.39] * 2), strict=True)))
    names = {"gold": (0.5, 0.65), "clip": (0.5, 0.45), "unreadable": (0.3, 0.2), "saturation": (0.1, 0.3)}
    names |= {"count/unreadable": (0.3, 0.2), "turbo/unreadable": (0.3, 0.4), "diversity": (0.4, 0.4)}
    metrics = [{"epoch": 8 * i, **{f"eval/{name}": ends[i] for name, ends in names.items()}} for i in (0, 1)]
    run = RunData(tmp_path, "run", metrics, {"rewards": {"gold": {}}}, held=held)
    shown = {name: signed(run.change(name)) for name in names}
    assert shown["gold"] == '<b class="good">+0.150</b> <span class="error">± 0.029</span>'
    assert shown["clip"] == '<b class="">−0.050</b> <span class="error">± 0.050</span>'
    assert 'class="good"' in shown["count/unreadable"] and 'class="bad"' in shown["turbo/unreadable"]
    assert 'class=""' in shown["saturation"] and 'class=""' in shown["unreadable"], "nothing is known of its prompts"
    assert warnings_of(run) == [], "one prompt of four is no sign of hacking"
    run.held.epochs.clear()
    assert any("Possible reward hacking: clip" in text for text in warnings_of(run))


def test_scores_by_parts_before_and_after(tmp_path: Path) -> None:
    """Of the run and beside another run that has none; parts that no prompt states, and plain values, are left out."""
    from diffrl.records.held_out import HeldOut
    from diffrl.report import parts

    held = HeldOut()
    held.add(0, {"p[color]": [0.5, None, 0.5, 0.5], "p[hat]": [None] * 4, "p": [0.0] * 4, "p[count]": [1, 1, 1, 0]})
    held.add(8, {"p[color]": [0.9, None, 0.8, 1.0], "p[hat]": [None] * 4, "p": [1.0] * 4, "p[count]": [1, 0, 1, 0]})
    run, bare = RunData(tmp_path, "run", [], held=held), RunData(tmp_path, "bare", [])
    text = parts.by_part(run)
    assert re.findall(r"<th>([\w ]+)</th>", text) == ["p", "prompts", "before", "after", "change", "color", "count"]
    assert '<td>3</td><td>0.500</td><td>0.900</td><td><b class="good">+0.400</b> <span class="error">± 0.058' in text
    assert '<b class="">−0.250</b> <span class="error">± 0.250' in text
    assert parts.by_part(bare) == "" and parts.compared([bare]) == ""
    text = parts.compared([run, bare])
    assert "p: color" in text and "0.500 → 0.900" in text and "<td>–</td>" in text
