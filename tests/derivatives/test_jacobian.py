"""hodiff.jacobian in both modes against closed forms and, for structure, torch.func.jacrev."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import CASES, Case, ravel
from cases import case as named
from custom_functions import cubed_slope, old_style
from derivatives.oracles import assert_same_structure, flat_function, reference
from drawing import draw
from torch import Tensor
from torch.func import grad, jacrev

import hodiff
from hodiff import InputError, RouteError, jacobian
from hodiff.derivatives.bound_function import bind
from hodiff.derivatives.jacobian import _Linearized

MODES = ("auto", "forward", "reverse")
CHUNK_SIZES = ("auto", None, 1, 2, 1000)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (1, 4), (4, 1)])
def test_linear_map_has_its_matrix(shape: tuple[int, int], chunk_size: Any, mode: str) -> None:
    A, x = draw(*shape), draw(shape[1], seed=1)
    torch.testing.assert_close(jacobian(lambda y: A @ y, mode=mode, chunk_size=chunk_size)(x), A)


@pytest.mark.parametrize("mode", MODES)
def test_elementwise_function_has_a_diagonal(mode: str) -> None:
    x = draw(2, 3)
    expected = torch.diag(x.cos().reshape(-1)).reshape(2, 3, 2, 3)
    torch.testing.assert_close(jacobian(torch.sin, mode=mode)(x), expected)


@pytest.mark.parametrize("mode", MODES)
def test_matrix_inverse_matches_closed_form(mode: str) -> None:
    """∂(A⁻¹)ᵢⱼ / ∂Aₖₗ = −(A⁻¹)ᵢₖ (A⁻¹)ₗⱼ."""
    A = 3 * torch.eye(3, dtype=torch.float64) + draw(3, 3)
    inverse = torch.linalg.inv(A)
    expected = -torch.einsum("ik,lj->ijkl", inverse, inverse)
    torch.testing.assert_close(jacobian(torch.linalg.inv, mode=mode)(A), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(), (1,), (2, 1)])
def test_scalar_output_gives_the_gradient(shape: tuple[int, ...], mode: str) -> None:
    x = draw(*shape)
    torch.testing.assert_close(jacobian(lambda y: y.exp().sum(), mode=mode)(x), x.exp())


def mixed(a: Tensor, tree: dict[str, Any], gain: float = 1.0) -> dict[str, Any]:
    return {
        "product": gain * tree["m"] @ a,
        "pair": (a.sin().sum(), [tree["list"][0] * a[0], a[:0]]),
    }


def mixed_inputs() -> tuple[Tensor, dict[str, Any]]:
    return draw(3), {"m": draw(2, 3, seed=1), "list": [draw(2, 2, seed=2)]}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("argnums", [0, 1, -1, (0,), (0, 1), (1, 0)])
def test_structure_matches_torch_func_jacrev(argnums: int | tuple[int, ...], mode: str) -> None:
    actual = jacobian(mixed, argnums, mode=mode)(*mixed_inputs(), gain=2.0)
    expected = jacrev(partial(mixed, gain=2.0), argnums)(*mixed_inputs())
    assert_same_structure(actual, expected)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("mode", MODES)
def test_constant_outputs_have_zero_blocks(mode: str) -> None:
    x = draw(3)
    constant = torch.ones(2, dtype=torch.float64)
    actual = jacobian(lambda y: {"used": y * 2, "constant": constant * 1}, mode=mode)(x)
    assert actual["constant"].equal(torch.zeros(2, 3, dtype=torch.float64))
    torch.testing.assert_close(actual["used"], 2 * torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("mode", MODES)
def test_has_aux_returns_aux(mode: str) -> None:
    x = draw(3)
    actual, aux = jacobian(lambda y: (y**2, {"sum": y.sum(), "n": torch.tensor(3)}), has_aux=True, mode=mode)(x)
    torch.testing.assert_close(actual, torch.diag(2 * x))
    torch.testing.assert_close(aux["sum"], x.sum())
    assert aux["n"].equal(torch.tensor(3))
    assert not aux["sum"].requires_grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["mlp", "softmax_regression", "nested", "ignored_leaf"])
def test_jacobian_of_the_gradient_matches_hessian(name: str, mode: str) -> None:
    case: Case = named(name)
    x, args = case.inputs()
    blocks = jacobian(lambda y: ravel(grad(case.function)(y, *args)), mode=mode)(x)
    known = reference(name)
    n = len(known.hessian)
    known.check(torch.cat([block.reshape(n, -1) for block in _leaves(blocks)], dim=1), known.hessian)


def _leaves(tree: Any) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(tree)


@pytest.mark.parametrize("mode", MODES)
def test_float32_matches_float64(mode: str) -> None:
    x = draw(4)
    exact = jacobian(lambda y: torch.softmax(y, 0), mode=mode)(x.float().double())
    actual = jacobian(lambda y: torch.softmax(y, 0), mode=mode)(x.float())
    assert actual.dtype == torch.float32
    assert (actual.double() - exact).abs().max() <= 10 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("mode", MODES)
def test_python_numbers_do_not_promote_dtype(mode: str) -> None:
    """Blocks stay float32, although torch's forward mode makes the tangent of 0.5 * x.sum() float64."""
    block = jacobian(lambda y: 0.5 * (y * y).sum(), mode=mode)(torch.ones(2))
    assert block.dtype == torch.float32
    assert block.equal(torch.ones(2))


@pytest.mark.parametrize("mode", MODES)
def test_composes_with_vmap_grad_and_itself(mode: str) -> None:
    """jacobian is right under vmap, nested, and differentiated: the Jacobian of y² is diag(2y)."""
    x = draw(3)
    square = jacobian(lambda y: y**2, mode=mode)
    torch.testing.assert_close(torch.func.vmap(square)(draw(4, 3)), torch.diag_embed(2 * draw(4, 3)))
    second = torch.zeros(3, 3, 3, dtype=torch.float64)
    second[range(3), range(3), range(3)] = 2
    torch.testing.assert_close(jacobian(square, mode=mode)(x), second)
    torch.testing.assert_close(grad(lambda y: (square(y) ** 2).sum())(x), 8 * x)
    leaf = x.clone().requires_grad_()
    (square(leaf) ** 2).sum().backward()
    torch.testing.assert_close(leaf.grad, 8 * x)


@pytest.mark.parametrize("mode", MODES)
def test_result_requires_grad_only_if_an_input_does(mode: str) -> None:
    x = draw(3)
    assert not jacobian(torch.sin, mode=mode)(x).requires_grad
    with torch.no_grad():
        outcome = jacobian(torch.sin, mode=mode)(x.clone().requires_grad_())
    torch.testing.assert_close(outcome, torch.diag(x.cos()))
    assert not outcome.requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(jacobian(torch.sin, mode=mode)(x), torch.diag(x.cos()))


def composed() -> list[Any]:
    return [
        pytest.param(each, inner, outer, id=f"{each.name}-{outer}-{inner}")
        for each in CASES
        # The gradient of an affine function does not depend on its input, which raises another error.
        if each.name != "affine"
        for inner in ("forward", "reverse")
        for outer in ("forward", "reverse")
    ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("case", "inner", "outer"), composed())
def test_jacobian_of_a_jacobian_matches_hessian(case: Case, inner: str, outer: str) -> None:
    x, args = case.inputs()
    known = reference(case.name)
    f = flat_function(case, x, args)
    known.check(jacobian(jacobian(f, mode=inner), mode=outer)(ravel(x)), known.hessian)


def test_missing_forward_rule_raises_in_forward_mode() -> None:
    """The gradient of huber_loss has no forward rule."""
    target = torch.zeros(3, dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        return grad(torch.nn.functional.huber_loss)(x, target)

    x = draw(3)
    with pytest.raises(RouteError, match="forward"):
        jacobian(f, mode="forward", correct=False)(x)
    expected = torch.diag((x.abs() < 1).double()) / 3
    torch.testing.assert_close(jacobian(f)(x), expected)


@pytest.mark.parametrize("mode", MODES)
def test_rejects_complex_output(mode: str) -> None:
    """torch.func.jacrev also rejects it: reverse mode with a real input would keep only the real part."""
    with pytest.raises(InputError, match="complex"):
        jacobian(torch.fft.fft, mode=mode)(draw(3))


def test_auto_mode_weighs_directions_against_calls() -> None:
    """mode="auto" uses reverse mode for many small operators, and forward mode for large or few operators."""

    def takes_forward(f: Callable[[Tensor], Tensor], x: Tensor) -> bool:
        return _Linearized(bind("jacobian", f, (x,)), "error").forward_pays

    def chain(x: Tensor) -> Tensor:
        for _ in range(50):
            x = x.sin() * 1.1
        return torch.outer(torch.linspace(0, 1, 40, dtype=torch.float64), x).sum(1)

    A = torch.ones(2000, 300, dtype=torch.float64)
    assert not takes_forward(chain, torch.ones(3, dtype=torch.float64))
    assert takes_forward(lambda x: A @ x, torch.ones(300, dtype=torch.float64))
    assert takes_forward(
        lambda x: torch.outer(torch.ones(10**6, dtype=torch.float64), x).sin(), torch.ones(1, dtype=torch.float64)
    )
    # as many inputs as outputs
    assert not takes_forward(lambda x: A.mT @ (A @ x), torch.ones(300, dtype=torch.float64))


# x³ in the old form without setup_context, which torch.func refuses and torchdiffeq uses
OldCube = old_style("OldCube", lambda x: (x**3, x), cubed_slope)


def test_legacy_functions_without_setup_context_match() -> None:
    x, scale = draw(3), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        return scale * OldCube.apply(x).cumsum(0)

    lower = torch.ones(3, 3, dtype=torch.float64).tril()
    J = jacobian(f)(x)
    torch.testing.assert_close(J, 2 * lower * (3 * x**2))
    torch.testing.assert_close(torch.autograd.grad(J.sum(), scale)[0], J.sum() / 2)
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(jacobian(f, mode="reverse")(leaf).sum(), leaf)
    torch.testing.assert_close(slope, 2 * lower.sum(0) * 6 * x)
    with torch.no_grad():
        torch.testing.assert_close(jacobian(f)(x), 2 * lower * (3 * x**2))
        found = hodiff.optimize.least_squares(lambda y: OldCube.apply(y) - x**3, x + 0.1).x
        torch.testing.assert_close(found, x, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            hodiff.sparse.jacobian(OldCube.apply)(x).to_dense(), torch.diag(3 * x**2), rtol=1e-12, atol=0
        )
    cube_root = hodiff.implicit.root(lambda y, p: OldCube.apply(y) - p, hodiff.implicit.newton())
    p = (x**3).requires_grad_()
    (slope,) = torch.autograd.grad(cube_root(x + 0.1, p).sum(), p, create_graph=True)
    torch.testing.assert_close(slope, 1 / (3 * x**2))
    torch.testing.assert_close(torch.autograd.grad(slope.sum(), p)[0], -2 / (9 * x**5))
