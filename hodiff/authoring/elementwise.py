"""`elementwise`: make an `ElementwiseFunction` from a formula and its derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.authoring.closures import recorded, refuse_captured_by
from hodiff.authoring.signatures import parameter_count, parameter_names
from hodiff.common.options import require_callable
from hodiff.common.overriding import overridable
from hodiff.errors import InputError
from hodiff.recompute.reachable import names_tensors
from hodiff.rules.arguments import require_broadcastable, require_number_or_floating
from hodiff.rules.elementwise import ElementwiseFunction
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.autograd.wrapped_tensors import unwrap_if_ended
from hodiff.torch_internals.compilers.dynamo import as_one_node
from hodiff.torch_internals.tensors import base_of

Derivative = Callable[..., Any]


def elementwise(
    f: Callable[..., Tensor],
    *,
    derivative: Derivative | Sequence[Derivative | None],
    name: str | None = None,
) -> Callable[..., Tensor]:
    r"""Make an elementwise function, with broadcasting, from a formula and its derivative.

    $$ y = f(x_1, \dots, x_m), \qquad \dot y = \sum_i \partial_i f \, \dot x_i, \qquad
       \bar x_i = \sum_\text{broadcast} \partial_i f \, \bar y $$

    `derivative` defines the derivatives of every order, by every route. It takes the inputs and, if it has one
    parameter more, the output; a function without a signature, such as `torch.cos`, takes the inputs. A forward pass
    saves what `derivative` takes, except parameters whose name begins with an underscore, which are None:
    `lambda _x, y: 1 - y * y` saves only the output.

    Args:
        f: The formula: takes one tensor or number per required parameter, and returns a tensor.
        derivative: The derivative with respect to the only input. For several inputs, one function per input (None for
            a zero derivative), or one function that returns a tuple of all partial derivatives.
        name: Name of the function in messages and autograd graphs; defaults to the name of `f`.

    Returns:
        The function, of tensors and numbers whose shapes broadcast; numbers get no gradient. Its attribute `Function`
        is the `torch.autograd.Function` behind it.

    Raises:
        InputError: If the derivative does not fit the function, or an argument is not a floating-point tensor or
            number.

    Example:
        >>> import torch
        >>> from hodiff.authoring import elementwise
        >>> tanh = elementwise(torch.tanh, derivative=lambda _x, y: 1 - y * y)
        >>> torch.func.grad(torch.func.grad(tanh))(torch.tensor(0.5))
        tensor(-0.7269)
        >>> power = elementwise(
        ...     lambda x, n: x**n,
        ...     derivative=(lambda x, n: n * x ** (n - 1), lambda x, n, y: y * x.log()),
        ...     name="power",
        ... )
        >>> torch.func.grad(power)(torch.tensor(2.0), 3)
        tensor(12.)

    Source: A. Griewank & A. Walther, Evaluating Derivatives, 2nd ed. (2008), table 2.3.
    """
    require_callable("elementwise", f=f)
    title = name or getattr(f, "__name__", "elementwise").replace("<lambda>", "elementwise")
    partials = _Partials(title, f, derivative)
    Function = _function(title, f, partials)
    outer = [each for each in (f, *partials.rules) if names_tensors(each)]

    def run(*inputs: Any) -> Tensor:
        return Function.apply(*inputs)

    # As in hodiff.authoring.custom_function: Function.apply binds the signature anew at each call. (mypy knows super()
    # in methods only.)
    plain = super(torch.autograd.Function, Function).apply  # type: ignore[misc]
    in_graph = as_one_node(run)
    named = [(each, i) for i, each in enumerate(partials.inputs)]

    @overridable
    def function(*inputs: Any) -> Tensor:
        if len(inputs) != partials.count:
            raise InputError(f"{title}: expected {partials.count} arguments, got {len(inputs)}.")
        if torch.compiler.is_dynamo_compiling():
            return in_graph(*inputs)
        if outer and in_transform():
            refuse_captured_by(title, *outer)
        if all(type(each) is Tensor and each.is_floating_point() and each.shape == inputs[0].shape for each in inputs):
            if not in_transform():
                return plain(*[unwrap_if_ended(each) for each in inputs])
            return Function.apply(*inputs)
        arguments = {each: inputs[i] for each, i in named}
        require_number_or_floating(title, **arguments)
        if not any(isinstance(each, Tensor) for each in inputs):
            raise InputError(f"{title}: expected at least one tensor, got numbers only.")
        require_broadcastable(title, **arguments)
        return Function.apply(*inputs)

    function.__name__ = function.__qualname__ = title
    function.__doc__ = getattr(f, "__doc__", None)
    # mypy does not know that a plain function takes attributes.
    function.Function = Function  # type: ignore[attr-defined]
    return function


class _Partials:
    """The partial derivatives, and the residuals that they read.

    Attributes:
        count: Number of inputs.
        inputs: Names of the inputs.
        rules: The functions that compute the derivatives.
        reads: For each input, and then the output, whether any rule reads it.
    """

    def __init__(self, title: str, f: Callable[..., Tensor], derivative: Derivative | Sequence[Derivative | None]):
        several = isinstance(derivative, (tuple, list))
        # mypy cannot infer the type from `several`.
        self.rules: list[Derivative | None] = list(derivative) if several else [derivative]  # type: ignore[list-item,arg-type]
        for rule in self.rules:
            if rule is not None and not callable(rule):
                raise InputError(f"elementwise: derivative: expected functions, got {type(rule).__name__}.")
        known = parameter_count(f)
        self.count = known if known is not None else len(self.rules)
        if several and self.count != len(self.rules):
            raise InputError(
                f"elementwise: derivative: expected one function for each of the {self.count} inputs of {title}, got "
                f"{len(self.rules)}."
            )
        self.together = not several and self.count > 1
        names = parameter_names(f)[: self.count] if known is not None else []
        self.inputs = names or (["x"] if self.count == 1 else [f"x{i}" for i in range(1, self.count + 1)])
        self.reads = [False] * (self.count + 1)
        self.takes_output: list[bool] = []
        for rule in self.rules:
            if rule is None:
                self.takes_output.append(False)
                continue
            # Most of torch's own functions have no signature: take them as functions of the inputs.
            parameters = self.inputs if parameter_count(rule) is None else parameter_names(rule)
            if len(parameters) not in {self.count, self.count + 1}:
                raise InputError(
                    f"elementwise: derivative: expected a function of the {self.count} input{'s' * (self.count > 1)} "
                    f"of {title}, or of those and the output, got one of {len(parameters)} parameters."
                )
            self.takes_output.append(len(parameters) > self.count)
            for i, parameter in enumerate(parameters):
                self.reads[i] |= not parameter.startswith("_")

    def slope(self, index: int, *residuals: Any) -> Any:
        """Compute a partial derivative from the inputs and the output."""
        which = 0 if self.together else index
        rule = self.rules[which]
        if rule is None:
            return 0.0
        found = rule(*residuals) if self.takes_output[which] else rule(*residuals[:-1])
        if not self.together:
            return found
        if not isinstance(found, (tuple, list)) or len(found) != self.count:
            raise InputError(
                f"elementwise: derivative: expected a tuple of {self.count} partial derivatives, got "
                f"{type(found).__name__}."
            )
        each = found[index]
        return each(*residuals[: parameter_count(each)]) if callable(each) else each


def _function(title: str, f: Callable[..., Tensor], partials: _Partials) -> type[ElementwiseFunction]:
    """Create the Function; its rules are plain functions, because torch.compile traces no others."""

    def forward(*inputs: Any) -> Tensor:
        constants = tuple(each.detach() if isinstance(each, Tensor) else each for each in inputs)
        y = recorded(title, f, constants)
        if not isinstance(y, Tensor):
            raise InputError(f"{title}: expected a function that returns a tensor, got {type(y).__name__}.")
        expected = torch.broadcast_shapes(*(each.shape for each in inputs if isinstance(each, Tensor)))
        if y.shape != expected:
            raise InputError(f"{title}: expected an elementwise function, got shape {tuple(y.shape)} from {expected}.")
        shared = any(y is each or base_of(y) is each for each in constants if isinstance(each, Tensor))
        return y.clone() if shared else y

    def slope(index: int, *residuals: Any) -> Any:
        return partials.slope(index, *residuals)

    def residuals(inputs: Sequence[Any], output: Any) -> Sequence[Any]:
        return [each if read else None for each, read in zip((*inputs, output), partials.reads, strict=True)]

    members = {
        "forward": staticmethod(forward),
        "slope": staticmethod(slope),
        "residuals": staticmethod(residuals),
        "saves_output": partials.reads[-1],
        "formulas": tuple(partials.rules),
        "__doc__": f"{title}: saves what its derivatives read.",
    }
    return type(title, (ElementwiseFunction,), members)
