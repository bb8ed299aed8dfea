"""Every value of every shipped recipe, and of the league's trainings, is the one that was frozen in resolved.json.gz.

A refactoring may rename a key, but no value: `RENAMED` says which key became which. A recipe that was corrected is in
`CHANGED`, each key with its value before and since; keys that a recipe did not have are in `ADDED`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from math import floor
from pathlib import Path
from typing import Any

import pytest
import yaml

from diffrl.config import load_config, make_config
from diffrl.resources import shipped, shipped_configs

FROZEN = Path(__file__).parents[1] / "data" / "resolved.json.gz"
RENAMED = {  # frozen key: today's
    "optimise.ema": "optimise.ema.decay",
    "optimise.ema_every": "optimise.ema.every",
    "optimise.ema_warmup": "optimise.ema.warmup",
}
# Keys that are gone, each with the one value that it had in every recipe: what the code does now.
REMOVED: dict[str, Any] = {"rollout.cache.kind": "off", "rollout.cache.interval": 2, "rollout.cache.warmup": 2}
REMOVED |= {"rollout.noise_levels": None, "rollout.tail_solver": "dpm2", "optimise.max_skipped": 2}
REMOVED |= {"advantages.least": 1e-3, "advantages.ban": None, "engine.merge": "exact"}
REMOVED["checkpoint.push_every"] = 10
# Methods' numbers and options that no recipe and no paper's result has at another value.
REMOVED |= {"marble.uniform_after": None, "crd.loss": "squared", "crd.tau": None, "crd.weighted": True}
REMOVED |= {"gdro.top": False, "dense.ode_steps": None, "dense.credit": "gain"}
REMOVED |= {"tree.skip": 0, "tree.skip_every": 30, "tree.keep": "all"}
REMOVED |= {f"{name}.timestep_sampling": "schedule" for name in ("nft", "crd", "awm", "dgpo", "gdro")}
REMOVED |= {"nft.adv_clip": 5.0, "crd.adv_clip": 5.0, "awm.adv_clip": 5.0, "acflow.adv_clip": 2.0}
REMOVED |= {"fdfo.advantage_std": "none", "prdp.advantage_std": "group"}
REMOVED |= {"gardo.window": 20, "gardo.window_full": False, "gardo.share_range": [0.02, 0.2]}
REMOVED |= {"dpo.beta": 0.0, "fdfo.beta": 0.0, "gdro.beta": 0.0, "prdp.beta": 0.0}
REMOVED |= {"dgpo.reference": "pretrained", "dgpo.old": [0, 0.0, 0.001, 0.3]}
REMOVED |= {"awm.average": [0, 0.0, 0.001, 0.3], "crd.sampling": [75, 0.0, 0.0075, 0.999], "d2align.batch_size": 64}
REMOVED |= {"acflow.critic_rate": 1e-3, "acflow.critic_steps": 8, "direct.align.step": 0.02145}
REMOVED |= {"direct.pair.denoise": [0.1, 0.25], "direct.pair.inversion": [0.3, 0.01], "evaluate.divgen": None}
REMOVED |= {
    "engine.offload_vae": False,
    "awm.clip": 1.0,
    "acflow.warmup": 1,
    "gdro.best": 0.5,
    "prdp.clip": 1e-4,
    "rwr.constraint": 0.5,
}

ADV_GRPO = {  # its code's kernel is CPS, from one initial noise; its log-probability leaves out 1 / (2 s^2)
    "rollout.sampler": ("flow_sde", "cps"),
    "rollout.same_noise": (False, True),
    "grpo.clip": (1e-5, 6.3e-6),
}
CHANGED: dict[str, dict[str, tuple[Any, Any]]] = {  # recipe: its authors' value in the place of what the recipe had
    "sd35/adv_grpo_dino": {**ADV_GRPO, "rollout.window_range": ([0, 5], [0, 2])},
    "sd35/adv_grpo_pickscore": ADV_GRPO,
    "sd35/awm_geneval": {
        "rollout.groups": (24, 72),
        "rewards.geneval.mode": ("partial", "flow_grpo"),
        "optimise.batch_size": (576, 1728),
        "awm.timestep_fraction": (0.9, 0.857),
        "optimise.ema.decay": (0.9, 0.99),
        "optimise.ema.warmup": (False, True),
    },
    "sd35/dgpo_ocr": {
        "dgpo.clip": (1e-3, 1e-2),
        "dgpo.beta": (1e-3, 0.02),
        "dgpo.advantage_std": ("group", "batch"),
        "optimise.ema.every": (1, 8),
        "optimise.ema.warmup": (False, True),
    },
    "sd35/dppo_pickscore": {
        "rollout.guidance_scale": (4.5, 1.0),
        "grpo.advantage_std": ("group", "batch"),
        "optimise.weight_decay": (1e-4, 0.0),
    },
    "sd35/grpo_guard_ocr": {"grpo.skip_zero": (False, True)},
    "sd35/reform_pickscore": ADV_GRPO,
    "flux/srpo_hpsv2": {"watch.aesthetic.head": ("absent", "v2")},
    "sd35/qma_geneval": {"watch.aesthetic.head": ("absent", "v2")},
}
for recipe in ("flux/gardo_hpsv2", "sd35/gardo_geneval", "sd35/gardo_ocr"):  # at once, as in their code
    CHANGED[recipe] = {"gardo.window_full": (True, "absent")}
# Their code reads 128 tokens of a prompt: the key was not there.
READ_128 = """
acflow_ocr adv_grpo_dino adv_grpo_pickscore awm_geneval dgpo_ocr dpo_ocr gardo_geneval gardo_ocr
grpo_guard_ocr grpo_ocr grpo_ocr_16gb marble_5r nft_geneval nft_ocr nft_ocr_16gb opd_3teachers
reform_pickscore rwr_ocr sft_ocr srum_geneval tempflow_pickscore
"""
for recipe in [f"sd35/{name}" for name in READ_128.split()] + [
    f"flux/{name}" for name in ["gardo_hpsv2", "grpo_pickscore_16gb", "grpo_pickscore_24gb"]
]:
    CHANGED[recipe] = {**CHANGED.get(recipe, {}), "text_length": ("absent", 128)}

# Judges that large recipes watch since, of those that watched nothing that they do not train on: recipe, keys added.
OF_LOOKS = ("watch.pickscore.", "watch.aesthetic.")  # where writing or objects are trained
OF_TEXT = ("watch.clip.", "watch.aesthetic.")  # where a preference is
SINCE = {
    "unscored": 0.02,
    "lora.start": None,
    "lora.kind": "lora",
    "lora.merge": [],
    "lora.reference": "start",
}  # keys that came since, with what every recipe was before
REMOVED |= {
    "direct.align.branches": "both",
    "direct.align.noise": "initial",
}  # keys of every reward that came later, at their default
ADDED: dict[str, tuple[str, ...]] = {
    **{
        f"{family}/grpo_ocr": OF_LOOKS
        for family in (
            "chroma",
            "flux2",
            "hidream",
            "krea2",
            "lumina2",
            "qwen_image",
            "qwen_image21",
            "sana",
            "sd35",
            "z_image",
        )
    },
    **{f"flux/{name}": OF_TEXT for name in ("branch_hpsv2", "g2rpo_hpsv2", "mixgrpo_flash", "rlcm_pickscore")},
    **{f"flux/{name}": OF_LOOKS for name in ("gdro_ocr", "gdro_offline_ocr")},
    **{f"sd35/{name}_pickscore": OF_TEXT for name in ("dense", "dppo", "fdfo", "prdp", "tempflow")},
    **{f"sd35/{name}_geneval": OF_LOOKS for name in ("awm", "crd", "nft", "srum")},
    **{
        f"sd35/{name}_ocr": OF_LOOKS
        for name in ("acflow", "crd", "dgpo", "dpo", "grpo_guard", "hicogen_noise", "nft", "rwr", "sft")
    },
    **{f"sd35/{name}_ocr_16gb": OF_LOOKS for name in ("grpo", "nft")},
    "sd35/opd_3teachers": OF_TEXT,
    "flux/d2align_hpsv2": ("watch.aesthetic.",),
    "sd35/d2align_clip": ("watch.aesthetic.",),
    "flux/gardo_hpsv2": ("watch.clip.",),
    **{
        f"sd35/{name}": ("watch.pickscore.",)
        for name in ("gardo_geneval", "gardo_ocr", "qma_geneval", "rubric_columns")
    },
}


def leaves(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of each plain value; an empty table is a value, too."""
    for name, value in values.items():
        key = f"{path}.{name}" if path else name
        if isinstance(value, dict) and value:
            yield from leaves(value, key)
        else:
            yield key, value


PUBLISHED = {  # a switch of grpo: its value in released code, its name in `published`
    "kl": ("published", "kl"),
    "order": ("first", "first"),
    "skip_zero": (True, "skip_zero"),
    "guidance_gradient": ("published", "guidance"),
}


def gone(key: str, value: Any) -> bool:
    """Whether a key was removed at the value that the code has now."""
    return key in REMOVED and REMOVED[key] == value


def joined(values: dict[str, Any]) -> dict[str, Any]:
    """Frozen leaves, several of which became one key."""
    for key in [key for key in values if key.endswith(".timestep_fraction")]:
        section, share = key.partition(".")[0], values.pop(key)
        if share != 1.0:
            count = values[f"{section}.timesteps"]
            values[f"{section}.timesteps"] = share if count is None else [count, share]
    parts = values.pop("optimise.accumulation")
    if values["optimise.micro_batch"] is None and parts > 1:
        values["optimise.micro_batch"] = floor(1e4 / parts) / 1e4
    for key in ("nft.old", "crd.old", "crd.sampling", "dgpo.old", "awm.average"):
        if f"{key}.start" in values:
            values[key] = [values.pop(f"{key}.{name}") for name in ("start", "value", "slope", "cap")]
    if values.pop("grpo.trust", "divergence") == "clip":
        values["grpo.delta"] = None
    if "grpo.kl" in values:  # four switches: what is as in released code
        values["grpo.published"] = [name for key, (on, name) in PUBLISHED.items() if values.pop(f"grpo.{key}") == on]
    if values["objective"] == "sft":  # a value of what weighs a group's images
        values |= {f"rwr.{key[4:]}": values.pop(key) for key in list(values) if key.startswith("sft.")}
        values |= {"objective": "rwr", "rwr.weights": "best", "rwr.tau": 1.0}
    for key in [key for key in values if key.startswith("image_set.columns")]:
        scores, reward = values.pop(key), key.rpartition(".")[2]
        if scores:  # a reward has the name of its scores in the set
            old, new = f"rewards.{reward}.", f"rewards.{scores}."
            values |= {new + key[len(old) :]: values.pop(key) for key in list(values) if key.startswith(old)}
            values[f"{new}plugin"] = reward
    every = values.pop("dpo.every", None)
    if values.get("dpo.ring") is not None:
        values["dpo.follow"] = every
    for key in [key for key in values if key.endswith(".shape.clip.low")]:
        values[key[:-4]] = [values.pop(key), values.pop(f"{key[:-4]}.high")]
    if (last := values.pop("rollout.noise_decay", None)) is not None:
        values["rollout.noise_level"] = [values["rollout.noise_level"], last]
    if values.pop("crd.adaptive", False) and values["crd.beta"]:
        values["crd.beta"] = [1e-4, values["crd.beta"]]
    if "direct.pair.hinge" in values:
        values["direct.cap"] = values.pop("direct.pair.hinge")
    assert values["engine.tf32"] is False
    values["engine.tf32"] = None  # as Flow-GRPO's code: on where the network is in bf16 or fp16
    assert values.pop("direct.checkpoint_decoder", False) == bool(values.get("direct.decode_chunk"))
    return values


@pytest.fixture(scope="module")
def frozen() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(gzip.decompress(FROZEN.read_bytes()))
    return found


def test_every_recipe_is_frozen(frozen: dict[str, dict[str, Any]]) -> None:
    assert {f"{path.parent.name}/{path.stem}" for path in shipped_configs()} <= frozen.keys()


def test_no_value_has_changed(
    frozen: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    changed: dict[str, dict[str, Any]] = {}
    for name, entry in frozen.items():
        overrides = [f"{RENAMED.get(key, key)}={value}" for key, value in (o.split("=", 1) for o in entry["overrides"])]
        overrides = [one.replace(".timestep_fraction=", ".timesteps=") for one in overrides]
        overrides = [one for one in overrides if one.partition("=")[0] not in REMOVED]
        overrides = [one.replace("optimise.accumulation=2", "optimise.micro_batch=0.5") for one in overrides]
        overrides += ["direct.cap=null"] if "direct.pair=null" in overrides else []  # the hinge was the pair's
        now = dict(leaves(load_config(shipped("configs", *f"{entry['config']}.yaml".split("/")), overrides).resolved()))
        then = {RENAMED.get(key, key): value for key, value in leaves(entry["resolved"]) if not gone(key, value)}
        added = {key for key in now if key.startswith(ADDED.get(name, ())) and "." in key and name in ADDED}
        assert not added & then.keys() and len(added) >= 3 * len(ADDED.get(name, ())), name
        later = {
            key
            for key, value in now.items()
            if value in (SINCE.get(key, SINCE), SINCE.get(key.rpartition(".")[2], SINCE))
        }
        now = {key: value for key, value in now.items() if key not in added | later}
        if added and then.get("watch") == {}:
            del then["watch"]
        for key, (old, new) in CHANGED.get(name, {}).items():
            assert then.get(key, "absent") == old, f"{name}, {key}: {then.get(key)} was frozen"
            then[key] = new
        then = {key: value for key, value in joined(then).items() if not gone(key, value)}
        different = {key for key in now.keys() | then.keys() if now.get(key, "absent") != then.get(key, "absent")}
        if different:
            changed[name] = {key: (then.get(key, "absent"), now.get(key, "absent")) for key in sorted(different)}
    assert not changed


@pytest.mark.long
def test_what_a_run_writes_down_is_read_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's config.yaml has the resolved values, and a resume reads them."""
    monkeypatch.chdir(tmp_path)
    for path in sorted(shipped("configs").rglob("*.yaml")):
        values = load_config(path).resolved()
        assert make_config(yaml.safe_load(yaml.safe_dump(values))).resolved() == values, path
