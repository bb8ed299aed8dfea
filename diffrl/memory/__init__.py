"""How much memory a config takes, counted without a device: read by `diffrl doctor` and by `micro_batch: auto`."""
