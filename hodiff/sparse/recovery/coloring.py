"""The coloring that a call uses: given, made of a given pattern, or of the pattern that is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.trees import describe
from hodiff.errors import InputError
from hodiff.sparse.coloring import Coloring
from hodiff.sparse.detection.own_derivatives import is_followed
from hodiff.sparse.recovery.products import Multiply
from hodiff.sparse.recovery.recover import recover, require_whole
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped


class Colorings:
    """The colorings of the calls of one function.

    What was found is kept for arguments of the same shapes, and looked for again where the derivative has entries
    outside of it, as where f closes over something that has changed.

    Args:
        caller: The public function, for error messages.
        pattern: What the user gave, or None.
        coloring: What the user gave, or None.
        color_pattern: Colors a pattern.
        suits: The methods whose colorings suit.
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
                f"makes one."
            )
        if coloring is not None and pattern is not None:
            raise InputError(
                f"{caller}: pattern: expected None beside a coloring, which has its own, got both; leave one out."
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
        """The coloring of a call, and the values of the entries.

        Args:
            args: The arguments of the call.
            detect: Finds the pattern for them.
            shape: That of the matrix.
            multiply: As in `recover`.
            leaves: What is differentiated.
            eps: As in `recover`; there is no comparison inside of transforms.

        Returns:
            Both.

        Raises:
            InputError: If no coloring is given inside of a transform, or one lacks entries.
        """
        is_plain = not any(map(is_wrapped, leaves))
        if is_followed():
            eps = None
        if self._given is not None:
            require_shape(self._caller, "pattern", self._given, shape)
            values, off = recover(self._given, multiply, leaves, eps if is_plain else None)
            require_whole(self._caller, "pattern", self._given, off)
            return self._given, values
        if not is_plain:  # what was found before may be of other constants, and nothing would show it
            kind = "jacobian" if "jacobian" in self._caller else "hessian"
            raise InputError(
                f"{self._caller}: coloring: expected one inside of transforms of torch.func, where no pattern can be "
                f"found, got None; make it outside: hodiff.sparse.color(hodiff.sparse.{kind}_pattern(f, x))."
            )
        key = (_shapes(args), shape)
        known = self._found.get(key)
        coloring = self._found[key] = known or self._color(detect())
        values, off = recover(coloring, multiply, leaves, eps)
        if off and known:
            coloring = self._found[key] = self._color(detect())
            values, off = recover(coloring, multiply, leaves, eps)
        require_whole(self._caller, "f", coloring, off)
        return coloring, values


def require_shape(caller: str, argument: str, coloring: Coloring, shape: tuple[int, int]) -> None:
    """Refuse a coloring of another size."""
    if coloring.shape != shape:
        raise InputError(
            f"{caller}: {argument}: expected a pattern of shape {shape}, got {coloring.shape}; leaves are flattened in "
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
