"""PRDP: proximal reward difference prediction."""
