"""A policy whose LoRA begins as a file's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffrl.policy.backbone import Backbone
from diffrl.policy.base import Policy
from diffrl.policy.lora import TRAINED, LoraSpec
from diffrl.policy.merging import fitted
from diffrl.policy.reading import dress, read_lora, undressed
from diffrl.policy.text_cache import Texts


def policy_from(source: str | Path, backbone: Backbone, lora: LoraSpec | None, **kind: Any) -> Policy:
    """A policy whose LoRA is that of `source`; `lora` may have a larger rank, another scale and more layers.

    Where `lora` names no targets, the family's and the file's get a LoRA. Text encoders wear their part of the file.

    Raises:
        UserError: the file cannot be read, or does not fit.
    """
    read = read_lora(source, backbone)
    spec = read.spec if lora is None else lora
    if spec.targets is None:
        spec = replace(spec, targets=[*backbone.targets, *(read.spec.targets or ())])
    worn = dress(backbone, read.texts, source)
    policy = Policy(backbone, lora=spec, **kind)
    policy.load_state(TRAINED, fitted(read.state, read.spec, spec, policy.state(), str(source)))
    if worn:
        policy.plain_texts = Texts(backbone, policy.device)
        policy.plain_texts.room = lambda: _plain(policy)
    return policy


@contextmanager
def _plain(policy: Policy) -> Iterator[None]:
    with policy.texts.room(), undressed(policy.backbone.text_encoders):
        yield
