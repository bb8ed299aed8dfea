"""`diffrl prompts`: the shipped prompt sets, and what any source of prompts holds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

from diffrl.cli.arguments import whole_number
from diffrl.cli.commands import subcommand
from diffrl.prompt_sets import SETS, SPLITS, rows

QUOTES = set("\"'“”„«»‹›‘’‚「」『』`＂")  # without one of them no prompt quotes a text


def add(add: Callable[..., Any]) -> None:
    """The command `prompts` with its own commands."""
    prompts = add("prompts", None, "prompt sets: list them, show what is in one", "diffrl prompts list")
    commands = prompts.add_subparsers(metavar="COMMAND", required=True)
    subcommand(commands, "list", _list, "list the shipped prompt sets", "diffrl prompts list")
    show = subcommand(
        commands,
        "show",
        _show,
        "print prompts of a set, a file or a data set",
        "diffrl prompts show geneval/train --limit 20",
        "diffrl prompts show my.jsonl --metadata",
        "diffrl prompts show hub:OWNER/NAME:train:prompt",
    )
    text = "a set, FILE.txt, FILE.jsonl or hub:OWNER/NAME[:split[:column]]"
    show.add_argument("source", metavar="NAME", help=text)
    show.add_argument("--limit", type=whole_number(1), default=20, metavar="N", help="how many (default 20)")
    show.add_argument("--metadata", action="store_true", help="one JSON object a line, as in a .jsonl file")


def _list(arguments: argparse.Namespace, rest: list[str]) -> int:
    print(f"{'set':<16}{'train':>7}{'test':>7}  content")
    for name, content in SETS.items():
        sizes = "".join(f"{len(rows(name, split)):>7}" for split in SPLITS)
        print(f"{name:<16}{sizes}  {content}")
    print("\nUse them as NAME/train and NAME/test wherever a prompt file can stand. More sources:")
    print("playground/SUBSET/SPLIT (the playground), FILE.txt, FILE.jsonl, hub:OWNER/NAME[:split[:column]] (the hub)")
    print("and DivGenBench: diffrl divgen prompts")
    return 0


def _show(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.prompts import load_prompts

    prompts = load_prompts(arguments.source)
    for prompt in prompts[: arguments.limit]:
        line = json.dumps({"prompt": prompt.text, **prompt.metadata}, ensure_ascii=False)
        print(line if arguments.metadata else prompt.text + _target(prompt.text, prompt.metadata))
    if len(prompts) > arguments.limit and not arguments.metadata:
        print(f"... {len(prompts)} prompts in all")
    return 0


def _target(prompt: str, metadata: Mapping[str, Any]) -> str:
    """What the reward for texts looks for in a picture of the prompt, where that is something."""
    from diffrl.rewards.registry import exists, load_class

    if not exists("ocr") or not ("text" in metadata or QUOTES & {*prompt}):
        return ""
    target = getattr(load_class("ocr"), "target", None)
    texts = target(prompt, metadata) if target is not None else []
    return f"   [text: {', '.join(texts)}]" if texts else ""
