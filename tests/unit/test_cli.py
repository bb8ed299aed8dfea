"""The command line: exit codes, one line for a mistake, and what each command hands to the library."""

import argparse
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from diffrl import __version__
from diffrl.cli.commands import table
from diffrl.cli.main import TABLES, _parser, main
from diffrl.config import dump, load_config
from diffrl.drawing import Scores
from diffrl.errors import UserError
from diffrl.rewards import registry

CONFIG = """\
rewards: {clip: {weight: 2}}
rollout: {groups: 4, group_size: 6}
optimise: {batch_size: 12, micro_batch: 0.25}
"""
SAMPLE = ["sample", "playground", "--prompts", "p.txt"]
EVALUATE = ["evaluate", "playground", "--prompts", "p.txt"]


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """A folder with a config, prompts and a run; two rewards; one process."""
    monkeypatch.chdir(tmp_path)
    for variable in ("WORLD_SIZE", "DIFFRL_DEBUG"):
        monkeypatch.delenv(variable, raising=False)
    installed = registry.available()  # whole entries: a module that is imported under the patch reads them
    monkeypatch.setattr(registry, "available", lambda: {name: installed[name] for name in ("clip", "ocr")})
    Path("ok.yaml").write_text(CONFIG)
    Path("p.txt").write_text("a\nb\n")
    for run in ("runs/one", "runs/two"):
        Path(run, "lora").mkdir(parents=True)
        Path(run, "metrics.jsonl").write_text("")
    Path("runs/empty").mkdir()
    Path("runs/one/lora/pytorch_lora_weights.safetensors").write_text("")
    dump(load_config("ok.yaml", ["run_dir=runs/one"]), "runs/one/config.yaml")


@pytest.fixture
def calls(monkeypatch):
    """What the library is called with; set `calls.error` to make it fail. Modules that import torch are replaced."""

    class Calls(list):
        error: BaseException | None = None

    calls = Calls()

    def stub(module: str, name: str, result=None):
        def function(*args, **kwargs):
            calls.append((name, args, kwargs))
            if calls.error is not None:
                raise calls.error
            return result

        fake = sys.modules.get(module) if isinstance(sys.modules.get(module), Fake) else Fake(module)
        setattr(fake, name, function)
        monkeypatch.setitem(sys.modules, module, fake)
        package, _, short = module.rpartition(".")  # which has the real one where another test has imported it
        monkeypatch.setattr(importlib.import_module(package), short, fake, raising=False)

    class Fake(ModuleType):
        pass

    stub("diffrl.run.train", "train")
    stub("diffrl.drawing", "sample")
    errors = {"clip": 0.01, "ocr": 0.0}
    scores = Scores({"mean": {"clip": 0.25, "ocr": None}, "standard_error": errors, "diversity": 0.5})
    stub("diffrl.drawing", "evaluate", scores)
    for name in ("write_comparison", "write_table", "text_of"):
        stub("diffrl.report.compare", name)
    drawn = Fake("diffrl.report.drawn")
    drawn.write_drawn = lambda folder, facts: folder / "images.html"
    monkeypatch.setitem(sys.modules, "diffrl.report.drawn", drawn)
    stub("diffrl.reward_tools.check", "check", False)
    stub("diffrl.reward_tools.cards", "overview", "the cards")
    return calls


def fails(capsys, *argv: str) -> str:
    """The one line on stderr of a command that must end with 2."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("diffrl: error: ") and err.count("\n") == 1
    return err.removeprefix("diffrl: error: ").strip()


def test_the_first_help_has_twelve_commands_at_most_and_lab_the_others(capsys):
    assert main(["--help"]) == 0
    first = set(re.findall(r"^  ([a-z2-]+) ", capsys.readouterr().out, re.MULTILINE))
    assert main(["lab"]) == 0
    others = set(re.findall(r"^  ([a-z2-]+) ", capsys.readouterr().out, re.MULTILINE))
    commands = next(action.choices for action in _parser()._actions if isinstance(action.choices, dict))
    assert 8 <= len(first) <= 12 and not first & others and first | others == set(commands)
    assert main(["lab", "version"]) == 0 and capsys.readouterr().out.startswith("diffrl ")


@pytest.mark.parametrize(
    "name", ["sd35", "sd3.5", "SD3", "StableDiffusion3", "qwenimage21", "qwen", "flux dev", "SDXL base"]
)
def test_models_and_configs_are_found_by_what_people_type(name, capsys):
    assert main(["models", "show", name]) == 0
    assert "multiples of" in capsys.readouterr().out
    if "." in name:
        assert main(["configs", name]) == 0
        assert "sd35/nft_ocr_16gb" in capsys.readouterr().out


def test_help_and_version(capsys):
    assert main([]) == 0
    assert "usage: diffrl" in capsys.readouterr().out
    for command in ("train", "sample", "evaluate", "compare", "rewards", "doctor", "version"):
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert "\nexample" in text and f"\n  diffrl {command}" in text
    for words in (["version"], ["--version"]):
        assert main(words) == 0
        assert capsys.readouterr().out == f"diffrl {__version__}\n"
    for words, sections in (
        ("", "nft"),
        ("playground/gardo", "grpo gardo"),
        ("all", "nft grpo gardo"),
        ("nft.b", "nft"),
    ):
        assert main(["train", *words.split(), "--help-config"]) == 0
        text = capsys.readouterr().out
        found = [name for name in ("nft", "grpo", "gardo") if f"\n{name}:" in text]
        assert found == sections.split() and ("  group_size: 24" in text) == ("." not in words), words


def test_every_command_of_the_tables_has_its_function() -> None:
    entries = [entry for name in TABLES for entry in table(name).values() if "call" in entry]
    assert len(entries) > 30
    for entry in entries:
        module, function = entry["call"].split(":")
        assert callable(getattr(importlib.import_module(f"diffrl.cli.{module}"), function)), entry["call"]


def test_help_and_mistakes_are_answered_before_torch_is_imported():
    script = """
import sys
from diffrl.cli.main import _parser, main
codes = [main(words.split()) for words in (
    "", "train --help", "train --help-config", "train ok.yaml rollout.groups=x", "train ok.yaml rewards.clap={}",
    "sample playgrond --prompts p.txt --out o", "evaluate playground --rewards x --prompts p.txt --out o",
)]
print(codes, "torch" in sys.modules, "diffusers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 2, 2, 2, 2] False False"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("trian", 'unknown command "trian" (nearest: "train")'),
        ("--versoin", 'unknown option "--versoin" (nearest: "--version")'),
        ("train", "train: no CONFIG; name a YAML file or a shipped config such as playground/nft"),
        ("train seed=1", "train: no CONFIG"),
        ("train ko.yaml", 'no config "ko.yaml" (nearest: "ok.yaml")'),
        ("train ok.yaml --rsume runs/one", 'unknown option "--rsume" (nearest: "--resume")'),
        ("train ok.yaml --dry-run seeed=1", 'command line: seeed: unknown key (nearest: "seed")'),
        ("train ok.yaml rollout.groups=x", 'command line: rollout.groups: expected a whole number, got "x"'),
        ("train --resume runs/on", '--resume: no folder "runs/on" (nearest: "one")'),
        ("train --resume runs/two", '--resume: "runs/two" is not a run\'s folder: it has no config.yaml'),
        ("train --resume runs/one optimise.seed=1", 'optimise.seed: unknown key (nearest: "seed")'),
        ("sample", "the following arguments are required: --out, MODEL"),
        ("train ok.yaml --epochs 3", "a key of the config is written epochs=VALUE, without dashes"),
        ("train ok.yaml --epochs=3", "a key of the config is written epochs=VALUE, without dashes"),
        ("train epochs=3 ok.yaml", "the config comes first: diffrl train ok.yaml epochs=3"),
        ("train nft", 'no config "nft" (nearest: "playground/nft")'),
        ("train --help-config gard", '--help-config: no section or key "gard" (nearest: "guard")'),
        ("train ok.yaml rewards=[clip]", "write rewards={NAME: {}}"),
        ("sample playground --prompts p.txt", "the following arguments are required: --out"),
        ("sample playgrond --prompts p.txt --out o", 'MODEL: "playgrond" is neither "playground"'),
        ("sample playground --prompts q.txt --out o", '--prompts: prompts "q.txt": no such file (nearest: "p.txt")'),
        ("sample playground --prompts playground/word/test --out o", 'unknown subset "word" (nearest: "words")'),
        ("sample playground --prompts p.txt --out p.txt", '--out: "p.txt" is a file; name a folder'),
        (
            "sample playground --prompts p.txt --out o --steps 0",
            '--steps: expected a whole number of at least 1, got "0"',
        ),
        ("sample playground --prompts p.txt --out p.txt/o", 'p.txt" is a file; name a folder'),
        (
            "sample playground --prompts p.txt --out o --steps 1000000000",
            '--steps: expected a whole number of at most 10000, got "1000000000"',
        ),
        ("sample playground --prompts p.txt --out o --seed -1", "argument --seed: expected"),
        (
            f"sample playground --prompts p.txt --out o --seed {'9' * 6000}",
            "--seed: expected a whole number of at most",
        ),
        (
            "sample playground --prompts p.txt --out o --lora runs/two/lora",
            '--lora: folder "runs/two/lora" has no',
        ),
        ("sample playground --prompts p.txt --out o --merge playground/turb", '--merge: no LoRA "playground/turb"'),
        ("sample playground extra --prompts p.txt --out o", 'unexpected argument "extra" (see "diffrl sample --help")'),
        ("evaluate playground --prompts p.txt --out o --rewards ocr,clap", '--rewards: unknown reward "clap"'),
        ("evaluate playground --prompts p.txt --out o --rewards ocr,clip orc.x=1", '"orc" is not one of the rewards'),
        ("evaluate playground --prompts p.txt --out o --rewards ocr more", 'unexpected argument "more"'),
        ("evaluate playground --prompts p.txt --out o --rewards ,", "--rewards: name at least one reward"),
        ("evaluate playground --prompts p.txt --out runs --rewards ocr", '--out: "runs" is a folder; name a file'),
        ("compare runs/one --out x.html", "compare: name at least two runs"),
        ("compare runs/one runs/tow --out x.html", 'compare: no folder "runs/tow" (nearest: "two")'),
        (
            "compare runs/one runs/empty --out x.html",
            'compare: "runs/empty" is not a run\'s folder: it has no metrics.jsonl',
        ),
        ("rewards lst", 'unknown command "rewards lst" (nearest: "list")'),
        ("rewards check", "rewards check: name a reward; `diffrl rewards list` shows them"),
        ("rewards check clap", 'unknown reward "clap" (nearest: "clip")'),
        ("rewards check clip a", '"a": write parameter=value'),
        ("rewards list x", 'unexpected argument "x" (see "diffrl rewards list --help")'),
        ("rewards list --port 1", 'unknown option "--port"'),
        ("rewards new", "the following arguments are required: NAME"),
        ("rewards new A-b", 'rewards new: "A-b": use lower-case letters'),
        ("rewards serve", "rewards serve: name a reward"),
        ("rewards serve clap", 'unknown reward "clap" (nearest: "clip")'),
        ("rewards serve clip clip", "rewards serve: a reward is named twice: clip, clip"),
        ("rewards serve clip ocr model=x", '"model=x": of which reward? Write clip.model=x'),
        ("rewards serve clip clp.model=x", '"clp" is not one of the rewards (nearest: "clip")'),
        ("rewards serve clip --replicas 2", "--replicas, --gpus and --cpus are for --engine ray"),
        ("rewards serve clip --port -1", "argument --port: expected"),
        ("rewards serve clip --token-file none", 'token file "none" cannot be read'),
        ("rewards serve clip --host 0.0.0.0", '--host: "0.0.0.0" is reachable from other machines'),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, calls, words, expected):
    assert expected in fails(capsys, *words.split())
    assert calls == []


def test_train_hands_over_the_config(calls):
    from diffrl.prepare.dry_run import try_out

    assert main(["train", "ok.yaml", "seed=4", "--dry-run", "epochs=2"]) == 0
    ((_, (config, resume), options),) = calls
    assert (config.seed, config.epochs, config.run_dir) == (4, 2, "runs/ok")
    assert resume is None and options.pop("peers") is not None and options == {"override": [], "instead": try_out}


def test_resume_without_a_config_uses_the_run_s_own(calls):
    assert main(["train", "--resume", "runs/one", "epochs=99"]) == 0
    assert main(["train", "ok.yaml", "--resume", "runs/one"]) == 0
    for (_, (config, resume), options), epochs in zip(calls, (99, 40), strict=True):
        assert (config.epochs, config.run_dir) == (epochs, "runs/one") and resume == Path("runs/one")
        assert options.pop("peers") is not None and options == {"override": [], "instead": None}


def test_a_run_s_folder_may_be_moved(calls):
    Path("runs/one").rename("runs/moved")
    assert main(["train", "--resume", "runs/moved"]) == 0
    assert calls[0][1][0].run_dir == "runs/moved"


def test_sample_and_evaluate_hand_over_their_arguments(calls, capsys):
    common = {"model": "playground", "prompts": "p.txt", "steps": None, "limit": None, "sampler": None}
    common |= {"guidance_scale": None, "resolution": None, "batch_size": 32, "family": None, "merge": None}
    common |= {"like": None, "base": False}
    assert main([*SAMPLE, "--out", "o", "--lora", "runs/one/lora", "--seed", "3"]) == 0
    more = {"lora": "runs/one/lora", "guidance_scale": 1.0, "seed": 3, "per_prompt": 1, "out": Path("o")}
    assert calls[0] == ("sample", (), common | more | {"rewards": {}})
    assert main([*EVALUATE, "--out", "s.json", "--rewards", "clip, ocr,clip", "--steps", "7", "--limit", "2"]) == 0
    more = {"lora": None, "seed": 0, "per_prompt": 4, "steps": 7, "limit": 2, "out": Path("s.json")}
    assert calls[1] == ("evaluate", (), common | more | {"rewards": {"clip": {}, "ocr": {}}})
    given = ["--rewards", "clip,ocr", "clip.model=tiny", "ocr.case=false"]
    assert main([*EVALUATE, "--out", "s.json", *given]) == 0
    assert calls[2][2]["rewards"] == {"clip": {"model": "tiny"}, "ocr": {"case": False}}
    assert main([*SAMPLE, "--out", "o", "--merge", "playground/turbo=0.5", "--steps", "4"]) == 0
    assert calls[3][2]["merge"] == ["playground/turbo=0.5"]
    assert main([*SAMPLE, "--out", "o", *given]) == 0
    assert calls[4][2]["rewards"] == {"clip": {"model": "tiny"}, "ocr": {"case": False}}
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["clip", "0.2500", "+-", "0.0100"] in lines and ["scores:", "s.json"] in lines
    assert ["ocr", "applies", "to", "none", "of", "the", "prompts"] in lines


def test_every_help_fits_a_terminal_of_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def helps(parser):
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    yield from helps(command)

    commands = list(helps(_parser()))
    wide = [line for command in commands for line in command.format_help().splitlines() if len(line) > 80]
    assert len(commands) > 40 and not wide


def test_compare_and_rewards(calls, capsys, monkeypatch):
    assert main(["compare", "runs/one", "runs/two", "--out", "x.html"]) == 0
    words = ["rewards", "check", "clip", "model=tiny", "scale=1e-2", "--requests", "90"]
    assert main(words) == 1  # the check failed
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["rewards", "list"]) == 0
    runs = [Path("runs/one"), Path("runs/two")]
    assert calls == [
        ("write_comparison", (runs, Path("x.html")), {}),
        ("check", ("clip", None, 90), {"model": "tiny", "scale": 0.01}),
        ("overview", (80,), {}),
    ]
    assert "the cards" in capsys.readouterr().out


def test_a_failure_of_the_run_is_one_line_and_exit_code_1(calls, capsys):
    from diffrl.rewards import RewardError

    for error, expected in (
        (RewardError("reward clip:\n  broken"), "reward clip: broken"),
        (OSError(28, "No space left on device", "x.png"), "x.png: No space left on device"),
        (ConnectionError("the hub cannot be reached"), "the hub cannot be reached"),
    ):
        calls.error = error
        assert main(["train", "ok.yaml"]) == 1
        assert capsys.readouterr().err == f"diffrl: error: {expected}\n"


def test_a_damaged_checkpoint_is_a_failure_though_it_is_a_user_error(calls, capsys, monkeypatch):
    class CheckpointError(UserError):
        pass

    module = ModuleType("diffrl.records.saving")
    module.CheckpointError = CheckpointError
    monkeypatch.setitem(sys.modules, "diffrl.records.saving", module)
    calls.error = CheckpointError("lora.safetensors: wrong checksum")
    assert main(["train", "ok.yaml"]) == 1
    calls.error = UserError("bad value")
    assert main(["train", "ok.yaml"]) == 2


def test_memory_that_runs_out_says_what_to_lower(calls, capsys, monkeypatch):
    import torch

    calls.error = torch.OutOfMemoryError("CUDA out of memory.")
    assert main(["train", "ok.yaml"]) == 1
    assert "lower rollout.batch_size or optimise.micro_batch" in capsys.readouterr().err


def test_bugs_and_debugging_show_the_traceback(calls, monkeypatch):
    calls.error = RuntimeError("a bug")
    with pytest.raises(RuntimeError):
        main(["train", "ok.yaml"])
    monkeypatch.setenv("DIFFRL_DEBUG", "1")
    with pytest.raises(UserError):
        main(["train", "ko.yaml"])


def test_interrupted(calls, capsys):
    calls.error = KeyboardInterrupt()
    assert main(["train", "ok.yaml"]) == 130
    assert capsys.readouterr().err == "diffrl: interrupted\n"
    Path("runs/ok/checkpoints").mkdir(parents=True)
    assert main(["train", "ok.yaml"]) == 130
    assert "diffrl train --resume runs/ok\n" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error():
    for words in (["train", "--help-config"], ["version"]):
        command = [sys.executable, "-m", "diffrl", *words]
        reader, writer = os.pipe()
        os.close(reader)  # gone before the first word, however slow this process is
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
        os.close(writer)
        assert (done.returncode, done.stderr) == (1, "")


def test_doctor_does_not_warn_of_rewards_that_are_built_with_something(monkeypatch):
    from diffrl.cli import doctor
    from diffrl.rewards import registry

    installed = importlib.metadata.entry_points(group="diffrl.rewards")
    monkeypatch.setattr(registry, "available", lambda: {"d2": installed["d2"]})
    assert list(doctor.rewards()) == [("ok", "reward d2", "is installed; it is built with: reward, direction")]


def test_doctor_explains_a_torchvision_of_another_torch(monkeypatch, capsys):
    from diffrl.cli import doctor

    load = importlib.import_module

    def broken(name):
        if name not in doctor.ESSENTIAL:
            return load(name)
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    marks = {subject: (mark, text) for mark, subject, text in doctor.libraries()}
    mark, text = marks["torchvision"]
    assert mark == "FAIL" and "was built for another torch" in text and "--force-reinstall torch torchvision" in text
    for part in ("devices", "machine", "assets", "rewards"):
        monkeypatch.setattr(doctor, part, lambda: iter([("warn", "x", "y")]))
    assert main(["doctor"]) == 1
    monkeypatch.setattr(doctor, "libraries", lambda: iter([]))
    assert main(["doctor"]) == 0
    assert "everything needed is here" in capsys.readouterr().out


def test_the_config_of_a_run_is_a_config(calls):
    assert json.loads(json.dumps(load_config("runs/one/config.yaml").resolved()))["run_dir"] == "runs/one"


COMPLETE = """
source <(printf '%s' "$SCRIPT")
complete_words() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _shtab_diffrl; echo "${COMPREPLY[@]}"; }
complete_words diffrl doc
complete_words diffrl sample playground --per
complete_words diffrl sample --sampler ""
complete_words diffrl train ok
complete_words diffrl compare --out x.html run
"""


def test_a_shell_completes_commands_options_choices_and_files(capsys):
    scripts = {}
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        scripts[shell] = capsys.readouterr().out
        assert all(word in scripts[shell] for word in ("diffrl", "evaluate", "per-prompt")), shell
    assert "compdef" in scripts["zsh"] and "complete -c diffrl" in scripts["fish"]
    answers = subprocess.run(
        ["bash", "-ec", COMPLETE], env={**os.environ, "SCRIPT": scripts["bash"]}, capture_output=True, text=True
    )
    assert answers.returncode == 0, answers.stderr
    assert answers.stdout.splitlines() == ["doctor", "--per-prompt", "euler dpm2 ddim", "ok.yaml", "runs"]


def test_doctor_neither_downloads_nor_builds_what_lies_on_the_hub(monkeypatch, tmp_path, capsys):
    import huggingface_hub

    from diffrl.cli import doctor
    from diffrl.rewards import registry

    installed = importlib.metadata.entry_points(group="diffrl.rewards")
    monkeypatch.setattr(registry, "available", lambda: {name: installed[name] for name in ("pickscore", "jpeg")})
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    built = []
    monkeypatch.setattr(registry, "load_reward", lambda name: built.append((name, os.environ.get("HF_HUB_OFFLINE"))))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for part in ("libraries", "devices", "assets"):
        monkeypatch.setattr(doctor, part, lambda: iter([]))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "reward pickscore is installed; weights not here: yuvalkirstain/PickScore_v1 (4 GB)" in out
    assert "HF_HUB_OFFLINE" not in out and "HF_HUB_OFFLINE" not in os.environ and built == [("jpeg", "1")]
    (tmp_path / "models--yuvalkirstain--PickScore_v1" / "snapshots" / "abc").mkdir(parents=True)
    (found, _) = doctor.rewards()
    assert found[2].startswith("is installed; weights here: ")


FILES = {
    "class Redness:\n    pass\n": 'no class or function "Rednes" in 0.py (nearest: "Redness"); it has Redness',
    "x = 1\n\nclass Rednes\n": "1.py, line 3: not Python: expected ':'",
    "def Rednes(images):\n    pass\n": None,
    "def redness(images):\n    pass\n": 'in 3.py (nearest: "redness")',
    "from elsewhere import *\n": None,
    "try:\n    Rednes = 1\nexcept ValueError: pass\n": None,
}
READ = """
import sys
from diffrl.config import check_plugin
from diffrl.errors import UserError

for number in range(int(sys.argv[1])):
    try:
        check_plugin(f"{number}.py:Rednes")
        print(None)
    except UserError as error:
        print(error)
    assert "torch" not in sys.modules
"""


def test_a_reward_s_file_is_read_before_torch_is_imported(tmp_path):
    for number, text in enumerate(FILES):
        (tmp_path / f"{number}.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", READ, str(len(FILES))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for line, said in zip(done.stdout.splitlines(), FILES.values(), strict=True):
        assert line == "None" if said is None else said in line


OWN = {"guidance_scale": 2.0, "shift": 3.0, "resolution": (64, 32)}
EVALUATION = {"sampler": "dpm2", "steps": 6}


@pytest.fixture
def trained(tmp_path):
    """A run's LoRA."""
    (tmp_path / "run" / "lora").mkdir(parents=True)
    config = "model: playground\nrollout: {sampler: sde, steps: 6, guidance_scale: 2, shift: 3, resolution: [64, 32]}"
    (tmp_path / "run" / "config.yaml").write_text(config)
    (tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors").touch()
    return tmp_path / "run" / "lora"


def test_a_lora_is_drawn_as_trained_by_the_solver_and_steps_of_its_base(trained, calls, capsys):
    file = trained / "pytorch_lora_weights.safetensors"
    for lora in (trained, file):
        calls.clear()
        assert main([*SAMPLE, "--out", "o", "--lora", str(lora)]) == 0
        assert main([*EVALUATE, "--out", "s.json", "--rewards", "clip", "--lora", str(lora)]) == 0
        assert main([*SAMPLE, "--out", "o"]) == 0
        for _, _, given in calls[:2]:
            assert OWN.items() <= given.items()
        assert len({(given["sampler"], given["steps"]) for _, _, given in calls}) == 1
    assert "steps 6, sampler dpm2: --like" in capsys.readouterr().out
    for words in ([], ["--lora", str(trained)]):
        calls.clear()
        assert main([*SAMPLE, "--out", "o", "--like", str(trained.parent), *words]) == 0
        assert (OWN | EVALUATION).items() <= calls[0][2].items()
    asked = ["--lora", str(file), "--steps", "9", "--guidance-scale", "1"]
    assert main([*SAMPLE, "--out", "o", *asked]) == 0
    assert (OWN | {"steps": 9, "guidance_scale": 1.0, "sampler": None}).items() <= calls[1][2].items()
    config = trained.parent / "config.yaml"
    config.write_text(config.read_text().replace("playground", "another"))
    assert main([*SAMPLE, "--out", "o", "--lora", str(file)]) == 0
    assert calls[2][2]["guidance_scale"] is None


def test_a_prompt_is_given_as_text(calls, capsys):
    assert main(["sample", "playground", "--prompt", "a red heart", "--prompt", "a star", "--out", "o"]) == 0
    assert calls[0][2]["prompts"] == ["a red heart", "a star"] and capsys.readouterr().out
    assert "--prompt" in fails(capsys, "sample", "playground", "--out", "o")
    assert "goes behind --prompt" in fails(capsys, "sample", "playground", "--prompts", "a red heart", "--out", "o")
    twice = ["--prompt", "a star", "--prompt", "a star"]
    assert "comes twice" in fails(capsys, "sample", "playground", *twice, "--out", "o")
    assert "--lora" in fails(capsys, *SAMPLE, "--base", "--out", "o")
