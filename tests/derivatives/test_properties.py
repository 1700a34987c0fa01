"""Identities that hold for every function, shape and pytree, tested with hypothesis."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES, ravel, unravel
from derivatives.oracles import assert_same_structure
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hodiff import ROUTES, directional_derivatives, hessian, hessian_diagonal, hessian_matrix, hvp, jacobian

SEEDS = st.integers(0, 2**31 - 1)
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
# Functions with curvatures of every sign; the last has none
NONLINEARITIES: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.tanh,
    torch.sin,
    torch.exp,
    torch.square,
    torch.nn.functional.softplus,
    lambda t: 2 * t,
)


def pytrees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Strategy for leaves, and for nested dicts, lists and tuples of leaves."""
    keys = st.text("abc", min_size=1, max_size=2)
    return st.recursive(
        leaves,
        lambda children: (
            st.lists(children, min_size=1, max_size=3)
            | st.tuples(children, children)
            | st.dictionaries(keys, children, min_size=1, max_size=3)
        ),
        max_leaves=4,
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[Callable[[Any], Tensor], Any, Any, Any]:
    """A random smooth function of a random pytree, with a point and two directions.

    Each leaf passes through a nonlinearity and a random matrix into a common vector, where leaves mix.
    """
    shapes = draw(pytrees(SHAPES.map(lambda shape: torch.empty(shape, dtype=torch.float64))))
    generator = torch.Generator().manual_seed(draw(SEEDS))
    kinds = draw(st.lists(st.sampled_from(NONLINEARITIES), min_size=4, max_size=4))

    def fill(leaf: Tensor) -> Tensor:
        return torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)

    x, v, u = (tree_map(fill, shapes) for _ in range(3))
    matrices = [fill(torch.empty(3, leaf.numel(), dtype=torch.float64)) for leaf in tree_leaves(x)]

    def f(tree: Any) -> Tensor:
        mixed = sum(
            matrix @ kind(leaf).reshape(-1)
            for matrix, kind, leaf in zip(matrices, kinds * len(matrices), tree_leaves(tree), strict=False)
        )
        return torch.tanh(mixed).prod() + mixed[0] * mixed[1]

    return f, x, v, u


def close(actual: Tensor, expected: Tensor, factor: float = 1.0) -> None:
    """Assert equality up to rounding: 10⁻¹¹ of the largest number involved."""
    scale = max([1.0, *(t.abs().max().item() for t in (actual, expected) if t.numel())])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11 * scale * factor)


@pytest.mark.slow
@given(problems(), st.floats(-3, 3), st.sampled_from(("auto", *ROUTES)))
def test_hvp_is_linear_in_the_direction(problem: Any, scale: float, route: str) -> None:
    f, x, v, u = problem
    combined = tree_map(lambda a, b: scale * a + b, v, u)
    actual = ravel(hvp(f, x, combined, route=route))
    close(actual, scale * ravel(hvp(f, x, v, route=route)) + ravel(hvp(f, x, u, route=route)))


@given(problems(), st.sampled_from(("auto", *ROUTES)))
def test_hvp_is_symmetric(problem: Any, route: str) -> None:
    f, x, v, u = problem
    left = ravel(u) @ ravel(hvp(f, x, v, route=route))
    close(left, ravel(v) @ ravel(hvp(f, x, u, route=route)), factor=ravel(x).numel() + 1)


@pytest.mark.slow
@given(problems())
def test_routes_agree_on_random_functions(problem: Any) -> None:
    f, x, v, _ = problem
    products = [hvp(f, x, v, route=route) for route in ROUTES]
    for product in products:
        assert_same_structure(product, x)
        close(ravel(product), ravel(products[0]))


@pytest.mark.one_in(9)
@pytest.mark.parametrize("case", CASES, ids=lambda each: each.name)
@settings(max_examples=5)
@given(seed=SEEDS)
def test_routes_agree_on_every_case(case: Any, seed: int) -> None:
    """Routes agree at points and in directions without a reference."""
    x, args = case.inputs(seed=seed)
    v = case.vector(seed=seed)
    expected = ravel(hvp(case.function, x, v, *args))
    for route in ROUTES:
        close(ravel(hvp(case.function, x, v, *args, route=route)), expected, factor=10)


@pytest.mark.slow
@given(problems(), st.sampled_from(("auto", *ROUTES)), st.sampled_from(("auto", None, 1, 2, 5)))
def test_dense_derivatives_are_stacked_products(problem: Any, route: str, chunk_size: Any) -> None:
    f, x, _, _ = problem
    options = {"route": route, "chunk_size": chunk_size}
    flat = ravel(x)
    unit_vectors = torch.eye(flat.numel(), dtype=flat.dtype)
    rows = [ravel(hvp(f, x, unravel(unit, x))) for unit in unit_vectors]
    expected = torch.stack(rows) if rows else flat.new_zeros(0, 0)
    matrix = hessian_matrix(f, x, **options)
    close(matrix, expected)
    assert matrix.equal(matrix.T)
    close(ravel(hessian_diagonal(f, **options)(x)), expected.diagonal())
    blocks = hessian(f, **options)(x)
    assert_same_structure(blocks, tree_map(lambda a: tree_map(lambda b: a.new_empty((*a.shape, *b.shape)), x), x))
    pairs = [(a, b) for a in tree_leaves(x) for b in tree_leaves(x)]
    squares = [block.reshape(a.numel(), b.numel()) for block, (a, b) in zip(tree_leaves(blocks), pairs, strict=True)]
    n = len(tree_leaves(x))
    close(torch.cat([torch.cat(squares[i * n : (i + 1) * n], dim=1) for i in range(n)]), expected)


@pytest.mark.slow
@given(problems())
def test_second_directional_derivative_matches_quadratic_form(problem: Any) -> None:
    f, x, v, _ = problem
    value, first, second = directional_derivatives(f, x, v, order=2)
    close(value, f(x))
    close(first, ravel(torch.func.grad(f)(x)) @ ravel(v), factor=10)
    close(second, ravel(v) @ ravel(hvp(f, x, v)), factor=10)


@given(problems(), st.integers(1, 4), SEEDS, st.sampled_from(("auto", None, 1, 3)))
def test_jacobian_modes_agree(problem: Any, outputs: int, seed: int, chunk_size: Any) -> None:
    f, x, _, _ = problem
    weights = torch.randn(outputs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def g(tree: Any) -> dict[str, Tensor]:
        value = f(tree)
        return {"waves": torch.sin(weights * value), "value": value}

    forward, reverse = (jacobian(g, mode=mode, chunk_size=chunk_size)(x) for mode in ("forward", "reverse"))
    assert_same_structure(forward, reverse)
    for a, b in zip(tree_leaves(forward), tree_leaves(reverse), strict=True):
        close(a, b, factor=10)
    slope = ravel(torch.func.grad(f)(x))
    close(ravel(reverse["value"]), slope, factor=10)
    # Each output has one row, whose blocks are in the order of the leaves of x.
    rows = torch.cat([leaf.reshape(outputs, -1) for leaf in tree_leaves(reverse["waves"])], dim=1)
    close(rows, torch.outer(weights * torch.cos(weights * f(x)), slope), factor=10)


@given(SEEDS, st.sampled_from((1e-30, 1e-8, 1.0, 1e8, 1e30)), st.sampled_from(ROUTES))
def test_products_are_linear_at_extreme_scales(seed: int, scale: float, route: str) -> None:
    """Products are linear over sixty orders of magnitude: nothing is normalised or clipped."""
    generator = torch.Generator().manual_seed(seed)
    x, v = (torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(2))
    product = hvp(lambda y: (y**4).sum(), x, scale * v, route=route)
    torch.testing.assert_close(product, 12 * x**2 * (scale * v), rtol=1e-14, atol=0)
