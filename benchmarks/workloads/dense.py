"""Dense Hessians of softmax regression and of a small network on scikit-learn's digits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import hodiff
from benchmarks import torch_ways
from benchmarks.objectives import DIGITS, Objective
from benchmarks.problems import Problem
from benchmarks.race import Contestant
from benchmarks.reference import difference_product, relative_error


def problems(quick: bool) -> Iterator[Problem]:
    """Yield one problem per setting, or only the smallest."""
    for build in list(DIGITS.values())[: 1 if quick else None]:
        yield problem(build(), quick)


def problem(objective: Objective, quick: bool) -> Problem:
    """Return the problem of a dense Hessian; torch's row-by-row loop takes part only where n < 1000 and not quick."""
    x = objective.parameters()
    n = sum(tensor.numel() for tensor in x.values())
    probes = torch.randn(3, n, generator=torch.Generator().manual_seed(1))
    expected = torch.stack([difference_product(objective, probe) for probe in probes])
    row_by_row = n < 1000 and not quick
    return Problem(
        name=objective.name,
        title=f"{objective.name}: n = {n:,}, {len(objective.inputs):,} images",
        contestants=[
            Contestant("one gradient, eager", "unit", partial(torch_ways.gradient, objective, x)),
            *(
                Contestant(name, "hodiff" if name.startswith("hodiff") else "torch", partial(way, objective, x))
                for name, way in HESSIANS.items()
                if row_by_row or way is not functional_row_by_row
            ),
            Contestant("hodiff.HessianOperator, to_dense", "hodiff", partial(_by_operator, objective, x)),
            Contestant("hodiff.HessianOperator, compiled, at a new point", "hodiff", partial(_compiled, objective, x)),
        ],
        error=lambda result: relative_error(probes @ matrix(result, x).mT, expected),
        tolerance=1e-4,
    )


def _by_operator(objective: Objective, x: dict[str, Tensor]) -> Tensor:
    return hodiff.HessianOperator(objective, x, check_deterministic=False).to_dense()


def _compiled(objective: Objective, x: dict[str, Tensor]) -> Tensor:
    return _operator(objective).at(x).to_dense()


@functools.cache
def _operator(objective: Objective) -> hodiff.HessianOperator:
    """Make and compile the operator once, as an optimizer does."""
    return hodiff.HessianOperator(objective, objective.parameters(), compile=True)


def matrix(result: Any, x: dict[str, Tensor]) -> Tensor:
    """Convert the result of a contestant to one (n, n) matrix."""
    if isinstance(result, Tensor):
        return result
    rows = [torch.cat([result[a][b].reshape(x[a].numel(), x[b].numel()) for b in x], dim=1) for a in x]
    return torch.cat(rows)


def flat(x: dict[str, Tensor]) -> Tensor:
    """Return all parameters in one vector."""
    return torch.cat([tensor.flatten() for tensor in x.values()])


def functional_vectorized(objective: Objective, x: dict[str, Tensor]) -> Any:
    """Compute all rows in one batched double backward."""
    return torch.autograd.functional.hessian(objective.flat, flat(x), vectorize=True)


def functional_row_by_row(objective: Objective, x: dict[str, Tensor]) -> Any:
    """Compute one double backward per row."""
    return torch.autograd.functional.hessian(objective.flat, flat(x))


HESSIANS: dict[str, Callable[[Objective, dict[str, Tensor]], Any]] = {
    "hodiff.hessian_matrix": lambda objective, x: hodiff.hessian_matrix(objective, x),
    "hodiff.hessian, dict": lambda objective, x: hodiff.hessian(objective)(x),
    "torch func.hessian, vector": lambda objective, x: torch.func.hessian(objective.flat)(flat(x)),
    "torch func.hessian, dict": lambda objective, x: torch.func.hessian(objective)(x),
    "torch func.jacrev of func.grad, vector": lambda objective, x: torch.func.jacrev(torch.func.grad(objective.flat))(
        flat(x)
    ),
    "torch autograd.functional.hessian, vectorize": functional_vectorized,
    "torch autograd.functional.hessian": functional_row_by_row,
}
