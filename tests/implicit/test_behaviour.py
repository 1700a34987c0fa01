"""Tests of implicit functions beyond derivatives: solver runs, vmap, aux, modes, modules, solvers of every family."""

import pytest
import torch
from custom_functions import cubed_slope, custom, old_style
from torch.func import functional_call

import hodiff
from hodiff.implicit import (
    anderson,
    argmin,
    fixed_point,
    linear_solve,
    newton,
    picard,
    proximal_argmin,
    root,
    scipy_minimize,
    scipy_root,
    stationary,
    torch_optimizer,
)

P = torch.tensor([1.5, 2.0, 3.0], dtype=torch.float64)


class Counting:
    """A solver in plain Python that iterates to convergence and records the number of steps of each run."""

    def __init__(self):
        self.steps = []

    def __call__(self, residual, x0, p):
        assert not torch._C._are_functorch_transforms_active()
        assert not p.requires_grad
        x, count = x0, 0
        while residual(x, p).abs().max().item() > 1e-14 * float(p.max()):
            x, count = (x + p / x) / 2, count + 1
        self.steps.append(count)
        return x


@pytest.fixture
def counting():
    return Counting()


def square_root(solver, **options):
    f = root(lambda x, p: x * x - p, solver, **options)
    return lambda p: f(torch.ones_like(p), p)


def test_solver_runs_once_for_all_derivatives(counting):
    f = square_root(counting)
    p = P.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(f(p).sum(), p, create_graph=True)
    torch.autograd.grad(gradient.sum(), p)
    assert len(counting.steps) == 1
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        transform(lambda p: f(p).sum())(P)
    assert len(counting.steps) == 4


def test_vmapped_elements_converge_separately(counting):
    ps = torch.tensor([1.0, 2.0, 1e8], dtype=torch.float64)
    found = torch.func.vmap(square_root(counting))(ps)
    torch.testing.assert_close(found, ps.sqrt())
    assert counting.steps[0] == 0 < counting.steps[1] < counting.steps[2]
    batched = torch.func.vmap(torch.func.grad(torch.func.grad(square_root(counting))))(ps)
    torch.testing.assert_close(batched, -0.25 * ps**-1.5)


def test_derivative_by_the_start_is_zero():
    f = root(lambda x, p: x * x - p, newton())
    x0 = torch.ones_like(P).requires_grad_()
    p = P.clone().requires_grad_()
    by_x0, by_p = torch.autograd.grad(f(x0, p).sum(), (x0, p), materialize_grads=True)
    assert not by_x0.any()
    assert by_p.all()
    assert not torch.func.jacfwd(f)(torch.ones_like(P), P).any()


def test_constants_and_unused_parameters_are_accepted():
    f = root(lambda x, p, q, power, names: x**power - p["p"], newton())

    def sums(p, q):
        return f(torch.ones_like(p), {"p": p, "n": torch.arange(3)}, q, 2, ("a", None)).sum()

    by_p, by_q = torch.func.grad(sums, argnums=(0, 1))(P, P)
    torch.testing.assert_close(by_p, 0.5 * P**-0.5)
    assert not by_q.any()
    assert not torch.func.hessian(sums, argnums=1)(P, P).any()


def test_residual_without_parameters_is_accepted():
    torch.testing.assert_close(root(lambda x: x * x - 2, newton())(torch.ones(())), torch.tensor(2.0).sqrt())


@pytest.mark.parametrize("make", ["root", "fixed_point", "argmin"])
def test_aux_is_computed_at_the_solution_and_differentiable(make):
    aux = lambda x, p: {"product": x * p}  # noqa: E731
    f = {
        "root": lambda: root(lambda x, p: (x * x - p, aux(x, p)), newton(), has_aux=True),
        "fixed_point": lambda: fixed_point(lambda x, p: ((x + p / x) / 2, aux(x, p)), picard(), has_aux=True),
        "argmin": lambda: argmin(lambda x, p: ((x**3 / 3 - p * x).sum(), aux(x, p)), scipy_minimize(), has_aux=True),
    }[make]()
    x, found = f(torch.ones_like(P), P)
    torch.testing.assert_close(x, P.sqrt())
    torch.testing.assert_close(found["product"], P**1.5)
    slope = torch.func.grad(lambda p: f(torch.ones_like(p), p)[1]["product"].sum())(P)
    torch.testing.assert_close(slope, 1.5 * P**0.5)


def test_works_in_no_grad_and_inference_mode():
    p = P.clone().requires_grad_()
    with torch.no_grad():
        assert not square_root(newton())(p).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(square_root(newton())(P * 1), P.sqrt())
        solved = linear_solve(lambda x, p: p * x, torch.ones_like(P) * 1, P * 1)
    torch.testing.assert_close(solved, 1 / P)
    assert square_root(newton())(p).requires_grad
    assert not square_root(newton())(P).requires_grad


def test_result_shares_no_memory_with_the_start():
    x0 = P.sqrt()
    found = root(lambda x, p: x * x - p, lambda residual, x0, p: x0)(x0, P)
    found.zero_()
    assert x0.all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo reads .grad
def test_compiled_code_breaks_the_graph_and_is_right():
    f = torch.compile(lambda p: square_root(newton())(p).cos().sum(), backend="eager")
    p = P.clone().requires_grad_()
    (found,) = torch.autograd.grad(f(p), p)
    (expected,) = torch.autograd.grad(p.sqrt().cos().sum(), p)
    torch.testing.assert_close(found, expected)


def test_transforms_of_hodiff_match_closed_form():
    f = square_root(newton())
    loss = lambda p: f(p).sum()  # noqa: E731
    torch.testing.assert_close(hodiff.hessian_matrix(loss, P), torch.diag(-0.25 * P**-1.5))
    for route in hodiff.ROUTES:
        torch.testing.assert_close(hodiff.hvp(loss, P, P, route=route), -0.25 * P**-0.5)


def test_equilibrium_model_gradient_matches_unrolled_loop():
    """The gradient of the layer z = tanh(W z + x) matches a long unrolled loop."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    weights = {name: 0.3 * each.detach() for name, each in layer.named_parameters()}

    def step(z, weights, x):
        return torch.tanh(functional_call(layer, weights, (z,)) + x)

    def implicit(weights):
        return fixed_point(step, anderson())(torch.zeros_like(x), weights, x).square().sum()

    def unrolled(weights):
        z = torch.zeros_like(x)
        for _ in range(80):
            z = step(z, weights, x)
        return z.square().sum()

    ours, theirs = torch.func.grad(implicit)(weights), torch.func.grad(unrolled)(weights)
    torch.testing.assert_close(ours, theirs)
    v = {name: torch.randn_like(each) for name, each in weights.items()}
    torch.testing.assert_close(hodiff.hvp(implicit, weights, v), hodiff.hvp(unrolled, weights, v))
    with pytest.raises(hodiff.InputError, match="closes over"):
        fixed_point(lambda z, x: torch.tanh(layer(z) + x), picard())(torch.zeros_like(x), x)


def test_neumann_terms_match_unrolling_the_last_steps():
    step = lambda x, p: torch.cos(x * p)  # noqa: E731
    p = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    f = fixed_point(step, picard(), linear_solver="neumann", max_iterations=7, check=False)
    (found,) = torch.autograd.grad(f(torch.ones_like(p), p), p)
    x = f(torch.ones_like(p), p).detach()
    for _ in range(7):
        x = step(x, p)
    torch.testing.assert_close(found, torch.autograd.grad(x, p)[0])


@pytest.mark.slow
def test_corrections_apply_inside_the_objective():
    """The Hessian of a minimum takes third derivatives of the objective, where torch's layer_norm is wrong."""

    def objective(x, p, norm):
        return (norm(x * p, (3,)).sin() * P).sum() + (x**2).sum() * 3

    def loss(norm, **options):
        f = argmin(objective, stationary(newton()), **options)
        return lambda p: f(P / 4, p, norm).square().sum()

    def by_hand(x, shape):
        return (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt()

    theirs = hodiff.hessian_matrix(loss(by_hand), P)
    torch.testing.assert_close(hodiff.hessian_matrix(loss(torch.nn.functional.layer_norm), P), theirs)


SOLVERS = {
    "newton": (root, newton()),
    "newton by gmres": (root, newton(linear_solver="gmres")),
    **{f"scipy {m}": (root, scipy_root(m)) for m in ("hybr", "lm", "krylov", "df-sane")},
}


@pytest.mark.parametrize("name", SOLVERS)
def test_root_solvers_find_the_solution(name):
    make, solver = SOLVERS[name]
    # Test a tree. df-sane needs a nearby start.
    x0 = {"a": P.sqrt() + 0.1, "b": torch.tensor(1.2, dtype=torch.float64)}
    f = make(lambda x, p: {"a": x["a"] ** 2 - p, "b": x["b"] ** 3 - x["a"][0]}, solver, residual_tol=1e-5)
    found = f(x0, P)
    torch.testing.assert_close(found["a"], P.sqrt(), rtol=1e-5, atol=0)
    torch.testing.assert_close(found["b"], P[0] ** (1 / 6), rtol=1e-5, atol=0)


MINIMIZERS = {
    "adam": torch_optimizer(torch.optim.Adam, steps=2000, lr=0.05, tol=1e-7),
    "lbfgs": torch_optimizer(torch.optim.LBFGS, steps=5, line_search_fn="strong_wolfe", tolerance_grad=1e-9),
    "newton": stationary(newton(symmetric=True)),
    **{
        f"scipy {m}": scipy_minimize(m)
        for m in (
            "trust-exact",
            "trust-ncg",
            "dogleg",
            "Newton-CG",
            "BFGS",
            "L-BFGS-B",
            "SLSQP",
            "Powell",
        )
    },
}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", MINIMIZERS)
def test_minimizers_find_the_minimum(name):
    def objective(x, p):
        return (x["a"].cosh() - p * x["a"]).sum() + (x["b"] - x["a"].sum()) ** 2 / 2

    x0 = {"a": torch.zeros(3, dtype=torch.float64), "b": torch.zeros((), dtype=torch.float64)}
    f = argmin(objective, MINIMIZERS[name], residual_tol=1e-4)
    found = f(x0, P)
    torch.testing.assert_close(found["a"], P.asinh(), rtol=1e-4, atol=1e-5)
    slope = torch.func.grad(lambda p: f(x0, p)["b"])(P)
    torch.testing.assert_close(slope, (1 + P**2) ** -0.5, rtol=1e-4, atol=0)


def test_lengths_of_other_computations_are_no_concern_of_a_solver():
    kept = []

    def total(x):
        kept.append((x - 1).norm())
        return kept[-1]

    with hodiff.corrected():
        torch.func.vmap(torch.func.grad(total))(torch.zeros(2, 3))

    def objective(x, p):
        return (hodiff.functions.log_cosh(x) - p * x).sum()

    f = argmin(objective, MINIMIZERS["scipy trust-exact"], residual_tol=1e-4)
    slope = torch.func.grad(lambda p: f(torch.zeros(3, dtype=torch.float64), p).sum())(P / 4)
    torch.testing.assert_close(slope, 1 / (1 - (P / 4) ** 2), rtol=1e-4, atol=0)
    # Constants have no node in the graph, and neither have these lengths.
    found = hodiff.hvp(lambda x: hodiff.functions.checkpoint(lambda x, c: (c * x**2).sum(), x, P / 2), P, P)
    torch.testing.assert_close(found, P * P)


def test_anderson_takes_fewer_steps_than_picard():
    counts = {}
    for name, solver in (("picard", picard()), ("anderson", anderson())):
        calls = []

        def step(x, p, calls=calls):
            calls.append(1)
            return torch.cos(x) * p + 0.1 * x.flip(0)

        found = fixed_point(step, solver)(torch.zeros_like(P), P / 4)
        torch.testing.assert_close(found, step(found, P / 4))
        counts[name] = len(calls)
    assert counts["anderson"] < counts["picard"] / 2


def test_newton_backtracks_where_the_full_step_diverges():
    found = newton()(lambda x: torch.atan(x), torch.tensor([10.0], dtype=torch.float64))
    assert found.abs() < 1e-9


def test_optimizers_leave_grad_of_captured_parameters_unchanged():
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    torch_optimizer(torch.optim.SGD, steps=3, lr=0.1)(lambda x: ((x - w) ** 2).sum(), torch.zeros_like(P))
    assert w.grad is None


def test_progress_writes_to_stderr(capsys):
    torch_optimizer(torch.optim.SGD, steps=2, lr=0.1, progress=True)(lambda x: (x**2).sum(), P)
    assert "torch_optimizer" in capsys.readouterr().err
    torch_optimizer(torch.optim.SGD, steps=2, lr=0.1)(lambda x: (x**2).sum(), P)
    assert not capsys.readouterr().err


def test_zeros_of_proximal_solutions_are_exact():
    f = proximal_argmin(
        lambda x, b: ((x - b) ** 2).sum() / 2 + x[0] * x[1] / 10,
        lambda x, t, b: hodiff.functions.soft_threshold(x, t),
        step_size=0.3,
    )
    found = f(torch.zeros(3, dtype=torch.float64), torch.tensor([0.3, 2.0, -3.0], dtype=torch.float64))
    assert found[0] == 0
    assert found[1] != 0


@pytest.mark.parametrize("method", ["cg", "minres", "gmres", "lsmr", "dense"])
def test_linear_solve_accepts_pytrees_and_float32(method):
    matrix = torch.tensor([[4.0, 1.0, 0.0], [1.0, 3.0, 1.0], [0.0, 1.0, 5.0]])

    def matvec(x, matrix):
        product = matrix @ torch.cat([x["a"], x["b"][None]])
        return {"a": product[:2], "b": product[2]}

    def solve(matrix, b):
        x = linear_solve(matvec, {"a": b[:2], "b": b[2]}, matrix, method=method, symmetric=True)
        return torch.cat([x["a"], x["b"][None]])

    b = torch.tensor([1.0, 2.0, 3.0])
    inverse = torch.linalg.inv(matrix)
    torch.testing.assert_close(solve(matrix, b), inverse @ b, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.func.jacrev(solve, 1)(matrix, b), inverse, rtol=1e-4, atol=1e-5)
    assert not solve(matrix, torch.zeros(3)).any()


@pytest.mark.parametrize("method", ["dense", "cg", "minres", "gmres", "lsmr", "neumann", "sparse"])
def test_systems_with_empty_leaves_are_accepted(method):
    f = root(
        lambda x, p: {"a": (x["a"] ** 2 - p) / 2, "b": x["b"]},
        lambda _, x, p: {"a": p.sqrt(), "b": x["b"]},
        linear_solver=method,
    )
    for p in (P[:2] / 2, P[:0]):
        x0 = {"a": torch.ones_like(p), "b": P[:0]}
        for jacobian in (torch.func.jacrev, torch.func.jacfwd):
            found = jacobian(lambda p, x0=x0: f(x0, p)["a"])(p)
            torch.testing.assert_close(found, torch.diag(0.5 / p.sqrt()))


def test_user_linear_solver_receives_transposes_and_columns():
    matrix = torch.tensor([[4.0, 1.0], [0.0, 3.0]], dtype=torch.float64)
    seen = []

    def exact(matvec, rhs):
        seen.append(matvec(torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist())
        columns = [matvec(each) for each in torch.eye(2, dtype=torch.float64)]
        return torch.linalg.solve(torch.stack(columns, 1), rhs)

    b = torch.tensor([1.0, 2.0], dtype=torch.float64)
    solve = lambda b: linear_solve(lambda x: matrix @ x, b, method=exact)  # noqa: E731
    torch.testing.assert_close(torch.func.jacrev(solve)(b), torch.linalg.inv(matrix))
    assert seen == [[1.0, 3.0], [0.0, 3.0], [0.0, 3.0]]


def columns_by_autograd(matvec):
    def matrix(x):
        x = x.clone().requires_grad_()
        with torch.enable_grad():
            y = matvec(x)
        return torch.stack([torch.autograd.grad(each, x, retain_graph=True)[0] for each in y])

    return matrix


@pytest.mark.parametrize("jacobian", [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian, columns_by_autograd])
def test_user_linear_solver_may_differentiate_the_product(jacobian):
    matrix = torch.tensor([[4.0, 1.0], [-2.0, 3.0]], dtype=torch.float64)

    def dense(matvec, rhs):
        if jacobian is torch.func.hessian:
            # The normal equations: the Hessian of |M x|^2 / 2 is M' M.
            squares = jacobian(lambda x: matvec(x).square().sum() / 2)(torch.zeros_like(rhs))
            return torch.linalg.solve(squares, torch.func.vjp(matvec, rhs)[1](rhs)[0])
        return torch.linalg.solve(jacobian(matvec)(torch.zeros_like(rhs)), rhs)

    b = torch.tensor([1.0, 2.0], dtype=torch.float64)
    solve = lambda b: linear_solve(lambda x: matrix @ x, b, method=dense)  # noqa: E731
    torch.testing.assert_close(solve(b), torch.linalg.solve(matrix, b))
    torch.testing.assert_close(torch.func.jacrev(solve)(b), torch.linalg.inv(matrix))


def test_many_unknowns_use_a_krylov_method():
    n = 3000
    diagonal = torch.linspace(1, 3, n, dtype=torch.float64)

    def solve(d):
        return linear_solve(lambda x, d: d * x + 0.1 * x.roll(1), torch.ones_like(d), d)

    found, pullback = torch.func.vjp(solve, diagonal)
    torch.testing.assert_close(diagonal * found + 0.1 * found.roll(1), torch.ones_like(found))
    cotangent = torch.ones_like(found)
    adjoint = pullback(cotangent)[0] / -found
    torch.testing.assert_close(diagonal * adjoint + 0.1 * adjoint.roll(-1), cotangent)


def test_products_that_vmap_rejects_are_computed_by_columns():
    def matvec(x):
        return 2 * x if x.sum().item() >= 0 else x * 2

    found = linear_solve(matvec, P, method="dense", symmetric=True)
    torch.testing.assert_close(found, P / 2)


def test_autograd_around_vmap_with_a_shared_parameter_matches():
    f = root(lambda x, scale, p: scale * x * x - p, newton())
    inputs = [torch.tensor(2.0, dtype=torch.float64).requires_grad_(), P.clone().requires_grad_()]

    def second_derivatives(function):
        total = torch.func.vmap(function, in_dims=(None, 0))(*inputs).sin().sum()
        gradients = torch.autograd.grad(total, inputs, create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in gradients), inputs)

    ours = second_derivatives(lambda scale, p: f(torch.ones_like(p), scale, p))
    theirs = second_derivatives(lambda scale, p: (p / scale).sqrt())
    torch.testing.assert_close(ours, theirs)


def test_gradients_of_constant_data_are_not_computed():
    seen = []

    Data = custom("Data", lambda x: x.clone(), lambda ctx, cotangent: (seen.append(cotangent), cotangent)[1])

    f = root(lambda x, p, data: x * x - p * Data.apply(data), newton())
    p = P.clone().requires_grad_()
    f(torch.ones_like(P), p, P).sum().backward()
    assert not seen
    torch.testing.assert_close(p.grad, torch.full_like(P, 0.5))


def test_backward_and_jvp_rules_are_linear():
    from hodiff.implicit.diagnostics import Reporter
    from hodiff.implicit.implicit_function import Equation, attach
    from hodiff.implicit.linear_maps import jacobian_of
    from hodiff.implicit.linear_systems import LinearOptions

    def residual(x, p):
        return x**3 - p

    options = LinearOptions("dense", True, None, None, Reporter("test", True, True))
    equation = Equation(residual, jacobian_of(residual, True), lambda x, params: (x, *params), options)
    attach.check_rule(equation, P ** (1 / 3), (P,))


Cube = old_style("Cube", lambda x: (x**3, x), cubed_slope)


class CubeByKept(Cube):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(3 * x**2)
        return x**3

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


class CubeByDetached(Cube):
    @staticmethod
    def backward(ctx, g):
        return 3 * g * ctx.saved_tensors[0].detach() ** 2


def test_legacy_functions_without_setup_context_match():
    minimum = argmin(lambda x, p: (Cube.apply(x) / 3 + x**2 / 2 - p * x).sum(), stationary(newton()))
    p = P.clone().requires_grad_()
    x = minimum(torch.ones_like(P), p)
    (slope,) = torch.autograd.grad(x.sum(), p, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), p)
    # The closed form solves x^2 + x = p.
    torch.testing.assert_close(x, ((1 + 4 * P).sqrt() - 1) / 2)
    torch.testing.assert_close(slope, (1 + 4 * P) ** -0.5)
    torch.testing.assert_close(second, -2 * (1 + 4 * P) ** -1.5)


@pytest.mark.parametrize("function", [CubeByKept, CubeByDetached])
def test_detached_slopes_are_rejected(function):
    solution = root(lambda x, p: function.apply(x) + x - p, newton())
    p = P.clone().requires_grad_()
    with pytest.raises(hodiff.RouteError, match=rf"{function.__name__}\.backward"):
        hodiff.hessian_matrix(lambda p: solution(torch.ones_like(P), p).sum(), P)
    (slope,) = torch.autograd.grad(solution(torch.ones_like(P), p).sum(), p)
    torch.testing.assert_close(slope, 1 / (1 + 3 * solution(torch.ones_like(P), P) ** 2))


def test_second_derivatives_of_a_linear_system_are_zero():
    solution = root(lambda x, p: 2 * x - p, newton())
    p = P.clone().requires_grad_()
    (slope,) = torch.autograd.grad(solution(torch.ones_like(P), p).sum(), p, create_graph=True)
    assert not torch.autograd.grad(slope.sum(), p)[0].any()


def test_constrained_minimisers_inside_of_taylor_mode():
    solution = hodiff.implicit.equality_argmin(
        lambda x, q: ((x - q) ** 4).sum() + (x * x).sum(), lambda x, q: x.sum() - q[0]
    )
    f = lambda q: (solution(torch.ones(3, dtype=q.dtype), q)[0] ** 2).sum()  # noqa: E731
    q = torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64)
    torch.testing.assert_close(hodiff.laplacian(f)(q), torch.func.hessian(f)(q).trace())
