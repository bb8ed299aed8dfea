"""The command `diffrl rewards audit`: which wrong images a reward ranks above true ones."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffrl.cli.arguments import named_rewards, whole_number
from diffrl.errors import UserError
from diffrl.records.disk import check_writable

AFTER = "diffrl rewards check"  # in the list of commands


def add(action: Callable[..., Any]) -> None:
    """Register it with the actions of `diffrl rewards`."""
    audit = action(
        "audit",
        _audit,
        "red-team a reward: which wrong images outrank true ones?",
        "diffrl rewards audit preference --judge playground --out audits/preference",
        "diffrl rewards audit clip clip.model=ViT-H-14 clip.pretrained=laion2b_s32b_b79k --images photos --out audit",
        words_anywhere=True,
    )
    audit.usage = "diffrl rewards audit NAME [parameter=value ...] --out DIR [options]"
    text = (
        "a reward (or path/to/file.py:Class), and parameters of its constructor; of the judge as JUDGE.parameter=value"
    )
    audit.add_argument("words", nargs="*", metavar="NAME [parameter=value ...]", help=text)
    text = "a trusted reward, which decides which of a model's images are worse than the true one"
    audit.add_argument("--judge", metavar="NAME", help=text)
    text = "an image set whose images show their prompts (default: renderings of the playground)"
    audit.add_argument("--images", metavar="SET", help=text)
    text = "the playground's prompts (default playground/all/test)"
    audit.add_argument("--prompts", metavar="SET", help=text)
    text = "the model of best-of-N and of the ascent on latents (default: playground; with --images: none)"
    audit.add_argument("--model", metavar="MODEL", help=text)
    text = "also take images from a short training on the reward: this many epochs of playground/nft"
    audit.add_argument("--train", type=whole_number(1, 10**4), metavar="EPOCHS", default=0, help=text)
    audit.add_argument("--limit", type=whole_number(2), metavar="N", default=64, help="prompts (default 64)")
    text = "side of the pictures of --images, in pixels (default 512)"
    audit.add_argument("--resolution", type=whole_number(32, 4096), metavar="PIXELS", default=512, help=text)
    text = "of everything random (default 0)"
    audit.add_argument("--seed", type=whole_number(0, 2**63 - 1), metavar="S", default=0, help=text)
    audit.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder of the page, images and JSON")


def _audit(arguments: argparse.Namespace, rest: list[str]) -> int:
    from diffrl.config import check_model, check_plugin

    words = [*arguments.words, *rest]
    if not words or "=" in words[0]:
        raise UserError("rewards audit: name a reward; `diffrl rewards list` shows them")
    if unknown := [word for word in words[1:] if "=" not in word]:
        raise UserError(f'rewards audit: one reward at a time, and "{unknown[0]}" is a second')
    if arguments.images is not None and arguments.prompts is not None:
        raise UserError("--prompts: the set of --images has its own prompts; give one of the two")
    if arguments.train and arguments.judge is None:
        raise UserError("--train: a judge must say which images of the trained model are wrong; name one with --judge")
    if arguments.judge == words[0]:
        raise UserError(f'--judge: "{arguments.judge}" is the audited reward; name another one as the judge')
    names = list(filter(None, (words[0], arguments.judge)))
    for name in names:
        check_plugin(name)
    model = arguments.model or ("playground" if arguments.images is None else None)
    if model is not None:
        check_model(model)
    check_writable(arguments.out, "--out")
    wanted = named_rewards([*names, *words[1:]], "rewards audit")
    from .run import Audit, audit

    given = {name: getattr(arguments, name) for name in ("judge", "images", "limit", "resolution", "seed", "train")}
    given |= {"prompts": arguments.prompts or "playground/all/test", "judge_arguments": wanted.get(arguments.judge, {})}
    result = audit(Audit(names[0], wanted[names[0]], model=model, **given), arguments.out)
    for one in sorted(result["exploits"], key=lambda one: -one["share"]):
        print(f"{one['name']:<28}{one['share']:.2f}  ({one['low']:.2f} to {one['high']:.2f})")
    for look in result["looks"][:3]:
        print(f"prefers {look['fact']} {look['value']}: {look['points']:+.3g}, {look['share']:.2f} of a right fact")
    plain = f"{result['score_without_gradients']:.2f}, {result['worst_without_gradients']}"
    print(f"score {result['score']:.2f}, {result['worst']}; without gradients {plain}")
    print(f"page: {arguments.out / 'report.html'}")
    return 0
