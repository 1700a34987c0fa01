"""Warnings while a function is checked: none of torch's about itself, and one where a function warns at each point."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from hodiff.errors import HodiffWarning
from hodiff.torch_internals.wording import OF_TORCH_ITSELF

_NUMBER = re.compile(r"[-+.\d]+(e[-+]?\d+)?")


@contextmanager
def silence_torch_warnings() -> Iterator[None]:
    """Silence those of torch, which under ``-W error`` would look like defects, and repetitions of hodiff's own."""
    with warnings.catch_warnings():
        for each in OF_TORCH_ITSELF:
            warnings.filterwarnings("ignore", message=f".*{each.pattern}")
        show, seen = warnings.showwarning, set()

        def once(message: Any, category: type[Warning], filename: str, lineno: int, *to: Any) -> None:
            # A check moves inputs, and each point has other numbers in what is else the same warning.
            key = category, filename, lineno, _NUMBER.sub("#", str(message))
            if not issubclass(category, HodiffWarning) or key not in seen:
                seen.add(key)
                show(message, category, filename, lineno, *to)

        warnings.showwarning = cast(Any, once)
        yield
