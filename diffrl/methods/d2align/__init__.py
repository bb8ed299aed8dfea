"""D2-Align: a corrected direction in a reward's text space."""
