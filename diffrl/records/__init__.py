"""What a run leaves behind: checkpoints, metrics, progress lines, guard rails."""
