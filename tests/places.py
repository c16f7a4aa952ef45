"""Where the repository and the shared data lie, for tests in any folder."""

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHARED = Path(os.environ.get("EVENFLOW_SHARED", "../shared"))
"""Traces, profiles and recordings that are not in the repository; it may be missing."""
