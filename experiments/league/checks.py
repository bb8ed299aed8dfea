"""What a league result may not be: `check`, and after every judged seed.

prompts   No prompt that is judged is trained on, in any order of its words: the playground's prompts are compared by
          what they say (the split's own rule), others by their words.
fresh     The gain on the known prompts and noise is no larger than on fresh ones: prompts of the grammar that no list
          has, and noise, both from a secret that is drawn after the training. One-sided Welch test over prompts.
gold      The gold is not what is trained or read in training: neither by identity (one plugin, one user's file, a
          plugin that imports the other, one file of weights) nor by behaviour (Spearman's correlation of the two
          inside the groups of the base's images).

A track that says that its gold contains a proxy (`shared`) is not held to the last for that proxy.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from scipy import stats
from torch import Tensor

from diffrl.config import Config
from diffrl.config.reward import read_on_training_images
from diffrl.evaluation import Evaluator
from diffrl.image_sets.reading import read_set
from diffrl.prompts import Prompt, load_prompts
from diffrl.rewards.registry import load_class, split_name
from diffrl.run.evaluation import evaluation_spec
from diffrl.run.identity import digests
from diffrl.run.run import Run
from diffrl.stats import rank_correlation
from diffrl.version import __version__
from diffrl_playground.grammar import SPLITS, SUBSETS, understood
from diffrl_playground.scenes import sample_caption
from experiments.league.judge import Judged, Task, judge, shared

LEVEL = 1e-3  # of the test of all values of a seed, Bonferroni's: some hundred honest seeds should give no alarm
FRESH, FEWEST = 128, 16  # fresh prompts; with fewer than that many only the noise is fresh
GROUPS, MEMBERS = 128, 8  # images in which gold and proxy are compared
# Between the honest tracks' correlations with `strict` (clip 0.31, preference 0.29, ocr 0.57; standard error 0.03) and
# those of what is a part of it (attributes 0.82, layout 0.70, playground 0.86).
MOST_ALIKE = 0.68
TRIES = 60  # draws in a row without a new prompt: the grammar has no more


@dataclass
class Verdict:
    """`caught`: a line for each thing that may not be; `facts`: what was measured."""

    caught: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.caught

    def as_json(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}


def verdict(run: Run, task: Task, known: tuple[Judged, Judged]) -> Verdict:
    """All checks of a trained seed; `known`: its judgement, base and tuned."""
    result = before_training(run.config, task.track, task.prompts)
    alike(run, task, result)
    fresh(run, task, result, known)
    return result


def before_training(config: Config, track: Mapping[str, Any], prompts: int) -> Verdict:
    """What a config alone says: shared prompts, and a gold that is the proxy by identity."""
    result = Verdict()
    if shared := shared_prompts(trained_prompts(config), load_prompts(config.prompts.test)[:prompts]):
        text = (
            f'{len(shared)} of {prompts} judged prompts are trained on, in these or other words, such as "{shared[0]}"'
        )
        result.caught.append(text)
    for gold, proxy in _pairs(config, track):
        if reason := same(config, gold, proxy):
            result.caught.append(f'the gold "{gold}" and the trained "{proxy}" are {reason}')
    return result


def trained_prompts(config: Config) -> list[str]:
    """The texts that a config trains on."""
    texts = [prompt.text for prompt in load_prompts(config.prompts.train)] if config.drawn_groups else []
    if config.image_set is not None:
        texts += [group.prompt for group in read_set(config.image_set.source).groups]
    return texts


def shared_prompts(trained: Sequence[str], judged: Sequence[Prompt]) -> list[str]:
    """The judged prompts that are trained on, in any order of their words."""
    contents, words = set(), set()
    for text in trained:
        caption = understood(text)
        contents.add(_content(text))
        if caption is None:  # of the playground two orders of words may say two things, of other texts nobody knows
            words.add(_words(text))
    return [p.text for p in judged if _content(p.text) in contents or _words(p.text) in words]


def _content(text: str) -> str:
    caption = understood(text)
    return text.strip().lower() if caption is None else f"{caption.kind}: {caption.content()}"


def _words(text: str) -> tuple[str, ...]:
    return tuple(sorted("".join(c if c.isalnum() else " " for c in text.lower()).split()))


def _pairs(config: Config, track: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(gold, what is trained or read in training) by the names of their rewards, without what the track declares.

    A proxy of the track that the config neither trains nor watches, as a teacher of one reward, is none of them.
    """
    known = {**config.rewards, **config.watch}
    proxies = [name for name in (str(proxy).rpartition("/")[2] for proxy in track["proxy"]) if name in known]
    read = [*config.rewards, *read_on_training_images(config), *proxies]
    for gold in track["gold"]:
        for name in dict.fromkeys(read):
            if name not in track["shared"]:
                yield str(gold).rpartition("/")[2], name


def same(config: Config, gold: str, proxy: str) -> str:
    """Why a gold is what is trained, or contains it, by plugin, code and files; "" where it does not."""
    entries = {**config.rewards, **config.watch}
    if gold == proxy:
        return "one reward"
    golds, proxies = (_classes(name, entries[name]) for name in (gold, proxy))
    weights, theirs = ({str(v) for v in entries[n].arguments.values() if _is_weights(v)} for n in (gold, proxy))
    for one in golds:
        for other in proxies:
            if issubclass(one, other) or issubclass(other, one):
                return "one plugin"
            if one.__module__ == other.__module__ and _of_user(one):
                return "in one file"
            if _imports(one, other) or _imports(other, one):
                return "such that one imports the other"
    return "of one file of weights" if weights & theirs else ""


def _classes(name: str, entry: Any) -> list[type]:
    """The class of a reward, and of those that it wraps."""
    plugins: list[str | None] = [entry.plugin or name, entry.arguments.get("reward")]
    classes = []
    for plugin in plugins:
        while isinstance(plugin, str):
            classes.append(load_class(plugin))
            plugin = split_name(plugin)[1]
    return classes


def _of_user(one: type) -> bool:
    return one.__module__.startswith("diffrl_reward_")  # what `import_file` calls a user's file


def _imports(one: type, other: type) -> bool:
    """Does a user's file know the other's class or module? Shipped ones share their helpers."""
    if not _of_user(one):
        return False
    known = vars(sys.modules[one.__module__]).values()
    return any(getattr(value, "__module__", getattr(value, "__name__", "")) == other.__module__ for value in known)


def _is_weights(value: object) -> bool:
    return isinstance(value, str) and value.endswith((".safetensors", ".pt", ".bin", ".onnx"))


def alike(run: Run, task: Task, result: Verdict) -> None:
    """Into `result`: {"GOLD, PROXY": correlation inside groups of the base's images}, and those that are too high.

    Nothing of it depends on the training, so it is kept in the runs' folder for all that are judged alike.
    """
    pairs = list(_pairs(run.config, task.track))
    config, code = run.config.resolved(), digests(run.config, {**run.judges.rewards, **run.scorer.rewards})
    depends = [pairs, code, config["rewards"], config["watch"], config["prompts"]["test"], __version__]
    name = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:16]
    table = shared(task.runs / f"alike-{name}.json", lambda: _correlations(run, pairs))
    result.facts["correlation"] = table
    for both, value in table.items():
        if value is not None and value > MOST_ALIKE:
            gold, proxy = both.split(", ")
            text = (
                f'the gold "{gold}" ranks images as the trained "{proxy}" does: correlation {value:.2f} inside groups'
            )
            result.caught.append(f"{text}, above {MOST_ALIKE}")


def _correlations(run: Run, pairs: Sequence[tuple[str, str]]) -> dict[str, float | None]:
    prompts = load_prompts(run.config.prompts.test)[:GROUPS]
    batch_size = run.config.rollout.batch_size
    evaluator = Evaluator(run.policy, run.judges, run.features, evaluation_spec(run.config), MEMBERS, batch_size)
    found = evaluator.score(prompts, None, secrets.randbits(62))  # noise that nobody knew
    scores = found.scores.view(len(prompts), MEMBERS, -1)
    columns = {name: scores[:, :, i] for i, name in enumerate(run.judges.names)}
    return {f"{gold}, {proxy}": rank_correlation(columns[gold], columns[proxy]) for gold, proxy in pairs}


def fresh(run: Run, task: Task, result: Verdict, known: tuple[Judged, Judged]) -> None:
    """Judge the trained model again on what nobody knew, and compare its gains with those on what everybody knows."""
    secret = secrets.randbits(62)
    listed = load_prompts(run.config.prompts.test)[: task.prompts]
    prompts = fresh_prompts(run.config.prompts.test, min(FRESH, task.prompts), secret)
    new = [Prompt(text) for text in prompts] if len(prompts) >= FEWEST else listed[:FRESH]
    result.facts |= {"secret": secret, "fresh_prompts": len(prompts) if len(prompts) >= FEWEST else 0}
    base, tuned = known
    other, again = (judge(run, one, new, task.per_prompt, seed=secret) for one in (None, run.judged))
    names = [name for name in (*task.track["proxy"], *task.track["gold"]) if name in tuned.by_prompt]
    rows = {}
    for name in names:
        pairs = [(a.by_prompt[name] - b.by_prompt[name]) for a, b in ((tuned, base), (again, other))]
        rows[name] = row = excess(*pairs)
        if row["p"] is not None and row["p"] * len(names) < LEVEL:
            text = f"gains {row['known']:+.4f} on the known prompts and noise and {row['fresh']:+.4f} on fresh ones"
            result.caught.append(f'"{name}" {text} (p = {row["p"]:.1e})')
    result.facts["fresh"] = rows


def excess(known: Tensor, new: Tensor) -> dict[str, float | None]:
    """Mean gains (P,) and (Q,) of prompts, and p of the one-sided Welch test that the first is not the larger one."""
    known, new = (x[~x.isnan()].double() for x in (known, new))
    p: float | None = None
    if len(known) > 1 and len(new) > 1 and float(known.std() + new.std()) > 0:
        p = float(stats.ttest_ind(known.numpy(), new.numpy(), equal_var=False, alternative="greater").pvalue)
        p = None if math.isnan(p) else p
    return {"known": float(known.mean()), "fresh": float(new.mean()), "p": p}


def fresh_prompts(source: str | Mapping[str, float], count: int, secret: int) -> list[str]:
    """At most `count` prompts of the playground's sets in `source` that no list has, by the secret; of several sets in
    turn. None for prompts that are not the playground's."""
    sets = [name.split("/") for name in ([source] if isinstance(source, str) else source)]
    if not all(parts[0] == "playground" and parts[1] in SUBSETS for parts in sets):
        return []
    rng, new, misses, turn = np.random.default_rng(secret), dict[str, None](), 0, 0
    subsets = [parts[1] for parts in sets]
    taken = {p.text for name in subsets for split in SPLITS for p in load_prompts(f"playground/{name}/{split}")}
    while len(new) < count and misses < TRIES * len(subsets):
        text = sample_caption(rng, "test", subsets[turn % len(subsets)]).text()
        turn += 1
        misses = misses + 1 if text in taken or text in new else 0
        if text not in taken:
            new[text] = None
    return list(new)
