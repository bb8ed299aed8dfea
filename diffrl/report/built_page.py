"""A page that is built from top to bottom, in one call after another: all but a run's report."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from diffrl.records.disk import write_text
from diffrl.report.page import Markup, curves, figure, grid, page, section, strip, table
from diffrl.report.plots import Axis, Line


class Page:
    """A page from top to bottom: a head, then what is added, in sections. Cards that follow each other are one grid, so
    are strips; a section to which nothing is added is left out.

    title: of the window and, without a heading of its own, of the page.
    """

    def __init__(self, title: str, heading: str = "") -> None:
        self.title = title
        self._head = Markup("<h1>{}</h1>").format(heading or title)
        self._sections: list[tuple[str, str, list[tuple[str, str]]]] = []  # title, note, and the kind and HTML of parts

    def section(self, title: str, note: str = "") -> Page:
        """What follows belongs to it."""
        self._sections.append((title, note, []))
        return self

    def add(self, html: str, kind: str = "") -> Page:
        """HTML; of a `kind` of `grid`, beside its neighbours of the same kind."""
        if html and self._sections:
            self._sections[-1][2].append((kind, html))
        elif html:
            self._head += Markup(html)
        return self

    def insert(self, sections: str) -> Page:
        """Sections that are HTML already."""
        self._sections.append(("", "", [("", sections)]))
        return self

    def lead(self, text: str, kind: str = "") -> Page:
        """A paragraph. `kind`: "sub", "lead", "note", "warning"."""
        return self.add(Markup('<p class="{}">{}</p>').format(kind, text) if text else "")

    def heading(self, text: str) -> Page:
        """Inside a section."""
        return self.add(Markup("<h3>{}</h3>").format(text))

    def table(self, rows: Sequence[Sequence[object]], head: Sequence[str] = (), kind: str = "numbers") -> Page:
        return self.add(table(rows, head, kind) if rows else "")

    def chart(self, title: str, lines: Sequence[Line] | str, axis: Axis | None = None, tag: str = "") -> Page:
        """A card with curves, or with an `<svg>`."""
        card = figure(title, lines, tag) if isinstance(lines, str) else curves(title, lines, axis or Axis(), tag)
        return self.add(card, "charts")

    def strip(self, title: str, images: Sequence[tuple[Path, str]], kind: str = "strips") -> Page:
        """Images of one prompt in a row, each `(file, caption)`; nothing without images."""
        return self.add(strip(title, images) if images else "", kind)

    def sections(self) -> str:
        """Without the head."""
        text = ""
        for title, note, parts in self._sections:
            groups = itertools.groupby(parts, key=lambda part: part[0])
            grids = ((kind, [html for _, html in group]) for kind, group in groups)
            html = "".join(grid(cards, kind) if kind else "".join(cards) for kind, cards in grids)
            text += section(title, html, note) if title else html
        return text

    def write(self, path: Path, script: str = "") -> Path:
        """Write the page at once, its folder too; returns the path. DiskError if it cannot be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, page(f"{self.title} · diffrl", f"<header>{self._head}</header>{self.sections()}", script))
        return path
