"""Contract tests of all Functions in the catalogue; a new Function joins when a file of `cases/` lists it.

Derivatives are compared with differences, SciPy and gradcheck (by `hodiff.check`) and with torch primitives; batches
with loops, compiled code with eager code, float32 with float64. Checks and compiling are slow: the first Function of
each family and a few others run by default, the rest with the slow tests.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from functions.case import FunctionCase
from functions.catalogue import CASES, family_of
from slow_cases import slow_except
from torch import Tensor

import hodiff
from hodiff.checks import derivative, route_names, scipy_hessian
from hodiff.checks.comparisons.scalarize import scalarize
from hodiff.checks.comparisons.vmapped import compile_checks
from hodiff.checks.torch_warnings import silence_torch_warnings

EXACT = [case for case in CASES if case.surrogate is None]
APPROXIMATE = [case for case in CASES if case.surrogate is not None]


def parametrize_by(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def outputs(value) -> tuple[Tensor, ...]:
    return tuple(y for y in (value if isinstance(value, (tuple, list)) else (value,)) if y.is_floating_point())


def with_leaves(case: FunctionCase, inputs, leaves):
    arguments = list(inputs)
    for position, leaf in zip(case.differentiated(inputs), leaves, strict=True):
        arguments[position] = leaf
    return arguments


def contracted(case: FunctionCase, inputs, function: Callable | None = None) -> tuple[Callable, Tensor]:
    """Return a nonlinear, asymmetric scalar function of a flat vector, and the vector."""
    function = function or case.function
    leaves = [inputs[i] for i in case.differentiated(inputs)]
    sizes = [leaf.numel() for leaf in leaves]

    def phi(flat: Tensor) -> Tensor:
        parts = [part.reshape(leaf.shape) for part, leaf in zip(flat.split(sizes), leaves, strict=True)]
        total = flat.new_zeros(())
        for y in outputs(function(*with_leaves(case, inputs, parts))):
            weights = torch.linspace(0.5, 1.5, max(y.numel(), 1), dtype=y.dtype).reshape(y.shape)
            total = total + (weights * y).sum() + 0.1 * (weights * y).sum() ** 2
        return total

    return phi, torch.cat([leaf.reshape(-1) for leaf in leaves])


def direction(point: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(point.shape, generator=generator, dtype=torch.float64).to(point.dtype)


def assert_close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    scale = max(float(b.detach().abs().max()), 1e-30) if b.numel() else 1.0
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(scale, 1.0))


def first_of_each_family(cases):
    return list({family_of(case): case for case in reversed(cases)}.values())


def others_slow(cases, quick):
    """Run some cases by default and the others with the slow tests."""
    return pytest.mark.parametrize("case", slow_except(cases, quick, lambda case: case.name))


FIRST = first_of_each_family([case for case in EXACT if case.order > 2])


# The third-order test of a case includes second order, so one such case is enough, for the quick tests.
@others_slow([FIRST[1], *(case for case in EXACT if case.order == 2)], quick=FIRST[1:2])
def test_second_derivatives_match_differences_by_every_route(case):
    hodiff.assert_differentiable(case.function, case.draw(), order=2, vmap=case.vmap, **case.check_options)


# Other settings of a Function share its rules, so that their third derivatives need no differences and no probes. The
# name of a setting follows a hyphen.
THIRD = [case for case in EXACT if case.order > 2]
FIRST_OF_FUNCTION = list({case.Function or case.name: case for case in reversed(THIRD)}.values())
SETTINGS = [case for case in THIRD if "-" in case.name and case not in FIRST_OF_FUNCTION and case.reference]


@pytest.mark.slow
@parametrize_by([case for case in THIRD if case not in SETTINGS])
def test_third_derivatives_match_differences_by_every_route(case):
    hodiff.assert_differentiable(case.function, case.draw(), order=case.order, vmap=case.vmap, **case.check_options)


@pytest.mark.slow
@parametrize_by(SETTINGS)
def test_third_derivatives_match_the_reference_by_every_route(case):
    inputs = case.draw()
    (ours, point), (theirs, _) = contracted(case, inputs), contracted(case, inputs, case.reference)
    along = direction(point, 3), direction(point, 4)
    expected = derivative(theirs, "reverse-over-reverse-over-reverse")(point, *along)
    for route in route_names(3):
        assert_close(derivative(ours, route)(point, *along), expected, 1e-9)
        if case.vmap and route.endswith("reverse-over-reverse"):
            scales = torch.tensor([1.0, -0.5], dtype=point.dtype)
            batched = torch.func.vmap(lambda s, route=route: derivative(ours, route)(point, s * along[0], along[1]))
            assert_close(batched(scales), scales[:, None] * expected, 1e-9)


# Each case takes seconds: compile the first of each family. The training steps below compile all cases.
COMPILED = first_of_each_family([case for case in EXACT if case.compile])


@pytest.mark.slow
@parametrize_by(COMPILED)
def test_compiled_derivatives_match(case):
    def of_intermediates(*inputs):
        # Dynamo treats a Function of graph inputs differently from a Function of intermediates.
        return case.function(*(1 * x if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs))

    generator = torch.Generator().manual_seed(0)
    with silence_torch_warnings():
        problem = scalarize(of_intermediates, case.draw(), generator)
        failed = [entry for entry in compile_checks(problem, 2, 1.0, "aot_eager", generator) if entry.failed]
    assert not failed, failed


@pytest.mark.one_in(12)
@others_slow(
    [case for case in CASES if case.compile],
    quick=first_of_each_family([case for case in CASES if case.compile]),
)
def test_compiled_training_matches_eager(case):
    """A gradient recorded through compiled code matches eager code."""
    if case.name == "AttentionGradient" and torch.__version__ < "2.13":
        pytest.skip("torch compiles the gradient of a Function with several outputs to zeros")
    inputs = case.draw()
    positions = case.differentiated(inputs)

    def gradients(function):
        leaves = [x.clone().requires_grad_() if i in positions else x for i, x in enumerate(inputs)]
        return torch.autograd.grad(_total(function(*leaves)), [leaves[i] for i in positions])

    torch.compiler.reset()
    compiled = torch.compile(case.function, fullgraph=True, backend="aot_eager")
    for got, expected in zip(gradients(compiled), gradients(case.function), strict=True):
        assert_close(got, expected)


# For the other cases, `hodiff.check` above includes SciPy.
@parametrize_by([case for case in EXACT if not case.check_options.get("scipy", True)])
def test_second_derivative_matches_scipy(case):
    phi, point = contracted(case, case.draw())
    # SciPy evaluates the function for each pair of directions. A few random directions involve every Hessian element.
    directions = torch.stack([direction(point, seed) for seed in range(4)], 1)
    directions = torch.linalg.qr(directions)[0] if len(point) > 4 else torch.eye(len(point), dtype=point.dtype)

    def along(steps: Tensor) -> Tensor:
        return phi(point + directions @ steps)

    origin = point.new_zeros(directions.shape[1])
    estimate = scipy_hessian(along, origin, initial_step=0.05)
    ours = hodiff.hessian(along)(origin)
    gap = (ours - torch.as_tensor(estimate.matrix)).abs()
    allowed = 10 * torch.as_tensor(estimate.error) + 1e-6 * ours.abs().max().clamp(min=1)
    assert bool((gap <= allowed).all()), f"{float((gap - allowed).max()):.2e} beyond SciPy's own error"


@pytest.mark.one_in(6)
@parametrize_by(APPROXIMATE)
def test_derivatives_match_the_surrogate(case):
    inputs = case.draw()
    point = contracted(case, inputs)[1]
    for order in range(1, case.order + 1):
        directions = [direction(point, k) for k in range(order)]
        for route in route_names(order):
            got = _derivative_of_linear(case, inputs, case.function, route, directions, point)
            expected = _derivative_of_linear(case, inputs, case.surrogate, route_names(order)[0], directions, point)
            assert_close(got, expected)


def _derivative_of_linear(case, inputs, function, route, directions, point):
    """Return the derivative of a linear contraction; a nonlinear one would mix in values, which differ on purpose."""
    leaves = [inputs[i] for i in case.differentiated(inputs)]
    sizes = [leaf.numel() for leaf in leaves]

    def phi(flat):
        parts = [part.reshape(leaf.shape) for part, leaf in zip(flat.split(sizes), leaves, strict=True)]
        ys = outputs(function(*with_leaves(case, inputs, parts)))
        weights = [torch.linspace(0.5, 1.5, max(y.numel(), 1), dtype=y.dtype).reshape(y.shape) for y in ys]
        return torch.stack([(w * y).sum() for w, y in zip(weights, ys, strict=True)]).sum()

    # `derivative` contracts all but one slot of the k-th derivative and returns the remaining slot.
    return derivative(phi, route)(point, *directions[:-1])


@parametrize_by([case for case in CASES if case.reference])
def test_value_matches_the_reference(case):
    inputs = case.draw()
    for ours, theirs in zip(outputs(case.function(*inputs)), outputs(case.reference(*inputs)), strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert_close(ours, theirs, 1e-12)


@pytest.mark.one_in(3)
@parametrize_by([case for case in EXACT if case.reference])
def test_first_and_second_derivatives_match_the_reference(case):
    inputs = case.draw()
    ours, point = contracted(case, inputs)
    theirs, _ = contracted(case, inputs, case.reference)
    v = direction(point, 3)
    gradient, product = hodiff.grad_and_hvp(theirs, point, v, route="reverse-over-reverse")
    assert_close(torch.func.grad(ours)(point), gradient)
    assert_close(torch.func.jvp(ours, (point,), (v,))[1], gradient @ v)
    for route in hodiff.ROUTES:
        assert_close(hodiff.hvp(ours, point, v, route=route), product, 1e-9)


@pytest.mark.one_in(6)
@parametrize_by([case for case in CASES if case.vmap])
def test_vmap_over_any_arguments_matches_a_loop(case):
    inputs = case.draw()
    positions = case.differentiated(inputs)
    batches = {i: torch.stack([inputs[i] * (1 + 0.01 * k) for k in range(3)]) for i in positions}
    for chosen in [c for size in range(1, len(positions) + 1) for c in itertools.combinations(positions, size)]:
        for dim in (0, -1):
            stacked = [batches[i].movedim(0, dim) if i in chosen else x for i, x in enumerate(inputs)]
            in_dims = tuple(dim if i in chosen else None for i in range(len(inputs)))
            batched = outputs(torch.func.vmap(case.function, in_dims=in_dims)(*stacked))
            for k in range(3):
                one = case.function(*(batches[i][k] if i in chosen else x for i, x in enumerate(inputs)))
                for got, expected in zip(batched, outputs(one), strict=True):
                    assert_close(got[k], expected)


@pytest.mark.one_in(6)
@parametrize_by([case for case in CASES if case.vmap])
def test_nested_vmap_of_gradients_matches_a_loop(case):
    inputs = case.draw()
    first = case.differentiated(inputs)[0]

    def gradient(x: Tensor) -> Tensor:
        arguments = [x if i == first else y for i, y in enumerate(inputs)]
        return torch.func.grad(
            lambda x: _total(case.function(*(x if i == first else y for i, y in enumerate(arguments))))
        )(x)

    grid = torch.stack([torch.stack([inputs[first] * (1 + 0.01 * (2 * i + j)) for j in range(2)]) for i in range(2)])
    batched = torch.func.vmap(torch.func.vmap(gradient))(grid)
    inner = torch.func.vmap(torch.func.vmap(gradient, in_dims=-1, out_dims=-1), in_dims=1)(
        grid.movedim(1, -1).movedim(0, 1)
    )
    for i, j in itertools.product(range(2), range(2)):
        expected = gradient(grid[i, j])
        assert_close(batched[i, j], expected)
        assert_close(inner[i, ..., j], expected)


def _total(value) -> Tensor:
    return torch.stack([
        (y * torch.linspace(0.5, 1.5, max(y.numel(), 1), dtype=y.dtype).reshape(y.shape)).sum() for y in outputs(value)
    ]).sum()


@pytest.mark.one_in(2)
@parametrize_by(CASES)
def test_any_subset_of_arguments_may_need_a_gradient(case):
    inputs = case.draw()
    positions = case.differentiated(inputs)

    def gradients(chosen):
        arguments = [x.clone().requires_grad_() if i in chosen else x for i, x in enumerate(inputs)]
        return dict(
            zip(
                chosen,
                torch.autograd.grad(_total(case.function(*arguments)), [arguments[i] for i in chosen]),
                strict=True,
            )
        )

    everything = gradients(tuple(positions))
    for size in range(1, len(positions)):
        for chosen in itertools.combinations(positions, size):
            for i, gradient in gradients(chosen).items():
                assert_close(gradient, everything[i])


@parametrize_by([case for case in CASES if case.Function is not None and len(case.differentiated(case.draw())) > 1])
def test_unneeded_gradients_are_not_computed(case, monkeypatch):
    """Backward returns None for arguments that do not require a gradient."""
    inputs = case.draw()
    positions = case.differentiated(inputs)
    returned = []
    original = case.Function.backward

    def spy(ctx, *cotangents):
        returned.append((ctx.needs_input_grad, original(ctx, *cotangents)))
        return returned[-1][1]

    monkeypatch.setattr(case.Function, "backward", staticmethod(spy))
    arguments = [x.clone().requires_grad_() if i == positions[0] else x for i, x in enumerate(inputs)]
    _total((case.direct or case.function)(*arguments)).backward()
    assert returned
    for needed, gradients in returned:
        for need, gradient in zip(needed, gradients if isinstance(gradients, tuple) else (gradients,), strict=True):
            assert need or gradient is None


@pytest.mark.one_in(2)
@parametrize_by(CASES)
def test_non_contiguous_inputs_match(case):
    inputs = case.draw()
    positions = case.differentiated(inputs)
    strided = [torch.stack([x, x + 1], -1)[..., 0] if i in positions else x for i, x in enumerate(inputs)]
    transposed = [x.mT.contiguous().mT if i in positions and x.dim() > 1 else x for i, x in enumerate(inputs)]

    def run(arguments):
        leaves = [x.detach().requires_grad_() if i in positions else x for i, x in enumerate(arguments)]
        value = case.function(*leaves)
        return [*outputs(value), *torch.autograd.grad(_total(value), [leaves[i] for i in positions])]

    for a, b, c in zip(run(inputs), run(strided), run(transposed), strict=True):
        assert_close(b, a)
        assert_close(c, a)


@pytest.mark.one_in(2)
@parametrize_by(CASES)
def test_float32_matches_float64(case):
    """Value, gradient and product in float32 match float64 at the same rounded point."""
    low = case.draw(torch.float32)
    high = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in low)

    def everything(inputs):
        phi, point = contracted(case, inputs)
        ones = torch.ones_like(point)
        return (*outputs(case.function(*inputs)), torch.func.grad(phi)(point), hodiff.hvp(phi, point, ones))

    for ours, truth in zip(everything(low), everything(high), strict=True):
        assert ours.dtype == torch.float32
        scale = max(float(truth.abs().max()), 1.0)
        assert float((ours.double() - truth).abs().max()) <= case.float32_tolerance * scale


@parametrize_by([case for case in CASES if case.saved_bytes])
def test_saved_bytes_are_as_stated(case):
    """The graph holds the stated bytes between forward and backward, each storage counted once."""
    inputs = case.draw()
    arguments = [x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
    held = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = case.function(*arguments)
    assert outputs(output)
    assert sum(held.values()) == case.saved_bytes(*inputs)


@pytest.mark.one_in(2)
@parametrize_by(CASES)
def test_no_grad_and_inference_mode_match(case):
    inputs = case.draw()
    expected = outputs(case.function(*inputs))
    leaves = [x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = outputs(case.function(*leaves))
            gradient = (
                torch.func.grad(lambda x: _total(case.function(x, *inputs[1:])))(inputs[0])
                if 0 in case.differentiated(inputs) and mode is torch.no_grad
                else None
            )
        for a, b in zip(got, expected, strict=True):
            assert not a.requires_grad
            assert_close(a, b)
        assert gradient is None or bool(gradient.isfinite().all())


@pytest.mark.one_in(2)
@parametrize_by(CASES)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16-autocast"])
def test_training_step_runs_with_and_without_autocast(case, autocast):
    inputs = case.draw(torch.float32)
    parameters = [torch.nn.Parameter(inputs[i].clone()) for i in case.differentiated(inputs)]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = sum(y.float().square().mean() for y in outputs(case.function(*with_leaves(case, inputs, parameters))))
    loss.backward()
    optimizer.step()
    for parameter in parameters:
        assert parameter.grad.dtype == torch.float32
        assert bool(parameter.isfinite().all())
