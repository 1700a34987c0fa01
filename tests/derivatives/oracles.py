"""Second derivatives from function values alone, and the reference Hessian of every case.

Nothing here differentiates with torch: a nested derivative of a fused operator is no oracle for itself.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import CASES, Case, case, ravel, unravel
from torch import Tensor
from torch.utils._pytree import tree_flatten


def extrapolate(estimate: Callable[[float], Tensor], step: float, levels: int = 7) -> tuple[Tensor, Tensor]:
    """Limit at step 0 of estimates whose errors are even in the step, with an estimate of the limit's error.

    Steps are halved. For each number, the table entry that agrees best with its neighbours is returned (Ridders,
    Advances in Engineering Software 4 (1982), 75-76).
    """
    coarser: list[Tensor] = []
    for level in range(levels):
        finer = [estimate(step / 2**level)]
        if level == 0:
            best, error = finer[0], torch.full_like(finer[0], torch.inf)
        for k, previous in enumerate(coarser, start=1):
            finer.append((4**k * finer[-1] - previous) / (4**k - 1))
            disagreement = torch.maximum((finer[k] - finer[k - 1]).abs(), (finer[k] - previous).abs())
            better = disagreement < error
            best, error = torch.where(better, finer[k], best), torch.where(better, disagreement, error)
        coarser = finer
    return best, error


def second_differences(
    function: Callable[[Tensor], Tensor], x: Tensor, directions: Tensor, step: float = 0.1
) -> tuple[Tensor, Tensor]:
    """d²/dt² function(x + t d) at t = 0 for each row d, and an estimate of its error."""
    values = torch.func.vmap(function, chunk_size=4096)
    centre = function(x)
    return extrapolate(lambda h: (values(x + h * directions) - 2 * centre + values(x - h * directions)) / h**2, step)


def third_differences(
    function: Callable[[Tensor], Tensor], x: Tensor, directions: Tensor, step: float = 0.1
) -> tuple[Tensor, Tensor]:
    """d³/dt³ function(x + t d) at t = 0 for each row d, and an estimate of its error."""
    values = torch.func.vmap(function, chunk_size=4096)

    def odd(h: float) -> Tensor:
        return values(x + h * directions) - values(x - h * directions)

    return extrapolate(lambda h: (odd(2 * h) - 2 * odd(h)) / (2 * h**3), step)


def difference_hessian(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, float]:
    """The (n, n) Hessian of a function of a vector by polarisation, and an estimate of its largest error."""
    n, unit = x.numel(), torch.eye(x.numel(), dtype=x.dtype)
    rows, columns = torch.triu_indices(n, n, offset=1)
    second, error = second_differences(function, x, torch.cat([unit, unit[rows] + unit[columns]]))
    hessian = torch.diag(second[:n])
    hessian[rows, columns] = hessian[columns, rows] = (second[n:] - second[rows] - second[columns]) / 2
    return hessian, 1.5 * error.max().item()


def flat_function(each: Case, x: Any, args: tuple[Any, ...]) -> Callable[[Tensor], Tensor]:
    """The case as a function of one flat vector."""
    return lambda flat: each.function(unravel(flat, x), *args)


@dataclass(frozen=True)
class Reference:
    """The Hessian of a case at its float64 inputs, and the tolerance for a right answer."""

    hessian: Tensor
    tolerance: float

    def check(self, actual: Tensor, expected: Tensor, scale: float = 1.0) -> None:
        torch.testing.assert_close(actual, expected, rtol=0, atol=self.tolerance * max(1.0, scale))


@functools.cache
def reference(name: str) -> Reference:
    """Return the closed form of a case if it has one, else differences of its values."""
    each = case(name)
    x, args = each.inputs()
    if each.hessian is not None:
        hessian = torch.from_numpy(each.hessian(x, args))
        return Reference(hessian, 1e-12 * max(1.0, hessian.abs().max().item()))
    hessian, error = difference_hessian(flat_function(each, x, args), ravel(x))
    # The smallest of many error estimates is sometimes too small, hence the floor.
    return Reference(hessian, max(10 * error, 1e-8 * hessian.abs().max().item()))


def route_table(routes: Iterable[str]) -> list[Any]:
    """Return test parameters: every case by every route, including routes that are wrong or missing in torch."""
    return [pytest.param(each, route, id=f"{each.name}-{route}") for each in CASES for route in routes]


def assert_same_structure(actual: Any, expected: Any) -> None:
    """Check that two pytrees have equal structure, shapes, dtypes and devices."""
    (actual_leaves, actual_spec), (expected_leaves, expected_spec) = tree_flatten(actual), tree_flatten(expected)
    assert actual_spec == expected_spec
    for a, b in zip(actual_leaves, expected_leaves, strict=True):
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
