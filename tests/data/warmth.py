"""A differentiable reward, for tests that need a gradient everywhere: how much more red than blue."""


class Warmth:
    name = "warmth"
    differentiable = True

    def __call__(self, images, prompts, metadata):
        return (images[:, 0] - images[:, 2]).mean(dim=(1, 2))


class Brightness:
    name = "brightness"
    differentiable = True

    def __call__(self, images, prompts, metadata):
        return images.mean(dim=(1, 2, 3))
