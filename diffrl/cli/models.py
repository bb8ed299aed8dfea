"""The command `diffrl models`: the support table, and the checks of a family."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from diffrl.cli.arguments import resolution
from diffrl.cli.commands import subcommand
from diffrl.errors import UserError, nearest


def add(add: Callable[..., Any]) -> None:
    """Register the command and its actions with the command line's `add`."""
    text = "supported models: list them, show one, or check a family against diffusers' plain pipeline"
    command = add("models", None, text, "diffrl models list", "diffrl models check FOLDER")
    action = partial(subcommand, command.add_subparsers(metavar="list|show|check", required=True))

    every = action("list", _list, "list the supported models", "diffrl models list")
    every.add_argument("--markdown", action="store_true", help="as a Markdown table")
    show = action("show", _show, "what is known of a family", "diffrl models show sd35")
    show.add_argument("name", metavar="NAME", help="a pipeline class or a model of `diffrl models list`")
    check = action(
        "check",
        _check,
        "check a family against diffusers' plain pipeline",
        "diffrl models check path/to/tiny-model --family my_family.py:MyFamily --resolution 64",
        "diffrl models check examples/families/auraflow.py:AuraFlow",
    )
    text = "a model's folder or hub id; or a family's file, whose function tiny(folder) makes a tiny random pipeline"
    check.add_argument("model", metavar="FOLDER|FILE.py:CLASS", help=text)
    check.add_argument("--family", metavar="FILE.py:CLASS", help="a family of your own")
    text = "side of the pictures, or WIDTHxHEIGHT, in pixels (default: the model's own)"
    check.add_argument("--resolution", type=resolution, metavar="PIXELS", help=text)
    check.add_argument("--only", metavar="CHECK,...", help="these checks alone")


def _list(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.conformance.table import markdown, overview

    if arguments.markdown:
        print(markdown(), end="")
        return 0
    print(overview(shutil.get_terminal_size((80, 24)).columns))
    return 0


def _show(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.conformance.table import shown

    print(shown(arguments.name))
    return 0


def _check(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.conformance.check import CHECKS, Subject

    model: str = arguments.model
    only = list(CHECKS) if arguments.only is None else arguments.only.split(",")
    for name in only:
        if name not in CHECKS:
            raise UserError(f'--only: no check "{name}"{nearest(name, CHECKS)}')
    if ".py:" in model and not Path(model).is_dir():
        return _check_file(arguments, model, only)
    return _report(Subject(model, arguments.resolution, family=arguments.family), only)


def _check_file(arguments: argparse.Namespace, family: str, only: list[str]) -> int:
    """A family that brings its tiny pipeline along: `tiny(folder)` beside the class; it returns a picture's side."""
    from diffrl.conformance.check import Subject
    from diffrl.plugins import import_file
    from diffrl.policy.registry import find_family

    if arguments.family is not None:
        raise UserError(f"--family: {family} names the family already; give it with a model's folder")
    find_family("", family)
    make = getattr(import_file(Path(family.rpartition(":")[0]), "family"), "tiny", None)
    if make is None:
        raise UserError(f'{family}: the file has no function "tiny(folder)"; name a folder, and this as --family')
    with tempfile.TemporaryDirectory() as folder:
        side = make(Path(folder) / "model")
        return _report(Subject(f"{folder}/model", arguments.resolution or side, family=family), only)


def _report(subject: Any, only: list[str]) -> int:
    from diffrl.conformance.check import run_checks

    subject.policy()  # a model that cannot be read is bad input, and no finding
    failed = 0
    for finding in run_checks(subject, only):
        failed += not finding.passed
        print(f"{'ok' if finding.passed else 'FAILED':<7}{finding.check:<14}{finding.text}", flush=True)
    print(f"{len(only) - failed} of {len(only)} checks passed")
    return 1 if failed else 0
