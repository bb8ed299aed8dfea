"""Some fifty nasty rewards: each is stopped by one line that names it, or harms nobody else's scores.

    python tests/stress/nasty.py --out assets/results/nasty.json

Each one scores a batch beside an honest reward, which comes after it and whose scores are known. What a reward does is
one function of (images, prompts, metadata) that may also return the scores.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import shlex
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffrl import __version__
from diffrl.prompts import Prompt
from diffrl.rewards.protocol import RewardError
from diffrl.rewards.scoring import Scorer

IMAGES = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
PROMPTS = [Prompt(f"prompt {i}", {"tags": [i]}) for i in range(4)]
LIMIT = 1.0  # seconds
Behaviour = Callable[[Tensor, list[str], list[dict[str, Any]]], Any]


class Honest:
    name = "honest"

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        assert prompts == [f"prompt {i}" for i in range(len(images))]
        assert [one["tags"] for one in metadata] == [[i] for i in range(len(images))]
        return images.mean((1, 2, 3))


class Nasty:
    name = "nasty"

    def __init__(self, behaviour: Behaviour, attributes: dict[str, Any]) -> None:
        self.behaviour = behaviour
        vars(self).update(attributes)

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Any:
        answer = self.behaviour(images, prompts, metadata)
        return images.mean((1, 2, 3)) if answer is None else answer


def mean(images: Tensor) -> Tensor:
    return images.mean((1, 2, 3))


def leave(*_: Any) -> None:
    sys.exit(7)


def raises(error: BaseException) -> Behaviour:
    def behaviour(*_: Any) -> None:
        raise error

    return behaviour


def through_numpy(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> None:
    images.numpy()[:] = 0


def emptied(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
    other: Any = images * 0
    images.set_(other)
    return mean(images)


def resized(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> None:
    images.resize_(1)


def unbounded(*_: Any) -> None:
    unbounded()


def warns(images: Tensor, *_: Any) -> None:
    warnings.warn("look at me", stacklevel=1)


def says_no(prompt: str, metadata: dict[str, Any]) -> bool:
    raise LookupError("no such\nprompt")


def spoils(prompt: str, metadata: dict[str, Any]) -> bool:
    metadata.clear()
    return True


def reseeds(*_: Any) -> None:
    threading.Thread(target=time.sleep, args=(0.01,)).start()


def grad(images: Tensor, *_: Any) -> Tensor:
    with torch.enable_grad():
        return mean(images.requires_grad_())


END = [0.0]
BEHAVIOURS: dict[str, Behaviour] = {
    "writes in place": lambda images, prompts, metadata: mean(images.mul_(0)),
    "writes through numpy": through_numpy,
    "clamps in place and answers": lambda images, prompts, metadata: mean(images.clamp_(0.5)),
    "resizes the images": resized,
    "changes their storage": emptied,
    "empties the prompts": lambda images, prompts, metadata: prompts.clear(),
    "changes the prompts": lambda images, prompts, metadata: prompts.__setitem__(0, "x"),
    "changes the metadata": lambda images, prompts, metadata: metadata[0].update(tags="x"),
    "changes a list in the metadata": lambda images, prompts, metadata: metadata[0]["tags"].append("x"),
    "nan": lambda images, prompts, metadata: mean(images) * math.nan,
    "one nan": lambda images, prompts, metadata: mean(images).index_fill(0, torch.tensor([2]), math.nan),
    "inf": lambda images, prompts, metadata: mean(images) / 0,
    "minus inf": lambda images, prompts, metadata: -mean(images) / 0,
    "1e30": lambda images, prompts, metadata: mean(images) * 1e30,
    "1e300 in float64": lambda images, prompts, metadata: mean(images).double() * 1e300,
    "booleans": lambda images, prompts, metadata: mean(images) > 0.5,
    "complex": lambda images, prompts, metadata: mean(images) * 1j,
    "whole numbers": lambda images, prompts, metadata: (mean(images) * 10).long(),
    "half precision": lambda images, prompts, metadata: mean(images).half(),
    "None for every image": lambda images, prompts, metadata: [None] * len(images),
    "a list": lambda images, prompts, metadata: mean(images).tolist(),
    "a numpy array": lambda images, prompts, metadata: np.asarray(mean(images)),
    "a number": lambda images, prompts, metadata: 1.0,
    "a scalar tensor": lambda images, prompts, metadata: images.mean(),
    "a column": lambda images, prompts, metadata: mean(images)[:, None],
    "too few": lambda images, prompts, metadata: mean(images)[1:],
    "too many": lambda images, prompts, metadata: mean(images).repeat(2),
    "nothing at all": lambda images, prompts, metadata: torch.empty(0),
    "a string": lambda images, prompts, metadata: "fine",
    "a sparse tensor": lambda images, prompts, metadata: mean(images).to_sparse(),
    "a meta tensor": lambda images, prompts, metadata: mean(images).to("meta"),
    "a graph": grad,
    "ValueError": raises(ValueError("one\ntwo")),
    "an empty error": raises(KeyError()),
    "a time-out of its own": raises(TimeoutError("late")),
    "sys.exit": leave,
    "sys.exit with text": raises(SystemExit("bye")),
    "GeneratorExit": raises(GeneratorExit()),
    "StopIteration": raises(StopIteration(3)),
    "MemoryError": raises(MemoryError()),
    "an error of 10,000 letters": raises(RuntimeError("x" * 10_000)),
    "recursion without end": unbounded,
    "hangs": lambda images, prompts, metadata: time.sleep(30),
    "spins": lambda images, prompts, metadata: [0 for _ in iter(lambda: time.monotonic() < END[0], False)] and None,
    "warns": warns,
    "prints": lambda images, prompts, metadata: print("look at me"),
    "starts a thread": reseeds,
    "logs": lambda images, prompts, metadata: logging.getLogger("diffrl.other").debug("x"),
    "inference mode": lambda images, prompts, metadata: torch.inference_mode()(mean)(images),
    "sends itself SIGUSR1": lambda images, prompts, metadata: os.kill(os.getpid(), signal.SIGUSR1),
    "leaves gradients on": lambda images, prompts, metadata: torch.set_grad_enabled(True) and None,
    "another thread count": lambda images, prompts, metadata: torch.set_num_threads(1),
}
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "applies raises": {"applies": says_no},
    "applies empties the metadata": {"applies": spoils},
    "applies says nothing": {"applies": lambda prompt, metadata: None},
    "a device that is none": {"device": "cudaa"},
    "a device that is not there": {"device": "cuda:9"},
    "a batch size of its own": {"batch_size": 3},
}


def verdict(behaviour: Behaviour, attributes: dict[str, Any]) -> tuple[str, str]:
    """("stopped" | "harmless" | "FAILED", what was said)."""
    images = IMAGES.clone()
    END[0] = time.monotonic() + 3 * LIMIT
    nasty = Nasty(behaviour, attributes)
    rewards: dict[str, Any] = {"nasty": nasty, "honest": Honest()}
    scorer = Scorer(rewards, timeout=LIMIT)
    try:
        scores = scorer.score(images, PROMPTS)
    except RewardError as error:
        said = str(error)
        good = "nasty" in said and "\n" not in said
        return ("stopped" if good else "FAILED"), said[:200]
    except BaseException as error:
        return "FAILED", f"{type(error).__name__}: {str(error)[:200]}"
    whole = torch.equal(images, IMAGES) and all(p.metadata == {"tags": [i]} for i, p in enumerate(PROMPTS))
    finite = bool((scores[:, 0].isfinite() | scores[:, 0].isnan()).all())
    honest = torch.allclose(scores[:, 1], mean(IMAGES))
    return ("harmless" if whole and finite and honest else "FAILED"), ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    cases: dict[str, Any] = {name: (behaviour, {}) for name, behaviour in BEHAVIOURS.items()}
    cases |= {name: (lambda *_: None, attributes) for name, attributes in ATTRIBUTES.items()}
    rows = {}
    for name, case in cases.items():
        did, said = verdict(*case)
        rows[name] = {"did": did, "said": said}
    counts = Counter(row["did"] for row in rows.values())
    result = {"command": shlex.join(["python", *sys.argv]), "diffrl_version": __version__, "torch": torch.__version__}
    args.out.write_text(json.dumps(result | {"did": dict(counts), "rewards": rows}, indent=1) + "\n")
    print(dict(counts), [name for name, row in rows.items() if row["did"] == "FAILED"])
    raise SystemExit(1 if counts["FAILED"] else 0)


if __name__ == "__main__":
    main()
