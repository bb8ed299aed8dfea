"""The config: strict validation with one-line messages, overrides, geometry, and a file that reads back the same."""

import functools
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from diffrl import __version__
from diffrl.cli.config_help import help_config
from diffrl.config import (
    Config,
    check_model,
    door,
    dump,
    find_config,
    load_config,
    make_config,
    read_parameters,
    schema,
)
from diffrl.config.schema import walk
from diffrl.errors import UserError
from diffrl.methods.nft import NFTSection
from diffrl.rewards import registry

BASE = """\
rewards:
  clip: {weight: 2}
rollout:
  groups: 4
  group_size: 6
optimise: {batch_size: 12, micro_batch: 0.25, learning_rate: 1e-4}
"""
GRPO = ("objective=grpo", "rollout.sampler=cps")


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """A folder with a config, prompt files and a model's folder; three rewards; one process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    installed = registry.available()  # whole entries: a module that is imported under the patch reads them
    mine = {name: installed[name] for name in ("clip", "ocr", "playground")}
    monkeypatch.setattr(registry, "available", lambda: mine)
    Path("ok.yaml").write_text(BASE)
    Path("five.txt").write_text("a\nb\nc\nd\ne\n")
    Path("bad.jsonl").write_text('{"prompt": "a"}\n{"prompt" "b"}\n')
    Path("mine.py").write_text("class Mine: ...\n")
    Path("models/sd").mkdir(parents=True)
    return tmp_path


def message(*overrides: str, text: str | None = None) -> str:
    if text is not None:
        Path("ok.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        load_config("ok.yaml", overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_values_defaults_and_overrides():
    overrides = ["rollout.groups=2", "rewards.ocr.weight=0.5", "lora.targets=[to_q, to_k]", "optimise.betas=[0.8, 0.9]"]
    config = load_config("ok.yaml", [*overrides, "rollout.same_noise=false", "seed=3", "nft.old=[3, 0, 0.001, 0.25]"])
    assert (config.rollout.groups, config.rollout.group_size, config.rollout.steps) == (2, 6, 10)
    assert {name: reward.weight for name, reward in config.rewards.items()} == {"clip": 2.0, "ocr": 0.5}
    assert config.lora.targets == ["to_q", "to_k"] and config.optimise.betas == (0.8, 0.9)
    assert config.optimise.learning_rate == 1e-4  # a number, though YAML 1.1 reads 1e-4 as text
    assert (config.seed, config.nft.old) == (3, (3, 0.0, 0.001, 0.25))
    assert config.run_dir == "runs/ok"
    assert (config.rollout.images, config.objective_section) == (12, config.nft)


def test_null_takes_a_reward_or_a_section_out_but_is_a_value_elsewhere():
    config = load_config(
        "ok.yaml", ["rewards.ocr={}", "rewards.clip=null", "rollout=null", "optimise=null", "lora.targets=null"]
    )
    assert list(config.rewards) == ["ocr"] and config.rollout.groups == 48 and config.lora.targets is None
    assert "lora.rank: expected a whole number, got null" in message("lora.rank=null")
    assert 'there is no rewards.clap to take out (nearest: "clip")' in message("rewards.clap=null")


def test_an_empty_section_has_its_defaults():
    config = load_config(write(BASE + "nft:\nwatch:\n  ocr:\n"))
    assert config.nft == NFTSection() and config.watch["ocr"].retries == 0


def write(text: str, name: str = "other.yaml") -> str:
    Path(name).write_text(text)
    return name


def test_arguments_of_a_reward_stand_beside_its_keys():
    config = load_config("ok.yaml", ["rewards.clip.model=ViT-B-32", "rewards.clip.precision=bf16"])
    assert config.rewards["clip"].arguments == {"model": "ViT-B-32", "precision": "bf16"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.group_sise=3", 'rollout.group_sise: unknown key (nearest: "rollout.group_size")'),
        ("objective=sft", 'unknown objective "sft" (it is rwr with rwr.weights: best now)'),
        ("rollout.noise_decay=0.2", "it is the second of rollout.noise_level: [FIRST, LAST] now"),
        (
            "rollout.noise_level=[1,0.5,0]",
            "rollout.noise_level: expected a noise level from 0 to 100, or [FIRST, LAST], got",
        ),
        ("engine.offload_vae=true", "engine.offload_vae: unknown key: it is gone"),
        ("crd.adaptive=false", "crd.adaptive: unknown key: it is crd.beta now: [LOW, HIGH] by reward"),
        ("dpo.every=3", "dpo.every: unknown key: it is dpo.follow now"),
        ("group_size=3", 'group_size: unknown key (nearest: "rollout.group_size")'),
        ("rolout.groups=3", 'rolout: unknown key (nearest: "rollout")'),
        ("nft.old=slwo", "nft.old: expected slow, late, copy, or [start, value, slope, cap]"),
        ("nft.old=[0, 0, 0.001, 1]", "nft.old: expected slow, late, copy, or [start, value, slope, cap]"),
        (
            "nft.timesteps=1.5",
            "nft.timesteps: expected a whole number from 1 to 10000, a share between 0 and 1, [number, share], or null",
        ),
        ("checkpoint.zzz=1", "checkpoint.zzz: unknown key (keys of checkpoint: every, keep, push)"),
        ("rollout.groups=many", 'rollout.groups: expected a whole number, got "many"'),
        ("rollout.groups=2.0", "rollout.groups: expected a whole number, got 2.0"),
        ("rollout.groups=true", "rollout.groups: expected a whole number, got true"),
        ("rollout.groups=010", 'rollout.groups: expected a whole number, got "010"'),
        ("rollout=3", "rollout: expected a section of keys, got 3"),
        ("rewards=[clip]", "rewards: expected a section of keys, got ['clip']"),
        ("model=3", "model: expected text, got 3"),
        ("prompts.overlap=yes", 'prompts.overlap: expected true or false, got "yes"'),
        ("lora.targets=3", "lora.targets: expected a list such as [a, b], got 3"),
        ("optimise.ema=.nan", "optimise.ema.decay: expected a finite number, got nan"),
        ("optimise.ema=1", "optimise.ema.decay: expected less than 1, got 1"),
        ("optimise.betas=[0.9]", "optimise.betas: expected a list of two, got [0.9]"),
        ("optimise.betas=0.9", "optimise.betas: expected a list of two such as [1, 2], got 0.9"),
        ('optimise.betas=[0.9, "0.99"]', 'optimise.betas.1: expected a number, got "0.99"'),
        ("optimise.learning_rate=0", "optimise.learning_rate: expected at least 1e-12, got 0"),
        ("rollout.group_size=1", "rollout.group_size: expected at least 2, got 1"),
        ("rollout.guidance_scale=0", "expected at least 1, got 0; none is 1 here, 0 in diffusers"),
        ("run_dir=$HOME/x", "run_dir: expected a path without $HOME, which only a shell fills in"),
        ("prompts={train: '${X}/p.txt', test: five.txt}", "prompts.train: expected a path without ${X}"),
        (
            "rollout.sampler=dmp2",
            'unknown sampler "dmp2" (nearest: "dpm2")',
        ),
        ("seed.x=1", "seed: expected a whole number, got a section"),
        ("objective=ntf", 'objective: unknown objective "ntf" (nearest: "nft")'),
        ("rewards.clap={}", 'rewards.clap: unknown reward "clap" (nearest: "clip")'),
        ("rewards.a/b={}", 'rewards.a/b: a reward\'s name has letters, digits, "_" and "-" only'),
        ("watch.clip={}", "watch.clip: clip is also in rewards"),
        ("rewards.clip.weight=0", "rewards.clip.weight: 0 optimises nothing; move clip to watch"),
        ("rewards.clip.weight=x", 'rewards.clip.weight: expected a number, got "x"'),
        ("rewards.clip.plugin=mine.py", 'rewards.clip.plugin: "mine.py": write path/to/file.py:Class'),
        ("rewards.clip.plugin=nine.py:Mine", 'rewards.clip.plugin: no file "nine.py" (nearest: "mine.py")'),
        ("rewards=null", "rewards: empty; name at least one (there are: clip, ocr, playground)"),
        ("model=playgruond", 'nor a hub id like stabilityai/stable-diffusion-3.5-medium (nearest: "playground")'),
        ("model=models/st", 'model: no folder "models/st" (nearest: "sd")'),
        ("model=./nowhere/sd", 'model: no folder "./nowhere/sd"'),
        ("model=läufe/sd", 'model: no folder "läufe/sd"'),
        ("model=models/sd", 'model: "models/sd" is a folder without model_index.json'),
        ("prompts.train=five.txt", "prompts.test: not given, but prompts.train is; give both"),
        ("prompts={train: bad.jsonl, test: five.txt}", "prompts.train: bad.jsonl:2: not valid JSON"),
        (
            "prompts={train: five.txt, test: fife.txt}",
            'prompts.test: prompts "fife.txt": no such file (nearest: "five.txt")',
        ),
        ("run_dir=five.txt", 'run_dir: "five.txt" is a file; name a folder'),
        ("run_dir=five.txt/run", 'run_dir: "five.txt" is a file; name a folder'),
        ("rewards.clip.plugin=models:Mine", 'rewards.clip.plugin: "models": write path/to/file.py:Class'),
    ],
)
def test_a_wrong_value_is_named_with_its_key(override, expected):
    text = message(override)
    assert text.startswith("command line: ") or override.startswith("prompts.train")
    assert expected in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.groups", '"rollout.groups": write section.key=value'),
        ("=3", '"=3": write section.key=value'),
        ("rollout..groups=3", "write section.key=value"),
        ("rollout.groups=", "no value; null takes a section or reward out"),
        ("rollout.groups=[", '"rollout.groups=[": not valid YAML'),
        ("model.x.y=1", "model: expected text, got a section"),
        ("rewards.clip.weight.x=1", "rewards.clip.weight is a value, not a section"),
        ("rollout={groups: 1, groups: 2}", "groups is given twice"),
    ],
)
def test_a_malformed_override_is_shown(override, expected):
    assert expected in message(override) and message(override).startswith("command line: ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rollout:\n  groups: 4\n  groups: 5\n", "ok.yaml:3: rollout.groups is given twice (first in line 2)"),
        ("rollout:\n  groups: [4\n", "ok.yaml:3: not valid YAML"),
        ("rollout:\n\tgroups: 4\n", "ok.yaml:2: not valid YAML"),
        ("seed: 1\nepochs: \x07\n", "ok.yaml:2: not valid YAML (character U+0007)"),
        ("- 1\n", "ok.yaml: expected sections and keys such as `epochs: 40`"),
        ("epochs\n", "ok.yaml: expected sections and keys"),
        ("1: 2\n", 'ok.yaml:1: a key must be text, got "1"'),
        ("? [a]\n: 2\n", "ok.yaml:1: a key must be text, got a list or mapping"),
        ("a: &a [*a]\n", "ok.yaml:1: nested too deeply, or an alias that holds itself"),
        ("rewards:\n  clip:\n\nrollout:\n  group_sise: 4\n", "ok.yaml:5: rollout.group_sise: unknown key"),
        ("rewards: {clip: {weight: x}}\n", 'ok.yaml:1: rewards.clip.weight: expected a number, got "x"'),
        ("rewards: {}\nseed: 1\n", "ok.yaml:1: rewards: empty; name at least one"),
        ("seed: 1\n", "ok.yaml: rewards: empty; name at least one"),
        ("seed: a\nepochs: b\n", 'ok.yaml:1: seed: expected a whole number, got "a" (and 1 more)'),
        ("model: !!python/object:os.system {}\n", "ok.yaml:1: not valid YAML"),
        ("[" * 800, "ok.yaml:1: nested too deeply"),
    ],
)
def test_a_bad_file_is_named_with_the_line(text, expected):
    assert message(text=text).startswith(expected)


def test_what_holds_itself_in_a_program_is_named():
    rows, table = [], {}
    rows.append(rows)
    table["x"] = table
    for values, key in (({"lora": {"merge": rows}}, "lora.merge"), ({"rewards": table}, "rewards"), (table, "x")):
        message = f"^argument: {key}: nested too deeply, or a list or table that holds itself$"
        for base, more in ((None, values), ("playground/nft", values), (values, None)):
            with pytest.raises(UserError, match=message):
                make_config(base, values=more)


def test_unreadable_files():
    with pytest.raises(UserError, match=r'no config "ko\.yaml" \(nearest: "ok\.yaml"\)'):
        load_config("ko.yaml")
    with pytest.raises(UserError, match=r'config "models" is a folder; name a YAML file'):
        load_config("models")
    os.mkfifo("pipe")  # what `<(...)` of a shell is
    for read in (load_config, make_config, find_config):
        for name, expected in (
            ("", r'"\." is a folder; name a YAML file'),
            ("/", '"/" is a folder'),
            ("pipe", '"pipe" is a FIFO; name a YAML file'),
            ("/dev/null", '"/dev/null" is a device; name a YAML file'),
            ("a" * 5000, '"a{60}": cannot be read: File name too long'),
            ("a\0", "cannot be read: "),
        ):
            with pytest.raises(UserError, match=f"^config .*{expected}"):
                read(name)
    Path("latin.yaml").write_bytes(b"seed: 1\n# \xe9\n")
    with pytest.raises(UserError, match=r"latin\.yaml:2: not UTF-8 text"):
        load_config("latin.yaml")


@pytest.mark.parametrize(
    ("overrides", "world", "expected"),
    [
        (["optimise.batch_size=7"], 1, "7 images per optimiser step do not divide the 24 images of an epoch"),
        (["optimise.batch_size=48"], 1, "(rollout.groups 4 x rollout.group_size 6)"),
        (["optimise.micro_batch=1.5"], 1, "a whole number of at least 1, a share between 0 and 1, auto, or null"),
        ([], 5, "rollout.groups: 5 processes do not divide the 24 images of an epoch"),
        ([], 8, "optimise.batch_size: 8 processes do not divide the 12 images of an optimiser step"),
        (["prompts={train: five.txt, test: five.txt}", "rollout.groups=6"], 1, "prompts.train has only 5"),
        (
            ["nft.timesteps=[4, 0.3]"],
            1,
            "nft.timesteps: 4 timesteps, but the schedule has only 3 (rollout.steps x 0.3)",
        ),
        (["nft.timesteps=11"], 1, "nft.timesteps: 11 timesteps, but the schedule has only 10 (rollout.steps)"),
        (
            ["objective=rwr", "rwr.timesteps=0.3", "rwr.timestep_sampling=uniform"],
            1,
            'rwr.timesteps: 0.3 of the schedule\'s timesteps, but rwr.timestep_sampling is "uniform"',
        ),
        (["rollout.window=2"], 1, "rollout.window: 2 stochastic steps, but 0 of the 10 steps"),
        (["rollout.same_noise=true"], 1, "all images of a group would be the same"),
        (
            ["objective=grpo"],
            1,
            'rollout.sampler: "dpm2" is deterministic, but objective "grpo" needs log-probabilities',
        ),
        (["objective=grpo", "rollout.sampler=euler"], 1, "use one of flow_sde, dance, cps, ddim, renoise"),
        ([*GRPO, "rollout.noise_level=0"], 1, "rollout.noise_level: 0 is deterministic"),
        ([*GRPO, "rollout.noise_level=1.5"], 1, "rollout.noise_level: expected at most 1 with cps, got 1.5"),
        ([*GRPO, "rollout.steps=1"], 1, "rollout.steps: 1 of cps has no stochastic step"),
        ([*GRPO, "rollout.window=10"], 1, "rollout.window: 10 stochastic steps, but 9 of the 10 steps"),
        ([*GRPO, "rollout.window=3", "rollout.window_range=[2, 10]"], 1, "[2, 10] is not within [0, 9]"),
        ([*GRPO, "rollout.window=3", "rollout.window_range=[2, 4]"], 1, "too short for a window of 3 steps"),
        (["objective=direct", "advantages.agree=leave_out"], 1, 'which objective "direct" does not use'),
        (
            ["advantages.agree=floor"],
            1,
            'advantages.agree: "floor" is a least std of the group, but nft.advantage_std is',
        ),
        (["rollout.noise_level=[1,0.5]"], 1, 'rollout.noise_level: falls, but the sampler "dpm2" draws no noise'),
        (
            [*GRPO, "rollout.noise_level=[0.7,0.9]"],
            1,
            "rollout.noise_level: [0.7, 0.9] rises: the first is that of the noisiest step",
        ),
        ([*GRPO, "rollout.window=3", "rollout.window_move=[0, 1]"], 1, "rollout.window_move: [0, 1]: both must be"),
        ([*GRPO, "rollout.window=3", "rollout.window_move=[1, 0]"], 1, "rollout.window_move: [1, 0]: both must be"),
        (["rollout.window_move=[1, 1]"], 1, 'rollout.window_move: the sampler "dpm2" has no stochastic steps'),
        ([*GRPO, "rollout.window=3", "grpo.timesteps=4"], 1, "4 steps, but only 3 are stochastic (rollout.window)"),
        ([*GRPO, "grpo.timesteps=10"], 1, "10 steps, but only 9 are stochastic (rollout.steps)"),
    ],
)
def test_impossible_geometry_names_both_values(overrides, world, expected):
    with pytest.raises(UserError) as caught:
        load_config("ok.yaml", overrides, world=world)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        ([], 2),
        (["optimise.micro_batch=0.2"], 12),
        (["rollout.sampler=flow_sde"], 1),
        (["objective=rwr", "rwr.timesteps=20", "rwr.timestep_sampling=uniform"], 1),
        (["nft.timesteps=[3, 0.3]", "optimise.micro_batch=null"], 1),
        ([*GRPO, "rollout.window=3", "rollout.window_range=[1, 5]", "grpo.timesteps=2", "rollout.same_noise=true"], 1),
        (["rewards.mine.plugin=mine.py:Mine", "watch.ocr={}"], 1),
        (["prompts={train: five.txt, test: five.txt, overlap: true}"], 1),
        (
            ["model=stabilityai/sd3", "rewards.clip.model=ViT-H-14", "prompts.train=five.txt", "prompts.test=ocr/test"],
            1,
        ),
    ],
)
def test_what_is_possible_passes(overrides, world):
    load_config("ok.yaml", overrides, world=world)


def test_processes_come_from_the_launcher(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert "5 processes" in message()
    monkeypatch.setenv("WORLD_SIZE", "five")
    assert message() == 'environment: WORLD_SIZE: expected the number of processes, got "five"'


def test_a_missing_extra_is_said_before_the_run(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert message("tracking.trackers=[wandb]") == (
        'command line: tracking.trackers: wandb is not installed: pip install "diffrl[wandb]"'
    )
    assert message("tracking.trackers=[mlflow]").endswith("mlflow is not installed: pip install mlflow")


def test_models():
    Path("models/sd/model_index.json").write_text("{}")
    for good in ("playground", "models/sd", "./models/sd", str(Path("models/sd").resolve()), "org/name"):
        check_model(good)
    for bad in ("a/b/c", "/nowhere/sd", "sd3", "models"):
        with pytest.raises(UserError):
            check_model(bad)


def test_dump_reads_back_the_same(tmp_path):
    odd = ["rewards.clip.model='1e-3'", "rewards.clip.tag='no'", "rewards.clip.empty=''", "rewards.clip.tau=1e-30"]
    odd += ["rewards.clip.list=[1, a, null, true]", "rewards.clip.deep={x: 0.1}", "rewards.clip.text='üß: # x'"]
    config = load_config("ok.yaml", [*odd, "watch.ocr={}", "rollout.window_range=null"])
    dump(config, tmp_path / "run" / "config.yaml")
    assert load_config(tmp_path / "run" / "config.yaml") == config
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert text.startswith(f"diffrl_version: {__version__}\nmodel: playground\n")
    plain = yaml.safe_load(text)  # by the rules of YAML 1.1 as well
    assert plain["rewards"]["clip"]["model"] == "1e-3" and plain["rewards"]["clip"]["tag"] == "no"
    assert plain["optimise"]["betas"] == [0.9, 0.999]
    assert os.listdir(tmp_path / "run") == ["config.yaml"]


@pytest.mark.filterwarnings("error")
def test_pictures_that_are_not_square_are_kept_without_a_warning(tmp_path):
    config = load_config("ok.yaml", ["rollout.resolution=[24, 20]", "evaluate.resolution=[64, 32]"])
    dump(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    assert config.rollout.resolution == (24, 20) and config.resolved()["evaluate"]["resolution"] == [64, 32]


def _is_off(config: Config, names: list[str]) -> bool:
    value = functools.reduce(lambda value, name: getattr(value, name, 0), names, config)
    return value is None and schema.is_section(tuple(names))


def test_resolved_has_every_key():
    config = load_config("ok.yaml")
    resolved = config.resolved()
    for key, _, inner in walk():
        section = key.split(".")[0]
        if getattr(config, section) is None:  # it is off
            assert key.split(".")[0] not in resolved
            continue
        if ".also." in key:  # there are none
            assert resolved["evaluate"]["also"] == {}
            continue
        if ".shape." in key:  # a step that is off
            assert resolved["rewards"]["clip"]["shape"] == {}
            continue
        names = key.replace("NAME", "clip").split(".")
        inner_off = next((i for i in range(2, len(names) + 1) if _is_off(config, names[:i])), None)
        if inner_off is not None:
            assert names[inner_off - 1] not in resolved[names[0]]
            continue
        value = resolved
        for name in names:
            if key.split(".")[0] == "watch" and name == "clip":
                break
            value = value[name]
        assert inner is None or isinstance(value, dict)


def test_help_names_every_key_with_its_default():
    text = help_config(100)
    for key, field, inner in walk():
        assert field.description and "\n" not in field.description, key
        if not key.startswith("watch."):
            assert f"{key.split('.')[-1]}:" in text
        if inner is None and not key.startswith(("rewards.", "watch.")):
            assert all(word in text for word in field.description.split())
    assert "  learning_rate: 0.0003 " in text and "  groups: 48 " in text and "null" in text
    assert max(map(len, text.splitlines())) <= 110


def test_the_defaults_work_together():
    config = load_config(write("rewards: {clip: {}}"))
    assert config.optimise.batch_size * 2 == config.rollout.images  # two optimiser steps an epoch, as published
    assert [name for name in door.objectives() if name in config.resolved()] == ["nft"]


class Gate(schema.Section):
    method = schema.Method("gate", "Gate", kind="wrapper")
    share: float = schema.key(0.1, "share")

    def check(self, config):
        if config.objective == "nft":
            raise schema.Problem("gate.share", "not with nft")


def test_a_method_is_one_entry_point(monkeypatch, installed):
    """What a later method does: a section that is installed; it is off by default and null takes it out."""
    monkeypatch.setitem(sys.modules, "diffrl.methods.gate", SimpleNamespace(Gate=Gate))
    installed("gate", "diffrl.methods.gate:Gate", "diffrl.methods")
    assert load_config("ok.yaml").resolved().get("gate") is None
    assert 'gates: unknown key (nearest: "gate")' in message("gates={}")
    assert message("gate={}") == "command line: gate.share: not with nft"
    on = load_config("ok.yaml", ["gate.share=0.5", *GRPO])
    assert on.gate.share == 0.5 and on.resolved()["gate"] == {"share": 0.5}
    assert load_config("ok.yaml", ["gate.share=0.5", "gate=null"]).gate is None
    assert load_config(write(BASE + "gate:\n"), GRPO).gate.share == 0.1


class Half(schema.Section):
    about = "half of an epoch's prompts come with images"
    whose: str = schema.key("", "whose images")

    def check(self, config):
        if not self.whose:
            raise schema.Problem("half.whose", "not given")

    def check_world(self, config, world):
        if world > 1:
            raise schema.Problem("half.whose", f"{world} processes cannot share it")

    def gives(self, config):
        return config.rollout.groups // 2


def test_a_section_that_is_no_method_s_is_one_entry_point(monkeypatch, installed):
    monkeypatch.setitem(sys.modules, "of_a_stranger", SimpleNamespace(Half=Half, none=print))
    assert "half: unknown key" in message("half={}")
    installed("half", "of_a_stranger:Half", "diffrl.sections")
    assert message("half={}") == "command line: half.whose: not given"
    on = load_config("ok.yaml", ["half.whose=meadow"])
    assert on.half.whose == "meadow" and on.resolved()["half"] == {"whose": "meadow"}
    assert on.given_groups == on.drawn_groups == on.rollout.groups / 2
    assert on.method.name == "nft" and [one.name for one in on.methods] == ["nft"]
    off = load_config("ok.yaml", ["half.whose=meadow", "half=null"])
    assert off.half is None and off.given_groups == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert message("half.whose=meadow") == "command line: half.whose: 2 processes cannot share it"
    installed("half", "of_a_stranger:none", "diffrl.sections")
    assert message("half={}").endswith('half: "half" is not a diffrl.config.base.Section')


def test_parameters():
    assert read_parameters(["a=1e-3", "b=[x, 2]", "c=no", "d=null"]) == {"a": 1e-3, "b": ["x", 2], "c": "no", "d": None}
    with pytest.raises(UserError, match='"a": write parameter=value'):
        read_parameters(["a"])


@pytest.mark.parametrize("objective", door.objectives())
def test_sections_fit_the_objectives(objective):
    from diffrl.run.build import build_objective
    from diffrl.samplers import SamplerSpec

    needs = door.methods()[objective].needs
    words = [f"{section}.{name}={json.dumps(value)}" for section in needs for name, value in needs[section].items()]
    config = load_config("ok.yaml", ["rollout.sampler=flow_sde", f"objective={objective}", *words])
    built = build_objective(config, SamplerSpec("flow_sde"))
    assert config.method.trainer == f"{type(built).__module__}:{type(built).__name__}"


def test_a_config_of_an_earlier_version_is_said_to_be_one(tmp_path: Path) -> None:
    """A resume or a publish of its run blamed a line that the user had never written."""
    path = tmp_path / "config.yaml"
    path.write_text("diffrl_version: 0.1.0\nmodel: playground\nrewards: {playground: {}}\nfrozen: 3\n")
    theirs = f"{path}: written by diffrl 0.1.0, which this version, {__version__}, does not read: use that version"
    with pytest.raises(UserError, match=re.escape(theirs)):
        load_config(path)
    path.write_text(path.read_text().replace("0.1.0", __version__))
    with pytest.raises(UserError, match=r"config.yaml:4: frozen: unknown key"):
        load_config(path)


def test_an_average_may_be_its_decay_alone():
    alone, whole = (load_config("ok.yaml", [word]) for word in ("optimise.ema=0.5", "optimise.ema={decay: 0.5}"))
    assert alone == whole and alone.resolved()["optimise"]["ema"] == {"decay": 0.5, "every": 1, "warmup": False}


def test_there_are_at_most_200_keys() -> None:
    """A new one takes the place of another."""
    assert sum(inner is None and not dotted.startswith("watch.") for dotted, _, inner in walk()) <= 200
