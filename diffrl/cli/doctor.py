"""`diffrl doctor`: what this installation has, what is missing, and what to do about it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from diffrl.config import Config
from diffrl.errors import UserError, in_one_line
from diffrl.memory.cards import Card
from diffrl.resources import shipped, shipped_configs
from diffrl.version import __version__

if TYPE_CHECKING:
    from diffrl.memory.counted import Counted
    from diffrl.memory.fit import Fit

OK, WARN, BAD = "ok", "warn", "FAIL"
ESSENTIAL = ("torch", "torchvision", "diffusers", "transformers", "peft", "accelerate", "open_clip", "safetensors")
NEEDED = {"diffusers": "StableDiffusion3Pipeline"}
OPTIONAL = {  # package -> (extra, what it is for)
    "wandb": ("wandb", "tracking.trackers"),
    "tensorboard": ("tensorboard", "tracking.trackers"),
    "xformers": ("xformers", "engine.attention"),
    "bitsandbytes": ("8bit", "engine.optimiser"),
}
DISTRIBUTIONS = {"open_clip": "open-clip-torch"}
GIB = 2**30
PATIENCE = 60.0  # seconds that a plugin may take to be built
Finding = tuple[str, str, str]  # mark, subject, what was found


def examine(ours: bool = False) -> bool:
    """Print all findings; False if something that every command needs is broken. `ours`: it is offline for this."""
    good = True
    if "HF_HUB_OFFLINE" not in os.environ:  # a check never downloads
        os.environ["HF_HUB_OFFLINE"] = "1"
        try:
            return examine(True)
        finally:
            del os.environ["HF_HUB_OFFLINE"]
    print(f"diffrl {__version__}, Python {platform.python_version()} ({sys.executable})")
    for part in (libraries, devices, machine, assets, rewards):
        for mark, subject, text in _guarded(part):
            if not (ours and subject == "HF_HUB_OFFLINE"):
                print(f"{mark:<5} {subject:<14} {text}")
            good = good and mark != BAD
    print("everything needed is here" if good else "something needed is broken: see FAIL above")
    return good


def check_fit(
    config: Config,
    gpu: float | Card | None = None,
    processes: int | None = None,
    nodes: int = 1,
    fsdp2: bool = False,
    counted: Counted | None = None,
) -> bool:
    """Print what a config needs on each device, and what to change if that is more than there is.

    `gpu`: GiB of the devices that it is meant for, or what they are; None: what is free here. `processes`: of all
    `nodes` together; None: WORLD_SIZE. `fsdp2`: the network is spread over them. `counted`: what configs before this
    one have in common with it.
    """
    from diffrl.launched import launched_with_fsdp
    from diffrl.memory.counted import Counted
    from diffrl.memory.fit import MARGIN, PICTURE, estimate
    from diffrl.memory.reward_memory import RATE

    world = processes or int(os.environ.get("WORLD_SIZE", "1"))
    if world % nodes:
        raise UserError(f"doctor: --nodes {nodes} do not divide --processes {world}")
    here, sharded = world // nodes, fsdp2 or launched_with_fsdp()
    card, gpu = (gpu, gpu.memory) if isinstance(gpu, Card) else (None, gpu)
    counted = counted or Counted()
    with _progress() as tell:
        fit = estimate(config, world, sharded, counted, tell=tell)
    where, free = _free() if gpu is None else (f"a device of {gpu:g} GiB", int(gpu * GIB))
    values = {
        "fit": fit,
        "sizes": {**fit.parts, **fit.peaks},
        "processes": here,
        "work": _work(fit.work),
        "time": _time(config, fit, world, card),
        "names": list(names_of_hub(config)),
        "free": free,
        "where": where,
    }
    constants = {"GIB": GIB, "RATE": RATE, "PICTURE": PICTURE}
    texts = Environment(loader=PackageLoader("diffrl.cli"), undefined=StrictUndefined, trim_blocks=True)
    print(texts.get_template("fit.txt.j2").render(values, **constants, gib=lambda size: f"{size / GIB:9.2f}"))
    if fit.total <= free:
        short = fit.total * MARGIN > free
        close = ", but closely: measured peaks took up to 9 of the 10 % for gaps; optimise.micro_batch can be smaller"
        print(f"it fits{close * short}")
    else:
        _print_advice(config, free, world, fit, sharded, counted)
    return bool(fit.total <= free)


def _print_advice(config: Config, free: int, world: int, fit: Fit, sharded: bool, counted: Counted) -> None:
    """Lines on what would make a config fit that does not."""
    from diffrl.memory.advice import advise
    from diffrl.memory.fit import estimate

    with _progress() as tell:
        advice = advise(config, free, world, fit, sharded, counted, tell)
        spread = None if advice else estimate(config, max(world, 8), True, counted, tell=tell)
    if advice is not None:
        print(f"it does not fit; with {advice[0].total / GIB:.1f} GiB it would: {' '.join(advice[1])}")
    else:
        print("it does not fit, and smaller micro-batches would not help: lower rollout.resolution or lora.rank")
    if spread is not None and spread.total < fit.total:
        text = f"spread over {max(world, 8)} devices by FSDP2 (scripts/launch/fsdp2.yaml) it needs"
        print(f"{text} {spread.total / GIB:.1f} GiB on each, and less with smaller micro-batches")


def names_of_hub(config: Config) -> Iterator[str]:
    """A line on the commit of each model of the hub that a config's run would load."""
    from diffrl.hub import NAME, commit_of
    from diffrl.memory.footprint import defaults
    from diffrl.rewards.registry import load_class

    names: dict[str, list[Any]] = {"model": [config.model], "evaluate.features": [config.evaluate.features]}
    names |= {f"evaluate.also.{key}": [one.model, one.merge] for key, one in config.evaluate.also.items()}
    for table in ("rewards", "watch"):
        for name, entry in getattr(config, table).items():
            plugin = entry.plugin or name
            values = defaults(plugin) | entry.arguments
            own = [] if "model" in values else [getattr(getattr(load_class(plugin), "card", None), "repository", None)]
            names[f"{table}.{name}"] = [*own, *values.values()]
    for key, values in names.items():
        for text in values:
            if isinstance(text, str) and "/" in text and NAME.fullmatch(text) and not Path(text).exists():
                commit, missing = commit_of(text), "is not in this machine's cache"
                yield f"{key}: {text} {f'at commit {commit}' if commit else missing}"


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """One line on a terminal that says what is being done; nothing is left of it."""
    terminal = sys.stderr.isatty()

    def tell(text: str) -> None:
        if terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    try:
        yield tell
    finally:
        tell("")


def _work(work: Mapping[str, float]) -> str:
    """One line on an epoch's arithmetic on each device."""
    total = sum(work.values())
    unit, name = next(((u, n) for u, n in ((1e15, "P"), (1e12, "T")) if total >= u), (1e9, "G"))
    parts = ", ".join(f"{phase} {value / unit:.3g}" for phase, value in work.items())
    return f"{total / unit:9.2f} {name}FLOP in an epoch ({parts}), without rewards and evaluations"


def _time(config: Config, fit: Any, world: int, card: Card | None) -> str:
    """One line on how long a run takes, evaluations' images with it, on the card that was named."""
    from diffrl.memory.cards import REACHED

    evaluations = 2 + (config.epochs - 1) // config.evaluate.every
    judging = evaluations * fit.evaluating(config, world)
    total = config.epochs * sum(fit.work.values()) + judging
    text = f"{total / 1e15:9.2f} PFLOP in {config.epochs} epochs, {judging / total:.0%} of it {evaluations} evaluations"
    if card is None:
        return f"{text}; --gpu CARD says in which time"
    most, least = (total / (1e12 * card.rate * reached) / 3600 for reached in REACHED)
    share = f"{REACHED[0]:.0%} to {REACHED[1]:.0%} of its vendor's {card.rate:g} TFLOP/s"
    return f"{text}: {least:.2g} to {most:.2g} hours, at {share}, as an H200 reached; without rewards"


def _free() -> tuple[str, int]:
    """The device that a run would use, and its free bytes."""
    import psutil
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0), torch.cuda.mem_get_info(0)[0]
    if torch.backends.mps.is_available():
        return "the Apple GPU, which shares the CPU's memory", psutil.virtual_memory().available
    return "no accelerator, the CPU", psutil.virtual_memory().available


def _guarded(part: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a part; its own failure is a finding, not a traceback."""
    try:
        yield from part()
    except Exception as error:
        yield BAD, part.__name__, in_one_line(error)


def libraries() -> Iterator[Finding]:
    """Versions of the stack, each really imported, and with it what a run needs of it."""
    for name in ESSENTIAL:
        try:
            module = importlib.import_module(name)
            if name in NEEDED:  # diffusers imports its pipelines, and with them torchvision, only when asked
                getattr(module, NEEDED[name])
        except Exception as error:
            yield BAD, name, _explain(error)
            continue
        yield OK, name, _version(name)
    for name, (extra, use) in OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            yield OK, name, f'not installed; for {use}: pip install "diffrl[{extra}]"'
        else:
            yield OK, name, _version(name)


def _explain(error: Exception) -> str:
    """What an import's failure means, for pairs of libraries known to break each other."""
    text = in_one_line(error)
    if "torchvision::nms" in text or ("torchvision" in text and "operator" in text):
        torch, vision = _version("torch"), _version("torchvision")
        return (
            f"torchvision {vision} was built for another torch than {torch} ({text}); "
            "install both together from the same index: pip install --force-reinstall torch torchvision"
        )
    if isinstance(error, ModuleNotFoundError):
        return f"{text}; install again: pip install diffrl"
    return text


def devices() -> Iterator[Finding]:
    """Accelerators, and how torch uses the CPU."""
    import psutil
    import torch

    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16: use optimise.precision=fp16 or fp32"
        yield OK, f"cuda:{index}", f"{device.name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, {bf16}"
    if torch.version.cuda and not torch.cuda.is_available():
        yield WARN, "cuda", f"torch is built for CUDA {torch.version.cuda}, but finds no device; runs will use the CPU"
    if torch.backends.mps.is_available():
        free = psutil.virtual_memory().available
        text = f"Apple GPU, {free / GIB:.1f} GiB free, shared with the CPU; no run has been tried on it"
        yield WARN, "mps", text
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    hint = "" if threads <= cores else f"; more threads than cores are slow: OMP_NUM_THREADS={cores}"
    yield WARN if hint else OK, "cpu", f"{cores} cores, torch uses {threads} threads{hint}"


def machine() -> Iterator[Finding]:
    """Free memory and disk."""
    import psutil

    memory = psutil.virtual_memory()
    low = memory.available < 4 * GIB
    text = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    yield WARN if low else OK, "memory", text + ("; the playground's demo needs about 4" if low else "")
    free = shutil.disk_usage(Path.cwd()).free
    low = free < 2 * GIB
    yield WARN if low else OK, "disk", f"{free / GIB:.1f} GiB free here" + ("; checkpoints may not fit" if low else "")
    for variable in ("HF_HUB_OFFLINE", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        if variable in os.environ:
            yield OK, variable, os.environ[variable]


def assets() -> Iterator[Finding]:
    """The shipped configs and the playground's weights."""
    configs = shipped_configs()
    yield (OK if configs else BAD), "configs", f"{len(configs)} in {shipped('configs')}"
    folder = shipped("assets", "playground")
    weights = sorted(folder.rglob("*.safetensors"))
    size = sum(file.stat().st_size for file in weights)
    if weights:
        yield OK, "playground", f"{len(weights)} files of weights, {size / 1e6:.0f} MB, in {folder}"
    else:
        yield BAD, "playground", f"no weights in {folder}; install again, or run scripts/train_playground.py"


def rewards() -> Iterator[Finding]:
    """Installed rewards. Those whose weights are shipped are really built; of the others it is said whether they are
    here. One that cannot be built is only a warning, since a run may not want it."""
    from diffrl.rewards.registry import available, load_class, load_reward, required

    if not available():
        yield BAD, "rewards", "none is registered; install the package: pip install -e ."
    for name in available():
        try:
            if needed := required(load_class(name)):
                yield OK, f"reward {name}", f"is installed; it is built with: {', '.join(needed)}"
                continue
            if (weights := _hub_weights(load_class(name))) is not None:
                yield OK, f"reward {name}", f"is installed; {weights}"
                continue
            _built_in_time(partial(load_reward, name))
        except Exception as error:
            yield WARN, f"reward {name}", in_one_line(error)
        else:
            yield OK, f"reward {name}", "loads"


def _hub_weights(reward: type) -> str | None:
    """Whether a reward's weights on the hub, by its card, are in this machine's cache; None where it has none there."""
    card = getattr(reward, "card", None)
    repository = getattr(card, "repository", None)
    if repository is None:
        return None
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "snapshots"
    here = folder.is_dir() and any(folder.iterdir())
    return f"weights {'here' if here else 'not here'}: {getattr(card, 'weights', '')}"


def _built_in_time(build: Callable[[], object]) -> None:
    """Build a plugin in a thread that can be left behind: one that hangs is found, and the next ones are built."""
    from diffrl.rewards.timeouts import TooLong, call

    try:
        call(build, PATIENCE).result()
    except TooLong:
        raise TimeoutError(f"its constructor did not come back within {PATIENCE:g} s") from None


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
