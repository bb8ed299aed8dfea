"""Train a config with several seeds and write what it did to the held-out prompts, as one JSON.

    python scripts/reproduce.py configs/playground/nft.yaml --seeds 0 1 2 --out assets/results/nft.json
    python scripts/reproduce.py --list                       # the experiments of experiments.yaml, and their state
    python scripts/reproduce.py --all --jobs 2               # all that has not been run as it stands now
    python scripts/reproduce.py --all --only nft gardo/clip  # some of them, by the beginning of their names

Every run is resumable: started again, finished runs are only evaluated and broken ones continue. Base model and trained
LoRA are judged on the same prompts with the same noise, so the test is paired: per prompt, the mean over its images.
The base model is judged once for all seeds, and for all variants that share `--runs`. `--all` goes on where it was
stopped; a seed whose config, prompts, weights and corrections are those of its result is not run again. Each result
says which commit trained it. A result in assets/results is written into the pages' tables, too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiments import RESULTS, ROOT, Experiment, differences, experiments, kept, plain, weights
from scipy import stats

from diffrl import __version__
from diffrl.config import load_config
from diffrl.evaluation import Evaluated, score_policy, summarise
from diffrl.policy import Policy
from diffrl.prompts import load_prompts
from diffrl.records.disk import write_text
from diffrl.records.tracking import read_metrics
from diffrl.rewards.direction import Direction
from diffrl.rollout import SamplerSpec
from diffrl.run.direction import prepare_direction
from diffrl.run.folder import RunFolder
from diffrl.run.interrupt import EXIT_CODE, Interrupted
from diffrl.run.parts import evaluation_spec
from diffrl.run.train import Run, train
from diffrl.sweep.jobs import Job, run_jobs

LOGGED = re.compile("/stopped|/divergence/")  # of a method's own numbers, what goes into a result


def judge(run: Run, snapshot: str | None, prompts: int, per_prompt: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Means (with diversity) and per-prompt scores (P, K) of a snapshot; None is the base model.

    Means on the model's students are called `STUDENT/...`.
    """
    chosen = load_prompts(run.config.prompts.test)[:prompts]

    def on(policy: Policy, spec: SamplerSpec, snapshot: str | None) -> Evaluated:
        return score_policy(
            policy,
            run.judges,
            run.features,
            chosen,
            spec,
            seed=10_000,  # noise that no evaluation during training has seen
            per_prompt=per_prompt,
            batch_size=run.config.rollout.batch_size,
            snapshot=snapshot,
        )

    found = on(run.policy, evaluation_spec(run.config), snapshot)
    means = summarise(run.judges.names, found.scores) | found.breadth()
    for student in run.evaluation.students:
        with student.wearing(run.policy.state(snapshot or "default")) as policy:
            there = on(policy, student.spec, None if snapshot is None else "default")
        values = summarise(run.judges.names, there.scores) | there.breadth()
        means |= {f"{student.name}/{name}": value for name, value in values.items()}
    return means, found.scores.view(len(chosen), per_prompt, -1).nanmean(dim=1)


def judge_base(run: Run, direction: Direction | None, args: argparse.Namespace) -> tuple[dict[str, Any], torch.Tensor]:
    """`judge` of the base model, kept in the runs' folder under everything that it depends on."""
    config = run.config.resolved()
    depends = [config[k] for k in ("model", "rewards", "watch", "prompts", "evaluate")]
    depends += [config["engine"]["base"], [student.name for student in run.evaluation.students]]
    depends += [evaluation_spec(run.config).model_dump(), args.prompts, args.per_prompt, __version__]
    if direction is not None:  # each seed has a corrected reward of its own
        depends += [asdict(direction.identity), direction.vector.tolist()]
    if run.scorer.learning:  # and each seed's has learned something else
        depends += [run.config.seed]
    name = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:16]
    kept = args.runs / f"base-{name}.json"
    if kept.is_file():
        found = json.loads(kept.read_text())
        return found["means"], torch.tensor(found["by_prompt"])
    means, by_prompt = judge(run, None, args.prompts, args.per_prompt)
    temporary = kept.with_suffix(f".{os.getpid()}.tmp")  # its own: two seeds may judge it at once
    temporary.write_text(json.dumps({"means": means, "by_prompt": by_prompt.tolist()}))
    temporary.replace(kept)
    return means, by_prompt


def one_seed(config_path: str, overrides: list[str], seed: int, args: argparse.Namespace) -> dict[str, Any]:
    folder = args.runs / f"{Path(config_path).stem}{args.tag}-{seed}"
    config = load_config(config_path, [*overrides, f"seed={seed}", f"run_dir={folder}"])
    finished = [m["epoch"] for m in read_metrics(folder)][-1:] == [config.epochs]
    if not finished:
        train(config, resume=folder if folder.exists() else None)
    history = read_metrics(folder)
    run = Run(config, RunFolder(folder))
    # What D2-Align's stage 1 has learned in the training is only read here.
    direction = prepare_direction(config, folder, run.policy, run.scorer.rewards, run.spec, run.accelerator)
    run.restore()
    before, base = judge_base(run, direction, args)
    after, tuned = judge(run, run.judged, args.prompts, args.per_prompt)
    tests = {}
    for k, name in enumerate(run.judges.names):
        pairs = (tuned[:, k] - base[:, k]).numpy()
        pairs = pairs[~np.isnan(pairs)]
        tests[name] = float(stats.ttest_1samp(pairs, 0.0).pvalue) if pairs.std() > 0 else 1.0
    seconds = sum(m.get("seconds", 0.0) for m in history)
    overhead = sum(m.get("seconds/overhead", 0.0) for m in history)
    return {
        "seed": seed,
        "commit": commit(),
        "before": before,
        "after": after,
        "p_value_paired_over_prompts": tests,
        "images": history[-1]["samples"],
        "forwards": sum(m.get("rollout/forwards", 0) for m in history),  # of the network in the rollouts, by images
        "optimiser_steps": history[-1]["step"],
        "training_seconds": round(seconds, 1),
        "evaluation_seconds": round(sum(m.get("seconds/evaluate", 0.0) for m in history), 1),
        "overhead_share": round(overhead / seconds, 4) if seconds else None,
        "logged": {name: over_epochs(history, name) for name in history[-1] if LOGGED.search(name)},
        "curve": [
            {
                "samples": m["samples"],
                **{k: round(v, 5) for k, v in m.items() if k.startswith("eval/") and v is not None},
            }
            for m in history
            if "eval/diversity" in m
        ],
    }


def over_epochs(history: list[dict[str, Any]], name: str) -> float | None:
    """The mean of what a method logs; None: in no epoch."""
    values = [m[name] for m in history if m.get(name) is not None]
    return float(np.mean(values)) if values else None


def commit() -> str:
    """The checkout's commit, with "+" where files differ from it; "" outside of one."""
    done = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def result_of(
    runs: list[dict[str, Any]], command: str, config: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """What is written: the runs, and over them the mean before and after, the gain and its deviation."""
    table = {}
    for name in [n for n in runs[0]["after"] if runs[0]["after"][n] is not None]:
        before, after = (np.array([run[side][name] for run in runs]) for side in ("before", "after"))
        gain = after - before
        spread = float(gain.std(ddof=1)) if len(runs) > 1 else None
        row: dict[str, float | None] = {
            "before": float(before.mean()),
            "after": float(after.mean()),
            "gain": float(gain.mean()),
        }
        table[name] = row | {"gain_std": spread}
    return {
        "command": command,
        "diffrl_version": __version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        **settings,  # prompts, per_prompt: of the judgement; code: the last correction
        "weights": weights(),
        "config": plain(config),
        "summary": table,
        "runs": runs,
    }


def write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(result, indent=1) + "\n")


def state_of(experiment: Experiment) -> tuple[str, float]:
    """In a word how far it is, and the minutes of one core that are left."""
    done = kept(experiment)
    left = experiment.minutes * (len(experiment.seeds) - len(done))
    if not left:
        return "done", 0.0
    if done:
        return f"{len(done)} of {len(experiment.seeds)}", left
    if not experiment.out.is_file():
        return "not run", left
    return f"other {' and '.join(differences(experiment, json.loads(experiment.out.read_text())))}", left


def show(chosen: list[Experiment]) -> None:
    rows = [(experiment, *state_of(experiment)) for experiment in chosen]
    for experiment, state, left in rows:
        print(f"{experiment.name:<28} {state:<14} {left:6.0f} min  {experiment.shows}")
    print(f"{sum(left for *_, left in rows) / 60:.1f} hours of one core are left")


def run_all(chosen: list[Experiment], jobs: int, runs: Path) -> int:
    """Run what is left, `jobs` seeds at a time with one thread each; returns how many failed."""
    waiting = [(e, seed) for e in chosen for seed in sorted({*e.seeds} - kept(e).keys())]
    failed = 0
    for later in (False, True):  # what builds on others waits for all of them
        part = [job_of(e, seed, runs) for e, seed in waiting if bool(e.after) == later]
        failed += len(run_jobs(part, jobs, one_thread=True, report=lambda line: print(line, flush=True)))
    return failed


def job_of(experiment: Experiment, seed: int, runs: Path) -> Job:
    """Train and judge a seed in a process of its own, and add it to the experiment's result."""
    # One folder for all: a base model that several of them share is judged once.
    tag = f"-{experiment.name_of(seed)}"
    places = {word: str(one.folder(seed, runs)) for word, one in experiment.after.items()}
    part = runs / f"part{tag}-{seed}.json"
    settings = [f"--{key.replace('_', '-')}={value}" for key, value in experiment.settings.items()]
    command = [sys.executable, __file__, str(ROOT / experiment.config), *settings]
    command += [replaced(text, places) for text in experiment.overrides]
    command += ["--seeds", str(seed), "--runs", str(runs), f"--tag={tag}", "--threads", "1"]
    command += ["--out", str(part)]

    def done() -> None:
        merge(experiment, part, {place: word for word, place in places.items()})

    log, folder = runs / f"log{tag}-{seed}.txt", experiment.folder(seed, runs)
    return Job(f"{experiment.name}, seed {seed}", command, log, folder, done)


def replaced(text: str, words: dict[str, str]) -> str:
    for word, other in words.items():
        text = text.replace(word, other)
    return text


def merge(experiment: Experiment, part: Path, names: dict[str, str] | None = None) -> None:
    """Add the seed of `part` to the experiment's result; `names`: of the folders that its config names."""
    told = json.loads(replaced(part.read_text(), names or {}))
    found = kept(experiment) | {run["seed"]: run for run in told["runs"]}
    command = f"python scripts/reproduce.py --all --only {experiment.name}"
    ordered = [found[seed] for seed in sorted(found)]
    settings = experiment.settings | experiment.corrected()
    write(experiment.out, result_of(ordered, command, told["config"], settings))


def tabulate() -> None:
    """Write the pages' tables as the results are now."""
    subprocess.run([sys.executable, str(ROOT / "scripts" / "figures" / "tables.py")], check=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--prompts", type=int, default=256, help="test prompts of the final judgement")
    parser.add_argument("--per-prompt", type=int, default=4)
    parser.add_argument("--runs", type=Path, default=Path("runs/reproduce"))
    parser.add_argument("--tag", default="", help="added to the run folders' names, for variants")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's default)")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--all", action="store_true", help="run the experiments of scripts/experiments.yaml")
    parser.add_argument("--list", action="store_true", help="show them, their state and the minutes left")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="NAME", help="with --all or --list: names' beginnings"
    )
    parser.add_argument("--jobs", type=int, default=1, help="with --all: seeds at a time, one thread each")
    args = parser.parse_intermixed_args()  # keys may stand behind options
    if not (args.all or args.list) and (args.config is None or args.out is None):
        parser.error("give a config and --out, or --all or --list")
    return args


def main() -> None:
    args = arguments()
    if args.all or args.list:
        chosen = [e for e in experiments() if e.name.startswith(tuple(args.only))]
        if not chosen:
            raise SystemExit(f"reproduce: no experiment is called {' or '.join(args.only)} (--list shows them)")
        if args.list:  # shows only, whatever stands beside it: a look must not start hours of work
            show(chosen)
            return
        try:
            failed = run_all(chosen, args.jobs, args.runs.resolve())
        except Interrupted as ended:
            print(f"reproduce: {ended}; the same command goes on", file=sys.stderr)
            raise SystemExit(EXIT_CODE) from ended
        tabulate()
        if failed:
            raise SystemExit(f"reproduce: {failed} seeds failed")
        show(chosen)
        return
    if args.threads:
        torch.set_num_threads(args.threads)
    runs = [one_seed(args.config, args.overrides, seed, args) for seed in args.seeds]
    settings = {"prompts": args.prompts, "per_prompt": args.per_prompt}
    command = shlex.join(["python", *sys.argv])
    result = result_of(runs, command, load_config(args.config, args.overrides).resolved(), settings)
    write(args.out, result)
    if args.out.resolve().is_relative_to(RESULTS):
        tabulate()
    for name, row in result["summary"].items():
        change = f"{row['gain']:+.3f} +- {row['gain_std'] or 0:.3f}"
        print(f"{name:>12}  {row['before']:.3f} -> {row['after']:.3f}  {change}")


if __name__ == "__main__":
    main()
