"""GDRO: group-level direct reward optimisation."""
