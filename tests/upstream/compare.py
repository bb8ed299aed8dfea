"""Every reward against its original: the same random weights and pictures on both sides.

    make upstream                                         # the originals' packages, into build/upstream
    python tests/upstream/compare.py                      # writes assets/results/originals.json

Originals that are no packages are used from clones of their repositories, if their folders are named: DIFFRL_HPSV3PP
(PlantPotatoOnMoon/HPSv3-PlusPlus), DIFFRL_DEQA (zhiyuanyou/DeQA-Score, which needs an older transformers,
`pip install --no-deps --target build/upstream-deqa -r tests/upstream/requirements-deqa.txt`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"odd": (57, 83), "wide": (96, 301), "tall": (240, 101), "tiny": (29, 44)}  # besides the model's own
PROMPTS = {
    "plain": "a photo of two dogs on a red bench",
    "empty": "",
    "long": "a photo of a dog beside a red bench, in the style of an old master, " * 12,
    "non-Latin": 'собака рядом, 一只红色的狗 "你好", कुत्ता 🐕',
    "marks": """it's {a} "dog" % $ \\ [ENC]""",
}
if "DIFFRL_DEQA" in os.environ:  # its tokenizer is a sentencepiece model
    sys.path.append(str(ROOT / "build" / "upstream-deqa"))


@dataclass(frozen=True)
class Case:
    """An original: `within`, how far scores may be apart, in shares of their spread; `cause`: why they are at all."""

    within: float
    cause: str
    side: int = 224  # of the pictures that it takes as they are
    clone: str = ""  # the environment variable with its repository's folder, where it is no package
    packages: str = "upstream"  # the folder of build/ that goes with it


RESIZED = "the original resizes bytes with Pillow, ours floats, which keeps gradients"
CASES = {
    "clip": Case(2e-2, RESIZED),
    "aesthetic": Case(2e-2, RESIZED),
    "aesthetic_relu": Case(2e-2, RESIZED),
    "aesthetic_v2_5": Case(2e-2, RESIZED, 384),
    "hpsv2": Case(1e-4, "order of float sums"),
    "imagereward": Case(2e-2, RESIZED),
    "pickscore": Case(2e-2, RESIZED),
    "hpsv3": Case(2e-2, RESIZED, 448),
    "hpsv3pp": Case(2e-2, RESIZED, 448, "DIFFRL_HPSV3PP", ""),
    "deqa": Case(5e-2, RESIZED, 448, "DIFFRL_DEQA", "upstream-deqa"),
    "vqascore": Case(0.2, RESIZED, 336),
}


def pictures(folder: Path, side: int) -> list[str]:
    """PNG files, smooth and hard-edged ones in turn; the first two are squares of `side` pixels."""
    from torchvision.io import write_png

    generator, paths = torch.Generator().manual_seed(0), []
    for i, (height, width) in enumerate(((side, side), (side, side), *SIZES.values())):
        noise = torch.rand(1, 3, 7, 5, generator=generator)
        image = torch.nn.functional.interpolate(noise, (height, width), mode="bicubic").clamp(0, 1)[0]
        if i % 2:
            rows, columns = torch.arange(height)[:, None] // 5, torch.arange(width) // 3
            image = ((rows + columns) % 2).float() * image
        path = folder / f"picture{i}.png"
        write_png((image * 255).round().byte(), str(path))
        paths.append(str(path))
    return paths


def places(name: str) -> list[str]:
    """The folders with the original and its packages. FileNotFoundError if one is not here."""
    case = CASES[name]
    folders = [Path(os.environ.get(case.clone, f"${case.clone}"))] if case.clone else []
    folders += [ROOT / "build" / case.packages] if case.packages else []
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"{name}: no {folder}")
    return list(map(str, folders))


def original(name: str, folder: Path) -> dict[str, Any]:
    """What `originals.py` says of NAME: scores (pictures x prompts), and how the reward is built on the same files."""
    (folder / "pictures.json").write_text(
        json.dumps({"pictures": pictures(folder, CASES[name].side), "prompts": list(PROMPTS.values())})
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(places(name)),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(Path(__file__).with_name("originals.py")), name, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads((folder / "scores.json").read_text())
    return result


def ours(arguments: dict[str, Any], folder: Path) -> torch.Tensor:
    """The scores of the reward here, pictures x prompts."""
    import open_clip
    from torchvision.io import read_image

    from diffrl.rewards import load_reward

    for path in folder.glob("tiny-*.json"):
        open_clip.add_model_config(path)
    arguments = {
        key: str(folder / value) if (folder / str(value)).exists() else value for key, value in arguments.items()
    }
    reward = load_reward(arguments.pop("plugin"), device="cpu", **arguments)
    asked = json.loads((folder / "pictures.json").read_text())
    rows = []
    for path in asked["pictures"]:
        image = read_image(path)[None].float() / 255
        prompts = asked["prompts"]
        with torch.no_grad():
            rows.append(reward(image.expand(len(prompts), -1, -1, -1), prompts, [{}] * len(prompts)))
    return torch.stack(rows).double()


def compare(name: str) -> dict[str, Any]:
    """One row of the table: both sides' scores on all pictures and prompts."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        result = original(name, folder)
        theirs, arguments = torch.tensor(result["scores"], dtype=torch.float64), result["ours"]
        about = arguments.pop("of")
        plugin = arguments["plugin"]
        scores = ours(arguments, folder)
    gap = (scores - theirs).abs()
    return {
        "reward": plugin,
        "original": about,
        "pairs": gap.numel(),
        "spread": (theirs.max() - theirs.min()).item(),
        "largest": gap.max().item(),
        "largest_unresized": gap[:2].max().item(),
        "cause": CASES[name].cause,
    }


def table(result: Mapping[str, Any]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| reward | original | pairs | spread | largest difference | without resizing | cause |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"].values():
        numbers = " | ".join(f"{row[key]:.2g}" for key in ("spread", "largest", "largest_unresized"))
        lines.append(f"| `{row['reward']}` | {row['original']} | {row['pairs']} | {numbers} | {row['cause']} |")
    return "\n".join(lines)


def main() -> None:
    """Compares what is here, or the named ones, and writes their rows into the result; others' rows stay."""
    sys.path[:0] = [str(ROOT)]
    from diffrl.version import __version__
    from experiments.league.results import commit

    path = ROOT / "assets" / "results" / "originals.json"
    rows: dict[str, Any] = json.loads(path.read_text())["rows"] if path.is_file() else {}
    for name in sys.argv[1:] or CASES:
        try:
            places(name)
        except FileNotFoundError as error:
            print(f"{error}: left out")
            continue
        rows[name] = compare(name)
        print(json.dumps(rows[name]), flush=True)
        result = {
            "command": "python tests/upstream/compare.py",
            "commit": commit(),
            "diffrl_version": __version__,
            "rows": {name: rows[name] for name in CASES if name in rows},
        }
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
