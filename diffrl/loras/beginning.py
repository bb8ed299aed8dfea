"""A policy whose LoRA begins as a file's, or is set to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from diffrl.loras.encoders import add_texts, dress, undressed
from diffrl.loras.reading import read_lora
from diffrl.policy.backbone import Backbone
from diffrl.policy.base import Policy
from diffrl.policy.lora import TRAINED, LoraSpec
from diffrl.policy.merging import fitted
from diffrl.policy.text_cache import Texts


def policy_from(source: str, backbone: Backbone, lora: LoraSpec | None, **kind: Any) -> Policy:
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
    policy.load_state(TRAINED, fitted(read.state, read.spec, spec, policy.state(), source))
    if worn:
        policy.plain_texts = Texts(backbone, policy.device)
        policy.plain_texts.room = lambda: _plain(policy)
        policy.add_texts = add_texts
    return policy


def load(source: str, policy: Policy, name: str) -> None:
    """Set the LoRA `name` of a policy to a file's; what the file has not gets no effect.

    Raises:
        UserError: it cannot be read, or its rank is larger or its layers are others (`lora.rank`, `lora.targets`).
    """
    read = read_lora(source, policy.backbone)
    policy.lora.load_state(name, fitted(read.state, read.spec, policy.lora.spec, policy.state(name), source))


@contextmanager
def _plain(policy: Policy) -> Iterator[None]:
    with policy.texts.room(), undressed(policy.backbone.text_encoders):
        yield
