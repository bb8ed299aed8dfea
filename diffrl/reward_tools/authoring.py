"""`diffrl rewards new`: a package with a reward that works, its test and its entry point, for its author to rewrite."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from string import Template

from diffrl.errors import UserError
from diffrl.plugins import GROUPS
from diffrl.records.disk import check_writable
from diffrl.rewards.registry import available
from diffrl.tools.outputs import write_new


def write_plugin(name: str, folder: Path) -> Path:
    """Write the package of a new reward `name` into `folder`, which it returns.

    Raises `UserError` for a name that is no Python name in lower case or is taken, and for a folder with files in it;
    `DiskError`, which leaves no file.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f'rewards new: "{name}": use lower-case letters, digits and "_", as in my_reward')
    if name in available():
        raise UserError(f'rewards new: there is a reward "{name}" ({available()[name].value}); choose another name')
    module = name if name.endswith("reward") else f"{name}_reward"
    if importlib.util.find_spec(module) is not None:
        raise UserError(f'rewards new: there is a Python module "{module}"; choose another name')
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f'rewards new: "{folder}" exists already; choose another --out')
    check_writable(folder, "rewards new: --out")
    cls = "".join(part.capitalize() for part in name.split("_") if part)
    words = {
        "name": name,
        "module": module,
        "cls": cls,
        "group": GROUPS["reward"],
        "dashed": name.strip("_").replace("_", "-"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    files = {f"{module}.py": "reward.py", f"test_{module}.py": "test_reward.py", "pyproject.toml": "pyproject.toml"}
    made = Path(__file__).with_name("templates")
    texts = {file: (made / f"{template}.txt").read_text(encoding="utf-8") for file, template in files.items()}
    write_new({folder / file: Template(text).substitute(words) for file, text in texts.items()})
    return folder
