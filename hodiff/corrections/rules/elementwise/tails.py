r"""Rules for functions that approach a limit, whose derivatives torch computes from the rounded value.

$\sigma'(40) = 4 \cdot 10^{-18}$ is $y (1 - y)$ with a y that rounds to 1. Torch's own derivatives of common activations
are used where they lose only a few bits, so no route is marked as wrong. The check reads all numbers, on a CPU only, as
other devices would have to synchronize. Compilers see torch's own functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.mechanism.declining import UNNEEDED
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.mechanism.values import numbers_of, with_value
from hodiff.functions.activations.gated import GELU, GELUTanh, Mish, SiLU
from hodiff.functions.activations.recorded import record
from hodiff.functions.logarithms import LogSigmoid
from hodiff.functions.logistic import Logistic
from hodiff.functions.softmax.reductions import Tanh
from hodiff.rules.elementwise import ElementwiseFunction
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated
from hodiff.torch_internals.autograd.transforms import differentiating_count, disables_gradients_outside
from hodiff.torch_operators.table import forms_of

loses_tails = partial(
    register, reason="derivatives are computed from a value that rounds to its limit, and lose digits in the tails"
)


# At this limit, $1 - \sigma(x)$ of a rounded value has lost about eight bits, two of them to the rounding of x.
LIMIT = 6.0
# tanh and GELU lose more bits at their limit: networks often exceed a few units, and the digits cost time.
_COMMON_LIMIT = 5.0


def seen(x: Tensor) -> Tensor | None:
    """Return the numbers of a CPU tensor that may be differentiated; None if they are not wanted or not readable."""
    if not (x.is_cpu and x.is_floating_point() and may_be_differentiated((x,))):
        return None
    return numbers_of(x)


def range_of(plain: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest element."""
    low, high = plain.aminmax()
    return low.item(), high.item()


def _exceed(x: Tensor, limit: float) -> bool:
    plain = seen(x)
    return plain is not None and plain.max().item() > limit


def _exceeds_either_way(x: Tensor, limit: float) -> bool:
    plain = seen(x)
    if plain is None:
        return False
    low, high = range_of(plain)
    return low < -limit or high > limit


def saturates(x: Tensor) -> bool:
    """Whether the logistic function rounds so close to its limit that torch's derivatives lose digits."""
    return _exceed(x, LIMIT)


def sigmoid(x: Tensor) -> Tensor:
    """Logistic function with derivatives that keep their digits."""
    y: Tensor = Logistic.call(x) if saturates(x) else torch.sigmoid(x)
    return y


# Lean rules record derivatives, so that products at one point take no exponentials. A single product gains nothing at
# any size: recording costs what the product saves.
_LEAST_TO_RECORD = 2**62


def _recorded(name: str, **options: Any) -> Callable[..., Any]:
    """Return the lean rule for an activation, which applies with these options only."""

    def rule(input: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**options, **dict(zip(options, args, strict=False)), **kwargs}
        return record(input, name) if given == options and _is_recorded(input) else UNNEEDED

    return rule


def _is_recorded(input: Any) -> bool:
    return (
        isinstance(input, Tensor)
        and input.requires_grad
        and torch.is_grad_enabled()
        and input.dtype in (torch.float32, torch.float64)
    )


def _recorded_gelu(input: Tensor, approximate: str = "none") -> Any:
    """Lean rule for both forms of GELU."""
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    return record(input, names[approximate]) if approximate in names and _is_recorded(input) else UNNEEDED


@loses_tails(
    *forms_of("sigmoid"),
    reference="$\\sigma(x) \\sigma(-x)$",
)
def _sigmoid(input: Tensor) -> Any:
    if _is_far(input):
        return with_value(0.5 + 0.5 * _tanh_of_complex(0.5 * input), torch.sigmoid(input.detach()))
    return Logistic.call(input) if saturates(input) else UNNEEDED


@loses_tails(*forms_of("tanh"), reference="$1 / \\cosh^2 x$")
def _tanh(input: Tensor) -> Any:
    if input.is_complex():
        return _tanh_of_complex(input) if _is_far(input) else UNNEEDED
    return Tanh.call(input) if _exceeds_either_way(input, _COMMON_LIMIT) else UNNEEDED


@loses_tails(*forms_of("tan"), reference="$-i \\tanh(i z)$ of complex numbers")
def _tan(input: Tensor) -> Any:
    if not input.is_complex() or not _is_far(1j * input):
        return UNNEEDED
    return with_value(-1j * _tanh_of_complex(1j * input), torch.tan(input.detach()))


@loses_tails(F.tanhshrink, reference="torch.tanh")
def _tanhshrink(input: Tensor) -> Any:
    tanh = _tanh(input)
    return input - tanh if isinstance(tanh, Tensor) else tanh


def _is_far(z: Tensor) -> bool:
    """Whether complex numbers on a CPU are in the tails of tanh along the real axis."""
    if not (z.is_cpu and z.is_complex() and may_be_differentiated((z,))):
        return False
    plain = numbers_of(z)
    return plain is not None and plain.real.abs().max().item() > _COMMON_LIMIT


def _tanh_of_complex(z: Tensor) -> Tensor:
    r"""Compute $\pm(1 - 2 e / (1 + e))$ with $e = e^{\mp 2z}$ in the tails, where torch's $1 - \tanh^2 z$ cancels."""
    real = z.detach().real
    far, sign = real.abs() > _COMMON_LIMIT, torch.where(real < 0, -1.0, 1.0).to(real.dtype)
    e = torch.exp(-2 * torch.where(far, sign * z, _COMMON_LIMIT))
    tail = sign * (1 - 2 * e / (1 + e))
    return with_value(torch.where(far, tail, torch.tanh(torch.where(far, 0, z))), torch.tanh(z.detach()))


@loses_tails(F.logsigmoid, reference="derivatives of $\\sigma(-x)$")
def _logsigmoid(input: Tensor) -> Any:
    return LogSigmoid.call(input) if saturates(input) else UNNEEDED


@loses_tails(
    F.softplus,
    lean=_recorded("softplus", beta=1.0, threshold=20.0),
    least_elements=_LEAST_TO_RECORD,
    devices=("cpu",),
    reference="derivatives of $\\sigma(\\beta x)$ below the threshold",
)
def _softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Any:
    if beta <= 0 or not _exceed(input, LIMIT / beta):
        return UNNEEDED
    linear = input.detach() * beta > threshold
    curved = -LogSigmoid.call(-beta * torch.where(linear, 0, input)) / beta
    return with_value(torch.where(linear, input, curved), F.softplus(input.detach(), beta, threshold))


@loses_tails(
    F.silu,
    lean=_recorded("silu", inplace=False),
    least_elements=_LEAST_TO_RECORD,
    devices=("cpu",),
    reference="derivatives of $\\sigma(x)$ and $\\sigma(-x)$",
)
def _silu(input: Tensor, inplace: bool = False) -> Any:
    if input.is_complex():
        # Forward mode through torch's SiLU of complex numbers is wrong.
        return _in_place_if(inplace, input, lambda x: x * torch.sigmoid(x))
    return _in_place_if(inplace, input, SiLU.call) if _is_cut() or saturates(input) else UNNEEDED


@loses_tails(
    F.mish,
    lean=_recorded("mish", inplace=False),
    least_elements=_LEAST_TO_RECORD,
    devices=("cpu",),
    reference="$x \\sigma(v(x))$, and derivatives of $\\sigma(v)$ and $\\sigma(-v)$",
)
def _mish(input: Tensor, inplace: bool = False) -> Any:
    return _in_place_if(inplace, input, Mish.call) if _is_cut() or _exceed(input, LIMIT / 2) else UNNEEDED


@loses_tails(
    F.gelu,
    lean=_recorded_gelu,
    least_elements=_LEAST_TO_RECORD,
    devices=("cpu",),
    reference="$x \\Phi(x)$ by erfc; the tanh form as $x \\sigma(v(x))$",
)
def _gelu(input: Tensor, approximate: str = "none") -> Any:
    # The value cancels on the left in both forms; the tanh form is also corrected on the right, where v is a cubic.
    if approximate == "tanh":
        return GELUTanh.call(_without_end(input)) if _exceeds_either_way(input, LIMIT / 2) else UNNEEDED
    plain = seen(input) if approximate == "none" else None
    return UNNEEDED if plain is None or plain.min().item() > -_COMMON_LIMIT else GELU.call(_without_end(input))


def _without_end(input: Tensor) -> Tensor:
    """Replace -inf by NaN, the value of torch's gelu there."""
    return torch.where(input == -math.inf, math.nan, input)


def _is_cut() -> bool:
    """Whether torch's derivative may be a fused kernel, used where gradients are disabled, which has none itself."""
    if torch.compiler.is_compiling() or differentiating_count() < 2:
        return False
    return not torch.is_grad_enabled() or disables_gradients_outside()


def _in_place_if(inplace: bool, input: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    return input.copy_(function(input.clone())) if inplace else function(input)


class InverseRoot(ElementwiseFunction):
    r"""$(x^2 + s)^{-1/2}$ for s = 1 or -1, without the square, which may overflow. Saves its inputs."""

    @staticmethod
    def forward(x: Tensor, sign: int) -> Tensor:
        """Compute the root without the square."""
        return torch.hypot(x, torch.ones_like(x)).reciprocal() if sign > 0 else (x - 1).rsqrt() * (x + 1).rsqrt()

    @staticmethod
    def slope(index: int, x: Tensor, sign: int) -> Tensor:
        """$-x r^3$, by factors that neither overflow nor underflow before the product does."""
        r = InverseRoot.call(x, sign)
        return -(x * r) * (r * r)


def _elementwise(
    value: Callable[[Tensor], Tensor],
    derivative: Callable[[Tensor], Tensor],
    of_complex: Callable[[Tensor], Tensor] | None = None,
) -> Callable[[Tensor], Any]:
    """Return a rule with the given value and derivative; complex tensors get the derivatives of `of_complex`."""

    class Elementwise(ElementwiseFunction):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return value(x)

        @staticmethod
        def slope(index: int, x: Tensor) -> Tensor:
            return derivative(x)

    def rule(input: Tensor) -> Any:
        if input.is_complex() and of_complex is not None and may_be_differentiated((input,)):
            return with_value(of_complex(input), value(input.detach()))
        return Elementwise.call(input) if input.is_floating_point() else UNNEEDED

    return rule


def _square(x: Tensor) -> Tensor:
    return x * x


_OVERFLOWS = "derivatives are zero if the square of the argument overflows"

loses_tails(*forms_of("expm1"), reference="$e^x$")(_elementwise(torch.expm1, torch.exp, torch.exp))
loses_tails(F.softsign, reference="$1 / (1 + |x|)^2$")(
    _elementwise(F.softsign, lambda x: _square((1 + x.abs()).reciprocal()))
)
register(
    *forms_of("asinh"),
    reason=_OVERFLOWS,
    reference="$1 / \\operatorname{hypot}(x, 1)$",
)(_elementwise(torch.asinh, lambda x: InverseRoot.call(x, 1)))
register(
    *forms_of("acosh"),
    reason=_OVERFLOWS,
    reference="$1 / (\\sqrt{x - 1} \\sqrt{x + 1})$",
)(_elementwise(torch.acosh, lambda x: InverseRoot.call(x, -1)))
register(
    *forms_of("atan"),
    reason=_OVERFLOWS,
    reference="$1 / \\operatorname{hypot}(x, 1)^2$",
)(_elementwise(torch.atan, lambda x: _square(InverseRoot.call(x, 1))))
