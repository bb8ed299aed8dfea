"""The commands `demo` (some minutes on two CPU cores), and `publish` and `export` (a trained LoRA for others)."""

from __future__ import annotations

import argparse
from pathlib import Path

from diffrl.cli.arguments import at, check_push
from diffrl.cli.interrupted import loading, resumable
from diffrl.errors import UserError
from diffrl.lora_files import weighted
from diffrl.tools.outputs import out_file


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
    source = run.config.prompts.test
    prompts = source if isinstance(source, str) else next(iter(source))
    print(f"Draw with it:   diffrl sample playground --lora {run.lora} --prompts {prompts} --limit 16 --out images")
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


def export_run(arguments: argparse.Namespace, rest: list[str]) -> int:
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
