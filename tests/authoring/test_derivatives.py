"""Functions with custom rules against closed forms: all routes to third order, batching, compilation."""

import itertools

import pytest
import torch
from authoring.problems import PROBLEMS
from slow_cases import slow_except
from torch import Tensor

import hodiff
from hodiff.authoring import custom_jvp, custom_vjp
from hodiff.checks import derivative, route_names

each = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)


def contracted(function, inputs):
    sizes = [x.numel() for x in inputs]

    def loss(flat: Tensor) -> Tensor:
        parts = [part.reshape(x.shape) for part, x in zip(flat.split(sizes), inputs, strict=True)]
        found = function(*parts)
        outputs = found if isinstance(found, tuple) else (found,)
        total = flat.new_zeros(())
        for y in outputs:
            weights = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)
            total = total + (weights * y).sum() + 0.1 * (weights * y).sum() ** 2
        return total

    return loss, torch.cat([x.reshape(-1) for x in inputs])


@pytest.mark.parametrize("problem", PROBLEMS[1::12], ids=lambda problem: problem.name)
def test_check_passes(problem):
    hodiff.assert_differentiable(problem.function, problem.inputs, order=2)


@pytest.mark.slow
@each
def test_check_passes_to_third_order(problem):
    hodiff.assert_differentiable(problem.function, problem.inputs, **({"order": 3} | problem.check))


@pytest.mark.one_in(3)
@each
@pytest.mark.parametrize("order", slow_except([1, 2, 3], [1, 2]))
def test_every_route_matches_closed_form(problem, order):
    ours, point = contracted(problem.function, problem.inputs)
    theirs, _ = contracted(problem.truth, problem.inputs)
    directions = [torch.linspace(-1, 1, len(point), dtype=point.dtype) + k for k in range(order - 1)]
    expected = derivative(theirs, "-over-".join(["reverse"] * order))(point, *directions)
    for route in route_names(order):
        found = derivative(ours, route)(point, *directions)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"{route}: {text}")


# A rule of each kind: custom_jvp, custom_vjp, elementwise.
@pytest.mark.slow
@pytest.mark.parametrize("problem", [PROBLEMS[0], PROBLEMS[3], PROBLEMS[9]], ids=lambda problem: problem.name)
def test_compiles_without_graph_breaks(problem):
    hodiff.assert_differentiable(problem.function, problem.inputs, vmap=False, scipy=False, compile="aot_eager")


@pytest.mark.one_in(12)
@each
def test_gradients_of_compiled_functions_match_closed_form(problem):
    """Compiled functions are differentiated from outside, where torch refuses Functions with a jvp of their own."""

    def gradients(function):
        inputs = [x.clone().requires_grad_() for x in problem.inputs]
        found = function(*inputs)
        outputs = found if isinstance(found, tuple) else (found,)
        return torch.autograd.grad(torch.stack([y.sum() for y in outputs]).sum(), inputs)

    torch.compiler.reset()
    compiled = torch.compile(problem.function, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(gradients(compiled), gradients(problem.truth), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.one_in(3)
@each
def test_vmap_over_any_arguments_and_dimension_matches_a_loop(problem):
    positions = range(len(problem.inputs))
    stacked = [torch.stack([x * (1 + 0.1 * k) for k in range(3)]) for x in problem.inputs]
    for chosen in [c for size in range(1, len(stacked) + 1) for c in itertools.combinations(positions, size)]:
        for dim in (0, -1):
            in_dims = tuple(dim if i in chosen else None for i in positions)
            arguments = [stacked[i].movedim(0, dim) if i in chosen else x for i, x in enumerate(problem.inputs)]

            def gradients(*inputs):
                return torch.func.grad(
                    lambda *xs: contracted(problem.function, xs)[0](torch.cat([x.reshape(-1) for x in xs])),
                    argnums=tuple(positions),
                )(*inputs)

            batched = torch.func.vmap(gradients, in_dims=in_dims)(*arguments)
            for k in range(3):
                one = gradients(*(stacked[i][k] if i in chosen else x for i, x in enumerate(problem.inputs)))
                for ours, theirs in zip(batched, one, strict=True):
                    torch.testing.assert_close(ours[k], theirs)


@pytest.mark.parametrize(
    ("problem", "shared"),
    [
        pytest.param(problem, shared, id=f"{problem.name}-{shared}")
        for problem in PROBLEMS
        for shared in (None, 0, 1)
        if shared is None or len(problem.inputs) > 1
    ],
)
def test_autograd_of_vmap_matches_closed_form(problem, shared):
    """Batched derivatives are right, also for an argument that the batch shares, whose gradient is a sum."""
    in_dims = tuple(None if i == shared else -1 for i in range(len(problem.inputs)))
    batch = [
        (x.clone() if dim is None else torch.stack([x, x + 0.25], dim=-1)).requires_grad_()
        for x, dim in zip(problem.inputs, in_dims, strict=True)
    ]

    def total(function):
        found = torch.func.vmap(function, in_dims=in_dims)(*batch)
        return torch.stack([y.sin().sum() for y in (found if isinstance(found, tuple) else (found,))]).sum()

    ours = torch.autograd.grad(total(problem.function), batch, create_graph=True)
    theirs = torch.autograd.grad(total(problem.truth), batch, create_graph=True)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    second = [torch.autograd.grad([g.square().sum() for g in found], batch) for found in (ours, theirs)]
    for a, b in zip(*second, strict=True):
        torch.testing.assert_close(a, b)


@each
def test_forward_ad_dual_numbers_match_both_mixed_routes(problem):
    """`torch.autograd.forward_ad` and a recorded graph compute the product by both mixed routes."""
    forward_ad = torch.autograd.forward_ad
    theirs, point = contracted(problem.truth, problem.inputs)
    ours, _ = contracted(problem.function, problem.inputs)
    v = torch.linspace(-1, 1, len(point), dtype=point.dtype)
    expected = hodiff.hvp(theirs, point, v, route="reverse-over-reverse")
    leaf = point.clone().requires_grad_()
    with forward_ad.dual_level():
        slope = forward_ad.unpack_dual(ours(forward_ad.make_dual(leaf, v))).tangent
    torch.testing.assert_close(torch.autograd.grad(slope, leaf)[0], expected)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(leaf, v)
        (gradient,) = torch.autograd.grad(ours(dual), dual)
        torch.testing.assert_close(forward_ad.unpack_dual(gradient).tangent, expected)


@each
def test_pullback_works_after_its_transform_ended(problem):
    ours, point = contracted(problem.function, problem.inputs)
    theirs, _ = contracted(problem.truth, problem.inputs)
    _, pullback = torch.func.vjp(ours, point)
    torch.testing.assert_close(pullback(torch.ones((), dtype=point.dtype)), (torch.func.grad(theirs)(point),))


@pytest.mark.parametrize("moving", [0, 1, 2])
def test_vmap_keeps_tangent_of_an_argument_beside_constant_arguments(moving):
    @hodiff.custom_jvp
    def product(x, y, z):
        return x * y * z

    @product.defjvp
    def rule(primals, tangents):
        (x, y, z), (dx, dy, dz) = primals, tangents
        terms = [t * rest for t, rest in ((dx, y * z), (dy, x * z), (dz, x * y)) if t is not None]
        return product(x, y, z), sum(terms)

    values = list(torch.tensor([[2.0, 3.0], [5.0, 7.0], [11.0, 13.0]], dtype=torch.float64))

    def slope(*point):
        def along(each):
            return product(*(each if i == moving else point[i] for i in range(3)))

        return torch.func.jvp(along, (point[moving],), (torch.ones_like(point[moving]),))[1]

    expected = torch.stack([each for i, each in enumerate(values) if i != moving]).prod(0)
    assert torch.equal(torch.func.vmap(slope)(*values), expected)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_linear_rule_may_call_its_function_on_the_tangent(route):
    @custom_jvp
    def twice(x):
        return 2 * x

    twice.defjvp(lambda primals, tangents: (twice(*primals), twice(*tangents)))

    @custom_jvp
    def sums(x, n):
        return x.cumsum(0) * n

    @custom_jvp
    def thrice(x):
        return sums(x, 3.0)

    thrice.defjvp(lambda primals, tangents: (thrice(*primals), sums(tangents[0], 3.0)))
    sums.defjvp(lambda primals, tangents: (sums(*primals), thrice(tangents[0]) * (primals[1] / 3.0)))
    x, v = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64), torch.tensor([1.0, 0.3, -0.2], dtype=torch.float64)
    found = hodiff.hvp(lambda x: (twice(x) ** 3).sum() * thrice(twice(x.sin())).exp().sum(), x, v, route=route)
    expected = hodiff.hvp(lambda x: (8 * x**3).sum() * (6 * x.sin().cumsum(0)).exp().sum(), x, v)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(lambda x: twice(x).square()))(x), 8 * x)


def jvp_times(c):
    f = custom_jvp(lambda x: (x * c).sin())
    f.defjvp(lambda primals, tangents: (f(*primals), (primals[0] * c).cos() * c * tangents[0]))
    return f


def vjp_times(c):
    f = custom_vjp(lambda x: (x * c).sin())
    f.defvjp(lambda x: (f(x), x), lambda x, g: ((x * c).cos() * c * g,))
    return f


@pytest.mark.parametrize("route", hodiff.ROUTES)
@pytest.mark.parametrize("make", [jvp_times, vjp_times])
def test_rule_may_close_over_constants_made_inside_a_transform(make, route):
    x, v = torch.tensor([0.5, -1.0], dtype=torch.float64), torch.tensor([1.0, 0.3], dtype=torch.float64)
    expected = hodiff.hvp(lambda x: (2 * x).sin().pow(2).sum(), x, v)
    for constant in (torch.tensor(2.0, dtype=torch.float64).expand_as, lambda x: torch.full_like(x, 2.0)):
        found = hodiff.hvp(lambda x, of=constant: make(of(x))(x).pow(2).sum(), x, v, route=route)
        torch.testing.assert_close(found, expected)
    found = hodiff.hvp(lambda x: make((x / x.detach() + 1).detach())(x).pow(2).sum(), x, v, route=route)
    torch.testing.assert_close(found, expected)


def test_vmap_over_an_argument_that_the_tangent_ignores():
    y, x = torch.tensor([0.5, -1.0], dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64)
    still, some = (custom_jvp(lambda x, y: y.sin()) for _ in range(2))
    still.defjvp(lambda primals, _: (primals[1].sin(), None))
    some.defjvp(
        lambda primals, tangents: (primals[1].sin(), None if tangents[1] is None else primals[1].cos() * tangents[1]),
        symbolic_zeros=True,
    )
    pair = custom_jvp(lambda x, y: (y.sin(), 2 * x))
    pair.defjvp(lambda p, t: ((p[1].sin(), 2 * p[0]), (p[1].cos() * t[1], 2 * t[0])))
    for f in (still, some):
        over_x = torch.func.vmap(lambda row, f=f: f(row, y))
        value, tangent = torch.func.jvp(over_x, (x,), (x,))
        torch.testing.assert_close(value, y.sin().expand(3, 2))
        assert not tangent.any()
        assert not torch.func.jacfwd(over_x)(x).any()
    _, tangent = torch.func.jvp(lambda y: torch.func.vmap(lambda row: some(row, y))(x), (y,), (y,))
    torch.testing.assert_close(tangent, (y.cos() * y).expand(3, 2))
    both = torch.func.vmap(lambda row: pair(row, y))
    torch.testing.assert_close(torch.func.grad(lambda x: both(x)[1].sum() + both(x)[0].sum())(x), 2 * x)
