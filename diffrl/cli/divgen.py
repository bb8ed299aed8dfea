"""The command `diffrl divgen`: DivGenBench's prompts, images, scores, reference and report."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from diffrl.cli.arguments import drawing_of, settled
from diffrl.errors import UserError, nearest
from diffrl.records.disk import check_writable
from diffrl.tools.outputs import out_file

KINDS = ("identity", "style", "layout", "features", "lpips")  # as in diffrl.divgen.extractors
DIMENSIONS = ("id", "style", "layout", "tonal")


def _choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value and value not in choices:
        raise UserError(f'{option}: unknown "{value}"{nearest(value, choices)}')


def _file(option: str, path: Path | None, suffix: str) -> Path | None:
    """The file, where its links lead; UserError for what is no such file."""
    if path is None:
        return None
    if path.is_dir() or path.suffix != suffix:
        raise UserError(f'{option}: name a file that ends in {suffix}, got "{path}"')
    return out_file(path, option, f"scores{suffix}")


def _device(arguments: argparse.Namespace) -> str:
    """The device that was named, which can be used; "" for an accelerator if there is one."""
    name = str(arguments.device or "")
    if name in ("", "cpu"):
        return name
    import torch

    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f'--device: "{name}" cannot be used ({reason})') from error
    return name


def write_benchmark(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.divgen.prompts import world_names, write_prompts

    _choice("--world", arguments.world, tuple(world_names()))
    arguments.out = _file("--out", arguments.out, ".jsonl")
    prompts = _benchmark(arguments, arguments.world)
    write_prompts(prompts, arguments.out)
    print(f"{len(prompts)} prompts: {arguments.out}")
    return 0


def _benchmark(arguments: argparse.Namespace, world: str) -> Any:
    from diffrl.divgen.prompts import BASE, benchmark, small

    if arguments.base and world != "general":
        raise UserError(f"--base: the {world}'s prompts come from its grammar; they use no base prompts")
    prompts = benchmark(world, base=arguments.base or BASE)
    return small(prompts) if arguments.small else prompts


def generate(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.divgen.prompts import small, world_of
    from diffrl.prompts import load_prompts

    if arguments.prompts and (arguments.small or arguments.base):
        raise UserError("--prompts: the file says what is drawn; leave out --small and --base")
    given, lora, checkpoint = drawing_of(arguments), arguments.lora, arguments.checkpoint
    del given["prompts"], given["limit"], given["out"]
    if checkpoint is not None and not (checkpoint.is_dir() and any(checkpoint.glob("*.safetensors"))):
        raise UserError(f'--checkpoint: "{checkpoint}" is not a folder with tensors (.safetensors)')
    if lora is not None and checkpoint is not None:
        raise UserError("--checkpoint: a checkpoint has a LoRA of its own; leave out --lora")
    check_writable(arguments.out, "--out")
    world = world_of(arguments.model)
    prompts = load_prompts(arguments.prompts) if arguments.prompts else _benchmark(arguments, world)
    trained = lora or checkpoint
    given = settled(given | {"lora": None if trained is None else str(trained)}) | {"lora": given["lora"]}
    from diffrl.divgen.run import Job, generate_images
    from diffrl.drawing import Drawing

    job = Job(Drawing(**given), world, None if checkpoint is None else str(checkpoint))
    chosen = prompts if arguments.limit is None else small(prompts, arguments.limit)
    drawn = generate_images(job, chosen, arguments.out)
    if os.environ.get("RANK", "0") == "0":
        print(f"{drawn} images drawn: {arguments.out}")
    return 0


def _looking(arguments: argparse.Namespace) -> tuple[dict[str, str], dict[str, Any]]:
    """The extractors by kind that were named, and the other options of `_add_looking`."""
    from diffrl.divgen.prompts import world_names

    _choice("--world", arguments.world, tuple(world_names()))
    _choice("--dimension", arguments.dimension, DIMENSIONS)
    names = {kind: name for kind in KINDS if (name := getattr(arguments, kind))}
    options = {name: getattr(arguments, name) for name in ("world", "reference", "dimension", "prompts_from")}
    return names, options | {"device": _device(arguments)}


def score(arguments: argparse.Namespace, rest: list[str]) -> int:
    arguments.out = _file("--out", arguments.out, ".json")
    from diffrl.divgen.listings import home
    from diffrl.divgen.score import FILE, METRICS
    from diffrl.divgen.scoring import score_folder

    names, options = _looking(arguments)
    scores = score_folder(arguments.folder, names, out=arguments.out, **options)
    print(scores.about["read"])
    for name, score in scores.metrics.items():
        metric = METRICS[name]
        if score.value is None:
            print(f"{metric.title:<17}{'-':>8}  {score.why}")
            continue
        ends = f"[{score.low:.4f}, {score.high:.4f}]" if score.low is not None else "[too few prompts]"
        empty = f", nothing found in {score.empty}" if score.empty else ""
        print(f"{metric.title:<17}{score.value:8.4f}  {ends:<19}  {score.images} images{empty}; {metric.direction}")
    for line in scores.unreadable[:5]:
        print(f"cannot be read: {line}")
    if len(scores.unreadable) > 5:
        print(f"cannot be read: {len(scores.unreadable) - 5} more; all are in the scores' file")
    if copies := scores.about["copies"]:
        print(f"{copies} images are there twice (same file, or same bytes of one prompt), and count once")
    print(f"scores: {arguments.out or home(arguments.folder) / FILE}")
    return 0


def reference(arguments: argparse.Namespace, rest: list[str]) -> int:
    arguments.out = _file("--out", arguments.out, ".safetensors")
    from diffrl.divgen.extractors import check_extractor, defaults_of, load_extractor
    from diffrl.divgen.folders import read_folder
    from diffrl.divgen.reference import RENDERINGS, build_reference, drawn_reference
    from diffrl.tools.progress_bar import progress
    from diffrl.worlds import worlds

    world = worlds().get(arguments.folder)
    style = arguments.style or defaults_of(world.name if world else "general")["style"]
    check_extractor("style", style)
    if world:
        with progress("rendering", RENDERINGS + 971) as advance:
            extractor = load_extractor("style", style, _device(arguments))
            reference = drawn_reference(world, extractor, advance=advance)
    else:
        folder = Path(arguments.folder)
        with progress("looking", len(read_folder(folder).items)) as advance:
            reference, sight = build_reference(folder, style, _device(arguments), advance)
        for item, reason in sight.unreadable:
            print(f"not read: {item.path}: {reason}")
    reference.save(arguments.out)
    print(f"{len(reference.train)} images to find and {len(reference.test)} held out: {arguments.out}")
    return 0


def report(arguments: argparse.Namespace, rest: list[str]) -> int:
    arguments.out = _file("--out", arguments.out, ".html")
    from diffrl.divgen.score import METRICS
    from diffrl.divgen.sets import sets_of
    from diffrl.report.divgen import write_divgen_report

    _choice("--by", arguments.by, tuple(METRICS))
    folders = sets_of(arguments.folders)
    if arguments.base:
        _choice("--base", arguments.base, tuple(folders))
        folders = {arguments.base: folders[arguments.base], **folders}
    files = {"json_file": _file("--json", arguments.json, ".json"), "csv_file": _file("--csv", arguments.csv, ".csv")}
    names, options = _looking(arguments)
    write_divgen_report(folders, arguments.out, names or None, by=arguments.by, **files, **options)
    print(f"report: {arguments.out}")
    return 0
