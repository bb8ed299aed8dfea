"""Pictures in a folder, of any tool, with their prompts and seeds; and in one line, what was read.

Where prompts come from, in this order (`--prompts-from` names one of them, or a file):

    manifest   a file of rows in the folder: manifest.jsonl, images.jsonl, metadata.jsonl, any .csv, .tsv or .parquet;
               its columns are found by their names (`diffrl.divgen.listings.COLUMNS`), others are the prompt's metadata
    metadata   what the tool wrote into the pictures (`diffrl.divgen.embedded`)
    sidecars   a .txt or .json of the same name beside each picture
    prompts    prompts.txt, one a line, and pictures numbered by line: 3.png, 00003-01.png, prompt_3_seed_7.png
    names      the pictures' names, where they name the seed or number the prompt: a cat_seed_7.png, p003_s02.png
    folders    DIMENSION/KEYWORD/..., or a folder for each prompt
    none       every picture is on its own
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diffrl.divgen.embedded import Told, flat, told_by, webui, whole
from diffrl.divgen.listings import ROWS, from_hub, is_hub, lists_below, lists_in, rows_of, several, show
from diffrl.divgen.observe import Item
from diffrl.divgen.prompts import DIMENSIONS
from diffrl.errors import UserError, nearest, read_text
from diffrl.prompts import Prompt
from diffrl.tools.pictures import SUFFIXES

OURS = ("scores.json", "job.json", "features.sqlite")
SOURCES = ("manifest", "metadata", "sidecars", "prompts", "names", "folders", "none")
HOW = (
    'write manifest.jsonl beside them, one line for each: {"file": "00001.png", "prompt": "a red circle", "seed": 1}, '
    "or name the source with --prompts-from"
)
_SEED_IN = (
    re.compile(r"(?P<prompt>.+?)[\W_]+seed[\W_]*(?P<seed>\d+)(?:[\W_].*)?$", re.IGNORECASE),
    re.compile(r"seed[\W_]*(?P<seed>\d+)[\W_]+(?P<prompt>.+)$", re.IGNORECASE),
    re.compile(
        r"(?P<prompt>p(?:rompt)?[\W_]?\d+)[\W_]+(?:s|sample|img|image|i|n)[\W_]?(?P<member>\d+)$", re.IGNORECASE
    ),
    re.compile(r"(?P<prompt>\d+)[-_](?P<member>\d+)$"),
)
_COUNTED = re.compile(r"(?P<prompt>.*?[^\W\d_].*?)[\W_]*\(?(?P<member>\d+)[\W_]*$")  # only where it is asked for


@dataclass
class Pictures:
    """Items, those of one prompt together, in an order that does not depend on the file system; what said the prompts;
    how many files of which kind were left out; what else a reader should know."""

    items: list[Item]
    source: str = ""
    left_out: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    root: Path = Path()

    def line(self) -> str:
        """What was read, in one line."""
        known = Counter(item.prompt.text for item in self.items if item.known)
        parts = [f"{len(self.items):,} images"]
        if known:
            low, high = min(known.values()), max(known.values())
            each = f"{low} each" if low == high else f"{low} to {high} each"
            parts += [f"{len(known):,} prompts by {self.source}", each]
        if alone := sum(not item.known for item in self.items):
            parts.append(f"{alone:,} of which no prompt is known: {HOW}")
        if self.left_out:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.left_out.items()))
            parts.append(f"left out: {kinds}")
        return "; ".join([", ".join(parts), *self.notes])


def read_folder(folder: Path, dimension: str = "", prompts_from: str = "") -> Pictures:
    """The pictures of a folder, or of a data set of the hub (`hub:OWNER/NAME[@REVISION][:FILES]`).

    Args:
        dimension: what pictures are that nothing gives a dimension.
        prompts_from: one of `SOURCES`, or a file of rows or of prompts; "" takes the first that knows them.

    Raises:
        UserError: there is no such folder, no picture in it, its rows cannot be read, or it holds several sets.
    """
    files = list[Path]()
    if is_hub(folder):
        folder, files = from_hub(folder)
    if not folder.is_dir():
        raise UserError(f'no folder "{show(folder)}"')
    found = _listed(folder, prompts_from, files) or _looked_at(folder, prompts_from)
    if not found.items:
        others = ", ".join(f"{count} {kind}" for kind, count in sorted(found.left_out.items()))
        raise UserError(f'no image in "{show(folder)}" ({others or "it is empty"}; read are {", ".join(SUFFIXES)})')
    found.root = folder
    if dimension:
        found.items = [item if item.dimension else _with(item, dimension) for item in found.items]
    rank = {name: i for i, name in enumerate(DIMENSIONS)}
    found.items.sort(key=lambda x: (rank.get(x.dimension, -1), x.prompt.text, x.member, show(x.path)))
    return found


def _with(item: Item, dimension: str) -> Item:
    return replace(item, prompt=Prompt(item.prompt.text, {**item.prompt.metadata, "dimension": dimension}))


# --- files of rows ---------------------------------------------------------------------------------------------------


def _listed(folder: Path, wanted: str, given: Sequence[Path] = ()) -> Pictures | None:
    if wanted in SOURCES[1:]:
        return None
    if wanted and wanted != "manifest":
        file = next((f for f in (Path(wanted), folder / wanted) if f.is_file()), None)
        if file is None:
            raise UserError(f'--prompts-from: no "{wanted}"{nearest(wanted, SOURCES)}, nor a file of this name')
        if file.suffix not in ROWS:
            return None
        files = [file]
    else:
        files = [f for f in given if f.suffix in ROWS] or lists_in(folder) or lists_below(folder, wanted)
        if not files and wanted:
            raise UserError(f"--prompts-from: {folder} has no manifest.jsonl, metadata.jsonl, .csv or .parquet")
    items = [item for file in files for item in rows_of(file, folder if wanted else file.parent)]
    names = dict.fromkeys(file.name for file in files)
    return Pictures(_numbered(items), ", ".join(names)) if items else None


# --- pictures without rows -------------------------------------------------------------------------------------------


def _looked_at(folder: Path, wanted: str) -> Pictures:
    files = [file for file in folder.rglob("*") if file.is_file() and not file.name.startswith(".")]
    paths = sorted((file for file in files if file.suffix.lower() in SUFFIXES), key=natural)
    companions = {path.with_suffix(suffix) for path in paths for suffix in (".txt", ".json")}
    left = Counter(
        file.suffix.lower() or "without an ending"
        for file in files
        if file not in companions and file.suffix.lower() not in (*SUFFIXES, *ROWS) and file.name not in OURS
    )
    lines = _prompt_lines(folder, wanted)
    left[".txt"] -= bool(lines)
    ways: dict[str, tuple[str, Callable[[], Mapping[Path, Told]]]] = {
        "metadata": ("the files' metadata", lambda: _by(told_by, paths)),
        "sidecars": ("the texts beside them", lambda: _by(_beside, paths)),
        "prompts": (lines[0], lambda: _by_line(paths, lines[1])),
        "names": ("the files' names", lambda: _by_name(paths, wanted == "names")),
        "folders": ("the folders' names", lambda: _by_folder(paths, folder)),
    }
    chosen = [wanted] if wanted in ways else ["prompts"] if wanted and wanted != "none" else [*ways]
    best: tuple[str, Mapping[Path, Told]] = ("", {})
    for name in chosen if wanted != "none" else ():
        told = ways[name][1]()
        if len(told) > len(best[1]):
            best = (name, told)
        if 2 * len(told) >= len(paths):
            break
    name, told = best
    tools = Counter(one.tool for one in told.values() if one.tool)
    source = " and ".join(tool for tool, _ in tools.most_common()) or (ways[name][0] if name else "")
    if name != "folders" and not wanted:
        _one_set(folder, told)
    found = Pictures(_numbered([_item(path, folder, told.get(path)) for path in paths]), source, +left)
    if lines[1] and not told and wanted in ("", "prompts"):
        found.notes.append(f"{lines[0]} has {len(lines[1])} lines, and the files' numbers do not say which is whose")
    if name == "folders" and not any(path.relative_to(folder).parts[0].lower() in DIMENSIONS for path in paths):
        found.notes.append(f"if the folders are models, use `diffrl divgen report {show(folder)} --out report.html`")
    return found


def natural(path: Path) -> list[Any]:
    """Names in the order of their numbers."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", show(path))]


def _item(path: Path, folder: Path, told: Told | None) -> Item:
    parts = [show(Path(part)) for part in path.relative_to(folder).parts[:-1]]
    known = bool(parts) and parts[0].lower() in DIMENSIONS
    metadata = {"dimension": parts[0].lower()} if known else {}
    if words := parts[1:] if known else parts:
        metadata["keyword"] = "/".join(words)
    if told is None:
        return Item(Prompt(show(path.relative_to(folder)), metadata), -1, path, known=False)
    settings = dict(told.settings)
    return Item(Prompt(told.prompt, metadata), settings.pop("member", -1), path, seed=told.seed, settings=settings)


def _numbered(items: Sequence[Item]) -> list[Item]:
    """Members where nothing states them: the prompt's pictures in their order. Stated ones stay."""
    counts: Counter[str] = Counter()
    result = []
    for item in items:
        stated = item.member >= 0
        number = item.member if stated else counts[item.prompt.text]
        counts[item.prompt.text] += 1
        result.append(replace(item, member=number, stated=stated or item.seed is not None))
    return result


def _by(reader: Callable[[Path], Told | None], paths: Sequence[Path]) -> dict[Path, Told]:
    return {path: told for path in paths if (told := reader(path)) is not None}


def _beside(path: Path) -> Told | None:
    if (table := path.with_suffix(".json")).is_file():
        content = read_text(table)
        with suppress(ValueError, AttributeError, RecursionError):
            return flat(json.loads(content), "")
        return None
    text = path.with_suffix(".txt")
    words = read_text(text).strip() if text.is_file() else ""
    if re.search(r"^Steps: \d+", words, re.MULTILINE):
        return webui(words)
    return Told("", " ".join(words.split())) if words else None


def _prompt_lines(folder: Path, wanted: str) -> tuple[str, list[str]]:
    """The name and the lines of prompts.txt, or of the file that was named."""
    names = [Path(wanted), folder / wanted] if wanted and wanted not in SOURCES else [folder / "prompts.txt"]
    file = next((name for name in names if name.is_file()), None)
    if file is None:
        return "", []
    return file.name, [
        line.strip() for line in read_text(file).split("\n") if line.strip() and not line.startswith("#")
    ]


def _by_line(paths: Sequence[Path], lines: Sequence[str]) -> dict[Path, Told]:
    """Pictures numbered by the line of their prompt, from 0 or from 1, perhaps with a second number; else none."""
    numbers = {path: [int(n) for n in re.findall(r"\d+", path.stem)] for path in paths}
    numbers = {path: found for path, found in numbers.items() if found}
    if len({re.sub(r"\d+", "#", path.stem) for path in numbers}) > 1:  # words that differ: the numbers may be theirs
        return {}
    firsts = {found[0] for found in numbers.values()}
    once = len(firsts) == len(numbers)
    if not lines or not firsts or len(firsts) > len(lines) or (once and len(firsts) != len(lines)):
        return {}
    start = 1 if 0 not in firsts and max(firsts) == len(lines) else 0
    if max(firsts) - start >= len(lines):
        return {}
    seeded = {path: "seed" in path.stem.lower() for path in numbers}
    return {
        path: Told(
            "",
            lines[found[0] - start],
            found[1] if len(found) > 1 and seeded[path] else None,
            {"member": found[1]} if len(found) > 1 and not seeded[path] else {},
        )
        for path, found in numbers.items()
    }


def _by_name(paths: Sequence[Path], asked: bool) -> dict[Path, Told]:
    """Only where a prompt has two pictures: numbers that all differ name no prompt."""
    patterns = (*_SEED_IN, _COUNTED) if asked else _SEED_IN
    told = {}
    for path in paths:
        found = next((match for pattern in patterns if (match := pattern.match(path.stem))), None)
        if found is None:
            continue
        parts = found.groupdict()
        member = {"member": int(parts["member"])} if parts.get("member") else {}
        told[path] = Told("", show(Path(parts["prompt"])), whole(parts.get("seed")), member)
    counts = Counter((path.parent, one.prompt) for path, one in told.items())
    return told if asked or any(count > 1 for count in counts.values()) else {}


def _by_folder(paths: Sequence[Path], folder: Path) -> dict[Path, Told]:
    """A folder's own prompt (GenEval's metadata.jsonl, prompt.txt), or its name."""
    told, own = {}, {}
    for path in paths:
        home = path.parent.parent if path.parent.name.lower() in ("samples", "images") else path.parent
        parts = [show(Path(part)) for part in home.relative_to(folder).parts] if home != folder.parent else []
        words = parts[1:] if parts and parts[0].lower() in DIMENSIONS else parts
        if not words:
            continue
        if home not in own:
            own[home] = _own_prompt(home)
        told[path] = Told("", own[home] or "/".join(parts))
    return told


def _own_prompt(home: Path) -> str:
    if (home / "prompt.txt").is_file():
        return read_text(home / "prompt.txt").strip()
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(read_text(home / "metadata.jsonl"))["prompt"])
    return ""


def _one_set(folder: Path, told: Mapping[Path, Told]) -> None:
    """UserError where sub-folders hold the same prompts with the same seeds: these are several models' pictures."""
    sets: dict[str, set[tuple[str, Any]]] = {}
    for path, one in told.items():
        parts = path.relative_to(folder).parts
        if len(parts) > 1 and parts[0].lower() not in DIMENSIONS:
            sets.setdefault(show(Path(parts[0])), set()).add(
                (one.prompt, one.seed if one.seed is not None else path.name)
            )
    names = list(sets)
    if len(names) > 1 and all(2 * len(sets[name] & sets[names[0]]) >= len(sets[name]) for name in names[1:]):
        raise UserError(several(folder, names))
