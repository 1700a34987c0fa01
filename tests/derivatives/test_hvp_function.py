"""The product as one node: derivatives of high order, closed-over tensors, memory and messages."""

import pytest
import torch
from memory_use import SavedMemory

import hodiff
from hodiff import hvp_function
from hodiff.errors import InputError

D = torch.float64


@pytest.mark.slow
def test_third_derivatives_match_differences_by_every_route():
    """The third derivative of the product is the fifth derivative of the function."""
    product = hvp_function(lambda x: torch.sin(x.prod()))
    inputs = (torch.tensor([0.4, 0.9], dtype=D), torch.tensor([0.7], dtype=D))
    hodiff.assert_differentiable(lambda x, v: product(x, torch.cat([v, 2 * v])), inputs, order=3, scipy=False)


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("f", [lambda x: (x**2).sum(), lambda x: (x**3).sum(), lambda x: x[0] * x[1]])
def test_polynomials_with_vanishing_derivatives_match_differences(f):
    product = hvp_function(f)
    inputs = (torch.tensor([0.4, 0.9], dtype=D), torch.tensor([0.7, 1.1], dtype=D))
    hodiff.assert_differentiable(product, inputs, order=2, scipy=False)


def test_gradients_by_closed_over_tensors_match():
    w = torch.randn(3, dtype=D, requires_grad=True)
    x = torch.randn(3, dtype=D, requires_grad=True)
    v = torch.randn(3, dtype=D, requires_grad=True)

    def f(x, c):
        return (torch.sin(x * w).sum() * x.exp()).sum() * c

    results = []
    for product in (hvp_function(f), lambda x, v, c: hodiff.hvp(f, x, v, c)):
        first = torch.autograd.grad(product(x, v, 2.0).square().sum(), [x, v, w], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [x, v, w])
        results.append([*first, *second])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_pytrees_match_hvp():
    def f(p):
        return (p["a"] ** 3).sum() * p["b"]

    p = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)}
    v = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor(1.0)}
    got, expected = hvp_function(f)(p, v), hodiff.hvp(f, p, v)
    assert got.keys() == expected.keys()
    for name in p:
        torch.testing.assert_close(got[name], expected[name])


def test_graph_has_one_node():
    x = torch.randn(3, requires_grad=True)
    y = hvp_function(lambda x: x.exp().sum())(x, torch.ones(3))
    assert next(node for node, _ in y.grad_fn.next_functions if node is not None).variable is x


def test_memory_at_first_and_second_order_is_bounded():
    n = 1000
    x, v = torch.randn(n, dtype=D, requires_grad=True), torch.randn(n, dtype=D, requires_grad=True)

    def f(x):
        return torch.sin(x.exp() * x.cos()).sum() ** 2

    with SavedMemory() as saved:
        y = hvp_function(f)(x, v)
        forward = saved.nbytes()
        u = torch.randn_like(y).requires_grad_()
        gradients = torch.autograd.grad(y, [x, v], u, create_graph=True)
        assert (forward, saved.nbytes()) == (x.nbytes + v.nbytes, x.nbytes + v.nbytes + u.nbytes)
        assert len(gradients) == 2
        z = hodiff.hvp(f, x, v)
        assert saved.nbytes() > 10 * x.nbytes
        assert z.shape == y.shape


@pytest.mark.slow
def test_compiled_matches_eager():
    product = hvp_function(lambda x: torch.sin(x).prod())
    x, v = torch.randn(3, dtype=D), torch.randn(3, dtype=D)
    torch.testing.assert_close(torch.compile(product, backend="aot_eager", fullgraph=True)(x, v), product(x, v))


def test_rejects_bad_arguments():
    x = torch.ones(2)
    with pytest.raises(InputError, match=r"hvp_function: f: expected a callable, got int"):
        hvp_function(3)
    with pytest.raises(InputError, match=r"hvp_function: v: expected \(2,\) torch.float32 as in x, got \(3,\)"):
        hvp_function(torch.sum)(x, torch.ones(3))
    with pytest.raises(InputError, match=r"hvp_function: v: expected the structure of x"):
        hvp_function(torch.sum)([x], x)
    with pytest.raises(InputError, match=r"hvp_function: x: expected floating-point tensors, got torch.int64"):
        hvp_function(torch.sum)(x.long(), x.long())
    with pytest.raises(
        InputError, match=r"hvp_function: f: expected a floating-point tensor of shape \(\), got \(2,\)"
    ):
        hvp_function(torch.sin)(x, x)
