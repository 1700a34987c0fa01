"""Choice of the method of `minimize`, and checks that it supports the arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hodiff.common.options import require_choice
from hodiff.errors import InputError
from hodiff.optim.batched.methods import DEFAULT
from hodiff.optim.batched.methods import METHODS as BATCHED
from hodiff.optim.methods import METHODS
from hodiff.optim.sparse_derivatives import require_sparse


def require_method(method: Any, bounds: Any, constraints: Any, *, batched: bool) -> str:
    """Return the name of the method, or of the default; raise if it does not support the bounds or constraints."""
    methods: Mapping[str, Any] = BATCHED if batched else METHODS
    if method is None:
        method = "trust-ncg" if not batched else DEFAULT if bounds is None else "l-bfgs-b"
    name = method.lower() if isinstance(method, str) else method
    require_choice("minimize", "method", name, methods)
    asked = {"bounds": bounds is not None, "constraints": not is_empty(constraints)}
    for argument, wanted in asked.items():
        if wanted and not getattr(methods[name], argument):
            able = " or ".join(repr(each) for each, method in methods.items() if getattr(method, argument))
            remedy = f"pass method={able}" if able else "minimise the problems one by one"
            raise InputError(f"minimize: {argument}: expected none, as method={name!r} takes none; {remedy}.")
    return str(name)


def require_takes_sparse(name: str, sparse: Any, *, batched: bool) -> None:
    """Raise if a sparse Hessian is requested and the method does not support it."""
    require_sparse("minimize", sparse)
    if sparse is False:
        return
    if batched:
        raise InputError("minimize: sparse: expected False with batched=True, whose Hessians are small and dense.")
    if not METHODS[name].sparse:
        able = " or ".join(repr(each) for each, method in METHODS.items() if method.sparse)
        raise InputError(
            f"minimize: sparse: expected False, as method={name!r} takes no sparse Hessian, got {sparse!r}; "
            f"pass method={able}."
        )


def is_empty(constraints: Any) -> bool:
    """Return whether there are no constraints."""
    return isinstance(constraints, (tuple, list)) and not constraints
