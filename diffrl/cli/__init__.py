"""The command line, one file per command group; `main` reads and checks before anything heavy is imported."""
