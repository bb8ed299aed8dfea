"""What surrounds a training: benchmarks, search, audits and headroom before it, replay and the dial after it.

Each tool is a function, its page and its command, which `diffrl` finds by the entry-point group `diffrl.commands`.
"""
