"""What README, docs and a help text show is run on a small world: commands, Python and configs.

A command is changed by the one table below: real models and judges become tiny or shipped ones, sizes become small.
What is not run has its reason there; it is still parsed, so that an option that is gone is noticed.
`python tests/lab/test_shown_commands.py` lists all blocks of all pages with how they are run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from tiny import tiny_sd3

import diffrl
from diffrl.api import prepare
from diffrl.cli.main import _parser, main
from diffrl.config.load import load_config
from diffrl.prompts import load_prompts
from diffrl.serving.secrets import allowed

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "AGENTS.md",
    "rewards/README.md",
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md")),
)
SHELLS = ("", "bash", "sh", "shell", "console")

# Of every command that trains: seconds in the place of minutes.
TINY = """epochs=1 rollout.groups=2 rollout.group_size=4 rollout.batch_size=8 optimise.batch_size=4
optimise.micro_batch=null evaluate.prompts=2 evaluate.per_prompt=2"""

# Of a recipe for Stable Diffusion 3.5: a tiny random model of its class, and rewards that need no weights.
ON_SD3 = """model=sd3 rollout.resolution=16 optimise.precision=fp32 rewards.ocr=null rewards.jpeg.weight=1 watch=null
evaluate.features=pixels prompts.train=my_train.txt prompts.test=my_test.txt""".replace("\n", " ")

# What stands for what: the first rows are tried first.
INSTEAD = (
    (
        r"^(accelerate launch|torchrun|python -m diffrl.launch) .*?-m diffrl",
        "diffrl",
    ),  # several processes: tests/integration
    (r"^diffrl demo$", "diffrl train playground/demo epochs=1 run_dir=runs/demo2"),
    (r"^diffrl demo ", "diffrl train playground/demo run_dir=runs/demo3 "),
    (r"stabilityai/stable-diffusion-3.5-medium|OWNER/MODEL|\bMODEL\b", "playground"),
    (r"rewards\.(ocr|hpsv2)\.", "rewards.clip."),
    (r"(watch\.)?clip\.(model|pretrained)=\S+", ""),  # the playground's own CLIP
    (r"\bhpsv2\b", "artefact"),
    (r"\bpickscore\b(?!/)", "clip"),
    (r"pickscore/(test|train)|ocr/(test|train)", "test.txt"),
    (r"--limit \d+", "--limit 2"),
    (r"--per-prompt \d+", "--per-prompt 2"),
    (r"--budget \d+", "--budget 24"),
    (r"--seeds \d+", "--seeds 1"),
    (r"--jobs \d+", "--jobs 1"),
    (r"epochs=\d+", "epochs=1"),
    (r"runs/reproduce/RUN|\bRUN\b(?!/)|runs/(NAME|words)", "runs/my"),
    (r"^(diffrl replay \S+) \d+ \d+", r"\1 1 1"),
    (r"^diffrl init my.yaml", "diffrl init fresh.yaml"),
    (r"^diffrl init --objective mine", "diffrl init --objective fresh"),
    (r"runs/sweep", "runs/a runs/b"),
    (r"divgen report models/", "divgen report divgen/"),
    (r"^(diffrl (evaluate|divgen generate) (?!.*--limit).*)", r"\1 --limit 2"),
    (r"^(diffrl divgen generate .*)--out divgen/", r"\1--steps 2 --out NEW/"),
    (r"^(diffrl report .*--divgen)", r"\1 --limit 1"),
    (r"rewards\.ocr=null", ""),
    (r"my_objective\.py:MyObjective", "mine.py:Mine"),
    (r"^diffrl rewards new sharpness", "diffrl rewards new bluntness"),
    (r"^diffrl rewards check sharpness", "diffrl rewards check sharpness/sharpness_reward.py:Sharpness"),
    (r"--resume runs/my optimise", "--resume runs/b optimise"),
    (r"^(diffrl train (?!.*(--resume|run_dir)).*)", r"\1 run_dir=runs/NEW"),
    (r"--out (searched|merged)", "--out NEW"),
    (r"--step 300( --snapshot ema)?", "--step 2"),
    (r"path/to/", ""),
    (r"^(diffrl train (?!.*--resume).*)run_dir=\S+", r"\1run_dir=runs/NEW"),
    (r"^(diffrl completion \w+) > .*", r"\1"),
    (r"^(diffrl train (configs/)?sd35/\w+)", rf"\1 {ON_SD3}"),
    # 16 pictures in the place of 2,048, and 20 steps of 3,000: tests/integration/test_d2align_runs.py
    (r"(?<=playground/d2align)(?= run_dir)|(?<=d2align.learning_rate=2e-5)", " d2align.pool=16 d2align.steps=20"),
)

# What is not run here, and why.
NOT_RUN = {
    r"^(git|pip|hf|make|rm|cp|curl|export|grep|eval|cd|sbatch)\b": "not a command of diffrl",
    r"hub:|--push|checkpoint\.push|OWNER/NAME": "needs the hub: tests/unit/test_hub.py has one",
    r"^diffrl (watch|rewards serve)\b": "serves until it is stopped: test_watch.py, test_reward_serving.py",
    r"^vllm|\.server=|remote:": "needs a judge: tests/unit/test_zoo_vlm.py has one",
    r"diffrl bench (?!--list)": "needs a benchmark's files: tests/unit/test_bench.py writes them",
    r"^diffrl rewards audit": "minutes: tests/unit/test_audit.py",
    r"^python (?!-m diffrl.launch)|^(ENGINE=\w+ )?scripts/": "tests of that script",
    r"\.\.\.|\[[A-Z]|\|": "a form, not a command",
    r"tiny-(model|pipeline)|my_family": "tests/unit/test_families_2026.py checks a family of one's own",
    r"csd:|wikiart": "needs weights",
    r"\+\S+\.(safetensors|gguf)": "needs a file of weights: tests/unit/test_single_file.py writes them",
    r"^diffrl rewards fit": "needs people's votes: tests/unit/test_fit.py",
    r"^diffrl d2align learn": "minutes: tests/integration/test_d2align_runs.py",
    r"^diffrl sweep": "processes of its own: tests/unit/test_sweep.py",
    r"sd35/\w+ lora\.start=": "needs a LoRA of that model: tests/integration/test_lora_start.py",
    r"mine\.py:clipped": "tests/unit/test_advantage_rules.py",
    r"bounded\.most": "tests/integration/test_outside.py",
    r"diffrl train (configs/)?(?!playground|sd35)\w+/\w+": "needs the model: the config is read",
    r"^diffrl models check": "minutes: tests/integration/test_matrix_families.py",
}

# The same for Python; TINY overrides what a training names.
PYTHON_INSTEAD = (
    (r'(diffrl\.train\("playground/demo",|diffrl\.train\(config,)', r"\1 *TINY,"),
    (r'"seed=1"', '"seed=1", *TINY'),
    (r"runs/(red|mine)", "runs/PAGE-\\1"),
)
# What a shown piece of a file stands among.
INSIDE = {"docs/add-a-model.md": "diffrl.families.z_image"}


class Shown(NamedTuple):
    where: str
    line: str


def in_pages() -> Iterator[Shown]:
    for page in PAGES:
        for language, block in re.findall(
            r"^```(\w*)[^\n]*\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
        ):
            if language in SHELLS:
                for line in block.replace("\\\n", " ").splitlines():
                    line = " ".join(f" {line}".split(" #")[0].split())
                    if line and (language or re.match("(diffrl|accelerate|torchrun|python -m diffrl.launch) ", line)):
                        yield Shown(page, line)


def in_helps() -> Iterator[Shown]:
    for parser in _parsers(_parser()):
        text = re.sub(r"\\\n\s*", " ", (parser.epilog or "").partition("example")[2].partition(":")[2])
        for line in text.splitlines():
            if re.match(r"(diffrl|accelerate|python -m diffrl.launch) ", line := " ".join(line.split())):
                yield Shown(f"{parser.prog} --help", line)


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in dict.fromkeys(action.choices.values()):
                yield from _parsers(below)


def reason(line: str) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, line)), None)


def words_of(line: str) -> list[str]:
    for pattern, text in INSTEAD:
        line = re.sub(pattern, text, line)
    words = shlex.split(line)[1:]
    trains = words[0] in ("train", "headroom", "sweep") or words[:2] == ["d2align", "learn"]
    if trains and "--resume" not in words and "--help-config" not in words:
        words += TINY.split()
    return words


ALL = [*in_pages(), *in_helps()]
RUN = list({tuple(words_of(one.line)): one.line for one in ALL if reason(one.line) is None}.values())


@pytest.mark.parametrize(
    "shown",
    [one for one in ALL if re.match("(diffrl|accelerate|torchrun|python -m diffrl.launch) ", one.line)],
    ids=lambda one: f"{one.where}: {one.line}"[:90],
)
def test_a_shown_command_is_read(shown: Shown, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    if reason(shown.line) == "a form, not a command":
        return
    line = re.split(
        r" (?:\|\||>) ",
        re.sub(r"^(accelerate launch|torchrun|python -m diffrl.launch) .*?-m diffrl|^diffrl", "", shown.line),
    )[0]
    words = shlex.split(line, comments=True)
    arguments, rest = _parser().parse_known_args(words)
    assert not [word for word in rest if word.startswith("-")]
    assert arguments.words_anywhere or not rest
    if words[0] == "train" and re.match(r"(configs/)?(?!playground)\w+/\w+", words[1]):
        prepare(words[1], [word for word in words[2:] if "=" in word])


def do(line: str) -> None:
    assert main(line.split()) == 0, line


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of somebody who has trained: configs, prompts, rewards, one run and one scored set under many names."""
    place = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        Path("configs").symlink_to(ROOT / "configs")
        Path("examples").symlink_to(ROOT / "examples")
        Path("assets").symlink_to(ROOT / "assets")
        prompts = [prompt.text for prompt in load_prompts("playground/compositional/train")[:100]]
        for name in ("test.txt", "my_test.txt"):
            Path(name).write_text("\n".join(prompts[:8]))
        Path("my_train.txt").write_text("\n".join(prompts[8:]))
        Path("my.jsonl").write_text("".join(f'{{"prompt": "{text}", "kind": "plain"}}\n' for text in prompts[:4]))
        reward = (ROOT / "tests" / "data" / "redness.py").read_text()
        for name in ("my_reward.py", "my_rewards.py"):
            mine = "class Mine(Redness):\n    name = 'mine'"
            function = "def redness(images):\n    return images[:, 0].mean((1, 2))"
            Path(name).write_text(f"{reward}\n\n{mine}\n\n{function}\n")
        tiny_sd3(place / "sd3")
        do("init my.yaml --model playground --rewards playground,clip --train my_train.txt --test my_test.txt")
        do("init --objective mine")
        do("rewards new sharpness")
        config = yaml.safe_load(Path("my.yaml").read_text())
        for key, value in (word.split("=") for word in TINY.split()):
            section, _, name = key.rpartition(".")
            (config.setdefault(section, {}) if section else config)[name] = yaml.safe_load(value)
        Path("my.yaml").write_text(yaml.safe_dump(config))
        do("train my.yaml run_dir=runs/my")
        shutil.copytree("runs/my/lora", "runs/my/healthy", dirs_exist_ok=True)
        shutil.copytree("runs/my/lora", "runs/my/dial/lora")
        shutil.copyfile("runs/my/lora/pytorch_lora_weights.safetensors", "style.safetensors")
        for name in ("demo", "nft", "grpo", "a", "b", "mine"):
            shutil.copytree("runs/my", f"runs/{name}")
        do("divgen generate playground --small --limit 1 --per-prompt 2 --steps 2 --out divgen/base")
        do("divgen score divgen/base")
        for name in ("nft", "mine"):
            shutil.copytree("divgen/base", f"divgen/{name}")
    return place


@pytest.mark.parametrize("line", RUN)
def test_a_shown_command_runs(
    line: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    new = f"new{len(list(place.glob('**/new*')))}"
    words = [word.replace("NEW", new) for word in words_of(line)]
    code = main(words)
    output = capsys.readouterr()
    assert code == 0 or (code == 1 and words[0] == "doctor"), f"{' '.join(words)}\n{output.err}"  # it may not fit


def blocks(*languages: str) -> Iterator[Shown]:
    """The other blocks of all pages."""
    for page in PAGES:
        for language, block in re.findall(
            r"^```(\w+)[^\n]*\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
        ):
            if language in languages:
                yield Shown(page, block)


def _ids(shown: list[Shown]) -> list[str]:
    return [f"{one.where}-{number}" for number, one in enumerate(shown)]


PYTHON, YAML, DATA = (list(blocks(*languages)) for languages in (("python",), ("yaml",), ("json", "toml")))


@pytest.mark.parametrize("shown", PYTHON, ids=_ids(PYTHON))
def test_a_shown_program_runs(shown: Shown, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    code = shown.line
    for pattern, text in PYTHON_INSTEAD:
        code = re.sub(pattern, text.replace("PAGE", Path(shown.where).stem), code)
    around = vars(importlib.import_module(INSIDE[shown.where])) if shown.where in INSIDE else {"diffrl": diffrl}
    exec(compile(code, shown.where, "exec"), {**around, "TINY": TINY.split()})


@pytest.mark.parametrize("shown", YAML, ids=_ids(YAML))
def test_a_shown_config_is_one(shown: Shown, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    mine, found = yaml.safe_load(Path("my.yaml").read_text()), yaml.safe_load(shown.line)
    if shown.where == "docs/security.md":  # the settings of a machine
        Path("settings.yaml").write_text(shown.line)
        monkeypatch.setenv("DIFFRL_SETTINGS", "settings.yaml")
        assert {kind: allowed(kind) for kind in found} == found
        return
    base = {"model": "playground", "prompts": mine["prompts"], "rewards": {"jpeg" if "model" in found else "clip": {}}}
    if teachers := found.get("opd", {}).get("teachers", {}).values():
        base["prompts"] = {"train": {name: 1 for one in teachers for name in one["prompts"]}, "test": "ocr/test"}
    Path("shown.yaml").write_text(yaml.safe_dump({**base, **found}))
    load_config(Path("shown.yaml"))


@pytest.mark.parametrize("shown", DATA, ids=_ids(DATA))
def test_shown_data_is_read(shown: Shown) -> None:
    assert json.loads(shown.line) if shown.line.startswith("{") else tomllib.loads(shown.line)


def listing() -> Iterator[str]:
    """A row of Markdown for everything shown: where, what, and how it is run."""
    yield from ("| where | what | how it is run |", "| --- | --- | --- |")
    for one in ALL:
        why = reason(one.line)
        instead = " ".join(["diffrl", *words_of(one.line)]) if why is None else ""
        how = f"not run, its options are read: {why}" if why else "as it is" if instead == one.line else f"`{instead}`"
        yield f"| {one.where} | `{one.line}` | {how} |".replace("||", "\\|\\|")
    for kind, shown in (("Python", PYTHON), ("config", YAML), ("data", DATA)):
        for one in shown:
            how = "executed, small" if kind == "Python" else "read by what reads such a file"
            yield f"| {one.where} | {kind}: `{one.line.strip().splitlines()[0]}` | {how} |"
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        yield f"| examples/{path.name} | notebook | executed, small: tests/integration/test_notebooks.py |"


if __name__ == "__main__":
    print("\n".join(listing()))
