"""The reward zoo: one plugin a file, found through entry points exactly as a stranger's plugin is."""
