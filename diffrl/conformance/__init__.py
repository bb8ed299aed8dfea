"""Is a family right? Tiny random pipelines of the true classes, the checks on them, and the support table."""
