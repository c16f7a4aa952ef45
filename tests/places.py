"""Where the repository lies, for tests in any folder."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
