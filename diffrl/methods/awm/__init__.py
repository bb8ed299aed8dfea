"""AWM: advantage weighted matching."""
