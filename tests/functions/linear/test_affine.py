"""Tests of sums and scalings: the mask, broadcasting, saved tensors, and refused arguments."""

import pytest
import torch
from drawing import draw

import hodiff
from hodiff.functions.linear.affine import fused_add_relu, scale_shift, weighted_sum


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def saved_bytes(function, *arguments):
    held = {}

    def pack(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert function(*arguments).requires_grad
    return sum(held.values())


def test_add_relu_saves_one_byte_per_element():
    x, y = draw(4, 5).requires_grad_(), draw(5, seed=1).requires_grad_()
    assert saved_bytes(fused_add_relu, x, y) == 20
    assert saved_bytes(lambda x, y: torch.relu(x + y), x, y) == 160


def test_add_relu_ignores_infinite_cotangents_where_it_is_zero():
    x = torch.tensor([-1.0, 1.0], requires_grad=True)
    (g,) = torch.autograd.grad(fused_add_relu(x, torch.zeros(2)), x, torch.full((2,), float("inf")))
    assert g.tolist() == [0.0, float("inf")]


def test_add_relu_derivative_at_zero_is_zero():
    x = torch.tensor(1.0)
    for by in (0, 1):
        assert torch.func.grad(fused_add_relu, by)(x, -x) == 0
        assert torch.func.jvp(lambda t: fused_add_relu(t, -x), (x,), (x,))[1] == 0


@pytest.mark.parametrize("dtypes", [("float32",) * 2, ("float32", "float64"), ("bfloat16",) * 2])
def test_weights_may_be_python_numbers(dtypes):
    terms = [torch.tensor(x, dtype=getattr(torch, dtype)) for x, dtype in zip(([1.0, 2.0], 4.0), dtypes, strict=True)]
    total = weighted_sum(terms, (0.5, -3))
    assert total.tolist() == [-11.5, -11.0]
    assert total.dtype == (0.5 * terms[0] - 3 * terms[1]).dtype
    jacobian = torch.func.jacrev(lambda x: weighted_sum([x, terms[1]], [0.5, -3]))(terms[0])
    assert torch.equal(jacobian, 0.5 * torch.eye(2).to(jacobian))


def test_weighted_sum_saves_no_terms_for_constant_weights():
    terms = [draw(4, 5, seed=k).requires_grad_() for k in range(3)]
    ws = draw(3)
    assert saved_bytes(lambda *xs: weighted_sum(xs, ws), *terms) == ws.nbytes
    assert saved_bytes(lambda *xs: weighted_sum(xs, ws.requires_grad_()), *terms) == ws.nbytes + sum(
        x.nbytes for x in terms
    )


@pytest.mark.parametrize("shape", [(3,), (3, 4, 1), (3, 5)])
def test_tensor_weights_match_primitives(shape):
    ws, terms = draw(*shape), [draw(4, 5, seed=1), draw(5, seed=2), draw(4, 1, seed=3)]
    ours = lambda ws, *xs: weighted_sum(xs, ws).sin().sum()  # noqa: E731
    theirs = lambda ws, *xs: (ws[0] * xs[0] + ws[1] * xs[1] + ws[2] * xs[2]).sin().sum()  # noqa: E731
    for a, b in zip(*(torch.func.grad(f, (0, 1, 2, 3))(ws, *terms) for f in (ours, theirs)), strict=True):
        assert a.shape == b.shape
        close(a, b)


def test_vmapped_weights_match_a_loop():
    ws, terms = draw(3, 6), [draw(4, 5, seed=1), draw(6, 5, seed=2), draw(4, 1, seed=3)]
    f = lambda ws, *xs: weighted_sum(xs, ws)  # noqa: E731
    batched = torch.func.vmap(f, in_dims=(1, None, 0, None))(ws, *terms)
    for k in range(6):
        close(batched[k], f(ws[:, k], terms[0], terms[1][k], terms[2]))


def test_scale_shift_accepts_python_numbers():
    x = draw(3)
    close(scale_shift(x, 2, -1.0), 2 * x - 1)
    close(torch.func.grad(lambda x: scale_shift(x, 2, -1.0).sum())(x), torch.full((3,), 2.0, dtype=torch.float64))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fused_add_relu(torch.ones(2), torch.ones(3)), "fused_add_relu: expected shapes that broadcast"),
        (lambda: weighted_sum([torch.ones(2)], [1.0, 2.0]), "weighted_sum: ws: expected 1 weights"),
        (
            lambda: weighted_sum([torch.ones(2)], [torch.ones(())]),
            "weighted_sum: ws: expected numbers or one tensor, got () float32 in a list; torch.stack combines",
        ),
        (lambda: weighted_sum([], torch.ones(0)), "weighted_sum: xs: expected a list or tuple of at least one tensor"),
        (lambda: weighted_sum(torch.ones(2, 2), torch.ones(2)), "xs: expected a list or tuple"),
        (lambda: weighted_sum([torch.ones(2)], torch.ones(2)), "weighted_sum: ws: expected 1 weights"),
        (lambda: weighted_sum([torch.ones(2), torch.ones(3)], torch.ones(2)), "xs[0] (2,), xs[1] (3,)"),
        (lambda: weighted_sum([torch.ones(2), 1.0], torch.ones(2)), "weighted_sum: xs[1]: expected a floating-point"),
        (lambda: scale_shift(torch.ones(2), "2", 1.0), "scale_shift: weight: expected a number"),
        (lambda: scale_shift(torch.ones(2), 1.0, torch.ones(3)), "scale_shift: expected shapes that broadcast"),
    ],
)
def test_rejects_bad_arguments(call, message):
    with pytest.raises(hodiff.errors.InputError) as refusal:
        call()
    assert message in str(refusal.value)
