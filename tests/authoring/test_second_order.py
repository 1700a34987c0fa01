"""Functions made from one rule, by gradgradcheck and SciPy's Hessian."""

import torch
from drawing import draw
from second_order import Row, assert_listed, assert_second_order, parametrize_by_rows, public

from hodiff import authoring

X, Y = draw(3), draw(3, seed=1)


@authoring.custom_jvp
def sine_times(x, y):
    return torch.sin(x) * y


@sine_times.defjvp
def _(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    return sine_times(x, y), torch.cos(x) * y * dx + torch.sin(x) * dy


@authoring.custom_vjp
def cubes_times(x, y):
    return x**3 * y


cubes_times.defvjp(
    lambda x, y: (cubes_times(x, y), (x, y)), lambda res, g: (3 * res[0] ** 2 * res[1] * g, res[0] ** 3 * g)
)

SINE = torch.library.custom_op(
    "hodiff_tests_of_authoring::sine", lambda x: x.sin(), mutates_args=(), schema="(Tensor x) -> Tensor"
)
SINE.register_autograd(
    lambda ctx, g: g * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

ROWS = [
    Row("custom_jvp", sine_times, (X, Y)),
    Row("custom_vjp", cubes_times, (X, Y)),
    Row("elementwise", authoring.elementwise(torch.tanh, derivative=lambda x, y: 1 - y**2), (X,)),
    Row("from_custom_op", authoring.from_custom_op(SINE), (X,)),
    # The derivatives agree because the surrogate is the function itself.
    Row("straight_through", authoring.straight_through(torch.tanh, torch.tanh), (X,)),
]


def test_every_public_name_has_a_row():
    assert_listed(public(authoring), ROWS, {})


@parametrize_by_rows(ROWS)
def test_passes_gradgradcheck_and_scipy_hessian(row):
    assert_second_order(row)
