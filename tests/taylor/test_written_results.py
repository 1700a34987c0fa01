"""Taylor mode follows torch in keywords, fills, and in what shares memory with what, at special points too."""

import pytest
import torch
import torch.nn.functional as F

import hodiff

D = torch.float64
WEIGHTS = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=D)
INDEX = torch.tensor([[0, 1]])
# At the first point, a write that is lost leaves the value as it is.
POINTS = [torch.ones(2, dtype=D), torch.tensor([0.5, -2.0], dtype=D), torch.tensor([0.5, -0.7], dtype=D)]


def matrix(x):
    return torch.outer(x, x) + torch.eye(2, dtype=D)


def filled(x):
    z = torch.zeros(2, 3, dtype=D)
    z.index_fill_(0, torch.tensor([0]), x[0] * x[1])
    z[:, 1:].index_fill_(1, torch.tensor([1]), x[0])
    return (torch.linspace(0.5, 2, 6, dtype=D).view(2, 3) * z**3).sum()


def scattered(x):
    y = WEIGHTS * x
    y.scatter_(1, INDEX, value=3.0)
    return y.pow(3).sum()


def written(result, make=lambda x: x * 1):
    """Return a function that writes to the result of another function, and sums cubes of its argument and result."""

    def f(x):
        y = make(x)
        z = result(y)
        z.mul_(x[0])
        return (y**3).sum() + (z**2).sum()

    return f


def first(x):
    return x[0] * 1


CASES = {
    "index_fill_": filled,
    "scatter by keyword": lambda x: (WEIGHTS * x).scatter(1, INDEX, value=3.0).pow(3).sum(),
    "torch.scatter by keyword": lambda x: torch.scatter(WEIGHTS * x, 1, INDEX, value=3.0).pow(3).sum(),
    "scatter_ by keyword": scattered,
    "real": written(lambda y: y.real),
    "as_strided": written(lambda y: y.as_strided((2,), (1,))),
    "alpha_dropout in evaluation": written(lambda y: F.alpha_dropout(y, 0.5, False)),
    "first power of a matrix": written(lambda A: torch.linalg.matrix_power(A, 1), matrix),
    "sort of a number": written(lambda y: y.sort().values, first),
    "topk of a number": written(lambda y: y.topk(1).values, first),
    "kthvalue of a number": written(lambda y: y.kthvalue(1).values, first),
    "cummax of a number": written(lambda y: y.cummax(0).values, first),
    "mode of a number": written(lambda y: y.mode().values, first),
    "sum of a number": lambda x: x[0].sum(0) ** 2 + x[1].mean(-1) ** 3,
    "sums over no named dimension": lambda x: matrix(x).sum(dim=[], keepdim=True).square().sum(),
    "addmm by keyword": lambda x: torch.addmm(matrix(x), mat1=matrix(x), mat2=matrix(x)).pow(2).sum(),
    "addmv by keyword": lambda x: torch.addmv(x, mat=matrix(x), vec=x).pow(2).sum(),
    "addr by keyword": lambda x: torch.addr(matrix(x), vec1=x, vec2=x).pow(2).sum(),
    "addcmul by keyword": lambda x: torch.addcmul(x, tensor1=x, tensor2=x, value=2).pow(2).sum(),
    "addcdiv by keyword": lambda x: torch.addcdiv(x, tensor1=x, tensor2=x.exp()).pow(2).sum(),
    "lerp by keyword": lambda x: torch.lerp(x, end=x.exp(), weight=0.3).pow(2).sum(),
    "vecdot by keyword": lambda x: torch.linalg.vecdot(x=matrix(x), y=matrix(x)).pow(2).sum(),
    "matmul by keyword": lambda x: torch.matmul(input=matrix(x), other=matrix(x)).pow(2).sum(),
    "mm by keyword": lambda x: torch.mm(input=matrix(x), mat2=matrix(x)).pow(2).sum(),
    "baddbmm by keyword": lambda x: (
        torch.baddbmm(matrix(x)[None], batch1=matrix(x)[None], batch2=matrix(x)[None]).pow(2).sum()
    ),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", CASES)
def test_laplacian_matches_the_hessian(name):
    f = CASES[name]
    for x in POINTS:
        trace = torch.stack([hodiff.hvp(f, x, v) @ v for v in torch.eye(2, dtype=D)]).sum()
        torch.testing.assert_close(hodiff.laplacian(f)(x), trace, rtol=1e-11, atol=1e-11)
        mixed = hodiff.hvp(f, x, torch.tensor([0.0, 1.0], dtype=D))[0]
        torch.testing.assert_close(hodiff.partial(f, (0, 1))(x), mixed, rtol=1e-11, atol=1e-11)


def test_parts_of_complex_views_are_not_written():
    def f(x):
        y = x * 1
        torch.view_as_complex(y).real.mul_(x[0])
        return (y**3).sum()

    with pytest.raises(hodiff.InputError, match="writing to a conjugate, or to a part of complex numbers"):
        hodiff.laplacian(f)(POINTS[1])
