"""A folder of pictures to scores. Imports no torch: a second scoring needs none."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffrl.divgen.extractors import NONE, check_extractor, defaults_of, load_extractor
from diffrl.divgen.fair import SetOf, drawn_with
from diffrl.divgen.folders import read_folder
from diffrl.divgen.listings import home, show
from diffrl.divgen.reference import RENDERINGS, Reference, drawn_reference, load_reference
from diffrl.divgen.score import FILE, Scores, score
from diffrl.divgen.store import identity, kept, look
from diffrl.errors import UserError, foreign
from diffrl.tools.progress_bar import progress
from diffrl.version import __version__
from diffrl.worlds import worlds

JOB = "job.json"

log = logging.getLogger("diffrl")


def seen_folder(
    folder: Path,
    names: Mapping[str, str],
    *,
    world: str = "",
    reference: Path | None = None,
    dimension: str = "",
    prompts_from: str = "",
    device: str = "",
) -> SetOf:
    """A folder's images, looked at and scored; what was seen is kept in `DIR/features.sqlite`.

    Args:
        names: extractors by kind, in place of the world's own.
        world: "general" or a world's name; "" is what the folder's job says, or general.
        reference: file of `build_reference`; a world draws its own.
        dimension, prompts_from: as `read_folder` takes them.
    """
    job = read_job(home(folder))
    world = world or str(job.get("world") or "general")
    chosen = {**defaults_of(world), **names}
    for kind, name in chosen.items():
        check_extractor(kind, name)
    pictures = read_folder(folder, dimension, prompts_from)
    items = pictures.items
    log.info("%s", pictures.line())
    with kept(pictures.root) as store, progress("looking", len(items)) as advance:
        sight, loaded, used, missing = look(items, chosen, store, device, list(names), advance)
        real = load_reference(reference) if reference is not None else None
        if real is None and world in worlds() and used["style"] != NONE:
            asked = [item.prompt.text for item in items if item.dimension in ("", "style")]
            about = f"{RENDERINGS} renderings of the {world}"

            def draw() -> Reference:
                style = loaded.get("style") or load_extractor("style", chosen["style"], device)
                return drawn_reference(worlds()[world], style, asked)

            parts = store.recalled(f"{identity('style', chosen['style'])} {about} {__version__}", asked, draw)
            real = Reference(*parts, used["style"], about)
    if real is not None and used["style"] not in (NONE, real.style):
        other = used["style"]
        raise UserError(f'--reference: made with the style extractor "{real.style}", but this scores with "{other}"')
    scores = score(sight, real, missing)
    scores.about = {
        "folder": show(folder),
        "read": pictures.line(),
        "world": world,
        "job": job,
        "copies": sight.copies,
        "drawn": drawn_with(sight, job),
        "asked": dict(names),
        "extractors": used,
        "reference": real and {"source": real.source, "train": len(real.train), "digest": real.digest()},
    }
    return SetOf(folder.name, scores, sight, real)


def score_folder(folder: Path, names: Mapping[str, str], *, out: Path | None = None, **options: Any) -> Scores:
    """Score a folder of images and write `DIR/scores.json` (or `out`); `options` as for `seen_folder`."""
    scores = seen_folder(folder, names, **options).scores
    scores.save(out or home(folder) / FILE)
    return scores


def read_job(folder: Path) -> dict[str, Any]:
    """What `diffrl divgen generate` drew a folder's images with; empty for another tool's."""
    path = folder / JOB
    with foreign(path):
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
