"""Operators of torch.library by every route, against the same formulas in torch operators."""

import numpy as np
import pytest
import torch
from torch import Tensor

import hodiff
from hodiff.authoring import from_custom_op

X = torch.tensor([0.5, -1.2, 2.0], dtype=torch.float64)


def keep_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


@torch.library.custom_op("hodiff_tests::exponential", mutates_args=())
def exponential(x: Tensor) -> Tensor:
    return torch.from_numpy(np.exp(x.numpy()))


exponential.register_autograd(
    lambda ctx, g: g * ctx.y, setup_context=lambda ctx, inputs, output: setattr(ctx, "y", output)
)


@torch.library.custom_op("hodiff_tests::sine", mutates_args=())
def sine(x: Tensor) -> Tensor:
    return x.sin()


# The saved cosine is an intermediate, which torch treats as a constant at second order.
sine.register_autograd(
    lambda ctx, g: g * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0].cos()),
)


@torch.library.custom_op("hodiff_tests::products", mutates_args=())
def products(x: Tensor, y: Tensor, scale: float = 2.0, *, negative: bool = False) -> tuple[Tensor, Tensor]:
    return (-scale if negative else scale) * x * y, x + y


def keep_products(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.scale = -inputs[2] if keyword_only_inputs["negative"] else inputs[2]


def pull_products(ctx, a, b):
    x, y = ctx.saved_tensors
    return a * ctx.scale * y + b, a * ctx.scale * x + b, None


products.register_autograd(pull_products, setup_context=keep_products)


@torch.library.custom_op("hodiff_tests::joined", mutates_args=())
def joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) ** 2


def pull_joined(ctx, g):
    parts = ctx.saved_tensors
    return [2 * each * part for each, part in zip(g.split([len(part) for part in parts]), parts, strict=True)]


joined.register_autograd(pull_joined, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[0]))

LIBRARY = torch.library.Library("hodiff_tests_of_library", "DEF")
LIBRARY.define("cube(Tensor x) -> Tensor")
LIBRARY.impl("cube", lambda x: x**3, "CompositeExplicitAutograd")
torch.library.register_autograd(
    "hodiff_tests_of_library::cube", lambda ctx, g: 3 * g * ctx.saved_tensors[0] ** 2, setup_context=keep_inputs
)

EXPONENTIAL, SINE, PRODUCTS, JOINED = map(from_custom_op, (exponential, sine, products, joined))
CUBE = from_custom_op(torch.ops.hodiff_tests_of_library.cube)

CASES = {
    "an output kept on ctx": (EXPONENTIAL, torch.exp),
    "an intermediate": (SINE, torch.sin),
    "outputs, defaults and keywords": (
        lambda x: PRODUCTS(x, x.sin(), 3.0)[0] * PRODUCTS(x, y=x, negative=True)[0],
        lambda x: -6 * x**3 * x.sin(),
    ),
    "a list": (lambda x: JOINED([x[:2], x[2:] * x[0]]), lambda x: torch.cat([x[:2], x[2:] * x[0]]) ** 2),
    "registered for another's": (CUBE, lambda x: x**3),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", CASES)
def test_derivatives_match_formula_by_every_route(name):
    f, formula = CASES[name]
    own, truth = (lambda x: f(x).sin().sum()), (lambda x: formula(x).sin().sum())
    expected = torch.func.hessian(truth)(X)
    for route in hodiff.ROUTES:
        found = hodiff.hvp(own, X, X, route=route)
        torch.testing.assert_close(found, expected @ X)
    torch.testing.assert_close(torch.func.jvp(f, (X,), (X,)), torch.func.jvp(formula, (X,), (X,)))
    third = torch.func.grad(lambda x: torch.func.grad(lambda x: torch.func.grad(own)(x) @ X)(x) @ X)
    expected = torch.func.grad(lambda x: torch.func.grad(lambda x: torch.func.grad(truth)(x) @ X)(x) @ X)
    torch.testing.assert_close(third(X), expected(X))


# Since torch 2.15, an operator without register_vmap warns that it is called once per batch element.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_and_compiled_gradient_match_closed_form():
    torch.testing.assert_close(torch.func.vmap(CUBE)(torch.stack([X, 2 * X])), torch.stack([X, 2 * X]) ** 3)
    compiled = torch.compile(lambda x: CUBE(x).sum(), backend="aot_eager", fullgraph=True)
    x = X.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], 3 * X**2)


def test_rejects_operators_without_a_usable_rule():
    with pytest.raises(hodiff.InputError, match=r"expected an operator of torch\.library, got <built-in method sin"):
        from_custom_op(torch.sin)

    @torch.library.custom_op("hodiff_tests::bare", mutates_args=())
    def bare(x: Tensor) -> Tensor:
        return x * 1

    with pytest.raises(hodiff.InputError, match=r"got hodiff_tests.bare, which has none\. Call torch.library.register"):
        hodiff.hvp(lambda x: from_custom_op(bare)(x).sum(), X, X)

    @torch.library.custom_op("hodiff_tests::writing", mutates_args={"x"})
    def writing(x: Tensor) -> None:
        x.mul_(2)

    with pytest.raises(hodiff.InputError, match=r"does not change its arguments, got hodiff_tests\.writing"):
        from_custom_op(writing)


@pytest.mark.slow
def test_check_names_the_wrong_rule_of_the_operator():
    @torch.library.custom_op("hodiff_tests::doubtful", mutates_args=())
    def doubtful(x: Tensor) -> Tensor:
        return x**2

    doubtful.register_autograd(lambda ctx, g: 3 * g * ctx.saved_tensors[0], setup_context=keep_inputs)
    report = hodiff.check(doubtful, X, scipy=False, vmap=False)
    assert report.codes == ("HD101", "HD412")
    assert report.findings[0].evidence[0] == "the gradient of x in hodiff_tests.doubtful is 1.5 times the derivative"
    assert "from_custom_op" in report.findings[1].remedy
    doubtful.register_autograd(lambda ctx, g: 2 * g * ctx.saved_tensors[0].detach(), setup_context=keep_inputs)
    assert hodiff.check(doubtful, X, scipy=False, vmap=False).codes == ("HD104", "HD412", "HD410")
    # Corrections give every route to an operator whose formula is right, whatever its form.
    for f in (products, joined, torch.ops.hodiff_tests_of_library.cube):
        given = ([X, 2 * X],) if f is joined else (X, X.sin())[: 1 + (f is products)]
        # The formula that another library registered for its operator is not found without a call.
        expected = ["HD406", "HD412"] if isinstance(f, torch._ops.OpOverloadPacket) else []
        assert [each.code for each in hodiff.check(f, given, scipy=False, vmap=False).errors] == expected, f


def test_check_of_a_module_names_the_operator():
    class Model(torch.nn.Linear):
        def forward(self, x):
            return torch.ops.hodiff_tests_of_library.cube(super().forward(x))

    (finding,) = hodiff.check(Model(3, 3), X.float()).errors
    assert (finding.code, finding.location.partition(":")[0]) == ("HD412", "test_from_custom_op.py")
