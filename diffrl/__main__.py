"""`python -m diffrl`, and `accelerate launch -m diffrl`."""

import sys

from diffrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
