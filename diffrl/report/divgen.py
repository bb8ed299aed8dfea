"""DivGenBench's report: several scored folders on one page, against the first of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from diffrl.divgen.fair import make_fair
from diffrl.divgen.listings import home
from diffrl.divgen.metrics import Difference, difference
from diffrl.divgen.observe import Item
from diffrl.divgen.prompts import DIMENSIONS
from diffrl.divgen.score import FILE, METRICS, Score, Scores, load_scores
from diffrl.errors import UserError, listed
from diffrl.records.disk import write_text
from diffrl.records.progress import number
from diffrl.report.built_page import Page
from diffrl.report.data import PALETTE
from diffrl.report.dot_plots import Dots, dots, radar
from diffrl.report.models import PIECES, as_csv, as_json, ordered, span, table, told
from diffrl.report.page import TEMPLATES, Markup, figure
from diffrl.report.walls import FEW, TITLES, apart, lost, walls
from diffrl.resources import file_of_run
from diffrl.stats import LEVEL, holm

SURE = 1 - LEVEL  # p-value below which a difference is called one
LOST_SIGHT = 0.1  # a share of images without a find that is so much above the first set's makes a metric doubtful
ROWS = 24  # keywords of one chart
EMPTY = {"ids": "face", "sdi": "object"}
SPREAD = {
    "id": ("mean cosine of faces", "within one keyword; lower is more diverse"),
    "style": ("spread of style", "1 - mean cosine within one keyword; higher is more diverse"),
    "layout": ("SDI", "mean over the keyword's prompts; higher is more diverse"),
    "tonal": ("PVS", "within one keyword; higher is more diverse"),
}


@dataclass
class Entry:
    """One scored folder: its name, colour, scores, and images by (dimension, keyword, prompt) and member.

    tests: of every score the difference from the first set, and its p-value, corrected for all tests of the page.
    """

    name: str
    color: str
    scores: Scores
    images: dict[tuple[str, str, str], dict[int, Path]]
    tests: dict[str, tuple[Difference, float]] = field(default_factory=dict)
    doubtful: set[str] = field(default_factory=set)

    def verdict(self, name: str) -> str:
        """Surely "less" or "more" diverse than the first set; "" else."""
        change, p = self.tests.get(name, (None, 1.0))
        if change is None or p >= SURE or name in self.doubtful:
            return ""
        return "less" if (change.change > 0) == METRICS[name].lower else "more"


def write_divgen_report(
    folders: Mapping[str, Path],
    out: Path,
    names: Mapping[str, str] | None = None,
    *,
    by: str = "",
    json_file: Path | None = None,
    csv_file: Path | None = None,
    **options: Any,
) -> Path:
    """Write one self-contained page that compares folders (name -> folder) with the first, and return its path.

    Args:
        names: extractors by kind; else those with which a folder was scored, else the first one's, else the default.
        by: the score by which the sets stand below the first, the most diverse at the top; "" as they are given.
        json_file, csv_file: the same as data.
        options: as `diffrl.divgen.scoring.seen_folder` takes them.

    Raises:
        UserError: a folder's images cannot be listed, or none can be read.
    """
    from diffrl.divgen.scoring import seen_folder

    sets, images = [], []
    first: dict[str, str] = {}
    for name, folder in folders.items():
        path, chosen = home(folder) / FILE, names or first
        if names is None and path.is_file():
            with suppress(UserError):  # another version's
                chosen = load_scores(path).about["asked"]
        sets.append(found := seen_folder(folder, chosen, **options))
        found.name = name
        found.scores.save(path)
        first = first or found.scores.about["asked"]
        images.append(_images([s.item for s in found.sight.seen]))
    differences = make_fair(sets)
    entries = []
    for i, (one, shown) in enumerate(zip(sets, images, strict=True)):
        entries.append(Entry(one.name, f"c{i}", replace(one.scores, metrics=one.fair), shown))
    _test(entries)
    base, *others = entries
    entries = [base, *ordered(others, by)]
    page = Page(f"DivGenBench: {', '.join(folders)}" if len(folders) < FEW else "DivGenBench", "DivGenBench")
    _head(page, entries, differences)
    for part in (_charts, _keywords, lost, walls, _facts):
        part(page, entries)
    for file, text in ((json_file, as_json(entries, differences)), (csv_file, as_csv(entries))):
        if file is not None:
            write_text(file, text)
    return page.write(out, TEMPLATES.get_template("models.js").render() if len(entries) >= FEW else "")


def report_of_run(run: Path, each: int, per_prompt: int) -> Path | None:
    """Draw `each` prompts of every dimension with a run's model and with its LoRA, as the run evaluates, into
    `RUN/divgen/base` and `RUN/divgen/epoch-N`, and compare all epochs that were measured with the base model.

    Returns the page, `RUN/divgen/report.html`, on the main process; `report.json` beside it has the same numbers.
    """
    from diffrl.divgen.prompts import benchmark, small, world_of
    from diffrl.divgen.run import Job, generate_images
    from diffrl.drawing import Drawing
    from diffrl.launched import join_processes
    from diffrl.report.data import read_run

    found, out = read_run(run), run / "divgen"
    model, world = str(found.config["model"]), world_of(str(found.config["model"]))
    kind: dict[str, Any] = {"like": str(run), "seed": int(found.config["seed"]), "family": found.config.get("family")}
    lora = str(file_of_run(run / "lora", "pytorch_lora_weights.safetensors", "report").parent)
    prompts = small(benchmark(world), each)
    for name, trained in (("base", None), (f"epoch-{found.last['epoch']:05d}", lora)):
        job = Job(Drawing(model, lora=trained, per_prompt=per_prompt, **kind), world)
        generate_images(job, prompts, out / name)
    process = join_processes()
    if not process.is_main_process:
        return None
    folders = {folder.name: folder for folder in [out / "base", *sorted(out.glob("epoch-*"))]}
    json_file = out / "report.json"
    return write_divgen_report(folders, out / "report.html", json_file=json_file, device=str(process.device))


def _test(entries: Sequence[Entry]) -> None:
    """Every score of every set against the first set's, p-values corrected for their number (Holm)."""
    first = entries[0]
    found = [(e, name, change) for e in entries[1:] for name in METRICS if (change := _against(e, first, name))]
    for (entry, name, change), p in zip(found, holm([change.p for *_, change in found]), strict=True):
        entry.tests[name] = (change, float(p if p is not None else 1.0))
        if _doubtful(entry, first, name):
            entry.doubtful.add(name)


def _images(items: Sequence[Item]) -> dict[tuple[str, str, str], dict[int, Path]]:
    images: dict[tuple[str, str, str], dict[int, Path]] = {}
    for item in items:
        if item.path is not None and item.path.is_file():
            images.setdefault((item.dimension, item.keyword, item.prompt.text), {})[item.member] = item.path
    return images


def _against(entry: Entry, first: Entry, name: str) -> Difference | None:
    a, b = first.scores.metrics[name], entry.scores.metrics[name]
    if a.value is None or b.value is None:
        return None
    paired = bool(a.units) and a.units == b.units
    return difference(a.value, b.value, np.array(a.deviations), np.array(b.deviations), paired)


def _measured(entries: Sequence[Entry]) -> list[str]:
    return [name for name in METRICS if any(entry.scores.metrics[name].value is not None for entry in entries)]


# --- the head: verdict and table -------------------------------------------------------------------------------------


def _head(page: Page, entries: Sequence[Entry], differences: Sequence[str]) -> None:
    first, names, many = entries[0], _measured(entries), len(entries) >= FEW
    key = Markup('<span><i class="block" style="background-color: var(--{})"></i>{}</span>')
    page.add(str(PIECES.style(_colors(len(entries))))).lead(f"{len(entries)} sets of images", "sub")
    if many:
        for text in _verdicts(entries, names):
            page.lead(text, "lead")
    else:
        page.lead(Markup("").join(key.format(entry.color, entry.name) for entry in entries), "legend")
        for entry in entries[1:]:
            page.lead(_verdict(entry, first, names), "lead")
    for entry in entries[1:]:
        for text in _doubts(entry, first, names):
            page.lead(text, "warning")
    for line in differences:
        page.lead(line, "note")
    tests = sum(len(entry.tests) for entry in entries)
    page.section(
        "Scores",
        f"In brackets: 95 % intervals over prompts. Below: the change against {first.name}; marked where it is sure "
        f"(p < {SURE:g}, corrected for {tests} tests by Holm), green for more diversity, red for less. The same "
        "prompts are compared pairwise. ↑: higher is more diverse, ↓: lower is." + " A click on a head sorts." * many,
    )
    if many:
        page.add(table(entries, names))
    else:
        page.table([_row(name, entries) for name in names], ["", *(entry.name for entry in entries)])
    if lines := _absent(entries):
        page.insert(str(PIECES.absent(lines)))


def _colors(count: int) -> str:
    """Colours of the sets beyond the page's own: hues far from one another."""
    hues = ((i, i * 137.5 % 360, 55 + i % 3 * 15, 42 + i % 4 * 6) for i in range(PALETTE, count))
    return "; ".join(f"--c{i}: hsl({hue:.0f} {much}% {bright}%)" for i, hue, much, bright in hues)


def _verdicts(entries: Sequence[Entry], names: Sequence[str]) -> Iterable[Markup]:
    """Of many sets: who is less diverse than the first, who more, and how many are neither."""
    first, neither = entries[0], 0
    for entry in entries[1:]:
        sure = [name for name in names if entry.verdict(name)]
        neither += not sure
        if sure:
            yield _verdict(entry, first, sure)
    if neither:
        text = "The others" if neither < len(entries) - 1 else "All"
        yield Markup("{} ({}): no sure difference from {}.").format(text, neither, first.name)


def _verdict(entry: Entry, first: Entry, names: Sequence[str]) -> Markup:
    said = {
        "less": '<b class="bad">less diverse</b> in {}',
        "more": '<b class="good">more diverse</b> in {}',
        "": "no sure difference in {}",
    }
    judged = [name for name in names if name in entry.tests and name not in entry.doubtful]
    titles = {kind: [METRICS[name].title for name in judged if entry.verdict(name) == kind] for kind in said}
    parts = [Markup(said[kind]).format(listed(titles[kind])) for kind in said if titles[kind]]
    if not parts:
        return Markup("<b>{}</b> cannot be compared with {}.").format(entry.name, first.name)
    return Markup("<b>{}</b> against {}: {}.").format(entry.name, first.name, Markup("; ").join(parts))


def _empty_share(score: Score) -> float:
    return score.empty / max(score.empty + score.images, 1)


def _doubtful(entry: Entry, first: Entry, name: str) -> bool:
    ours, base = entry.scores.metrics[name], first.scores.metrics[name]
    return ours.value is not None and _empty_share(ours) > _empty_share(base) + LOST_SIGHT


def _doubts(entry: Entry, first: Entry, names: Sequence[str]) -> Iterable[Markup]:
    """A metric that is computed on what is left of the images says nothing on those that show nothing any more."""
    for name in names:
        if _doubtful(entry, first, name):
            what = EMPTY.get(name, "thing to look at")
            shares = [_empty_share(one.scores.metrics[name]) for one in (entry, first)]
            text = f"no {what} was found in {shares[0]:.0%} of the images ({first.name}: {shares[1]:.0%}). "
            text += f"{METRICS[name].title} compares the others only, so it is not judged."
            yield Markup("<b>{}</b>: {}").format(entry.name, text)


def _row(name: str, entries: Sequence[Entry]) -> list[str]:
    metric = METRICS[name]
    where = f"{TITLES[metric.dimension]}: " if metric.dimension else ""
    cells: list[str] = [PIECES.measure(metric, where + metric.meaning)]
    for entry in entries:
        score = entry.scores.metrics[name]
        if score.value is None:
            cells.append("–")
            continue
        empty = f"no {EMPTY.get(name, 'find')} in {_empty_share(score):.0%}" if score.empty else ""
        kind = {"more": "good", "less": "bad", "": "tag"}[entry.verdict(name)]
        change = "" if entry is entries[0] else told(entry, name) or "not comparable"
        cells.append(PIECES.value(number(score.value), span(score), empty, kind, change))
    return cells


def _absent(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """(set, what has no value, and why; what was counted out)."""
    lines = []
    for entry in entries:
        for name, score in entry.scores.metrics.items():
            if score.value is None and score.why != "left out":
                lines.append((entry.name, f"no {METRICS[name].title}: {score.why}"))
            elif score.value is not None and score.empty:
                text = f"no {EMPTY.get(name, 'thing to look at')} was found in {score.empty}"
                lines.append((entry.name, f"{METRICS[name].title}: {text} of {score.empty + score.images} images"))
        if entry.scores.unreadable:
            lines.append((entry.name, f"{len(entry.scores.unreadable)} images cannot be read"))
    return lines


# --- charts ----------------------------------------------------------------------------------------------------------


def _legend(entries: Sequence[Entry]) -> list[tuple[str, str, str]]:
    return [(entry.color, "block", entry.name) for entry in entries]


def _relative(name: str, score: Score, first: Score) -> float | None:
    """A score as a share of the first's, more being more diverse: of 1 - IDS for IDS."""
    if score.value is None or first.value is None:
        return None
    ours, base = (1 - score.value, 1 - first.value) if METRICS[name].lower else (score.value, first.value)
    return max(ours / base, 0.0) if base > 0 else None


def _charts(page: Page, entries: Sequence[Entry]) -> None:
    names, first = _measured(entries), entries[0].scores.metrics
    page.section("Charts", "Bars: 95 % intervals over prompts.")
    if len(names) > 2 and len(entries) <= PALETTE:
        series = [
            Dots([_relative(name, entry.scores.metrics[name], first[name]) for name in names], entry.color)
            for entry in entries
        ]
        titles = [METRICS[name].title.replace(" diversity", "").replace(" score", "") for name in names]
        svg = radar(titles, series, f"Every score as a share of {entries[0].name}'s; of 1 - IDS for IDS")
        card = figure("all scores", svg, f"shares of {entries[0].name}'s; IDS as 1 - IDS", _legend(entries))
        page.add(_tall(card), "loose")
    for name in names:
        series = []
        for i, entry in enumerate(entries):
            score = entry.scores.metrics[name]
            ends = (score.low, score.high) if score.low is not None and score.high is not None else None
            series.append(Dots(_only(i, score.value, len(entries)), entry.color, _only(i, ends, len(entries))))
        text = f"{METRICS[name].title} of every set"
        svg = dots([entry.name for entry in entries], series, "", text)
        page.add(figure(METRICS[name].title, svg, f"{METRICS[name].meaning}; {METRICS[name].direction}"), "loose")


def _only(place: int, value: Any, length: int) -> list[Any]:
    return [value if i == place else None for i in range(length)]


def _keywords(page: Page, entries: Sequence[Entry]) -> None:
    """One chart for each dimension; with many keywords those whose values differ most between the sets."""
    page.section("By keyword")
    entries = apart(entries, PALETTE)
    for dimension in DIMENSIONS:
        tables = [entry.scores.keywords.get(dimension, {}) for entry in entries]
        words = list(dict.fromkeys(word for one in tables for word in one))
        if not words:
            continue
        label, tag = SPREAD[dimension]
        if len(words) > ROWS:
            tag += f"; {ROWS} of {len(words)} keywords, those that differ most"
            words = sorted(words, key=lambda word: -np.ptp([one[word] for one in tables if word in one]))[:ROWS]
        series = [Dots([one.get(word) for word in words], e.color) for one, e in zip(tables, entries, strict=True)]
        svg = dots(words, series, label, f"{label} of every keyword of the dimension {TITLES[dimension]}")
        card = figure(TITLES[dimension], svg, tag, _legend(entries))
        page.add(_tall(card) if len(words) > 8 else card, "loose")


def _tall(card: str) -> str:
    """A card as tall as two others."""
    return f'<div style="grid-row: span 2">{card}</div>'


def _facts(page: Page, entries: Sequence[Entry]) -> None:
    """How each set was drawn and looked at."""
    heads = ("model", "lora", "checkpoint", "seed", "per_prompt", "steps", "sampler", "guidance_scale")
    rows = []
    for entry in entries:
        about, job = entry.scores.about, entry.scores.about.get("job", {})
        images = sum(counts["images"] for counts in entry.scores.dimensions.values())
        drawn = ", ".join(f"{key} {job[key]}" for key in heads if job.get(key) is not None)
        used = ", ".join(f"{kind} {name}" for kind, name in about.get("extractors", {}).items())
        cells = [f"{images:,}", drawn or "not drawn by diffrl", used]
        rows.append([entry.name, *cells, Markup("<code>{}</code>").format(about.get("folder", ""))])
    page.section("Sets of images").table(rows, ["", "images", "drawn with", "extractors", "folder"], "facts")
