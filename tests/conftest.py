"""Shared set-up: no hub, one thread (the suite runs in parallel processes), tiny models of the true classes."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
sys.path.insert(0, str(Path(__file__).parent))

import copied
import pytest
import torch
import yaml
from charts import blank_charts as blank_charts
from charts import charts as charts
from garbage import freeze_modules, thaw

torch.set_num_threads(1)  # before any parallel region, so that tests may fork
gc.disable()  # until the tests' modules are imported

# nohup and a shell's `&` leave signals ignored, and children inherit that: no test depends on how pytest was started.
for number, handler in {"SIGHUP": signal.SIG_DFL, "SIGINT": signal.default_int_handler}.items():
    if hasattr(signal, number) and signal.getsignal(signal.Signals[number]) is signal.SIG_IGN:
        signal.signal(signal.Signals[number], handler)


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_runtest_logfinish() -> None:  # what the test and its fixtures held is gone by now
    freeze_modules()


def pytest_sessionfinish() -> None:
    thaw()


PROMPTS = ["red a", "red b", "red c on d", "red and e", "red f", "red g and h"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny random StableDiffusion3Pipeline."""
    from tiny import tiny_sd3

    return tiny_sd3(tmp_path_factory.mktemp("model") / "sd3")


@pytest.fixture
def reads() -> None:
    """For tests that look at how a model's files are read: they are, each time."""


@pytest.fixture(autouse=True)
def _read_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """A model's folder is read once in a process, see `copied`."""
    files = sys.modules.get("diffrl.policy.files")
    with pytest.MonkeyPatch.context() as patch:
        if files is not None and request.path.parent.name in copied.FOLDERS and "reads" not in request.fixturenames:
            patch.setattr(files, "load_parts", partial(copied.load_parts, files.load_parts))
        yield


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """Installs one plugin more for the time of a test: its name, `module:NAME`, and the group of entry points."""
    from importlib.metadata import EntryPoint, entry_points

    def install(name: str, value: str, group: str) -> None:
        more = [EntryPoint(name, value, group)]

        def find(group: str) -> list[EntryPoint]:
            return [*entry_points(group=group), *(entry for entry in more if entry.group == group)]

        monkeypatch.setattr("diffrl.plugins.entry_points", find)

    return install


@pytest.fixture
def config_file(tiny_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes a config of a few-second run on the tiny model; keyword arguments replace whole sections' keys."""

    def write(name: str = "run", **sections: Any) -> Path:
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("\n".join(PROMPTS) + "\n")
        reward = str(Path(__file__).parent / "data" / "redness.py") + ":Redness"
        config: dict[str, Any] = {
            "model": str(tiny_model),
            "prompts": {"train": str(prompts), "test": str(prompts), "overlap": True},
            "run_dir": str(tmp_path / name),
            "epochs": 3,
            "lora": {"rank": 4, "alpha": 8},
            "rollout": {"groups": 4, "group_size": 4, "steps": 3, "batch_size": 8},
            "rewards": {"redness": {"plugin": reward}},
            "objective": "nft",
            "optimise": {"batch_size": 8, "micro_batch": 0.5, "learning_rate": 1e-3},
            "evaluate": {"every": 2, "prompts": 2, "per_prompt": 2},
            "tracking": {"samples": 2},
        }
        for key, value in sections.items():
            config[key] = {**config[key], **value} if isinstance(config.get(key), dict) else value
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    return write


@pytest.fixture
def one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the conformance check: it times one call of the reward, not five."""
    monkeypatch.setattr("diffrl.reward_tools.check.SECONDS", 0.0)


@pytest.fixture(autouse=True)
def _attention_of_its_own() -> Iterator[None]:
    """diffusers keeps the kernel that was set last for all networks of the process: no test has that of another."""
    yield
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    if dispatch is not None:
        dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)
