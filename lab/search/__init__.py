"""Better images without training: search over noise and intermediate states, by a reward (`diffrl search`)."""
