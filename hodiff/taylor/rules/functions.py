"""Rules for hodiff's functions that torch's functions compute too; other functions use nested forward mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from hodiff import functions
from hodiff.functions import StraightThrough, checkpoint, checkpoint_sequential
from hodiff.taylor.fallback import unknown
from hodiff.taylor.jets import new_jet
from hodiff.taylor.jets_in_arguments import moves, value_of
from hodiff.taylor.registry import RULES, Entry
from hodiff.taylor.series import Frame
from hodiff.taylor.steps_of_lengths import PIECEWISE_OF_HODIFF


def straight_through(frame: Frame, func: Any, smooth: Any, value: Any) -> Any:
    """Combine the derivatives of `smooth` with the value of `value`."""
    if not moves(frame, smooth):
        return value_of(frame, value)
    return new_jet(frame, [value_of(frame, value), *smooth.coefficients[1:]])


def _plain_call(frame: Frame, func: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a checkpointed function directly, because a forward pass recomputes nothing."""
    return f(*args, **kwargs)


def _one_after_another(frame: Frame, func: Any, functions: Any, segments: int, *args: Any) -> Any:
    """Call checkpointed functions in sequence, because a forward pass recomputes nothing."""
    for function in functions:
        args = (function(*args),)
    return args[0]


def _softmax(x: Any, dim: Any) -> Any:
    return torch.softmax(x, dim) if isinstance(dim, int) else torch.exp(_log_softmax(x, dim))


def _log_softmax(x: Any, dim: Any) -> Any:
    if isinstance(dim, int):
        return torch.log_softmax(x, dim)
    return x - torch.logsumexp(x, tuple(dim), keepdim=True)


def _softplus(frame: Frame, func: Any, x: Any, beta: Any = 1.0, threshold: float | None = None) -> Any:
    """Softplus without a threshold; fall back to nested forward mode if there is one."""
    if threshold is not None:
        return unknown(frame, func, (x, beta, threshold), {})
    # torch's softplus always has a threshold.
    return functional.softplus(beta * x, threshold=1e300) / beta


# Formulas that compute the same as hodiff's autograd Functions.
FORMULAS: dict[Any, Callable[..., Any]] = {
    functions.swish: lambda x, beta=1.0: x * torch.sigmoid(beta * x),
    functions.silu: functional.silu,
    functions.mish: functional.mish,
    functions.gelu: lambda x, approximate="none": functional.gelu(x, approximate=approximate),
    functions.log_sigmoid: functional.logsigmoid,
    functions.logit: torch.logit,
    functions.xlogy: torch.xlogy,
    functions.softmax: _softmax,
    functions.log_softmax: _log_softmax,
    functions.logsumexp: torch.logsumexp,
    functions.layer_norm: functional.layer_norm,
    functions.rms_norm: functional.rms_norm,
    functions.group_norm: functional.group_norm,
    functions.conv1d: functional.conv1d,
    functions.conv2d: functional.conv2d,
    functions.conv3d: functional.conv3d,
    functions.scale_shift: lambda x, weight, bias: x * weight + bias,
}


def _by_formula(formula: Callable[..., Any]) -> Callable[..., Any]:
    return lambda frame, func, *args, **kwargs: formula(*args, **kwargs)


def _nested(frame: Frame, func: Any, *args: Any, **kwargs: Any) -> Any:
    return unknown(frame, func, args, kwargs)


for _name in PIECEWISE_OF_HODIFF:
    RULES[getattr(functions, _name)] = Entry(f"functions.{_name}", _nested)
for _function, _formula in FORMULAS.items():
    RULES[_function] = Entry(f"functions.{_function.__name__}", _by_formula(_formula))
RULES[functions.softplus] = Entry("functions.softplus", _softplus)
RULES[StraightThrough] = Entry("straight_through", straight_through, analytic=True)
RULES[checkpoint] = Entry("checkpoint", _plain_call, analytic=True)
RULES[checkpoint_sequential] = Entry("checkpoint_sequential", _one_after_another, analytic=True)
