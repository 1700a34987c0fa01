"""Tests of a door run in its own environment, which has its program: `make test-doors`."""

import os
from pathlib import Path


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignore the folders of doors, except in the runs of `run_doors.py`."""
    return True if (collection_path / "requirements.txt").exists() and "HODIFF_DOOR" not in os.environ else None
