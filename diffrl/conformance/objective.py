"""The checks of an objective: that it does what the loop, a resume, other processes and other methods count on.

Each takes a `Case`, and returns what it saw or raises `Failed`. The runs are a minute's, on the playground's model.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from diffrl.config import Config, make_config
from diffrl.config.door import method_of
from diffrl.config.load import dump
from diffrl.conformance.check import Failed, scramble
from diffrl.errors import UserError
from diffrl.run.train import Run, train

TOLERANCE = 1e-3  # of gradients and updates: rounding of float32 in another order


@dataclass
class Case:
    """The objective under test, by a name or a path, and a folder for its runs."""

    objective: str
    folder: Path
    made: int = field(default=0)

    def config(self, *words: str, **sections: Any) -> Config:
        """Of a small run; `words` are overrides, `sections` go on top."""
        method = method_of(self.objective)
        first = "clip" if method.rewards == "differentiable" else "playground"
        values: dict[str, Any] = {
            "run_dir": str(self.folder / f"run-{self.made}"),
            "objective": self.objective,
            "lora": {"rank": 4, "alpha": 8},
            "rollout": {"groups": 4, "group_size": 4, "steps": 4, "batch_size": 16},
            "rewards": {first: {}},
            "optimise": {"batch_size": 16, "micro_batch": None, "learning_rate": 1e-3},
            "evaluate": {"every": 1000, "prompts": 2, "per_prompt": 2},
            "tracking": {"samples": 0},
        }
        for name, keys in {**method.needs, **sections}.items():
            values[name] = {**values.get(name, {}), **keys}
        self.made += 1
        return make_config(values, words, world=1)


def check(objective: str) -> Iterator[tuple[str, bool, str]]:
    """(what, whether it holds, what was seen) of each check. Raises UserError if there is no such objective."""
    method_of(objective)
    with tempfile.TemporaryDirectory() as folder:
        case = Case(objective, Path(folder))
        for name, function in CHECKS.items():
            try:
                yield name, True, function(case)
            except Failed as failure:
                yield name, False, str(failure)


def gradients(config: Config) -> tuple[Tensor, Run]:
    """The LoRA's gradient in the first optimiser step, with a LoRA that shows, and the run."""
    run = Run(config)
    scramble(run.policy, std=0.1)
    for name in run.snapshots:
        run.policy.copy("default", name)
    result: list[Tensor] = []
    step = run.loop._step

    def watched() -> Tensor | None:
        gradients = (p.grad if p.grad is not None else torch.zeros_like(p) for p in run.loop.parameters)
        result.append(torch.cat([gradient.flatten() for gradient in gradients]).clone())
        return step()

    run.loop._step = watched  # type: ignore[method-assign]
    run.loop.run_epoch(0)
    return result[0], run


def _near(ours: Tensor, theirs: Tensor, what: str) -> str:
    error = float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30))
    if not error <= TOLERANCE:
        raise Failed(f"{what}: they differ by {error:.1e} of their norm (at most {TOLERANCE:g})")
    return f"they differ by {error:.1e} of their norm"


def plain_loss(case: Case) -> str:
    """`loss` in float32 is the class's own `plain(phi, advantages)` (K,) in float64, written from the equations."""
    run = Run(case.config())
    plain = getattr(run.objective, "plain", None)
    if plain is None:
        return "not checked: the class has no plain(phi, advantages)"
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    loss = run.objective.loss

    def watched(phi: Tensor, rows: Any) -> Tensor:
        call = loss(phi, rows)
        seen.append((call.detach(), phi.detach(), rows.advantages))
        return call

    run.objective.loss = watched  # type: ignore[method-assign]
    run.loop.run_epoch(0)
    call, phi, advantages = seen[0]
    return _near(call.double(), plain(phi.double(), advantages.double()), "loss() and plain() in float64")


def moves(case: Case) -> str:
    """A step moves every matrix of the LoRA, and all stays finite."""
    before, run = gradients(case.config())
    if not bool(before.isfinite().all()):
        raise Failed("the gradient is not finite")
    still = [name for name, parameter in run.policy.trainable if not bool(parameter.isfinite().all())]
    zero = int((before == 0).sum())
    if still or zero == len(before):
        raise Failed(f"not finite: {still[0]}" if still else "the gradient is zero")
    return f"a gradient of norm {float(before.norm()):.3g}"


def accumulation(case: Case) -> str:
    """One micro-batch gives the gradient of eight."""
    one, eight = (gradients(case.config(f"optimise.micro_batch={size}"))[0] for size in ("null", 0.125))
    return _near(eight, one, "the gradients of 1 x 8 and 8 x 1")


def resume(case: Case) -> str:
    """Two epochs give, to the bit, what one, a resume and another give."""
    whole, broken = case.config("epochs=2"), case.config("epochs=1")
    _quietly(whole)
    _quietly(broken)
    _quietly(make_config(broken, ["epochs=2"], world=1), Path(broken.run_dir))
    ours, theirs = (_lora(Path(one.run_dir)) for one in (broken, whole))
    if not torch.equal(ours, theirs):
        difference = float((ours - theirs).abs().max())
        raise Failed(f"the LoRA differs by {difference:.1e}: something that shapes the future is not in state_dict()")
    return "the LoRA is the same to the bit"


def processes(case: Case) -> str:
    """Two processes take the step of one."""
    config, other = case.config("epochs=1"), case.config("epochs=1")
    _quietly(config)
    file = case.folder / "two.yaml"
    dump(other, file)
    code, said, errors = train_on_two(file)
    if code or "2 process(es)" not in said:
        lines = [line for line in errors.splitlines() if "diffrl: error" in line] or ["?"]
        raise Failed(f"two processes could not run: {lines[0][:200]}")
    return _near(_lora(Path(other.run_dir)), _lora(Path(config.run_dir)), "the LoRAs of two processes and of one")


def train_on_two(file: Path) -> tuple[int, str, str]:
    """`diffrl train FILE` on two CPU processes of this machine: the exit code, stdout, stderr."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "-m", "diffrl", "train", str(file)], env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


def _quietly(config: Config, resume: Path | None = None) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        train(config, resume)


def _lora(folder: Path) -> Tensor:
    tensors = load_file(folder / "lora" / "pytorch_lora_weights.safetensors")
    return torch.cat([tensors[name].flatten().float() for name in sorted(tensors)])


def around(name: str) -> Callable[[Case], str]:
    """The check under GARDO or MARBLE: it trains, or the config is refused in one line."""

    def trains(case: Case) -> str:
        more: dict[str, Any] = {"rewards": {"clip": {}}, "marble": {"mode": "fresh"}}
        if name == "gardo":
            more = {"watch": {"artefact": {}}, "gardo": {"auxiliary": ["artefact"], "share": 0.2}}
            method = method_of(case.objective)
            more["gardo"] |= {} if method.advantages == "any" else {"diversity": "off"}
        elif "clip" in case.config().rewards:
            more["rewards"] = {"preference": {}}
        try:
            config = case.config(**more)
        except UserError as error:
            return f"refused: {error}"
        gradient, _ = gradients(config)
        if not bool(gradient.isfinite().all()):
            raise Failed("the gradient is not finite")
        return "it trains"

    return trains


CHECKS: dict[str, Callable[[Case], str]] = {
    "the loss is its plain form in float64": plain_loss,
    "a step moves the LoRA": moves,
    "accumulation 1 x 8 equals 8 x 1": accumulation,
    "a resume is exact": resume,
    "two processes equal one": processes,
    "under GARDO": around("gardo"),
    "under MARBLE": around("marble"),
}
