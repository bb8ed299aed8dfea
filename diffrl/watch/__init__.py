"""A run's live page: `diffrl watch`. It reads the run's folder, and writes nothing there but people's votes."""
