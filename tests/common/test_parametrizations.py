"""Products at given parameters, while torch caches parametrized weights of other parameters."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

import hodiff

D = torch.float64


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.Tanh()).double()


def problem(module):
    x = torch.randn(4, 3, dtype=D)
    p = {name: each.detach() + 0.5 for name, each in module.named_parameters()}
    v = {name: torch.randn_like(each) for name, each in p.items()}
    return (lambda p: functional_call(module, p, (x,)).pow(3).sum()), p, v


CALLS = {
    "hvp": lambda loss, p, v: hodiff.hvp(loss, p, v),
    "torch alone": lambda loss, p, v: hodiff.hvp(loss, p, v, correct=False, route="reverse-over-reverse"),
    "forward over reverse": lambda loss, p, v: hodiff.hvp(loss, p, v, route="forward-over-reverse"),
    "operator": lambda loss, p, v: hodiff.HessianOperator(loss, p) @ v,
    "jacobian": lambda loss, p, _: hodiff.jacobian(loss)(p),
    "Laplacian": lambda loss, p, _: hodiff.laplacian(loss)(p),
    "Laplacian of the Laplacian": lambda loss, p, _: hodiff.bilaplacian(lambda q: loss(p | {"0.bias": q}))(p["0.bias"]),
    "jet": lambda loss, p, v: hodiff.taylor.jet(loss, (p,), ([v, v],)),
    "differences": lambda loss, p, v: hodiff.checks.central_differences(loss, p, v).value,
    "SciPy": lambda loss, p, _: hodiff.checks.scipy_hessian(lambda q: loss(p | {"0.bias": q}), p["0.bias"]).matrix,
    "least squares": lambda loss, p, _: hodiff.optimize.least_squares(lambda p: loss(p)[None], p, max_nfev=2).x,
    "check": lambda loss, p, _: hodiff.check(loss, p, vmap=False, scipy=False).ok,
    "preflight": lambda loss, p, _: hodiff.preflight(loss, p).ok,
    "inner loop": lambda loss, p, _: hodiff.meta.adapt(lambda p, _: loss(p), p, None, hodiff.meta.SGD(0.1), 2),
    "hypergradient": lambda loss, p, _: (
        hodiff.meta.hypergradient(
            lambda q, h: loss(q),
            lambda q, h: loss(q) * h + sum((each - 1).square().sum() for each in q.values()),
            p,
            torch.tensor(0.1, dtype=D),
            method="unroll",
        ).value
    ),
    "fixed point": lambda loss, p, _: hodiff.implicit.fixed_point(
        lambda y, s: s * loss(p).tanh() + 0.1 * y.sin(), hodiff.implicit.picard()
    )(torch.zeros((), dtype=D), torch.ones((), dtype=D)),
}


@pytest.mark.parametrize("name", CALLS)
def test_cached_weights_of_another_point_are_not_used(name, module):
    loss, p, v = problem(module)
    expected = CALLS[name](loss, p, v)
    with parametrize.cached():
        module(torch.ones(1, 3, dtype=D))
        found = CALLS[name](loss, p, v)
        kept = module[0].weight
        assert module[0].weight is kept, "what torch keeps for the module itself stays"
    torch.testing.assert_close(found, expected)


def test_learners_ignore_cached_weights(module):
    """The tasks of a learner use their adapted parameters, not the cached weights."""
    maml = hodiff.meta.MAML(module, nn.functional.mse_loss, 0.1, 2)
    tasks = tuple(torch.randn(2, 5, 3, dtype=D) for _ in range(4))
    expected = maml(tasks)
    with parametrize.cached():
        module(torch.ones(1, 3, dtype=D))
        torch.testing.assert_close(maml(tasks), expected)
