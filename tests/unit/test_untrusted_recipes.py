"""A recipe is somebody else's text: what it may not send, name or replace."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
from judges import SlowJudge

from diffrl import plugins
from diffrl.config import load_config
from diffrl.errors import UserError
from diffrl.rewards.registry import available, load_class, load_reward, split_name
from diffrl.serving import secrets
from diffrl.serving.client import Servers, find_token
from diffrl_zoo.vlm.backend import Server
from diffrl_zoo.vlm.judge import Vlm


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own settings, which are empty."""
    path = tmp_path / "settings.yaml"
    monkeypatch.setenv("DIFFRL_SETTINGS", str(path))
    return path


class Packages:
    """What is installed: the package diffrl with clip and d2, and a stranger's with clip."""

    def __init__(self, **rewards: list[str]) -> None:
        self.rewards = rewards

    def __call__(self, group: str) -> Iterable[EntryPoint]:
        if group != "diffrl.rewards":
            return entry_points(group=group)
        found = []
        for package, names in self.rewards.items():
            for name in names:
                module = {"clip": "jpeg:Jpeg", "d2": "d2:D2"}[name] if package == "diffrl" else "vlm.judge:Vlm"
                entry = EntryPoint(name, f"diffrl_zoo.{module}", group)
                vars(entry)["dist"] = SimpleNamespace(name=package)
                found.append(entry)
        return found


def test_an_installation_that_is_older_than_its_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a `git pull` under `pip install -e .`: what is not found would add nothing, such as no guard, unsaid."""
    lost = [entry for entry in entry_points(group="diffrl.additions") if entry.name == "methods"]
    monkeypatch.setattr(plugins, "entry_points", lambda group: lost if group == "diffrl.additions" else [])
    with pytest.raises(UserError, match=r'older than .* lacks diffrl.additions "additions": pip install --ed'):
        plugins.installed("addition")
    with pytest.raises(UserError, match=r'it lacks diffrl.rewards "playground"'):
        plugins.find("reward", "clip")


def test_a_strangers_plugin_does_not_replace_a_shipped_one(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "entry_points", Packages(stranger=["clip"], diffrl=["clip", "d2", "d2"]))
    monkeypatch.setattr(plugins, "_needed", dict)
    assert list(available()) == ["d2", "diffrl:clip", "stranger:clip"]
    for ask in (load_class, load_reward):
        with pytest.raises(UserError, match=r'in 2 packages, diffrl and stranger: write "diffrl:clip" or "str'):
            ask("clip")
    assert load_class("diffrl:clip").__name__ == "Jpeg" and load_class("stranger:clip").__name__ == "Vlm"
    assert split_name("d2:clip") == ("d2", "clip")
    assert split_name("diffrl:d2:clip") == ("diffrl:d2", "clip")
    assert split_name("diffrl:clip") == ("diffrl:clip", None)
    path = tmp_path / "run.yaml"
    for plugin, said in (("clip", "in 2 packages, diffrl and stranger"), ("strange:clip", "strange")):
        path.write_text(json.dumps({"rewards": {"clip": {"plugin": plugin}}}))
        with pytest.raises(UserError, match=said):
            load_config(path)
    path.write_text(json.dumps({"rewards": {"clip": {"plugin": "diffrl:clip"}}}))
    assert load_config(path).rewards["clip"].plugin == "diffrl:clip"


def test_a_recipe_reads_only_the_variables_that_the_user_allowed(settings: Path, monkeypatch) -> None:
    monkeypatch.setenv("AWS_SECRET", "s3cret")
    monkeypatch.setenv("DIFFRL_JUDGE", "mine")
    with pytest.raises(UserError, match=r'vlm.key: .* begin with DIFFRL_, and "AWS_SECRET" does not'):
        load_reward("vlm", server="https://judge.example/v1", model="m", key="AWS_SECRET")
    settings.write_text("variables: [AWS_SECRET]\n")
    judge = SlowJudge()
    reward = load_reward("vlm", server=judge.url, model="m", key="AWS_SECRET")
    judge.stop()
    assert isinstance(reward, Vlm) and isinstance(reward.backend, Server)
    assert reward.backend.servers._client.headers["Authorization"] == "Bearer s3cret"
    assert secrets.variable("DIFFRL_JUDGE", "vlm.key") == "mine"
    settings.write_text("variable: [AWS_SECRET]\n")
    with pytest.raises(UserError, match=r'unknown key "variable" \(nearest: "variables"'):
        secrets.variable("AWS_SECRET", "vlm.key")


def test_a_recipe_names_only_the_files_that_the_user_allowed(tmp_path: Path, settings: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a token of some length\n")
    with pytest.raises(UserError, match="token_file: a config may not name the file"):
        find_token(str(token))
    assert find_token(str(token), trusted=True) == "a token of some length"  # on the command line
    token.write_bytes("a token of some length\r\n".encode("utf-16"))  # PowerShell's `>`
    assert find_token(str(token), trusted=True) == "a token of some length"
    settings.write_text(f"files: [{token}]\n")
    assert find_token(str(token)) == "a token of some length"


@pytest.mark.parametrize("url", ["http://judge.example/v1", "http://10.0.0.5:8000"])
def test_secrets_are_not_sent_in_the_clear(url: str, settings: Path, monkeypatch) -> None:
    monkeypatch.setenv("DIFFRL_VLM_KEY", "mine")
    host = "judge.example" if "judge" in url else "10.0.0.5"
    with pytest.raises(UserError, match="is not encrypted, and a token would be sent there"):
        Servers([url], "token", 1.0, 1.0)
    with pytest.raises(UserError, match=f'vlm.server: {url} is not encrypted.*add "{host}" to `http`'):
        load_reward("vlm", server=url, model="m")
    Servers([url], None, 1.0, 1.0).close()  # without a secret there is nothing to lose
    Servers(["http://127.0.0.1:1", "https://a.example"], "token", 1.0, 1.0).close()
    settings.write_text(f"http: [{host}]\n")
    Servers([url], "token", 1.0, 1.0).close()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:hunter2@judge.example/v1", "https://***@judge.example/v1"),
        ("https://judge.example/v1?a=1&api_key=hunter2", "https://judge.example/v1?a=1&api_key=***"),
    ],
)
def test_credentials_in_a_url_are_never_recorded(url: str, shown: str, tmp_path: Path, capsys) -> None:
    """Refused before anything is written, without repeating them."""
    from diffrl.cli.main import main

    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"rewards": {"vlm": {"server": url}}, "run_dir": str(tmp_path / "run")}))
    assert main(["train", str(path)]) == 2
    said = capsys.readouterr().err
    assert "hunter2" not in said and shown in said and "rewards.vlm" in said
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError) as caught:
        load_reward("vlm", server=url)
    assert "hunter2" not in str(caught.value)
