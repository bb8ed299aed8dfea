"""A reward with a map, for tests: how red each of 3 x 3 places is."""

import torch


class Mapped:
    name = "mapped"
    maps = (3, 3)

    def map(self, images, prompts, metadata):
        red = images[:, 0] - images[:, 1:].mean(1)
        return torch.nn.functional.adaptive_avg_pool2d(red[:, None], self.maps)[:, 0]

    def __call__(self, images, prompts, metadata):
        return self.map(images, prompts, metadata).mean((1, 2))


class Constant(Mapped):
    """The same score everywhere."""

    def map(self, images, prompts, metadata):
        return super().map(images, prompts, metadata).mean((1, 2), keepdim=True).expand(-1, 3, 3)


class Broken(Mapped):
    def map(self, images, prompts, metadata):
        return images.mean((1, 2, 3))

    def __call__(self, images, prompts, metadata):
        return self.map(images, prompts, metadata)
