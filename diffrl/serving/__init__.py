"""Rewards behind HTTP: the server, its client, the wire format, and the limits that every server here has."""
