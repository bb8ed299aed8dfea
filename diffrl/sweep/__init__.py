"""Runs every combination of configs, settings and seeds, a few at a time; restarts where it stopped."""
