"""Tests of implicit functions against their closed forms: every route to third order, and vmap."""

import pytest
import torch
from authoring.test_derivatives import contracted
from implicit.problems import PROBLEMS, square_root, unsymmetric

import hodiff
from hodiff.checks import derivative, route_names
from hodiff.implicit import newton

each = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
# A third-order test includes the lower orders. Third order of the other problems takes a minute in all, so by default
# half of them are tested to second order.
FAST = {"sqrt of a number", "unsymmetric", "ridge by newton and cg"}
DEPTHS = [
    pytest.param(
        problem,
        order,
        id=f"{problem.name}-{order}",
        marks=[pytest.mark.slow] * (order == 3 and problem.name not in FAST),
    )
    for i, problem in enumerate(PROBLEMS)
    for order in ((2, 3) if i % 2 == 0 and problem.name not in FAST else (3,))
]


@each
def test_value_matches_closed_form(problem):
    torch.testing.assert_close(problem.function(*problem.inputs), problem.truth(*problem.inputs))


@pytest.mark.one_in(18)
@pytest.mark.parametrize(("problem", "order"), DEPTHS)
def test_every_route_matches_closed_form(problem, order):
    ours, point = contracted(problem.function, problem.inputs)
    theirs, _ = contracted(problem.truth, problem.inputs)
    directions = [torch.linspace(-1, 1, len(point), dtype=point.dtype) + k for k in range(order - 1)]
    expected = derivative(theirs, "-over-".join(["reverse"] * order))(point, *directions)
    for route in route_names(order):
        found = derivative(ours, route)(point, *directions)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7, msg=lambda text: f"{route}: {text}")


@pytest.mark.one_in(15)
@each
def test_torch_jacobians_and_hessians_match_closed_form(problem):
    argnums = tuple(range(len(problem.inputs)))
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        ours = transform(problem.function, argnums)(*problem.inputs)
        expected = torch.func.jacrev(problem.truth, argnums)
        if transform is torch.func.hessian:
            expected = torch.func.jacrev(expected, argnums)
        torch.testing.assert_close(ours, expected(*problem.inputs), rtol=1e-7, atol=1e-7)


@pytest.mark.one_in(27)
@each
def test_vmap_of_gradients_matches_closed_form(problem):
    stacked = [torch.stack([x, x * 1.02, x * 1.04], -1) for x in problem.inputs]

    def gradients(*inputs):
        argnums = tuple(range(len(inputs)))
        return torch.func.grad(lambda *xs: problem.function(*xs).sin().sum(), argnums)(*inputs)

    batched = torch.func.vmap(gradients, in_dims=-1)(*stacked)
    values = torch.func.vmap(problem.function, in_dims=-1)(*stacked)
    for k in range(3):
        one = [x[..., k] for x in stacked]
        torch.testing.assert_close(values[k], problem.truth(*one))
        for ours, theirs in zip(batched, gradients(*one), strict=True):
            torch.testing.assert_close(ours[k], theirs)


@pytest.mark.slow
def test_check_passes():
    """One problem suffices for `hodiff.check`, since closed forms test all problems."""
    problem = next(each for each in PROBLEMS if each.name == "sqrt of a number")
    hodiff.assert_differentiable(problem.function, problem.inputs, order=3)


@pytest.mark.slow
@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ["unsymmetric", "affine by picard", "system by gmres", "equality", "ridge by scipy"])
def test_gradcheck_and_gradgradcheck_pass(name):
    problem = next(each for each in PROBLEMS if each.name == name)
    inputs = tuple(x.clone().requires_grad_() for x in problem.inputs)
    options = {"check_batched_grad": True}
    assert torch.autograd.gradcheck(problem.function, inputs, check_forward_ad=True, **options)
    assert torch.autograd.gradgradcheck(problem.function, inputs, check_fwd_over_rev=True, **options)


def test_autograd_to_third_order_matches_closed_form():
    p = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    x = square_root(newton())(p)
    (first,) = torch.autograd.grad(x, p, create_graph=True)
    (second,) = torch.autograd.grad(first, p, create_graph=True)
    (third,) = torch.autograd.grad(second, p)
    for found, factor, power in ((first, 0.5, -0.5), (second, -0.25, -1.5), (third, 0.375, -2.5)):
        torch.testing.assert_close(found.detach(), factor * p.detach() ** power)


def test_forward_ad_over_a_recorded_graph_matches():
    problem = next(each for each in PROBLEMS if each.name == "unsymmetric")
    forward_ad = torch.autograd.forward_ad
    A, b = problem.inputs
    leaf = A.clone().requires_grad_()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(leaf, torch.ones_like(A))
        tangent = forward_ad.unpack_dual(unsymmetric()(dual, b)).tangent
        found = torch.autograd.grad(tangent.sum(), leaf)[0]
    _, expected = torch.func.jvp(lambda A: problem.truth(A, b), (A,), (torch.ones_like(A),))
    torch.testing.assert_close(tangent.detach(), expected)
    slope = torch.func.grad(
        lambda A: torch.func.jvp(lambda A: problem.truth(A, b), (A,), (torch.ones_like(A),))[1].sum()
    )
    torch.testing.assert_close(found, slope(A))


def test_nested_vmap_matches_closed_form():
    problem = next(each for each in PROBLEMS if each.name == "unsymmetric")
    A, b = problem.inputs
    As, bs = torch.stack([A, A * 1.1]), torch.stack([b, b * 1.1, b * 1.2])
    ours = torch.func.vmap(lambda A: torch.func.vmap(torch.func.jacrev(problem.function), in_dims=(None, 0))(A, bs))(As)
    theirs = torch.func.vmap(lambda A: torch.func.vmap(torch.func.jacrev(problem.truth), in_dims=(None, 0))(A, bs))(As)
    torch.testing.assert_close(ours, theirs)


def test_implicit_function_inside_another_matches_closed_form():
    """y(p) = x(p)³ with x = √p inside the outer residual has the correct second derivative."""
    inner = square_root(newton())
    from hodiff.implicit import root

    outer = root(lambda y, p: y - inner(p) ** 3, newton())
    p = torch.tensor(2.0, dtype=torch.float64)
    f = lambda p: outer(torch.ones_like(p), p)  # noqa: E731
    torch.testing.assert_close(torch.func.grad(torch.func.grad(f))(p), 0.75 * p**-0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept(dtype):
    p = torch.tensor([1.0, 2.0], dtype=dtype)
    found = torch.func.jacrev(square_root(newton()))(p)
    assert found.dtype == dtype
    torch.testing.assert_close(found, torch.diag(0.5 * p**-0.5))
