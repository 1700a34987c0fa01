"""Right functions made by hodiff.authoring."""

import torch
from zoo.bases import X, Y
from zoo.specimen import Right

import hodiff
from hodiff.authoring import custom_jvp, custom_vjp, elementwise


@custom_jvp
def log_one_plus_exp(x):
    return torch.logaddexp(x, torch.zeros_like(x))


@log_one_plus_exp.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return log_one_plus_exp(x), torch.sigmoid(x) * t


@custom_vjp
def scaled_sine(x, y):
    return x.sin() * y


def scaled_sine_fwd(x, y):
    return scaled_sine(x, y), (x, y)


def scaled_sine_bwd(residuals, g):
    x, y = residuals
    return x.cos() * y * g, x.sin() * g


scaled_sine.defvjp(scaled_sine_fwd, scaled_sine_bwd)

tanh = elementwise(torch.tanh, derivative=lambda _x, y: 1 - y * y)
quotient = elementwise(
    lambda x, y: x / (1 + y * y),
    derivative=(lambda _x, y: 1 / (1 + y * y), lambda x, y: -2 * x * y / (1 + y * y) ** 2),
    name="quotient",
)
step = hodiff.straight_through(lambda x: (x > 0).to(x.dtype), torch.sigmoid, name="step")

SPECIMENS = [
    Right("authoring.custom_jvp", log_one_plus_exp, X),
    Right("authoring.custom_vjp", scaled_sine, (X, Y)),
    Right("authoring.elementwise", tanh, X),
    Right("authoring.elementwise_of_two", quotient, (X, Y)),
    Right("authoring.straight_through", step, X, {"approximate": True}),
    Right("authoring.in_a_function", lambda x: tanh(x).sum() * log_one_plus_exp(x), X),
]
