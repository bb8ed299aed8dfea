"""GARDO: a penalty for images whose rewards are not to be trusted, and diversity in the advantages."""
