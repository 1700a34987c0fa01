"""Filters for checks: torch's warnings about itself are silenced, and hodiff's are shown once."""

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
    """Silence torch's warnings about itself, which ``-W error`` makes errors, and repeated ones of hodiff."""
    with warnings.catch_warnings():
        for each in OF_TORCH_ITSELF:
            warnings.filterwarnings("ignore", message=f".*{each.pattern}")
        show, seen = warnings.showwarning, set()

        def once(message: Any, category: type[Warning], filename: str, lineno: int, *to: Any) -> None:
            # A check evaluates many points, whose warnings differ in numbers only.
            key = category, filename, lineno, _NUMBER.sub("#", str(message))
            if not issubclass(category, HodiffWarning) or key not in seen:
                seen.add(key)
                show(message, category, filename, lineno, *to)

        warnings.showwarning = cast(Any, once)
        yield
