"""Conformance test of a reward: what the trainers rely on, measured on pictures and prompts of the playground.

Every check says what it found; the reward passes if none failed. A check that does not concern the reward is left out.
Pictures of other shapes and unusual prompts are tried for failures only: what a reward should say of them, and whether
it mixes up height and width without failing, only its author can know.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from diffrl.errors import UserError, in_one_line
from diffrl.process_state import unchanged_by
from diffrl.prompts import Prompt
from diffrl.reward_kinds.columns import Column
from diffrl.reward_kinds.figures import Breakdowns, GroupFigures
from diffrl.reward_tools.examples import COUNT, SHAPES, UNUSUAL, Bench, example_images, most_images
from diffrl.rewards.answers import applies
from diffrl.rewards.kinds import kind_of
from diffrl.rewards.protocol import Reward, RewardError, ability
from diffrl.rewards.registry import load_reward

# Scores of the same image may differ by this much between batch sizes: float sums in another order.
TOLERANCE = 1e-4
RAISED = "raised"
SECONDS = 2.0  # after which no further call is timed
REQUESTS = 60  # images that a remote reward scores in a check, where its server does not say how many


@dataclass(frozen=True)
class Result:
    """Outcome of one check: its title, whether it passed, and what was measured or what is wrong."""

    title: str
    passed: bool
    detail: str


class Failed(Exception):
    """A check's finding that the reward does not conform."""


def check(
    name: str,
    given: Sequence[tuple[str, Mapping[str, Any]]] | None = None,
    requests: int | None = None,
    /,
    **params: Any,
) -> bool:
    """Loads the reward `name` (or `file.py:Class`) with `params`, prints what was found, True if it conforms.

    `given`: prompts with their metadata, in place of the check's own; images are those of the playground. `requests`:
    images that it may have scored in all (None: `REQUESTS` of a remote reward, any number of one in this process).
    Raises `UserError` if the reward cannot be loaded.
    """
    from rich.console import Console

    console = Console(highlight=False)
    begun, before = time.perf_counter(), _resident()
    reward = load_reward(name, **params)
    loading = f"{time.perf_counter() - begun:.1f} s, {max(_resident() - before, 0):.0f} MiB of main memory"
    images, prompts, metadata = None, None, None
    if requests is None and ability(reward, "remote"):
        requests = REQUESTS
    if requests is not None:
        count, total = most_images(requests)
        console.print(
            f"scores {total} images ({count} different ones) at most; a judge that is asked several questions about "
            "one gets as many requests for each; --requests changes it",
            soft_wrap=True,
        )
    if given is not None:
        images = example_images()[0]
        rows = [given[i % len(given)] for i in range(len(images))]
        prompts, metadata = [text for text, _ in rows], [more for _, more in rows]
    with unchanged_by(name):
        results = [Result("loading", True, loading), *examine(reward, images, prompts, metadata, requests)]
    for result in results:
        mark = "[green]ok[/]  " if result.passed else "[red]FAIL[/]"
        console.print(f"{mark} {result.title:<24} ", end="")
        console.print(result.detail, markup=False, soft_wrap=True)
    failed = sum(not result.passed for result in results)
    console.print(f'reward "{name}": ' + (f"{failed} of {len(results)} checks failed" if failed else "conforms"))
    return failed == 0


def examine(
    reward: Reward,
    images: Tensor | None = None,
    prompts: Sequence[str] | None = None,
    metadata: Sequence[Mapping[str, Any]] | None = None,
    requests: int | None = None,
) -> list[Result]:
    """All checks that concern `reward`, on `images` (B, 3, H, W) with `prompts` and their metadata (None: empty), or on
    the playground's. `requests`: images that it may have scored in all; then what keeps memory is not asked.

    A group-wise reward is tried on one group: all images with the first prompt to which it applies.
    """
    if ability(reward, "asks"):
        return [Result("asks", True, "people answer it in a training run; there is nothing to call here")]
    if images is None or prompts is None:
        images, prompts = example_images()
    known = [{} for _ in prompts] if metadata is None else metadata
    judged = [i for i, prompt in enumerate(prompts) if applies(reward, prompt, known[i])]
    if not judged:
        detail = "applies() is False for all of the check's prompts, for example: " + "; ".join(prompts[:3])
        return [Result("applies", False, f"{detail}; name others with --prompts")]
    if requests is not None:
        count = min(most_images(requests)[0], len(judged))
        judged = [judged[i * len(judged) // count] for i in range(count)]
    texts, more = [prompts[i] for i in judged], [known[i] for i in judged]
    images = images[judged].to(ability(reward, "device") or "cpu")
    if ability(reward, "groupwise"):
        texts, more = [texts[0]] * len(texts), [more[0]] * len(texts)
    offered = list(zip(prompts, known, strict=True))
    few = requests is not None
    benches = {"": Bench(reward, images, texts, more, offered, few)}
    if names := (ability(reward, "columns") or [])[: 1 if few else None]:
        benches = {f"{n}: ": _applying(Bench(Column(reward, n), images, texts, more, offered, few)) for n in names}
    found = {title: _once([_run(c, work, b) for c, work in _checks(b.reward, few)]) for title, b in benches.items()}
    return [replace(one, title=title + one.title) for title, results in found.items() for one in results]


def _applying(bench: Bench) -> Bench:
    """A column's bench with those of its images to which the column applies."""
    try:
        rows = (~bench.first().isnan()).nonzero().flatten().tolist()
    except Exception:  # the checks tell it
        rows = []
    if not rows:
        return bench
    texts, metadata = [bench.prompts[i] for i in rows], [bench.metadata[i] for i in rows]
    kept = {**bench.kept, "first": bench.first()[rows]}
    return replace(bench, images=bench.images[rows], prompts=texts, metadata=metadata, kept=kept)


def _once(results: Sequence[Result]) -> list[Result]:
    """Without the findings that repeat an exception told before: the first one names the checks that it ended, too."""
    by_text: dict[str, list[Result]] = {}
    for result in results:
        raised = not result.passed and result.detail.startswith(RAISED)
        by_text.setdefault(result.detail if raised else result.title, []).append(result)
    also = [(first, ", ".join(result.title for result in more)) for first, *more in by_text.values()]
    return [replace(first, detail=f"{first.detail} (also in: {titles})") if titles else first for first, titles in also]


def _run(title: str, work: Callable[[Bench], str], bench: Bench) -> Result:
    try:
        return Result(title, True, work(bench))
    except (Failed, RewardError) as error:
        return Result(title, False, str(error))
    except (Exception, SystemExit) as error:
        return Result(title, False, f"{RAISED} {in_one_line(error)}")


def _checks(reward: Reward, few: bool) -> Iterator[tuple[str, Callable[[Bench], str]]]:
    if ability(reward, "applies") is not None:
        yield "says where it applies", _applies
    yield "shape and type", _shape
    yield "finite where it applies", _finite
    yield "deterministic", _deterministic
    yield "images left as they were", _untouched
    yield "independent of the order", _order
    if not kind_of(reward).compares:
        yield "independent of the batch", _batches
    yield "other sizes and shapes", _shapes
    yield "unusual prompts", _unusual
    if ability(reward, "card") is not None:
        yield "declared range", _range
    if ability(reward, "differentiable"):
        yield "gradient", _gradient
    if ability(reward, "embeds"):
        yield "embeddings", _embeddings
    if ability(reward, "figures") is not None:
        yield "figures of groups", _figures
    if ability(reward, "breakdown") is not None and not few:
        yield "score by parts", _breakdown
    yield "throughput", _throughput
    if not few:
        yield "memory", _memory


def _applies(bench: Bench) -> str:
    reward: Any = bench.reward
    answers = [reward.applies(*row) for row in bench.offered]
    if odd := [answer for answer in answers if not isinstance(answer, bool)]:
        raise Failed(f"applies() returns a {type(odd[0]).__name__}, not True or False")
    if answers != [reward.applies(*row) for row in bench.offered]:
        raise Failed("applies() says now this, now that of the same prompt")
    return f"to {sum(answers)} of {len(answers)} prompts; the others get no score"


def _shape(bench: Bench) -> str:
    scores: object = bench.scores()
    if not isinstance(scores, Tensor):
        raise Failed(f"returns a {type(scores).__name__}, not a tensor")
    if tuple(scores.shape) != (len(bench.prompts),):
        raise Failed(
            f"returns the shape {tuple(scores.shape)} for {len(bench.prompts)} images, not ({len(bench.prompts)},)"
        )
    raw = bench.first()
    if not raw.is_floating_point():
        raise Failed(f"returns {raw.dtype}, not a floating-point type")
    return f"({len(bench.prompts)},) {str(raw.dtype).removeprefix('torch.')} on {raw.device} for {len(raw)} images"


def _finite(bench: Bench) -> str:
    scores = bench.scores()
    if not (finite := scores.isfinite()).all():
        worst = int((~finite).nonzero()[0])
        raise Failed(f'{scores[worst].item()} for "{bench.prompts[worst]}", to which it says it applies')
    if len(scores) > 1 and scores.max() == scores.min():
        raise Failed(f"all {len(scores)} images score {scores[0]:.4g}: nothing to learn from")
    return f"from {scores.min():.4g} to {scores.max():.4g}, mean {scores.mean():.4g}"


def _deterministic(bench: Bench) -> str:
    gap = (bench.again()[0] - bench.scores()).abs().max().item()
    if gap != 0.0:
        raise Failed(f"two calls with the same images differ by up to {gap:.2g}")
    return "two calls agree bit for bit"


def _untouched(bench: Bench) -> str:
    if bench.again()[1]:
        raise Failed("the call changes its input images in place")
    return "the input is not written to"


def _order(bench: Bench) -> str:
    rows = torch.randperm(len(bench.prompts), generator=torch.Generator().manual_seed(1)).tolist()
    return _same(bench.call(rows), bench.scores()[rows], "in another order")


def _batches(bench: Bench) -> str:
    alone = torch.cat([bench.call([i]) for i in range(min(COUNT, len(bench.prompts)))])
    return _same(alone, bench.scores()[: len(alone)], "one by one")


def _same(scores: Tensor, reference: Tensor, how: str) -> str:
    if not (finite := scores.isfinite()).all():
        raise Failed(
            f"scores {how} are {scores[~finite][0].item()}: a score must not be computed from the whole batch, as a "
            "z-score is (trainers normalise; a comparison inside a group is `groupwise`, of all `batchwise`)"
        )
    gap = (scores - reference).abs().max().item()
    allowed = TOLERANCE * max(1.0, reference.abs().max().item())
    if not gap <= allowed:
        raise Failed(f"scores {how} differ by up to {gap:.2g} (allowed: {allowed:.2g})")
    return f"scores {how} differ by at most {gap:.2g}"


def _shapes(bench: Bench) -> str:
    bench.first()  # what it raises of any image is told once
    rows, refused = range(1 if bench.few and not kind_of(bench.reward).compares else min(4, len(bench.prompts))), []
    for shape in SHAPES:
        images = interpolate(bench.images[: len(rows)], shape, mode="bilinear", align_corners=False)
        part = Bench(bench.reward, images, [bench.prompts[i] for i in rows], [bench.metadata[i] for i in rows])
        try:
            _sound(part, f"images of {shape[0]} x {shape[1]} (height, width)")
        except (RewardError, UserError) as error:  # an answer in words
            refused.append(f"{shape[0]} x {shape[1]} ({error})")
    tried = ", ".join(f"{height} x {width}" for height, width in SHAPES)
    return f"tried: {tried}" + (f"; refused: {refused[0]}" if refused else "")


def _unusual(bench: Bench) -> str:
    bench.first()
    count, tried = 1 if bench.few and not kind_of(bench.reward).compares else min(2, len(bench.prompts)), []
    metadata = bench.metadata[:count]  # what the reward needs beside the prompt stays
    for kind, prompt in UNUSUAL.items():
        if all(applies(bench.reward, prompt, data) for data in metadata):
            tried.append(kind)
            _sound(Bench(bench.reward, bench.images[:count], [prompt] * count, metadata), f"prompts, {kind},")
    return f"tried: {', '.join(tried)}" if tried else "it applies to none of the check's"


def _sound(bench: Bench, what: str) -> None:
    """Failed if the scores are no finite numbers, one for each image, or something is raised."""
    count = len(bench.prompts)
    try:
        scores = bench.call()
    except (RewardError, UserError):
        raise
    except (Exception, SystemExit) as error:
        raise Failed(f"{what} {RAISED} {in_one_line(error)}") from error
    if tuple(scores.shape) != (count,):
        raise Failed(f"{what} get the shape {tuple(scores.shape)}, not ({count},)")
    none = scores.isnan() & isinstance(bench.reward, Column)  # a column need not apply
    if not (finite := scores.isfinite() | none).all():
        raise Failed(f"{what} get {scores[~finite][0].item()}")


def _range(bench: Bench) -> str:
    scores = bench.scores()
    low, high = bench.reward.card.range  # type: ignore[attr-defined]
    slack = 1e-5 * max(1.0, scores.abs().max().item())
    if scores.min() < low - slack or scores.max() > high + slack:
        raise Failed(f"scores from {scores.min():.4g} to {scores.max():.4g} leave the card's range {low:g} to {high:g}")
    return f"within {low:g} to {high:g}"


def _gradient(bench: Bench) -> str:
    images = bench.images.clone().requires_grad_()
    bench.reward(images, bench.prompts, bench.metadata).sum().backward()
    if images.grad is None or not images.grad.isfinite().all() or not images.grad.any():
        raise Failed("declared differentiable, but the images get no gradient, a zero one or a non-finite one")
    if not kind_of(bench.reward).compares:
        one = bench.images[:1].clone().requires_grad_()
        bench.reward(one, bench.prompts[:1], bench.metadata[:1]).sum().backward()
        if one.grad is None or (one.grad[0] - images.grad[0]).abs().max() > 1e-3 * images.grad[0].abs().max():
            raise Failed("an image's gradient depends on the other images of the batch")
    return f"mean size per pixel {images.grad.abs().mean():.2g}"


def _embeddings(bench: Bench) -> str:
    reward: Any = bench.reward
    with torch.no_grad():
        image, text = reward.embed_image(bench.images), reward.embed_text(bench.prompts)
        if image.ndim != 2 or len(image) != len(bench.prompts) or len(text) != len(bench.prompts):
            raise Failed(
                f"embeddings of {len(bench.prompts)} images and prompts: {tuple(image.shape)}, {tuple(text.shape)}"
            )
        _same(reward.score(image, text).cpu().float(), bench.scores(), "from the embeddings")
    return f"width {image.shape[1]}, and score() of them is the reward"


def _figures(bench: Bench) -> str:
    source: GroupFigures = ability(bench.reward, "figures")
    if not all(source.applies(prompt, {}) for prompt in bench.prompts[:2]):
        return "they do not apply to the check's prompts"
    images, texts = bench.images[:2], [bench.prompts[0]] * 2
    readings = source.read(images, texts, [{}, {}])
    if len(readings) != 2:
        raise Failed(f"{len(readings)} readings of 2 images")
    sums = [float(part) for part in source.sums(texts[0], readings)]
    if len(sums) != source.size or not all(map(math.isfinite, sums)):
        raise Failed(f"expected {source.size} finite sums, got {sums}")
    return ", ".join(source.figures(sums))


def _breakdown(bench: Bench) -> str:
    broken_down = Breakdowns({bench.reward.name: bench.reward})
    broken_down(bench.images, [Prompt(*row) for row in zip(bench.prompts, bench.metadata, strict=True)])
    return ", ".join(broken_down.names)


def _throughput(bench: Bench) -> str:
    if bench.few:
        bench.first()
        seconds = bench.kept["seconds"]
        return f"{len(bench.prompts) / max(seconds, 1e-9):.3g} images/s in one call of {len(bench.prompts)}"
    size = min(ability(bench.reward, "batch_size") or 32, 64)
    rows = [i % len(bench.prompts) for i in range(size)]
    calls, start = 0, time.perf_counter()
    while calls < 1 or (calls < 5 and time.perf_counter() - start < SECONDS):
        bench.call(rows)
        calls += 1
    return f"{calls * size / (time.perf_counter() - start):.0f} images/s in batches of {size}"


def _memory(bench: Bench) -> str:
    on_gpu = bench.images.device.type == "cuda"
    bench.call()  # what is loaded or kept once is there now
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(bench.images.device)
    gc.collect()  # or what others left would be freed meanwhile, and hide what this one keeps
    before, calls = _tensors(), 4
    for _ in range(calls):
        bench.call()
    growth = (_tensors() - before) // calls
    if growth > 0:  # or they only wait for the garbage collector
        gc.collect()
        growth = (_tensors() - before) // calls
    if growth > 0:
        raise Failed(f"keeps {growth} tensors of every call: the memory grows without end")
    peak = torch.cuda.max_memory_allocated(bench.images.device) / 2**20 if on_gpu else 0.0
    found = f"nothing is kept; process {_resident():.0f} MiB"
    return f"{found}, accelerator {peak:.0f} MiB at most" if on_gpu else found


def _tensors() -> int:
    """Tensors that are alive. By type: asking objects for their class may wake lazy modules."""
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def _resident() -> float:
    """Main memory of this process in MiB."""
    return psutil.Process().memory_info().rss / 2**20
