"""The notebooks in examples/ run from the first cell to the last, with less to train."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from safetensors.torch import load_file
from tiny import SPEC, scramble

from diffrl.policy import load_policy

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))
TINY = "epochs = 1\ngroups, group_size, steps = 4, 2, 2\nheld_out = 2"
# In the place of a large model: the tests' tiny one, which `init` does not know as small.
SMALL = """
model = "{model}"
train_prompts, test_prompts = "ocr/train", "ocr/test"
reward, card, precision, resolution = "jpeg", 16, "fp32", 16
more = ["rewards.jpeg.weight=1", "watch.aesthetic=null", "watch.pickscore=null", "evaluate.features=pixels"]
start = "{start}"
"""
# `init` is run by the notebook's own function, as in a shell; then the kernel has torch already.
INSIDE = """
from diffrl.cli.main import main


def diffrl(*words):
    return main([*map(str, words)])
"""


def somebodys(model: Path, folder: Path) -> Path:
    """A LoRA to start from."""
    policy = load_policy(str(model), lora=SPEC)
    scramble(policy, std=0.1)
    policy.save_lora(folder / "style")
    return folder / "style"


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(path, as_version=4)
    parameters = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(parameters) == 1 and "epochs" in parameters[0].source
    parameters[0].source = TINY + (
        SMALL.format(model=tiny_model, start=somebodys(tiny_model, tmp_path)) if path.stem == "one_card" else ""
    )
    if path.stem == "one_card":
        (first,) = [number for number, cell in enumerate(notebook.cells) if 'diffrl("init"' in cell.source]
        notebook.cells.insert(first + 1, nbformat.v4.new_code_cell(INSIDE))
    notebook.metadata.kernelspec.name = "python3"
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.km = client.create_kernel_manager()
    client.km.kernel_spec.argv[0] = sys.executable  # this environment's, whatever else is installed
    client.execute()
    pictures = [o for cell in notebook.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert pictures and list(tmp_path.glob("runs/*/lora/*.safetensors"))
    if path.stem == "one_card":
        keys = load_file(tmp_path / "one_card.safetensors").keys()
        assert keys and all(key.startswith(("diffusion_model.", "lora_unet", "transformer.")) for key in keys)
