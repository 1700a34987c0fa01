"""Copied and pickled operators have the same point, and compute a new linearization."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hodiff
from hodiff.errors import InputError
from hodiff.operators import DiagonalOperator, MatrixOperator

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(4, generator=GENERATOR, dtype=torch.float64)
INPUTS = torch.randn(6, 4, generator=GENERATOR, dtype=torch.float64)
TARGETS = torch.randn(6, generator=GENERATOR, dtype=torch.float64)


def linear(w: Tensor, inputs: Tensor) -> Tensor:
    return (inputs @ w).tanh()


def quartic(x: Tensor) -> Tensor:
    return (x**4).sum() + x.prod()


def of_batch(x: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(linear(x, batch[0]), batch[1])


def of_dict(p: dict[str, Tensor]) -> Tensor:
    return (p["a"] ** 4).sum() * p["b"].sum() ** 2


def powers(x: Tensor) -> Tensor:
    return torch.cat([x**2, x**3])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(INPUTS[:4], TARGETS[:4]), (INPUTS[4:], TARGETS[4:])]


def of_network() -> hodiff.GaussNewtonOperator:
    model = network()
    point = dict(model.named_parameters())
    return hodiff.GaussNewtonOperator(model, F.mse_loss, point, INPUTS, TARGETS[:, None])


def positive() -> hodiff.HessianOperator:
    return hodiff.HessianOperator(quartic, X.abs() + 1)


KINDS: dict[str, Callable[[], hodiff.operators.LinearOperator]] = {
    "Hessian": lambda: hodiff.HessianOperator(quartic, X),
    "Hessian by another route": lambda: hodiff.HessianOperator(quartic, X, route="forward-over-reverse"),
    "Hessian over batches": lambda: hodiff.HessianOperator(of_batch, X, data=batches()),
    "block": lambda: hodiff.HessianOperator(of_dict, {"a": X, "b": X[:2]}).block("a"),
    "Gauss-Newton": lambda: hodiff.GaussNewtonOperator(linear, F.mse_loss, X, INPUTS, TARGETS),
    "Gauss-Newton of a module": of_network,
    "Fisher": lambda: hodiff.FisherOperator(linear, F.mse_loss, X, INPUTS, TARGETS),
    "sampled Fisher": lambda: hodiff.FisherOperator(linear, F.mse_loss, X, INPUTS, TARGETS, samples=2),
    "empirical Fisher": lambda: hodiff.EmpiricalFisherOperator(linear, F.mse_loss, X, INPUTS, TARGETS),
    "Jacobian": lambda: hodiff.JacobianOperator(powers, X),
    "transposed Jacobian": lambda: hodiff.JacobianOperator(powers, X).T,
    "sum and product": lambda: 2 * positive() @ positive() + MatrixOperator(torch.outer(X, X)) - DiagonalOperator(X),
    "inverse": lambda: positive().inverse(method="dense"),
}


def saved(A: hodiff.operators.LinearOperator) -> hodiff.operators.LinearOperator:
    file = io.BytesIO()
    torch.save(A, file)
    file.seek(0)
    operator: hodiff.operators.LinearOperator = torch.load(file, weights_only=False)
    return operator


WAYS: dict[str, Callable[[hodiff.operators.LinearOperator], hodiff.operators.LinearOperator]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda A: pickle.loads(pickle.dumps(A)),
    "torch.save": saved,
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_copy_has_the_same_products(kind: str, way: str) -> None:
    A = KINDS[kind]()
    v = torch.randn(A.shape[1], 2, generator=GENERATOR, dtype=torch.float64)
    expected = A @ v
    again = WAYS[way](WAYS[way](A))
    torch.testing.assert_close(again @ v, expected)
    torch.testing.assert_close(A @ v, expected)
    torch.testing.assert_close(again.to_dense(), A.to_dense())


def test_deep_copy_is_independent_of_in_place_changes() -> None:
    x = X.clone()
    A = hodiff.HessianOperator(quartic, x)
    expected = A @ X
    again = copy.deepcopy(A)
    x.add_(1)
    torch.testing.assert_close(again @ X, expected)
    with pytest.raises(InputError, match="changed in place since"):
        A @ X
    with pytest.raises(InputError, match="changed in place since"):
        copy.deepcopy(A)
    with pytest.raises(InputError, match="changed in place since"):
        pickle.dumps(A)


def test_operator_of_a_lambda_is_copied_but_not_pickled() -> None:
    A = hodiff.HessianOperator(lambda x: (x**3).sum(), X)
    torch.testing.assert_close(copy.deepcopy(A) @ X, 6 * X * X)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(A)


def test_copy_moves_to_another_point() -> None:
    A = hodiff.HessianOperator(quartic, X)
    A @ X
    again = copy.deepcopy(A).at(X + 1)
    torch.testing.assert_close(again @ X, hodiff.HessianOperator(quartic, X + 1) @ X)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_compiled_operators_are_copied_and_pickled() -> None:
    A = hodiff.HessianOperator(quartic, X, compile=True)
    expected = A @ X
    again = pickle.loads(pickle.dumps(A))
    torch.testing.assert_close(again @ X, expected)
    torch.testing.assert_close(copy.deepcopy(A) @ X, expected)


def test_operator_with_a_process_group_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    A = hodiff.HessianOperator(quartic, X)
    monkeypatch.setattr(A, "process_group", object())
    with pytest.raises(InputError, match="process_group: expected None in an operator that is copied or pickled"):
        copy.deepcopy(A)
