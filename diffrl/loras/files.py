"""Where a LoRA lies that a user names, and the rest of a `diffrl.lora_files.LoraReader`: the shipped one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffrl.errors import UserError, in_one_line, nearest
from diffrl.hub import hub_file, not_name, pinned
from diffrl.hub_access import hub_failure
from diffrl.plugins import here
from diffrl.worlds import world_of, worlds

if TYPE_CHECKING:
    from diffrl.policy import Policy

PART = re.compile(r".*-\d+-of-0*(?!1\.)[1-9]\d*\.safetensors")  # one of several files of weights
NAMES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")  # diffusers' and peft's


class LoraFiles:
    """A world's LoRA (playground/turbo), a .safetensors file, a folder with one, a run, or OWNER/NAME[@REVISION][:FILE]
    on the hub. Of several files in a folder those with diffrl's, diffusers' and peft's own names are taken.
    """

    def find(self, name: str) -> Path | tuple[str, str | None]:
        if not name:
            raise UserError("the name of the LoRA is empty")
        loras = {name: path for world in worlds().values() for name, path in world.loras.items()}
        path = Path(os.path.expanduser(here(str(loras.get(name, name)))))
        if path.is_file():
            if path.suffix != ".safetensors":
                raise UserError(f'"{path}" is not a LoRA file (.safetensors); a pickle is not read')
            if PART.fullmatch(path.name):
                raise UserError(f'"{path}" is one of several files of a LoRA; write them into one')
            return path
        if path.is_dir():
            inner = path / "lora" if (path / "lora").is_dir() and not any(path.glob("*.safetensors")) else path
            return inner / _only(sorted(file.name for file in inner.glob("*.safetensors")), f'folder "{inner}"')
        repository, colon, file = name.partition(":")
        of_hub = not not_name(repository, "OWNER/NAME[@REVISION]") and bool(file) == bool(colon)
        if of_hub and world_of(name) is None and not Path(repository.partition("@")[0]).parent.is_dir():
            return repository, file or None
        there = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() and len(path.parts) > 1 else []
        hint = nearest(name, loras) if world_of(name) or not there else nearest(path.name, there)
        raise UserError(f'no LoRA "{name}"; give a file, a folder, a run, or OWNER/NAME[@REVISION][:FILE]{hint}')

    def file(self, name: str) -> Path:
        found = self.find(name)
        if isinstance(found, Path):
            return found
        repository, file = found
        missing = f'no folder "{name}"'
        if file is None and hub_failure():
            file = NAMES[0]
        if file is None:
            from huggingface_hub import HfApi

            source, at = pinned(repository)
            try:
                files = HfApi().list_repo_files(source, **at)
            except Exception as error:  # the hub's and the network's
                raise UserError(f"{missing}, and the hub does not give it ({in_one_line(error, most=120)})") from error
            file = _only(sorted(one for one in files if one.endswith(".safetensors")), f'"{repository}"')
            if file == NAMES[1]:
                hub_file(repository, "adapter_config.json", missing)
        return hub_file(repository, file, missing)

    def merge(self, backbone: Any, loras: Sequence[tuple[str, float]]) -> Callable[[Any, bool], None]:
        from diffrl.loras.distilled import hold_base, merge_lora

        return partial(hold_base, [(merge_lora(backbone, name, weight), weight) for name, weight in loras])

    def begin(self, name: str, backbone: Any, lora: Any, **kind: Any) -> Policy:
        from diffrl.loras.encoders import dress, keep_plain
        from diffrl.loras.reading import read_lora
        from diffrl.policy import Policy
        from diffrl.policy.merging import fitted

        read = read_lora(name, backbone)
        spec = read.spec if lora is None else lora
        if spec.targets is None:
            spec = replace(spec, targets=[*backbone.targets, *(read.spec.targets or ())])
        worn = dress(backbone, read.texts, name)
        policy = Policy(backbone, lora=spec, **kind)
        policy.load_state("default", fitted(read.state, read.spec, spec, policy.state(), name))
        if worn:
            keep_plain(policy)
        return policy

    def load(self, name: str, policy: Policy, snapshot: str) -> None:
        from diffrl.loras.reading import read_lora
        from diffrl.policy.merging import fitted

        read = read_lora(name, policy.backbone)
        state = fitted(read.state, read.spec, policy.lora.spec, policy.state(snapshot), name)
        policy.lora.load_state(snapshot, state)


def _only(files: list[str], where: str) -> str:
    known = [name for name in NAMES if name in files]
    if not known and (parts := [name for name in files if PART.fullmatch(name)]):
        raise UserError(f"{where} has a LoRA in several files, such as {parts[0]}; write them into one")
    if known or len(files) == 1:
        return (known or files)[0]
    several = f"has several: {', '.join(files)}; name one of them" if files else f"has no {NAMES[0]}"
    raise UserError(f"{where} {several}")
