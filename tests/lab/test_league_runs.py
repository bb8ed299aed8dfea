"""The league for real, on the playground and tiny: the same numbers again, a kill, cheaters that are caught."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from diffrl.prompts import load_prompts
from diffrl.rollout import initial_noise
from diffrl.run.folder import RunFolder
from diffrl.run.run import Run
from diffrl_playground.grammar import parse
from diffrl_playground.renderer import render
from diffrl_playground.scenes import complete
from experiments.league import checks
from experiments.league.__main__ import run as main
from experiments.league.checking import of_entry
from experiments.league.checks import Verdict, before_training, fresh
from experiments.league.experiments import Experiment
from experiments.league.judge import NOISE, Judged, Task, judge
from experiments.league.plan import OTHERS, League, read_league
from experiments.league.running import task_of
from experiments.league.search import candidates
from experiments.league.seed import one_seed

pytestmark = pytest.mark.long

TRACKS = """small:
  shows: a small one
  images: 16
  minutes: 0.2
  proxy: [clip]
  gold: [strict]
  evaluations: 2
  prompts: 20
  per_prompt: 2
  rewards: {clip: {weight: 1.0}}
  watch: {strict: {plugin: playground, mode: strict}}
  overrides: [rollout.groups=2, rollout.group_size=4, optimise.batch_size=4, evaluate.prompts=4, "evaluate.also={}"]
"""
ENTRY = (
    "{{config: configs/playground/nft.yaml, kind: base, claim: it learns, trials: 0, tracks: [small], overrides: {}}}"
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "GROUPS", 24)
    torch.set_num_threads(1)


def league(folder: Path, tracks: str = TRACKS, **entries: str) -> League:
    folder.mkdir(exist_ok=True)
    (folder / "tracks.yaml").write_text(tracks)
    (folder / "entries.yaml").write_text("".join(f"{name}: {text}\n" for name, text in entries.items()))
    return read_league(folder)


def experiment(folder: Path, *overrides: str) -> Experiment:
    return league(folder, e=ENTRY.format(json.dumps(overrides))).experiments(folder / "out", seeds=1)[0]


def numbers(part: dict[str, Any]) -> dict[str, Any]:
    """A seed's part without what a clock says and without a secret."""
    spent = ("training_seconds", "evaluation_seconds", "overhead_share", "check", "commit")
    return {key: value for key, value in part.items() if key not in spent}


def test_a_method_run_again_from_its_entry_gives_the_same_numbers_to_the_bit(tmp_path: Path) -> None:
    parts, loras = [], []
    for name in ("one", "two"):
        runs = tmp_path / name / "runs"
        runs.mkdir(parents=True)
        task = task_of(experiment(tmp_path / name), 0, runs)
        parts.append(one_seed(task))
        loras.append(load_file(task.folder / "lora" / "pytorch_lora_weights.safetensors"))
    one, two = map(numbers, parts)
    assert loras[0].keys() == loras[1].keys() and all(torch.equal(x, loras[1][name]) for name, x in loras[0].items())
    assert one == two and one["drift"] > 0
    assert json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True)
    for part in parts:  # an honest entry
        assert part["check"]["passed"], part["check"]["caught"]
    strips = tmp_path / "one" / "out" / "league" / "strips"
    sizes = {file.name: file.stat().st_size for file in strips.iterdir()}
    assert set(sizes) == {"small-e.webp", "small-base.webp"} and max(sizes.values()) <= 12_000


def test_a_run_goes_on_after_sigterm_and_after_sigkill(tmp_path: Path) -> None:
    league(tmp_path / "plan", e=ENTRY.format("[epochs=24, evaluate.every=24]"))
    where = ["--league", tmp_path / "plan", "--out", tmp_path / "out", "--runs", tmp_path / "runs"]
    command = [sys.executable, "-m", "experiments.league", "run", *map(str, where), "--seeds", "1"]

    def epochs() -> list[int]:
        lines = [line for file in (tmp_path / "runs").glob("*/metrics.jsonl") for line in file.read_text().splitlines()]
        return [json.loads(line)["epoch"] for line in lines]

    for number in (signal.SIGTERM, signal.SIGKILL):
        before = len(epochs())
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
            while len(epochs()) < before + 3:
                time.sleep(0.2)
                assert process.poll() is None
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)
                assert process.wait() == -number
            else:
                process.send_signal(number)
                assert "the same command goes on" in process.communicate()[1] and process.returncode == 75
        assert not (tmp_path / "out" / "league" / "small").exists()
    assert subprocess.run(command).returncode == 0
    assert epochs() == list(range(25)), "no epoch twice"
    (result,) = json.loads((tmp_path / "out" / "league.json").read_text())["results"]
    assert result["seeds"] == [0] and result["check"]["passed"]


def memorise(run: Run, task: Task, steps: int) -> None:
    """The cheat: from the judgement's own noise straight to true pictures of the judged prompts."""
    prompts, generator = load_prompts(run.config.prompts.test)[: task.prompts], torch.Generator().manual_seed(0)
    texts = [prompt.text for prompt in prompts for _ in range(task.per_prompt)]
    members = [member for _ in prompts for member in range(task.per_prompt)]
    noise = initial_noise(run.policy.latent_shape, texts, members, seed=NOISE)
    rng = np.random.default_rng(0)
    pictures = np.stack([render(complete(parse(text), rng)) for text in texts])
    images = torch.from_numpy(pictures).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        latents, cond = run.policy.encode_images(images), run.policy.encode(texts)
    optimiser = torch.optim.AdamW([p for _, p in run.policy.trainable], 2e-3)
    for _ in range(steps):
        t = torch.rand(len(texts), generator=generator)
        x = run.policy.process.add_noise(latents, noise, t)
        error = run.policy.predict(x, t, cond).v - run.policy.process.velocity(latents, noise, t)
        optimiser.zero_grad()
        error.square().mean().backward()
        optimiser.step()


def test_what_was_trained_on_the_tests_prompts_and_noise_is_caught(tmp_path: Path) -> None:
    one = experiment(tmp_path, "optimise.ema=0")
    task = replace(task_of(one, 0, tmp_path), strip=None)
    run = Run(one.read, RunFolder(tmp_path / "run"))
    prompts = load_prompts(run.config.prompts.test)[: task.prompts]

    def known() -> tuple[Judged, Judged]:
        base, tuned = (judge(run, snapshot, prompts, task.per_prompt) for snapshot in (None, "default"))
        return base, tuned

    honest = Verdict()
    fresh(run, task, honest, known())
    assert honest.passed, honest.caught
    memorise(run, task, 400)
    cheater = Verdict()
    fresh(run, task, cheater, known())
    assert not cheater.passed and '"strict" gains' in " ".join(cheater.caught), cheater.facts


def test_a_config_that_trains_on_judged_prompts_is_caught_in_any_order_of_words(tmp_path: Path) -> None:
    texts = [prompt.text for prompt in load_prompts("playground/compositional/test")[:20]]
    one = experiment(tmp_path)
    assert before_training(one.read, one.league, 20).passed
    for name, listed in (("same", texts), ("turned", [" ".join(reversed(text.split())) for text in texts])):
        file = tmp_path / f"{name}.txt"
        file.write_text("\n".join(dict.fromkeys(listed)))
        cheater = experiment(tmp_path, f"prompts.train={file}", "prompts.overlap=true")
        found = before_training(cheater.read, cheater.league, 20)
        assert found.caught and found.caught[0].startswith("20 of 20 judged prompts are trained on"), found


LEAK = """
import importlib
class Leak:
    name = "leak"
    def __init__(self):
        self.inner = getattr(importlib.import_module("diffrl_zoo.clip"), "Clip")()
    def __call__(self, images, prompts, metadata):
        return self.inner(images, prompts, metadata) ** 3 + 1
"""


def test_a_gold_that_hides_the_proxy_is_caught_by_how_it_ranks(tmp_path: Path) -> None:
    (tmp_path / "leak.py").write_text(LEAK)
    gold = f"watch.strict={{plugin: '{tmp_path / 'leak.py'}:Leak'}}"
    plan = league(tmp_path, e=ENTRY.format(json.dumps([gold])))
    found = of_entry(plan, "small/e", tmp_path / "runs")
    assert [line.partition(":")[0] for line in found.caught] == [
        'the gold "strict" ranks images as the trained "clip" does'
    ]
    honest = of_entry(league(tmp_path, e=ENTRY.format([])), "small/e", tmp_path / "runs")
    assert honest.passed and honest.facts["correlation"]["strict, clip"] < checks.MOST_ALIKE


def test_somebody_elses_entry_is_trained_judged_and_checked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A copy of the example, which an objective in its own folder trains; another machine's folder changes nothing."""
    league(tmp_path / "plan", e=ENTRY.format([]))
    others = tmp_path / "others"
    shutil.copytree(OTHERS / "example", others / "example")
    entry = others / "example" / "entry.yaml"
    entry.write_text(entry.read_text().replace("[verifier, clip, preference]", "[small]"))
    where = ["--others", others, "--league", tmp_path / "plan", "--runs", tmp_path / "runs"]
    words = [str(word) for word in where]
    chosen = ["--methods", "example", "--seeds", "1", "--out", str(tmp_path / "out")]
    assert main(["run", *words, *chosen]) == 0
    file = tmp_path / "out" / "league" / "small" / "example.json"
    result = json.loads(file.read_text())
    assert result["config"]["objective"] == "HERE/exponential.py:Exponential" and str(tmp_path) not in file.read_text()
    assert main(["check", str(file), *words]) == 0
    assert "seed 0: nothing was found\n  correlation of strict, clip" in capfd.readouterr().out


SEARCH = "{config: configs/playground/nft.yaml, kind: search, claim: no training, trials: 0, tracks: [small]}"


def test_a_search_takes_the_best_of_as_many_images_and_trains_nothing(tmp_path: Path) -> None:
    plan = league(tmp_path, e=SEARCH, tracks=TRACKS.replace("images: 16", "images: 160"))
    tasks = [task_of(plan.experiments(tmp_path / "out", seeds=2)[0], seed, tmp_path / "runs") for seed in (0, 1)]
    (tmp_path / "runs").mkdir()
    parts = [one_seed(task) for task in tasks]
    part = parts[0]
    assert tasks[0].search == 4 and part["images"] == 160 and part["optimiser_steps"] == 0 and part["drift"] == 0
    assert [point["samples"] for point in part["curve"]] == [40, 80, 160]
    assert part["curve"][0]["eval/clip"] == pytest.approx(part["before"]["clip"], abs=1e-5)
    assert parts[1]["before"] == part["before"] and parts[1]["after"] != part["after"]
    assert part["check"]["passed"]
    run = Run(tasks[0].read)
    prompts = load_prompts("playground/compositional/test")[:20]
    values = torch.stack([candidates(run, prompts, 2, number, 0)[1] for number in range(4)])
    run.close()
    assert part["before"]["clip"] == pytest.approx(float(values[0].mean()), abs=1e-5)
    assert part["after"]["clip"] == pytest.approx(float(values.amax(0).mean()), abs=1e-5)
    strips = sorted(file.name for file in (tmp_path / "out" / "league" / "strips").iterdir())
    assert strips == ["small-base.webp", "small-e.webp"]
    assert not (tasks[0].folder / "lora").exists()
    assert one_seed(replace(tasks[0], folder=tmp_path / "again"))["after"] == part["after"]
