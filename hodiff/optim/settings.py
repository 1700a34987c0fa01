"""Checks of optimizer settings, in one table, as a name has one meaning in all optimizers, and schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from hodiff.common.options import require_amount, require_bool, require_choice, require_int, require_number
from hodiff.common.trees import describe
from hodiff.errors import InputError
from hodiff.optim.grafting import GRAFTS
from hodiff.optim.local_models import CURVATURES


def is_due(count: int, every: int) -> bool:
    """Return True every `every` counts, and before that after 1, 2, 4, 8 ... counts, when averages change most."""
    return count % every == 0 or (count < every and count & (count - 1) == 0)


Check = Callable[[str, str, Any], None]

BACKTRACKING, STRONG_WOLFE, GRID, QUADRATIC = "backtracking", "strong_wolfe", "grid", "quadratic"
EMPIRICAL_FISHER = "empirical-fisher"
RMS, SHAPE = "rms", "shape"


def _require_rate(caller: str, argument: str, value: Any) -> None:
    """Raise if the value is neither a finite nonnegative number nor a tensor with one number."""
    if not isinstance(value, Tensor):
        require_amount(caller, argument, value)
    elif value.numel() != 1 or not value.is_floating_point():
        raise InputError(f"{caller}: {argument}: expected a number or a tensor of one, got {describe(value)}.")


def _require_betas(caller: str, argument: str, value: Any) -> None:
    """Raise if the value is not a pair of numbers in [0, 1)."""
    if not (isinstance(value, (tuple, list)) and len(value) == 2):
        raise InputError(f"{caller}: {argument}: expected a pair of numbers, got {value!r}; pass (0.9, 0.999).")
    for i, each in enumerate(value):
        _require_fraction(caller, f"{argument}[{i}]", each)


def _require_fraction(caller: str, argument: str, value: Any, *, optional: bool = False) -> None:
    """Raise if the value is not a number in [0, 1), or None if it is optional."""
    require_number(caller, argument, value, within=(0.0, 1.0), optional=optional)
    if value == 1:
        raise InputError(f"{caller}: {argument}: expected a number below 1, got {value!r}.")


CHECKS: Mapping[str, Check] = {
    "lr": _require_rate,
    "betas": _require_betas,
    "eps": require_amount,
    "weight_decay": require_amount,
    "maximize": require_bool,
    "foreach": partial(require_bool, optional=True),
    "update_every": partial(require_int, least=1, optional=True),
    "gamma": partial(require_amount, positive=True),
    "hessian_power": partial(require_number, within=(0.0, 1.0)),
    "spatial_averaging": require_bool,
    "accumulate": require_bool,
    "grafting": partial(require_choice, choices=GRAFTS, optional=True),
    "refresh_every": partial(require_int, least=1),
    "max_preconditioner_size": partial(require_int, least=1),
    "merge_dims": require_bool,
    "rho": require_amount,
    "adaptive": require_bool,
    "eta": require_amount,
    "damping": require_amount,
    "rcond": partial(_require_fraction, optional=True),
    "curvature": partial(require_choice, choices=CURVATURES),
    "cg_iterations": partial(require_int, least=1),
    "cg_tolerance": require_amount,
    "momentum": _require_fraction,
    "factor_decay": _require_fraction,
    "kl_clip": partial(require_number, positive=True, finite=True, optional=True),
    "norm_constraint": partial(require_number, positive=True, finite=True, optional=True),
    "max_iter": partial(require_int, least=1),
    "max_eval": partial(require_int, least=1, optional=True),
    "tolerance_grad": require_amount,
    "tolerance_change": require_amount,
    "history_size": partial(require_int, least=1),
    "warm_start": partial(require_number, within=(0.0, 1.0)),
    "line_search_fn": partial(require_choice, choices=(BACKTRACKING, STRONG_WOLFE, GRID, QUADRATIC), optional=True),
    "orthogonalize": require_bool,
    "scaling": partial(require_choice, choices=(RMS, SHAPE)),
    "nesterov": require_bool,
    "iterations": partial(require_int, least=1),
    "preconditioner": partial(require_choice, choices=(EMPIRICAL_FISHER,), optional=True),
}


def settings_in(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Select the settings from a constructor's `locals()`."""
    return {name: value for name, value in arguments.items() if name in CHECKS}


def require_settings(caller: str, group: Mapping[str, Any]) -> None:
    """Raise if a group of parameters has a setting out of its range."""
    for name, check in CHECKS.items():
        if name in group:
            check(caller, name, group[name])
