"""How much of what could go on for ever a test tries: all in `make test-all`, else a part."""

from __future__ import annotations

import os

ALL = os.environ.get("TEST_ALL") == "1"


def many(number: int) -> int:
    """Return as many in `make test-all`, and a tenth in `make test`."""
    return number if ALL else max(number // 10, 1)
