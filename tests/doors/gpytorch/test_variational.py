"""Variational models of GPyTorch, against differences of their own gradients and closed forms."""

import gpytorch
import numpy
import pytest
import torch
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    LargeBatchVariationalStrategy,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
    UnwhitenedVariationalStrategy,
    VariationalStrategy,
)

import hodiff
from hodiff.doors.gpytorch import higher_order

D = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
X = torch.rand(9, 2, dtype=D, generator=GENERATOR)
Y = (X.sum(1) > 1).double()
CORRECT = (VariationalStrategy, LargeBatchVariationalStrategy, UnwhitenedVariationalStrategy)


class Process(gpytorch.models.ApproximateGP):
    def __init__(self, strategy, distribution):
        super().__init__(strategy(self, X[:3] + 0.05, distribution(3)))
        self.variational_strategy.variational_params_initialized.fill_(1)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Bound(torch.nn.Module):
    """The evidence lower bound of all data, a function of the parameters."""

    def __init__(self, strategy, distribution=CholeskyVariationalDistribution):
        super().__init__()
        self.process = Process(strategy, distribution)
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()
        self.bound = gpytorch.mlls.VariationalELBO(self.likelihood, self.process, len(X))
        self.double()
        with torch.no_grad():
            for each in self.parameters():
                each += 0.1 * torch.randn(each.shape, dtype=D, generator=GENERATOR)

    def forward(self):
        return self.bound(self.process(X), Y)


def parameters_of(model):
    return {name: each.detach() for name, each in model.named_parameters()}


def own_product(f, p, direction, step=1e-5):
    """A product of a Hessian, from differences of the package's own gradients."""

    def gradients(sign):
        at = {name: (each + sign * step * direction[name]).requires_grad_() for name, each in p.items()}
        return torch.autograd.grad(f(at), list(at.values()), materialize_grads=True)

    return {name: (b - a) / (2 * step) for name, a, b in zip(p, gradients(-1), gradients(1), strict=True)}


@pytest.mark.parametrize("strategy", CORRECT)
@pytest.mark.parametrize("distribution", [CholeskyVariationalDistribution, MeanFieldVariationalDistribution])
def test_products_of_the_bound(strategy, distribution):
    model = Bound(strategy, distribution)
    p = parameters_of(model)
    direction = {name: torch.randn(each.shape, dtype=D, generator=GENERATOR) for name, each in p.items()}

    def loss(p):
        return torch.func.functional_call(model, p, ())

    with higher_order():
        found = hodiff.hvp(loss, p, direction)
    torch.testing.assert_close(found, own_product(loss, p, direction), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("strategy", CORRECT)
def test_predictions(strategy):
    model = Bound(strategy)
    model.eval()
    direction = torch.randn(2, 2, dtype=D, generator=GENERATOR)

    def loss(at):
        found = model.process(at["x"])
        return found.mean.square().sum() + found.variance.sum()

    with higher_order():
        found = hodiff.hvp(loss, {"x": X[:2]}, {"x": direction})
    torch.testing.assert_close(found, own_product(loss, {"x": X[:2]}, {"x": direction}), rtol=1e-6, atol=1e-7)


def test_log_normal_cdf():
    z = torch.tensor([-20.0, -3.0, -1.01, -0.1, 0.0, 0.5, 2.0], dtype=D)
    normal = torch.distributions.Normal(torch.zeros((), dtype=D), 1.0)
    # The ratio of density and distribution function; exp(-z^2/2) and erfc(-z) are multiplied by exp(z^2/2).
    ratio = (2 / torch.pi) ** 0.5 / torch.special.erfcx(-z / 2**0.5)
    with higher_order():
        value = gpytorch.functions.log_normal_cdf(z)
        second = hodiff.hessian_diagonal(lambda z: gpytorch.functions.log_normal_cdf(z).sum())(z)
    torch.testing.assert_close(value[1:], normal.cdf(z[1:]).log())
    torch.testing.assert_close(second, -ratio * (z + ratio))


def test_classification():
    likelihood = gpytorch.likelihoods.BernoulliLikelihood()
    nodes, weights = map(torch.from_numpy, numpy.polynomial.hermite.hermgauss(20))

    def expected(p):
        q = gpytorch.distributions.MultivariateNormal(p["mean"], p["variance"].diag())
        return likelihood.expected_log_prob(Y, q).sum()

    def formula(p):
        values = p["mean"] + (2 * p["variance"]).sqrt() * nodes[:, None]
        probabilities = torch.special.erfc(torch.where(Y > 0, -values, values) / 2**0.5) / 2
        return (weights[:, None] * probabilities.log()).sum() / torch.pi**0.5

    p = {"mean": X[:, 0], "variance": X[:, 1] + 0.1}
    with higher_order():
        torch.testing.assert_close(expected(p), formula(p))
        torch.testing.assert_close(hodiff.hessian_matrix(expected, p), hodiff.hessian_matrix(formula, p))


# Natural gradients are no derivatives of the value, as hodiff also warns.
@pytest.mark.filterwarnings("ignore:.*the gradient by autograd is not the derivative")
@pytest.mark.parametrize("distribution", [NaturalVariationalDistribution, TrilNaturalVariationalDistribution])
def test_natural_gradients_are_refused(distribution):
    model = Bound(UnwhitenedVariationalStrategy, distribution)
    with higher_order(), pytest.raises(hodiff.RouteError, match="natural gradients"):
        hodiff.hessian_matrix(lambda p: torch.func.functional_call(model, p, ()), parameters_of(model))


@pytest.mark.parametrize("strategy", CORRECT[:2])
def test_outside_the_context_bounds_are_refused(strategy):
    model = Bound(strategy)
    with pytest.raises(hodiff.RouteError, match=r"higher_order\(\)"):
        hodiff.hessian_matrix(lambda p: torch.func.functional_call(model, p, ()), parameters_of(model))
