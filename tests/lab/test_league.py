"""The league's plan: one budget and one judgement for all entries of a track, and what is said of bad input."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from diffrl.config import Config
from diffrl.prompts import Prompt, load_prompts
from diffrl.run.evaluation import evaluation_spec
from diffrl_playground.grammar import parse
from experiments.league import checks
from experiments.league.__main__ import run as main
from experiments.league.checks import _pairs, before_training, excess, fresh_prompts, same, shared_prompts
from experiments.league.experiments import Experiment
from experiments.league.plan import OTHERS, PART, League, read_league
from experiments.league.results import ROOT, commit
from experiments.league.summary import cost_of, lower, spent, summarise

RESULTS = ROOT / "assets" / "results"
MOVES = {"five/weighted_sum": "marble/weighted_sum", "five/advantages": "marble/advantages", "ocr/nft": "ocr"}
MOVES |= {"five/marble": "marble/amortised", "five/marble_fresh": "marble/fresh", "ocr/gardo_ocr": "gardo/ocr_gardo"}


@pytest.fixture(scope="module")
def league() -> League:
    return read_league(others=OTHERS)


@pytest.fixture(scope="module")
def every(league: League) -> dict[str, Experiment]:
    return {one.name: one for one in league.experiments(Path("nowhere"))}


def test_every_entry_gets_its_tracks_images_and_is_judged_alike(
    league: League, every: Mapping[str, Experiment]
) -> None:
    judged: dict[str, list[Any]] = {}
    for name, one in every.items():
        track, _, entry = name.partition("/")
        config, about = one.read, league.tracks[track]
        if league.entries[entry].kind == PART:
            continue
        assert spent(one) + sum(spent(part) for part in one.after.values()) == about.images, name
        values = {*config.rewards, *config.watch}
        assert {value.rpartition("/")[2] for value in (*about.proxy, *about.gold)} <= values, name
        assert set(about.watch) <= values and config.optimise.micro_batch != "auto", name
        names = [evaluation_spec(config), config.prompts.test, sorted(config.evaluate.also), config.evaluate.prompts]
        judged.setdefault(track, names)
        assert judged[track] == names, f"{name} is judged in another way than the rest of its track"
        inside = {*about.shared, *(league.entries[entry].plain.get(value, value) for value in about.shared)}
        assert not inside & {trained for _, trained in _pairs(config, one.league)}, name
        assert Path(one.league["strip"]).suffix == ".webp"
    assert set(judged) == set(league.tracks) == {"verifier", "clip", "ocr", "preference", "five", "turbo"}


def test_a_part_of_an_entry_trains_some_of_the_tracks_proxies_and_passes_its_checks(
    league: League, every: Mapping[str, Experiment]
) -> None:
    parts = [one for name, one in every.items() if league.entries[name.partition("/")[2]].kind == PART]
    assert parts
    for one in parts:
        assert set(one.read.rewards) < set(one.league["proxy"]), one.name
        assert before_training(one.read, one.league, 10).passed, one.name


def test_entries_name_a_page_a_claim_and_at_most_eight_trials(league: League) -> None:
    for name, entry in league.entries.items():
        assert entry.claim or entry.kind == PART, name
        assert name in league.homes or (ROOT / entry.page).is_file(), name
        for one in entry.expects:
            about = league.tracks[one.track]
            assert one.name in (*about.proxy, *about.gold, "variety"), f"{name}: {one.name} is not compared in pairs"
            others = [name] if one.against is None else [name, one.against]
            assert all(league.entries[other].on(one.track) is not None for other in others), name


@pytest.mark.parametrize("method", ["nft", "crd", "grpo", "grpo_guard", "dppo", "awm", "dgpo"])
def test_results_that_are_there_are_the_leagues(method: str, every: Mapping[str, Experiment]) -> None:
    """Finished runs of seven methods on the preference model, with one and with four steps an epoch."""
    for end in ("", "_on_policy"):
        result = json.loads((RESULTS / f"league/preference/{method}{end}.json").read_text())
        assert every[f"preference/{method}{end}"].differences(result) == []


def test_one_or_four_steps_an_epoch_of_as_many_images(every: Mapping[str, Experiment]) -> None:
    """The bases differ in the method alone: as many images, as many optimiser steps of as many of them."""
    for track, images in (("verifier", 6144), ("clip", 6144), ("preference", 12288)):
        for method in ("nft", "crd", "grpo", "grpo_guard", "dppo", "awm", "dgpo"):
            for steps, end in ((4, ""), (1, "_on_policy")):
                config = every[f"{track}/{method}{end}"].read
                assert config.optimiser_steps == steps and config.epochs * config.rollout.images == images
                assert config.epochs * config.optimiser_steps == images // 96
                assert config.epochs // config.evaluate.every == 8


@pytest.mark.parametrize(("name", "file"), MOVES.items())
def test_and_so_are_those_of_the_other_tracks(name: str, file: str, every: Mapping[str, Experiment]) -> None:
    assert every[name].differences(json.loads((RESULTS / f"{file}.json").read_text())) == []


def test_the_summary_has_gains_curves_and_paired_differences(league: League, tmp_path: Path) -> None:
    for name in ("nft", "grpo"):
        place = tmp_path / "league" / "preference" / f"{name}.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(RESULTS / f"league/preference/{name}.json", place)
    some = league.experiments(tmp_path, ["nft", "grpo", "crd"], ["preference"])
    summarise(league, some, tmp_path, "command")
    whole = json.loads((tmp_path / "league.json").read_text())
    first, second = whole["results"]
    runs = json.loads((tmp_path / first["result"]).read_text())["runs"]
    gains = [run["after"]["preference"] - run["before"]["preference"] for run in runs]
    value = first["values"]["preference"]
    assert value["by_seed"] == gains and value["gain"] == pytest.approx(sum(gains) / 3)
    assert (first["entry"], second["entry"]) == ("nft", "grpo") and first["seeds"] == [0, 1, 2]
    assert [point["images"] for point in first["curve"]] == [1536 * i for i in range(9)]
    assert first["cost"] == {"images": 12288, "forwards": None, "seconds": None, "mib": None}
    assert first["variety_kept"]["mean"] == pytest.approx(0.56, abs=0.1) and first["drift"] is None is first["strip"]
    pair = next(pair for pair in whole["paired"] if pair["name"] == "preference")
    assert pair["difference"] == pytest.approx(value["after"] - second["values"]["preference"]["after"])
    assert whole["tracks"]["preference"]["lower_is_better"] == ["artefact", "unreadable"]
    assert whole["left_out"][0] == "preference, CRD: not run"


def test_a_cost_counts_what_an_entry_builds_on(every: Mapping[str, Experiment]) -> None:
    one = every["five/distilled"]
    row = {"setup": {"forwards": 10, "seconds": 1.0}, "image": {"forwards": 2.0, "seconds": 0.5}, "mib": 9}
    costs = dict.fromkeys((one.name, *(part.name for part in one.after.values())), row)
    assert cost_of(one, costs)["whole"] == {"forwards": 60 + 2 * 7200, "seconds": 6 + 0.5 * 7200, "mib": 9}
    assert cost_of(one, {one.name: row})["whole"]["forwards"] is None, "a teacher was not measured"


def test_a_student_has_values_of_its_own_of_which_less_is_better(league: League) -> None:
    assert lower(league.tracks["turbo"]) == ["artefact", "unreadable", "turbo/artefact", "turbo/unreadable"]


def test_other_words_or_another_order_of_them_are_the_same_prompt() -> None:
    test = [Prompt("a red circle left of a blue square"), Prompt("a cat on a mat")]
    assert shared_prompts(["a blue square right of a red circle, dark"], test) == [test[0].text]
    assert shared_prompts(["On a mat: a cat"], test) == [test[1].text]
    assert shared_prompts(["square blue a of left circle red a"], test) == [test[0].text]
    assert not shared_prompts(["a blue square left of a red circle", "a dog on a mat"], test)


def test_fresh_prompts_are_in_no_list_and_follow_from_the_secret() -> None:
    source = "playground/compositional/test"
    one, again, other = (fresh_prompts(source, 40, secret) for secret in (7, 7, 8))
    assert one == again != other and len(one) == 40
    listed = {p.text for split in ("train", "validation", "test") for p in load_prompts(source.replace("test", split))}
    assert not listed & {*one} and {parse(text).split() for text in one} == {"test"}
    assert fresh_prompts("mine.txt", 40, 7) == []


def test_a_gain_on_the_known_alone_has_a_small_p() -> None:
    generator = torch.Generator().manual_seed(0)
    known, fresh = (torch.randn(200, generator=generator) for _ in range(2))
    assert (excess(known, fresh)["p"] or 0) > 0.01 > checks.LEVEL > (excess(known + 1, fresh)["p"] or 0)
    assert excess(torch.zeros(5), torch.zeros(5))["p"] is None


LEAK = """
{imports}
class Leak:
    name = "leak"
    def __init__(self, seed: int = 0): ...
    def __call__(self, images, prompts, metadata): ...
"""


@pytest.mark.parametrize(
    ("plugin", "imports", "said"),
    [
        ("clip", "", "one plugin"),
        ("leak", "from diffrl_zoo.clip import Clip", "such that one imports the other"),
        ("leak", "import diffrl_zoo.clip as hidden", "such that one imports the other"),
        ("leak", "", ""),
        ("playground", "", ""),
    ],
)
def test_a_gold_that_is_the_proxy_is_known(plugin: str, imports: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "leak.py"
    file.write_text(LEAK.format(imports=imports))
    gold = f"{file}:Leak" if plugin == "leak" else plugin
    config = Config.model_validate({"rewards": {"clip": {}}, "watch": {"gold": {"plugin": gold}}})
    assert same(config, "gold", "clip") == said


def test_a_result_says_the_commit_or_the_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("experiments.league.results.ROOT", tmp_path)
    assert commit().startswith("diffrl ")
    for name in ("pyproject.toml", "diffrl/code.py", "assets/results/a.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
    named = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], [*named, "commit", "-qm", "one"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    clean = commit()
    (tmp_path / "assets/results/a.json").write_text("another")
    assert commit() == clean and not clean.endswith("+"), "results are not what made them"
    (tmp_path / "diffrl/code.py").write_text("another")
    assert commit() == clean + "+"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--methods", "nft,crdd"], 'no method "crdd" (nearest: "crd")'),
        (["run", "--tracks", "preferences"], 'no track "preferences" (nearest: "preference")'),
        (["run", "--tracks", "five", "--methods", "nft"], '"nft" is on none of the tracks five; it is on verifier,'),
        (["run", "--others", "none"], "--others: no folder none"),
        (["check"], "name a RESULT.json or --entry TRACK/NAME"),
        (["check", "none.json"], '"none.json" is not a result'),
        (["check", "--entry", "clip/nfft"], 'no entry "clip/nfft" (nearest: "clip/nft")'),
        (["cost", "--methods", "nfft"], 'no method "nfft"'),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


TRACKS = """t:
  shows: a track
  images: 16
  minutes: 1
  proxy: [clip]
  gold: [strict]
  evaluations: 2
  prompts: 4
  per_prompt: 2
  rewards: {clip: {}}
  watch: {strict: {plugin: playground, mode: strict}}
"""
ENTRY = "e: {config: configs/playground/nft.yaml, kind: base, claim: it learns, trials: 0, tracks: [t]}\n"


@pytest.mark.parametrize(
    ("tracks", "entries", "said"),
    [
        (TRACKS, "e: {config: [", "entries.yaml:1: not valid YAML"),
        (TRACKS, ENTRY.replace("trials", "trails"), 'entries.yaml:1: e.trails: unknown key (nearest: "trials")'),
        (TRACKS, ENTRY.replace("trials: 0", "trials: 9"), "entries.yaml:1: e.trials: input should be less than or"),
        (TRACKS, ENTRY.replace("[t]", "[tt]"), 'e: no track "tt"'),
        (TRACKS.replace("images: 16", "images: many"), ENTRY, "tracks.yaml:3: t.images: input should be a valid"),
        (
            TRACKS.replace("per_prompt: 2", "per_prompt: 4"),
            ENTRY.replace("kind: base", "kind: search"),
            "search: 16 images are not two for each of 4 x 4 judged ones",
        ),
        (TRACKS, ENTRY, "t/e: 16 images are no whole number of epochs of 384"),
        (TRACKS.replace("rewards: {clip: {}}", "rewards: {clipp: {}}"), ENTRY, "t/e: command line: "),
        ("t: 3\n", ENTRY, "tracks.yaml:1: t: expected keys and values, got 3"),
        (TRACKS, "", "nothing to run"),
    ],
)
def test_a_broken_plan_is_one_line(
    tracks: str, entries: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tracks.yaml").write_text(tracks)
    (tmp_path / "entries.yaml").write_text(entries)
    assert main(["run", "--league", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_somebody_elses_entry_takes_part(every: Mapping[str, Experiment], league: League) -> None:
    """Its config names its folder by a word, so that a result counts on another machine."""
    one = every["clip/example"]
    asked = one.asked()
    assert asked["config"]["objective"] == "HERE/exponential.py:Exponential" and str(ROOT) not in json.dumps(asked)
    assert one.differences({**asked, "runs": []}) == []
    assert str(league.homes["example"]) in " ".join(one.placed(one.overrides, {}))
