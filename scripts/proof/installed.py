"""What an installation gives beside the package, for a tree that is not installed: its entry points, and the packages
whose folders have other names."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tomllib
from pathlib import Path

from diffrl import __version__

ROOT = Path(__file__).resolve().parents[2]


def provide(folder: Path) -> bool:
    """Where what is installed lacks an entry point of this tree: put a folder in front of the path, here and for
    processes to come, that stands for an installation of it. True if it was needed."""
    facts_of = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, folders = facts_of["project"], facts_of["tool"]["setuptools"]["package-dir"]
    wanted = {(group, name) for group, points in project["entry-points"].items() for name in points}
    try:
        known = {(point.group, point.name) for point in importlib.metadata.distribution("diffrl").entry_points}
    except importlib.metadata.PackageNotFoundError:
        known = set()
    if wanted <= known:
        return False
    site = (folder / "site").resolve()
    facts = site / f"diffrl-{__version__}.dist-info"
    facts.mkdir(parents=True, exist_ok=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: diffrl\nVersion: {__version__}\n")
    groups = {"console_scripts": project["scripts"]} | project["entry-points"]
    lines = [line for name, points in groups.items() for line in (f"[{name}]", *_pairs(points), "")]
    (facts / "entry_points.txt").write_text("\n".join(lines))
    for package, source in folders.items():
        if "." not in package and not (site / package).is_symlink():  # those of diffrl are read where they lie
            (site / package).symlink_to(ROOT / source, target_is_directory=True)
    added = [str(site), str(ROOT)]
    sys.path[:0] = added
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*added, *([before] if before else [])])
    importlib.invalidate_caches()
    return True


def _pairs(points: dict[str, str]) -> list[str]:
    return [f"{name} = {target}" for name, target in points.items()]
