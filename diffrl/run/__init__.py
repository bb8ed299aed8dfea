"""One training run, from a config to a run folder."""
