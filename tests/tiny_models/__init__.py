"""Tiny random pipelines of the true classes, for the checks of families: `python -m tests.tiny_models NAME FOLDER`."""
