"""Tests of architectures that users train: check, preflight, products by every route, operators and eigenvalues.

The references are differences of torch's gradients and of outputs. The tables in `architectures/` list the expected
results of check and preflight.
"""

import importlib.util

import pytest
from models.measures import (
    captured_error,
    checked,
    eigenvalue_error,
    gauss_newton_error,
    operator_error,
    previewed,
    route_errors,
)
from models.specimen import architectures

import hodiff
from hodiff.checks.torch_warnings import silence_torch_warnings

ALL = architectures()
FEW_PARAMETERS = 1000


def each(*, measured=False):
    """Parametrize by all architectures (most of them slow), or only by architectures with correct derivatives."""
    return [
        pytest.param(one, id=one.name, marks=[] if one.quick else [pytest.mark.slow])
        for one in ALL
        if one.measured or not measured
    ]


@pytest.fixture(autouse=True)
def _quiet():
    with silence_torch_warnings():
        yield


def require_package(architecture):
    if architecture.needs and importlib.util.find_spec(architecture.needs) is None:
        pytest.skip(f"needs {architecture.needs}")
    return architecture


def tolerance(architecture):
    """Tolerance, larger for a float32 norm inside the model."""
    return 1e-4 if architecture.coarse else 1e-6


@pytest.mark.slow
@pytest.mark.one_in(8)
@pytest.mark.parametrize("architecture", each())
def test_check_has_the_expected_findings(architecture):
    report = checked(require_package(architecture))
    found = {finding.code for finding in report.errors}, {finding.code for finding in report.warnings}
    assert found == (set(architecture.errors), set(architecture.warnings)), str(report)
    if not architecture.errors:
        right = {entry.route for entry in report.entries if entry.order == 2 and entry.status == "ok"}
        assert right == set(architecture.routes)


@pytest.mark.parametrize("architecture", each())
def test_preflight_has_the_expected_verdict(architecture):
    assert previewed(require_package(architecture)).verdict.startswith(f"verdict: {architecture.verdict}")


@pytest.mark.slow
@pytest.mark.one_in(8)
@pytest.mark.parametrize("architecture", each(measured=True))
def test_products_match_by_every_route(architecture):
    # Forward-over-forward differentiates along each parameter in turn. The check above compares it along one direction.
    size = sum(each.numel() for each in require_package(architecture).made().model.parameters())
    routes = [each for each in architecture.routes if each != "forward-over-forward" or size < FEW_PARAMETERS]
    errors = dict(route_errors(architecture, routes))
    assert max(errors.values()) < tolerance(architecture), errors


@pytest.mark.parametrize("architecture", each(measured=True))
def test_missing_routes_raise(architecture):
    missing = architecture.missing
    if not missing:
        assert architecture.routes == hodiff.ROUTES
    for route in missing:
        with pytest.raises(hodiff.RouteError):
            list(route_errors(require_package(architecture), [route]))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", each(measured=True))
def test_operators_and_eigenvalues_match(architecture):
    assert operator_error(require_package(architecture)) < tolerance(architecture)
    assert gauss_newton_error(architecture) < tolerance(architecture)
    assert eigenvalue_error(architecture) < 1e-4


# Quick cases: recurrent layers, masks and sizes in control flow, routers, solvers, scripts, a comparison of matrices.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["GRU", "GAT", "GraphSAGE", "Mixtral", "neural ODE, rk4", "e3nn", "ConvNeXt"])
def test_compiled_operators_match(name):
    architecture = require_package(next(one for one in ALL if one.name == name))
    found = captured_error(architecture)
    assert isinstance(found, float), found
    assert found < tolerance(architecture)


@pytest.mark.slow
def test_gaussian_process_is_rejected():
    """The covariance of gpytorch saves its derivative by the length scale as a constant."""
    architecture = require_package(next(one for one in ALL if one.name == "Gaussian process"))
    with pytest.raises(hodiff.RouteError, match=r"RBFCovariance\.backward .* a part of its slope"):
        captured_error(architecture)


def test_errors_without_corrections_are_large():
    """Without corrections the error is large, so the tests above can fail."""
    normalized = next(one for one in ALL if one.name == "weight-normalized convolutions")
    ((_, error),) = route_errors(normalized, hodiff.ROUTES[:1], correct=False)
    assert error > 1e-2
