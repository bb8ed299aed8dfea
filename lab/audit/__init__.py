"""Red-teaming of a reward: images that do not show the prompt and score higher than one that does."""
