"""Reductions over `dim=()` or `[]`, which reduce all dimensions: derivatives are those of the formula over all."""

import pytest
import torch

import hodiff

D = torch.float64
X = torch.tensor([[0.5, -0.7, 0.3], [1.1, 0.2, -0.4]], dtype=D)
ATEN = torch.ops.aten


def variance(x, divisor):
    return (x - x.mean()).abs().square().sum() / divisor


# The reduction at dimensions, and the formula over all dimensions.
REDUCTIONS = {
    "var": (lambda x, dim: torch.var(x, dim), lambda x: variance(x, 5)),
    "var, biased": (lambda x, dim: x.var(dim, False), lambda x: variance(x, 6)),
    "var by name": (lambda x, dim: x.var(dim=dim, correction=2, keepdim=True).sum(), lambda x: variance(x, 4)),
    "var by axis": (lambda x, dim: torch.var(x, axis=dim), lambda x: variance(x, 5)),
    "var of a number": (lambda x, dim: x[0, 0].var(dim, correction=0) + x.sum() ** 2, lambda x: x.sum() ** 2),
    "std": (lambda x, dim: torch.std(x, dim), lambda x: variance(x, 5).sqrt()),
    "std by name": (lambda x, dim: x.std(dim=dim, correction=0), lambda x: variance(x, 6).sqrt()),
    "var_mean": (lambda x, dim: sum(torch.var_mean(x, dim)), lambda x: variance(x, 5) + x.mean()),
    "std_mean": (lambda x, dim: sum(torch.std_mean(x, dim=dim)), lambda x: variance(x, 5).sqrt() + x.mean()),
    "aten.var.dim": (lambda x, dim: ATEN.var.dim(x, dim), lambda x: variance(x, 5)),
    "aten.var.correction": (lambda x, dim: ATEN.var.correction(x, dim, correction=0), lambda x: variance(x, 6)),
    "aten.std.correction": (lambda x, dim: ATEN.std.correction(x, dim), lambda x: variance(x, 5).sqrt()),
    "aten.var_mean": (lambda x, dim: sum(ATEN.var_mean.correction(x, dim)), lambda x: variance(x, 5) + x.mean()),
    "var of complex numbers": (
        lambda x, dim: torch.complex(x, x**2).var(dim),
        lambda x: variance(torch.complex(x, x**2), 5),
    ),
    "std of complex numbers": (
        lambda x, dim: torch.complex(x, x**2).std(dim),
        lambda x: variance(torch.complex(x, x**2), 5).sqrt(),
    ),
    "sum": (lambda x, dim: x.sum(dim) ** 2, lambda x: x.sum() ** 2),
    "mean": (lambda x, dim: x.mean(dim) ** 2, lambda x: x.mean() ** 2),
    "nansum": (lambda x, dim: x.nansum(dim) ** 2, lambda x: x.sum() ** 2),
    "amax": (lambda x, dim: x.amax(dim) ** 2, lambda x: x[1, 0] ** 2),
    "norm": (lambda x, dim: torch.norm(x, 3, dim), lambda x: x.abs().pow(3).sum().pow(1 / 3)),
    "vector_norm": (lambda x, dim: torch.linalg.vector_norm(x, 2, dim), lambda x: x.square().sum().sqrt()),
}


@pytest.mark.parametrize("dim", [(), []])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_derivatives_are_over_all_dimensions(name, dim):
    reduction, formula = REDUCTIONS[name]
    found, exact = (lambda x: reduction(x**3, dim)), (lambda x: formula(x**3))
    torch.testing.assert_close(found(X), exact(X))
    for mode in ("forward", "reverse"):
        torch.testing.assert_close(hodiff.jacobian(found, mode=mode)(X), hodiff.jacobian(exact)(X))
    expected = hodiff.hessian(exact)(X)
    # Torch lacks a batching rule of complex numbers in one of the routes.
    for route in ["auto"] if "complex" in name else hodiff.ROUTES:
        torch.testing.assert_close(hodiff.hessian(found, route=route)(X), expected)
