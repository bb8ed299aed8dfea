"""Tracks and entries of the league, from YAML, and the experiments that they make.

LEAGUE/tracks.yaml, LEAGUE/entries.yaml: beside this file, or in a folder of one's own. Other people's entries are
folders NAME of one folder, each with `entry.yaml` (an entry's keys; `config` is a file beside it) and its plugins,
which overrides call `HERE/file.py:Class`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from diffrl.config import Config
from diffrl.config.source import Source, read
from diffrl.errors import UserError, nearest
from experiments.league.experiments import Experiment, linked

LEAGUE = Path(__file__).parent
OTHERS = LEAGUE / "others"
FOLDER, ON_POLICY = "league", "_on_policy"
PART, SEARCH = "part", "search"  # kinds: what others build on; the best of several images, without training


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("overrides", "tracks", mode="before", check_fields=False)
    @classmethod
    def _joined(cls, value: Any) -> Any:
        """Overrides may be lists of lists, since YAML can refer to a list and not join two; tracks may be names."""
        if isinstance(value, list) and all(isinstance(one, list | str) for one in value):
            return list(itertools.chain.from_iterable([one] if isinstance(one, str) else one for one in value))
        return value


class Track(_Row):
    """What is trained on (`proxy`) and what is meant (`gold`), as values of the judgement; one budget of `images`.

    rewards, watch: of every entry's config. evaluations: while training. minutes: of a core and a seed. shared: proxies
    that the gold contains by declaration. prompts, per_prompt: of the judgement.
    """

    shows: str
    images: int = Field(ge=1)
    minutes: float = Field(gt=0)
    proxy: list[str] = Field(min_length=1)
    gold: list[str] = Field(min_length=1)
    rewards: dict[str, dict[str, Any]]
    watch: dict[str, dict[str, Any]]
    overrides: list[str] = []
    shared: list[str] = []
    evaluations: int = Field(ge=1)
    prompts: int = Field(ge=2)
    per_prompt: int = Field(ge=1)

    def texts(self) -> list[str]:
        """The overrides of every entry."""
        tables = {"rewards": self.rewards, "watch": self.watch}
        return [*(f"{name}={_flow(table)}" for name, table in tables.items()), *self.overrides]


class Expected(_Row):
    """A claim that can be tested: on `track`, more (or less) of `name` than the entry `against`, or than the base."""

    track: str
    name: str
    against: str | None
    more: bool = True


class Entry(_Row):
    """A method with its settings. See `entries.yaml` for the keys."""

    config: str
    kind: Literal["base", "wrapper", "stack", "teacher", "offline", "search", "part"]
    page: str = ""
    claim: str
    trials: int = Field(ge=0, le=8)
    tracks: list[str] | dict[str, list[str]]
    title: str = ""
    overrides: list[str] = []
    on_policy: list[str] = []
    set: int | None = Field(None, ge=2)
    plain: dict[str, str] = {}
    slower: float = Field(1.0, gt=0)
    expects: list[Expected] = []

    def on(self, track: str) -> list[str] | None:
        """Its overrides for a track; None: it is not there."""
        if isinstance(self.tracks, dict):
            return self.tracks.get(track)
        return [] if track in self.tracks else None


_Read = TypeVar("_Read", bound=_Row)


@dataclass(frozen=True)
class League:
    """Tracks and entries by name; `homes`: the folder of an entry that is somebody else's."""

    tracks: Mapping[str, Track]
    entries: Mapping[str, Entry]
    homes: Mapping[str, Path]

    def experiments(
        self, out: Path, methods: Sequence[str] = (), tracks: Sequence[str] = (), seeds: int = 3
    ) -> list[Experiment]:
        """Those of the named entries and tracks (default: all), and what they build on; in the files' order.

        Raises:
            UserError: an entry or track that is none, an entry that is on none of the tracks, or one that does not fit.
        """
        for what, asked, known in (("method", methods, self.entries), ("track", tracks, self.tracks)):
            for name in asked:
                if name not in known:
                    raise UserError(f'league: no {what} "{name}"{nearest(name, known)}')
        for name in methods:
            if tracks and not any(self.entries[name].on(track) is not None for track in tracks):
                there = ", ".join(track for track in self.tracks if self.entries[name].on(track) is not None)
                raise UserError(f'league: "{name}" is on none of the tracks {", ".join(tracks)}; it is on {there}')
        places = [
            (track, name)
            for name, entry in self.entries.items()
            for track in self.tracks
            if entry.on(track) is not None
        ]
        chosen = {
            f"{track}/{name}": self.experiment(track, name, out, seeds)
            for track, name in places
            if track in (tracks or self.tracks) and name in (methods or self.entries)
        }
        if not chosen:
            raise UserError("league: nothing to run: there are no entries")
        needed = {name for one in chosen.values() for name in one.needs()} - chosen.keys()
        for track, name in places:
            if f"{track}/{name}" in needed:
                chosen[f"{track}/{name}"] = self.experiment(track, name, out, seeds)
        return linked(list(chosen.values()))

    def experiment(self, track: str, name: str, out: Path, seeds: int) -> Experiment:
        """One entry on one track. Raises UserError, with both names, for a config that does not fit the track."""
        about, entry = self.tracks[track], self.entries[name]
        overrides = [*about.texts(), *entry.overrides, *(entry.on(track) or [])]
        sets: dict[str, tuple[str, ...]] = {}
        if entry.set:
            overrides.append(f"image_set.source=SET({track})")
            sets[f"SET({track})"] = _drawn(about, entry.set)
        one = Experiment(
            name=f"{track}/{name}",
            config=entry.config,
            out=out / FOLDER / track / f"{name}.json",
            seeds=tuple(range(seeds)),
            minutes=about.minutes * entry.slower,
            shows=entry.title or name,
            settings={"prompts": about.prompts, "per_prompt": about.per_prompt, **_searched(entry, about)},
            sets=sets,
            here=self.homes.get(name),
            league={
                "proxy": [entry.plain.get(value, value) for value in about.proxy],
                "gold": about.gold,
                "shared": sorted({*about.shared, *(entry.plain.get(value, value) for value in about.shared)}),
                "strip": out / FOLDER / "strips" / f"{track}-{name}.webp",
            },
        )
        one = replace(one, overrides=tuple(overrides))
        return replace(one, overrides=(*_budget(one, about, entry.kind == PART), *overrides))


def _searched(entry: Entry, track: Track) -> dict[str, int]:
    """Of a search: how many images of the base for each judged one are as many in all as a training has."""
    if entry.kind != SEARCH:
        return {}
    count = track.images // (track.prompts * track.per_prompt)
    if count < 2:
        text = f"{track.images} images are not two for each of {track.prompts} x {track.per_prompt} judged ones"
        raise UserError(f"league: search: {text}")
    return {"search": count}


def _budget(one: Experiment, track: Track, part: bool) -> list[str]:
    """Epochs, and epochs between two evaluations, that give the track's images; in front of what the entry says."""
    try:
        config = one.read
    except UserError as error:
        raise UserError(f"league: {one.name}: {error}") from error
    if part:
        return []
    epochs, rest = divmod(track.images, config.rollout.images)
    if rest:
        text = f"{track.images} images are no whole number of epochs of {config.rollout.images}"
        raise UserError(f"league: {one.name}: {text} (rollout.groups x rollout.group_size)")
    return [f"epochs={epochs}", f"evaluate.every={max(epochs // track.evaluations, 1)}"]


def read_league(folder: Path | None = None, others: Path | None = None) -> League:
    """The tracks and entries of a folder (default: the shipped ones), and other people's entries.

    Raises:
        UserError: a file that is missing, is no YAML, or has a key or value that is none; a name that is taken.
    """
    folder = folder or LEAGUE
    tracks = _read(folder / "tracks.yaml", Track, defaults=True)
    entries, homes = _read(folder / "entries.yaml", Entry), dict[str, Path]()
    for name, entry in list(entries.items()):
        if entry.on_policy:
            there = {track: entry.on(track) or [] for track in entry.on_policy}
            overrides = [*entry.overrides, "rollout.groups=6"]
            more = {"overrides": overrides, "on_policy": [], "tracks": there, "expects": []}
            title = f"{entry.title or name}, one step an epoch"
            entries[f"{name}{ON_POLICY}"] = entry.model_copy(update={**more, "title": title})
    for home in _homes(others):
        if home.name in entries:
            raise UserError(f'league: {home}: an entry is called "{home.name}" already; rename the folder')
        source = _source(home / "entry.yaml")
        entry = _row(source, (), source.data, Entry)
        file = home / entry.config
        if not file.is_file():
            raise UserError(f"{home / 'entry.yaml'}: config: no file {file}")
        entries[home.name] = entry.model_copy(update={"config": str(file.resolve())})
        homes[home.name] = home.resolve()
    for name, entry in entries.items():
        for track in [*entry.tracks, *entry.on_policy]:
            if track not in tracks:
                raise UserError(f'league: {name}: no track "{track}"{nearest(track, tracks)}')
    return League(tracks, entries, homes)


def _homes(others: Path | None) -> list[Path]:
    """The folders of other people's entries: of a folder of them, or one entry's own."""
    if others is None:
        return []
    if (others / "entry.yaml").is_file():
        return [others]
    homes = sorted(file.parent for file in others.glob("*/entry.yaml"))
    if not homes:
        raise UserError(f"--others: {others} has no folder with an entry.yaml")
    return homes


def _read(file: Path, kind: type[_Read], defaults: bool = False) -> dict[str, _Read]:
    source = _source(file)
    common = source.data.pop("defaults", {}) if defaults else {}
    for name, row in source.data.items():
        if not isinstance(row, dict):
            raise UserError(f"{source.where((name,))}: {name}: expected keys and values, got {str(row)[:40]}")
    return {name: _row(source, (name,), {**common, **row}, kind) for name, row in source.data.items()}


def _row(source: Source, path: tuple[str, ...], values: Mapping[str, Any], kind: type[_Read]) -> _Read:
    try:
        return kind(**values)
    except ValidationError as error:
        first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")  # a slip explains what is missing
        keys = [*path, *(str(part) for part in first["loc"])]
        where = f"{source.where(tuple(keys))}: {'.'.join(keys)}"
        if first["type"] == "extra_forbidden":
            raise UserError(f"{where}: unknown key{nearest(keys[-1], kind.model_fields)}") from error
        raise UserError(f"{where}: {first['msg'].lower()}") from error


def _source(file: Path) -> Source:
    if not file.is_file():
        raise UserError(f"league: no file {file}")
    return read(file)


def _drawn(track: Track, per_prompt: int) -> tuple[str, ...]:
    """The words behind `diffrl draw-set` of as many images of the base as the track has, scored by its rewards."""
    prompts, rest = divmod(track.images, per_prompt)
    if rest:
        raise UserError(f"league: set: {track.images} images are no whole number of groups of {per_prompt}")
    more = [
        f"{name}.{key}={_flow(value)}"
        for name, table in track.rewards.items()
        for key, value in table.items()
        if key != "weight"
    ]
    words = ["playground", "--rewards", ",".join(track.rewards), *more, "--prompts", "playground/compositional/train"]
    words += ["--limit", str(prompts), "--per-prompt", str(per_prompt), "--steps", "6", "--sampler", "dpm2"]
    return tuple(words)


def _flow(value: Any) -> str:
    """YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).strip()
    return text.removesuffix("...").strip()


def title_of(entry: Entry, name: str, config: Config) -> str:
    """An entry's title; where it has none its objective's."""
    return entry.title or config.method.title or name
