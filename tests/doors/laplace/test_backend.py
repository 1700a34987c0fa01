"""hodiff's back end of laplace-torch, against Gauss-Newton matrices by torch alone and its own back ends."""

import pytest
import torch
from doors.laplace.models import MODELS, draw, gauss_newton, jacobians
from doors.pages import run_example
from laplace import FunctionalLaplace, Laplace
from laplace.curvature import AsdlGGN, BackPackGGN, CurvlinopsEF, CurvlinopsGGN, CurvlinopsHessian
from torch import nn
from torch.nn.functional import cross_entropy, huber_loss, mse_loss, one_hot
from torch.utils.data import DataLoader, TensorDataset

import hodiff
from hodiff.doors.laplace import Backend

LIKELIHOODS = ("classification", "regression")
models = pytest.mark.parametrize("name", MODELS)
likelihoods = pytest.mark.parametrize("likelihood", LIKELIHOODS)


def close(a, b, rtol=1e-9):
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * b.abs().max().item())


@models
@likelihoods
def test_full_diagonal_and_jacobians(name, likelihood):
    model, inputs, targets = draw(name, likelihood)
    expected = gauss_newton(model, inputs, likelihood)
    backend = Backend(model, likelihood)
    loss, H = backend.full(inputs, targets)
    close(H, expected)
    close(backend.diag(inputs, targets)[1], expected.diagonal())
    f = model(inputs)
    half = (
        mse_loss(f, targets, reduction="sum") / 2
        if likelihood == "regression"
        else cross_entropy(f, targets, reduction="sum")
    )
    close(loss, half.detach())
    J, outputs = backend.jacobians(inputs)
    close(J, jacobians(model, inputs))
    close(outputs, f.detach())


@models
def test_diagonal_in_parts_of_a_batch(name, monkeypatch):
    model, inputs, targets = draw(name)
    expected = gauss_newton(model, inputs).diagonal()
    monkeypatch.setattr("hodiff.doors.laplace.AT_ONCE", 5 * 3 * sum(p.numel() for p in model.parameters()))
    close(Backend(model, "classification").diag(inputs, targets)[1], expected)


@pytest.mark.parametrize("name", ["Perceptron", "Attention"])
@likelihoods
def test_hessian(name, likelihood):
    model, inputs, targets = draw(name, likelihood)
    parameters = [p.detach() for p in model.parameters()]
    sizes, names = [p.numel() for p in parameters], [each for each, _ in model.named_parameters()]

    def loss(x):
        point = {n: part.view_as(p) for n, part, p in zip(names, x.split(sizes), parameters, strict=True)}
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            f = torch.func.functional_call(model, point, (inputs,))
        return (
            mse_loss(f, targets, reduction="sum") / 2
            if likelihood == "regression"
            else cross_entropy(f, targets, reduction="sum")
        )

    x = torch.cat([p.reshape(-1) for p in parameters]).requires_grad_()
    (slope,) = torch.autograd.grad(loss(x), x, create_graph=True)
    expected = torch.stack([torch.autograd.grad(each, x, retain_graph=True)[0] for each in slope])
    backend = Backend(model, likelihood, curvature="hessian")
    close(backend.full(inputs, targets)[1], expected)
    close(backend.diag(inputs, targets)[1], expected.diagonal())
    with pytest.raises(hodiff.InputError, match="Kronecker factors"):
        backend.kron(inputs, targets, N=12)


@likelihoods
def test_empirical_fisher_is_that_of_the_likelihood(likelihood):
    model, inputs, targets = draw("Attention", likelihood)
    p = model(inputs).detach()
    residual = p - targets if likelihood == "regression" else p.softmax(1) - nn.functional.one_hot(targets, 3)
    gradients = torch.einsum("nc,ncp->np", residual, jacobians(model, inputs))
    expected = gradients.T @ gradients
    backend = Backend(model, likelihood, curvature="empirical-fisher")
    close(backend.full(inputs, targets)[1], expected)
    close(backend.diag(inputs, targets)[1], expected.diagonal())


@likelihoods
def test_sampled_fisher_is_unbiased(likelihood):
    model, inputs, targets = draw("Perceptron", likelihood)
    expected = gauss_newton(model, inputs, likelihood)
    backend = Backend(model, likelihood, curvature="fisher", samples=4000)
    for found, exact in (
        (backend.full(inputs, targets)[1], expected),
        (backend.diag(inputs, targets)[1], expected.diagonal()),
    ):
        assert (found - exact).norm() < 0.1 * exact.norm()


# In laplace-torch 0.3, curvlinops and BackPACK have K-FAC with exact gradients for both likelihoods.
@pytest.mark.parametrize("name", ["Perceptron", "Convolutions"])
@likelihoods
def test_kronecker_factors_are_those_of_curvlinops(name, likelihood):
    model, inputs, targets = draw(name, likelihood)
    if name == "Convolutions":
        # curvlinops has no factors for the norm.
        model.layers[2] = nn.Identity()
    _, ours = Backend(model, likelihood).kron(inputs, targets, N=30)
    _, theirs = CurvlinopsGGN(model, likelihood).kron(inputs, targets, N=30)
    close(ours.to_matrix(), theirs.to_matrix())


WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
LOSSES = {
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.2, reduction="sum"),
    "weighted": nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"),
    "smoothed and weighted": nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2, reduction="sum"),
    "a function": lambda f, y: cross_entropy(f, y, reduction="sum"),
    "Huber": lambda f, y: huber_loss(f, 3 * one_hot(y, 3).double(), reduction="sum"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_structures_of_another_loss(name):
    model, inputs, targets = draw("Attention")
    loss, J, f = LOSSES[name], jacobians(model, inputs), model(inputs).detach()
    H = torch.stack([torch.func.hessian(loss)(one[None], y[None])[0, :, 0] for one, y in zip(f, targets, strict=True)])
    residuals = torch.func.grad(loss)(f, targets)
    gradients = torch.einsum("nc,ncp->np", residuals, J)
    matrices = {
        "gauss-newton": torch.einsum("ncp,nck,nkq->pq", J, H, J),
        "empirical-fisher": gradients.T @ gradients,
    }
    for curvature, expected in matrices.items():
        backend = Backend(model, "classification", curvature=curvature)
        backend.lossfunc = loss
        close(backend.full(inputs, targets)[1], expected)
        close(backend.diag(inputs, targets)[1], expected.diagonal())
        start = 0
        for p, factors in zip(model.parameters(), backend.kron(inputs, targets, N=12)[1].kfacs, strict=True):
            # K-FAC is exact for the last bias; other vectors have exact blocks.
            if p.dim() == 1:
                close(factors[0], expected[start : start + len(p), start : start + len(p)])
            start += p.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kronecker_factors_in_16_bits_are_in_float32(dtype):
    """laplace-torch ends the process if it cannot factorize them."""
    model, inputs, targets = draw("Attention")
    _, exact = Backend(model, "classification").kron(inputs, targets, N=12)
    data = DataLoader(TensorDataset(inputs.to(dtype), targets), batch_size=12)
    la = Laplace(model.to(dtype), "classification", "all", "kron", backend=Backend)
    la.fit(data)
    assert {factor.dtype for factors in la.H_facs.kfacs for factor in factors} == {torch.float32}
    assert (la.H_facs.to_matrix() - exact.to_matrix()).norm() < 0.05 * exact.to_matrix().norm()
    assert torch.isfinite(la.log_marginal_likelihood())


class Words(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4, **options), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.table(x).tanh().mean(1))


@pytest.mark.parametrize("name", ["Perceptron", "Words"])
def test_kronecker_factors_over_unequal_batches_are_those_of_all_data(name):
    model, inputs, targets = draw("Perceptron")
    if name == "Words":
        model, inputs = Words().double().eval(), torch.randint(6, (12, 5))
    la = Laplace(model, "classification", "all", "kron", backend=Backend)
    la.fit(DataLoader(TensorDataset(inputs, targets), batch_size=5))
    x = {path: p.detach() for path, p in model.named_parameters()}
    loss = nn.CrossEntropyLoss(reduction="sum")
    expected = hodiff.KFACOperator(model, loss, x, inputs, targets, bias="separate", reduction="sum")
    close(la.H_facs.to_matrix(), expected.to_dense())


def test_embeddings_with_max_norm():
    torch.manual_seed(0)
    words, targets, model = torch.randint(6, (12, 5)), torch.randint(3, (12,)), Words(max_norm=0.5).double().eval()
    with torch.no_grad():
        model(words)  # rescales the rows
    plain = Words().double()
    plain.load_state_dict(model.state_dict())
    backend, expected = Backend(model, "classification"), gauss_newton(plain, words)
    close(backend.full(words, targets)[1], expected)
    close(backend.diag(words, targets)[1], expected.diagonal())
    indices = torch.tensor([0, 7, 30])
    backend = Backend(model, "classification", subnetwork_indices=indices)
    close(backend.full(words, targets)[1], expected[indices][:, indices])


def by_pitsianis(block, p, q):
    """The nearest Kronecker product, by singular vectors of the rearranged block."""
    rearranged = block.view(p, q, p, q).permute(0, 2, 1, 3).reshape(p * p, q * q)
    U, S, V = torch.linalg.svd(rearranged)
    return torch.kron((S[0] * U[:, 0]).view(p, p), V[0].view(q, q))


@pytest.mark.parametrize("name", ["Attention", "Recurrent", "Tied"])
def test_kronecker_products_of_other_parameters_are_the_nearest(name):
    model, inputs, targets = draw(name)
    H = gauss_newton(model, inputs)
    _, kron = Backend(model, "classification").kron(inputs, targets, N=12)
    start, nearest = 0, 0
    for (path, p), factors in zip(model.named_parameters(), kron.kfacs, strict=True):
        block = H[start : start + p.numel(), start : start + p.numel()]
        start += p.numel()
        if path == "head.weight":
            # K-FAC, which is another approximation.
            assert not torch.allclose(torch.kron(*factors), by_pitsianis(block, 3, len(p[0])), rtol=0.01)
            continue
        if p.dim() == 1:
            close(factors[0], block)
        else:
            nearest += 1
            close(torch.kron(*factors), by_pitsianis(block, len(p), p[0].numel()), rtol=1e-5)
            assert torch.linalg.eigvalsh(factors[0]).min() > -1e-9
    assert nearest


@models
@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_predictions_of_all_models(name, structure):
    """Fit over batches, with the evidence and predictions of the exact matrix."""
    model, inputs, targets = draw(name)
    la = Laplace(model, "classification", "all", structure, prior_precision=2.0, backend=Backend)
    la.fit(DataLoader(TensorDataset(inputs, targets), batch_size=5))
    exact = Laplace(model, "classification", "all", "full", prior_precision=2.0)
    exact.H, exact.loss, exact.n_data, exact.n_outputs = gauss_newton(model, inputs), la.loss, 12, 3
    exact.mean = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    if structure == "diag":
        exact.H = exact.H.diagonal().diag()
    tolerance = 1e-7 if structure != "kron" else 0.2
    close(la.log_marginal_likelihood(), exact.log_marginal_likelihood(), rtol=tolerance)
    J = jacobians(model, inputs)
    expected = torch.einsum("ncp,pq,nkq->nck", J, exact.posterior_covariance, J)
    close(la.functional_variance(J), expected, rtol=1e-7 if structure != "kron" else 1.0)
    assert torch.isfinite(la(inputs, pred_type="glm", link_approx="probit")).all()


@pytest.mark.parametrize(
    ("structure", "backends"), [("full", [CurvlinopsGGN]), ("diag", [CurvlinopsGGN, AsdlGGN, BackPackGGN])]
)
def test_own_back_ends_agree_where_they_run(structure, backends):
    model, inputs, targets = draw("Perceptron")
    loss, H = getattr(Backend(model, "classification"), structure)(inputs, targets)
    for backend in backends:
        # They leave hooks on the modules.
        own = draw("Perceptron")[0]
        its_loss, theirs = getattr(backend(own.layers, "classification"), structure)(inputs, targets, N=12)
        close(H, theirs.detach(), rtol=1e-6)
        close(loss, its_loss)


def test_hessian_of_curvlinops():
    model, inputs, targets = draw("Perceptron")
    ours = Backend(model, "classification", curvature="hessian").full(inputs, targets)[1]
    # It multiplies a unit matrix in float32.
    close(ours, CurvlinopsHessian(model, "classification").full(inputs, targets)[1], rtol=1e-6)


def test_empirical_fisher_of_curvlinops():
    model, inputs, targets = draw("Perceptron")
    backend = Backend(model, "classification", curvature="empirical-fisher")
    theirs = CurvlinopsEF(model, "classification")
    close(backend.full(inputs, targets)[1], theirs.full(inputs, targets)[1], rtol=1e-6)
    close(backend.kron(inputs, targets, N=20)[1].to_matrix(), theirs.kron(inputs, targets, N=20)[1].to_matrix())


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_last_layer(structure):
    model, inputs, targets = draw("Attention")
    fitted = []
    for backend in (Backend, CurvlinopsGGN):
        la = Laplace(model, "classification", "last_layer", structure, backend=backend)
        la.fit(DataLoader(TensorDataset(inputs, targets), batch_size=5))
        fitted.append(la.posterior_precision)
    ours, theirs = (each.to_matrix() if structure == "kron" else each for each in fitted)
    close(ours, theirs.detach(), rtol=1e-6)


def test_subnetwork():
    model, inputs, targets = draw("Recurrent")
    indices = torch.tensor([3, 10, 50])
    expected = gauss_newton(model, inputs)
    backend = Backend(model, "classification", subnetwork_indices=indices)
    close(backend.full(inputs, targets)[1], expected[indices][:, indices])
    close(backend.diag(inputs, targets)[1], expected.diagonal()[indices])
    close(backend.jacobians(inputs)[0], jacobians(model, inputs)[:, :, indices])


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_subnetwork_of_laplace(structure):
    model, inputs, targets = draw("Recurrent")
    indices = torch.tensor([3, 10, 50])
    options = {"subnetwork_indices": indices, "backend": Backend}
    la = Laplace(model, "classification", "subnetwork", structure, **options)
    la.fit(DataLoader(TensorDataset(inputs, targets), batch_size=5))
    expected = gauss_newton(model, inputs)[indices][:, indices]
    close(la.H, expected if structure == "full" else expected.diagonal())
    assert torch.isfinite(la(inputs)).all()


def test_functional_laplace():
    model, inputs, targets = draw("Attention", "regression")
    data, variances = DataLoader(TensorDataset(inputs, targets), batch_size=5), []
    for backend in (Backend, CurvlinopsGGN):
        la = FunctionalLaplace(model, "regression", n_subset=12, backend=CurvlinopsGGN)
        la._backend_cls = backend
        la.fit(data)
        assert type(la.backend) is backend
        variances.append(la(inputs)[1])
    close(*variances)


def test_low_rank(monkeypatch):
    model, inputs, targets = draw("Recurrent")
    values, vectors = torch.linalg.eigh(gauss_newton(model, inputs))
    # The class refuses to start without an old package that it does not need.
    monkeypatch.setattr("laplace.baselaplace.find_spec", lambda _: True)
    la = Laplace(model, "classification", "all", "lowrank", backend=Backend, backend_kwargs={"rank": 4})
    la.fit(DataLoader(TensorDataset(inputs, targets), batch_size=5))
    U, found = la.H
    close(found, values[-4:], rtol=1e-6)
    close(U @ found.diag() @ U.T, vectors[:, -4:] @ values[-4:].diag() @ vectors[:, -4:].T, rtol=1e-5)
    assert torch.isfinite(la.log_marginal_likelihood())


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_outputs_of_tokens(structure):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x)

    _, inputs, _ = draw("Perceptron")
    data = DataLoader(TensorDataset(inputs, torch.randn(12, 5, 3).double()), batch_size=5)
    la = Laplace(Tokens().double(), "regression", "all", structure, backend=Backend)
    la.fit(data)
    assert la(inputs, pred_type="nn", link_approx="mc")[0].shape == (12, 5, 3)
    with pytest.raises(hodiff.InputError, match=r"expected outputs \(examples, outputs\)"):
        la(inputs)


def test_jacobians_that_are_differentiated():
    model, inputs, _ = draw("Attention")
    inputs.requires_grad_()
    backend = Backend(model, "classification")
    J, _ = backend.jacobians(inputs, enable_backprop=True)
    (slope,) = torch.autograd.grad(J.square().sum(), inputs)
    chosen = torch.arange(3).expand(12, 3)
    J, _ = backend.selected_output_jacobians(inputs, chosen, enable_backprop=True)
    close(torch.autograd.grad(J.square().sum(), inputs)[0], slope)
    direction, step = torch.randn_like(inputs), 1e-5
    ends = [jacobians(model, inputs.detach() + sign * step * direction).square().sum() for sign in (1, -1)]
    close((slope * direction).sum(), (ends[0] - ends[1]) / (2 * step), rtol=1e-6)


def test_batches_that_are_dicts():
    class Keyed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = draw("Perceptron")[0]

        def forward(self, batch):
            return self.net(batch["input_ids"])

    model, inputs, targets = draw("Perceptron")
    batch = {"input_ids": inputs, "labels": targets}
    backend = Backend(Keyed(), "classification")
    expected = gauss_newton(model, inputs)
    close(backend.full(batch, targets)[1], expected)
    close(backend.diag(batch, targets)[1], expected.diagonal())
    close(
        backend.kron(batch, targets, N=12)[1].to_matrix(),
        Backend(model, "classification").kron(inputs, targets, N=12)[1].to_matrix(),
    )


def test_diagonal_of_examples_that_influence_each_other():
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 3), nn.BatchNorm1d(3)).double()
    _, inputs, targets = draw("Perceptron")
    backend = Backend(model, "classification")
    close(backend.diag(inputs, targets)[1], backend.full(inputs, targets)[1].diagonal())
    with pytest.raises(hodiff.InputError, match=r"do not depend on other examples .* call model.eval\(\)"):
        backend.kron(inputs, targets, N=12)


@pytest.mark.parametrize("curvature", ["gauss-newton", "fisher", "empirical-fisher", "hessian"])
def test_buffers_of_models_in_training_mode_do_not_change(curvature):
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    _, inputs, targets = draw("Perceptron")
    inputs, before = inputs[:, 0], {name: buffer.clone() for name, buffer in model.named_buffers()}
    backend = Backend(model, "classification", curvature=curvature)
    backend.full(inputs, targets)
    backend.diag(inputs, targets)
    backend.eig_lowrank([(inputs, targets)])
    backend.jacobians(inputs)
    backend.jacobians(inputs, enable_backprop=True)
    with pytest.raises(hodiff.InputError):
        backend.kron(inputs, targets, N=12)
    assert model.training
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])


def test_sharing_of_tokens():
    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x).mean(1)

    _, inputs, targets = draw("Perceptron", "regression")
    model = Averaged().double()
    given = Backend(model, "regression").kron(inputs, targets, N=12, kfac_approx="reduce")[1]
    close(given.to_matrix(), Backend(model, "regression", sharing="reduce").kron(inputs, targets, N=12)[1].to_matrix())
    # A linear model with a squared loss, for which "reduce" is exact.
    H = gauss_newton(model, inputs, "regression")
    close(given.to_matrix()[:12, :12], H[:12, :12])
    close(given.to_matrix()[12:, 12:], H[12:, 12:])


def test_blocks_of_a_convolution():
    """Blocks of biases are exact with "reduce"; "expand" adds squares of the pixels' gradients, which may cancel."""
    torch.manual_seed(1)
    layers = nn.Conv1d(2, 3, 3, dilation=2), nn.ReLU(), nn.GroupNorm(3, 3), nn.Flatten(), nn.Linear(9, 3)
    model = nn.Sequential(*layers).double()
    inputs, targets = torch.randn(23, 2, 7).double(), torch.randint(3, (23,))
    H = gauss_newton(model, inputs)
    weight, bias = H[:18, :18], H[18:21, 18:21]
    reduced, expanded = (
        Backend(model, "classification", sharing=sharing).kron(inputs, targets, N=23)[1].kfacs[:2]
        for sharing in ("reduce", "expand")
    )
    close(reduced[1][0], bias)
    assert torch.kron(*reduced[0]).norm() < 0.2 * weight.norm()
    assert expanded[1][0].norm() > 4 * bias.norm()


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_samples_of_a_call(structure):
    """The number of a call is that of the back end, for all parameters: K-FAC's, and those of other blocks."""
    model, inputs, targets = draw("Attention")

    def sampled(samples, **options):
        backend = Backend(model, "classification", curvature="fisher", samples=samples)
        found = getattr(backend, structure)(inputs, targets, N=12, **options)[1]
        return found.to_matrix() if structure == "kron" else found

    assert torch.equal(sampled(7, mc_samples=5), sampled(5))
    assert not torch.equal(sampled(7), sampled(5))


def test_errors():
    model, inputs, targets = draw("Perceptron")
    for structure in ("full", "diag", "kron"):
        with pytest.raises(hodiff.InputError, match="without effect on 'gauss-newton', got mc_samples"):
            getattr(Backend(model, "classification"), structure)(inputs, targets, N=12, mc_samples=3)
        with pytest.raises(hodiff.InputError, match="got batch_size_fn"):
            getattr(Backend(model, "classification"), structure)(inputs, targets, N=12, batch_size_fn=len)
        with pytest.raises(hodiff.InputError, match="mc_samples"):
            getattr(Backend(model, "classification", curvature="fisher"), structure)(inputs, targets, 12, mc_samples=0)
    with pytest.raises(hodiff.InputError, match="curvature: expected"):
        Backend(model, "classification", curvature="ggn")
    with pytest.raises(hodiff.InputError, match="rank"):
        Backend(model, "classification", rank=0)
    tokens = nn.Linear(4, 3).double()
    with pytest.raises(hodiff.InputError, match="outputs"):
        Backend(tokens, "regression").jacobians(inputs)


def test_example_of_the_page():
    probabilities = run_example("guides/laplace.md", "probabilities = la(")["probabilities"].max(1).values
    assert probabilities[0] > 0.9
