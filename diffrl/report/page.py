"""The report's HTML: one page with its style, and the few elements that sections are built from.

The elements and the style sheet are in `templates`, which escape all text; what a section writes around them passes
through `escape`, if it comes from a run (names, prompts, config). The page's content policy forbids
every request, so what is not in the file cannot be shown.
"""

from __future__ import annotations

import base64
import hashlib
import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import markupsafe
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from diffrl.errors import in_one_line
from diffrl.version import __version__

log = logging.getLogger("diffrl")
SMALL = 128  # pixels: images up to this size are shown pixel by pixel
_WIDEST = 4096  # pixels of a row of images
_THUMB = 256  # pixels: larger images are reduced to this, as JPEG, so that a report stays below some megabytes

_TEMPLATES = Environment(loader=PackageLoader("diffrl.report"), autoescape=True, undefined=StrictUndefined)
_ELEMENTS: Any = _TEMPLATES.get_template("elements.html.j2").module


def page(title: str, body: str, script: str = "") -> str:
    """A complete, self-contained HTML page; `body` is HTML, `title` is text, `script` JavaScript, which is the only
    one that the page's policy lets run."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {"title": title, "body": body, "version": __version__, "script": script, "digest": digest}
    return _TEMPLATES.get_template("page.html.j2").render(parts) + "\n"


def escape(value: object) -> str:
    """Text for HTML, also within quoted attributes."""
    return str(markupsafe.escape(str(value)))


def section(title: str, body: str, note: str = "") -> str:
    """A headed part of the page; nothing when it has no body. `title` and `note` are text, `body` is HTML."""
    return str(_ELEMENTS.section(title, body, note)) if body else ""


def grid(cards: Sequence[str], kind: str = "") -> str:
    """Cards side by side, as many as fit; nothing when there are none.

    `kind`: "" (charts), "wide" (charts with many curves), "tiles" or "strips".
    """
    return str(_ELEMENTS.grid(cards, kind)) if cards else ""


def figure(title: str, svg: str, tag: str = "", legend: Sequence[tuple[str, str, str]] = ()) -> str:
    """A chart in a card. `legend`: `(colour, kind, text)` with the kinds of `plots.Line`, or "block"."""
    return str(_ELEMENTS.figure(title, svg, tag, legend))


def strip(title: str, images: Sequence[tuple[Path, str]], seed: str = "") -> str:
    """Images of one prompt side by side, each `(file, caption)`."""
    return str(_ELEMENTS.strip(title, [(picture(path), caption) for path, caption in images], seed))


def picture(path: Path, row: bool = False) -> str:
    """`src`, size and class of an `<img>` that holds the file itself: lossless when small, else a thumbnail.

    `row`: small images side by side in one file, which are as small as it is high.

    One that cannot be read is named, and left out: a report must not end for a picture that a crash has torn.
    """
    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except Exception as error:  # what a damaged file raises depends on where it is damaged
        log.warning("%s: not a readable picture (%s); it is left out", path, in_one_line(error, most=120))
        return f'title="{escape(path.name)}: not a readable picture"'
    buffer = io.BytesIO()
    if (image.height if row else max(image.size)) <= SMALL and image.width <= _WIDEST:
        image.save(buffer, format="png", optimize=True)
        kind, style = "png", ' class="pixels"'
    else:
        image.thumbnail((_THUMB, _THUMB), Image.Resampling.LANCZOS)
        image.save(buffer, format="jpeg", quality=88)
        kind, style = "jpeg", ""
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'src="data:image/{kind};base64,{data}" width="{image.width}" height="{image.height}"{style}'


def sortable(rows: Sequence[tuple[int, str, Sequence[str]]], head: Sequence[str]) -> str:
    """A table of HTML cells, each row with an entry's number and its track; a script of the page may sort it."""
    return str(_ELEMENTS.sortable(rows, head))


def switch(name: str, panels: Sequence[tuple[str, str]]) -> str:
    """One of several panels `(label, HTML)` at a time, the first at first; without a script. `name` is unique."""
    return str(_ELEMENTS.switch(name, panels))


def keys(groups: Mapping[str, Sequence[tuple[int, str, str]]]) -> str:
    """The legend of numbered curves by the name of their group, each `(number, colour, text)`."""
    return str(_ELEMENTS.keys(groups))


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = (), kind: str = "facts") -> str:
    """A table of HTML cells; the first cell of a row is its heading. `kind`: "facts" or "numbers"."""
    return str(_ELEMENTS.table(rows, head, kind))
