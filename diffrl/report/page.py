"""The report's HTML: one page with its style, and the few elements that sections are built from.

Everything that comes from a run (names, prompts, config) passes through `escape`. The page's content policy forbids
every request, so what is not in the file cannot be shown.
"""

from __future__ import annotations

import base64
import html
import io
import logging
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from diffrl import __version__
from diffrl.errors import in_one_line

log = logging.getLogger("diffrl")
SMALL = 128  # pixels: images up to this size are shown pixel by pixel
_THUMB = 256  # pixels: larger images are reduced to this, as JPEG, so that a report stays below some megabytes

_LIGHT = """
  --paper: #fbfbfa; --card: #ffffff; --ink: #1c1e21; --muted: #62676e; --grid: #e6e7e9; --edge: #e1e2e5;
  --good: #0b7a4b; --bad: #b8321f; --warn: #a65a00; --warn-paper: #fff6e5; --track: #eceded;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #aa3f8c; --c4: #3a9bd9; --c5: #b58900;
  --c6: #6b5fc7; --c7: #6f7780;
  --rollout: #0072b2; --reward: #e69f00; --wait: #d04a35; --optimise: #009e73; --other: #a7adb5; --evaluate: #aa3f8c;
"""
_DARK = """
  --paper: #131518; --card: #1b1e22; --ink: #eceef0; --muted: #9ba2ab; --grid: #2d3137; --edge: #2d3137;
  --good: #4fc98f; --bad: #ff8a73; --warn: #f0b04a; --warn-paper: #2c2415; --track: #2b2f35;
  --c0: #5ab4f0; --c1: #ff9248; --c2: #35d0a2; --c3: #e58bcb; --c4: #8fd0ff; --c5: #e8c547;
  --c6: #a79cff; --c7: #a3abb5;
  --rollout: #5ab4f0; --reward: #f0b84a; --wait: #ff8a73; --optimise: #35d0a2; --other: #6d747d; --evaluate: #e58bcb;
"""
_STYLE = """
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5; font-size: 16px;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", sans-serif;
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100% }
main { max-width: 1260px; margin: 0 auto; padding: 32px 24px 64px }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; overflow-wrap: anywhere }
h2 { font-size: 20px; margin: 44px 0 4px; letter-spacing: -0.005em }
p { margin: 0 0 12px; max-width: 46em }
.note, .sub { color: var(--muted) } .note { font-size: 14.5px; margin-bottom: 16px } .sub { margin-bottom: 20px }
.lead { font-size: 18px; margin: 18px 0; max-width: none }
.grid { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(min(310px, 100%), 1fr)) }
.tiles { grid-template-columns: repeat(auto-fill, minmax(min(200px, 100%), 1fr)) }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 12px 14px; margin: 0;
  min-width: 0 }
figcaption, .tile-name { display: flex; flex-wrap: wrap; gap: 2px 10px; align-items: baseline; font-weight: 600;
  font-size: 15px; overflow-wrap: anywhere }
figure.card { display: flex; flex-direction: column } figure.card > svg { margin-top: auto }
figcaption { margin-bottom: 6px }
.tag, .legend { font-weight: 400; font-size: 13px; color: var(--muted) }
.legend { display: flex; flex-wrap: wrap; gap: 0 12px; flex-basis: 100% }
.legend span { white-space: nowrap } .legend span.long { white-space: normal; overflow-wrap: anywhere }
.legend i { display: inline-block; width: 14px; height: 0; border-top: 2.5px solid; margin-right: 5px;
  vertical-align: 0.27em; border-radius: 2px }
.legend i.faint { border-top-width: 1.5px; opacity: 0.6 } .legend i.dashed { border-top-style: dashed }
.legend i.block { height: 10px; width: 10px; border: 0; vertical-align: -0.04em }
svg { display: block; width: 100%; height: auto; font-family: inherit }
svg * { stroke-linejoin: round }
.tile-value { font-size: 25px; font-weight: 600; line-height: 1.25; letter-spacing: -0.01em }
.tile-change { font-size: 14px; color: var(--muted) } .good { color: var(--good) } .bad { color: var(--bad) }
.tile-change b { font-weight: 600 }
.tile { display: flex; flex-direction: column } .tile svg.spark { height: 34px; margin-top: auto; padding-top: 4px }
.warning { background: var(--warn-paper); border: 1px solid var(--edge); border-left: 4px solid var(--warn);
  border-radius: 6px; padding: 10px 14px; margin: 0 0 10px; max-width: none }
.tiles { margin-top: 20px }
.strip { margin: 0 0 18px } .strip p { margin: 0 0 6px; font-size: 15px; max-width: none; overflow-wrap: anywhere }
.row { display: flex; flex-wrap: wrap; gap: 7px }
.row figure { margin: 0; width: min-content }
.row figcaption { font-weight: 400; font-size: 12.5px; color: var(--muted); margin: 2px 0 0 }
.row img { display: block; width: 128px; height: auto; border-radius: 4px; background: var(--track) }
img.pixels { image-rendering: pixelated }
.bar { display: flex; height: 22px; border-radius: 6px; overflow: hidden; background: var(--track); gap: 1px }
p.legend { max-width: none; margin: 8px 0 16px }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 14.5px } td, th { text-align: left; padding: 5px 18px 5px 0;
  border-bottom: 1px solid var(--edge); vertical-align: top; overflow-wrap: anywhere } th { font-weight: 600 }
.lines { margin-bottom: 16px } .lines td { white-space: nowrap } .lines td:nth-child(2) { width: 100%; min-width: 12em }
.lines .bar { height: 14px; margin-top: 5px }
.facts th { white-space: nowrap; color: var(--muted); font-weight: 400 }
.numbers td:not(:first-child), .numbers th:not(:first-child) { text-align: right; padding: 5px 0 5px 22px }
.numbers th, .numbers td { overflow-wrap: normal } .numbers span, .numbers b { white-space: nowrap }
.strips { grid-template-columns: repeat(auto-fill, minmax(min(440px, 100%), 1fr)) }
details { margin-top: 14px } summary { cursor: pointer; font-weight: 600 }
pre, code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; font-size: 13px }
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: 12px }
footer { margin-top: 48px; color: var(--muted); font-size: 13.5px }
@media (max-width: 520px) { main { padding: 20px 12px 40px } .card { padding: 10px } h1 { font-size: 25px }
  h2 { margin-top: 34px } .row img { width: 104px } .row img.pixels { width: 68px }
  .numbers { font-size: 13px } .numbers td:not(:first-child), .numbers th:not(:first-child) { padding-left: 10px }
  .tiles { grid-template-columns: 1fr 1fr; gap: 10px } .tile-value { font-size: 21px } }
@media print { .card, .strip { break-inside: avoid } }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(title: str, body: str) -> str:
    """A complete, self-contained HTML page; `body` is HTML, `title` is text."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>:root {{ color-scheme: light dark;{_LIGHT}}}
@media (prefers-color-scheme: dark) {{ :root {{{_DARK}}} }}{_STYLE}</style>
</head>
<body><main>
{body}
<footer>Written by diffrl {escape(__version__)}. This file holds everything it shows and fetches nothing.</footer>
</main></body>
</html>
"""


def escape(value: object) -> str:
    """Text for HTML, also within quoted attributes."""
    return html.escape(str(value))


def section(title: str, body: str, note: str = "") -> str:
    """A headed part of the page; nothing when it has no body. `title` and `note` are text, `body` is HTML."""
    if not body:
        return ""
    explanation = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{explanation}{body}</section>"


def grid(cards: Sequence[str], kind: str = "") -> str:
    """Cards side by side, as many as fit; nothing when there are none. `kind`: "" (charts), "tiles" or "strips"."""
    return f'<div class="grid {kind}">{"".join(cards)}</div>' if cards else ""


def figure(title: str, svg: str, tag: str = "", legend: Sequence[tuple[str, str, str]] = ()) -> str:
    """A chart in a card. `legend`: `(colour, kind, text)` with the kinds of `plots.Line`, or "block"."""
    keys = "".join(
        f'<span{long(text)}><i class="{kind}" style="{"background" if kind == "block" else "border"}-color: '
        f'var(--{color})"></i>{escape(text)}</span>'
        for color, kind, text in legend
    )
    parts = [escape(title), f'<span class="tag">{escape(tag)}</span>' if tag else ""]
    parts.append(f'<span class="legend">{keys}</span>' if keys else "")
    return f'<figure class="card"><figcaption>{"".join(parts)}</figcaption>{svg}</figure>'


def long(text: str) -> str:
    """The class attribute of a legend's text that may have to wrap."""
    return ' class="long"' if len(text) > 30 else ""


def strip(title: str, images: Sequence[tuple[Path, str]], seed: str = "") -> str:
    """Images of one prompt side by side, each `(file, caption)`."""
    cells = "".join(
        f'<figure><img {picture(path)} alt="{escape(f"{title}, {caption}")}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
        for path, caption in images
    )
    note = f' <span class="tag">seed {escape(seed)}</span>' if seed else ""
    return f'<div class="strip"><p>{escape(title)}{note}</p><div class="row">{cells}</div></div>'


def picture(path: Path) -> str:
    """`src`, size and class of an `<img>` that holds the file itself: lossless when small, else a thumbnail.

    One that cannot be read is named, and left out: a report must not end for a picture that a crash has torn.
    """
    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except Exception as error:  # what a damaged file raises depends on where it is damaged
        log.warning("%s: not a readable picture (%s); it is left out", path, in_one_line(error, most=120))
        return f'title="{escape(path.name)}: not a readable picture"'
    buffer = io.BytesIO()
    if max(image.size) <= SMALL:
        image.save(buffer, format="png", optimize=True)
        kind, style = "png", ' class="pixels"'
    else:
        image.thumbnail((_THUMB, _THUMB), Image.Resampling.LANCZOS)
        image.save(buffer, format="jpeg", quality=88)
        kind, style = "jpeg", ""
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'src="data:image/{kind};base64,{data}" width="{image.width}" height="{image.height}"{style}'


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = (), kind: str = "facts") -> str:
    """A table of HTML cells; the first cell of a row is its heading. `kind`: "facts" or "numbers"."""
    top = f"<thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr></thead>" if head else ""
    body = "".join(f"<tr><th>{row[0]}</th>{''.join(f'<td>{cell}</td>' for cell in row[1:])}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{kind}">{top}<tbody>{body}</tbody></table></div>'
