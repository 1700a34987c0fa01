"""Sparse Jacobians against dense ones."""

import numpy as np
import pytest
import torch
from sparse.problems import D, point

import hodiff
from hodiff import InputError, RouteError
from hodiff.sparse import color, jacobian, jacobian_pattern

METHODS = ("auto", "columns", "rows", "bidirectional")


def steps(x):
    """A band."""
    return x[1:] * x[:-1].sin()


def arrow(x):
    """A dense row, a dense column and a diagonal: two directions take few products, one takes many."""
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
    """By unit tangents, one after another, as a matrix."""
    leaves, spec = torch.utils._pytree.tree_flatten(x)
    sizes = [leaf.numel() for leaf in leaves]

    def flat(v):
        parts = [part.view(leaf.shape) for part, leaf in zip(v.split(sizes), leaves, strict=True)]
        results = torch.utils._pytree.tree_leaves(f(torch.utils._pytree.tree_unflatten(parts, spec)))
        return torch.cat([y.reshape(-1) for y in results])

    return torch.autograd.functional.jacobian(flat, torch.cat([leaf.reshape(-1) for leaf in leaves]))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_dense_one(name, method):
    f, x = CASES[name]
    expected = dense_of(f, x)
    torch.testing.assert_close(jacobian(f, method=method)(x).to_dense(), expected)
    assert np.allclose(jacobian(f, method=method, format="scipy")(x).toarray(), expected)


def test_two_directions_take_fewer_products():
    pattern = jacobian_pattern(arrow, point(200))
    assert color(pattern, "bidirectional").num_colors <= 4
    assert min(color(pattern, each).num_colors for each in ("columns", "rows")) == 200


def test_derivatives_batches_and_chunks():
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
    """x², which torch cannot push tangents through."""

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


def test_where_torch_has_no_forward_mode():
    """Cotangents do, and are what is compared as well."""
    x = point(5)
    tall = lambda x: torch.cat([OnlyBackward.apply(x)] * 5)  # noqa: E731
    expected = torch.cat([torch.diag(2 * x)] * 5)
    for method in ("auto", "rows"):
        torch.testing.assert_close(jacobian(tall, method=method, correct=False)(x).to_dense(), expected)
    with pytest.raises(RouteError, match=r"sparse\.jacobian"):
        jacobian(tall, method="columns", correct=False)(x)
    pattern = expected.numpy() != 0
    pattern[:, 2] = False
    with pytest.raises(InputError, match=r"in 1 column\(s\), such as 2"):
        jacobian(tall, coloring=color(pattern, "rows"), correct=False)(x)


def test_results_that_have_no_derivative_are_refused():
    for f, words in ((lambda x: x > 0, "bool"), (lambda x: torch.complex(x, x), "view_as_real")):
        with pytest.raises(InputError, match=f"sparse.jacobian: f: expected results .*{words}"):
            jacobian(f)(point(2))


def test_wrong_input():
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
