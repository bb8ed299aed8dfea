"""Back-propagation of differentiable rewards: D2-Align's stage 2, SRPO, R0, Ctrl-U."""
