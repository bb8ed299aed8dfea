"""The page of the league: what each method gains and what it loses at equal cost, from league.json alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from diffrl.errors import foreign
from diffrl.records.disk import write_text
from diffrl.report.page import Markup, escape, figure, grid, page, picture, section, table
from diffrl.report.plots import Axis, Line
from experiments.league.charts import Curve, Point, curves, scatter
from experiments.league.data import (
    AXES,
    HOLDS,
    OPPOSITE,
    Entry,
    League,
    Result,
    Track,
    hacking_curve,
    read_league,
    signed,
    turned,
    verdict,
)
from experiments.league.table import LIMITS, as_file, headlines, notes, pareto, rows

SCRIPT, STYLE = (Path(__file__).with_name(f"league.{suffix}") for suffix in ("js", "css"))
_TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
ELEMENTS: Any = _TEMPLATES.get_template("elements.html.j2").module  # sortable, switch, keys
COLORS = 7  # of the style sheet's series; the last one is grey
MANY = 16  # entries: charts are wider then
FEW = 8  # lines of what was left out that are shown at once
COSTS = {"images": "images scored", "forwards": "network forwards", "seconds": "time on one core"}
WHERE = {"seconds": "`cost` measures them", "forwards": "`cost` counts them"}


def write_league(path: Path, out: Path) -> Path:
    """Write the page of a league.json, self-contained, and return its path.

    Raises:
        UserError: the file is not there, or not what diffrl writes there.
    """
    league = read_league(path)
    with foreign(path):
        body = _body(league)
    return _write(out, page("The league · diffrl", body, SCRIPT.read_text(encoding="utf-8")))


def write_league_table(path: Path, out: Path) -> Path:
    """Write its table as Markdown, or as LaTeX where the file is called so (.tex). UserError as `write_league`."""
    league = read_league(path)
    with foreign(path):
        text = as_file(league, out.suffix)
    return _write(out, text)


def _write(target: Path, text: str) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, text)
    return target


def _body(league: League) -> str:
    tracks = [track for track in league.tracks.values() if league.of(track)]
    body = f"<style>{STYLE.read_text(encoding='utf-8')}</style>{_head(league)}{_warnings(league)}"
    for i, track in enumerate(tracks):
        body += _track(i, track, league.of(track))
    table_note = " ".join(notes()) + " A click on a column's head sorts by it."
    body += section("All results", _table(league), table_note)
    strips = "".join(_strips(track, league.of(track)) for track in tracks)
    body += section("The same prompts, the same noise", strips, "One row for each entry, after its training.")
    body += section("What each paper claims", _claims(league), CLAIMS)
    left = _listed(league.left_out)
    if len(league.left_out) > FEW:
        left = f"<details><summary>{_counted(len(league.left_out), 'result')}</summary>{left}</details>"
    body += section("What was left out", left)
    body += section("What the playground cannot tell about SD3.5", _listed(LIMITS))
    return body + section("How it was made", _made(league))


POINTING = (
    "Curves are the evaluations during training, means over seeds; clicks on names, or on a group's, show those curves "
    "alone, with their 95 % intervals. A Pareto front is of the means."
)
KINDS = {
    "base": "Methods",
    "wrapper": "Around a method",
    "stack": "Together",
    "teacher": "Distilled",
    "offline": "On drawn images",
    "search": "No training",
}
CLAIMS = (
    "Holds, or the opposite holds: the difference from the other entry, paired by seed, is larger than half its 95 % "
    "interval. Not parted: it is not, with these seeds. Each claim is judged by itself: of forty, two part by chance. "
    "Grey: what the entry gained, and the variety that it kept."
)


def _head(league: League) -> str:
    seeds = sorted({one.seeds for one in league.results})
    counts = {"entry": len({one.entry.name for one in league.results}), "result": len(league.results)}
    counts = {"track": len({one.track.name for one in league.results})} | counts
    parts = [_counted(number, word) for word, number in counts.items()]
    if seeds:
        spread = _counted(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
        parts.append(f"{spread} each")
    lines = [[track.name, text] for track, text in headlines(league)]
    sentences = table(lines) if lines else "<p>No result yet.</p>"
    return f'<header><h1>The league</h1><p class="sub">{escape(" · ".join(parts))}</p></header>{sentences}'


def _counted(number: int, word: str) -> str:
    return f"{number} {word if number == 1 else word.removesuffix('y') + 'ies' if word.endswith('y') else word + 's'}"


def _warnings(league: League) -> str:
    lines = [
        f'<p class="warning"><b>{escape(one.entry.title)}</b> on {escape(one.track.name)} was caught and takes part in '
        f"nothing: {escape(' '.join(one.caught))}</p>"
        for one in league.results
        if one.caught
    ]
    return section("Caught", "".join(lines))


def _color(entry: Entry) -> str:
    return f"c{(entry.number - 1) % COLORS}"


def _track(place: int, track: Track, results: Sequence[Result]) -> str:
    groups: dict[str, list[tuple[int, str, str]]] = {}
    for one in results:
        row = (one.entry.number, _color(one.entry), one.entry.title)
        groups.setdefault(KINDS.get(one.entry.kind, one.entry.kind), []).append(row)
    cards = [_scatter(track, results, name) for name in track.judged]
    cards += [_hacking(track, results, proxy, gold) for proxy in track.proxy for gold in track.gold if proxy != gold]
    costly = dict.fromkeys((*track.judged, track.named("variety")))
    cards += [_by_cost(f"cost-{place}-{i}", track, results, name) for i, name in enumerate(costly)]
    images = "" if track.images is None else f"; {track.images:,} images"
    gold = f"; gold: {', '.join(track.gold)}" if track.gold else "; no gold beside it"
    about = f"Trained on {', '.join(track.proxy)}{gold}{images}. {track.shows} {POINTING}"
    charts = grid([card for card in cards if card], "wide" if _many(results) else "charts")
    return section(track.name, str(ELEMENTS.keys(groups)) + charts, about)


def _many(results: Sequence[Result]) -> bool:
    return len(results) > MANY


def _lower(track: Track, name: str) -> str:
    return "lower is better" if name in track.lower else ""


def _scatter(track: Track, results: Sequence[Result], name: str) -> str:
    points = [
        Point(one.kept.mean, gain.mean, one.kept.half, gain.half, _color(one.entry), one.entry.number)
        for one in results
        if one.kept is not None and (gain := one.gains.get(name)) is not None
    ]
    if not points:
        return ""
    _, corners = pareto(track, results, name)
    about = f"{track.name}: {name} against variety"
    axis = Axis(x="variety kept", y=f"gain in {name}", score=True, description=about)
    kind = "gold" if name in track.gold else "proxy"
    tag = ", ".join(part for part in (kind, _lower(track, name)) if part)
    svg = scatter(points, corners, (1.0, 0.0), axis, _many(results))
    return figure(f"{name} against variety", svg, tag, [("muted", "dashed", "Pareto front"), *_BARS])


_BARS = [("other", "", "95 % interval over seeds")]


def _hacking(track: Track, results: Sequence[Result], proxy: str, gold: str) -> str:
    lines = []
    for one in results:
        curve = hacking_curve(one, proxy, gold)
        if len(curve) > 1:
            seen = [values for _, values in one.curve if proxy in values and gold in values]
            halves = [values[gold].half for values in seen]
            best, all_seen = turned(one, gold), [values for _, values in one.curve if gold in values]
            ring = seen.index(all_seen[best]) if best is not None and all_seen[best] in seen else None
            xs, ys = [x for x, _ in curve], [y for _, y in curve]
            lines.append(Curve(Line(xs, ys, _color(one.entry), "", "dots"), one.entry.number, halves, ring))
    if not lines:
        return ""
    about = f"{track.name}: {gold} against {proxy}"
    axis = Axis(x=f"gain in {proxy}", y=f"gain in {gold}", score=True, description=about)
    rings = [("ink", "ring", "from here on it falls")] if any(line.ring is not None for line in lines) else []
    return figure(f"{gold} against {proxy}", curves(lines, axis, _many(results)), "over the training", rings)


def _by_cost(name: str, track: Track, results: Sequence[Result], value: str) -> str:
    """A value over images, forwards and seconds: one chart each, of which the reader chooses."""
    if not any(value in seen for one in results for _, seen in one.curve):
        return ""
    panels = [(axis, _cost_panel(track, results, value, axis)) for axis in AXES]
    return figure(f"{value} at equal cost", str(ELEMENTS.switch(name, panels)), _lower(track, value))


def _cost_panel(track: Track, results: Sequence[Result], value: str, axis: str) -> str:
    lines, without = [], []
    for one in results:
        points = [(cost[axis], seen[value]) for cost, seen in one.curve if value in seen and cost[axis] is not None]
        if not points:
            without.append(one.entry.title)
            continue
        xs, ys = [x or 0.0 for x, _ in points], [y.mean for _, y in points]
        halves = [y.half for _, y in points]
        lines.append(Curve(Line(xs, ys, _color(one.entry), "", "dots"), one.entry.number, halves))
    if not lines:
        text = f"No entry of this track has {axis} along its curve. {WHERE.get(axis, '')}".replace("`", "")
        return f'<p class="note">{escape(text.strip())}</p>'
    about = f"{track.name}: {value} by {axis}"
    where = Axis(x=COSTS[axis], y=value, time=axis == "seconds", description=about)
    missing = f'<p class="note">Not known for {escape(", ".join(without))}.</p>' if without else ""
    return curves(lines, where, _many(results)) + missing


def _table(league: League) -> str:
    found = rows(league)
    if not found.results:
        return ""
    names = dict.fromkeys(one.track.name for one in found.results)
    options = "".join(f'<option value="{escape(name)}">{escape(name)}</option>' for name in names)
    choice = f'<select class="only" aria-label="Track" hidden><option value="">all tracks</option>{options}</select>'
    lines = []
    for one, cells in zip(found.results, found.cells, strict=True):
        marked = [Markup("<br>").join(cell) for cell in cells]
        marked = [Markup('<b class="bad">{}</b>').format(text) if text == "caught" else text for text in marked]
        lines.append((one.entry.number, one.track.name, [one.entry.title, *marked]))
    return (choice if len(names) > 1 else "") + str(ELEMENTS.sortable(lines, ["entry", *found.heads]))


def _strips(track: Track, results: Sequence[Result]) -> str:
    named: list[tuple[str, Path | None]] = [("base model", track.strip)]
    named += [(one.entry.title, one.strip) for one in results]
    lines = [
        f'<tr><th>{escape(title)}</th><td><img {picture(path, row=True)} alt="{escape(title)}"></td></tr>'
        for title, path in named
        if path is not None
    ]
    if not any(one.strip for one in results):
        return ""
    prompts = "; ".join(track.prompts)
    about = f'<p class="note">{escape(prompts)}</p>' if prompts else ""
    return (
        f'<h3>{escape(track.name)}</h3>{about}<div class="scroll"><table class="lineup">{"".join(lines)}</table></div>'
    )


def _claims(league: League) -> str:
    """A row for each claim, with all entries that have it: a method by itself, with one step an epoch, over another."""
    groups: dict[str, list[Entry]] = {}
    for entry in league.entries.values():
        if entry.claim and any(one.entry is entry for one in league.results):
            groups.setdefault(entry.claim, []).append(entry)
    lines = []
    for claim, entries in groups.items():
        tag = Markup('<br><span class="tag">{}</span>')
        pages = Markup("").join(tag.format(page) for page in {one.page: 0 for one in entries} if page)
        here = [_verdict(league, entry, one) for entry in entries for one in entry.expects]
        here += [_measured(one, len(entries) > 1) for one in league.results if one.entry in entries]
        titles = Markup("<br>").join(one.title for one in entries)
        lines.append([titles + pages, claim, Markup("<br>").join(here)])
    return table(lines, ["method", "its paper says", "here"], "claims") if lines else ""


def _measured(one: Result, named: bool) -> Markup:
    gains = [f"{name} {signed(one.gains.get(name))}" for name in one.track.judged]
    kept = [] if one.kept is None else [f"variety kept {one.kept.mean:.2f}"]
    text = "caught by a check" if one.caught else ", ".join([*gains, *kept])
    where = f"{one.entry.title}, {one.track.name}" if named else one.track.name
    return Markup('<span class="tag">{}: {}</span>').format(where, text)


def _verdict(league: League, entry: Entry, expected: Mapping[str, object]) -> Markup:
    word, figures = verdict(league, entry, expected)
    against = expected.get("against")
    other = (
        "the base" if against is None else league.entries[str(against)].title if against in league.entries else against
    )
    more = "more" if expected.get("more", True) else "less"
    what = f"{expected['track']}: {more} {expected['name']} than {other}"
    if word is None:
        return escape(f"{what}: no result")
    kind = "good" if word == HOLDS else "bad" if word == OPPOSITE else ""
    return Markup('<b class="{}">{}</b>, {}: {}').format(kind, word, what, figures)


def _listed(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _made(league: League) -> str:
    commits = sorted({commit for one in league.results for commit in one.commits})
    facts = {"file": league.path, "command": league.command, "diffrl": league.version}
    lines = [[name, Markup("<code>{}</code>").format(text)] for name, text in facts.items() if text]
    lines += [["commits", ", ".join(commits)]] if commits else []
    return table(lines)
