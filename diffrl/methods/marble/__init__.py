"""MARBLE: a gradient for each reward, balanced."""
