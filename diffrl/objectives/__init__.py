"""The seams between the one loop and the methods."""
