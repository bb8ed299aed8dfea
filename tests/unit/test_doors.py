"""What the command line does before a command runs: `~`, a launcher's variables, which process says an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from diffrl.cli.main import main
from diffrl.errors import UserError
from diffrl.launched import join_processes
from diffrl.serving.client import Servers

LAUNCHER = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("words", [["--out=~/new.yaml"], ["--out", "~/new.yaml"], ["~/new.yaml"]])
def test_the_home_folder_is_meant_wherever_a_path_begins_with_it(
    words: list[str], tmp_path: Path, alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    alone.setenv("HOME", str(home))
    alone.chdir(work)
    if words[0].startswith("--out"):  # an option
        assert (
            main(
                ["divgen", "prompts", "--world", "playground", "--small", *[w.replace("yaml", "jsonl") for w in words]]
            )
            == 0
        )
        assert (home / "new.jsonl").is_file()
    else:  # a plain word
        assert main(["init", *words, "--model", "playground"]) == 0
        assert (home / "new.yaml").is_file()
    assert not list(work.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["sample", "~nosuchuser/model", "--prompt", "x", "--out", "new"],
        ["sample", "playground", "--lora", "~nosuchuser/lora", "--prompt", "x", "--out", "new"],
        ["train", "playground/demo", "model=~nosuchuser/model", "--dry-run"],
        ["rewards", "check", "~nosuchuser/r.py:R"],
    ],
)
def test_the_home_of_nobody_is_no_folder(
    words: list[str], tmp_path: Path, alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone.chdir(tmp_path)
    assert main(words) == 2
    assert "~nosuchuser" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("watch ,", "argument RUN_DIR: an empty name"),
        ("lab report ,", "argument RUN_DIR: an empty name"),
        ("compare . ,", "argument RUN_DIR|SWEEP: an empty name"),
        ("export . --merged --out ,", "argument --out: an empty name"),
        ("export . --comfyui ,", "argument --comfyui: an empty name"),
        ("export playground --merged --out made --lora ,", "the name of the LoRA is empty"),
        ("sample playground --prompt red --out made --lora ,", "--lora: the name of the LoRA is empty"),
        ("publish . --out ,", "argument --out: an empty name"),
        ("publish . --lora ,", "argument --lora: an empty name"),
        ("divgen generate playground --small --out ,", "argument --out: an empty name"),
        ("sweep playground/nft --out ,", "argument --out: an empty name"),
    ],
)
def test_an_empty_word_is_not_the_folder_that_one_is_in(
    words: str, what: str, tmp_path: Path, alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone.chdir(tmp_path)
    Path("config.yaml").touch()
    Path("metrics.jsonl").touch()
    Path("pytorch_lora_weights.safetensors").touch()
    assert main([word.replace(",", "") for word in words.split()]) == 2
    assert what in capsys.readouterr().err and len(list(tmp_path.iterdir())) == 3


def test_an_equals_sign_in_the_path_is_the_paths(
    tmp_path: Path, alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone.setenv("HOME", str(tmp_path))
    assert main(["divgen", "prompts", "--world", "playground", "--small", "--out=~/a=b.jsonl"]) == 0
    assert (tmp_path / "a=b.jsonl").is_file()


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        ({"RANK": "1"}, "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"LOCAL_RANK": "3"}, "WORLD_SIZE, RANK"),
        ({"WORLD_SIZE": "2"}, "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
    ],
)
def test_half_of_a_launchers_variables_is_refused(
    there: dict[str, str], missing: str, tmp_path: Path, alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone.chdir(tmp_path)
    for name, value in there.items():
        alone.setenv(name, value)
    alone.setenv("DIFFRL_DEBUG", "0")
    assert main(["train", "playground/demo", "run_dir=run"]) == 2
    (name, value) = next(iter(there.items()))
    said = capsys.readouterr().err
    assert f"{name}={value} and not {missing}" in said and "torchrun --nproc_per_node" in said
    assert not list(tmp_path.iterdir())


WHOLE = dict(zip(LAUNCHER, ("2", "0", "0", "127.0.0.1", "1"), strict=True))


@pytest.mark.parametrize(
    "there",
    [{"RANK": "2", "LOCAL_RANK": "2"}, {"RANK": "-1"}, {"WORLD_SIZE": "two"}, {"WORLD_SIZE": "0"}, {"RANK": ""}],
)
def test_ranks_that_cannot_be_are_refused_from_the_shell_and_from_python(
    there: dict[str, str], tmp_path: Path, alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**WHOLE, **there}.items():
        alone.setenv(name, value)
    assert main(["sample", "playground", "--prompt", "x", "--out", str(tmp_path / "x")]) == 2
    with pytest.raises(UserError, match="from 0 to WORLD_SIZE - 1"):
        join_processes()


@pytest.mark.parametrize(
    ("name", "value"), [("DYNAMO_BACKEND", "foo"), ("USE_DEEPSPEED", "true"), ("GRADIENT_ACCUMULATION_STEPS", "x")]
)
def test_what_accelerate_cannot_do_is_one_line(name: str, value: str, alone: pytest.MonkeyPatch) -> None:
    alone.setenv(f"ACCELERATE_{name}", value)
    with pytest.raises(UserError, match=f"ACCELERATE_{name}={value}"):
        join_processes()


def test_one_process_by_its_launcher_is_one_process(tmp_path: Path, alone: pytest.MonkeyPatch) -> None:
    alone.setenv("WORLD_SIZE", "1")
    alone.setenv("RANK", "0")
    assert main(["sample", "playground", "--prompts", str(tmp_path / "none.txt"), "--out", str(tmp_path / "x")]) == 2


def test_the_first_process_of_each_machine_says_what_is_wrong(
    alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone.setenv("WORLD_SIZE", "16")
    alone.setenv("RANK", "8")
    for local, says in (("0", True), ("1", False)):
        alone.setenv("LOCAL_RANK", local)
        assert main(["configs", "--nonsense"]) == 2
        assert ("--nonsense" in capsys.readouterr().err) is says


def test_processes_in_step_begin_at_different_servers(alone: pytest.MonkeyPatch) -> None:
    urls = [f"http://127.0.0.1:{port}" for port in (1, 2, 3)]
    firsts = []
    for rank in range(3):
        alone.setenv("RANK", str(rank))
        servers = Servers(urls, None, 1.0, 1.0)
        firsts.append([servers.run([servers._place(k)])[0].url for k in range(3)])
        servers.close()
    for together in zip(*firsts, strict=True):  # the k-th request of every process
        assert len(set(together)) == 3


def test_letters_that_the_locale_has_not_are_one_line(
    alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone.setattr("sys.getfilesystemencoding", lambda: "ascii")
    for words in (["train", "my.yaml", "run_dir=runs/\udcc3\udca4"], ["sample", "\udcc3\udca4"]):
        assert main(words) == 2
        assert "PYTHONUTF8=1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--resume", "run"],
        ["publish", "run"],
        ["export", "run", "--merged", "--out", "o"],
        ["export", "run", "--comfyui", "x.safetensors"],
        ["sample", "playground", "--prompt", "x", "--out", "o", "--like", "run"],
        ["report", "run"],
    ],
)
def test_an_empty_config_of_a_run_is_said_to_be_empty(
    words: list[str], tmp_path: Path, alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"epoch": 1}\n')
    assert main(words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.endswith("run/config.yaml: the file is empty")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.yaml", "metrics.jsonl", "run"]


@pytest.mark.parametrize("size", ["32x", "x32", "x", "", "32x32x32"])
def test_a_size_that_is_none_is_said_as_it_was_typed(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "playground", "--prompt", "x", "--out", "o", "--resolution", size]) == 2
    assert f'argument --resolution: expected a side or WIDTHxHEIGHT, got "{size}"' in capsys.readouterr().err


def test_no_guidance_is_1_everywhere(alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from diffrl.errors import UserError
    from diffrl.sampling import SamplerSpec

    assert main(["sample", "playground", "--prompt", "x", "--out", "o", "--guidance-scale", "0"]) == 2
    said = "none is 1 here, 0 in diffusers"
    assert said in capsys.readouterr().err
    with pytest.raises(UserError, match=said):
        SamplerSpec("euler", 4, guidance_scale=0.0)


def test_a_folder_that_is_gone_and_docstrings_that_are_gone_are_one_line(tmp_path: Path) -> None:
    """Both ended in a traceback of a package, or in a config of the name `None`; help needs neither."""
    gone = tmp_path / "gone"
    gone.mkdir()
    for words, code, text in (
        ("train playground/demo --dry-run", 2, "the folder that this runs in is gone (deleted or moved)"),
        ("compare a b --out c.html", 2, "the folder that this runs in is gone (deleted or moved)"),
        ("--help", 0, "usage: diffrl COMMAND"),
    ):
        gone.mkdir(exist_ok=True)
        script = f"cd {gone}; rmdir {gone}; exec {sys.executable} -m diffrl {words}"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
        assert done.returncode == code and text in (done.stderr if code else done.stdout), done
    optimised = [sys.executable, "-OO", "-m", "diffrl"]
    done = subprocess.run([*optimised, "train", "playground/demo", "--dry-run"], capture_output=True, text=True)
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "runs with -OO" in line] == done.stderr.splitlines()
    assert "usage: diffrl train" in subprocess.run([*optimised, "train", "-h"], capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    "words",
    [
        ["train", "playground/demo", "run_dir=NAME"],
        ["report", "NAME"],
        ["compare", "NAME", "NAME"],
        ["divgen", "report", "NAME", "b/x", "--out", "page.html"],
        ["rewards", "new", "mine", "--out", "NAME"],
        ["init", "NAME.yaml"],
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("name", ["a/x", 300 * "n"], ids=["links in a circle", "too long"])
def test_a_name_that_leads_nowhere_is_bad_input(
    words: list[str], name: str, tmp_path: Path, alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Links in a circle ended in pathlib's traceback, and a name too long was a failure of the run."""
    alone.chdir(tmp_path)
    for here, there in ("ab", "ba"):
        (tmp_path / here).symlink_to(there)
    assert main([word.replace("NAME", name) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("diffrl: error: "), err
