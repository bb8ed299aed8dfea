"""The methods and their seams: what differs between them, for the one loop in `diffrl.run`."""
