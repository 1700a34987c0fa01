"""Choice of the coloring for a call: given, or made from a given or a detected pattern."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.trees import describe
from hodiff.errors import InputError
from hodiff.sparse.coloring import Coloring
from hodiff.sparse.detection.own_derivatives import is_followed
from hodiff.sparse.detection.patterns import require_fixed_sizes
from hodiff.sparse.recovery.compressed_products import Multiply
from hodiff.sparse.recovery.recover import recover, require_whole, warn_of_infinite
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped
from hodiff.torch_internals.tensors import has_numbers


class Colorings:
    """The colorings of the calls of one function.

    Detected patterns are cached for arguments of the same shapes. They are detected again if the derivative has entries
    outside of them, such as when f closes over something that has changed. `suits` are the methods whose colorings are
    accepted.
    """

    def __init__(
        self,
        caller: str,
        pattern: Any,
        coloring: Coloring | None,
        color_pattern: Callable[[Any], Coloring],
        suits: Sequence[str],
    ):
        if coloring is not None and not isinstance(coloring, Coloring):
            raise InputError(
                f"{caller}: coloring: expected a Coloring, got {describe(coloring)}; hodiff.sparse.color(pattern) "
                "creates one."
            )
        if coloring is not None and pattern is not None:
            raise InputError(
                f"{caller}: pattern: expected None with a coloring, which has its own pattern, got both; omit one."
            )
        if coloring is not None and coloring.method not in suits:
            raise InputError(
                f"{caller}: coloring: expected one by {' or '.join(map(repr, suits))}, got {coloring!r}; color the "
                f"pattern again."
            )
        self._caller = caller
        self._color = color_pattern
        self._given = coloring if pattern is None else color_pattern(pattern)
        self._found: dict[Any, Coloring] = {}

    def entries(
        self,
        args: Any,
        detect: Callable[[], Any],
        shape: tuple[int, int],
        multiply: Mapping[str, Multiply],
        leaves: Sequence[Tensor],
        eps: float | None,
    ) -> tuple[Coloring, Tensor]:
        """Return the coloring of a call, of the pattern that `detect` finds if none is given, and its entries."""
        require_fixed_sizes(self._caller, leaves)
        is_plain = not any(map(is_wrapped, leaves))
        if is_followed() or not all(map(has_numbers, leaves)):
            eps = None
        if self._given is not None:
            require_shape(self._caller, self._given, shape)
            values, off = recover(self._given, multiply, leaves, eps if is_plain else None)
            require_whole(self._caller, "pattern", self._given, off)
            warn_of_infinite(self._caller, self._given, off)
            return self._given, values
        if not is_plain:  # a cached pattern may be of other constants, and nothing would show it
            kind = "jacobian" if "jacobian" in self._caller else "hessian"
            raise InputError(
                f"{self._caller}: coloring: expected one inside of transforms of torch.func, where no pattern can be "
                f"detected, got None; create it outside: hodiff.sparse.color(hodiff.sparse.{kind}_pattern(f, x))."
            )
        key = (_shapes(args), shape)
        known = self._found.get(key)
        coloring = self._found[key] = known or self._color(detect())
        values, off = recover(coloring, multiply, leaves, eps)
        if off and known:
            coloring = self._found[key] = self._color(detect())
            values, off = recover(coloring, multiply, leaves, eps)
        require_whole(self._caller, "f", coloring, off)
        warn_of_infinite(self._caller, coloring, off)
        return coloring, values


def require_shape(caller: str, coloring: Coloring, shape: tuple[int, int]) -> None:
    """Raise an error if a coloring has another shape."""
    if coloring.shape != shape:
        raise InputError(
            f"{caller}: pattern: expected a pattern of shape {shape}, got {coloring.shape}; leaves are flattened in "
            f"pytree order."
        )


def _shapes(args: tuple[Any, ...]) -> Any:
    leaves, spec = pytree.tree_flatten(args)
    return spec, tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf if _is_known(leaf) else None)
        for leaf in leaves
    )


def _is_known(leaf: Any) -> bool:
    return callable(leaf) or isinstance(leaf, (int, float, complex, bool, str, bytes, type(None)))
