"""`diffrl prompts`: the shipped prompt sets, and what any source of prompts holds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from diffrl.plugins import installed, load

QUOTES = set("\"'“”„«»‹›‘’‚「」『』`＂")  # without one of them no prompt quotes a text


def list_sets(arguments: argparse.Namespace, rest: list[str]) -> int:
    print(f"{'set':<16}{'train':>7}{'test':>7}  content")
    for name in installed("prompt set"):
        known = load("prompt set", name)
        if sources := getattr(known, "sources", ()):
            sizes = "".join(f"{len(known.prompts(source)):>7}" for source in sources)
            print(f"{name:<16}{sizes}  {known.about}")
    print("\nUse them as NAME/train and NAME/test wherever a prompt file can stand. More sources:")
    print("playground/SUBSET/SPLIT (the playground), FILE.txt, FILE.jsonl, hub:OWNER/NAME[:split[:column]] (the hub)")
    print("and DivGenBench: diffrl divgen prompts")
    return 0


def show_prompts(arguments: argparse.Namespace, rest: list[str]) -> int:
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
    from diffrl.rewards.registry import available, load_class

    if "ocr" not in available() or not ("text" in metadata or QUOTES & {*prompt}):
        return ""
    target = getattr(load_class("ocr"), "target", None)
    texts = target(prompt, metadata) if target is not None else []
    return f"   [text: {', '.join(texts)}]" if texts else ""
