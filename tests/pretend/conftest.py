"""Tests on the pretend CUDA device, `make test-pretend`; without the device nothing here is collected."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
collect_ignore_glob = [] if "pretend_cuda" in sys.modules else ["test_*.py"]
