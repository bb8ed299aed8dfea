"""The commands around a training: `headroom` before it, `replay` and `dial` after it."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diffrl.cli.arguments import at, positive_number, whole_number
from diffrl.errors import UserError
from diffrl.records.disk import check_writable, write_json
from diffrl.resources import file_of_run
from diffrl.tools.outputs import out_file

AFTER = "diffrl publish"  # in the list of commands


def add(add: Callable[..., Any]) -> None:
    """Register the commands with the command line's `add`."""
    command = add(
        "headroom",
        _headroom,
        "before GPU hours: can a config's rewards be trained on, and how much is there to gain?",
        "diffrl headroom playground/nft",
        "diffrl headroom my.yaml rewards.clip.weight=2 --out headroom.json",
        words_anywhere=True,
    )
    command.usage = "diffrl headroom CONFIG [section.key=value ...] [--out FILE.json]"
    text = "a YAML file or a shipped config, then overrides; one epoch's images are drawn, and nothing is trained"
    command.add_argument("words", nargs="*", metavar="CONFIG [section.key=value ...]", help=text)
    command.add_argument("--out", type=Path, metavar="FILE.json", help="everything that was measured")

    command = add(
        "replay",
        _replay,
        "draw a training image again, with its scores, advantage, gate and share of the gradient",
        "diffrl replay runs/my 12 137",
    )
    _add_folders(command, "replay")
    command.add_argument("epoch", metavar="EPOCH", type=whole_number(1), help="as metrics.jsonl counts, from 1")
    text = "its number in the epoch, from 0: image 137 of groups of 16 is member 9 of prompt 8"
    command.add_argument("image", metavar="IMAGE", type=whole_number(0, 10**9), help=text)

    command = add(
        "dial",
        _dial,
        "find the best LoRA without an alarm, over strengths and checkpoints, and write it",
        "diffrl dial runs/my",
        "diffrl dial runs/my --judge playground/compositional/test --diversity 0.75",
    )
    _add_folders(command, "dial")
    text = "prompts that the point is judged on (default: the rest of prompts.test)"
    command.add_argument("--judge", metavar="FILE|SET", help=text)
    text = "how many it is chosen on, and judged on (default: evaluate.prompts of the config)"
    command.add_argument("--prompts", type=whole_number(2), metavar="N", help=text)
    text = "share of the base's diversity that a point keeps at least (default: the run's guard.diversity)"
    command.add_argument("--diversity", type=_share, metavar="SHARE", help=text)


def _add_folders(command: argparse.ArgumentParser, name: str) -> None:
    command.add_argument("run", metavar="RUN", type=Path, help="the folder of a run")
    command.add_argument("--out", type=Path, metavar="DIR", help=f"where to write (default: RUN/{name})")


def _folder(arguments: argparse.Namespace, name: str) -> Path:
    """Where it is written; UserError for a folder that is no run's, and for an --out that cannot be."""
    file_of_run(arguments.run, "config.yaml", name)
    out: Path = arguments.out or arguments.run / name
    if out.resolve() == arguments.run.resolve():
        raise UserError(f'--out: "{out}" is the run\'s own folder; name another')
    check_writable(out, "--out")
    return out


def _share(text: str) -> float:
    if (value := positive_number(text)) > 1:
        raise argparse.ArgumentTypeError(f'expected a share above 0 and up to 1, got "{text[:40]}"')
    return value


def _headroom(arguments: argparse.Namespace, rest: list[str]) -> int:
    words = [*arguments.words, *rest]
    if not words:
        raise UserError("headroom: no CONFIG; name a YAML file or a shipped config such as playground/nft")
    if arguments.out is not None:
        arguments.out = out_file(arguments.out, "--out", "headroom.json")
    from diffrl.config import load_config

    config = load_config(words[0], words[1:])
    from .headroom import as_text, headroom

    result = headroom(config)
    if result is None:  # another process says it
        return 0
    print(as_text(result))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(arguments.out, {"config": words[0], "overrides": words[1:], **result})
        print(f"all of it: {arguments.out}")
    return 0


def _replay(arguments: argparse.Namespace, rest: list[str]) -> int:
    out = _folder(arguments, "replay")
    from .replay import replay
    from .replay_page import as_text, write

    result = replay(arguments.run, arguments.epoch, arguments.image, report=print)
    print(as_text(result.facts))
    for path in write(result.facts, result.image, result.group, out):
        print(f"written    {path}")
    return 0


def _dial(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.prompts import check_source

    out = _folder(arguments, "dial")
    if arguments.judge is not None:
        at("--judge", check_source, arguments.judge)
    from .dial import dial, sentence

    words = {name: getattr(arguments, name) for name in ("judge", "prompts", "diversity")}
    result = dial(arguments.run, out, **words, report=lambda title: print(f"measured: {title}", flush=True))
    print(_points(result))
    print(textwrap.fill(sentence(result), 80))
    chosen = result["points"][result["chosen"]]
    print(f"LoRA: {out / 'lora'}" if chosen["strength"] else "no LoRA: the base model is the healthy point")
    print(f"page: {out / 'dial.html'}")
    return 0


def _points(result: Mapping[str, Any]) -> str:
    """The points on the console: the gain of what is trained, and the values on which an alarm is."""
    lines = [f"{'':<2}{'point':<16}{'gain':>9}{'diversity':>11}  alarms"]
    for i, point in enumerate(result["points"]):
        mark = "> " if i == result["chosen"] else "  "
        alarms = ", ".join(name.rpartition("/")[2] for name in point["alarms"]) or "-"
        alarms = alarms if len(alarms) <= 40 else f"{alarms[:36]} ..."
        diversity = point["values"]["diversity"]["mean"]
        lines.append(f"{mark}{point['title']:<16}{point['gain']:>+9.3f}{diversity:>11.3f}  {alarms}")
    return "\n".join(lines)
