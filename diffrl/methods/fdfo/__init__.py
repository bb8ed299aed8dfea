"""FDFO: finite-difference flow optimisation."""
