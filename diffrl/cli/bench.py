"""The command `diffrl bench`: the field's benchmarks on a model, by their official files and rules."""

from __future__ import annotations

import argparse
import os
import shutil
import textwrap
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diffrl.cli.arguments import as_the_run, named_rewards
from diffrl.errors import UserError, nearest
from diffrl.records.disk import check_writable

NAMES = ("geneval", "geneval2", "dpg", "compbench", "unigenbench", "drawbench", "parti")  # as in diffrl.bench.facts


def add_bench(add: Callable[..., Any], add_drawing: Callable[..., None]) -> None:
    """Register the command with the command line's `add`; `add_drawing` adds the options of drawing images."""
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
    add_drawing(command, 0)
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
        print(_list(min(shutil.get_terminal_size((80, 24)).columns, 120)))
        return 0
    if arguments.name not in NAMES:
        given = "name a benchmark" if arguments.name is None else f'unknown benchmark "{arguments.name}"'
        raise UserError(f"bench: {given}{nearest(arguments.name or '', NAMES)}")
    from diffrl.bench.facts import BENCHES

    bench = BENCHES[arguments.name]
    for option in ("model", "data", "out"):
        if getattr(arguments, option) is None:
            hint = f": your copy of {bench.source}" if option == "data" else ""
            raise UserError(f"bench: --{option} is missing{hint}")
    common = _drawing(arguments, bench)
    judges = _judges(arguments, rest)
    bench.read(arguments.data)  # before anything heavy is imported
    from diffrl.bench.run import FILE, run_bench
    from diffrl.drawing import Drawing

    entries = {judge: _entry(plugin, given) for judge, (plugin, given) in judges.items()}
    result = run_bench(arguments.name, arguments.data, Drawing(**common), entries, arguments.out)
    if os.environ.get("RANK", "0") == "0":
        from diffrl.report.bench import as_text, write_bench_report

        print(as_text(result))
        page = write_bench_report(result, arguments.out)
        print(f"results: {arguments.out / FILE}; page: {page}")
    return 0


def _entry(plugin: str, given: dict[str, Any]) -> Any:
    from diffrl.rewards.building import Entry

    return Entry(plugin, given)


def _drawing(arguments: argparse.Namespace, bench: Any) -> dict[str, Any]:
    """The arguments of a `Drawing`, checked; where nothing else is asked for, the benchmark's seed and images."""
    from diffrl.config import check_lora, check_model
    from diffrl.resources import find_merge

    checks: dict[str, Callable[[Any], object]] = {"model": check_model, "lora": check_lora, "merge": find_merge}
    for option, check in checks.items():
        if (value := getattr(arguments, option)) is not None:
            try:
                check(value)
            except UserError as error:
                raise UserError(f"--{option}: {error}") from error
    if arguments.out.is_file():
        raise UserError(f'--out: "{arguments.out}" is a file; name a folder')
    check_writable(arguments.out, "--out")
    names = ["model", "seed", "per_prompt", "steps", "limit", "sampler", "guidance_scale", "resolution"]
    common = {name: getattr(arguments, name) for name in [*names, "batch_size", "family", "merge"]}
    common["lora"] = None if arguments.lora is None else str(arguments.lora)
    official = {"seed": bench.seed, "per_prompt": bench.images, "guidance_scale": 1.0}
    common |= {key: value for key, value in official.items() if common[key] is None}
    return as_the_run(common, arguments)


def _judges(arguments: argparse.Namespace, rest: list[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """{judge: (reward, its parameters)}: the benchmark's own, or those that were named."""
    from diffrl.bench.facts import BENCHES
    from diffrl.config import check_plugin

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
        try:
            check_plugin(plugin)
        except UserError as error:
            raise UserError(f"--judge: {error}") from error
    for word in rest:
        if "=" not in word:
            arguments.parser.error(f'unexpected argument "{word}"')
    given = named_rewards([*dict.fromkeys(chosen.values()), *rest], "bench")
    standard = {judge: one.arguments for judge, one in own.items() if chosen.get(judge) == one.reward}
    return {judge: (plugin, {**standard.get(judge, {}), **given[plugin]}) for judge, plugin in chosen.items()}


def _list(width: int) -> str:
    """Every benchmark with its files, images, judges and what these need."""
    from diffrl.bench.facts import BENCHES

    parts = []
    for name, bench in BENCHES.items():
        images = bench.prompts * bench.images
        lines = [
            f"{name}: {bench.title} ({bench.citation})",
            f"  files    {bench.source} ({bench.licence})",
            f"  images   {images:,}: {bench.images} of each of {bench.prompts:,} prompts, seed {bench.seed}",
        ]
        if bench.forwards:
            lines.append(f"  asked    {bench.forwards:,} times of the judges, for each model")
        for judge, one in bench.judges.items():
            lines += [f"  judge    {judge}: {one.needs}", f"           officially {one.official}"]
        if not bench.judges:
            lines.append("  judge    any rewards, by --judge; `diffrl rewards show NAME` has their needs")
        lines += [f"  mind     {remark}" for remark in bench.remarks]
        parts.append("\n".join(textwrap.fill(line, width, subsequent_indent=" " * 11) for line in lines))
    clock = (
        "How long it takes depends on the model, its steps and the machine: try `--limit 16` first; bench.json has the "
        "seconds of drawing and of judging. Judges are loaded one after another, after the images are drawn."
    )
    return "\n\n".join([*parts, textwrap.fill(clock, width)])
