"""torch's own operators in Taylor mode, plain and collapsed, against nested forward mode of corrected functions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("operators_worker.py")
# What cannot be compared, or is not right: reasons as the worker gives them, or as they are known.
EXCEPTIONS = {
    "float": "single precision",
    "half": "half precision",
    "cfloat": "single precision",
    "chalf": "half precision",
    "masked.logaddexp": "of two infinities",
}
NOT_COMPARED = ("no oracle", "nothing to differentiate")


def errors(part):
    run = subprocess.run([sys.executable, str(WORKER), part], capture_output=True, text=True, check=True, timeout=900)
    return json.loads(run.stdout)


def assert_right(found):
    assert found
    for name, error in found.items():
        if isinstance(error, str) and error.startswith(NOT_COMPARED):
            continue
        assert name in EXCEPTIONS or (isinstance(error, float) and error < 1e-10), (name, error)


@pytest.mark.slow
def test_of_all_kinds():
    found = errors("")
    assert_right(found)
    right = [name for name, error in found.items() if isinstance(error, float) and error < 1e-10]
    assert len(right) > 500
