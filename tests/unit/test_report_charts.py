"""Charts and colours of the pages: read by everyone, on a screen or on paper, whatever a user's matplotlib does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from markupsafe import Markup
from PIL import Image
from stress.browser import CHROMIUM, Browser

from diffrl.report import dot_plots, plots
from diffrl.report.built_page import Page
from diffrl.report.divgen import TEMPLATES

pytestmark = pytest.mark.usefixtures("charts")


def test_charts_take_the_pages_colours_and_keep_text(tmp_path: Path) -> None:
    axis = plots.Axis(y="mean score", level=(0.2, "70% of it"), description='a "chart"')
    svg = plots.chart([plots.Line([0, 1500, 3000], [0.1, 0.2, 0.4], "c1", "x", "dots")], axis)
    assert re.findall(r"#[0-9a-f]{6}\b(?!-)", svg) == []
    assert "var(--c1)" in svg and "var(--warn)" in svg and "var(--muted)" in svg
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert {"mean score", "images generated", "70% of it", "1k", "0.2"} <= set(texts)
    assert 'aria-label="a &quot;chart&quot;"' in svg
    assert len(set(re.findall(r'id="(\w{8})-', svg))) == 1
    tiny = plots.chart([plots.Line([0, 1], [1e-6, 1e-2], "c0")], plots.Axis(y="KL", log=True))
    assert {"1e−6", "1e−2"} & set(re.findall(r"<text[^>]*>([^<]*)</text>", tiny))
    timed = plots.chart([plots.Line([0, 5400], [0, 1], "c0")], plots.Axis(x="time", y="y", time=True))
    assert {"time (minutes)", "80"} <= set(re.findall(r"<text[^>]*>([^<]*)</text>", timed))


@pytest.mark.parametrize(
    "low, high, label",
    [
        (6.45e-5, 6.6e-5, "value (×1e−5)"),
        (0.0441, 0.0449, "value (×1e−2)"),
        (-0.0645, -0.0632, "value (×1e−2)"),
        (12340.0, 12590.0, "value (×1e4)"),
        (0.25, 0.5, "value"),
        (-12.5, 3.0, "value"),
    ],
)
def test_ticks_differ_and_leave_the_label_its_room(low: float, high: float, label: str) -> None:
    svg = plots.chart([plots.Line([0, 8], [low, high], "c0")], plots.Axis(y="value"))
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    places = texts.index("images generated")
    ticks = [text for text in texts[places + 1 :] if text != label]
    assert label in texts and len(ticks) >= 2 and len(set(ticks)) == len(ticks)
    assert max(map(len, ticks)) <= plots.MOST_LETTERS
    power = float(label[label.index("×") + 1 : -1].replace("−", "-")) if "×" in label else 1.0
    values = [float(text.replace("−", "-")) * power for text in ticks]
    assert values == sorted(values) and low - 0.05 * (high - low) <= values[0] < values[-1] <= high + 0.05 * (
        high - low
    )


def test_words_are_read_on_every_ground_and_on_paper() -> None:
    """Contrast by WCAG 2.2, 1.4.3; the live page's buttons were white on light blue in the dark."""
    folder = Path(plots.__file__).parent
    style = (folder / "templates" / "style.css").read_text()
    watched = (folder.parent / "watch" / "templates" / "watch.css").read_text()
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in style.split("@media screen and")[:2])

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    rules = re.findall(r"{([^{}]*)}", style + watched)
    grounds = [
        (re.search(r"background: var\(--([\w-]+)\)", r), re.search(r"(?<!-)color: (\S+?)[ ;]", r)) for r in rules
    ]
    pairs = {(ground[1], ink[1]) for ground, ink in grounds if ground and ink}
    pairs |= {("paper", f"var(--{ink})") for ink in ("ink", "muted", "good", "bad")} | {("warn-paper", "var(--ink)")}
    for scheme in (light, dark):
        for ground, ink in pairs:
            shades = [luminance(scheme[ground]), luminance(scheme.get(ink[6:-1], ink))]
            assert (max(shades) + 0.05) / (min(shades) + 0.05) >= 4.5, (ground, ink)
    assert len(pairs) > 6 and style.count("prefers-color-scheme") == 1  # so paper, which is no screen, is white
    assert "print-color-adjust: exact" in style  # else browsers print bars and legends, which are grounds, as nothing


def test_charts_are_the_same_whatever_a_matplotlibrc_or_a_theme_has_set() -> None:
    """One with LaTeX ended the report in a traceback, and a theme drew over the page's colours."""
    theme: dict[str, Any] = {
        "text.usetex": True,
        "font.size": 30,
        "savefig.bbox": "tight",
        "figure.facecolor": "red",
        "figure.constrained_layout.use": True,
        "axes.labelpad": 30,
        "axes.xmargin": 0.3,
        "axes.formatter.use_locale": True,
        "lines.marker": "o",
        "xtick.minor.visible": True,
        "path.sketch": (1, 100, 2),
    }

    def drawn() -> list[str]:
        series = [dot_plots.Dots([0.5, 0.7], "c0", [(0.4, 0.6), None])]
        svgs = [plots.chart([plots.Line([0, 8], [0.1, 0.4], "c0")], plots.Axis(y="value"))]
        svgs += [dot_plots.dots(["a", "b"], series, "score", "x"), dot_plots.radar(["a", "b"], series, "x")]
        return [re.sub(r"\w{8}-|\bid=\S+", "", svg) for svg in svgs]

    plain = drawn()
    with matplotlib.rc_context(theme):
        assert drawn() == plain
        assert all(matplotlib.rcParams[name] == value for name, value in theme.items())


def test_long_curves_are_averaged() -> None:
    xs = list(range(1003))
    thin_xs, thin_ys = plots._thin(xs, [2.0 * x for x in xs])
    assert len(thin_xs) == 400
    np.testing.assert_allclose(thin_ys, 2 * np.array(thin_xs))
    assert thin_xs[0] == pytest.approx(1.0, abs=1) and thin_xs[-1] == pytest.approx(1001, abs=1)
    assert plots._thin(xs[:400], xs[:400]) == (xs[:400], xs[:400])


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_browser_shows_names_from_right_to_left_prints_wide_tables_and_sorts_by_keys(tmp_path: Path) -> None:
    """An Arabic reward's change was shown from its last value to its first; paper lost the columns beyond its edge, and
    a caption's long name made the live page twice as wide as a phone."""
    page = Page("names").lead(Markup("<b>{}</b> <i>3.06</i> → <i>3.09</i>").format("مكافأة"))
    page.section("wide").heading("h").table([["a" * 99, "b" * 99, "c" * 99]])
    sets = "".join(f'<tr><td data-value="{value}">{value}</td></tr>' for value in (2, 10, 1))
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    page.strip("a strip", [(tmp_path / "a.png", "1 " + "x" * 99)], kind="")
    page.add(f'<table class="models"><thead><tr><th>IDS</th></tr></thead><tbody>{sets}</tbody></table>')
    script = TEMPLATES.get_template("models.js").render()
    with Browser(900) as browser:
        browser.open(page.write(tmp_path / "page.html", script).as_uri())
        first, last = browser.evaluate("[...document.querySelectorAll('i')].map(e => e.getBoundingClientRect().x)")
        assert first < last
        column = "[...document.querySelectorAll('.models td')].map(e => e.textContent)"
        for wanted in (["10", "2", "1"], ["1", "2", "10"]):
            browser.evaluate("document.querySelector('.models th').focus()")
            browser.press("Enter")
            assert browser.evaluate(column) == wanted
        style = "(name, key) => getComputedStyle(document.querySelector(name))[key]"
        assert browser.evaluate(f"({style})('.scroll', 'overflowX')") == "auto"
        browser.size(360, 800)
        assert browser.evaluate("document.documentElement.scrollWidth") == 360
        browser.media("print")
        assert browser.evaluate(f"({style})('.scroll', 'overflowX')") == "visible"
        assert browser.evaluate(f"({style})('h3', 'breakAfter')") == "avoid"
