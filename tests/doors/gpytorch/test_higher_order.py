"""Hessians of Gaussian processes of GPyTorch, against dense formulas in torch's operators and closed forms."""

import contextlib
import math
import threading

import gpytorch
import pytest
import torch
from gpytorch.kernels import (
    GridInterpolationKernel,
    InducingPointKernel,
    LinearKernel,
    Matern52KernelGrad,
    MaternKernel,
    PiecewisePolynomialKernel,
    RBFKernel,
    RFFKernel,
    ScaleKernel,
    SpectralDeltaKernel,
)
from gpytorch.lazy import LazyEvaluatedKernelTensor
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
    "Matern 1/2, two lengthscales": lambda: MaternKernel(nu=0.5, ard_num_dims=2),
    "piecewise polynomial": lambda: PiecewisePolynomialKernel(q=2),
    "piecewise polynomial, two lengthscales": lambda: PiecewisePolynomialKernel(q=2, ard_num_dims=2),
}
kernels = pytest.mark.parametrize("name", KERNELS)


def profile(name, squares):
    """The kernel as a function of squared distances."""
    if name.startswith("RBF"):
        return (-squares / 2).exp()
    # A distance of 0 is a constant, in all derivatives by lengthscales.
    r = torch.where(squares > 0, squares, 1.0).sqrt() * (squares > 0)
    if name.startswith("piecewise"):  # GPyTorch's factor in two dimensions; Rasmussen & Williams, eq. 4.21, have 35 / 3
        return (1 - r).clamp(min=0) ** 6 * (1 + 6 * r + 23 / 3 * r**2)
    order = int(name[7])
    r = math.sqrt(order) * r
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


def test_kernel_of_derivatives_by_its_lengthscale():
    kernel, weights = (
        Matern52KernelGrad().double(),
        torch.randn(36, 36, dtype=D, generator=torch.Generator().manual_seed(0)),
    )

    def of(raw):
        with gpytorch.settings.lazily_evaluate_kernels(False):
            covariance = torch.func.functional_call(kernel, {"raw_lengthscale": raw}, (X,))
        return (covariance.to_dense() * weights).sum()

    def slope(raw):
        return torch.autograd.grad(of(raw.requires_grad_()), raw)[0]

    raw, step = torch.tensor([[0.3]], dtype=D), 1e-5
    with higher_order():
        H = hodiff.hessian_matrix(of, raw)
    close(H, (slope(raw + step) - slope(raw - step)) / (2 * step), rtol=1e-6)


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


FEATURES = {
    "linear": LinearKernel,
    "random Fourier": lambda: RFFKernel(num_samples=5, num_dims=3),
    "spectral delta": lambda: SpectralDeltaKernel(num_dims=3, num_deltas=4),
    "grid": lambda: GridInterpolationKernel(RBFKernel(), grid_size=9, num_dims=3, grid_bounds=[(-2, 2)] * 3),
    "scaled": lambda: ScaleKernel(RFFKernel(num_samples=5, num_dims=3)),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("name", FEATURES)
def test_kernels_of_features_at_equal_points(name, diagonal):
    """GPyTorch takes equal points for one variable."""
    torch.manual_seed(0)
    kernel = FEATURES[name]().double().requires_grad_(False)
    centers = torch.tensor([[0.3, -0.2, 1.0], [-0.4, 0.1, 0.6]], dtype=D)
    weights = torch.eye(2, dtype=D) if diagonal else torch.tensor([[1.0, 0.3], [-0.2, 0.7]], dtype=D)

    def of(x):
        found = kernel(x, centers, diag=diagonal)
        return (found if diagonal else (found.to_dense() * weights)).sum()

    def by_features(x):
        """Products of features of both points, by the formulas of the kernels."""
        base = kernel.base_kernel if name == "scaled" else kernel
        if name == "linear":
            first, second = x, kernel.variance.reshape(()) * centers
        else:
            frequencies = 2 * math.pi * base.Z.mT if name == "spectral delta" else base.randn_weights
            frequencies = frequencies / base.lengthscale.reshape(())
            first, second = (
                torch.cat([torch.cos(y @ frequencies), torch.sin(y @ frequencies)], 1) for y in (x, centers)
            )
            scale = kernel.outputscale if name == "scaled" else 1.0
            second = scale * second / frequencies.shape[1]
        return (weights * (first @ second.mT)).sum()

    def by_differences(x, step=1e-4):
        """The slope of the function itself next to the centers, where GPyTorch's shortcut does not apply."""
        units = step * torch.eye(6, dtype=D).view(6, 2, 3)
        return torch.stack([(of(x + u) - of(x - u)) / (2 * step) for u in units]).view(2, 3)

    with higher_order():
        close(of(centers), of(centers + 1e-12))
        x = centers.clone().requires_grad_()
        (slope,) = torch.autograd.grad(of(x), x)
        torch.testing.assert_close(slope, by_differences(centers), rtol=1e-6, atol=1e-9)
        if name == "grid":
            return
        torch.testing.assert_close(slope, torch.func.grad(by_features)(centers), rtol=1e-9, atol=1e-12)
        expected = hodiff.hessian_matrix(by_features, centers)
        for H in (hodiff.hessian_matrix(of, centers.clone()), torch.func.hessian(of)(centers.clone()).view(6, 6)):
            torch.testing.assert_close(H, expected, rtol=1e-8, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The input matches")
def test_predictions_of_features_at_all_training_points():
    torch.manual_seed(0)
    process = (
        Process(SpectralDeltaKernel(num_dims=2, num_deltas=4), gpytorch.likelihoods.GaussianLikelihood())
        .double()
        .eval()
    )

    def mean(x):
        return process(x).mean.square().sum()

    step = 1e-5
    direction = torch.randn(X.shape, dtype=D, generator=torch.Generator().manual_seed(1))
    with higher_order():
        found = (torch.func.grad(mean)(X.clone()) * direction).sum()
        product = hodiff.hvp(mean, X.clone(), direction)
    ahead, behind = (X + sign * step * direction for sign in (1, -1))
    close(found, (mean(ahead) - mean(behind)) / (2 * step), rtol=1e-6)
    slopes = [torch.autograd.grad(mean(at.requires_grad_()), at)[0] for at in (ahead, behind)]
    close(product, (slopes[0] - slopes[1]) / (2 * step), rtol=1e-5)


INDUCING = torch.tensor([[0.1, 0.2], [0.8, 0.3], [0.4, 0.9]], dtype=D)


def rbf(a, b):
    return (-(a[:, None] - b[None]).square().sum(-1) / 2).exp()


def inducing_kernel():
    base = RBFKernel().double().requires_grad_(False)
    base.lengthscale = 1.0
    return InducingPointKernel(base, INDUCING.clone(), gpytorch.likelihoods.GaussianLikelihood()).double()


def through_inducing_points(x, y, inducing=INDUCING):
    return rbf(x, inducing) @ torch.linalg.solve(rbf(inducing, inducing), rbf(inducing, y))


@pytest.mark.parametrize("name", ["linear", "random Fourier", "inducing points"])
def test_taylor_mode_at_equal_points(name):
    kernel = inducing_kernel().eval() if name == "inducing points" else FEATURES[name]().double().requires_grad_(False)
    centers = torch.tensor([[0.3, 0.5, 1.0], [0.7, 0.6, -0.3]], dtype=D)
    centers = centers[:, :2] if name == "inducing points" else centers

    def of(x):
        return kernel(x.view(centers.shape), centers).to_dense().square().sum()

    x = centers.flatten()
    with higher_order(), gpytorch.settings.sgpr_diagonal_correction(False):
        expected = torch.func.hessian(of)(x)
        close(hodiff.laplacian(of)(x), expected.trace())
        close(hodiff.directional_derivatives(of, x, torch.ones_like(x), order=2)[2], expected.sum())


@pytest.mark.parametrize("diagonal", [False, True])
def test_inducing_points_as_a_function_of_two_points(diagonal):
    kernel, centers = inducing_kernel().eval(), torch.tensor([[0.3, 0.5], [0.7, 0.6]], dtype=D)
    weights = torch.eye(2, dtype=D) if diagonal else torch.tensor([[1.0, 0.3], [-0.2, 0.7]], dtype=D)

    def of(x):
        found = kernel(x, centers, diag=diagonal)
        return (found if diagonal else (found.to_dense() * weights)).sum()

    def formula(x):
        return (weights * through_inducing_points(x, centers)).sum()

    with higher_order():
        apart = centers + 0.1
        close(hodiff.hessian_matrix(of, apart), hodiff.hessian_matrix(formula, apart))
        with pytest.raises(hodiff.InputError, match="InducingPointKernel: expected different points"):
            hodiff.hessian_matrix(of, centers.clone())
        with gpytorch.settings.sgpr_diagonal_correction(False):
            close(of(centers.clone()), formula(centers))
            for H in (hodiff.hessian_matrix(of, centers.clone()), torch.func.hessian(of)(centers.clone()).view(4, 4)):
                close(H, hodiff.hessian_matrix(formula, centers))
        # Equal points of a single variable have a derivative.
        variances = hodiff.hessian_matrix(lambda x: kernel(x).to_dense().diagonal().sum(), centers.clone())
        assert variances.abs().max() < 1e-12


def test_evidence_by_inducing_points():
    evidence = Evidence(inducing_kernel())
    parameters = parameters_of(evidence)
    own = ("inducing_points", "raw_outputscale", "raw_noise")
    chosen = {name: each for name, each in parameters.items() if name.endswith(own)}

    def loss(p):
        return torch.func.functional_call(evidence, {**parameters, **p}, ())

    def dense(p):
        """The log marginal likelihood, and the trace that the kernel adds, with the noise of its own likelihood."""
        u, outer = (next(each for key, each in p.items() if key.endswith(name)) for name in own[:2])
        noises = {key: 1e-4 + torch.nn.functional.softplus(each) for key, each in p.items() if key.endswith(own[2])}
        first, last = (noises[key] for key in sorted(noises, key=lambda key: "base_kernel" in key))
        Q = through_inducing_points(X, X, u)
        K = torch.nn.functional.softplus(outer) * Q + first * torch.eye(COUNT, dtype=D)
        L = torch.linalg.cholesky(K)
        white = torch.linalg.solve_triangular(L, Y[:, None], upper=False)
        likelihood = -white.square().sum() / 2 - L.diagonal().log().sum() - COUNT / 2 * math.log(2 * math.pi)
        return likelihood - ((1 - Q.diagonal()) / last).sum() / 2

    with higher_order():
        close(loss(chosen), dense(chosen))
        close(hodiff.hessian_matrix(loss, chosen), hodiff.hessian_matrix(dense, chosen), rtol=1e-7)


@pytest.mark.filterwarnings("ignore:The input matches")
def test_predictions_by_inducing_points():
    kernel = inducing_kernel()
    process = Process(kernel, kernel.likelihood)
    process.covar_module = kernel
    process.double().eval()
    points = torch.tensor([[0.3, 0.5], [0.7, 0.6], [0.9, 0.1]], dtype=D)
    direction = torch.randn(points.shape, dtype=D, generator=torch.Generator().manual_seed(0))

    def mean_and_variance(x):
        found = process(x)
        return found.mean.sum() + found.covariance_matrix.sum()

    def slope(x):
        return torch.autograd.grad(mean_and_variance(x.requires_grad_()), x)[0]

    with higher_order():
        found = hodiff.hvp(mean_and_variance, points, direction)
        with pytest.raises(hodiff.InputError, match="InducingPointKernel: expected different points"):
            hodiff.hvp(mean_and_variance, X, torch.ones_like(X))
    step = 1e-5 * direction
    close(found, (slope(points + step) - slope(points - step)) / 2e-5, rtol=1e-6)


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
    for replaced in (InducingPointKernel._get_covariance, LazyEvaluatedKernelTensor._getitem):
        assert replaced.__module__.startswith("gpytorch")
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
