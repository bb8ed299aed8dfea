"""Sharing a trained LoRA: a folder for the hub with the weights, a model card, a gallery and everything measured."""

from diffrl.sharing.publish import publish, push

__all__ = ["publish", "push"]
