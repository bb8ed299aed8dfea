"""A reward in 15 lines: how much redder than green and blue the picture is."""

import torch


class Redness:
    name = "redness"

    def __init__(self, power: float = 1.0):
        self.power = power

    def __call__(self, images, prompts, metadata):
        red, green, blue = images.unbind(dim=1)  # (B, H, W) each, in [0, 1]
        return (red - torch.maximum(green, blue)).clamp(min=0).mean(dim=(1, 2)) ** self.power

    def applies(self, prompt, metadata):
        return "red" in prompt.split()
