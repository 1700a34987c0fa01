"""Tests that the check tells missing entries from rounding: rows of very different size, and canceling terms."""

import warnings

import numpy as np
import pytest
import torch

import hodiff
from hodiff import InputError
from hodiff.sparse import check_pattern, hessian, hessian_pattern, jacobian, jacobian_pattern
from tests.sparse.problems import D, point


def uneven(x, scale):
    """Compute a function whose Hessian has one large entry alone in its row, and small entries in other rows."""
    return scale * x[5] ** 2 + (x**2).sum() + x[0] * x[3]


@pytest.mark.parametrize(("dtype", "scale"), [(D, 1e8), (D, 1e14), (torch.float32, 1e4), (torch.float32, 1e8)])
def test_missing_entries_beside_much_larger_rows_are_detected(dtype, scale):
    x, pattern = point(6, dtype=dtype), np.eye(6, dtype=bool)
    with pytest.raises(InputError, match=r"pattern: .* 2 row\(s\), such as 0, 3"):
        hessian(lambda x: uneven(x, scale), pattern=pattern)(x)
    with pytest.raises(InputError, match="pattern: expected"):
        check_pattern(lambda x: uneven(x, scale), x, pattern)


def test_missing_entry_beside_a_large_one_in_its_row_is_detected():
    with pytest.raises(InputError, match=r"1 row\(s\), such as 0"):
        jacobian(lambda x: torch.stack([1e8 * x[0] + x[1]]), pattern=np.array([[True, False]]), method="columns")(
            point(2)
        )
    check_pattern(lambda x: torch.stack([1e8 * x[0] + x[1]]), point(2), np.array([[True, True]]), of="jacobian")


@pytest.mark.parametrize("scale", [1.0, 1e10])
def test_changed_closure_beside_larger_rows_is_detected(scale):
    held = [1]

    def f(x):
        return x[0] * x[held[0]] ** 2 + scale * (x[4] * x[5]) ** 2

    H, J, x = hessian(f), jacobian(torch.func.grad(f), method="columns"), point(6)
    for held[0] in (1, 2, 3):
        expected = hodiff.hessian(f)(x)
        torch.testing.assert_close(H(x).to_dense(), expected)
        torch.testing.assert_close(J(x).to_dense(), expected)


CANCELLING = {
    "one": lambda x: (x.sin() ** 2 + x.cos() ** 2).sum(),
    "lines": lambda x: (x * x).sqrt().sum(),
    "quotients": lambda x: (x / x.roll(1) * x.roll(1)).sum(),
    "pairs": lambda x: x.view(-1, 2).std(1).sum(),
    "single columns": lambda x: x.view(-1, 1).norm(dim=1).sum(),
    "exp and log": lambda x: x.exp().log().sum(),
    "large constants": lambda x: (1e6 + x.sin() - 1e6).sum(),
    "steep": lambda x: (20 * x).cosh().log().sum(),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", CANCELLING)
@pytest.mark.parametrize("dtype", [D, torch.float32])
@pytest.mark.parametrize("method", ["star", "acyclic"])
@pytest.mark.filterwarnings("ignore:sparse.hessian. method. substitution")
def test_canceling_terms_are_not_taken_for_missing_entries(name, dtype, method):
    f = CANCELLING[name]
    x = point(400, dtype=dtype)
    coloring = hodiff.sparse.color(hessian_pattern(f, x), method)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # In substitution, rounding errors of canceling entries accumulate along a path.
        warnings.filterwarnings("ignore", "sparse.hessian: method: substitution")
        found = hessian(f, method=method)(x).to_dense()
        hessian(f, coloring=coloring)(x)
        # A missing entry is still detected where the function does not cancel.
        entries = hodiff.sparse.hessian_pattern(lambda x: f(x) + (x[7] * x[300]) ** 2, x)
        hessian(lambda x: f(x) + (x[7] * x[300]) ** 2, pattern=entries)(x)
    assert (found.abs() < 1e-3 * torch.finfo(dtype).eps ** -0.5).all()
    with pytest.raises(InputError, match="without some in"):
        hessian(lambda x: f(x) + 10 * (x[7] * x[300]) ** 2, coloring=coloring)(x)


def test_asymmetric_derivative_warns():
    """Autograd's Hessian is not symmetric for probabilities near 1 in float32."""

    def f(x):
        return torch.logsumexp(50 * x.view(-1, 2), 1).sum()

    x = point(4, dtype=torch.float32)
    with pytest.warns(hodiff.HodiffWarning, match="f: its derivative loses digits"):
        found = hessian(f, correct=False)(x).to_dense()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exact = hessian(f)(x.double()).to_dense()
        torch.testing.assert_close(hessian(f)(x).to_dense(), exact.float(), rtol=1e-3, atol=1e-7)
    off = (found - exact).abs()
    assert (off > 0.5 * exact.abs())[3].any()
    assert off.max() < 50**2 * 1e-5


def test_lost_digits_of_substitution_warn():
    """Substitution loses digits, and warns, in a chain whose entries vary by many orders of magnitude."""
    sizes = 10 ** (6 + 6 * torch.linspace(0, 20, 39, dtype=D).sin())

    def f(x):
        return (sizes * x[1:] * x[:-1]).sum() + (x**2).sum()

    x = point(40)
    with pytest.warns(hodiff.HodiffWarning, match="method: substitution lost digits .* method='star' keeps them"):
        found = hessian(f, method="acyclic")(x).to_dense()
    exact = torch.diag(sizes, 1) + torch.diag(sizes, -1) + 2 * torch.eye(40, dtype=D)
    assert (found - exact).abs().max() / exact.max() < 1e-12
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(hessian(f)(x).to_dense(), exact)


@pytest.mark.parametrize("method", ["star", "acyclic"])
@pytest.mark.parametrize("length", [40, 4000])
def test_small_couplings_of_distant_unknowns_are_detected(method, length):
    def f(x):
        return (x[1:] - x[:-1]).cosh().sum()

    x = point(length)
    coloring = hodiff.sparse.color(hessian_pattern(f, x), method)
    hessian(f, coloring=coloring)(x)
    with pytest.raises(InputError, match=rf"2 row\(s\), such as 3, {length - 5},"):
        hessian(lambda x: f(x) + 1e-9 * x[3] * x[-5], coloring=coloring)(x)


@pytest.mark.parametrize("method", ["auto", "columns", "rows", "bidirectional"])
def test_results_of_another_size_get_another_pattern(method):
    size = [4]

    def f(x):
        return x[: size[0]] * x[1 : size[0] + 1]

    J, x = jacobian(f, method=method), point(8)
    for size[0] in (4, 2, 6):
        torch.testing.assert_close(J(x).to_dense(), hodiff.jacobian(f)(x))
    with pytest.raises(InputError, match=r"pattern: expected a pattern of shape \(6, 8\), got \(3, 8\)"):
        jacobian(f, pattern=np.ones((3, 8), dtype=bool))(x)


@pytest.mark.parametrize("size", [20_000, 200_000])
def test_dense_matrices_are_rejected_early(size):
    x = torch.ones(size)
    for find in (hessian_pattern, jacobian_pattern):
        f = (lambda x: x.sum() ** 2) if find is hessian_pattern else (lambda x: x + x.sum())
        with pytest.raises(InputError, match=r"more than 33,554,432 pairs .* hodiff\.hvp gives products"):
            find(f, x)


@pytest.mark.parametrize("method", ["star", "acyclic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_missing_entries_in_16_bits_are_detected(dtype, method):
    """Missing entries are also detected for float64 unknowns together with one of 16 bits."""
    x, whole = torch.ones(12, dtype=dtype), hessian_pattern(chain, torch.ones(12))
    for i in range(12):
        pattern = whole.toarray()
        pattern[i, i] = False
        with pytest.raises(InputError, match=f"such as {i}"):
            hessian(chain, pattern=pattern, method=method)(x)
        padded = np.pad(pattern, (0, 1), constant_values=True)
        with pytest.raises(InputError, match="pattern: expected"):
            hessian(lambda x, y: chain(x) + y.double().sum() ** 2, argnums=(0, 1), pattern=padded, method=method)(
                x.double(), torch.ones(1, dtype=dtype)
            )
    hessian(chain, pattern=whole, method=method)(x)


def chain(x):
    return (x**2).sum() / 2 + (x[1:] * x[:-1]).sum()


def test_non_finite_entries_warn():
    is_near = torch.zeros(5, dtype=torch.bool)
    f = lambda x: (x**3).sum() + (x[1:] - x[:-1])[is_near].square().sqrt().sum()  # noqa: E731
    x = torch.tensor([1.0, 2.0, 3.0, 3.0, 4.0, 5.0], dtype=D)
    H = hessian(f)
    H(x)
    is_near[2] = True
    expected = torch.diag(6 * x)
    expected[2:4, 2:4] = torch.nan
    with pytest.warns(
        hodiff.HodiffWarning, match=r"sparse.hessian: x: products are not finite in 2 row\(s\), such as 2, 3"
    ):
        torch.testing.assert_close(H(x).to_dense(), expected, equal_nan=True)
    with pytest.warns(hodiff.HodiffWarning, match=r"check_pattern: x: .* 2 row\(s\), which cannot be checked"):
        check_pattern(f, x, np.eye(6, dtype=bool))
    with pytest.warns(hodiff.HodiffWarning, match=r"products are not finite in 2 column\(s\), such as 2, 3"):
        jacobian(lambda x: torch.where(is_near ^ is_near, (x[1:] - x[:-1]).square().sqrt(), 1.0), method="rows")(x)


@pytest.mark.parametrize("method", ["star", "acyclic"])
def test_finite_entries_that_infinite_ones_make_nan_are_named(method):
    def f(x):
        return (x[1:] * x[:-1] ** 2).sum() + ((x[3:5] - 1) ** 1.5).sum()

    x = torch.ones(6, dtype=D)
    expected = 2 * (torch.diag(torch.ones(5, dtype=D), 1) + torch.diag(torch.ones(5, dtype=D), -1) + torch.eye(6))
    expected[5, 5], expected[3, 3], expected[4, 4] = 0, torch.inf, torch.inf
    pattern = hessian_pattern(f, x).toarray()
    pattern[3, 4] = pattern[4, 3] = False
    for given in (None, pattern):
        with pytest.warns(hodiff.HodiffWarning) as warned:
            found = hessian(f, pattern=given, method=method)(x).to_dense()
        named = {
            int(i) for each in warned for i in str(each.message).partition("such as ")[2].split(";")[0].split(",")[:2]
        }
        wrong = ~found.isclose(expected)
        assert set(wrong.any(1).nonzero()[:, 0].tolist()) <= named
        # Only numbers that are not finite are wrong, so that nothing is silent.
        assert not found[wrong & torch.tensor(pattern)].isfinite().any()
    if method == "acyclic":
        assert {2, 5} < named
