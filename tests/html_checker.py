"""A reader of pages: what a browser would load, and whether tags are balanced."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser


class Checker(HTMLParser):
    """Collects what a browser would act on, and checks that tags are balanced."""

    VOID = ("meta", "link", "img", "br", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: Counter[str] = Counter()
        self.references: set[str] = set()
        self.loaded: list[str] = []
        self.seen: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] += 1
        if tag not in self.VOID:
            self.open.append(tag)
        self.handle_startendtag(tag, attrs, count=False)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]], count: bool = True) -> None:
        self.seen[tag] += count
        for name, value in attrs:
            assert not name.startswith("on"), f"script in <{tag} {name}>"
            if name == "id":
                self.ids[value or ""] += 1
            elif name in ("src", "href", "xlink:href"):
                (self.references.add if (value or "").startswith("#") else self.loaded.append)(value or "")
            self.references.update(re.findall(r"url\((#[^)]*)\)", value or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
