"""What `diffrl --help` shows first: everyday commands, by what they are for; `diffrl lab` lists the others."""

from __future__ import annotations

import argparse

FIRST = {
    "start": {
        "demo": "train the shipped model on this machine's CPU, in minutes",
        "configs": "find a recipe, by words",
        "init": "write a config of your own",
        "doctor": "does a config fit into memory, and how long does it take?",
    },
    "train and look": {
        "train": "train a LoRA, or go on with a run",
        "watch": "a live page of a run",
        "sample": "draw images of prompts, with and without a LoRA",
        "compare": "compare runs: a table here, or a page",
    },
    "rewards and diversity": {
        "rewards": "list, write, check, audit, fit or serve rewards",
        "divgen": "measure the diversity of a model, or of any folder of pictures",
    },
    "share": {
        "publish": "write a folder for the hub: LoRA, model card, gallery",
        "export": "merge a LoRA into the model's weights, or write it for ComfyUI",
    },
}
END = """options: -h, --help, --version

`diffrl lab` lists the other commands; `diffrl COMMAND --help` explains one."""


def first(parser: argparse.ArgumentParser) -> str:
    """The first help: at most twelve commands, a line each."""
    lines = ["usage: diffrl COMMAND ...", "", str(parser.description), ""]
    for title, commands in FIRST.items():
        lines += [f"{title}:", *(_line(name, text) for name, text in commands.items()), ""]
    return "\n".join([*lines, END, ""])


def others(parser: argparse.ArgumentParser) -> str:
    """The commands that the first help leaves out: measuring, searching, trials, lists, tools."""
    shown = {name for commands in FIRST.values() for name in commands}
    found = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    rest = [_line(one.dest, str(one.help)) for one in found._choices_actions if one.dest not in shown]
    usage = "usage: diffrl COMMAND ..., or diffrl lab COMMAND ..."
    return "\n".join([usage, "", *rest, "", "`diffrl COMMAND --help` explains one, with examples.", ""])


def _line(name: str, text: str, width: int = 80) -> str:
    """A command and its summary, on one line of a terminal."""
    short = text.split(";")[0]
    return f"  {name:<12}{short if len(short) <= width - 14 else short[: width - 18].rsplit(' ', 1)[0] + ' ...'}"
