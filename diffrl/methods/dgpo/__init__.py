"""DGPO: direct group preference optimisation."""
