"""Problems with closed-form solutions, for all tests of implicit differentiation."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hodiff.functions import project_simplex, soft_threshold
from hodiff.implicit import (
    anderson,
    argmin,
    equality_argmin,
    fixed_point,
    linear_solve,
    newton,
    picard,
    project_box_plane,
    projected_argmin,
    proximal_argmin,
    root,
    scipy_minimize,
    scipy_root,
    stationary,
    torch_optimizer,
)


def draw(*shapes, shift=0.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.rand(shape, generator=generator, dtype=torch.float64) + shift for shape in shapes)


def like(n, p):
    return torch.zeros(n, dtype=p.dtype)


# Data for small regressions.
X, Y = draw((5, 3), (5,))
EYE = torch.eye(3, dtype=torch.float64)


def square_root(solver):
    f = root(lambda x, p: x * x - p, solver)
    return lambda p: f(torch.ones_like(p), p)


def unsymmetric(**options):
    """Solve A eˣ = b, whose Jacobian is not symmetric."""
    f = root(lambda x, p: p["A"] @ x.exp() - p["b"], newton(), **options)
    return lambda A, b: f(torch.zeros_like(b), {"A": A + 2 * EYE, "b": b, "a constant": 3})


def unsymmetric_truth(A, b):
    return (torch.linalg.inv(A + 2 * EYE) @ b).log()


def ridge(solver, **options):
    f = argmin(lambda w, p: ((X @ w - Y) ** 2).sum() / 2 + (p * w * w).sum() / 2, solver, **options)
    return lambda p: f(like(3, p), p)


def ridge_truth(p):
    return torch.linalg.inv(X.T @ X + torch.diag(p)) @ (X.T @ Y)


def affine(solver, **options):
    f = fixed_point(lambda x, S, b: S @ x + b, solver, **options)
    return lambda S, b: f(torch.zeros_like(b), S / 6, b)


def affine_truth(S, b):
    return torch.linalg.inv(EYE - S / 6) @ b


def in_trees(p, q):
    def residual(x, p, q):
        return {"u": x["u"] ** 3 - p, "v": (x["v"][0] - x["u"] * q,)}

    x = root(residual, newton())({"u": torch.ones_like(p), "v": (torch.ones_like(p),)}, p, q)
    return torch.stack([x["u"], x["v"][0]])


def in_trees_truth(p, q):
    return torch.stack([p ** (1 / 3), p ** (1 / 3) * q])


def system(method, symmetric=False):
    def solve(A, b):
        A = A + A.T + 4 * EYE if symmetric else A + 4 * EYE
        # The Neumann series converges if I - A is a contraction.
        scale = 6.0 if method == "neumann" else 1.0
        return linear_solve(lambda x, A: A @ x / scale, b, A, method=method, symmetric=symmetric)

    return solve


def system_truth(A, b, symmetric=False, scale=1.0):
    return scale * torch.linalg.inv((A + A.T if symmetric else A) + 4 * EYE) @ b


def quadratic_program(q, s):
    """Solve min ½ xᵀ diag(q) x - Σ x subject to Σ x = s."""
    f = equality_argmin(lambda x, q, s: (q * x * x).sum() / 2 - x.sum(), lambda x, q, s: x.sum() - s)
    x, y = f(like(3, q), q, s)
    return torch.cat([x, y[None]])


def quadratic_program_truth(q, s):
    y = 1 - s / (1 / q).sum()
    return torch.cat([(1 - y) / q, y[None]])


LASSO_AT = torch.tensor([0.3], dtype=torch.float64)


def lasso(lam, y):
    f = proximal_argmin(
        lambda w, lam, y: ((X @ w - y) ** 2).sum() / 2,
        lambda w, t, lam, y: soft_threshold(w, t * lam),
        step_size=0.2,
    )
    return f(like(3, y), lam, y)


def lasso_truth(lam, y):
    """Solve the normal equations on the support, for known signs."""
    signs = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    on = signs.nonzero()[:, 0]
    Z = X[:, on]
    return like(3, y).index_put((on,), torch.linalg.inv(Z.T @ Z) @ (Z.T @ y - lam * signs[on]))


POINTS = torch.tensor([[1.0, 2.0], [0.2, 0.1], [-1.0, -1.0], [0.3, 0.6]], dtype=torch.float64)
LABELS = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)


def kernel(width):
    distances = (POINTS[:, None] - POINTS).square().sum(-1)
    return LABELS[:, None] * LABELS * torch.exp(-width * distances)


def support_vectors(width, bound):
    """Solve the dual of a support vector machine without a bias."""
    f = projected_argmin(
        lambda a, width, bound: a @ kernel(width) @ a / 2 - a.sum(),
        lambda a, width, bound: torch.minimum(a.clamp(min=0.0), bound),
        step_size=0.4,
    )
    return f(like(4, width), width, bound)


def support_vectors_truth(width, bound):
    """Solve for free variables 0 and 2, with the other two at the bound."""
    Q = kernel(width)
    free, high = torch.tensor([0, 2]), torch.tensor([1, 3])
    a = like(4, width).index_put((high,), bound.expand(2))
    return a.index_put((free,), torch.linalg.inv(Q[free][:, free]) @ (1 - Q[free] @ a))


def support_vectors_with_bias(width, bound):
    """Solve the dual of a support vector machine with a bias."""
    f = projected_argmin(
        lambda a, width, bound: a @ kernel(width) @ a / 2 - a.sum(),
        lambda a, width, bound: project_box_plane(a, LABELS, 0.0, 0.0, bound),
        step_size=0.4,
    )
    return f(like(4, width), width, bound)


def support_vectors_with_bias_truth(width, bound):
    """Solve for the bias and free variables 0 and 2, with the other two at the bound."""
    Q = kernel(width)
    free, high = torch.tensor([0, 2]), torch.tensor([1, 3])
    a = like(4, width).index_put((high,), bound.expand(2))
    y = LABELS[free]
    system = torch.cat([torch.cat([Q[free][:, free], y[:, None]], 1), torch.cat([y, like(1, width)])[None]])
    rhs = torch.cat([1 - Q[free] @ a, -(LABELS @ a)[None]])
    return a.index_put((free,), (torch.linalg.inv(system) @ rhs)[:2])


def on_simplex(b, r):
    """Solve min ½ ‖x - b‖² over the simplex of sum r."""
    f = projected_argmin(
        lambda x, b, r: ((x - b) ** 2).sum() / 2, lambda x, b, r: project_simplex(x, r), picard(), step_size=0.5
    )
    return f(like(3, b), b, r)


def on_simplex_truth(b, r):
    """Project with the two largest entries as support."""
    top = b.argsort(descending=True)[:2]
    return like(3, b).index_put((top,), b[top] + (r - b[top].sum()) / 2)


def in_box(b, high):
    f = projected_argmin(
        lambda x, b, high: (x @ (EYE + 0.1) @ x) / 2 - b @ x,
        lambda x, b, high: torch.minimum(x.clamp(min=0.0), high),
        step_size=0.5,
    )
    return f(like(3, b), b, high)


def in_box_truth(b, high):
    """Solve for the first two variables, with the last at its upper bound."""
    Q = (EYE + 0.1)[:2, :2]
    free = torch.linalg.inv(Q) @ (b[:2] - 0.1 * high[2])
    return torch.cat([free, high[2:]])


@dataclass(frozen=True)
class Problem:
    """An implicit function and its closed form."""

    name: str
    function: Callable
    truth: Callable
    inputs: tuple[Tensor, ...]


A, B = draw((3, 3), (3,))
P = draw(3, shift=0.5)
# The solution A⁻¹ b of the equation is positive, so it has a logarithm.
RHS = (A + 2 * EYE) @ draw(3, shift=0.5)[0]

SVM_AT = (torch.tensor(0.4, dtype=torch.float64), torch.tensor(1.5, dtype=torch.float64))

PROBLEMS = [
    Problem("sqrt by newton", square_root(newton()), torch.sqrt, P),
    Problem("sqrt of a number", square_root(newton()), torch.sqrt, (torch.tensor(2.0, dtype=torch.float64),)),
    Problem("sqrt by scipy", square_root(scipy_root(tol=1e-14)), torch.sqrt, P),
    Problem("unsymmetric", unsymmetric(), unsymmetric_truth, (A, RHS)),
    Problem("unsymmetric by gmres", unsymmetric(linear_solver="gmres"), unsymmetric_truth, (A, RHS)),
    Problem("unsymmetric, sparse", unsymmetric(linear_solver="sparse"), unsymmetric_truth, (A, RHS)),
    Problem("ridge by scipy", ridge(scipy_minimize()), ridge_truth, P),
    Problem("ridge by newton and cg", ridge(stationary(newton()), linear_solver="cg"), ridge_truth, P),
    Problem(
        "ridge by newton, sparse",
        ridge(stationary(newton(linear_solver="sparse")), linear_solver="sparse"),
        ridge_truth,
        P,
    ),
    Problem("ridge by sgd", ridge(torch_optimizer(torch.optim.SGD, lr=0.2, tol=1e-12)), ridge_truth, P),
    Problem("affine by picard", affine(picard()), affine_truth, (A, B)),
    Problem("affine by anderson", affine(anderson(), linear_solver="neumann"), affine_truth, (A, B)),
    Problem("trees", in_trees, in_trees_truth, (*P, draw(())[0])),
    *(Problem(f"system by {m}", system(m), system_truth, (A, B)) for m in ("auto", "dense", "sparse", "gmres", "lsmr")),
    Problem("system by neumann", system("neumann"), lambda A, b: system_truth(A, b, scale=6.0), (A, B)),
    *(
        Problem(f"system by {m}", system(m, True), lambda A, b: system_truth(A, b, True), (A, B))
        for m in ("cg", "minres")
    ),
    Problem("equality", quadratic_program, quadratic_program_truth, (*P, draw(())[0])),
    Problem("lasso", lasso, lasso_truth, (LASSO_AT, Y)),
    Problem(
        "simplex", on_simplex, on_simplex_truth, (draw(3)[0] + torch.tensor([0.0, 0.0, -2.0]), draw(1, shift=1)[0])
    ),
    Problem("svm", support_vectors, support_vectors_truth, SVM_AT),
    Problem("svm with bias", support_vectors_with_bias, support_vectors_with_bias_truth, SVM_AT),
    Problem("box", in_box, in_box_truth, (torch.tensor([0.5, 0.7, 3.0], dtype=torch.float64), draw(3, shift=1)[0])),
]
