"""Many runs from a few configs: every config, variation and seed, a few at a time, gone on with after a kill."""
