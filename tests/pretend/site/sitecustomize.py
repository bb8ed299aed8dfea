"""Every Python process whose PYTHONPATH has this folder gets the pretend device before torch is there."""

import os
import sys

if os.environ.get("PRETEND_CUDA"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import pretend_cuda  # noqa: F401
