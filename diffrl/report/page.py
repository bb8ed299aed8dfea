"""The report's HTML: one page with its style, and the few elements that sections are built from.

A section of a run's report is made of these; other pages are built from top to bottom (`built_page.py`). The templates
escape all text; HTML is what has the type `Markup`, and `Markup("<b>{}</b>").format(text)` escapes, too. The
page's content policy forbids every request, so what is not in the file cannot be shown.
"""

from __future__ import annotations

import base64
import hashlib
import io
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from markupsafe import escape as escape
from PIL import Image

from diffrl.errors import in_one_line
from diffrl.report.plots import Axis, Line, chart
from diffrl.version import __version__

log = logging.getLogger("diffrl")
SMALL = 128  # pixels: images up to this size are shown pixel by pixel
_WIDEST = 4096  # pixels of a row of images
_THUMB = 256  # pixels: larger images are reduced to this, as JPEG, so that a report stays below some megabytes

TEMPLATES = Environment(loader=PackageLoader("diffrl.report"), autoescape=True, undefined=StrictUndefined)
_ELEMENTS: Any = TEMPLATES.get_template("elements.html.j2").module


def page(title: str, body: str, script: str = "") -> str:
    """A complete, self-contained HTML page; `body` is HTML, `title` is text, `script` JavaScript, which is the only
    one that the page's policy lets run."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {"title": title, "body": body, "version": __version__, "script": script, "digest": digest}
    return TEMPLATES.get_template("page.html.j2").render(parts) + "\n"


def section(title: str, body: str, note: str = "") -> str:
    """A headed part of the page; nothing when it has no body. `title` and `note` are text, `body` is HTML."""
    return str(_ELEMENTS.section(title, body, note)) if body else ""


def grid(cards: Sequence[str], kind: str = "charts") -> str:
    """Cards side by side, as many as fit, without the empty ones; nothing when there are none.

    `kind`: "charts", "wide" (many curves), "loose" (of unequal height), "tiles" or "strips".
    """
    return str(_ELEMENTS.grid(shown, kind)) if (shown := [card for card in cards if card]) else ""


def figure(title: str, svg: str, tag: str = "", legend: Sequence[tuple[str, str, str]] = ()) -> str:
    """A chart in a card. `legend`: `(colour, kind, text)` with the kinds of `plots.Line`, or "block"."""
    return str(_ELEMENTS.figure(title, svg, tag, legend))


def curves(title: str, lines: Sequence[Line], axis: Axis, tag: str = "") -> str:
    """Curves in a card, with a legend of those that have a label; nothing without a curve."""
    legend = [(line.color, line.kind, line.label) for line in lines if line.label]
    return figure(title, chart(lines, axis), tag, legend) if lines else ""


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


def img(path: Path, text: str, style: str = "") -> Markup:
    """An `<img>` that holds the file, and what it shows, for readers who do not see it."""
    return Markup('<img {} alt="{}" style="{}">').format(Markup(picture(path)), text, style)


def table(rows: Sequence[Sequence[object]], head: Sequence[str] = (), kind: str = "facts") -> str:
    """A table; the first cell of a row is its heading. `kind`: "facts" or "numbers"."""
    return str(_ELEMENTS.table(rows, head, kind))


def legend(parts: Sequence[tuple[str, str, str]]) -> Markup:
    """Of a chart, or beside one: `(colour, kind, text)`, as in `figure`."""
    return Markup(_ELEMENTS.legend(parts))


def bar(parts: Sequence[tuple[float, str, str]], label: str = "") -> Markup:
    """Parts of a whole side by side, each `(share, colour, title)`. `label`: what it shows, for who does not see it."""
    return Markup(_ELEMENTS.bar(parts, label))


def tile(name: str, tag: str, value: str, change: str, points: str, color: str) -> str:
    """A number with its change, and a curve through `points` (SVG's, in 100 x 20 units) if there are any."""
    return str(_ELEMENTS.tile(name, tag, value, change, points, color))
