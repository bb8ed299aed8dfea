"""DivGenBench."""
