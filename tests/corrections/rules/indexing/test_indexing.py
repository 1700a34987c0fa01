"""Products by index and along a dimension with zero factors, reductions by segment, splits and strides."""

import itertools

import pytest
import torch
from corrections.against_torch import same_value
from corrections.contract import Contract
from drawing import normals

import hodiff
from hodiff.corrections import table

# torch warns once that index_reduce may change.
pytestmark = pytest.mark.filterwarnings("ignore:.*index_reduce.*:UserWarning")

D = torch.float64
GENERATOR = torch.Generator().manual_seed(0)

randn = normals(GENERATOR)


def with_zeros(*shape):
    """Random numbers with some zeros, two of them adjacent."""
    x = randn(*shape)
    flat = x.view(-1)
    flat[1::4] = 0
    flat[2] = 0
    return x


X, ROW = with_zeros(2, 4), with_zeros(5)
REPEATED = torch.tensor([0, 2, 0, 2])
LENGTHS = torch.tensor([2, 0, 3])
OFFSETS = torch.tensor([0, 2, 2, 5])


def scattered(reduce, include_self=True):
    index = torch.tensor([[0, 2, 0, 2], [1, 1, 1, 0]])
    return lambda x, src: torch.scatter_reduce(x, 1, index, src, reduce, include_self=include_self)


def indexed(reduce, include_self=True):
    return lambda x, src: torch.index_reduce(x, 1, REPEATED, src, reduce, include_self=include_self)


def segmented(reduce, **options):
    return lambda x: torch.segment_reduce(x, reduce, **options)


def changed_in_place(x, src):
    y = 2 * x
    y.scatter_reduce_(1, REPEATED.expand(2, 4), src, "prod")
    y.index_reduce_(1, REPEATED, src, "mean")
    return y.cumprod_(1)


BY_INDEX = list(itertools.product(("prod", "mean", "amax", "amin"), (True, False)))
BY_SEGMENT = list(itertools.product(("sum", "mean", "max", "min", "prod"), (None, 0.5)))
TARGET = randn(2, 3)
CASES = {
    "cumprod": (lambda x: x.cumprod(0), (ROW,)),
    "cumprod of rows": (lambda x: torch.cumprod(x, dim=-2), (X,)),
    "scatter_reduce prod": (scattered("prod"), (TARGET, X)),
    "scatter_reduce prod of a zero target": (scattered("prod"), (TARGET * torch.tensor([0.0, 1.0, 1.0]), X)),
    "scatter_reduce prod without self": (scattered("prod", False), (TARGET, X)),
    "scatter_reduce prod of fewer": (
        lambda x, src: x.scatter_reduce(0, torch.tensor([[0, 0], [0, 1]]), src, reduce="prod"),
        (randn(3, 3), with_zeros(2, 3)),
    ),
    "index_reduce prod": (indexed("prod"), (TARGET, X)),
    "index_reduce prod without self": (indexed("prod", False), (TARGET, X)),
    "index_reduce mean": (indexed("mean"), (TARGET, randn(2, 4))),
    "index_reduce amax": (indexed("amax"), (TARGET, randn(2, 4))),
    "index_reduce amin without self": (indexed("amin", False), (TARGET, randn(2, 4))),
    "in place": (changed_in_place, (TARGET, X)),
    "segment_reduce sum": (segmented("sum", lengths=LENGTHS), (ROW,)),
    "segment_reduce mean": (segmented("mean", offsets=OFFSETS, initial=1.5), (ROW,)),
    "segment_reduce prod": (segmented("prod", lengths=LENGTHS), (ROW,)),
    "segment_reduce prod of many": (
        segmented("prod", lengths=torch.tensor([[1, 3], [4, 0]]), axis=1, initial=2.0),
        (with_zeros(2, 4, 2),),
    ),
    "segment_reduce max": (segmented("max", lengths=torch.tensor([2, 3])), (randn(5),)),
    "segment_reduce min": (segmented("min", offsets=OFFSETS, initial=0.1), (randn(5),)),
    "tensor_split": (lambda x: torch.tensor_split(x, torch.tensor([1, 3]))[1] ** 3, (randn(5),)),
    "as_strided_scatter": (
        lambda x, src: torch.as_strided_scatter(x**3, src**3, (2, 2), (2, 1)),
        (randn(4), randn(2, 2)),
    ),
}
# Dynamo raises: it cannot read indices, has no kernel for segments in transformed functions, and fails on some
# views in a gradient of a tangent.
NOT_COMPILED = {
    "tensor_split",
    "index_reduce mean",
    "index_reduce amax",
    "as_strided_scatter",
    *(name for name in CASES if name.startswith("segment_reduce")),
}
# torch.func.vmap raises: it cannot write a batch into an unbatched tensor, and has no rule for strides.
NOT_BATCHED = {"in place", "as_strided_scatter"}


WRONG = (
    "cumprod",
    "scatter_reduce prod",
    "index_reduce prod",
    "segment_reduce mean",
    "tensor_split",
    "as_strided_scatter",
)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_hessian_of_a_product_with_a_zero_factor_matches_closed_form(route):
    """The mixed derivatives of x y z at (0, y, z) are z, y and 0."""
    x = torch.tensor([0.0, 2.0, 5.0], dtype=D)
    expected = torch.tensor([[0.0, 5.0, 2.0], [5.0, 0.0, 0.0], [2.0, 0.0, 0.0]], dtype=D)
    one, zeros = torch.ones(1, dtype=D), torch.zeros(3, dtype=torch.int64)
    for f in (
        lambda x: x.cumprod(0)[-1],
        lambda x: one.scatter_reduce(0, zeros, x, "prod")[0],
        lambda x: one.index_reduce(0, zeros, x, "prod", include_self=False)[0],
        lambda x: torch.segment_reduce(x, "prod", lengths=torch.tensor([3]))[0],
    ):
        torch.testing.assert_close(hodiff.hessian(f, route=route)(x), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [D, torch.float32, torch.bfloat16, torch.complex64, torch.int64])
@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_cumprod_values_match_torch(n, dtype):
    x = (2 * randn(3, n)).to(dtype)
    for dim in (0, 1, -1):
        same_value(lambda dim=dim: x.cumprod(dim))
    same_value(lambda: torch.cumprod(input=x, dim=1, out=torch.empty_like(x)))
    same_value(lambda: torch.cumprod(x.real.to(torch.int64), 1, dtype=D))
    same_value(lambda: x.clone().cumprod_(0))
    same_value(lambda: torch.tensor(2.0).cumprod(0))


@pytest.mark.parametrize(("reduce", "include_self"), BY_INDEX)
@pytest.mark.parametrize("dtype", [D, torch.bfloat16, torch.int64])
def test_index_and_scatter_reductions_match_torch(reduce, include_self, dtype):
    x, src = (3 * randn(4, 5)).to(dtype), (3 * randn(6, 7)).to(dtype)
    rows = torch.randint(0, 4, (5, 3), generator=GENERATOR)
    columns = torch.randint(0, 5, (3, 6), generator=GENERATOR)
    some = torch.tensor([0, 2, 2], dtype=torch.int32)
    options = {"include_self": include_self}
    same_value(lambda: x.scatter_reduce(0, rows, src, reduce, **options))
    same_value(lambda: torch.scatter_reduce(x, -1, columns, src, reduce=reduce, **options))
    same_value(lambda: x.clone().scatter_reduce_(1, columns, src, reduce, **options))
    same_value(lambda: torch.scatter_reduce(x[0, 0], 0, rows[0, 0] * 0, src[0, 0], reduce, **options))
    same_value(lambda: x.scatter_reduce(0, rows[:0], src, reduce, **options))
    same_value(lambda: torch.index_reduce(x, 0, some, src[:3, :5], reduce, **options))
    same_value(lambda: x.index_reduce(-1, some, src[:4, :3], reduce, **options))
    same_value(lambda: x.clone().index_reduce_(1, some, src[:4, :3], reduce, **options))
    same_value(lambda: x[0, 0].index_reduce(0, some[:1], src[0, 0], reduce, **options))


@pytest.mark.parametrize(("reduce", "initial"), BY_SEGMENT)
@pytest.mark.parametrize(
    "lengths", [torch.tensor([1, 0, 3]), torch.tensor([[1, 0, 5], [2, 2, 2], [0, 0, 6], [6, 0, 0]])]
)
def test_segment_reductions_match_torch(reduce, initial, lengths):
    data = randn(4, 6, 3)
    options = {"axis": lengths.dim() - 1, "initial": initial}
    offsets = torch.cat([torch.zeros_like(lengths[..., :1]), lengths.cumsum(-1)], -1)
    fewer = lengths.clone()
    fewer[..., -1] = 0
    same_value(lambda: torch.segment_reduce(data, reduce, lengths=lengths, **options), equal_nan=True)
    same_value(lambda: torch.segment_reduce(data, reduce, offsets=offsets, **options), equal_nan=True)
    same_value(lambda: torch.segment_reduce(data, reduce, lengths=fewer, unsafe=True, **options), equal_nan=True)


@pytest.mark.parametrize("initial", [None, 3.0, 2.0])
def test_segment_maximum_shares_ties_as_torch(initial):
    def gradient():
        x = torch.tensor([1.0, 3.0, 3.0, 2.0], requires_grad=True)
        torch.segment_reduce(x, "max", lengths=torch.tensor([4]), initial=initial).sum().backward()
        return x.grad

    same_value(gradient)


def test_splits_and_strides_match_torch():
    x = torch.arange(6.0)
    for places in (torch.tensor([1, 3]), torch.tensor(3), torch.tensor([-1]), [1, 3], 2):
        same_value(lambda places=places: torch.tensor_split(x, places))
        same_value(lambda places=places: x.reshape(2, 3).tensor_split(places, dim=1))
    same_value(lambda: torch.tensor_split(input=x, indices=(1, 2)))
    same_value(lambda: torch.as_strided_scatter(x, -torch.ones(2, 2), (2, 2), (2, 1), 1))
    same_value(lambda: torch.as_strided_scatter(x[1:], -torch.ones(2), (2,), (2,), 2))
    same_value(lambda: torch.as_strided_scatter(x.reshape(2, 3).mT, -torch.ones(2, 2), (2, 2), (1, 2)))


LONG = torch.tensor([0.1] * 30 + [10.0] * 60)
ZEROS = torch.zeros(90, dtype=torch.int64)


@pytest.mark.parametrize("route", hodiff.ROUTES)
@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.cumprod(0)[-1],
        lambda x: torch.ones(1).scatter_reduce(0, ZEROS, x, "prod")[0],
        lambda x: torch.segment_reduce(x, "prod", lengths=torch.tensor([90]))[0],
    ],
    ids=["cumprod", "scatter_reduce", "segment_reduce"],
)
def test_products_whose_parts_overflow_have_finite_derivatives(f, route):
    """Partial products overflow in float32 (1e60), although the product of all factors is 1e30."""
    with hodiff.corrected():
        torch.testing.assert_close(f(LONG.clone().requires_grad_()).detach(), f(LONG), rtol=1e-5, atol=0)
    gradient = hodiff.jacobian(f)(LONG)
    torch.testing.assert_close(gradient, 1e30 / LONG, rtol=1e-4, atol=0)
    product = hodiff.hvp(f, LONG, torch.eye(90)[0], route=route)
    torch.testing.assert_close(product[1:], 1e30 / LONG[0] / LONG[1:], rtol=1e-4, atol=0)
    assert product[0] == 0


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_hessian_of_products_of_subnormal_numbers_is_exact(route):
    """Second derivatives are not small: the mixed derivative of x y z by x and y is z."""
    x = torch.tensor([1e-310, -3e-311, 2.0], dtype=D)
    H = hodiff.hessian_matrix(lambda x: torch.cumprod(x, 0)[-1], x, route=route)
    assert H[0, 1].item() == pytest.approx(2.0, rel=1e-14)
    torch.testing.assert_close(H, torch.tensor([[0, 2, 0], [2, 0, 0], [0, 0, 0]], dtype=D), rtol=1e-14, atol=1e-300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
def test_differentiated_cumprod_values_match_torch(dtype):
    """Overflow is also as in torch: the result stays infinite, even if a smaller factor follows."""
    inf, nan = torch.inf, torch.nan
    rows = [[1e30, 1e30, 1e-30], [1e-30, 1e-30, 1e30], [inf, 0, 1], [0, inf, 1], [nan, 1, 0], [-0.0, 2, 1e-45]]
    x, places = torch.tensor(rows).to(dtype), torch.zeros(6, 3, dtype=torch.int64)

    def differentiated():
        return x.clone().requires_grad_()

    same_value(lambda: differentiated().cumprod(1).detach(), equal_nan=True)
    same_value(lambda: (1 * differentiated()).cumprod_(0).detach(), equal_nan=True)
    same_value(lambda: differentiated().cumprod(1, dtype=torch.complex128).detach(), equal_nan=True)
    if dtype != torch.complex64:
        same_value(
            lambda: differentiated().scatter_reduce(1, places, differentiated(), "prod").detach(), equal_nan=True
        )


STRIDES = {
    "crossing": (0, (2, 3), (3, 2), 0),
    "written twice": (0, (2, 2), (1, 1), 1),
    "beside the input": (1, (2, 2), (1, 8), 0),
    "nothing": (0, (0, 2), (1, 1), 0),
}


@pytest.mark.parametrize("name", STRIDES)
def test_as_strided_with_overlaps_and_offsets_matches(name):
    """Labels show which element each result comes from; the map is linear."""
    skipped, size, stride, offset = STRIDES[name]
    w, dx, dsrc = randn(3, 4)[skipped:], randn(3, 4), randn(*size)
    labels = torch.arange(12).reshape(3, 4)
    from_src = torch.arange(dsrc.numel()).reshape(size) + 12
    chosen = torch.as_strided_scatter(labels[skipped:], from_src, size, stride, offset)
    expected = torch.cat([dx.flatten(), dsrc.flatten()])[chosen]

    def f(x, src):
        return torch.as_strided_scatter(x, src, size, stride, offset)

    x, src = randn(3, 4)[skipped:], randn(*size)
    with hodiff.corrected():
        assert torch.equal(f(x.detach().requires_grad_(), src).detach(), f(x, src))
        _, tangent = torch.func.jvp(f, (x, src), (dx[skipped:], dsrc))
        by_x, by_src = torch.func.grad(lambda *each: (f(*each) * w).sum(), (0, 1))(x, src)
    assert torch.equal(tangent, expected)
    torch.testing.assert_close((by_x * dx[skipped:]).sum() + (by_src * dsrc).sum(), (w * expected).sum())


BAD = {
    "as_strided_scatter": lambda x: torch.as_strided_scatter(x, x, (2, 2), (0, 1)),
    "cumprod": lambda x: x.cumprod(3),
    "scatter_reduce index": lambda x: x.scatter_reduce(0, torch.tensor([[9]]), x, "prod"),
    "scatter_reduce negative index": lambda x: x.scatter_reduce(0, torch.tensor([[-1]]), x, "prod"),
    "scatter_reduce shape": lambda x: x.scatter_reduce(0, torch.zeros(3, 3, dtype=torch.int64), x, "prod"),
    "index_reduce index": lambda x: x.index_reduce(0, torch.tensor([5, 0]), x, "prod"),
    "index_reduce shape": lambda x: x.index_reduce(0, torch.tensor([0, 1]), x[:, :1], "mean"),
    "segment_reduce lengths": lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([1])),
    "tensor_split": lambda x: x.tensor_split(torch.tensor(0)),
}


def test_table_lists_the_corrections():
    names = {row.name for row in table()}
    assert {"torch.cumprod", "torch.index_reduce", "torch.scatter_reduce", "torch.tensor_split"} <= names


@pytest.mark.parametrize("name", ["roll", "flip"])
def test_roll_and_flip_of_numbers_in_a_batch(name):
    """Under vmap torch's `roll` exchanges numbers of a batch, and its `flip` raises."""
    x = torch.tensor([0.3, 0.5], dtype=D)
    move = (lambda s: s.roll(1)) if name == "roll" else (lambda s: torch.flip(s, (0,)))
    with hodiff.corrected():
        torch.testing.assert_close(torch.func.vmap(move)(x), x)
    expected = (x.square().sum().exp() * (2 * torch.eye(2, dtype=D) + 4 * torch.outer(x, x))).contiguous()
    for route in hodiff.ROUTES:
        found = hodiff.hessian(lambda x: move(x.square().sum()).exp(), route=route)(x)
        torch.testing.assert_close(found, expected)
    assert hodiff.laplacian(lambda x: move(x.square().sum()).exp())(x).item() == pytest.approx(expected.trace().item())


def test_masked_select_by_a_mask_of_more_dimensions_matches_the_selection_by_hand():
    mask = torch.tensor([[True, False], [True, True]])
    x, weights = torch.tensor([0.5, -0.7], dtype=torch.float64), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    v = torch.tensor([0.3, 1.1], dtype=torch.float64)
    for route in hodiff.ROUTES[:2]:  # the others need a batching rule
        product = hodiff.hvp(lambda x: torch.masked_select(x.exp(), mask).sin() @ weights, x, v, route=route)
        by_hand = hodiff.hvp(lambda x: x[[0, 0, 1]].exp().sin() @ weights, x, v, route=route)
        torch.testing.assert_close(product, by_hand, rtol=1e-12, atol=1e-12)


class TestContract(Contract):
    cases = CASES
    # One case of each family; the other cases are slow.
    quick, one_in = (*WRONG, "scatter_reduce prod without self", "segment_reduce prod", "in place"), 6
    not_compiled, not_batched = NOT_COMPILED, NOT_BATCHED
    wrong = WRONG
    errors, error_inputs = BAD, (torch.ones(2, 2),)
