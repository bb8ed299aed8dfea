"""Votes through a browser, trained on: a run waits, a script clicks the reddest images of each group on `diffrl watch`.

    python tests/stress/voting.py --out assets/results/voting.json --pictures docs/assets

Meanwhile the page's process is killed (SIGKILL) between two votes, and the run's while it waits; both start again. No
vote may be lost or counted twice, and the images must become redder, which nothing but the votes asks for.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from browser import Browser
from PIL import Image

from diffrl.records.held_out import read_held_out

REDNESS = '''
import torch

class Redness:
    """How much redder than green and blue the picture is."""
    name = "redness"

    def __call__(self, images, prompts, metadata):
        red, green, blue = images.unbind(dim=1)
        return (red - torch.maximum(green, blue)).clamp(min=0).mean(dim=(1, 2))
'''
RANKED = 3  # images that the rater names, of each group


def config(folder: Path, epochs: int) -> dict[str, Any]:
    return {
        "model": "playground",
        "prompts": {"train": "playground/compositional/train", "test": "playground/compositional/test"},
        "epochs": epochs,
        "run_dir": str(folder / "run"),
        "rollout": {"groups": 6, "group_size": 8, "steps": 6, "sampler": "dpm2", "batch_size": 48},
        "rewards": {"votes": {"groups": 6, "wait": 600}},
        "watch": {"redness": {"plugin": f"{folder / 'redness.py'}:Redness"}, "clip": {}},
        "objective": "nft",
        "nft": {"beta": 0.1, "timesteps": 0.34},
        "optimise": {"learning_rate": 1e-3, "betas": [0.9, 0.99], "batch_size": 16, "micro_batch": None},
        "evaluate": {"every": max(epochs // 2, 1), "prompts": 24, "per_prompt": 2},
        "checkpoint": {"every": 1, "keep": 2},
        "tracking": {"groups": 3, "samples": 4},
    }


def start(*words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "diffrl", *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def page_of(run: Path, port: int = 0) -> tuple[subprocess.Popen[str], str]:
    """The live page's process, and its address."""
    process = start("watch", str(run), "--port", str(port))
    assert process.stdout is not None
    line = process.stdout.readline()
    assert " on http" in line, line
    return process, line.split(" on ")[1].split(" ")[0]


def redness(path: Path) -> float:
    red, green, blue = np.moveaxis(np.asarray(Image.open(path).convert("RGB"), np.float32) / 255, -1, 0)
    return float(np.clip(red - np.maximum(green, blue), 0, None).mean())


def votes_of(run: Path) -> list[dict[str, Any]]:
    file = run / "votes" / "votes.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class Rater:
    """Clicks, in a browser, the reddest images of the groups that nobody has voted on."""

    def __init__(self, browser: Browser, run: Path) -> None:
        self.browser, self.run, self.clicks, self.done = browser, run, 0, set[str]()

    def pending(self) -> list[tuple[str, list[str]]]:
        """Groups on the page, with the addresses of their images."""
        code = "[...document.querySelectorAll('article[data-group]:not([data-done])')].map(a => [a.dataset.group, "
        code += "[...a.querySelectorAll('img')].map(i => i.getAttribute('src'))])"
        return [(group, files) for group, files in self.browser.evaluate(code) if group not in self.done]

    def vote(self, group: str, sources: list[str]) -> None:
        card = f"document.querySelector('article[data-group=\"{group}\"]')"
        self.browser.wait(f"[...{card}.querySelectorAll('img')].every(i => i.complete && i.naturalWidth)")
        files = [self.run / "votes" / f"epoch-{int(s.split('/')[3]):04d}" / s.split("/")[4] for s in sources]
        order = sorted(range(len(files)), key=lambda i: -redness(files[i]))[:RANKED]
        for place in order:
            self.browser.click(f"{card}.querySelectorAll('.choice')[{place}]")
            self.clicks += 1
        self.browser.click(f"{card}.querySelector('.save')")
        self.clicks += 1
        self.browser.wait(f"{card}.querySelector('.message').textContent")
        said = self.browser.evaluate(f"{card}.querySelector('.message').textContent")
        if said == "saved":
            self.done.add(group)


def trial(folder: Path, epochs: int, pictures: Path | None) -> dict[str, Any]:
    (folder / "redness.py").write_text(REDNESS)
    (folder / "config.yaml").write_text(yaml.safe_dump(config(folder, epochs)))
    run, killed = folder / "run", {"page": 0, "run": 0}
    training = start("train", str(folder / "config.yaml"))
    while not (run / "config.yaml").exists():
        assert training.poll() is None, training.communicate()[0]
        time.sleep(0.5)
    page, url = page_of(run)
    port = int(url.rsplit(":", 1)[1])
    with Browser(1400) as browser:
        browser.open(url)
        rater = Rater(browser, run)
        while training.poll() is None:
            for number, (group, files) in enumerate(rater.pending()):
                epoch = int(files[0].split("/")[3])
                if number == 1 and epoch == 2 and pictures is not None:
                    photograph(browser, pictures)
                if number == 2 and epoch == 2 and not killed["page"]:
                    page.send_signal(signal.SIGKILL)
                    page.wait()
                    killed["page"] = 1
                    page, url = page_of(run, port)
                if number == 4 and epoch == 3 and not killed["run"]:
                    training.send_signal(signal.SIGKILL)
                    training.wait()
                    killed["run"] = 1
                    training = start("train", "--resume", str(run))
                    break
                rater.vote(group, files)
            time.sleep(0.5)
        browser.wait("!document.querySelector('.ask')")
        if pictures is not None:
            time.sleep(3)
            for name in ("run", "answered", "groups"):
                browser.evaluate(f"document.getElementById('{name}').scrollIntoView()")
                time.sleep(0.3)
                browser.picture(pictures / f"watch-{name}.png", whole=False)
    page.terminate()
    assert training.returncode == 0, training.communicate()[0]
    return judged(run, rater, killed, epochs)


def photograph(browser: Browser, pictures: Path) -> None:
    """The page that asks, at two widths."""
    for width in (390, 1400):
        browser.size(width, 844 if width < 600 else 900)
        browser.evaluate("scrollTo(0, 0)")
        time.sleep(0.5)
        browser.picture(pictures / f"votes-{width}.png", whole=False)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width


def judged(run: Path, rater: Rater, killed: dict[str, int], epochs: int) -> dict[str, Any]:
    votes = votes_of(run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    counted = [json.loads(file.read_text())["votes"] for file in sorted(run.glob("votes/epoch-*/closed.json"))]
    evaluated, asked = [row for row in rows if "eval/redness" in row], [row for row in rows if "votes/waited" in row]
    error = read_held_out(run).change_error("redness", evaluated[0]["epoch"], evaluated[-1]["epoch"])
    return {
        "votes": len(votes),
        "votes that the page said it saved": len(rater.done),
        "votes twice": len(votes) - len({(vote["group"], vote["voter"]) for vote in votes}),
        "votes trained on": sum(map(len, counted)),
        "epochs": epochs,
        "clicks": rater.clicks,
        "killed": killed,
        "redness before": evaluated[0]["eval/redness"],
        "redness after": evaluated[-1]["eval/redness"],
        "redness, error of the change": error,
        "clip before": evaluated[0]["eval/clip"],
        "clip after": evaluated[-1]["eval/clip"],
        "half of a 95 % interval, mean": float(np.mean([row["votes/interval"] for row in asked])),
        "seconds waited, mean": float(np.mean([row["votes/waited"] for row in asked])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--pictures", type=Path, help="folder for photographs of the page")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = trial(Path(folder), arguments.epochs, arguments.pictures)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    lost = result["votes that the page said it saved"] - result["votes"]
    failed = lost > 0 or result["votes twice"] or result["redness after"] <= result["redness before"]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
