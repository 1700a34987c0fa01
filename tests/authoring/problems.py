"""JAX's documented examples of custom rules, with the closed forms that their derivatives must match."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hodiff.authoring import custom_jvp, custom_vjp, elementwise


@custom_jvp
def log1pexp(x):
    return torch.log1p(torch.exp(x))


@log1pexp.defjvp
def _log1pexp_rule(primals, tangents):
    (x,), (x_dot,) = primals, tangents
    return log1pexp(x), (1 - 1 / (1 + torch.exp(x))) * x_dot


@custom_jvp
def sqrt_ratio(x):
    """x / (1 + √x), whose derivative at 0 is 1 by convention; the formula's own derivative there is NaN."""
    return x / (1 + torch.sqrt(x))


@sqrt_ratio.defjvp
def _sqrt_ratio_rule(primals, tangents):
    (x,), (x_dot,) = primals, tangents
    root = torch.sqrt(torch.where(x == 0, torch.ones_like(x), x))
    slope = torch.where(x == 0, torch.ones_like(x), (2 + root) / (2 * (1 + root) ** 2))
    return sqrt_ratio(x), slope * x_dot


@custom_jvp
def product(x, y):
    return torch.sin(x) * y


product.defjvps(
    lambda x_dot, out, x, y: torch.cos(x) * y * x_dot,
    lambda y_dot, out, x, y: torch.sin(x) * y_dot,
)


def app(f, x):
    return f(x)


app_jvp = custom_jvp(app, nondiff_argnums=0)
app_vjp = custom_vjp(app, nondiff_argnums=(0,))


@app_jvp.defjvp
def _app_rule(f, primals, tangents):
    (x,), (x_dot,) = primals, tangents
    return f(x), 2 * torch.cos(x) * x_dot


app_vjp.defvjp(lambda f, x: (f(x), x), lambda f, x, cotangent: (2 * torch.cos(x) * cotangent,))


@custom_vjp
def sine_product(x, y):
    return torch.sin(x) * y


def _sine_product_forward(x, y):
    # Two residuals are neither arguments nor outputs: second derivatives depend on them as well.
    return sine_product(x, y), {"cos": torch.cos(x), "sin": torch.sin(x), "y": y}


def _sine_product_backward(residuals, cotangent):
    return residuals["cos"] * residuals["y"] * cotangent, residuals["sin"] * cotangent


sine_product.defvjp(_sine_product_forward, _sine_product_backward)


@custom_vjp
def scaled_gradient(x, factor):
    return x.clone()


scaled_gradient.defvjp(lambda x, factor: (x.clone(), factor), lambda factor, cotangent: (factor * cotangent, None))


def iterate(step, a, x):
    # From 1, four steps of Heron are exact for numbers near 1.
    for _ in range(4):
        x = step(a, x)
    return x


fixed_point = custom_vjp(iterate, nondiff_argnums=0)


def _fixed_point_forward(step, a, start):
    found = fixed_point(step, a, start)
    return found, (a, found)


def _fixed_point_backward(step, residuals, cotangent):
    a, found = residuals
    # The adjoint is itself a fixed point, so it has derivatives of every order.
    adjoint = fixed_point(_adjoint_step(step), (a, found, cotangent), torch.zeros_like(cotangent))
    (a_bar,) = torch.func.vjp(lambda a: step(a, found), a)[1](adjoint)
    return a_bar, None


def _adjoint_step(step):
    def adjoint_step(packed, u):
        a, found, cotangent = packed
        return cotangent + torch.func.vjp(lambda x: step(a, x), found)[1](u)[0]

    return adjoint_step


fixed_point.defvjp(_fixed_point_forward, _fixed_point_backward)


def newton_step(a, x):
    """Heron's step, whose fixed point is √a."""
    return 0.5 * (x + a / x)


def tree_value(a, b):
    return {"s": a["u"] * b.sin(), "t": (a["u"].sum() * b.cos(), 3)}


tree_jvp = custom_jvp(tree_value)
tree_vjp = custom_vjp(tree_value)


@tree_jvp.defjvp
def _tree_rule(primals, tangents):
    (a, b), (a_dot, b_dot) = primals, tangents
    u, u_dot = a["u"], a_dot["u"]
    s_dot = u_dot * b.sin() + u * b.cos() * b_dot
    return tree_jvp(a, b), {"s": s_dot, "t": (u_dot.sum() * b.cos() - u.sum() * b.sin() * b_dot, None)}


def _tree_forward(a, b):
    output = tree_value(a, b)
    return output, {"a": a, "output": output, "sin": b.sin(), "cos": b.cos()}


def _tree_backward(residuals, cotangent):
    u, s, t = residuals["a"]["u"], cotangent["s"], cotangent["t"][0]
    u_bar = s * residuals["sin"] + (t * residuals["cos"]).sum()
    return {"u": u_bar, "k": None}, s * u * residuals["cos"] - t * u.sum() * residuals["sin"]


tree_vjp.defvjp(_tree_forward, _tree_backward)


def through_tree(f):
    def flat(u, b):
        output = f({"u": u, "k": 3.0}, b=b)
        return output["s"], output["t"][0]

    return flat


tanh = elementwise(torch.tanh, derivative=lambda _x, y: 1 - y * y, name="tanh")
power = elementwise(
    lambda x, n: x**n,
    derivative=(lambda x, n: n * x ** (n - 1), lambda x, n, y: y * x.log()),
    name="power",
)
hypot = elementwise(torch.hypot, derivative=(lambda x, y, r: x / r, lambda x, y, r: y / r), name="hypot")
multiply = elementwise(lambda x, y: x * y, derivative=lambda x, y: (y, x), name="multiply")


def draw(*shapes, positive=False) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return tuple(x.abs() + 0.5 if positive else x for x in found)


@dataclass(frozen=True)
class Problem:
    """A function with a custom rule and the function whose derivatives it must have."""

    name: str
    function: object
    truth: object
    inputs: tuple[Tensor, ...]
    check: dict = field(default_factory=dict)


PROBLEMS = [
    Problem("log1pexp", log1pexp, torch.nn.functional.softplus, draw(3)),
    Problem("sqrt_ratio", sqrt_ratio, lambda x: x / (1 + x.sqrt()), draw(3, positive=True)),
    Problem("defjvps", product, lambda x, y: x.sin() * y, draw(3, 3)),
    Problem("sine_product", sine_product, lambda x, y: x.sin() * y, draw(3, 3)),
    Problem("tree by jvp", through_tree(tree_jvp), lambda u, b: (u * b.sin(), u.sum() * b.cos()), draw(2, 2)),
    Problem("tree by vjp", through_tree(tree_vjp), lambda u, b: (u * b.sin(), u.sum() * b.cos()), draw(2, 2)),
    Problem(
        "fixed_point",
        lambda a: fixed_point(newton_step, a, torch.ones_like(a)),
        torch.sqrt,
        (torch.tensor([0.8, 1.3], dtype=torch.float64),),
        # The iteration is slow, so third order is compared with the closed form only.
        {"scipy": False, "order": 2},
    ),
    Problem("tanh", tanh, torch.tanh, draw(3)),
    Problem("power", power, lambda x, n: x**n, draw((2, 1), (3,), positive=True)),
    Problem("hypot", hypot, lambda x, y: (x * x + y * y).sqrt(), draw((2, 2), (2,))),
    Problem("multiply", multiply, lambda x, y: x * y, draw((2, 1), (1, 2))),
]
