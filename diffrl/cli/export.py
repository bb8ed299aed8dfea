"""The command `export`: merged weights, or ComfyUI's file, of a run's LoRA and others."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffrl.cli.arguments import at, check_push, number_between, positive_number, whole_number
from diffrl.errors import UserError
from diffrl.lora_files import weighted
from diffrl.records.outputs import out_file


def add(add: Callable[..., Any]) -> None:
    """Register the command with the command line's `add`."""
    command = add(
        "export",
        export,
        "write a run's LoRA into the model's weights (--merged), or as a file for ComfyUI (--comfyui)",
        "diffrl export runs/my --merged --out merged --dtype bf16",
        "diffrl export runs/my --comfyui my.safetensors --step 300",
        "diffrl export OWNER/MODEL --lora style.safetensors=0.8 --lora runs/my/lora --merged --out merged",
    )
    command.add_argument("source", metavar="RUN_DIR|MODEL", help="the folder of a run, or a model for --lora alone")
    form = command.add_mutually_exclusive_group(required=True)
    form.add_argument("--merged", action="store_true", help="a folder in diffusers' format, weights and LoRAs in one")
    form.add_argument("--comfyui", type=Path, metavar="FILE", help="a LoRA in the names that ComfyUI reads")
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="the folder of --merged; an earlier export is replaced"
    )
    text = "one LoRA more, at a strength (default: 1); may be given again"
    command.add_argument("--lora", action="append", default=[], metavar="LORA[=STRENGTH]", help=text)
    text = "of the run's LoRA (default: 1)"
    command.add_argument("--strength", type=number_between(-100, 100), default=1.0, metavar="NUMBER", help=text)
    text = "the run's checkpoint of this step (default: the newest LoRA)"
    command.add_argument("--step", type=whole_number(0, 10**9), metavar="N", help=text)
    text = "default, ema or another of the checkpoint's (default: what the run evaluates)"
    command.add_argument("--snapshot", metavar="NAME", help=text)
    text = "fp32, bf16 or fp16, of network and text encoders (default: as they are saved)"
    command.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help=text)
    text = "the most gigabytes of one file of weights (default: 5)"
    command.add_argument("--shard", type=positive_number, default=5.0, metavar="GB", help=text)
    command.add_argument("--push", metavar="OWNER/NAME", help="send the folder of --merged to the hub, too")


def export(arguments: argparse.Namespace, rest: list[str]) -> int:
    if arguments.merged != (arguments.out is not None):
        raise UserError("export: --merged and --out DIR belong together; --comfyui names its own file")
    if arguments.push is not None:
        if not arguments.merged:
            raise UserError("export: --push sends the folder of --merged; `diffrl publish` sends LoRAs")
        check_push(arguments.push)
    choice = {key: getattr(arguments, key) for key in ("strength", "step", "snapshot")}
    choice["loras"] = [at("--lora", weighted, text) for text in arguments.lora]
    file = None if arguments.merged else out_file(arguments.comfyui, "--comfyui", "comfyui.safetensors")
    from diffrl.sharing.export import export_comfyui, export_merged

    if file is not None:
        export_comfyui(arguments.source, file, **choice)
        print(f"file: {arguments.comfyui}")
        return 0
    most = {"dtype": arguments.dtype, "shard": int(arguments.shard * 10**9)}
    record = export_merged(arguments.source, arguments.out, **choice, **most)
    print(f"folder: {arguments.out}")
    print(f"peak memory: {record['peak_mib']:,} MiB; the largest file: {record['largest_file_mib']:,} MiB")
    if arguments.push is not None:
        from diffrl.sharing import push

        print(f"hub: {push(arguments.out, arguments.push, 'A model with LoRAs in its weights, by diffrl')}")
    return 0
