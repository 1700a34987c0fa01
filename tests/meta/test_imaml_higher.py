"""Tests of higher derivatives of implicit MAML against finite differences, by every route."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawing import draw
from meta.problems import mse
from meta.test_learners import tasks
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacfwd, jacrev

from hodiff import InputError, RouteError
from hodiff.meta import IMAML

ROUTES = {
    "reverse-over-reverse": lambda f: jacrev(jacrev(f)),
    "forward-over-reverse": hessian,
    "reverse-over-forward": lambda f: jacrev(jacfwd(f)),
    "forward-over-forward": lambda f: jacfwd(jacfwd(f)),
}


def recorded(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Compute the Hessian by two calls of `torch.autograd.grad`."""

    def rows(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(f(x), x, create_graph=True)
        return torch.stack([torch.autograd.grad(each, x, retain_graph=True)[0] for each in slope])

    return rows


def network() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 1), nn.Tanh()).double()
    with torch.no_grad():
        for k, each in enumerate(module.parameters()):
            each.copy_(0.4 * draw(*each.shape, seed=k))
    return module


def learner(module: nn.Module, loss: Any = mse, **options: Any) -> IMAML:
    settings = {"lr": 0.4, "steps": 60, "strength": 1.0, "cg_steps": 50, "cg_tolerance": 1e-12}
    return IMAML(module, loss, **{**settings, **options})


def of_vector(imaml: IMAML, given: Any) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return the meta-loss as a function of one vector of all adapted parameters, and the vector."""
    parts = imaml.adapted_parameters()
    sizes = [each.numel() for each in parts.values()]

    def f(vector: Tensor) -> Tensor:
        pieces = zip(parts.items(), vector.split(sizes), strict=True)
        replaced = {f"module.{name}": piece.view(each.shape) for (name, each), piece in pieces}
        return functional_call(imaml, replaced, (given,))

    return f, torch.cat([each.detach().flatten() for each in parts.values()])


@pytest.fixture(scope="module")
def differences() -> Tensor:
    """Fourth-order central differences of the plain meta-gradient, which has its own tests."""
    f, x = of_vector(learner(network()), tasks())

    def slope(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x), x)[0]

    step = 1e-3
    weights = {-2: 1, -1: -8, 1: 8, 2: -1}
    rows = [
        sum(weight * slope(x + k * step * e) for k, weight in weights.items()) / (12 * step)
        for e in torch.eye(len(x), dtype=x.dtype)
    ]
    return torch.stack(rows)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("route", ["recorded", *ROUTES])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_hessian_of_the_meta_loss_matches_differences(route: str, chunk_size: int | None, differences: Tensor) -> None:
    f, x = of_vector(learner(network(), chunk_size=chunk_size), tasks())
    found = {"recorded": recorded, **ROUTES}[route](f)(x)
    torch.testing.assert_close(found, differences, rtol=1e-6, atol=1e-7)
    assert found.abs().max() > 1e-2
    assert (found - torch.diag(found.diag())).abs().max() > 1e-2


@pytest.mark.slow
def test_third_derivatives_match_the_unrolled_loop() -> None:
    """60 steps converge, so differentiating the unrolled loop is a reference that solves no system."""

    class Unrolled(IMAML):
        def forward(self, given: Any) -> Tensor:
            parts = [self.query_losses((x, y), (query_x, query_y)) for x, y, query_x, query_y in self.chunks(given)]
            return torch.cat(parts).mean()

    f, x = of_vector(learner(network()), tasks())
    unrolled, _ = of_vector(Unrolled(network(), mse, 0.4, 60, strength=1.0), tasks())
    v = torch.linspace(-1, 1, len(x), dtype=x.dtype)

    def along(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.func.grad(lambda x: torch.func.grad(f)(x) @ v)(x) @ v

    expected = torch.func.grad(along(unrolled))(x)
    torch.testing.assert_close(torch.func.grad(along(f))(x), expected, rtol=1e-6, atol=1e-7)
    assert expected.abs().max() > 1e-2


def test_derivatives_by_frozen_parameters_match_in_transforms() -> None:
    """Derivatives by parameters that are not adapted include the shift of the minimum."""
    module = network()
    module[0].bias.requires_grad_(False)
    imaml = learner(module)
    assert imaml.names == ["0.weight"]
    bias = module[0].bias.detach().clone()

    def f(bias: Tensor) -> Tensor:
        return functional_call(imaml, {"module.0.bias": bias}, (tasks(),))

    step = 1e-4
    expected = (f(bias + step) - f(bias - step)) / (2 * step)
    torch.testing.assert_close(torch.func.grad(f)(bias), expected.reshape(1), rtol=1e-6, atol=1e-8)


def test_dropout_is_replayed() -> None:
    """The meta-gradient with create_graph uses the same masks as the plain meta-gradient."""
    module = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Dropout(0.5)).double()
    generator = torch.Generator()
    imaml = learner(module, steps=3, generator=generator)
    given = tasks(1)
    weight = module[0].weight
    torch.manual_seed(3)
    generator.manual_seed(0)
    (slope,) = torch.autograd.grad(imaml(given), weight)
    torch.manual_seed(3)
    generator.manual_seed(0)
    loss = imaml(given)
    before = torch.get_rng_state()
    with pytest.warns(UserWarning, match="argmin: the solver's result does not solve the equation"):
        (again,) = torch.autograd.grad(loss, weight, create_graph=True)
    torch.testing.assert_close(again.detach(), slope)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["per-task", "frozen"])
def test_batch_norm_in_transforms_matches(policy: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Tanh(), nn.Linear(2, 1)).double()
    f, x = of_vector(learner(module, batch_norm=policy, lr=0.2, steps=500), tasks(2))
    torch.testing.assert_close(jacrev(f)(x), torch.autograd.functional.jacobian(f, x), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(hessian(f)(x), recorded(f)(x), rtol=1e-6, atol=1e-8)


def test_shared_statistics_are_rejected_in_transforms() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double()
    f, x = of_vector(learner(module, batch_norm="shared"), tasks(2))
    with pytest.raises(RouteError, match="IMAML: batch_norm='shared'"):
        jacrev(f)(x)


@pytest.mark.parametrize("transform", [None, jacrev])
def test_differentiated_loss_parameters_are_rejected(transform: Any) -> None:
    """IMAML would lose these derivatives silently."""
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)

    module, given = network(), tasks()

    def run(scale: Tensor) -> Tensor:
        return learner(module, lambda prediction, target: scale * mse(prediction, target))(given)

    with pytest.raises(InputError, match=r"IMAML: .*lost"):
        run(scale) if transform is None else transform(run)(scale.detach())
