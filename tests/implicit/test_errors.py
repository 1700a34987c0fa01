"""Wrong arguments raise an error that names the argument."""

import pytest
import torch

from hodiff.errors import InputError
from hodiff.implicit import (
    anderson,
    argmin,
    equality_argmin,
    fixed_point,
    linear_solve,
    newton,
    picard,
    projected_argmin,
    proximal_argmin,
    root,
    scipy_minimize,
    scipy_root,
    stationary,
    torch_optimizer,
)
from hodiff.implicit.scipy_solvers import _MINIMIZE_METHODS

X = torch.ones(2, dtype=torch.float64)
MAKERS = {
    "root": lambda **options: root(lambda x, p: x - p, newton(), **options),
    "fixed_point": lambda **options: fixed_point(lambda x, p: 0.5 * x + p, picard(), **options),
    "argmin": lambda **options: argmin(lambda x, p: ((x - p) ** 2).sum(), scipy_minimize(), **options),
    "linear_solve": lambda linear_solver="auto", **options: linear_solve(
        lambda x: 2 * x, X, method=linear_solver, **options
    ),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("linear_solver", "lu"),
        ("linear_solver", 3),
        ("tol", -1.0),
        ("tol", "small"),
        ("max_iterations", 0),
        ("max_iterations", 2.5),
    ],
)
def test_rejects_bad_options(name, option, value):
    shown = "method" if (name, option) == ("linear_solve", "linear_solver") else option
    with pytest.raises(InputError, match=f"{name}: {shown}: expected"):
        MAKERS[name](**{option: value})


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: root(3, newton()), "root: residual: expected a callable"),
        (lambda: root(lambda x: x, "newton"), "root: solver: expected a callable"),
        (lambda: fixed_point(None, picard()), "fixed_point: step"),
        (lambda: argmin(lambda x: x, None), "argmin: solver"),
        (lambda: linear_solve(X, X), "linear_solve: matvec"),
        (lambda: equality_argmin(lambda x: x.sum(), None), "equality_argmin: equality"),
        (lambda: proximal_argmin(lambda x: x.sum(), 1.0), "proximal_argmin: proximal"),
        (lambda: projected_argmin(lambda x: x.sum(), 1.0), "projected_argmin: projection"),
        (lambda: projected_argmin(lambda x: x.sum(), lambda x: x, step_size=0.0), "step_size"),
        (lambda: root(lambda x: x, newton(), residual_tol=0), "root: residual_tol"),
        (lambda: newton(tol=-1), "newton: tol"),
        (lambda: newton(max_iterations=0), "newton: max_iterations"),
        (lambda: newton(linear_solver="lu"), "newton: linear_solver"),
        (lambda: picard(damping=0), "picard: damping"),
        (lambda: anderson(memory=0), "anderson: memory"),
        (lambda: scipy_root("newton"), "scipy_root: method"),
        (lambda: scipy_minimize("lbfgs"), "scipy_minimize: method"),
        (lambda: torch_optimizer(None), "torch_optimizer: optimizer"),
        (lambda: torch_optimizer(torch.optim.SGD, steps=0), "torch_optimizer: steps"),
    ],
)
def test_makers_reject_bad_arguments(call, match):
    with pytest.raises(InputError, match=match):
        call()


@pytest.mark.parametrize(
    ("x0", "match"),
    [
        ((), "x0 holds no tensor"),
        (1.0, r"with respect to x0: expected a real floating-point tensor, got float"),
        ({"a": torch.ones(2, dtype=torch.int64)}, r"x0\['a'\]"),
        (torch.ones(2, dtype=torch.complex64), "x0"),
    ],
)
def test_rejects_bad_start(x0, match):
    for name in ("root", "fixed_point", "argmin"):
        with pytest.raises(InputError, match=match):
            MAKERS[name]()(x0, X)


@pytest.mark.parametrize(
    ("result", "match"),
    [
        ({"a": X}, r"solver: result: expected the structure of x0, a bare Tensor, got \{a: Tensor\}"),
        (X[:1], r"solver: result: expected \(2,\) float64, got \(1,\) float64"),
        (X.float(), "solver: result: expected .* float64, got .* float32"),
        (X.numpy(), "solver: result: expected .* got ndarray"),
        (None, "solver: result"),
    ],
)
def test_rejects_solver_with_result_of_another_structure(result, match):
    for name, make in (
        ("root", lambda s: root(lambda x, p: x - p, s)),
        ("fixed_point", lambda s: fixed_point(lambda x, p: p + 0 * x, s)),
        ("argmin", lambda s: argmin(lambda x, p: ((x - p) ** 2).sum(), s)),
    ):
        with pytest.raises(InputError, match=f"{name}: {match}"):
            make(lambda *_: result)(X, X)


@pytest.mark.parametrize("bad", [lambda x, p: (x - p).sum(), lambda x, p: {"r": x - p}, lambda x, p: None])
def test_rejects_residual_of_another_structure(bad):
    with pytest.raises(InputError, match="residual: result"):
        root(bad, lambda residual, x0, p: x0)(X, X)


@pytest.mark.parametrize("bad", [lambda x, p: x.sum(), lambda x, p: (x, p)])
def test_rejects_step_of_another_structure(bad):
    with pytest.raises(InputError, match="fixed_point: step: result"):
        fixed_point(bad, picard())(X, X)


MINIMIZERS = {
    "one of a user": lambda objective, x0, p: x0,
    "Newton": stationary(newton()),
    "SGD": torch_optimizer(torch.optim.SGD, lr=0.1),
    "L-BFGS": torch_optimizer(torch.optim.LBFGS, tol=1e-3),
    **{method: scipy_minimize(method) for method in sorted(_MINIMIZE_METHODS)},
}


@pytest.mark.parametrize("solver", MINIMIZERS.values(), ids=MINIMIZERS)
@pytest.mark.parametrize("bad", [lambda x, p: x - p, lambda x, p: 1.0, lambda x, p: (x.sum(), x)])
def test_rejects_objective_that_is_no_scalar(bad, solver):
    with pytest.raises(InputError, match="objective: expected one real number"):
        argmin(bad, solver)(X, X)


def test_rejects_matvec_of_another_structure():
    for bad in (lambda x: x[:1], lambda x: (x, x), lambda x: x.float()):
        with pytest.raises(InputError, match="linear_solve: matvec: result"):
            linear_solve(bad, X)


def test_rejects_linear_solver_with_result_of_another_structure():
    with pytest.raises(InputError, match="linear_solve: linear_solver: result"):
        linear_solve(lambda x: x, X, method=lambda matvec, rhs: rhs[:1])


def test_has_aux_requires_a_pair():
    with pytest.raises(InputError, match="root: has_aux"):
        root(lambda x, p: x - p, newton(), has_aux=True)(X, X)


CAPTURED = [
    ("root", lambda w: root(lambda x, p: x - p * w, newton())),
    ("fixed_point", lambda w: fixed_point(lambda x, p: x / 2 + p * w, picard())),
    ("argmin", lambda w: argmin(lambda x, p: ((x - p * w) ** 2).sum(), scipy_minimize())),
    ("linear_solve", lambda w: lambda x0, p: linear_solve(lambda x, p: w * p * x, x0, p)),
]


@pytest.mark.parametrize(("name", "make"), CAPTURED, ids=[name for name, _ in CAPTURED])
def test_rejects_closed_over_tensors_that_require_grad(name, make):
    match = rf"{name}: .*closes over \(w\); pass it as an argument"
    with pytest.raises(InputError, match=match):
        make(torch.ones(2, dtype=torch.float64, requires_grad=True))(X, X)
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        with pytest.raises(InputError, match=match):
            transform(lambda w: make(w)(X, X))(X)
    # Outer autograd would lose the parameter, whatever the inner transform.
    w = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with pytest.raises(InputError, match=match):
        torch.func.jacrev(lambda p: make(w)(X, p))(X)
    with pytest.raises(InputError, match=name), torch.autograd.forward_ad.dual_level():
        make(torch.autograd.forward_ad.make_dual(X, X))(X, X)
    # Nothing is lost without recording, or with a constant.
    with torch.no_grad():
        make(w)(X, X)
    make(X)(X, X)


@pytest.mark.parametrize("solver", [newton, scipy_root])
def test_solver_rejects_residual_of_another_shape(solver):
    name = solver.__name__
    with pytest.raises(InputError, match=rf"^{name}: residual: result: expected \(2,\) float64, got \(\) float64"):
        root(lambda x, p: (x - p).sum(), solver())(X, X)
    with pytest.raises(InputError, match=rf"^{name}: residual: result: expected \(2,\) float64, got \(3,\) float64"):
        root(lambda x, p: torch.cat([x, p[:1]]), solver())(X, X)
    with pytest.raises(InputError, match=rf"as many equations as unknowns.* stationary\({name}\(\)\)"):
        argmin(lambda x, p: ((x - p) ** 2).sum(), solver())(X, X)
