"""Tests of the search for objects that a callable reaches."""

import sys
from typing import Any

from hodiff.recompute.reachable import reachable

HERE = sys.modules[__name__]


class Holder:
    """An object that holds a dictionary, such as the namespace of its module."""

    def __init__(self, held: dict[str, Any]):
        self.held = held


def test_module_namespaces_are_not_searched() -> None:
    """A module's namespace would lead to the loader, and so to all loaded modules."""
    assert not any(each is vars(HERE) for each in reachable(Holder(vars(HERE))))


def test_copied_namespaces_are_searched() -> None:
    copied = {**vars(HERE), "held": [[]]}
    assert any(each is copied["held"] for each in reachable(Holder(copied)))
