"""The league in words: its table over all entries, its headlines, and what it cannot tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from diffrl.records.progress import count, number
from diffrl.report.groups import Value
from diffrl.report.tables import pipes, tabular, tex
from experiments.league.data import League, Result, Track, front, ranks, signed

MOST = 4  # names in a headline
LIMITS = (
    "How far and how fast: the playground's generator is 1,000 times smaller than SD3.5, draws 64 x 64 pixels, and was "
    "given wrong captions on purpose, so that there is something to learn. Gains, learning rates and seconds do not "
    "carry over.",
    "Which reward is hacked, and how: the proxies here are small, and one has a planted bias. The biases of PickScore "
    "or HPS are others, and nobody knows them all; the order of the methods by hacking gap may be another there.",
    "What gold would say: here the truth is read from the pixels. No photograph has such a judge, so at scale hacking "
    "is seen only by held-out rewards and by people.",
    "Guidance and many steps: most entries train without guidance at 6 to 10 steps. With 28 to 40 guided steps a "
    "method that trains on a sampler's steps has more of them, and other variances.",
    "Another solver: all is drawn as in the training, mostly by six steps of dpm2. Other solvers, or more steps, can "
    "show more of what a method learned, and change the order.",
    "Half precision, many GPUs and long runs: everything is float32 on one core, for some thousand images. What "
    "collapses after a hundred times as many is not seen.",
    "What may carry over is what follows from the equations: which methods take the same step, what a brake stops, "
    "what a penalty holds. Confirm the rest with three seeds on your own model.",
)


@dataclass(frozen=True)
class Column:
    """A column of the table: what a track's results have in it, a list of lines each."""

    head: str
    cells: Callable[[Track, Sequence[Result]], list[list[str]]]


@dataclass(frozen=True)
class Rows:
    """The table. `cells[i]` is about `results[i]`, a tuple of lines for each of `heads`."""

    heads: list[str]
    results: list[Result] = field(default_factory=list)
    cells: list[list[list[str]]] = field(default_factory=list)


def _each(head: str, cell: Callable[[Result], str]) -> Column:
    return Column(head, lambda _, results: [[cell(one)] for one in results])


def _gains(which: Callable[[Track], tuple[str, ...]]) -> Callable[[Track, Sequence[Result]], list[list[str]]]:
    def cells(track: Track, results: Sequence[Result]) -> list[list[str]]:
        names = which(track)
        named = {name: f" {name}" if len(names) > 1 else "" for name in names}
        return [[signed(one.gains.get(name)) + named[name] for name in names] for one in results]

    return cells


def _over_prompts(track: Track, results: Sequence[Result]) -> list[list[str]]:
    return [[_small(one.over_prompts.get(name)) for name in track.gold] for one in results]


def _ranked(which: Callable[[Track], tuple[str, ...]]) -> Callable[[Track, Sequence[Result]], list[list[str]]]:
    def cells(track: Track, results: Sequence[Result]) -> list[list[str]]:
        columns = [ranked(results, name) for name in which(track)]
        return [[_range(column[i]) for column in columns] for i in range(len(results))]

    return cells


def value_of(result: Result, name: str | None) -> Value | None:
    return result.kept if name is None else result.gains.get(name)


def ranked(results: Sequence[Result], name: str | None = None) -> list[tuple[int, int] | None]:
    """`ranks` of a track's results by the gain of a value, or by the variety kept; none for one that a check caught."""
    values = [None if one.caught else value_of(one, name) for one in results]
    return ranks(values, lower=bool(results) and name in results[0].track.lower)


def _or_dash(value: int | None) -> str:
    return "–" if value is None else str(value)


def _range(rank: tuple[int, int] | None) -> str:
    return "–" if rank is None else str(rank[0]) if rank[0] == rank[1] else f"{rank[0]}–{rank[1]}"


def _plain(value: Value | None) -> str:
    return "–" if value is None else number(value.mean) + ("" if value.half is None else f" ± {value.half:.3f}")


def _small(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _checked(one: Result) -> str:
    return "caught" if one.caught else "passed" if one.checked else "–"


COLUMNS = (
    _each("track", lambda one: one.track.name),
    Column("proxy gain", _gains(lambda track: track.proxy)),
    Column("rank by proxy", _ranked(lambda track: track.proxy)),
    Column("gold gain", _gains(lambda track: track.gold)),
    Column("gold, ± over prompts", _over_prompts),
    Column("rank by gold", _ranked(lambda track: track.gold)),
    _each("hacking gap", lambda one: signed(one.gap)),
    _each("variety kept", lambda one: _plain(one.kept)),
    Column("rank by variety", lambda _, results: [[_range(r)] for r in ranked(results)]),
    _each("artefact", lambda one: signed(one.gains.get(one.track.named("artefact")))),
    _each("drift", lambda one: _small(one.drift)),
    _each("spread over seeds", lambda one: _small(one.spread)),
    _each("collapsed seeds", lambda one: _or_dash(one.collapsed)),
    _each("images", lambda one: "–" if one.cost["images"] is None else f"{one.cost['images']:,.0f}"),
    _each("forwards", lambda one: "–" if one.cost["forwards"] is None else f"{one.cost['forwards']:,.0f}"),
    _each("seconds", lambda one: "–" if one.cost["seconds"] is None else f"{one.cost['seconds']:.0f}"),
    _each("memory (MiB)", lambda one: "–" if one.cost["mib"] is None else f"{one.cost['mib']:.0f}"),
    _each("kind", lambda one: (one.entry.kind or "–") + (", contributed" if one.entry.contributed else "")),
    _each("trials", lambda one: _or_dash(one.entry.trials)),
    _each("seeds", lambda one: str(one.seeds)),
    _each("check", _checked),
)


def rows(league: League, only: str | None = None) -> Rows:
    """A row for each result (of one track: `only`), without the columns that are empty in all of them."""
    tracks = [track for track in league.tracks.values() if only in (None, track.name)]
    groups = [(track, league.of(track, caught=True)) for track in tracks]
    results = [one for _, each in groups for one in each]
    columns = {column.head: [cell for group in groups for cell in column.cells(*group)] for column in COLUMNS}
    heads = [head for head, cells in columns.items() if any(line not in ("–", "") for cell in cells for line in cell)]
    heads = [head for head in heads if only is None or head != "track"]
    return Rows(heads, results, [[columns[head][i] for head in heads] for i in range(len(results))])


def notes() -> list[str]:
    """What the numbers of the table are, a sentence each."""
    return [
        "Gains since before training on held-out prompts: means over seeds ± half the 95 % interval (Student's t).",
        "Ranks are within a track and differ only where intervals part: from 1 + the number of entries that are better "
        "to the number of all less those that are worse.",
        "Hacking gap: the proxies' mean gain less the golds', each in standard deviations of the base over prompts. "
        "Variety kept: after over before. Spread: the proxies' gain's standard deviation over seeds, in those units.",
        "Lower is better: artefact, drift, gap, costs.",
    ]


def as_file(league: League, suffix: str, only: str | None = None) -> str:
    """The table as LaTeX (".tex") or Markdown, its notes with it."""
    table = rows(league, only)
    heads = ["entry", *table.heads]
    if suffix == ".tex":
        lines = [[one.entry.title, *(", ".join(cell) for cell in cells)] for one, cells in _zipped(table)]
        marked = [[tex(cell.replace("–", "-").replace("−", "-")) for cell in line] for line in lines]
        parts = [f"% {note}" for note in notes()] + [r"% \usepackage{booktabs}", tabular(heads, marked)]
        return "\n".join(parts) + "\n"
    lines = [[one.entry.title, *("<br>".join(cell) for cell in cells)] for one, cells in _zipped(table)]
    return f"{pipes(heads, lines)}\n\n{' '.join(notes())}\n"


def _zipped(table: Rows) -> list[tuple[Result, list[list[str]]]]:
    return list(zip(table.results, table.cells, strict=True))


def headlines(league: League) -> list[tuple[Track, str]]:
    """What each track's results say in two or three sentences, as far as intervals part."""
    return [(track, _headline(track, results)) for track in league.tracks.values() if (results := league.of(track))]


def _headline(track: Track, results: Sequence[Result]) -> str:
    raised = {name: _surely(track, results, name) for name in track.judged}
    clauses = [f"{many} {'raises' if many == 1 else 'raise'} {name}" for name, many in raised.items()]
    known = [one.kept for one in results if one.kept is not None and one.kept.half is not None]
    if known:
        lost = sum(one.mean + (one.half or 0.0) < 1 for one in known)
        clauses.append(f"{lost} {'loses' if lost == 1 else 'lose'} variety")
    budget = "" if track.images is None else f" ({count(track.images)} images each)"
    text = f"Of {len(results)} {'entry' if len(results) == 1 else 'entries'}{budget} {', '.join(clauses)}."
    proxies = track.proxy if len(track.proxy) == 1 else ()  # of many at once none is the one to be ranked by
    for name in dict.fromkeys((*proxies, *track.gold[:1])):
        text += _first(f"Furthest on {name}", results, name) if raised[name] else ""
    text += _first("Most variety kept", results)
    return text + _in_front(track, results)


def _surely(track: Track, results: Sequence[Result], name: str) -> int:
    """How many gained by more than half their interval."""
    gains = [one.gains[name] for one in results if name in one.gains]
    return sum(track.sign(name) * one.mean > one.half for one in gains if one.half is not None)


def _first(what: str, results: Sequence[Result], name: str | None = None) -> str:
    """Who may be first, the largest means before the others."""
    known = [(one, rank, value_of(one, name)) for one, rank in zip(results, ranked(results, name), strict=True) if rank]
    turn = -1 if name in results[0].track.lower else 1
    first = sorted((-turn * value.mean, one.entry.title) for one, (best, _), value in known if value and best == 1)
    if len(known) < 2:
        return ""
    if len(first) == len(known):
        return f" {what}: no intervals part."
    more = f" and {len(first) - MOST} more" if len(first) > MOST else ""
    tied = " (their intervals meet)" if len(first) > 1 else ""
    return f" {what}: {'; '.join(title for _, title in first[:MOST])}{more}{tied}."


def _in_front(track: Track, results: Sequence[Result]) -> str:
    gold = (track.gold or track.proxy)[0]
    places, base = pareto(track, results, gold)
    names = ["the base model" if one is None else one.entry.title for one in places]
    if not base or len(names) < 2:
        return ""
    return f" On the Pareto front of {gold} and variety: {'; '.join(names)}."


def pareto(track: Track, results: Sequence[Result], name: str) -> tuple[list[Result | None], list[tuple[float, float]]]:
    """(who, where) on the front of (variety kept, gain) with the base model, None at (1, 0), by variety."""
    known: list[Result | None] = [one for one in results if one.kept is not None and name in one.gains]
    where = [(one.kept.mean, one.gains[name].mean) for one in known if one is not None and one.kept is not None]
    signs = [(x, track.sign(name) * y) for x, y in (*where, (1.0, 0.0))]
    chosen = front(signs)
    everyone, everywhere = [*known, None], [*where, (1.0, 0.0)]
    return [everyone[i] for i in chosen], [everywhere[i] for i in chosen]
