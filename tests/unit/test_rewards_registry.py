"""How rewards are found and built, and what a user is told who misspells something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diffrl.errors import UserError
from diffrl.rewards import available, load_reward
from diffrl.rewards.registry import load_class

REDNESS = Path(__file__).parents[1] / "data" / "redness.py"


def write(folder: Path, text: str) -> Path:
    file = folder / "mine.py"
    file.write_text(text)
    return file


def message(name: str, **params: object) -> str:
    with pytest.raises(UserError) as caught:
        load_reward(name, **params)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_zoo_is_installed_as_plugins() -> None:
    assert {"playground", "artefact", "clip", "aesthetic", "ocr"} <= set(available())


def test_listing_imports_neither_torch_nor_a_plugin() -> None:
    code = "import sys, diffrl.rewards as r; r.available(); print('torch' in sys.modules, 'diffrl_zoo' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


def test_a_reward_from_a_file_with_parameters() -> None:
    reward = load_reward(f"{REDNESS}:Redness", power=0.5)
    red = torch.zeros(1, 3, 4, 4)
    red[:, 0] = 0.25
    assert reward.name == "redness"
    torch.testing.assert_close(reward(red, ["a red circle"], [{}]), torch.tensor([0.5]))


def test_two_files_of_one_name_do_not_replace_each_other(tmp_path: Path) -> None:
    rewards = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        text = f"class R:\n    name = 'r{number}'\n    def __call__(self, images, prompts, metadata): ...\n"
        rewards.append(load_reward(f"{write(folder, text)}:R"))
    assert [reward.name for reward in rewards] == ["r1", "r2"]
    assert type(rewards[0]) is not type(rewards[1])


def test_unknown_names_come_with_the_nearest() -> None:
    assert 'unknown reward "asthetic" (nearest: "aesthetic")' in message("asthetic")
    assert 'unknown reward "AESTHETIC" (nearest: "aesthetic")' in message("AESTHETIC")
    assert 'unknown parameter "powr" (nearest: "power")' in message(f"{REDNESS}:Redness", powr=1)
    assert 'no "Rednes"' in message(f"{REDNESS}:Rednes")
    assert '(nearest: "Redness")' in message(f"{REDNESS}:Rednes")
    assert f'no reward file "{REDNESS.parent}/rednes.py" (nearest: "redness.py")' in message(
        f"{REDNESS.parent}/rednes.py:Redness"
    )
    assert f'as in "{REDNESS}:Redness"' in message(str(REDNESS))


def test_a_missing_parameter_is_named(tmp_path: Path) -> None:
    text = "class R:\n    name = 'r'\n    def __init__(self, url): ...\n    def __call__(self, i, p, m): ...\n"
    assert 'the parameter "url" is required' in message(f"{write(tmp_path, text)}:R")


@pytest.mark.parametrize(
    ("body", "missing"),
    [
        ("class R:\n    name = 'r'", "__call__(self, images, prompts, metadata) is missing"),
        (
            "class R:\n    name = 'r'\n    def __call__(self, images, prompts, metadata, more): ...",
            "does not take (self, images, prompts, metadata)",
        ),
        ("R = 3", "it is a int, not a class"),
        ("class R:\n    name = 'r'\n    embeds = True\n    def __call__(self, i, p, m): ...", "embed_text is missing"),
        ("class R:\n    name = 'r'\n    batch_size = 0\n    def __call__(self, i, p, m): ...", "`batch_size` is 0"),
        ("class R:\n    name = 'r'\n    figures = 1\n    def __call__(self, i, p, m): ...", "lacks the method applies"),
        (
            "class R:\n    name = 'r'\n    applies = 1\n    def __call__(self, i, p, m): ...",
            "`applies` is not a method",
        ),
        ("class R:\n    name = 'r'\n    card = {}\n    def __call__(self, i, p, m): ...", "not a diffrl.rewards.Card"),
        (
            "class R:\n    name = 'r'\n    groupwise = 1\n    def __call__(self, i, p, m): ...",
            "`groupwise` is not True or False",
        ),
        (
            "class R:\n    name = 'r'\n    @property\n    def columns(self): return self.model.names\n"
            "    model = property(lambda self: 1 / 0)\n    def __call__(self, i, p, m): ...",
            "`columns` raises ZeroDivisionError: division by zero (mine.py:5)",
        ),
    ],
)
def test_what_does_not_fit_the_protocol_is_said(tmp_path: Path, body: str, missing: str) -> None:
    text = message(f"{write(tmp_path, body)}:R")
    assert "is not a reward" in text and missing in text


def test_failures_while_importing_and_building_say_where(tmp_path: Path) -> None:
    file = write(tmp_path, "import no_such_package\nclass R: ...\n")
    assert "mine.py" in (text := message(f"{file}:R")) and "no_such_package" in text
    file.write_text("class R:\n    name = 'r'\n    def __init__(self): 1 / 0\n    def __call__(self, i, p, m): ...\n")
    assert "could not be built: ZeroDivisionError: division by zero (mine.py:3)" in message(f"{file}:R")


def test_a_class_is_loaded_without_building_it() -> None:
    assert load_class(f"{REDNESS}:Redness").__name__ == "Redness"


def test_every_reward_is_one_line_and_its_card_is_shown_by_name() -> None:
    from diffrl.conformance import table
    from diffrl.reward_tools import cards

    for overview, names in ((cards.overview(80), available()), (table.overview(80), ["StableDiffusion3Pipeline"])):
        lines = overview.splitlines()
        assert all(len(line) <= 80 for line in lines[:-1]) and lines[-2] == ""
        assert all(sum(line.split()[:1] == [name] for line in lines) == 1 for name in names)
    assert "1.7 GB" in cards.shown("aesthetic") and "known exploits" in cards.shown("aesthetic")
    assert cards.shown("aesthetic").splitlines()[0].split() == ["reward", "aesthetic"]
    with pytest.raises(UserError, match=r'unknown reward "clp" \(nearest: "clip"\)'):
        cards.shown("clp")
    assert table.shown("stablediffusion3") == table.shown("playground")
    with pytest.raises(UserError, match="no family has a pipeline or a model"):
        table.shown("nothing of this name")
