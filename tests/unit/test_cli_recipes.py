"""`diffrl configs` and `diffrl init`, progress in logs, and options that are named when they are nonsense."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import diffrl
from diffrl.cli.main import main
from diffrl.cli.recipes import recipes
from diffrl.config import load_config
from diffrl.config.load import find_config
from diffrl.tools.progress_bar import progress


def test_configs_lists_every_recipe_with_its_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [name for name, _, _ in recipes()]
    assert [line.split()[0] for line in lines] == names and "playground/nft" in names
    assert all(find_config(name).is_file() for name in names)
    row = next(line for line in lines if line.startswith("playground/gardo_ocr "))
    assert row.split()[1] == "nft+gardo" and "GARDO" in row and max(map(len, lines)) < 240
    assert main(["configs", "flux", "gardo"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["flux/gardo_hpsv2"]
    assert main(["configs", "nothing-like-this"]) == 2


SD35, OCR = ("--model", "stabilityai/stable-diffusion-3.5-medium"), ("--train", "ocr/train", "--test", "ocr/test")


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--method", "grpo"],
        ["--method", "crd+gardo", "--rewards", "playground,clip"],
        ["--method", "nft+marble", "--rewards", "playground,clip"],
        ["--method", "direct+d2align", "--rewards", "clip"],
        [*SD35, *OCR, "--rewards", "ocr,aesthetic", "--method", "grpo+gardo"],
        [*SD35, *OCR],
        [*SD35, *OCR, "--rewards", "clip", "--method", "direct"],
        [*SD35, *OCR, "--method", "nft+marble"],
    ],
)
def test_init_writes_a_config_that_is_read(options: list[str], tmp_path: Path, capsys) -> None:
    file = tmp_path / "my.yaml"
    assert main(["init", str(file), *options]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"written: {file}\n"), said
    config = load_config(file)
    method = options[options.index("--method") + 1] if "--method" in options else "nft"
    objective, *wrappers = method.split("+")
    assert config.objective == objective
    assert [name for name in ("gardo", "marble", "d2align") if getattr(config, name) is not None] == wrappers
    text = file.read_text()
    assert text.count("  # ") > 40 and max(map(len, text.splitlines())) <= 125
    assert main(["init", str(file)]) == 2 and "exists already" in capsys.readouterr().err


def test_init_for_another_model_asks_for_prompts_and_takes_no_toy(tmp_path: Path, capsys) -> None:
    file = tmp_path / "my.yaml"
    for words, said in (([], "--train and --test"), ([*OCR, "--rewards", "playground"], "geneval, ocr")):
        assert main(["init", str(file), *SD35, *words]) == 2
        assert said in capsys.readouterr().err and not file.exists()
    assert main(["init", str(file), *SD35, *OCR, "--rewards", "ocr"]) == 0
    config = load_config(file)
    assert list(config.watch) == ["pickscore", "aesthetic"] and config.watch["aesthetic"].arguments == {"head": "v2"}


@pytest.mark.parametrize("model", ["playground", "stabilityai/stable-diffusion-3.5-medium"])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_init_fits_the_epoch_to_a_short_prompt_file(model: str, count: int, tmp_path: Path) -> None:
    train, test, file = (tmp_path / name for name in ("train.txt", "test.txt", "my.yaml"))
    train.write_text("".join(f"prompt {number}\n" for number in range(count)))
    test.write_text("another\n")
    words = ["init", str(file), "--model", model, "--train", str(train), "--test", str(test)]
    assert main(words) == 0
    config = load_config(file)
    assert config.rollout.groups == count
    assert config.rollout.images % config.optimise.batch_size == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["my.txt"], "name a file that ends in .yaml"),
        (["my.yaml", "--method", "nfd"], '--method: unknown "nfd" (nearest: "nft")'),
        (["my.yaml", "--method", "nft+gardi"], '--method: unknown "gardi" (nearest: "gardo")'),
        (["my.yaml", "--rewards", "clop"], 'unknown reward "clop"'),
        (["my.yaml", "--train", "a.txt"], "give both --train and --test"),
    ],
)
def test_init_names_what_it_does_not_know(words: list[str], said: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", *words]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "x"])
def test_a_bad_guidance_scale_is_named(value: str, tmp_path: Path, capsys) -> None:
    words = ["sample", "playground", "--prompts", "playground/words/test", "--out", str(tmp_path / "images")]
    assert main([*words, f"--guidance-scale={value}"]) == 2
    said = capsys.readouterr().err
    assert "--guidance-scale" in said and f'got "{value}"' in said and "learning_rate" not in said


def test_progress_in_a_log_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    with progress("drawing", 30, every=0.0) as advance:
        for _ in range(3):
            advance(10)
    said = capsys.readouterr()
    assert said.out == "" and [line.split(" images")[0] for line in said.err.splitlines()] == [
        "drawing: 10 of 30",
        "drawing: 20 of 30",
    ]
    with progress("drawing", 30) as advance:  # nothing for what is soon done
        advance(10)
    monkeypatch.setenv("RANK", "1")
    with progress("drawing", 30, every=0.0) as advance:
        advance(10)
    assert capsys.readouterr().err == ""


def test_a_package_that_nobody_needs_is_not_asked_for() -> None:
    """bitsandbytes asks for `kernels` at every start; whoever imports diffrl has silenced it."""
    assert diffrl.__version__
    assert not logging.getLogger("bitsandbytes.backends.cpu.ops").isEnabledFor(logging.WARNING)
