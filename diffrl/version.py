"""The package's version, where every module may read it: at the bottom, so that no import runs upward for it."""

__version__ = "0.2.0"
