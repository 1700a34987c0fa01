"""What callables reach."""

import sys
from typing import Any

from hodiff.recompute.reachable import reachable

HERE = sys.modules[__name__]


class Holder:
    """What user's objects may hold: the namespace that they were made in, and another of the same names."""

    def __init__(self, held: dict[str, Any]):
        self.held = held


def test_namespaces_of_modules_are_left() -> None:
    """They lead to the loader, and from it to all that the program has loaded."""
    assert not any(each is vars(HERE) for each in reachable(Holder(vars(HERE))))


def test_a_dictionary_like_a_namespace_is_walked() -> None:
    copied = {**vars(HERE), "held": [[]]}
    assert any(each is copied["held"] for each in reachable(Holder(copied)))
