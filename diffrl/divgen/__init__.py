"""Diversity: measured in every run, and DivGenBench."""
