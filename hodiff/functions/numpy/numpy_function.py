"""NumPy and SciPy code as differentiable functions of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hodiff.common.options import require_bool, require_callable, require_choice, require_int, require_number
from hodiff.common.overriding import overridable
from hodiff.errors import InputError
from hodiff.functions.numpy.nodes import (
    CallNode,
    Convert,
    DifferencePolicy,
    ElementwiseNode,
    External,
    Node,
)
from hodiff.functions.numpy.numpy_rules import RuleNode
from hodiff.rules.any_order import outside_graphs


def numpy_function(
    f: Callable[..., Any],
    vjp: Callable[..., Any] | None = None,
    jvp: Callable[..., Any] | None = None,
    *,
    derivatives: Sequence[Callable[..., Any]] = (),
    elementwise: bool = False,
    rules: str = "numpy",
    difference_order: int | None = None,
    tolerance: float = 1e-4,
) -> NumpyFunction:
    r"""Make a differentiable function of tensors from NumPy or SciPy code.

    The derivative comes from the first of these that is given:

    - `elementwise=True` with `derivatives`: $f', f'', \dots$ of a function of one tensor, for as many orders;
    - `vjp(cotangent, *args)`, returning $\bar y\, \partial f / \partial x_i$ for each floating-point argument, or
      `jvp(tangent, *args)`, returning $\sum_i \partial f / \partial x_i\, \dot x_i$ for each output. A single tensor is
      passed and returned bare, several as a tuple; `vjp` may return None for zero. If only one of the two is given, the
      other product takes one call per element;
    - else extrapolated central differences with an error estimate: `approximate` is then true, `last_error` and
      `derivative_error(*args)` return the error, and a relative error above `tolerance` warns.

    An order of derivative without a rule raises. A rule in NumPy code has no derivative itself: wrap it in its own
    `numpy_function(...)`, or write it in torch operators and pass `rules="torch"`. Differences of differences require a
    `difference_order` of 2 or more.

    Args:
        f: Function of arrays and other values that returns a real array or a tuple of arrays. Floating-point tensors
            are passed as float64 arrays, on the CPU; results have the tensors' (promoted) dtype and device.
        vjp: Vector-Jacobian product of `f`.
        jvp: Jacobian-vector product of `f`.
        derivatives: With `elementwise`, the derivatives of `f` by order, functions of the same arguments.
        elementwise: Whether `f` maps each element of its first argument, the only tensor, to an element of its output.
        rules: Whether `vjp` and `jvp` are "numpy" or "torch" code.
        difference_order: Number of orders beyond the given rules that may use differences; by default 1 if no rule is
            given, else 0.
        tolerance: Relative error of differences above which to warn.

    Returns:
        The function of tensors; it works by every route, and under `torch.func.vmap` by looping.

    Raises:
        InputError: If the options do not fit together.

    Example:
        >>> import scipy.special, torch
        >>> x = torch.tensor(1.0)
        >>> j0 = numpy_function(scipy.special.j0, elementwise=True, derivatives=[lambda x: -scipy.special.j1(x)])
        >>> torch.func.grad(j0)(x)
        tensor(-0.4401)
        >>> j0 = numpy_function(scipy.special.j0)
        >>> torch.func.grad(j0)(x)
        tensor(-0.4401)
        >>> j0.approximate, j0.last_error < 1e-11
        (True, True)

    Source: C. J. F. Ridders, "Accurate computation of F'(x) and F'(x) F''(x)", Advances in Engineering Software 4
    (1982), 75-76, for the differences.
    """
    given = {"vjp": vjp, "jvp": jvp, **{f"derivatives[{i}]": each for i, each in enumerate(derivatives)}}
    require_callable("numpy_function", f=f, **{name: each for name, each in given.items() if each is not None})
    require_choice("numpy_function", "rules", rules, ("numpy", "torch"))
    require_bool("numpy_function", "elementwise", elementwise)
    require_number("numpy_function", "tolerance", tolerance, nonnegative=True)
    if difference_order is None:
        difference_order = 0 if vjp or jvp or derivatives else 1
    require_int("numpy_function", "difference_order", difference_order, 0)
    if derivatives and not elementwise:
        raise InputError(
            "numpy_function: derivatives: expected elementwise=True with derivatives; otherwise pass vjp or jvp."
        )
    if difference_order and (vjp or jvp):
        raise InputError(
            "numpy_function: difference_order: expected None with a vjp or jvp; wrap the vjp or jvp in a "
            "numpy_function without a rule, which then computes the next order by differences."
        )
    if elementwise and (vjp or jvp):
        raise InputError("numpy_function: vjp, jvp: expected neither with elementwise=True; pass derivatives.")
    return NumpyFunction(f, vjp, jvp, tuple(derivatives), elementwise, rules, difference_order, tolerance)


class NumpyFunction:
    """NumPy code as a function of tensors; made by `numpy_function`.

    Attributes:
        approximate: Whether a derivative of some order comes from differences, of the code or of a rule.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        vjp: Callable[..., Any] | None,
        jvp: Callable[..., Any] | None,
        derivatives: tuple[Callable[..., Any], ...],
        elementwise: bool,
        rules: str,
        difference_order: int,
        tolerance: float,
    ):
        self._f, self._derivatives, self._elementwise = f, derivatives, elementwise
        self.__name__ = getattr(f, "__name__", type(f).__name__)
        self._vjp, self._jvp = (
            _as_torch(rule, rules, f"the {name} of {self.__name__}") for name, rule in (("vjp", vjp), ("jvp", jvp))
        )
        self._policy = DifferencePolicy(self.__name__, difference_order, tolerance)
        self._rules = [rule for rule in (vjp, jvp) if isinstance(rule, NumpyFunction)]
        self.approximate: bool = self._policy.orders > 0 or any(rule.approximate for rule in self._rules)

    @property
    def last_error(self) -> float | None:
        """Largest estimated absolute error among the differences taken last, or None before any."""
        errors = [self._policy.last_error, *(rule.last_error for rule in self._rules)]
        return max((each for each in errors if each is not None), default=None)

    def derivative_error(self, *args: Any, order: int = 1, **kwargs: Any) -> float:
        """Estimate the largest absolute error of a derivative at a point.

        Args:
            *args: The point, as for a call.
            order: The order of the derivative.
            **kwargs: Constants, as for a call.

        Returns:
            The error; 0 if the derivative comes from a rule.
        """
        node, inputs = self.as_node(args, kwargs)
        error = 0.0
        for _ in range(order):
            node, error = node.differentiated(inputs)
        return error

    @overridable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate at tensors and constants; keyword arguments are constants."""
        return _evaluate(self, args, kwargs)

    def as_node(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Node, list[Tensor]]:
        """Return the node of a call, and the tensors among its arguments."""
        inputs = [each for each in args if isinstance(each, Tensor)]
        for each in inputs:
            if each.is_complex():
                raise InputError(
                    f"{self.__name__}: expected real tensors, got {each.dtype}; convert it by torch.view_as_real."
                )
        floating = [each.dtype for each in inputs if each.is_floating_point()]
        convert = Convert(
            reduce(torch.promote_types, floating) if floating else torch.get_default_dtype(),
            inputs[0].device if inputs else torch.device("cpu"),
        )
        places = [i for i, each in enumerate(args) if isinstance(each, Tensor)]
        constants = [None if isinstance(each, Tensor) else each for each in args]

        def merged(values: Sequence[Any]) -> list[Any]:
            result = list(constants)
            for i, each in zip(places, values, strict=True):
                result[i] = each
            return result

        if self._elementwise:
            if len(inputs) != 1 or not inputs[0].is_floating_point():
                raise InputError(
                    f"{self.__name__}: expected one floating-point tensor among the arguments of an elementwise "
                    f"function, got {len(inputs)} tensors; for several tensors, pass a vjp."
                )
            towers = [lambda x, d=d: np.asarray(d(*merged([x]), **kwargs)) for d in (self._f, *self._derivatives)]
            return ElementwiseNode(towers, 0, convert, self._policy), inputs

        def call(*arrays: Any) -> Any:
            return self._f(*merged(arrays), **kwargs)

        if self._vjp is None and self._jvp is None:
            return CallNode(call, convert, self._policy), inputs

        def bound(rule: Callable[..., Any] | None) -> Callable[..., Any] | None:
            return rule and (lambda directions, tensors: rule(directions, *merged(tensors), **kwargs))

        return RuleNode(call, bound(self._vjp), bound(self._jvp), convert, self._policy), inputs


@outside_graphs  # dynamo respects it on functions only, not on methods
def _evaluate(function: NumpyFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    node, inputs = function.as_node(args, kwargs)
    outputs = External.call(node, *inputs)
    return outputs[0] if not node.several else outputs


def _as_torch(rule: Callable[..., Any] | None, rules: str, name: str) -> Callable[..., Any] | None:
    """Wrap a rule as a function of tensors; derivatives of NumPy code without its own rule raise."""
    if rule is None or rules == "torch" or isinstance(rule, NumpyFunction):
        return rule

    def without_none(directions: Any, *args: Any, **kwargs: Any) -> Any:
        result = rule(directions, *args, **kwargs)
        if not isinstance(result, tuple):
            return result
        floating = [x for x in args if isinstance(x, np.ndarray) and x.dtype.kind == "f"]
        return tuple(np.zeros_like(x) if g is None else g for g, x in zip(result, floating, strict=True))

    without_none.__name__ = name
    return NumpyFunction(without_none, None, None, (), False, "numpy", 0, 0.0)
