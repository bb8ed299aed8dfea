"""For the author of a reward: a new one's files, its check, its card, and a head that is fitted to preferences."""
