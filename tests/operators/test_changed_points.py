"""Operators, and operators made of them, raise after their point was changed in place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import hodiff

GENERATOR = torch.Generator().manual_seed(0)
X, Y = (torch.randn(5, n, generator=GENERATOR, dtype=torch.float64) for n in (2, 1))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def outputs(model: nn.Module) -> Callable[[Any], Tensor]:
    return lambda p: functional_call(model, p, (X,))


OPERATORS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "KFAC": lambda model, x: hodiff.KFACOperator(model, F.mse_loss, x, X, Y),
    "EKFAC": lambda model, x: hodiff.EKFACOperator(model, F.mse_loss, x, X, Y),
    "Shampoo": lambda model, x: hodiff.operators.ShampooOperator(model, F.mse_loss, x, X, Y),
    "KFOC": lambda model, x: hodiff.operators.KFOCOperator(model, F.mse_loss, x, X, Y),
    "Hessian": lambda model, x: hodiff.HessianOperator(lambda p: F.mse_loss(outputs(model)(p), Y), x),
    "Gauss-Newton": lambda model, x: hodiff.GaussNewtonOperator(model, F.mse_loss, x, X, Y),
    "Fisher": lambda model, x: hodiff.FisherOperator(model, F.mse_loss, x, X, Y),
    "empirical Fisher": lambda model, x: hodiff.EmpiricalFisherOperator(model, F.mse_loss, x, X, Y),
    "Jacobian": lambda model, x: hodiff.JacobianOperator(outputs(model), x),
}
DERIVED: dict[str, Callable[[Any], Any]] = {
    "itself": lambda A: A,
    "transposed": lambda A: A.T,
    "sum": lambda A: A + A,
    "multiple": lambda A: 2 * A,
    "product": lambda A: A.T @ A,
    "damped": lambda A: A.damped(0.1),
    "block": lambda A: A.block("0.weight"),
    "dense inverse": lambda A: A.inverse("dense", damping=1.0),
    "inverse of an inverse": lambda A: A.inverse("dense", damping=1.0).inverse("dense", damping=1.0),
    "low rank": lambda A: hodiff.operators.low_rank_approximation(A, 3),
    "inverse of low rank": lambda A: hodiff.operators.low_rank_approximation(A, 3).inverse(damping=1.0),
    "inverse": lambda A: A.inverse(damping=1.0),
    "inverse factors": lambda A: A.inverse("heuristic", damping=1.0),
    "eigenvectors": lambda A: A.eigh().eigenvectors,
}
SQUARE_ONLY = {"damped", "block", "dense inverse", "inverse of an inverse"}
POSITIVE_ONLY = {"low rank", "inverse of low rank"}
FACTORED_ONLY = {"inverse", "inverse factors", "eigenvectors"}


def pairs() -> list[tuple[str, str]]:
    return [
        (kind, form)
        for kind in OPERATORS
        for form in DERIVED
        if not (kind == "Jacobian" and form in SQUARE_ONLY)
        and (form not in POSITIVE_ONLY or kind in {"Gauss-Newton", "KFAC"})
        and (form not in FACTORED_ONLY or kind == "KFAC" or (kind == "EKFAC" and form != "inverse factors"))
    ]


@pytest.mark.parametrize(("kind", "form"), pairs())
def test_raises_after_the_point_was_changed_in_place(kind: str, form: str) -> None:
    model = network()
    x = {name: parameter.detach() for name, parameter in model.named_parameters()}
    A = DERIVED[form](OPERATORS[kind](model, x))
    v = torch.ones(A.shape[1], dtype=torch.float64)
    expected = A @ v
    torch.testing.assert_close(A @ v, expected)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    uses: list[Callable[[], Any]] = [
        lambda: A @ v,
        lambda: A.T @ expected,
        lambda: A.to_dense(),
        lambda: A @ v[:, None],
    ]
    if form not in {"block", "eigenvectors"} and "inverse" not in form:
        uses.append(lambda: A.to(torch.float32) @ v.float())
    if kind in {"KFAC", "EKFAC"}:
        uses.append(lambda: copy.deepcopy(A))
    for use in uses:
        with pytest.raises(hodiff.InputError, match="changed in place since"):
            use()


@pytest.mark.parametrize("kind", [hodiff.GaussNewtonOperator, hodiff.FisherOperator, hodiff.EmpiricalFisherOperator])
@pytest.mark.parametrize("changed", ["inputs", "targets"])
def test_diagonal_raises_after_data_were_changed_in_place(kind: Any, changed: str) -> None:
    model, data = network(), {"inputs": X.clone(), "targets": Y.clone()}
    A = kind(model, F.mse_loss, dict(model.named_parameters()), data["inputs"], data["targets"])
    expected = (A @ torch.eye(A.shape[0], dtype=torch.float64)).diagonal()
    for _ in range(2):
        torch.testing.assert_close(A.diagonal(exact=True).value, expected)
    data[changed].add_(1)
    with pytest.raises(hodiff.InputError, match="expected the tensors that it read when it was linearized, got one"):
        A.diagonal(exact=True)
