"""The command `diffrl divgen`: DivGenBench's prompts, images, scores, reference and report."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from diffrl.cli.arguments import add_drawing, drawing_of, settled
from diffrl.cli.commands import subcommand
from diffrl.errors import UserError, nearest
from diffrl.records.disk import check_writable
from diffrl.records.outputs import out_file

KINDS = ("identity", "style", "layout", "features", "lpips")  # as in diffrl.divgen.extractors
DIMENSIONS = ("id", "style", "layout", "tonal")


def add(add: Callable[..., Any]) -> None:
    """Register the command with the command line's `add`."""
    command = add(
        "divgen",
        None,
        "measure diversity with DivGenBench: prompts, images, scores and a report",
        "diffrl divgen generate playground --small --per-prompt 4 --out divgen/base",
        "diffrl divgen score divgen/base",
        "diffrl divgen report divgen/base divgen/nft --out divgen.html",
    )
    actions = command.add_subparsers(metavar="prompts|generate|score|reference|report", required=True)

    action = partial(subcommand, actions)
    _add_prompts(action)
    _add_generate(action)
    _add_score(action)
    _add_reference(action)
    _add_report(action)


def _add_set(parser: Any) -> None:
    parser.add_argument("--small", action="store_true", help="80 prompts of each dimension only")
    text = "a file of base prompts instead of the shipped ones (general style and tonal prompts)"
    parser.add_argument("--base", metavar="FILE", help=text)


def _add_prompts(action: Callable[..., Any]) -> None:
    prompts = action(
        "prompts",
        _prompts,
        "write the 3,200 prompts, 800 for each of identity, style, layout and tone, as .jsonl",
        "diffrl divgen prompts --out divgen.jsonl",
        "diffrl divgen prompts --world playground --small --out small.jsonl",
    )
    text = "general (default), or playground: in its grammar, which has 288 different heads"
    prompts.add_argument("--world", default="general", metavar="WORLD", help=text)
    _add_set(prompts)
    prompts.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl", help="the file to write")


def _add_generate(action: Callable[..., Any]) -> None:
    generate = action(
        "generate",
        _generate,
        "draw the images of the prompts; an interrupted call continues where it stopped",
        "diffrl divgen generate playground --lora runs/nft/lora --small --per-prompt 4 --steps 6 --out divgen/nft",
        "accelerate launch -m diffrl divgen generate stabilityai/stable-diffusion-3.5-medium --out divgen/sd35",
    )
    add_drawing(generate)
    text = "prompts of your own (.jsonl with dimension and keyword) instead of the default ones"
    generate.add_argument("--prompts", metavar="FILE", help=text)
    _add_set(generate)
    text = "a checkpoint of a run in place of a LoRA: RUN_DIR/checkpoints/step-NNNNNN"
    generate.add_argument("--checkpoint", type=Path, metavar="DIR", help=text)
    generate.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the images")


def _add_score(action: Callable[..., Any]) -> None:
    score = action(
        "score",
        _score,
        "score a folder of images: from `generate`, or of any other tool",
        "diffrl divgen score divgen/base",
        "diffrl divgen score art --dimension style --style csd:csd.bin --reference wikiart.safetensors",
    )
    text = "images: with manifest.jsonl, metadata.jsonl, .csv, prompts.txt, their tool's metadata or by sub-folders"
    score.add_argument("folder", metavar="DIR", type=Path, help=f"{text}; or hub:OWNER/NAME[@REVISION][:FILES]")
    text = "general or playground: whose extractors are used (default: what the images were drawn with)"
    _add_looking(score)
    score.add_argument("--out", type=Path, metavar="FILE.json", help="the scores (default: DIR/scores.json)")


def _add_looking(command: Any) -> None:
    """How folders are read and looked at."""
    text = "where prompts are read: manifest, metadata, sidecars, prompts, names, folders, none, or a file"
    command.add_argument("--prompts-from", default="", metavar="SOURCE|FILE", help=f"{text} (default: what knows them)")
    command.add_argument("--world", default="", metavar="WORLD", help=text)
    text = "id, style, layout or tonal: what images are that no manifest and no sub-folder gives a dimension"
    command.add_argument("--dimension", default="", metavar="NAME", help=text)
    shown = {
        "identity": "arcface[:PACK] or playground",
        "style": "csd[:FILE], clip, vit:MODEL or pixels",
        "layout": "grounding-dino[:MODEL] or playground",
        "features": "dinov2[:MODEL], dinov3[:MODEL], vit:MODEL, clip or pixels",
        "lpips": "alex, vgg or squeeze",
    }
    for kind in KINDS:
        text = f"extractor: {shown[kind]}, a class of yours as path/to/file.py:Class, or none"
        command.add_argument(f"--{kind}", metavar="NAME", help=text)
    text = "real images' style features for ASC, a file of `divgen reference` (the playground renders its own)"
    command.add_argument("--reference", type=Path, metavar="FILE", help=text)
    command.add_argument("--device", metavar="DEVICE", help="cpu or cuda (default: an accelerator if there is one)")


def _add_report(action: Callable[..., Any]) -> None:
    report = action(
        "report",
        _report,
        "one self-contained page that compares 2 to 30 folders of images with the first of them",
        "diffrl divgen report divgen/base divgen/nft --out divgen.html",
        "diffrl divgen report models/ --features pixels --by vendi --out models.html --csv models.csv",
    )
    text = "folders of images, scored or not; NAME=DIR names one; a DIR of folders, a pattern, a .csv of them, hub:NAME"
    report.add_argument("folders", nargs="+", metavar="DIR", help=text)
    text = "order of the sets below the first, most diverse at the top: ids, asc, sdi, pvs, diversity, vendi or lpips"
    report.add_argument("--by", default="", metavar="SCORE", help=text)
    report.add_argument("--base", default="", metavar="NAME", help="the set with which others are compared")
    _add_looking(report)
    report.add_argument("--out", type=Path, required=True, metavar="FILE.html", help="the page to write")
    report.add_argument("--json", type=Path, metavar="FILE.json", help="the same as JSON")
    report.add_argument("--csv", type=Path, metavar="FILE.csv", help="the same as a table")


def _add_reference(action: Callable[..., Any]) -> None:
    text = "compute and store the style features of a folder of real art, ASC's reference"
    reference = action(
        "reference",
        _reference,
        text,
        "diffrl divgen reference wikiart --out wikiart.safetensors",
        "diffrl divgen reference playground --out playground.safetensors",
    )
    reference.add_argument(
        "folder", metavar="DIR", help="images, in any sub-folders; or playground, which renders its own"
    )
    text = "extractor: csd[:FILE] (default), clip (the playground's), vit:MODEL, pixels or path/to/file.py:Class"
    reference.add_argument("--style", metavar="NAME", help=text)
    reference.add_argument("--device", metavar="DEVICE", help="cpu or cuda (default: an accelerator if there is one)")
    reference.add_argument("--out", type=Path, required=True, metavar="FILE.safetensors", help="the file to write")


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


def _prompts(arguments: argparse.Namespace, rest: list[str]) -> int:
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


def _generate(arguments: argparse.Namespace, rest: list[str]) -> int:
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


def _score(arguments: argparse.Namespace, rest: list[str]) -> int:
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
        better = "lower is more diverse" if metric.lower else "higher is more diverse"
        print(f"{metric.title:<17}{score.value:8.4f}  {ends:<19}  {score.images} images{empty}; {better}")
    for line in scores.unreadable[:5]:
        print(f"cannot be read: {line}")
    if len(scores.unreadable) > 5:
        print(f"cannot be read: {len(scores.unreadable) - 5} more; all are in the scores' file")
    if copies := scores.about["copies"]:
        print(f"{copies} images are there twice (same file, or same bytes of one prompt), and count once")
    print(f"scores: {arguments.out or home(arguments.folder) / FILE}")
    return 0


def _reference(arguments: argparse.Namespace, rest: list[str]) -> int:
    arguments.out = _file("--out", arguments.out, ".safetensors")
    from diffrl.divgen.extractors import check_extractor, defaults_of, load_extractor
    from diffrl.divgen.folders import read_folder
    from diffrl.divgen.reference import RENDERINGS, build_reference, drawn_reference
    from diffrl.records.progress_bar import progress
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


def _report(arguments: argparse.Namespace, rest: list[str]) -> int:
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
