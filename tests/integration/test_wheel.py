"""A built wheel, installed alone in an empty environment, has all that the commands need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel alone; the dependencies come from the one that runs the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".venv*", ".git", ".work", "runs", "build", "*.egg-info", "__pycache__", "wandb")
    shutil.copytree(ROOT, source, ignore=ignored)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*build, str(source)], check=True, capture_output=True)
    venv.create(folder / "env", with_pip=False)
    wheel = next(folder.glob("diffrl-*.whl"))
    site = next((folder / "env").glob("lib/python*/site-packages"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)],
        check=True,
        capture_output=True,
    )
    return folder / "env"


def call(environment: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess:
    # A path on PYTHONPATH is searched for modules, but its .pth files are not read: the checkout's editable install
    # stays invisible, and `diffrl` can only come from the wheel.
    variables = {**os.environ, "PYTHONPATH": sysconfig.get_paths()["purelib"], "OMP_NUM_THREADS": "1"}
    command = [str(environment / "bin" / "python"), "-m", "diffrl", *words]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=300)


@pytest.mark.long
def test_the_demo_runs_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    small = [
        "epochs=1",
        "rollout.groups=4",
        "rollout.group_size=4",
        "optimise.batch_size=8",
        "optimise.micro_batch=null",
    ]
    small += ["evaluate.prompts=4", "run_dir=run"]
    done = call(environment, "demo", *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert (tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors").exists()
    assert "report.html" in done.stdout


@pytest.mark.long
def test_the_zoo_is_installed_with_it(environment: Path, tmp_path: Path) -> None:
    done = call(environment, "rewards", "list", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("playground", "clip", "aesthetic", "ocr"):
        assert name in done.stdout
    where = [
        str(environment / "bin" / "python"),
        "-c",
        "import diffrl, diffrl_zoo; print(diffrl.__file__, diffrl_zoo.__file__)",
    ]
    variables = {**os.environ, "PYTHONPATH": sysconfig.get_paths()["purelib"]}
    found = subprocess.run(where, env=variables, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert all(str(environment) in path for path in found.split())
