"""One gradient, four brakes: what each objective weighs a row by, from the shipped classes (experiments/notebook).

    python -m experiments.figures.brakes        # seconds; writes assets/results/brakes.json and the page's tables

The settings are the playground's recipes without their penalties. Every row's predicted velocity is a parameter of its
own in float64: by the chain rule its gradient is what any network behind it gets.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from diffrl import __version__
from diffrl.config import load_config
from diffrl.denoising import Trajectory
from diffrl.forward import FlowMatching, Prediction
from diffrl.objectives.objective import OptimiserStep
from diffrl.policy import Conditioning
from diffrl.prompts import Prompt
from diffrl.rollout import Rollout
from diffrl.run.build import build_objective
from diffrl.samplers import SamplerSpec, gaussian_log_prob
from experiments.figures import tables
from experiments.figures.results_table import rows as markdown

LEVELS, ERRORS, MOVES, DIMS = (0.9375, 0.75, 0.5, 0.25, 0.0), (1.0, 4.0), (0.001, 0.01, 0.1), (8, 8, 8)
EVERY, PAIR, POSITIVE = [2.5, 1.25, -1.25, -2.5], [1.0, 0.0, 0.0, -1.0], [2.5, 1.0, 0.5, 0.0]  # a group's advantages
Entry = tuple[str, list[str], list[float], str, Callable[[Any], Any], str]  # recipe, overrides, A, w twice, brake
OBJECTIVES: dict[str, Entry] = {
    "DiffusionNFT": ("nft", [], EVERY, "t / mean abs(v_θ - v)", lambda r: r.t / r.a, "v_θ is held to `old` as to v"),
    "CRD": ("crd", ["crd.beta=0"], EVERY, "1 / mean abs(v_θ - v)", lambda r: 1 / r.a, "the gain has a target, A / 10"),
    "AWM, uniform": ("awm", ["awm.weighting=uniform"], EVERY, "1/5", lambda r: 1 / 5, "clip of exp(W_old - W)"),
    "AWM, huber": ("awm", ["awm.weighting=huber"], EVERY, "t / (10 √e)", lambda r: r.t / 10 / r.e**0.5, "the same"),
    "AWM, ghuber": ("awm", [], EVERY, "t e^(-3/4) / 5", lambda r: r.t * r.e**-0.75 / 5, "the same"),
    "DGPO": ("dgpo", [], EVERY, "1/2", lambda r: 1 / 2, "σ(S), one-sided clip of e"),
    "DPO": ("dpo", ["dpo.b=1"], PAIR, "b/2, best and worst", lambda r: 1 / 2, "σ of the pair"),
    "RWR": ("rwr", [], POSITIVE, "1, and A ≥ 0", lambda r: 1, "none"),
    "Flow-GRPO": ("grpo", [], EVERY, "c² / (2 s²)", lambda r: r.c**2 / r.s**2 / 2, "clip of r"),
    "Flow-DPPO": ("dppo", [], EVERY, "c² / (2 s²)", lambda r: r.c**2 / r.s**2 / 2, "mask where D > δ"),
    "GRPO-Guard": ("grpo_guard", [], EVERY, "c² k / (2 s)", lambda r: r.c**2 * r.k / r.s / 2, "clip of r̂"),
}


class Trial:
    """An objective on two groups of four images, and what it asks of a policy: snapshots predict the velocities `old`,
    the trained LoRA these and `move`. A group's error e is `ERRORS`; in a stored step its noise decides it."""

    device, process, uneven_forwards, name = torch.device("cpu"), FlowMatching(), staticmethod(nullcontext), "default"

    def __init__(self, label: str) -> None:
        recipe, overrides, column, *_ = OBJECTIVES[label]
        n, steps, index, self.move = 8, len(LEVELS) - 1, torch.arange(8), torch.zeros(())
        generator = torch.Generator().manual_seed(0)
        self.draw = lambda *shape: torch.randn(*shape, *DIMS, generator=generator)
        spec, levels = SamplerSpec(sampler="flow_sde", steps=steps, noise_level=0.7), torch.tensor(LEVELS)
        times = levels[:-1].expand(n, steps), levels[1:].expand(n, steps)
        ends, log_prob = self.draw(n, steps), torch.zeros(n, steps)
        path = Trajectory(self.draw(n, steps), *times, log_prob, ends=ends)
        cond, texts = Conditioning(torch.zeros(2, 1, 1), torch.zeros(2, 0)), [Prompt(f"error {e}") for e in ERRORS]
        images = Rollout(texts, index // 4, index % 4, 0, n, self.draw(n), None, cond, path, levels, self.process, spec)
        config = load_config(tables.ROOT / f"configs/playground/{recipe}.yaml", overrides)
        self.objective = cast(Any, build_objective(config, spec))
        self.objective.noising.fraction = 1.0  # recipes train the noisiest
        advantages = torch.tensor(column * 2)[:, None]
        pairs = self.objective.pairs(images, advantages, index, 0)
        self.step = OptimiserStep(images, advantages, [pairs], (0,), lambda tensor: tensor)
        self.old, batch, self.a = self.draw(len(pairs)), self.rows(), advantages[pairs[:, 0]][..., None, None]
        self.r = r = SimpleNamespace(t=batch.t, e=torch.tensor(ERRORS)[batch.groups])
        r.k = batch.weight if self.objective.keep_trajectory else None  # of steps, TempFlow's
        if self.objective.keep_trajectory:  # v is the velocity that would have led to the state that was drawn
            forms = [self.process.from_velocity(batch.x_t, self.old + one, batch.t) for one in (0, 1)]
            (mean, s), (further, _) = (self.objective.steps.step(self, batch, form) for form in forms)
            c, noise, place = further - mean, self.draw(len(pairs)), tuple(pairs.T)
            self.residual, r.c, r.s = -s * noise / c, c.flatten(1)[:, 0], s.flatten()
            ends[place] = mean + s * noise
            log_prob[place] = gaussian_log_prob(ends[place], mean, s)
        else:
            self.residual = self.old * (r.e / self.old.square().flatten(1).mean(1)).sqrt().view(-1, 1, 1, 1)
            self.old = batch.velocity(self.process) + self.residual
        r.a = self.residual.abs().flatten(1).mean(1)

    def rows(self) -> Any:
        return self.objective.rows(self.step.rollout, self.step.advantages, self.step.parts[0], (0,))

    def predict(self, x_t: Tensor, t: Tensor, *_: Any, **__: Any) -> Prediction:
        v = self.old + self.move * (self.name == "default")
        if torch.is_grad_enabled():
            self.v = v.requires_grad_()
        return self.process.from_velocity(x_t, v, t)

    @contextmanager
    def adapter(self, name: str) -> Iterator[None]:
        self.name, before = name, self.name
        yield
        self.name = before

    def gradient(self) -> Tensor:
        """(b, D) of the loss by each row's velocity, over its advantage."""
        self.objective.before_step(self, self.step)
        rows = self.rows()
        losses = self.objective.loss(self.objective.scalars(self, rows), rows)
        return (torch.autograd.grad(losses.sum(), self.v)[0] / self.a).flatten(1)


def measured(label: str) -> dict[str, Any]:
    """w, how far a row is from it, norms by level and error, and what is left, A > 0 / A < 0, when theta has moved."""
    trial, (*_, formula, weight, brake) = Trial(label), OBJECTIVES[label]
    r, residual, on_policy = trial.r, trial.residual.flatten(1), trial.gradient()
    wanted = torch.as_tensor(weight(r)).expand_as(r.t)[:, None] * 2 * residual / residual.shape[1]
    norms, plain, sign = on_policy.norm(dim=1), r.e == ERRORS[0], trial.a.sign()
    error, norm = ((on_policy - wanted).norm(dim=1) / wanted.norm(dim=1)).max(), norms[plain].mean()
    result = {"w(t, e)": formula, "brake": brake, "error": float(error), "norm": float(norm)}
    result |= {f"t = {t:.2f}": f"{norms[plain & (r.t == t)].mean() / norm:.2f}" for t in LEVELS[:-1]}
    result["e x 4"] = "" if trial.objective.keep_trajectory else f"{norms[~plain].mean() / norm:.2f}"
    moves = {f"{size * 100:g}% along": -size * sign * trial.residual for size in MOVES}
    aside = MOVES[-1] * trial.draw(len(sign)) * residual.norm(dim=1).view(-1, 1, 1, 1) / residual.shape[1] ** 0.5
    trial.objective.on_policy = False
    for name, trial.move in (moves | {"10% aside: pulled back": aside}).items():
        onto = on_policy if name in moves else (sign * aside).flatten(1)
        shares = (trial.gradient() * onto).sum(1) / norms / onto.norm(dim=1)
        sides = (shares[plain & (sign.flatten() == side)] for side in (1, -1))
        result[name] = " / ".join(f"{side.mean():.2f}" for side in sides if len(side))
    return result


def table(result: dict[str, Any], *columns: str) -> str:
    """A row for each objective; `columns` are keys of `measured`, and `step`: the factor that gives NFT's mean norm."""
    cells = [[label, *(row[name] for name in columns)] for label, row in result["objectives"].items()]
    return markdown(["objective", *columns], cells)


def main() -> None:
    torch.set_default_dtype(torch.float64)
    rows = {label: measured(label) for label in OBJECTIVES}
    for row in rows.values():
        row["step"] = f"{rows['DiffusionNFT']['norm'] / row['norm']:.2g}"
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty=+"], text=True, cwd=tables.ROOT).strip()
    result: dict[str, Any] = {"command": "python -m experiments.figures.brakes", "commit": commit}
    result |= {"diffrl_version": __version__, "largest_error": max(row["error"] for row in rows.values())}
    result["objectives"] = rows
    (tables.RESULTS / "brakes.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    tables.write()


if __name__ == "__main__":
    main()
