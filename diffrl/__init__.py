"""diffrl: reinforcement learning for diffusion and flow text-to-image models that does not let them cheat."""

__version__ = "0.1.0"
