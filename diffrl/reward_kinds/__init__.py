"""Kinds of rewards beside the plain one, and what an entry of a config may put around one; found by entry points.

The core asks for a kind only where a reward declares its ability, and for an option where an entry has its key.
"""
