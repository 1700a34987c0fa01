"""The coloring that a call uses: given, made of a given pattern, or of the pattern that is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.trees import describe
from hodiff.errors import InputError
from hodiff.sparse.coloring import Coloring
from hodiff.sparse.recovery.products import Multiply
from hodiff.sparse.recovery.recover import recover, require_whole
from hodiff.torch_internals.wrapped_tensors import is_wrapped


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
        args: tuple[Any, ...],
        detect: Callable[[], Any],
        shape: tuple[int, int],
        multiply: Mapping[str, Multiply],
        leaves: Sequence[Tensor],
        *,
        check: bool,
    ) -> tuple[Coloring, Tensor]:
        """The coloring of a call, and the values of the entries.

        Args:
            args: The arguments of the call.
            detect: Finds the pattern for them.
            shape: That of the matrix.
            multiply: As in `recover`.
            leaves: What is differentiated.
            check: Whether the matrix is held against one more product, outside of transforms.

        Returns:
            Both.
        """
        is_plain = not any(map(is_wrapped, leaves))
        coloring = self._given
        if coloring is None:
            key = _shapes(args)
            known = key in self._found
            if not known:
                self._found[key] = self._anew(detect, is_plain)
            coloring = self._found[key]
        require_shape(self._caller, "x" if self._given is None else "pattern", coloring, shape)
        values, off = recover(coloring, multiply, leaves, check=check and is_plain)
        if len(off) and self._given is None and known:
            coloring = self._found[key] = self._anew(detect, is_plain)
            values, off = recover(coloring, multiply, leaves, check=True)
        require_whole(self._caller, "f" if self._given is None else "pattern", off)
        return coloring, values

    def _anew(self, detect: Callable[[], Any], is_plain: bool) -> Coloring:
        if not is_plain:
            raise InputError(
                f"{self._caller}: coloring: expected one inside of transforms of torch.func, where no pattern can be "
                f"found, got None; make it outside: hodiff.sparse.color(hodiff.sparse.hessian_pattern(f, x))."
            )
        return self._color(detect())


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
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf if _is_hashable(leaf) else type(leaf)
        for leaf in leaves
    )


def _is_hashable(leaf: Any) -> bool:
    return isinstance(leaf, (int, float, complex, bool, str, bytes, type(None)))
