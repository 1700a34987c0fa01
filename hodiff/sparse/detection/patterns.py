"""Detection of sparsity patterns of Hessians and Jacobians."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from scipy.sparse import csr_array, vstack
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hodiff.common.module_state import untouched
from hodiff.common.options import require_bool
from hodiff.common.trees import PyTree, describe, tensors_in
from hodiff.derivatives.bound_function import BoundFunction, at_the_boundary, bind
from hodiff.derivatives.capture.refusals import line_now
from hodiff.derivatives.route_choice import refused
from hodiff.distributed.layouts import require_ordinary
from hodiff.errors import HodiffWarning, InputError, levels_to_the_caller
from hodiff.recompute.reachable import draw_of, named_modules
from hodiff.rules.any_order import outside_graphs
from hodiff.sparse.detection.own_derivatives import following_own_derivatives, is_followed
from hodiff.sparse.detection.supports import TooManyError, identity
from hodiff.sparse.detection.tracking import TooDenseError, Tracking, ValuesDecideError
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.compilers.dynamic_shapes import is_open
from hodiff.torch_internals.operators import without_onednn
from hodiff.torch_internals.threads import one_thread_at_a_time

_EXITS = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__}
# These read the numbers of tensors in a list.
_READERS = {torch.tensor, torch.as_tensor}


class Escapes(TorchFunctionMode):
    """Mode that refuses such functions for tensors that depend on the inputs."""

    def __init__(self, mode: Tracking) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._mode.paused:
            return func(*args, **kwargs or {})
        if (func in _EXITS and self._mode.memory.depends(args[0])) or (func in _READERS and self._reads(args[0])):
            line = line_now()
            name = f"torch.{func.__name__} of numbers" if func in _READERS else f"Tensor.{func.__name__}"
            raise InputError(
                f"{self._mode.caller}: f: expected torch's operators on tensors that depend on x, got {name}"
                f"{f' ({line})' if line else ''}, where dependencies cannot be tracked; write that part with torch, "
                "or pass pattern=."
            )
        return func(*args, **kwargs or {})

    def _reads(self, data: Any) -> bool:
        if isinstance(data, Tensor):  # a tensor is copied by an operator
            return False
        return any(isinstance(x, Tensor) and self._mode.memory.depends(x) for x in tree_leaves(data))


@outside_graphs
@at_the_boundary
def hessian_pattern(f: Callable[..., Any], x: PyTree, *args: Any, at_point: bool = False) -> csr_array:
    r"""Find where the Hessian of a scalar function can have nonzero entries.

    $$ P \supseteq \{ (i, j) : \partial^2 f / \partial x_i \partial x_j \ne 0 \} $$

    f and its gradient run once, and the inputs that each number depends on are followed through every operator. The
    pattern holds for all x by default. Operators without a derivative (rounding, comparisons) add no entries, and
    floating-point constants of f may take any value. Indices and masks, integer and boolean constants, are part of the
    structure of f. A mask removes entries if it is applied before numbers are multiplied, not after. Functions with
    their own derivatives are followed by these. The result of an operator without a rule is assumed to depend on all
    arguments; a `HodiffWarning` names the operator.

    Args:
        f: Function that returns a tensor of shape ().
        x: Tensor or pytree of n numbers in all, at which f runs.
        *args: Further arguments of f, constants.
        at_point: Whether the pattern needs to hold at this x alone, and may be smaller: branches, maxima and factors of
            zero are taken as they are at x.

    Returns:
        SciPy's boolean CSR array (n, n), symmetric, leaves of x flattened in pytree order.

    Raises:
        InputError: If f does not return one real number, its control flow depends on values of x (unless `at_point`),
            numbers of x leave torch (`.numpy()`), or the Hessian has too many entries to be called sparse.
        RouteError: If torch has no derivative of some operator.

    Example:
        >>> import torch, hodiff
        >>> f = lambda x: (x[1:] - x[:-1] ** 2).square().sum()
        >>> hodiff.sparse.hessian_pattern(f, torch.ones(4)).toarray().astype(int)
        array([[1, 1, 0, 0],
               [1, 1, 1, 0],
               [0, 1, 1, 1],
               [0, 0, 1, 1]])

    Source: A. Griewank & A. Walther, *Evaluating Derivatives*, 2nd ed., section 7.1; A. Walther, "Computing sparse
    Hessians with automatic differentiation", ACM Transactions on Mathematical Software 34, 2008.
    """
    require_bool("hessian_pattern", "at_point", at_point)
    return pattern_of_hessian(bind("hessian_pattern", f, (x, *args), name="x"), at_point=at_point)


def pattern_of_hessian(function: BoundFunction, *, at_point: bool = False) -> csr_array:
    """`hessian_pattern` of a bound function."""
    leaves = [_recorded_copy(function, leaf) for leaf in function.leaves]
    with _refused(function.caller), _tracking(function, leaves, at_point) as mode, torch.enable_grad():
        value = function.scalar(leaves)[0]
        if not value.requires_grad:
            raise function.independent()
        gradients = torch.autograd.grad(value, leaves, materialize_grads=True)
        pattern = _rows(mode, gradients, "its gradient")
    return _sorted(pattern + pattern.T)


@outside_graphs
@at_the_boundary
def jacobian_pattern(f: Callable[..., Any], x: PyTree, *args: Any, at_point: bool = False) -> csr_array:
    r"""Find where the Jacobian of a function can have nonzero entries.

    $$ P \supseteq \{ (i, j) : \partial f_i / \partial x_j \ne 0 \} $$

    f runs once, and the inputs that each number depends on are followed through every operator.

    Args:
        f: Function that returns a tensor or a pytree of m numbers in all.
        x: Tensor or pytree of n numbers in all, at which f runs.
        *args: Further arguments of f, constants.
        at_point: As in `hessian_pattern`.

    Returns:
        SciPy's boolean CSR array (m, n), leaves of the result and of x flattened in pytree order.

    Raises:
        InputError: As `hessian_pattern`, except that f may return any pytree of tensors.
        RouteError: As `hessian_pattern`.

    Example:
        >>> import torch, hodiff
        >>> hodiff.sparse.jacobian_pattern(lambda x: x[1:] * x[:-1], torch.ones(4)).toarray().astype(int)
        array([[1, 1, 0, 0],
               [0, 1, 1, 0],
               [0, 0, 1, 1]])

    Source: A. Griewank & A. Walther, *Evaluating Derivatives*, 2nd ed., section 7.1.
    """
    require_bool("jacobian_pattern", "at_point", at_point)
    return pattern_of_jacobian(bind("jacobian_pattern", f, (x, *args), name="x"), at_point=at_point)


def pattern_of_jacobian(function: BoundFunction, *, at_point: bool = False) -> csr_array:
    """`jacobian_pattern` of a bound function."""
    with torch.enable_grad():  # f may write to a copy, but not to a leaf
        leaves = [_recorded_copy(function, leaf).clone() for leaf in function.leaves]
    with _refused(function.caller), _tracking(function, leaves, at_point) as mode, torch.enable_grad():
        results = tensors_in(function(leaves)[0])
        if not results:
            raise InputError(f"{function.caller}: f: expected a tensor or a pytree of tensors for a result, got none.")
        pattern = _rows(mode, results, "its results")
    return _sorted(pattern)


class Detection:
    """Detection of the patterns for one function's calls, each of which is checked by a product.

    Args:
        pattern_of: `pattern_of_hessian` or `pattern_of_jacobian`.
        checked: Whether calls are checked.
    """

    def __init__(self, pattern_of: Callable[..., csr_array], checked: bool):
        self._pattern_of, self._checked = pattern_of, checked
        self._warned = False

    def __call__(self, function: BoundFunction) -> csr_array:
        """Return a pattern for all x, or for this x alone if values of x decide what the function computes."""
        try:
            return self._pattern_of(function)
        except ValuesDecideError as error:
            if not self._checked or is_followed():
                remedy = "check=True uses the pattern at this x, and finds it again where it has changed."
                raise InputError(f"{error} {remedy}") from None
            if not self._warned:
                warnings.warn(
                    f"{error} The pattern at this x is used, checked by a product at each call, and found again where "
                    "it has changed; pass neighbour lists and other indices as further arguments, which are constants.",
                    HodiffWarning,
                    stacklevel=levels_to_the_caller(),
                )
                self._warned = True
        return self._pattern_of(function, at_point=True)


@contextmanager
def _refused(caller: str) -> Iterator[None]:
    with refused(caller):
        try:
            yield
        except TooDenseError as error:
            raise InputError(str(error)) from None


def _recorded_copy(function: BoundFunction, leaf: Tensor) -> Tensor:
    """Copy a leaf for autograd to record: Functions that are not recorded run without their derivatives."""
    if in_transform():
        raise InputError(
            f"{function.caller}: x: expected a tensor outside of torch.func transforms, got {describe(leaf)} inside "
            "of one, where operators cannot be tracked; detect the pattern before, at a tensor of the same shape."
        )
    require_fixed_sizes(function.caller, [leaf])
    require_ordinary(function.caller, x=leaf)
    return leaf.detach().clone().requires_grad_()


def require_fixed_sizes(caller: str, leaves: Sequence[Tensor]) -> None:
    """Raise an error inside of traces that leave sizes open: patterns and colorings have numbers of rows."""
    for leaf in leaves:
        if any(map(is_open, leaf.shape)):
            raise InputError(
                f"{caller}: x: expected a tensor of fixed sizes, got {describe(leaf)} in a trace with dynamic sizes, "
                "where no pattern can be colored; trace the function with fixed sizes."
            )


@contextmanager
def _tracking(function: BoundFunction, leaves: Sequence[Tensor], at_point: bool) -> Iterator[Tracking]:
    """Follow operators from the leaves on; warn of operators without a rule."""
    inputs = sum(leaf.numel() for leaf in leaves)
    mode = Tracking(function.caller, inputs, at_point=at_point)
    draw, modules = draw_of(function.leaves, *function.roots), list(named_modules(function.f))
    start = 0
    for leaf in leaves:
        mode.memory.write(leaf, identity(leaf.numel(), inputs, start).reshape(*leaf.shape), depends=True)
        start += leaf.numel()
    with (
        # Some of these switches affect the whole process.
        one_thread_at_a_time(),
        untouched(modules),
        Escapes(mode),
        mode,
        following_own_derivatives(mode),
        # Compiled code and fused kernels hide their operators.
        torch.compiler.set_stance("force_eager"),
        sdpa_kernel(SDPBackend.MATH),
        without_onednn(),
    ):
        yield mode
    # Detection must not change the random numbers that the derivative draws.
    draw.rewind()
    if mode.unknown:
        found = ", ".join(f"{name} ({line})" if line else name for name, line in mode.unknown.items())
        warnings.warn(
            f"{function.caller}: no rule for the dependencies of {found}: the pattern assumes that all results depend "
            "on all inputs of the arguments. It is right, but may be too large.",
            HodiffWarning,
            stacklevel=levels_to_the_caller(),
        )


def _rows(mode: Tracking, results: Sequence[Tensor], what: str) -> csr_array:
    """Stack the sets of all elements as rows of a matrix."""
    found = [mode.memory.supports(y) for y in results]
    none = [csr_array((y.numel(), mode.memory.inputs), dtype=bool) for y in results]
    try:
        parts = [rows if each is None else each.rows() for each, rows in zip(found, none, strict=True)]
    except TooManyError:
        raise mode.too_dense(what) from None
    return csr_array(vstack(parts))


def _sorted(pattern: csr_array) -> csr_array:
    pattern = csr_array(pattern, dtype=bool)
    pattern.sum_duplicates()
    return pattern
