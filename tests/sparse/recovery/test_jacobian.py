"""Tests of sparse Jacobians against dense ones."""

import numpy as np
import pytest
import torch
from custom_functions import cubed_slope, old_style
from torch.autograd.function import once_differentiable

import hodiff
from hodiff import InputError, RouteError
from hodiff.sparse import color, jacobian, jacobian_pattern
from tests.sparse.problems import D, point

METHODS = ("auto", "columns", "rows", "bidirectional")


def steps(x):
    """Compute a function with a banded Jacobian."""
    return x[1:] * x[:-1].sin()


def arrow(x):
    """Compute a function whose Jacobian has a dense row, a dense column and a diagonal."""
    return torch.cat([(x**2).sum()[None], x[1:] * x[0]])


def tree(x):
    return {"pairs": x["a"] * x["b"][:3], "sum": x["b"].sum()[None] ** 2}


CASES = {
    "steps": (steps, point(8)),
    "arrow": (arrow, point(12)),
    "tree": (tree, {"a": point(3), "b": point(4, 1)}),
    "tall": (lambda x: torch.cat([x, x**2, x.roll(1) * x]), point(5)),
    "wide": (lambda x: x.view(2, 6).prod(1), point(12)),
}


def dense_of(f, x):
    """Compute the Jacobian by `torch.autograd.functional.jacobian`, as a matrix."""
    leaves, spec = torch.utils._pytree.tree_flatten(x)
    sizes = [leaf.numel() for leaf in leaves]

    def flat(v):
        parts = [part.view(leaf.shape) for part, leaf in zip(v.split(sizes), leaves, strict=True)]
        results = torch.utils._pytree.tree_leaves(f(torch.utils._pytree.tree_unflatten(parts, spec)))
        return torch.cat([y.reshape(-1) for y in results])

    return torch.autograd.functional.jacobian(flat, torch.cat([leaf.reshape(-1) for leaf in leaves]))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_matches_dense_jacobian(name, method):
    f, x = CASES[name]
    expected = dense_of(f, x)
    torch.testing.assert_close(jacobian(f, method=method)(x).to_dense(), expected)
    assert np.allclose(jacobian(f, method=method, format="scipy")(x).toarray(), expected)


def test_bidirectional_takes_fewer_products_for_arrows():
    pattern = jacobian_pattern(arrow, point(200))
    assert color(pattern, "bidirectional").num_colors <= 4
    assert min(color(pattern, each).num_colors for each in ("columns", "rows")) == 200


def test_derivatives_vmap_and_chunks_match():
    x = point(8).requires_grad_()
    coloring = color(jacobian_pattern(steps, x), "columns")
    entries = jacobian(steps, coloring=coloring, format="values")
    dense = torch.autograd.functional.jacobian(steps, x, create_graph=True)
    weights = torch.linspace(-1, 1, coloring.nnz, dtype=D)
    rows, columns = jacobian_pattern(steps, x).nonzero()
    (found,) = torch.autograd.grad((weights * entries(x)).sum(), x)
    (expected,) = torch.autograd.grad((weights * dense[rows, columns]).sum(), x)
    torch.testing.assert_close(found, expected)
    points = torch.stack([point(8, seed) for seed in range(3)])
    found = torch.func.vmap(entries)(points)
    assert all(torch.allclose(a, entries(b)) for a, b in zip(found, points, strict=True))
    assert torch.allclose(jacobian(steps, chunk_size=1, format="values")(points[0]), found[0])


class OnlyBackward(torch.autograd.Function):
    """x² without forward mode."""

    @staticmethod
    def forward(x):
        return x**2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]

    @staticmethod
    def vmap(info, in_dims, x):
        return OnlyBackward.apply(x), in_dims[0]


OnceOnly = old_style("OnceOnly", lambda x: (2 * x,), once_differentiable(lambda ctx, g: 2 * g))


def test_functions_without_forward_mode_use_reverse_mode():
    """Reverse mode computes and checks the entries."""
    x = point(5)
    tall = lambda x: torch.cat([OnlyBackward.apply(x)] * 5)  # noqa: E731
    expected = torch.cat([torch.diag(2 * x)] * 5)
    for method in ("auto", "rows"):
        torch.testing.assert_close(jacobian(tall, method=method, correct=False)(x).to_dense(), expected)
    # Forward mode by double backward would give zeros for one of these.
    for f in (tall, OnceOnly.apply):
        with pytest.raises(RouteError, match=r"sparse\.jacobian"):
            jacobian(f, method="columns", correct=False)(x)
    assert jacobian(OnceOnly.apply)(x).values().eq(2).all()
    pattern = expected.numpy() != 0
    pattern[:, 2] = False
    with pytest.raises(InputError, match=r"in 1 column\(s\), such as 2"):
        jacobian(tall, coloring=color(pattern, "rows"), correct=False)(x)


def test_rejects_boolean_and_complex_results():
    for f, words in ((lambda x: x > 0, "bool"), (lambda x: torch.complex(x, x), "view_as_real")):
        with pytest.raises(InputError, match=f"sparse.jacobian: f: expected results .*{words}"):
            jacobian(f)(point(2))


def test_rejects_bad_arguments():
    x = point(4)
    with pytest.raises(InputError, match=r"sparse.jacobian: pattern: .* 3 column\(s\)"):
        jacobian(steps, pattern=np.eye(3, 4, dtype=bool))(x)
    with pytest.raises(InputError, match=r"pattern of shape \(3, 4\), got \(4, 4\)"):
        jacobian(steps, pattern=np.eye(4, dtype=bool))(x)
    with pytest.raises(InputError, match="method"):
        jacobian(steps, method="star")
    with pytest.raises(InputError, match="coloring"):
        jacobian(steps, coloring=color(np.eye(4, dtype=bool)))
    with pytest.raises(InputError, match="check_pattern: pattern"):
        hodiff.sparse.check_pattern(steps, x, np.eye(3, 4, dtype=bool), of="jacobian")
    hodiff.sparse.check_pattern(steps, x, jacobian_pattern(steps, x), of="jacobian")
    with pytest.raises(InputError, match="of"):
        hodiff.sparse.check_pattern(steps, x, jacobian_pattern(steps, x), of="gradient")


# A Function that no transform supports
OldStyle = old_style("OldStyle", lambda x: (x**3, x), cubed_slope)


CHAIN = torch.diag(torch.ones(4, dtype=D), 1) + 2 * torch.eye(5, dtype=D)
CHAIN_COO = CHAIN.to_sparse_coo()
# Functions that transforms do not support, and equivalent supported functions.
AUTOGRAD_ALONE = {
    "old style": (OldStyle.apply, lambda x: x**3),
    "csr": (lambda x: (CHAIN.to_sparse_csr() @ x).sin(), lambda x: (CHAIN @ x).sin()),
    "coo": (lambda x: torch.sparse.mm(CHAIN_COO, x[:, None]).sin(), lambda x: (CHAIN @ x).sin()),
    "gradients inside": (
        lambda x: torch.autograd.grad((x.roll(1) * x**3).sum(), x, create_graph=True)[0],
        lambda x: 3 * x.roll(1) * x**2 + x.roll(-1) ** 3,
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", ["auto", "rows"])
@pytest.mark.parametrize("name", AUTOGRAD_ALONE)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_functions_that_only_autograd_differentiates_match(name, method):
    f, formula = AUTOGRAD_ALONE[name]
    x = point(5)
    J = jacobian(f, method=method)
    expected = torch.func.jacrev(formula)(x)
    found = J(x)
    torch.testing.assert_close(found.to_dense(), expected)
    assert not found.requires_grad or name == "gradients inside"  # hodiff cannot detect it there
    assert jacobian_pattern(f, x).nnz == (expected != 0).sum()
    scale = torch.tensor(2.0, dtype=D, requires_grad=True)
    entries = jacobian(lambda x: scale * f(x), method=method, format="values")(x.requires_grad_())
    if name != "gradients inside":
        with pytest.raises(RouteError, match=r"sparse\.jacobian: torch does not implement"):
            jacobian(f, method="columns")(x)
    by_x, by_scale = torch.autograd.grad(entries.sum(), (x, scale))
    torch.testing.assert_close(by_scale, expected.sum())
    torch.testing.assert_close(by_x, torch.func.grad(lambda x: 2 * torch.func.jacrev(formula)(x).sum())(x.detach()))


def test_functions_that_only_autograd_differentiates_are_rejected_inside_transforms():
    coloring = color(jacobian_pattern(OldStyle.apply, point(3)), "rows")
    J = jacobian(OldStyle.apply, coloring=coloring, format="values")
    with pytest.raises((RouteError, RuntimeError), match="setup_context"):
        torch.func.grad(lambda x: J(x).sum())(point(3))


def test_sparse_formats_are_rejected_under_vmap():
    coloring = color(np.eye(3, dtype=bool), "columns")
    with pytest.raises(InputError, match=r"format: expected 'values' under torch\.func\.vmap"):
        torch.func.vmap(jacobian(torch.sin, coloring=coloring))(torch.ones(2, 3))


@pytest.mark.parametrize("method", ["auto", "columns", "rows", "bidirectional"])
def test_missing_entries_of_small_rows_are_detected(method):
    """The check by cotangents compares columns, where a large row must not hide a missing entry of a small row."""
    matrix = torch.tensor([[1e12, 0.0], [1e-5, 1.0], [3.0, 4.0]], dtype=D)
    with pytest.raises(InputError, match="pattern: expected"):
        jacobian(lambda x: matrix @ x, method=method, pattern=np.array([[1, 0], [0, 1], [1, 1]], bool))(point(2))
    weights, neighbour = 10 ** torch.linspace(-5, 5, 7, dtype=D), [1]
    f = lambda x: weights * (x.sin() ** 2 + x.cos() ** 2 + x * x.roll(neighbour[0]))  # noqa: E731
    J, x = jacobian(f, method=method), point(7)
    for neighbour[0] in (1, 2, 3):
        torch.testing.assert_close(J(x).to_dense(), hodiff.jacobian(f)(x), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("wide", [False, True])
def test_bidirectional_with_canceling_terms_matches(wide):
    f = lambda x: (x.sin() ** 2 + x.cos() ** 2)[1:]  # noqa: E731
    g = lambda x: torch.cat([f(x), x]) if not wide else f(x)  # noqa: E731
    J = jacobian(g, method="bidirectional")(point(50)).to_dense()
    torch.testing.assert_close(J, hodiff.jacobian(g)(point(50)))


def test_rejects_results_that_are_no_tensors():
    with pytest.raises(InputError, match=r"sparse\.jacobian: f: expected a tensor or a pytree of tensors .* got float"):
        jacobian(lambda x: [x, 1.0])(point(2))
    assert jacobian(lambda x: (x, None))(point(2)).shape == (2, 2)


def test_empty_inputs_of_legacy_functions_are_accepted():
    assert jacobian(OldStyle.apply)(torch.empty(0)).shape == (0, 0)
    assert jacobian(lambda x: OldStyle.apply(x)[:0])(point(3)).shape == (0, 3)
