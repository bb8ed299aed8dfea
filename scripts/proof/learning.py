"""Does it learn on this device as it does on a CPU? The playground's recipe, beside the CPU's three seeds."""

from __future__ import annotations

import json
import shutil
import statistics
from contextlib import redirect_stdout
from typing import Any

import yaml
from measuring import Tell, clean
from training import ROOT
from workshop import Workshop

from diffrl.config import load_config
from diffrl.run.train import train

EPOCHS = 10  # the first evaluation after training in the CPU's curves
CPU = ROOT / "assets" / "results" / "nft.json"
SHOWN = ("eval/playground", "eval/strict", "eval/all_right", "eval/variety", "eval/artefact")
LITTLE = ["rollout.groups=2", "rollout.group_size=4", "rollout.batch_size=8", "optimise.batch_size=8"]
LITTLE += ["evaluate.prompts=2", "evaluate.per_prompt=2"]


def learn(shop: Workshop, seconds: float, tell: Tell) -> dict[str, Any]:
    """The reward's curve over the first epochs of playground/nft, and the held-out scores before and after them."""
    clean()
    sections = yaml.safe_load((ROOT / "configs" / "playground" / "nft.yaml").read_text())
    sections["evaluate"].pop("also")
    folder = shop.folder / "playground"
    shutil.rmtree(folder, ignore_errors=True)
    epochs = 1 if shop.tiny else EPOCHS
    sections |= {"epochs": epochs, "run_dir": str(folder), "tracking": {"samples": 0}}
    sections["evaluate"]["every"] = epochs
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(sections))
    config = load_config(path, LITTLE if shop.tiny else [])
    with folder.with_suffix(".log").open("w") as log, redirect_stdout(log):
        train(config)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    images = lines[-1]["samples"]
    found: dict[str, Any] = {"recipe": "playground/nft", "epochs": epochs, "images": images}
    found["rewards"] = [round(line["reward/playground"], 4) for line in lines if "reward/playground" in line]
    found["before"], found["after"] = ({key: round(line[key], 4) for key in SHOWN} for line in (lines[0], lines[-1]))
    phases = ("seconds", "seconds/rollout", "seconds/reward", "seconds/optimise")
    found["epoch"] = {key: round(statistics.median(line[key] for line in lines[1:]), 3) for key in phases}
    return found | {"cpu": of_cpu(images)}


def of_cpu(images: int) -> dict[str, Any]:
    """The same evaluations of the CPU's runs, seed by seed; empty where they have none at so many images."""
    if not CPU.is_file():
        return {}
    runs = json.loads(CPU.read_text())["runs"]
    points = [{point["samples"]: point for point in run["curve"]} for run in runs]
    if any(images not in curve for curve in points):
        return {}
    shown = {key: [round(curve[images][key], 4) for curve in points] for key in SHOWN}
    return {"before": {key: [round(curve[0][key], 4) for curve in points] for key in SHOWN}, "after": shown}
