"""Where the documentation's figures come from; run from a checkout, not in the wheel."""
