"""Checks of the oracles: differences against closed forms, SciPy, and the record of torch's faults."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES, THIRD_ORDER, Case, array, cast, ravel, unravel
from derivatives.oracles import difference_hessian, flat_function, reference, third_differences
from scipy.differentiate import hessian as scipy_hessian
from torch import Tensor
from torch.func import grad, jvp

WITH_GRADIENT = [each for each in CASES if each.gradient is not None]
SMOOTH = [each for each in CASES if each.smooth]
WITH_HESSIAN = [each for each in CASES if each.hessian is not None]


def each_basis_vector(product: Callable[[Tensor], Tensor], n: int) -> Tensor:
    return torch.stack([product(row) for row in torch.eye(n, dtype=torch.float64)])


# Routes in plain torch, to which the records of the cases refer. Nested forward mode gives uᵀ H v for two
# directions, so that route takes a pass for each basis vector u.
TORCH_ROUTES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor]] = {
    "reverse-over-reverse": lambda f, x, v: grad(lambda y: grad(f)(y) @ v)(x),
    "forward-over-reverse": lambda f, x, v: jvp(grad(f), (x,), (v,))[1],
    "reverse-over-forward": lambda f, x, v: grad(lambda y: jvp(f, (y,), (v,))[1])(x),
    "forward-over-forward": lambda f, x, v: each_basis_vector(
        lambda e: jvp(lambda y: jvp(f, (y,), (v,))[1], (x,), (e,))[1], x.numel()
    ),
    "over-batched-reverse": lambda f, x, v: torch.func.hessian(f)(x) @ v,
}


def flat_problem(each: Case) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    x, args = each.inputs()
    return flat_function(each, x, args), ravel(x), ravel(each.vector())


@pytest.mark.parametrize("case", WITH_HESSIAN, ids=lambda each: each.name)
def test_hessian_differences_match_closed_forms(case: Case) -> None:
    f, x, _ = flat_problem(case)
    actual, _ = difference_hessian(f, x)
    expected = reference(case.name).hessian
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-8 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize("case", CASES, ids=lambda each: each.name)
def test_reference_tolerances_are_small(case: Case) -> None:
    """The tests below could not fail with a tolerance that accepts errors."""
    known = reference(case.name)
    assert known.tolerance <= 1e-7 * max(1.0, known.hessian.abs().max().item())
    assert torch.equal(known.hessian, known.hessian.T) or case.hessian is not None
    if case.name != "affine":
        assert known.hessian.abs().max() > 1e-2


@pytest.mark.parametrize("case", WITH_GRADIENT, ids=lambda each: each.name)
def test_gradients_match_closed_forms(case: Case) -> None:
    f, x, _ = flat_problem(case)
    np.testing.assert_allclose(array(grad(f)(x)), case.gradient(*case.inputs()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["mixed_polynomial", "nested", "layer_norm"])
def test_differences_match_scipy(name: str) -> None:
    (case,) = (each for each in CASES if each.name == name)
    f, x, _ = flat_problem(case)

    def values(points: np.ndarray) -> np.ndarray:
        """Evaluate f over the leading axis of an array, as SciPy requires."""
        columns = torch.from_numpy(points.reshape(len(points), -1).T.copy())
        return torch.func.vmap(f)(columns).numpy().reshape(points.shape[1:])

    expected = scipy_hessian(values, x.numpy(), maxiter=6)
    np.testing.assert_allclose(array(difference_hessian(f, x)[0]), expected.ddf, rtol=0, atol=1e-6)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("route", TORCH_ROUTES)
@pytest.mark.parametrize("case", CASES, ids=lambda each: each.name)
def test_recorded_torch_faults_are_true(case: Case, route: str) -> None:
    f, x, v = flat_problem(case)
    known = reference(case.name)
    if route in case.missing_in_torch:
        with pytest.raises(NotImplementedError):
            TORCH_ROUTES[route](f, x, v)
        return
    error = (TORCH_ROUTES[route](f, x, v) - known.hessian @ v).abs().max()
    assert (error > 1e3 * known.tolerance) == (route in case.wrong_in_torch)


@pytest.mark.parametrize("case", SMOOTH, ids=lambda each: each.name)
def test_third_derivatives_of_torch_match_differences(case: Case) -> None:
    f, x, v = flat_problem(case)
    expected, error = third_differences(f, x, v[None])
    actual = grad(lambda y: grad(lambda z: grad(f)(z) @ v)(y) @ v)(x) @ v
    scale = max(1.0, expected.abs().item())
    assert error < 1e-4 * scale
    assert ((actual - expected).abs().item() > 1e-2 * scale) == (THIRD_ORDER in case.wrong_in_torch)


@pytest.mark.parametrize("case", CASES, ids=lambda each: each.name)
def test_ravel_and_unravel_are_inverse(case: Case) -> None:
    x, _ = case.inputs()
    assert ravel(unravel(ravel(x), x)).equal(ravel(x))


@pytest.mark.parametrize("case", CASES, ids=lambda each: each.name)
def test_inputs_depend_on_the_seed_only(case: Case) -> None:
    def flat(inputs: Any) -> Tensor:
        return ravel(cast(inputs[0], torch.float64))

    assert flat(case.inputs()).equal(flat(case.inputs()))
    assert not flat(case.inputs()).equal(flat(case.inputs(seed=3)))
    assert flat(case.inputs(torch.float32)).equal(flat(case.inputs()).to(torch.float32).to(torch.float64))
