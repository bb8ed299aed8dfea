"""The command `diffrl models`: the support table, and the checks of a family."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from diffrl.cli.arguments import print_list
from diffrl.errors import UserError, nearest


def list_models(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.conformance import table

    print_list(table, arguments)
    return 0


def show_model(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.conformance.table import shown

    print(shown(arguments.name))
    return 0


def check_family(arguments: argparse.Namespace, rest: list[str]) -> int:
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
    from diffrl.policy.registry import find_family
    from diffrl.user_files import import_file

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
