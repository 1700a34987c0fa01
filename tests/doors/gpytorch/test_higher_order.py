"""Hessians of Gaussian processes of GPyTorch, against dense formulas in torch's operators and closed forms."""

import contextlib
import math
import threading

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from linear_operator.operators import to_linear_operator

import hodiff
from hodiff.doors.gpytorch import higher_order

D = torch.float64
COUNT = 12


def close(a, b, rtol=1e-8):
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * b.abs().max().item())


def draw():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(COUNT, 2, dtype=D, generator=generator)
    # Two points coincide.
    x[3] = x[7]
    return x, torch.sin(4 * x.sum(1)) + 0.1 * torch.randn(COUNT, dtype=D, generator=generator)


X, Y = draw()


class Process(gpytorch.models.ExactGP):
    def __init__(self, kernel, likelihood):
        super().__init__(X, Y, likelihood)
        self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), ScaleKernel(kernel)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Evidence(torch.nn.Module):
    """The log marginal likelihood of all data, a function of the parameters."""

    def __init__(self, kernel):
        super().__init__()
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        self.process = Process(kernel, likelihood)
        self.likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, self.process)
        self.double()

    def forward(self):
        return COUNT * self.likelihood(self.process(X), Y)


KERNELS = {
    "RBF": lambda: RBFKernel(),
    "RBF, two lengthscales": lambda: RBFKernel(ard_num_dims=2),
    "Matern 1/2": lambda: MaternKernel(nu=0.5),
    "Matern 3/2": lambda: MaternKernel(nu=1.5),
    "Matern 5/2": lambda: MaternKernel(nu=2.5),
    "Matern 5/2, two lengthscales": lambda: MaternKernel(nu=2.5, ard_num_dims=2),
}
kernels = pytest.mark.parametrize("name", KERNELS)


def profile(name, squares):
    """The kernel as a function of squared distances."""
    if name.startswith("RBF"):
        return (-squares / 2).exp()
    order = int(name[7])
    # A distance of 0 is a constant, in all derivatives by lengthscales.
    r = math.sqrt(order) * torch.where(squares > 0, squares, 1.0).sqrt() * (squares > 0)
    return {1: 1.0, 3: 1 + r, 5: 1 + r + r**2 / 3}[order] * (-r).exp()


def dense_evidence(name, parameters):
    """The log marginal likelihood by its formula."""
    p = {key.rpartition(".")[2]: torch.nn.functional.softplus(each) for key, each in parameters.items()}
    squares = ((X[:, None] - X[None]) / p["raw_lengthscale"]).square().sum(-1)
    K = p["raw_outputscale"] * profile(name, squares) + (1e-4 + p["raw_noise"]) * torch.eye(COUNT, dtype=D)
    mean = next(each for key, each in parameters.items() if key.endswith("constant"))
    L = torch.linalg.cholesky(K)
    white = torch.linalg.solve_triangular(L, (Y - mean)[:, None], upper=False)
    return -white.square().sum() / 2 - L.diagonal().log().sum() - COUNT / 2 * math.log(2 * math.pi)


def parameters_of(model):
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("iterative", [False, True])
@kernels
def test_hessian_of_the_marginal_likelihood(name, iterative):
    model = Evidence(KERNELS[name]())
    parameters = parameters_of(model)
    expected = hodiff.hessian_matrix(lambda p: dense_evidence(name, p), parameters)
    with gpytorch.settings.max_cholesky_size(1 if iterative else 800), higher_order():
        found = hodiff.hessian_matrix(lambda p: torch.func.functional_call(model, p, ()), parameters)
        product = hodiff.HessianOperator(lambda p: torch.func.functional_call(model, p, ()), parameters)
        close(found, expected)
        close(product.to_dense(), expected)
        close(torch.func.functional_call(model, parameters, ()), dense_evidence(name, parameters))


@pytest.mark.parametrize("name", ["RBF", "Matern 5/2", "Matern 5/2, two lengthscales"])
@pytest.mark.parametrize("iterative", [False, True])
def test_outside_the_context_hessians_are_right_or_refused(name, iterative):
    model = Evidence(KERNELS[name]())
    with gpytorch.settings.max_cholesky_size(1 if iterative else 800):

        def evidence(p):
            return torch.func.functional_call(model, p, ())

        if name.endswith("lengthscales") and not iterative:
            expected = hodiff.hessian_matrix(lambda p: dense_evidence(name, p), parameters_of(model))
            close(hodiff.hessian_matrix(evidence, parameters_of(model)), expected)
            return
        for derivative in (hodiff.hessian_matrix, lambda f, x: hodiff.hvp(f, x, x)):
            with pytest.raises(hodiff.RouteError, match=r"higher_order\(\)"):
                derivative(evidence, parameters_of(model))


def quadratic(solve):
    """A form of the inverse, by its shift and by its vector."""
    A = (X[:, None] - X[None]).square().sum(-1).neg().exp()
    return lambda p: solve(A + p["shift"] * torch.eye(COUNT, dtype=D), Y + p["move"])


FORMS = {
    "solve": lambda K, b: b @ to_linear_operator(K).solve(b),
    "solve of columns": lambda K, b: (b[:, None] * to_linear_operator(K).solve(b[:, None])).sum(),
    "solve with a left factor": lambda K, b: to_linear_operator(K).solve(b, b[None]).sum(),
    "inv_quad": lambda K, b: to_linear_operator(K).inv_quad(b[:, None]),
    "inv_quad of a vector": lambda K, b: to_linear_operator(K).inv_quad(b).sum(),
    "added diagonal": lambda K, b: b @ to_linear_operator(K).add_diagonal(0 * b[:1]).solve(b),
    "batch": lambda K, b: (b[:, None] * to_linear_operator(K.expand(2, -1, -1)).solve(b[:, None])).sum() / 2,
    "inv_quad_logdet": lambda K, b: to_linear_operator(K).inv_quad_logdet(b[:, None], logdet=True)[0],
}
POINT = {"shift": torch.tensor(0.5, dtype=D), "move": torch.linspace(0, 1, COUNT, dtype=D)}


@pytest.mark.parametrize("iterative", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_solutions(form, iterative):
    f = quadratic(FORMS[form])
    expected = hodiff.hessian_matrix(quadratic(lambda K, b: b @ torch.linalg.solve(K, b)), POINT)
    with gpytorch.settings.max_cholesky_size(1 if iterative else 800):
        with higher_order():
            close(hodiff.hessian_matrix(f, POINT), expected)
        if iterative or form not in ("inv_quad_logdet",):
            with pytest.raises((hodiff.RouteError, RuntimeError), match=r"higher_order\(\)|in-place"):
                hodiff.hessian_matrix(f, POINT)


@pytest.mark.parametrize("iterative", [False, True])
def test_solutions_by_the_right_hand_side_need_no_context(iterative):
    K = torch.linalg.inv(torch.eye(COUNT, dtype=D) + torch.ones(COUNT, COUNT, dtype=D) / COUNT)
    with gpytorch.settings.max_cholesky_size(1 if iterative else 800), gpytorch.settings.eval_cg_tolerance(1e-10):
        found = hodiff.hessian_matrix(lambda b: b @ to_linear_operator(K).solve(b[:, None])[:, 0], Y)
    close(found, 2 * torch.linalg.inv(K), rtol=1e-6)


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize(
    ("kernel", "slope"), [(RBFKernel(), 1.0), (MaternKernel(nu=1.5), 3.0), (MaternKernel(), 5 / 3)]
)
def test_kernels_at_equal_points(kernel, slope, diagonal):
    kernel = kernel.double()
    kernel.lengthscale = 0.5
    center = torch.tensor([[0.3, -0.2, 1.0]], dtype=D)

    def of(x):
        found = kernel(x, center, diag=diagonal)
        return (found if diagonal else found.to_dense()).sum()

    with higher_order():
        for H in (hodiff.hessian_matrix(of, center), torch.func.hessian(of)(center).view(3, 3)):
            close(H, -slope / 0.25 * torch.eye(3, dtype=D))
        close(hodiff.laplacian(lambda x: of(x[None]))(center[0]), torch.tensor(-12 * slope, dtype=D))


@pytest.mark.parametrize("diagonal", [False, True])
def test_linear_kernel_at_equal_points(diagonal):
    """GPyTorch takes equal points for one variable, in which the product is quadratic."""
    kernel = gpytorch.kernels.LinearKernel().double().requires_grad_(False)
    center = torch.tensor([[0.3, -0.2, 1.0]], dtype=D)

    def of(x):
        found = kernel(x, center, diag=diagonal)
        return (found if diagonal else found.to_dense()).sum()

    with higher_order():
        close(torch.func.grad(of)(center.clone()), kernel.variance.reshape(()) * center)
        for H in (hodiff.hessian_matrix(of, center.clone()), torch.func.hessian(of)(center.clone()).view(3, 3)):
            close(H, torch.zeros(3, 3, dtype=D))


@pytest.mark.parametrize("kernel", [RBFKernel, lambda: MaternKernel(nu=2.5)])
def test_predictions_at_training_points(kernel):
    process = Process(kernel(), gpytorch.likelihoods.GaussianLikelihood()).double().eval()

    def variance_and_mean(x):
        found = process(x[None])
        return found.mean.sum() + found.covariance_matrix.sum()

    def by_differences(x, step=1e-3):
        steps = step * torch.eye(2, dtype=D)
        rows = [
            [sum(i * j * variance_and_mean(x + i * a + j * b).item() for i in (-1, 1) for j in (-1, 1)) for b in steps]
            for a in steps
        ]
        return torch.tensor(rows, dtype=D) / (4 * step**2)

    with higher_order():
        close(hodiff.hessian_matrix(variance_and_mean, X[0]), by_differences(X[0]), rtol=1e-3)


def test_predictions_by_hyperparameters():
    """The caches have a graph, which the packages' setting would cut."""
    process = Process(RBFKernel(), gpytorch.likelihoods.GaussianLikelihood()).double()
    parameters = parameters_of(process)

    def mean(p):
        process.train().eval()  # clears the caches
        return torch.func.functional_call(process, p, (X[:2] + 0.1,)).mean.sum()

    def dense(p):
        scale, noise, length = (
            torch.nn.functional.softplus(next(each for key, each in p.items() if name in key))
            for name in ("outputscale", "noise", "lengthscale")
        )
        center = next(each for key, each in p.items() if key.endswith("constant"))

        def kernel(a, b):
            return scale * (-((a[:, None] - b[None]) / length).square().sum(-1) / 2).exp()

        K = kernel(X, X) + (1e-4 + noise) * torch.eye(COUNT, dtype=D)
        return (center + kernel(X[:2] + 0.1, X) @ torch.linalg.solve(K, Y - center)).sum()

    with higher_order():
        close(hodiff.hessian_matrix(mean, parameters), hodiff.hessian_matrix(dense, parameters))


def test_the_packages_are_as_before_afterwards():
    originals = RBFKernel().double()(X).to_dense()
    with pytest.raises(ZeroDivisionError), higher_order(), higher_order():
        raise ZeroDivisionError
    assert "apply" not in vars(gpytorch.functions.rbf_covariance.RBFCovariance)
    assert gpytorch.settings.detach_test_caches.on()
    assert gpytorch.settings.fast_computations.log_prob.on()
    assert torch.equal(RBFKernel().double()(X).to_dense(), originals)


def test_contexts_of_threads_may_overlap():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with higher_order():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(10)
    with contextlib.suppress(ZeroDivisionError), higher_order():
        raise ZeroDivisionError
    assert "apply" in vars(gpytorch.functions.rbf_covariance.RBFCovariance)
    leave.set()
    thread.join()
    assert "apply" not in vars(gpytorch.functions.rbf_covariance.RBFCovariance)
