"""One door for methods: each says what it is once, and a stranger's comes in from one file outside the package."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diffrl.cli.main import main
from diffrl.cli.objectives import write_objective
from diffrl.config import door, load_config
from diffrl.config.schema import Config
from diffrl.conformance.objective import Case, accumulation, around, plain_loss
from diffrl.errors import UserError
from diffrl.run.train import train
from diffrl.sharing import publish
from diffrl.sharing.card import _cited

METHODS = door.methods()


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """A stranger's objective, as `diffrl init --objective mine` writes it."""
    file, _ = write_objective("mine", tmp_path)
    return f"{file}:Mine"


@pytest.mark.parametrize("method", [*METHODS, "grpo+tree+gardo", "direct+d2align+gardo", "nft+gardo"])
@pytest.mark.parametrize("model", ["playground", "org/name"])
def test_init_writes_a_config_for_every_method(method: str, model: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "my.yaml"
    prompts = [] if model == "playground" else ["--train", "ocr/train", "--test", "ocr/test"]
    assert main(["init", str(file), "--method", method, "--model", model, *prompts]) == 0
    assert capsys.readouterr().out.startswith(f"written: {file}\ncheck:")  # and nothing needs a change
    assert {one.name for one in load_config(file).methods} >= set(method.split("+"))


def test_two_objectives_and_unknown_methods_are_refused(tmp_path: Path, capsys: Any) -> None:
    for method, said in (("nft+dpo", "are both objectives"), ("gdr", 'unknown "gdr" (nearest: "gdro")')):
        assert main(["init", str(tmp_path / "my.yaml"), "--method", method]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", METHODS)
def test_every_method_cites_its_own_papers(name: str) -> None:
    method = METHODS[name]
    assert method.papers
    cited = _cited(method, SimpleNamespace(**{key: None for key, _ in method.options}))  # no option is on
    assert all(f"https://arxiv.org/abs/{number}" in cited for number in method.papers.values())
    assert method.title in cited and method.name == name


def test_densegrpo_stands_beside_the_flow_grpo_that_it_is_a_part_of() -> None:
    config = Config(objective="grpo", dense={})
    cited = [_cited(one, getattr(config, one.name)) for one in config.methods]
    assert [text.partition("]")[0] for text in cited] == ["[Flow-GRPO", "[DenseGRPO"]


def test_a_strangers_objective_is_trained_resumed_reported_and_published(mine: str, config_file: Any) -> None:
    path = config_file("run", objective=mine, mine={"tau": 0.5}, epochs=1)
    config = load_config(path)
    folder = Path(config.run_dir)
    assert config.objective_section.tau == 0.5 and config.method.title == "Mine"
    train(config)
    train(load_config(path, ["epochs=2"]), resume=folder)
    again = load_config(folder / "config.yaml")
    assert (again.epochs, again.objective_section.tau) == (2, 0.5)
    assert "Mine on" in (folder / "report.html").read_text()
    card = (publish(folder) / "README.md").read_text()
    assert "[Mine](https://arxiv.org/abs/2501.00000)" in card and "- mine" in card
    with pytest.raises(UserError, match=r"mine\.tau: 0\.7, but .* was trained with 0\.5"):
        train(load_config(path, ["epochs=3", "mine.tau=0.7"]), resume=folder)
    file = Path(mine.rpartition(":")[0])
    file.write_text(file.read_text() + "\n# another thought\n")
    with pytest.raises(UserError, match=r"objective: the code changed since .* add --override objective"):
        train(load_config(path, ["epochs=3"]), resume=folder)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"mine": {"timestep": 1}}, r'mine\.timestep: unknown key \(nearest: "mine\.timesteps"\)'),
        ({"mine": {"tua": 1.0}}, r"mine\.tua: unknown key \(keys of mine: timesteps, tau, beta\)"),
        ({"mine": {"tau": -1}}, r"mine\.tau: expected more than 0"),
        ({"mien": {}}, r'mien: unknown key \(nearest: "mine"\)'),
        ({"nft": {"beta": 0.1}}, r"nft: the objective is .* does not use this section"),
    ],
)
def test_a_typo_is_refused_with_its_line(mine: str, config_file: Any, sections: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_config(config_file("run", objective=mine, **sections))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("mine.py:Mine", "mine.py:Mien"), r'no "Mien" in .*mine\.py \(nearest: "Mine"\)'),
        (("mine.py:Mine", "mime.py:Mine"), r'no objective file ".*mime\.py" \(nearest: "mine\.py"\)'),
        (("mine.py:Mine", "mine.py"), r'mine.py": name the class too, as in ".*mine.py:Mine"'),
        (("mine.py:Mine", "mine.py:Tensor"), "has no `section`"),
    ],
)
def test_a_wrong_path_is_named(mine: str, config_file: Any, change: tuple[str, str], said: str) -> None:
    with pytest.raises(UserError, match=rf"run\.yaml:\d+: objective: .*{said}"):
        load_config(config_file("run", objective=mine.replace(*change)))


def test_an_installed_objective_has_its_name(mine: str, config_file: Any, installed: Any, monkeypatch: Any) -> None:
    file = Path(mine.rpartition(":")[0])
    monkeypatch.syspath_prepend(file.parent)
    installed("mine", "mine:Mine", "diffrl.methods")
    config = load_config(config_file("run", objective="mine", mine={"tau": 2.0}))
    assert config.objective_section.tau == 2.0 and config.objective == "mine"


@pytest.mark.long
def test_conformance_finds_a_loss_that_is_not_its_plain_form(mine: str, tmp_path: Path) -> None:
    case = Case(mine, tmp_path)
    assert "differ by" in plain_loss(case) and "differ by" in accumulation(case)
    assert around("gardo")(case) == around("marble")(case) == "it trains"
    file = Path(mine.rpartition(":")[0])
    file.write_text(file.read_text().replace("return self.plain(phi, rows.advantages)", "return 1.01 * phi.sum(0)"))
    with pytest.raises(Exception, match="loss\\(\\) and plain\\(\\)"):
        plain_loss(case)


def test_gardo_around_an_objective_without_a_penalty_is_refused_clearly(mine: str, tmp_path: Path) -> None:
    file = Path(mine.rpartition(":")[0])
    text = file.read_text()
    start = text.index("    beta: float = key(")
    text = text[:start] + text[text.index("\n", start) + 1 :]
    file.write_text(text.replace("beta: float, ", "").replace("beta=beta, ", ""))
    assert around("gardo")(Case(mine, tmp_path)).startswith('refused: argument: gardo: objective "mine" has no KL')


def test_objectives_lists_all_and_init_refuses_taken_names(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    assert main(["objectives", "list"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} >= set(METHODS)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--objective", "mine"]) == 0 and (tmp_path / "test_mine.py").is_file()
    for name, said in (("mine", "exists already"), ("rollout", "a section of every config"), ("1x", "small letters")):
        assert main(["init", "--objective", name]) == 2 and said in capsys.readouterr().err
