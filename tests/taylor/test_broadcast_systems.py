"""Linear systems and products of matrices whose batches broadcast, on either side."""

import pytest
import torch
from mpmath_series import D
from taylor.second_order import assert_second_order
from torch.nn import functional as F

import hodiff

pytestmark = pytest.mark.filterwarnings(
    "ignore:There is a performance drop", "ignore:torch.(triangular_solve|lu_solve)"
)
POINT = torch.tensor([0.7, -1.3, 0.4], dtype=D)
# Shapes of batches; matrices have as many rows as there are coordinates, or others.
BATCHES = [(), (1,), (3,), (2, 1)]


def constants(*shape, seed=0):
    return torch.rand(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def mixed(x, *shape):
    return torch.sin(constants(torch.Size(shape).numel(), len(x), seed=4) @ x + 0.3).reshape(shape)


def regular(x, batch, rows):
    return 2 * torch.eye(rows, dtype=D) + 0.5 * mixed(x, *batch, rows, rows)


def definite(x, batch, rows):
    root = regular(x, batch, rows)
    return root @ root.mT


def factor(x, batch, rows):
    return torch.linalg.cholesky(definite(x, batch, rows))


def tall(x, batch, rows):
    return torch.cat([regular(x, batch, rows), mixed(x, *batch, rows, rows).exp()], -2)


LINALG = torch.linalg


def lstsq(a, b, output=0):
    """Least squares, whose right-hand sides are vectors only where these do not broadcast."""
    if b.ndim == a.ndim - 1 and b.shape != a.shape[:-1]:
        raise IndexError("torch makes a batch of these")
    return LINALG.lstsq(a, b, driver="gelsd" if output else None)[output]


# Functions of a matrix and of the right-hand side, and the matrix.
SYSTEMS = {
    "solve": (LINALG.solve, regular),
    "solve_ex": (lambda a, b: LINALG.solve_ex(a, b)[0], regular),
    "solve_ex with info": (lambda a, b: LINALG.solve_ex(a, b, check_errors=True).result, regular),
    "solve with options": (lambda a, b: LINALG.solve(A=a, B=b, left=True), regular),
    "solve from the right": (lambda a, b: LINALG.solve(a, b.mT, left=False), regular),
    "inv": (lambda a, b: LINALG.inv(a) @ b, regular),
    "inverse": (lambda a, b: torch.inverse(a) @ b, regular),
    "inv_ex": (lambda a, b: LINALG.inv_ex(a)[0] @ b, regular),
    "pinv": (lambda a, b: LINALG.pinv(a) @ b, regular),
    "lu_solve": (lambda a, b: LINALG.lu_solve(*LINALG.lu_factor(a), b), regular),
    "lu_solve of adjoint": (lambda a, b: LINALG.lu_solve(*LINALG.lu_factor(a), b, adjoint=True), regular),
    "lu_solve from the right": (lambda a, b: LINALG.lu_solve(*LINALG.lu_factor(a), b.mT, left=False), regular),
    "lu_solve from the right of adjoint": (
        lambda a, b: LINALG.lu_solve(*LINALG.lu_factor(a), b.mT, left=False, adjoint=True),
        regular,
    ),
    "lu_solve of lu_factor_ex": (lambda a, b: LINALG.lu_solve(*LINALG.lu_factor_ex(a)[:2], b), regular),
    "torch.lu_solve": (lambda a, b: torch.lu_solve(b, *LINALG.lu_factor(a)), regular),
    "lu_solve by method": (lambda a, b: b.lu_solve(*LINALG.lu_factor(a)), regular),
    "lu_unpack": (lambda a, b: torch.lu_unpack(*LINALG.lu_factor(a))[2] @ b, regular),
    "lu": (lambda a, b: LINALG.solve(LINALG.lu(a)[1], b), regular),
    "qr": (lambda a, b: LINALG.qr(a)[1] @ b, regular),
    "cholesky": (lambda a, b: LINALG.cholesky(a) @ b, definite),
    "cholesky_solve by method": (lambda a, b: b.cholesky_solve(a), factor),
    "cholesky_solve with a right-hand side": (lambda a, b: torch.cholesky_solve(b, a), factor),
    "cholesky_solve of upper": (lambda a, b: torch.cholesky_solve(b, a.mT, upper=True), factor),
    "cholesky_inverse": (lambda a, b: torch.cholesky_inverse(a) @ b, factor),
    "solve_triangular": (lambda a, b: LINALG.solve_triangular(a, b, upper=True), regular),
    "solve_triangular of lower": (lambda a, b: LINALG.solve_triangular(a, b, upper=False), regular),
    "solve_triangular of ones": (
        lambda a, b: LINALG.solve_triangular(a, b, upper=True, unitriangular=True),
        regular,
    ),
    "solve_triangular from the right": (
        lambda a, b: LINALG.solve_triangular(a, b.mT, upper=True, left=False),
        regular,
    ),
    "triangular_solve": (lambda a, b: torch.triangular_solve(b, a)[0], regular),
    "triangular_solve of transpose": (lambda a, b: torch.triangular_solve(b, a, transpose=True)[0], regular),
    "lstsq": (lstsq, regular),
    "lstsq of more rows": (lambda a, b: lstsq(torch.cat([a, a.exp()], -2), torch.cat([b, b], -2)), regular),
    "residuals of lstsq": (lambda a, b: lstsq(a, torch.cat([b, b], -2), 1), tall),
    "singular values of lstsq": (lambda a, b: lstsq(a, torch.cat([b, b], -2), 3), tall),
    "matrix_exp": (lambda a, b: LINALG.matrix_exp(a) @ b, regular),
    "matrix_power": (lambda a, b: LINALG.matrix_power(a, -2) @ b, regular),
    "determinants": (lambda a, b: LINALG.det(a)[..., None, None] * b, regular),
    "slogdet": (lambda a, b: LINALG.slogdet(a)[1][..., None, None] * b, regular),
    "eigh": (lambda a, b: LINALG.eigh(a)[0][..., None] * b, definite),
}
# Products and functions of two tensors that broadcast.
PAIRS = {
    "matmul": torch.matmul,
    "matmul of transposes": lambda a, b: (b.mT @ a.mT).mT,
    "einsum": lambda a, b: torch.einsum("...ij,...jk->...ki", a, b),
    "einsum of three": lambda a, b: torch.einsum("...ij,...jk,...jk->...ki", a, b, b),
    "vecdot": lambda a, b: LINALG.vecdot(a, b[..., :1].mT),
    "kron": torch.kron,
    "inner": lambda a, b: torch.inner(a, b.mT),
    "tensordot": lambda a, b: torch.tensordot(a, b, ([-1], [-2])),
    "cross": lambda a, b: LINALG.cross(torch.cat([a, a], -1)[..., :3], torch.cat([b.mT, b.mT], -1)[..., :3]),
    "addmm": lambda a, b: torch.addmm(b, a, a),
    "addmv": lambda a, b: torch.addmv(b.exp(), a, b),
    "addr": lambda a, b: torch.addr(a, b, b.exp()),
    "baddbmm": lambda a, b: torch.baddbmm(b, a, a),
    "addbmm": lambda a, b: torch.addbmm(b, a, a),
    "linear": lambda a, b: F.linear(b.mT, a, a.sum(-1)),
    "cosine_similarity": lambda a, b: F.cosine_similarity(a, b, dim=-1),
    "cosine_similarity of columns": lambda a, b: F.cosine_similarity(a, b[..., :1], dim=-2),
    "pairwise_distance": lambda a, b: F.pairwise_distance(a, b[..., :1].mT),
    "cdist": lambda a, b: torch.cdist(a, b.mT),
    "dist": torch.dist,
    "attention": lambda a, b: F.scaled_dot_product_attention(a, b.mT, b.mT),
    "attention with a bias": lambda a, b: F.scaled_dot_product_attention(a, a, a, attn_mask=b),
    "layer_norm": lambda a, b: F.layer_norm(a, a.shape[-1:], b, b),
    "batch_norm": lambda a, b: F.batch_norm(a, None, None, b, b, training=True),
    "where": lambda a, b: torch.where(a > 0.5 * b, a.exp(), b),
    "maximum": torch.maximum,
    "clamp": lambda a, b: torch.clamp(a, b - 0.5, b),
    "lerp": lambda a, b: torch.lerp(a, b, b),
    "addcmul": lambda a, b: torch.addcmul(b, a, b, value=0.5),
    "addcdiv": lambda a, b: torch.addcdiv(b, a, b, value=0.5),
    "pow": lambda a, b: (2 + a) ** b,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "logaddexp": torch.logaddexp,
    "xlogy": torch.xlogy,
    "fmod": lambda a, b: torch.fmod(7 * a, b),
    "remainder": lambda a, b: torch.remainder(7 * a, b),
    "copysign": torch.copysign,
    "ldexp": lambda a, b: torch.ldexp(a, 1 + b),
    "float_power": lambda a, b: torch.float_power(2 + a, b),
    "true_divide": torch.true_divide,
    "rsub": lambda a, b: torch.rsub(a, b, alpha=2),
    "complex": lambda a, b: torch.complex(*torch.broadcast_tensors(a, b)).abs(),
    "prelu": lambda a, b: F.prelu(a - 1, b.flatten()[:1]),
    "mse_loss": lambda a, b: F.mse_loss(*torch.broadcast_tensors(a, b), reduction="none"),
    "smooth_l1_loss": lambda a, b: F.smooth_l1_loss(*torch.broadcast_tensors(a, b), reduction="none"),
    "poisson_nll_loss": lambda a, b: F.poisson_nll_loss(a, b, reduction="none"),
    "gaussian_nll_loss": lambda a, b: F.gaussian_nll_loss(a, a.exp(), b[..., :1].exp(), reduction="none"),
    "kl_div": lambda a, b: F.kl_div(a, b, reduction="none"),
    "bce": lambda a, b: F.binary_cross_entropy_with_logits(a, torch.sigmoid(a), pos_weight=b, reduction="none"),
    "stack": lambda a, b: torch.stack(torch.broadcast_tensors(a, b), 1),
    "outer difference": lambda a, b: a[..., None, :] - b.mT[..., None, :, :],
    "index": lambda a, b: (a * b)[..., torch.tensor([0, 1]), torch.tensor([1, 0])],
}
SYSTEMS |= {name: (function, regular) for name, function in PAIRS.items()}
# Which arguments move, by their coefficients.
MOVING = [(1, 1), (1, 0), (0, 1)]


def shapes_of(rows):
    """Batches of the matrix, and shapes of right-hand sides that are vectors, matrices or batches of them."""
    for k, batch in enumerate(BATCHES):
        yield batch, (rows,)
        yield batch, (*batch, rows)
        for j, other in enumerate(BATCHES):
            yield batch, (*other, rows, 1 + (j + k) % 3)


def results(name, rows, x):
    """Yield results for all shapes that torch supports and differentiates."""
    function, matrix = SYSTEMS[name]
    for k, (batch, right) in enumerate(shapes_of(rows)):
        first, second = MOVING[k % 3]

        def f(x, batch=batch, right=right, first=first, second=second):
            own = (lambda moves: x if moves else x.detach()) if isinstance(x, torch.Tensor) else None
            return function(matrix(own(first), batch, rows), mixed(own(second), *right).exp())

        yield f


def supported(name, rows):
    for f in results(name, rows, None):
        x = POINT.clone().requires_grad_()
        try:
            with hodiff.corrected():
                f(x).sum().backward()
        except (RuntimeError, IndexError, ValueError):
            continue
        yield f


@pytest.mark.one_in(9)
@pytest.mark.parametrize(("rows", "count"), [(2, 2), (3, 2)])
@pytest.mark.parametrize("name", SYSTEMS)
def test_batches_that_broadcast_match(name, rows, count):
    # A rule confuses rows with coordinates only if they are equally many; otherwise fewer shapes are enough.
    found = list(supported(name, rows))[:: 1 if rows == count else 4]
    assert found

    def f(x):
        total = 0
        for k, each in enumerate(found):
            result = each(x).flatten()
            total = total + (1 + 0.1 * k) * (torch.sin(0.1 * result) @ (1 + constants(len(result), seed=k)))
        return total

    assert_second_order(f, POINT[:count])


@pytest.mark.parametrize(("matrix", "right"), [((1, 2, 2), (2, 3)), ((2, 1, 2, 2), (1, 2, 1))])
def test_lstsq_refuses_shapes_that_torch_confuses(matrix, right):
    a = 2 * torch.eye(2, dtype=D).expand(matrix)

    def f(x):
        return torch.linalg.lstsq(a + x.sum(), mixed(x, *right))[0].sum()

    with pytest.raises(hodiff.InputError, match=r"linalg.lstsq: B: expected as many dimensions .* B.unsqueeze\(0\)"):
        hodiff.laplacian(f)(POINT)
