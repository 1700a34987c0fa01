"""Tests of Hessian operators under global modes of the caller, for unusual functions, and with wrong arguments."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from operators.cases import ReverseOnce, close, problem
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

import hodiff
from hodiff.operators import HessianOperator


@pytest.mark.parametrize("surroundings", [torch.no_grad, torch.inference_mode])
def test_callers_grad_mode_does_not_matter(surroundings: Any) -> None:
    p = problem("mlp")
    with surroundings():
        A = HessianOperator(p.objective(), {k: v.clone() for k, v in p.x.items()}, data=p.batches(2))
        inside = A.to_dense()
        moved = A.at({k: v.clone() for k, v in p.x.items()}).to_dense()
    close(inside.clone(), p.hessian())
    close(moved.clone(), p.hessian())
    close(A.to_dense(), p.hessian())
    assert not A.to_dense().requires_grad


def test_module_parameters_need_not_be_detached() -> None:
    module = nn.Linear(2, 1)
    X = torch.randn(4, 2)
    A = HessianOperator(lambda p: functional_call(module, p, (X,)).square().mean(), dict(module.named_parameters()))
    assert not A.to_dense().requires_grad
    assert all(parameter.grad is None for parameter in module.parameters())


def test_functions_that_differentiate_inside_match() -> None:
    """Functions may contain gradient penalties, by the input or by the point itself."""

    def of_input(w: Tensor) -> Tensor:
        t = torch.linspace(0, 1, 5, dtype=w.dtype, requires_grad=True)
        (slope,) = torch.autograd.grad(torch.tanh(t * w[0] + w[1]).sum() * w[2], t, create_graph=True)
        return slope.square().mean()

    def of_point(w: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad((w**3).sum(), w, create_graph=True)
        return slope.square().sum()

    w = torch.randn(3).double()
    close(HessianOperator(of_point, w).to_dense(), torch.diag(108 * w**2))
    expected = torch.autograd.functional.hessian(of_input, w)
    close(HessianOperator(of_input, w).to_dense(), expected)
    assert expected.abs().max() > 1e-2


def test_missing_derivative_names_the_operator() -> None:
    x = torch.randn(3)
    A = HessianOperator(lambda x: F.hardsigmoid(x).sum(), x, correct=False, route="reverse-over-reverse")
    with pytest.raises(hodiff.RouteError, match="hardsigmoid"):
        A @ x


def test_once_differentiable_raises_instead_of_returning_zero() -> None:
    x = torch.randn(3)

    def f(x: Tensor) -> Tensor:
        return ReverseOnce.apply(x).sum()

    with pytest.raises(hodiff.RouteError, match="once_differentiable"):
        HessianOperator(f, x, route="reverse-over-reverse") @ x
    with pytest.warns(hodiff.HodiffWarning, match="took reverse-over-forward"):
        close(HessianOperator(f, x) @ x, 2 * x, 1e-6)


def test_constant_arguments_are_accepted() -> None:
    x, c = torch.randn(3).double(), torch.tensor(2.0, requires_grad=True)
    A = HessianOperator(lambda x, c, batch: c * (batch @ x) ** 2 / 2, x, c, data=[torch.ones(3).double()])
    close(A.to_dense(), 2 * torch.ones(3, 3).double())
    assert c.grad is None


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((3, torch.ones(2)), {}, "f: expected a callable"),
        ((torch.sum, torch.ones(2, dtype=torch.int64)), {}, "x: expected a real|respect to x"),
        ((torch.sum, {}), {}, "x holds no tensor"),
        ((torch.sum, torch.ones(2)), {"reduction": "none"}, "reduction: expected one of 'mean', 'sum'"),
        ((torch.sum, torch.ones(2)), {"route": "backwards"}, "route"),
        ((torch.sum, torch.ones(2)), {"cache": "yes"}, "cache: expected"),
        ((torch.sum, torch.ones(2)), {"chunk_size": 0}, "chunk_size"),
        ((torch.sum, torch.ones(2)), {"data": 3}, "data: expected an iterable"),
        ((torch.sum, torch.ones(2)), {"data": iter([1])}, r"data: .* list\(data\)"),
        ((torch.sum, torch.ones(2)), {"process_group": object()}, "process_group: .*init_process_group"),
    ],
)
def test_rejects_bad_arguments(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(hodiff.InputError, match=f"HessianOperator: .*(?:{message})"):
        HessianOperator(*arguments, **options)


def test_rejects_functions_that_are_not_scalar_or_constant() -> None:
    x = torch.randn(3)
    with pytest.raises(hodiff.InputError, match="one real number"):
        HessianOperator(lambda x: 2 * x, x) @ x
    with pytest.raises(hodiff.InputError, match="does not depend"):
        HessianOperator(lambda x: torch.ones(()), x) @ x


def test_rejects_bad_vectors() -> None:
    A = HessianOperator(lambda x: (x["a"] ** 3).sum(), {"a": torch.randn(2, 3)})
    for v in (torch.randn(5), torch.randn(2, 3), torch.randn(6, 1, 1), torch.ones(6, dtype=torch.int64)):
        with pytest.raises(hodiff.InputError, match=r"@ v: v: expected a floating-point tensor \(6,\)"):
            A @ v
    with pytest.raises(hodiff.InputError, match=r"unexpected \['b'\]"):
        A @ {"a": torch.randn(2, 3), "b": torch.ones(1)}
    with pytest.raises(hodiff.InputError, match=r"at \['a'\]: expected \(2, 3\)"):
        A @ {"a": torch.randn(3, 2)}


def test_rejects_use_inside_a_transform() -> None:
    def inside(x: Tensor) -> Tensor:
        return (HessianOperator(lambda x: (x**3).sum(), x) @ torch.ones(2)).sum()

    for transform in (torch.func.grad(inside), torch.func.vmap(inside)):
        with pytest.raises(hodiff.InputError, match=r"x: expected plain tensors, .* hodiff\.hvp"):
            transform(torch.randn(2, 2))


def test_rejects_dual_numbers() -> None:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with pytest.raises(hodiff.InputError, match=r"x: expected plain tensors, .* hodiff\.hvp"):
            HessianOperator(lambda x: (x**3).sum(), x)
        with pytest.raises(hodiff.InputError, match=r"x: expected plain tensors, .* hodiff\.hvp"):
            HessianOperator(lambda x: (x**3).sum(), torch.ones(2)).at(x)


def test_missing_derivative_raises_route_error() -> None:
    table = torch.randn(5, 3)
    words = torch.tensor([[0, 1]])
    A = HessianOperator(lambda w: F.embedding_bag(words, w, mode="sum", sparse=True).pow(3).sum(), table)
    for product in (lambda: A @ table, A.to_dense):
        with pytest.raises(hodiff.RouteError, match=r"HessianOperator: torch does not implement this derivative: .*;"):
            product()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")
def test_frozen_script_matches() -> None:
    layer = torch.nn.Linear(2, 2).double()
    frozen = torch.jit.freeze(torch.jit.script(layer.eval()))
    x = torch.randn(2, dtype=torch.float64)
    A = HessianOperator(lambda x: (frozen(x) ** 2).sum(), x)
    torch.testing.assert_close(A.to_dense(), 2 * layer.weight.detach().mT @ layer.weight.detach())


def test_batch_weight_is_the_first_dimension_or_user_defined() -> None:
    """Batches count by the sum of their class weights, not by the number of examples."""
    p = problem("mlp")
    weight = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)

    def f(x: Any, batch: Any) -> Tensor:
        return F.cross_entropy(p.call(x, batch[0]), batch[1], weight=weight)

    whole = HessianOperator(f, p.x, (p.inputs, p.targets)).to_dense()
    told = HessianOperator(f, p.x, data=p.batches(2), batch_size=lambda batch: weight[batch[1]].sum())
    close(told.to_dense(), whole)
    assert (HessianOperator(f, p.x, data=p.batches(2)).to_dense() - whole).abs().max() > 1e-6
