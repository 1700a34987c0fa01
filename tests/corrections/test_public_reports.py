"""Wrong derivatives that were reported to PyTorch: corrected within `corrected()`, or named by `check`."""

import pytest
import torch
from corrections.against_torch import tensor
from corrections.public_reports import REPORTS, TAILS, is_wrong, nested, routes_of, squares_of_squares

import hodiff

# torch warns once that triangular_solve is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:torch.triangular_solve .*:UserWarning")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", REPORTS)
def test_reported_function_is_right_within_corrected(name):
    report = REPORTS[name]
    at = torch.tensor(report.at, dtype=report.dtype)
    for routes in routes_of(report.order):
        with hodiff.corrected():
            got = nested(report.f, routes)(at)
        assert got.item() == pytest.approx(report.truth, rel=report.relative, abs=1e-10), "".join(routes)


@pytest.mark.parametrize("name", REPORTS)
def test_torch_alone_is_wrong_until_the_fixed_version(name):
    """Torch alone is wrong before the version in which a report is fixed; otherwise the report would prove nothing."""
    report = REPORTS[name]
    is_right = report.elsewhere or (report.mended != "never" and torch.__version__ >= report.mended)
    assert is_wrong(report) != is_right


@pytest.mark.parametrize("name", TAILS)
def test_reported_tail_is_right_within_corrected(name):
    report = TAILS[name]
    at = torch.tensor(report.at, dtype=report.dtype)
    for routes in routes_of(report.order):
        with hodiff.corrected():
            got = nested(report.f, routes)(at)
        assert got.item() == pytest.approx(report.truth, rel=report.relative, abs=0), "".join(routes)


def test_prod_hessian_in_float16():
    """#193012: torch divides by small factors before it multiplies by others."""
    x = torch.tensor([0.03, 1.0, 1.0, 1.0], dtype=torch.float16)

    def hessian():
        return torch.autograd.functional.hessian(lambda x: 4000 * torch.prod(x), x)

    assert not hessian().isfinite().all()
    with hodiff.corrected():
        assert hessian()[0, 1] == 4000


def test_function_with_jvp_is_right_by_directional_derivatives():
    """#197867 is right by transforms that nest forward mode themselves."""
    x = tensor(3.0)
    derivatives = hodiff.directional_derivatives(lambda x: squares_of_squares(x).sum(), x, torch.ones_like(x), order=3)
    assert [each.item() for each in derivatives] == [81.0, 108.0, 108.0, 72.0]


def test_cdist_second_gradient_by_torch_func():
    """Second gradients of cdist are zeros in torch 2.15, and raise in 2.13."""
    x, y = tensor(3.0, 4.0), tensor(0.0, 0.0)
    expected = tensor(16.0, -12.0) / 125

    def gradient(x):
        return torch.func.grad(lambda x: torch.cdist(x[None], y[None])[0, 0])(x)[0]

    with hodiff.corrected():
        torch.testing.assert_close(torch.func.grad(gradient)(x), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_functions_differentiated_twice_are_right_or_raise():
    """#91469, #181581, #183603: torch raises where it was silently wrong; hodiff's transform is right."""
    quintic = torch.compile(lambda x: (x**5).sum(), backend="aot_eager")
    gradient = torch.compile(lambda x: torch.autograd.grad((x**5).sum(), x, create_graph=True)[0], backend="aot_eager")
    x, v = tensor(1.0, 2.0), tensor(1.0, 1.0)
    leaf = x.clone().requires_grad_()
    for first in (lambda: torch.autograd.grad(quintic(leaf), leaf, create_graph=True)[0], lambda: gradient(leaf)):
        with pytest.raises(RuntimeError, match="double backward"):
            torch.autograd.grad(first().sum(), leaf)
    torch.testing.assert_close(hodiff.hvp(quintic, x, v), tensor(20.0, 160.0))
