"""Shared test set-up: reproducible property tests in CI, and where the shared data lies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("local", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "local")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder with the shared traces and profiles; skip where there is none."""
    folder = Path(os.environ.get("EVENFLOW_SHARED", "../shared"))
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder}: set EVENFLOW_SHARED")
    return folder
