"""Modules that cache computed tensors, by every route, against torch's Hessian of the formula."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import hodiff

D = torch.float64
X, W, V = (torch.tensor(each, dtype=D) for each in ([1.0, 2, 3], [0.5, -1, 2], [1.0, 1, 1]))


def formula(w):
    return ((w.exp() * X).sin() * w).square().sum()


class Memo(nn.Module):
    """Caches the exponential of its weight as an attribute, in a list or in a dict."""

    def __init__(self, where):
        super().__init__()
        self.w = nn.Parameter(W.clone())
        self.where, self.kept = where, {"attribute": None, "list": [], "dict": {}}[where]

    def forward(self, x):
        if not self.kept if self.where != "attribute" else self.kept is None:
            exponential = self.w.exp()
            if self.where == "attribute":
                self.kept = exponential
            elif self.where == "list":
                self.kept.append(exponential)
            else:
                self.kept["w"] = exponential
        c = {"attribute": lambda: self.kept, "list": lambda: self.kept[0], "dict": lambda: self.kept["w"]}[self.where]()
        return (c * x).sin() * self.w


def objective(where):
    module = Memo(where)
    return lambda w: functional_call(module, {"w": w}, (X,)).square().sum()


@pytest.fixture
def matrix():
    return torch.func.hessian(formula)(W)


@pytest.mark.parametrize("where", ["attribute", "list", "dict"])
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_hvp_matches_for_modules_that_cache_tensors(route, where, matrix):
    torch.testing.assert_close(hodiff.hvp(objective(where), W, V, route=route), matrix @ V, rtol=1e-12, atol=1e-12)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("where", ["attribute", "list", "dict"])
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_operator_matches_for_modules_that_cache_tensors(route, where, matrix):
    f = objective(where)
    A = hodiff.HessianOperator(f, W, route=route)
    torch.testing.assert_close(A @ V, matrix @ V, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(A.to_dense(), matrix, rtol=1e-12, atol=1e-12)
    other = torch.func.hessian(formula)(W + 0.5)
    torch.testing.assert_close(A.at(W + 0.5) @ V, other @ V, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("route", hodiff.ROUTES[1:3])
def test_modules_keep_no_tensor_of_a_transform(route):
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(W.clone())
            self.register_buffer("mean", torch.zeros(3, dtype=D))

        def forward(self, x):
            y = self.w * x
            self.mean = 0.9 * self.mean + 0.1 * y.detach()
            return y.tanh() * (1 + self.mean)

    module = Running()
    for _ in range(2):
        hodiff.hvp(lambda w: functional_call(module, {"w": w}, (X,)).square().sum(), W, V, route=route)
    assert torch.equal(module.mean, torch.zeros(3, dtype=D))
    assert type(module.mean) is torch.Tensor
