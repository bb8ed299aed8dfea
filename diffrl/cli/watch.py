"""The command `diffrl watch`: a run's live page."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffrl.cli.arguments import need, whole_number
from diffrl.errors import UserError, nearest


def add(add: Callable[..., Any]) -> None:
    """Register the command with the command line's `add`."""
    text = "a live page of a run: curves, the newest groups, samples over time; takes votes"
    example = "diffrl watch runs/nft --host 0.0.0.0 --token-file ~/.secrets/token"
    watch = add("watch", _watch, text, "diffrl watch runs/nft", example)
    watch.add_argument(
        "run", metavar="RUN_DIR", type=Path, help="the folder of a run, which may run on another machine"
    )
    text = "address to listen on (default 127.0.0.1: this machine alone)"
    watch.add_argument("--host", default="127.0.0.1", metavar="H", help=text)
    text = "port (default 8800; 0: a free one)"
    watch.add_argument("--port", type=whole_number(0, 65535), default=8800, metavar="P", help=text)
    text = "file with the token that the page asks for; needed if other machines can reach it"
    watch.add_argument("--token-file", metavar="FILE", help=text)


def _watch(arguments: argparse.Namespace, rest: list[str]) -> int:
    run: Path = arguments.run
    if not run.is_dir():
        folders = [folder.name for folder in run.parent.iterdir() if folder.is_dir()] if run.parent.is_dir() else []
        raise UserError(f'watch: no folder "{run}"{nearest(run.name, folders)}')
    if not any((run / name).is_file() for name in ("config.yaml", "metrics.jsonl")):
        raise UserError(f'watch: "{run}" is not a run\'s folder: it has neither config.yaml nor metrics.jsonl')
    need("watch", "serve", "fastapi", "uvicorn")
    from diffrl.serving.client import find_token
    from diffrl.watch.server import Settings, watch

    token = None if arguments.token_file is None else find_token(arguments.token_file, trusted=True)

    def ready(url: str) -> None:
        guard = "asks for the token" if token is not None else "this machine alone"
        print(f"{run} on {url} ({guard}); Ctrl-C ends it", flush=True)

    watch(Settings(run, arguments.host, token), arguments.port, ready)
    return 0
