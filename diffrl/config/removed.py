"""Keys of earlier versions: what a config that still has one is told, and the value at which it said nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Removed(NamedTuple):
    default: Any  # the value at which the key changed nothing: run folders have it in their config.yaml
    text: str  # what takes its place


# NAME stands for any name of a table. A section counts as removed with all that is in it.
REMOVED: dict[str, Removed] = {
    "penalty": Removed("kl", "the penalty is the KL, weighed by beta"),
    "rehearsal": Removed(None, "hold the model with the objective's beta"),
    "advantages.top": Removed(1.0, "it went with agree: virtual"),
    "advantages.grain": Removed(0.01, "it went with agree: blend"),
    "advantages.beta": Removed(False, "use the objective's advantage_std"),
    "advantages.risk": Removed(None, "use shape.clip of the reward"),
    "grpo.clip_low": Removed(None, "clip bounds the ratio on both sides"),
    "gardo.measure_every": Removed(None, "`kl` is that of the penalised rows"),
    "gardo.change": Removed(0.1, "the share moves by the paper's 0.1"),
    "dense.change": Removed(0.01, "it is the paper's 0.01"),
    "dense.tolerance": Removed(2.0, "it is 2 deviations of a fair coin"),
    "guard.saturation": Removed(True, "the alarm is always on"),
    "marble.stage": Removed(10, "it went with mode: sequential"),
    "tracking.wandb": Removed(False, "name it in tracking.trackers"),
    "tracking.tensorboard": Removed(False, "name it in tracking.trackers"),
    "tree.skip_last": Removed(None, "they move to the step before the last split, as in its code"),
    "evaluate.also.NAME.family": Removed(None, "the model is of the trained one's family"),
    "evaluate.also.NAME.offload": Removed(True, "it waits in main memory between evaluations"),
    "rollout.window_by": Removed("epoch", "the window is one for all images"),
    "rewards.NAME.params": Removed({}, "the plugin's arguments stand beside weight and plugin"),
    "rewards.NAME.shape.ensemble": Removed(None, "write the combination as a reward of its own"),
    "rewards.NAME.shape.gate": Removed(None, "use shape.modulate, or write a reward of its own"),
    "rewards.NAME.shape.log": Removed(None, "use shape.bound or shape.clip"),
    "rewards.NAME.shape.standardise": Removed(None, "marble.mode: advantages standardises each reward"),
    "rewards.NAME.shape.threshold": Removed(None, "write a reward of its own"),
    "rewards.NAME.shape.tame": Removed(None, "use shape.bound or shape.clip"),
    "rewards.NAME.shape.win_rate": Removed(None, "write a reward of its own"),
    "watch.NAME.params": Removed({}, "the plugin's arguments stand beside plugin"),
    "watch.NAME.shape.clip": Removed(None, "use bound"),
    "watch.NAME.shape.threshold": Removed(None, "use bound"),
    "watch.NAME.weight": Removed(1.0, "what is watched is never summed"),
}


def removed(path: Sequence[str]) -> Removed | None:
    """The entry of a key, given as its parts, or of the section that it lies in."""
    for name, entry in REMOVED.items():
        parts = name.split(".")
        if len(path) >= len(parts) and all(a in (b, "NAME") for a, b in zip(parts, path, strict=False)):
            return entry
    return None


def without_removed(data: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """The config of an earlier version without the removed keys that said nothing; the others stay, to be refused."""
    current: dict[str, Any] = {}
    for name, value in data.items():
        entry = removed((*path, str(name)))
        if entry is not None and value == entry.default:
            continue
        current[name] = without_removed(value, (*path, str(name))) if isinstance(value, dict) else value
    return current
