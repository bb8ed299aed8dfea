"""The commands `sample`, `evaluate` and `draw-set`: images of a model, shown, scored, or kept to be trained on."""

from __future__ import annotations

import argparse
import os

from diffrl.cli.arguments import drawing_of, named_rewards, only_parameters, plugins_of, rewards_of, settled
from diffrl.errors import UserError
from diffrl.records.disk import check_writable
from diffrl.tools.outputs import out_file


def draw_images(arguments: argparse.Namespace, rest: list[str]) -> int:
    common = drawing_of(arguments)
    check_writable(arguments.out, "--out")
    wanted = rewards_of(arguments, rest, "sample") if arguments.rewards is not None or rest else {}
    from diffrl.drawing import sample
    from diffrl.report.drawn import write_drawn

    drawn = sample(rewards=wanted, base=_base(arguments), **settled(common))
    print(f"images: {arguments.out}; all of them at a glance: {arguments.out / 'grid.png'}")
    print(f"page: {write_drawn(arguments.out, drawn)}")
    return 0


def score_model(arguments: argparse.Namespace, rest: list[str]) -> int:
    common = drawing_of(arguments)
    common["out"] = arguments.out = out_file(arguments.out, "--out", "scores.json")
    wanted = rewards_of(arguments, rest, "evaluate")
    from diffrl.drawing import evaluate

    result = evaluate(rewards=wanted, base=_base(arguments), **settled(common))
    print(result)
    print(f"scores: {arguments.out}")
    return 0


def draw_pictures(arguments: argparse.Namespace, rest: list[str]) -> int:
    given = drawing_of(arguments)
    check_writable(arguments.out, "--out")
    names = plugins_of(arguments.rewards, "--rewards")
    only_parameters(arguments, rest)
    wanted = named_rewards([*names, *rest], "draw-set")
    from diffrl.image_sets.draw import draw_set

    count = draw_set(rewards=wanted, **settled(given))
    if os.environ.get("RANK", "0") == "0":
        print(f"{count} pictures were drawn; train on them with image_set.source={arguments.out}")
    return 0


def _base(arguments: argparse.Namespace) -> bool:
    if arguments.base and arguments.lora is None:
        raise UserError("--base: compares with the model without its LoRA; name one with --lora")
    return bool(arguments.base)
