"""The command `diffrl bench`: the field's benchmarks on a model, by their official files and rules."""

from __future__ import annotations

import argparse
import os
import shutil
import textwrap
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diffrl.cli.arguments import at, drawing_of, named_rewards, only_parameters, settled
from diffrl.cli.commands import add_arguments
from diffrl.errors import UserError, nearest
from diffrl.records.disk import check_writable

AFTER = "diffrl divgen"  # in the list of commands
RATE = 2e14  # operations a second that doctor, too, turns into minutes: of a large accelerator in bf16, not measured
NAMES = ("geneval", "geneval2", "dpg", "compbench", "unigenbench", "drawbench", "parti")  # as in .facts


def add(add: Callable[..., Any]) -> None:
    """Register the command with the command line's `add`."""
    command = add(
        "bench",
        _bench,
        "run a published benchmark on a model: its table, as text, JSON and a page",
        "diffrl bench --list",
        "diffrl bench parti --model playground --lora runs/nft/lora --data parti \\\n"
        "    --judge clip,artefact --limit 64 --out parti-nft",
        "diffrl bench geneval2 --model MODEL --data GenEval2 --steps 28 \\\n"
        "    --guidance-scale 4.5 vlm.server=http://localhost:8000/v1 --out geneval2",
        "accelerate launch -m diffrl bench geneval --model MODEL \\\n    --data geneval --out geneval-base",
        words_anywhere=True,
    )
    usage = "diffrl bench NAME --model MODEL --data FOLDER --out DIR [options]"
    command.usage = f"{usage}\n                    [JUDGE.KEY=VALUE ...]\n       diffrl bench --list"
    command.add_argument("name", nargs="?", metavar="NAME", help=", ".join(NAMES))
    command.add_argument("--list", action="store_true", help="what each benchmark is and needs")
    add_arguments(command, {"drawing of a benchmark": "shared"})
    text = "your copy of the official repository (or the folder with its files); `--list` says which"
    command.add_argument("--data", type=Path, metavar="FOLDER", help=text)
    text = (
        "the judge instead of the default: NAME or path/to/file.py:CLASS; JUDGE=NAME if a benchmark has several, "
        "separated by commas; parameters stand anywhere as NAME.KEY=VALUE"
    )
    command.add_argument("--judge", default="", metavar="A,B,C", help=text)
    text = "folder of the images, answers, bench.json and report.html; an interrupted call continues in it"
    command.add_argument("--out", type=Path, metavar="DIR", help=text)


def _bench(arguments: argparse.Namespace, rest: list[str]) -> int:
    if arguments.list:
        work = None if arguments.model is None else _work(arguments)
        print(_list(min(shutil.get_terminal_size((80, 24)).columns, 120), work))
        return 0
    if arguments.name not in NAMES:
        given = "name a benchmark" if arguments.name is None else f'unknown benchmark "{arguments.name}"'
        raise UserError(f"bench: {given}{nearest(arguments.name or '', NAMES)}")
    from .facts import BENCHES

    bench = BENCHES[arguments.name]
    for option in ("model", "data", "out"):
        if getattr(arguments, option) is None:
            hint = f": your copy of {bench.source}" if option == "data" else ""
            raise UserError(f"bench: --{option} is missing{hint}")
    drawing = drawing_of(arguments)
    drawing.pop("out")
    check_writable(arguments.out, "--out")
    official = {"seed": bench.seed, "per_prompt": bench.images}  # where nothing else is asked for
    drawing = settled(drawing | {key: value for key, value in official.items() if drawing[key] is None})
    judges = _judges(arguments, rest)
    bench.read(arguments.data)  # before anything heavy is imported
    from diffrl.drawing import Drawing
    from diffrl.rewards.building import Entry

    from .run import FILE, run_bench

    entries = {judge: Entry(plugin, given) for judge, (plugin, given) in judges.items()}
    result = run_bench(arguments.name, arguments.data, Drawing(**drawing), entries, arguments.out)
    if os.environ.get("RANK", "0") == "0":
        from .page import as_text, write_bench_report

        print(as_text(result))
        page = write_bench_report(result, arguments.out)
        print(f"results: {arguments.out / FILE}; page: {page}")
    return 0


def _judges(arguments: argparse.Namespace, rest: list[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """{judge: (reward, its parameters)}: the benchmark's own, or those that were named."""
    from diffrl.config import check_plugin

    from .facts import BENCHES

    own = BENCHES[arguments.name].judges
    there = {judge: all(map(find_spec, one.imports)) for judge, one in own.items()}
    chosen = {judge: one.reward for judge, one in own.items() if one.reward is not None and there[judge]}
    for word in filter(None, (word.strip() for word in arguments.judge.split(","))):
        judge, equals, plugin = word.rpartition("=")
        if not equals:
            judge = next(iter(own)) if len(own) == 1 else plugin.rpartition(":")[2] if not own else ""
        if own and judge not in own:
            raise UserError(f'--judge: "{word}": which of {", ".join(own)}? Write {next(iter(own))}={plugin}')
        chosen[judge] = plugin
    if not chosen:
        raise UserError("--judge: name at least one reward, such as pickscore,hpsv2; `diffrl rewards list` shows them")
    for plugin in chosen.values():
        at("--judge", check_plugin, plugin)
    only_parameters(arguments, rest)
    given = named_rewards([*dict.fromkeys(chosen.values()), *rest], "bench")
    standard = {judge: one.arguments for judge, one in own.items() if chosen.get(judge) == one.reward}
    return {judge: (plugin, {**standard.get(judge, {}), **given[plugin]}) for judge, plugin in chosen.items()}


def _work(arguments: argparse.Namespace) -> tuple[float, str]:
    """Floating-point operations of one image, text encoders left out, and in words of what; nothing is loaded."""
    from diffrl.config import Config, check_model
    from diffrl.drawing import Drawing
    from diffrl.memory.fit import GIB
    from diffrl.memory.meta_modules import bytes_of, counting, meta_backbone
    from diffrl.memory.step_profile import StepProfile

    at("--model", check_model, arguments.model)
    drawn = {"resolution": arguments.resolution, "batch_size": arguments.batch_size}
    config = Config.model_validate({"model": arguments.model, "family": arguments.family, "rewards": {"jpeg": {}},
                                    "rollout": {**drawn, "groups": arguments.batch_size, "group_size": 2}})  # fmt: skip
    backbone = meta_backbone(config)
    asked = {key: getattr(arguments, key) for key in ("model", "steps", "guidance_scale", "merge")}
    job = Drawing(**asked).settled(backbone)
    steps, guidance = job.steps or 0, job.guidance_scale or 1.0
    phases = StepProfile(backbone, config)
    with counting(backbone):
        forward = phases.count(partial(phases.sample, arguments.batch_size, guidance), [])
        decoding = phases.count(phases.decode, [])
    weights = sum(map(bytes_of, (backbone.network, backbone.vae, *backbone.text_encoders)))
    text = f"{steps} steps, guidance scale {guidance:g}; {weights / GIB:.1f} GiB of weights"
    text += f" and {max(forward.peak, decoding.peak) / GIB:.1f} GiB for batches of {arguments.batch_size}"
    return steps * forward.operations / arguments.batch_size + decoding.operations / phases.chunk, text


def _list(width: int, work: tuple[float, str] | None = None) -> str:
    """Every benchmark with its files, images, judges and what these need; `work`: of an image, as `_work` gives it."""
    from .facts import BENCHES

    parts = []
    for name, bench in BENCHES.items():
        images = bench.prompts * bench.images
        asked = f"{bench.forwards:,} times" if bench.forwards else "as many as the file has questions, of every image"
        judging = f", {bench.forwards / 60:,.0f} of judging for each that an answer takes" if bench.forwards else ""
        lines = [
            f"{name}: {bench.title} ({bench.citation})",
            f"  files    {bench.source} ({bench.licence})",
            f"  images   {images:,}: {bench.images} of each of {bench.prompts:,} prompts, seed {bench.seed}",
            f"  asked    of the judges: {asked}, for each model",
            f"  minutes  {images / 60:,.0f} of drawing for each second that an image takes{judging}",
        ]
        if work is not None:
            total = images * work[0]
            text = f"{total / 1e15:.3g} PFLOP, {total / RATE / 60:.3g} minutes at {RATE / 1e12:g} TFLOP/s"
            lines.append(f"  draw     {text} (counted; {work[1]})")
        for judge, one in bench.judges.items():
            lines += [f"  judge    {judge}: {one.needs}", f"           officially {one.official}"]
        if not bench.judges:
            lines.append("  judge    any rewards, by --judge; `diffrl rewards show NAME` has their needs")
        lines += [f"  mind     {remark}" for remark in bench.remarks]
        parts.append("\n".join(textwrap.fill(line, width, subsequent_indent=" " * 11) for line in lines))
    clock = (
        "How long it takes depends on the model, its steps and the machine: a call with `--limit 16` ends with the "
        "minutes that all prompts take at its pace. With --model (--steps, --guidance-scale, --resolution) this list "
        "counts the arithmetic of drawing. "
        "Judges are loaded one after another: once before anything is drawn, to know that they are there, and after it."
    )
    return "\n\n".join([*parts, textwrap.fill(clock, width)])
