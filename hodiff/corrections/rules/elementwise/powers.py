r"""Rules for powers with a tensor as exponent, whose derivatives are wrong in torch at a base or exponent of 0.

All derivatives are sums of $x^e \log^k x$,

$$ \partial_x (x^e \log^k x) = e \, x^{e-1} \log^k x + k \, x^{e-1} \log^{k-1} x, \qquad
   \partial_e (x^e \log^k x) = x^e \log^{k+1} x. $$

Powers of two and of other constants have rules for single arguments: `ldexp`, and the ends of `linspace` and
`logspace`, which torch treats as constants where they are tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED
from hodiff.corrections.mechanism.in_place_variants import in_place
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.mechanism.values import in_complex_dtype, mixes_complex_number, result_dtype, with_value
from hodiff.errors import RouteError
from hodiff.routes import ROUTES
from hodiff.rules.any_order import outside_graphs
from hodiff.rules.elementwise import ElementwiseFunction
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_operators.table import forms_of

_REASON = "tensor endpoints are constants in reverse mode, and raise an error in forward mode"


def _between(start: Any, end: Any, steps: int) -> Tensor:
    """Return evenly spaced numbers between the ends; for one step, the start."""
    ends = [each for each in (start, end) if isinstance(each, Tensor)]
    dtype = result_dtype(*ends) if len(ends) > 1 else ends[0].dtype
    weights = torch.linspace(0, 1, steps, dtype=dtype, device=ends[0].device)
    return start * (1 - weights) + end * weights


def _constant(end: Any) -> Any:
    return end.detach() if isinstance(end, Tensor) else end


def _is_needed(start: Any, end: Any, out: Any) -> bool:
    ends = [each for each in (start, end) if isinstance(each, Tensor)]
    return out is None and any(each.is_floating_point() for each in ends) and may_be_differentiated(ends)


@register(torch.linspace, routes=ROUTES, reason=_REASON, reference="convex combinations of the endpoints")
def _linspace(start: Any, end: Any, steps: int, *, dtype: Any = None, out: Any = None, **options: Any) -> Any:
    if not (isinstance(start, Tensor) or isinstance(end, Tensor)) or not _is_needed(start, end, out):
        return UNNEEDED
    value = torch.linspace(_constant(start), _constant(end), steps, dtype=dtype, **options)
    return with_value(_between(start, end, steps).to(value), value)


@register(torch.logspace, routes=ROUTES, reason=_REASON, reference="powers of convex combinations of the endpoints")
def _logspace(
    start: Any, end: Any, steps: int, base: float = 10.0, *, dtype: Any = None, out: Any = None, **options: Any
) -> Any:
    if not (isinstance(start, Tensor) or isinstance(end, Tensor)) or not _is_needed(start, end, out):
        return UNNEEDED
    value = torch.logspace(_constant(start), _constant(end), steps, base, dtype=dtype, **options)
    return with_value(torch.pow(base, _between(start, end, steps)).to(value), value)


class PowerOfTwoTimes(ElementwiseFunction):
    r"""$2^e x$ for integers e, linear in x. Saves e alone."""

    @staticmethod
    def forward(x: Tensor, exponent: Tensor) -> Tensor:
        """Compute the value by torch's kernel."""
        return torch.ldexp(x, exponent)

    @staticmethod
    def residuals(inputs: Any, output: Any) -> Any:
        """Return the exponents alone."""
        return (inputs[1],)

    @staticmethod
    def scaled_slope(vector: Tensor, index: int, *residuals: Any) -> Tensor:
        """Return $2^e$ times the vector."""
        (exponent,) = residuals
        return PowerOfTwoTimes.call(vector, exponent)


_ldexp_is_wrong = partial(
    register,
    routes=ROUTES,
    reason="the power of two is computed in integers, so negative exponents give 0",
    reference="it is linear",
    mended="2.14",
)


@_ldexp_is_wrong(*forms_of("ldexp"))
def _ldexp(input: Tensor, other: Tensor) -> Any:
    if other.is_floating_point() or other.is_complex():
        return UNNEEDED
    if input.is_complex() or (input.is_floating_point() and torch.compiler.is_compiling()):
        return input * torch.pow(2.0, other.to(input.real.dtype))
    return PowerOfTwoTimes.call(input, other) if input.is_floating_point() else UNNEEDED


_ldexp_is_wrong(Tensor.ldexp_)(in_place(_ldexp))


class PowerTimesLogarithms(ElementwiseFunction):
    r"""$x^e \log^k x$ for an integer k. Saves its inputs.

    At x = 0, a factor of 0 wins over a pole, and logarithms count as 0 where the power has no pole, as in torch.
    """

    @staticmethod
    def forward(x: Tensor, exponent: Tensor, k: int) -> Tensor:
        """Compute the power by torch's kernel."""
        power = torch.pow(x, exponent)
        if k == 0:
            return power
        return torch.where((x == 0) & (exponent >= 0), 0, power * x.to(power.dtype).log() ** k)

    @staticmethod
    def slope(index: int, x: Tensor, exponent: Tensor, k: int) -> Tensor:
        """Derivative by the base (index 0) or by the exponent (index 1)."""
        if index == 1:
            return PowerTimesLogarithms.call(x, exponent, k + 1)
        # At 0 to the power of 0 the slope is the constant 0, without a derivative by the exponent.
        constant = (x == 0) & (exponent == 0)
        x = torch.where(constant, 1, x)
        slope = torch.where(constant, 0, exponent * PowerTimesLogarithms.call(x, exponent - 1, k))
        return slope + k * PowerTimesLogarithms.call(x, exponent - 1, k - 1) if k else slope


def _complex_power(x: Tensor, exponent: Tensor) -> Tensor:
    zero = x == 0
    return torch.where(zero, torch.pow(x, exponent), (exponent * torch.where(zero, 1, x).log()).exp())


_LOSES_TRANSFORMS = torch.__version__ < "2.13"


# Dynamo would differentiate the Function's forward by torch's rule, so the graph breaks here.
@outside_graphs
def _in_eager_code(x: Tensor, exponent: Tensor) -> Tensor:
    power: Tensor = PowerTimesLogarithms.call(x, exponent, 0)
    return power


def _real_power(x: Tensor, exponent: Tensor) -> Tensor:
    # Older compilers silently lose a transform's recording when a graph breaks inside the transform.
    if _LOSES_TRANSFORMS and torch.compiler.is_compiling() and in_transform():
        raise RouteError(
            "pow: for a tensor exponent, torch before 2.13 compiles the derivative with respect to it to zero. "
            "Compute the derivative outside of torch.compile, or write exp(exponent * log(x))."
        )
    return _in_eager_code(x, exponent)


_with_tensors = partial(
    register,
    routes=ROUTES,
    reason=(
        "the mixed derivative with respect to base and exponent is wrong at exponent 0, and not finite at base 0; for "
        "a real tensor and a complex number forward mode drops the imaginary part of the tangent"
    ),
    reference="derivatives of $x^e \\log^k x$",
)


# The mode also uses these rules for the operators ** and **=.
@_with_tensors(*forms_of("pow"))
def _pow(input: Any, exponent: Any) -> Any:
    if mixes_complex_number(input, exponent):
        return torch.pow(*in_complex_dtype(input, exponent))
    if not isinstance(exponent, Tensor):
        return UNNEEDED
    dtype = result_dtype(input, exponent)
    if not (dtype.is_floating_point or dtype.is_complex) or not (isinstance(input, Tensor) or input == 0):
        return UNNEEDED
    base = input.to(dtype) if isinstance(input, Tensor) else torch.zeros((), dtype=dtype, device=exponent.device)
    if dtype.is_complex:
        return _complex_power(base, exponent)
    # The slope by the base needs the exponent minus 1, which a narrower dtype would round.
    return _real_power(base, exponent.to(dtype) if exponent.is_floating_point() else exponent)


@_with_tensors(Tensor.__rpow__, name="torch.pow")
def _rpow(self: Tensor, other: Any) -> Any:
    return _pow(other, self)


@_with_tensors(*forms_of("float_power"))
def _float_power(input: Any, exponent: Any) -> Any:
    if not isinstance(exponent, Tensor) or not isinstance(input, Tensor):
        return UNNEEDED
    dtype = torch.complex128 if input.is_complex() or exponent.is_complex() else torch.float64
    return _pow(input.to(dtype), exponent.to(dtype))


@_with_tensors(Tensor.float_power_)
def _float_power_(input: Tensor, exponent: Any) -> Any:
    if input.dtype not in (torch.float64, torch.complex128):
        return INVALID  # torch refuses to write the result there
    return _pow_(input, exponent)


@_with_tensors(Tensor.pow_)
def _pow_(input: Tensor, exponent: Any) -> Any:
    return _write_power(input, exponent) if isinstance(exponent, Tensor) else UNNEEDED


_write_power = in_place(_pow)


def _sum_of_complex(function: Callable[..., Tensor], input: Tensor, other: Any, alpha: Any = 1) -> Tensor:
    return function(*in_complex_dtype(input, other), alpha=alpha)


for _function, *_operators in (
    (torch.rsub, torch.rsub, torch.ops.aten.rsub.Scalar),
    (torch.sub, torch.ops.aten.sub.Scalar),
    (torch.add, torch.ops.aten.add.Scalar),
):
    register(
        *_operators,
        routes=ROUTES[1:],
        reason="for a real tensor and a complex number, the tangent of forward mode is real",
        reference="the same operator in the complex dtype",
        covers=lambda input, other, *_, **__: mixes_complex_number(input, other),
    )(partial(_sum_of_complex, _function))
