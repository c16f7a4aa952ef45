"""What runs write is what it was, byte for byte; `make freeze` also holds the figures."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tools.freeze import FROZEN, QUICK, differences, outputs_of

KNOWN = json.loads(FROZEN.read_text(encoding="utf-8")).get(np.__version__)


@pytest.mark.skipif(KNOWN is None, reason=f"nothing is frozen for numpy {np.__version__}")
@pytest.mark.parametrize("case", QUICK)
def test_a_command_writes_the_frozen_bytes(case: str) -> None:
    assert KNOWN is not None
    assert not list(differences(KNOWN[case], outputs_of(QUICK[case])))


def test_a_byte_that_moves_is_told() -> None:
    old = {"a.csv": {"sha256": "0", "means": {"x": 2.0, "y": 1.0}}, "b.csv": {"sha256": "1"}}
    new = {"a.csv": {"sha256": "2", "means": {"x": 3.0, "y": 1.0}}, "c.csv": {"sha256": "1"}}
    assert list(differences(old, new)) == [
        "a.csv: means moved by at most 0.5 (x)",
        "b.csv: not written any more",
        "c.csv: new",
    ]
