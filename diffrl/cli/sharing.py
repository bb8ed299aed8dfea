"""The commands `demo` (some minutes on two CPU cores) and `publish` (a trained LoRA for others)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffrl.cli.arguments import check_push, whole_number
from diffrl.cli.interrupted import loading, resumable


def add(add: Callable[..., Any]) -> None:
    """Register the commands with the command line's `add`."""
    command = add(
        "demo",
        demo,
        "train the shipped model for some minutes on this machine's CPU, and name what to look at",
        "diffrl demo",
        "diffrl demo epochs=5",
        words_anywhere=True,
    )
    command.usage = "diffrl demo [section.key=value ...]"
    text = "changes to the shipped config playground/demo; the run's folder is runs/demo, or the next that is free"
    command.add_argument("words", nargs="*", metavar="section.key=value", help=text)

    command = add(
        "publish",
        publish_run,
        "write a folder for the hub: LoRA, model card, gallery, results; --push sends it",
        "diffrl publish runs/demo",
        "diffrl publish runs/my --lora runs/my/dial",
        "diffrl publish runs/my --lora runs/my/healthy --push OWNER/NAME",
    )
    command.add_argument("run", metavar="RUN_DIR", type=Path, help="the folder of a run")
    command.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: RUN_DIR/publish)")
    text = "another LoRA than the newest, such as RUN_DIR/healthy, RUN_DIR/dial"
    command.add_argument("--lora", type=Path, metavar="DIR", help=text)
    text = (
        "held-out prompts that base model and LoRA are measured on (default: evaluate.prompts of the config); 0: none"
    )
    command.add_argument("--prompts", type=whole_number(0), metavar="N", help=text)
    command.add_argument("--push", metavar="OWNER/NAME", help="send the folder to the hub, too")


def demo(arguments: argparse.Namespace, rest: list[str]) -> int:
    words = [*arguments.words, *rest]
    folder = next((word.removeprefix("run_dir=") for word in reversed(words) if word.startswith("run_dir=")), None)
    if folder is None:
        folder = str(_free(Path("runs/demo")))
        words.append(f"run_dir={folder}")
    loading()
    from diffrl.api import Run, train

    if code := resumable(lambda: folder, lambda: train("playground/demo", *words)):
        return code
    run = Run(folder)
    print(
        f"Draw with it:   diffrl sample playground --lora {run.lora} --prompts {_prompts(run)} --limit 16 --out images"
    )
    print(f"Share it:       diffrl publish {run.folder}")
    print("Another method: diffrl train playground/grpo; all keys: diffrl train --help-config all")
    return 0


def _free(folder: Path) -> Path:
    """`folder`, or `folder-2`, ...: the first that holds no run."""
    from diffrl.resources import holds_run

    number, candidate = 1, folder
    while holds_run(candidate):
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def _prompts(run: Any) -> str:
    source = run.config.prompts.test
    return source if isinstance(source, str) else next(iter(source))


def publish_run(arguments: argparse.Namespace, rest: list[str]) -> int:
    loading()
    from diffrl.lora_files import find_lora
    from diffrl.resources import file_of_run

    file_of_run(arguments.run, "config.yaml", "publish")
    if arguments.push is not None:
        check_push(arguments.push)
    find_lora(arguments.lora or arguments.run / "lora")
    from diffrl.sharing import publish, push

    folder = publish(arguments.run, arguments.out, lora=arguments.lora, prompts=arguments.prompts)
    print(f"folder: {folder}")
    if arguments.push is not None:
        print(f"hub: {push(folder, arguments.push)}")
    return 0
