"""Tests of Taylor mode through layers of other packages, against Hessians by products."""

import pytest
import torch
from mpmath_series import D
from torch import distributions, nn

import hodiff

EDGES = torch.tensor([[0, 1, 2, 3, 0, 2], [1, 2, 3, 0, 2, 1]])


def network(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs))


CONVOLUTIONS = {
    "GCNConv": lambda g: g.GCNConv(2, 2),
    "SAGEConv": lambda g: g.SAGEConv(2, 2),
    "GATConv": lambda g: g.GATConv(2, 2, heads=2),
    "GATv2Conv": lambda g: g.GATv2Conv(2, 2),
    "GINConv": lambda g: g.GINConv(network(2, 2)),
    "GraphConv": lambda g: g.GraphConv(2, 2),
    "ChebConv": lambda g: g.ChebConv(2, 2, K=3),
    "TAGConv": lambda g: g.TAGConv(2, 2),
    "SGConv": lambda g: g.SGConv(2, 2, K=2),
    "ARMAConv": lambda g: g.ARMAConv(2, 2),
    "TransformerConv": lambda g: g.TransformerConv(2, 2),
    "EdgeConv": lambda g: g.EdgeConv(network(4, 2)),
    "FeaStConv": lambda g: g.FeaStConv(2, 2),
    "GatedGraphConv": lambda g: g.GatedGraphConv(2, 2),
    "ResGatedGraphConv": lambda g: g.ResGatedGraphConv(2, 2),
    "GENConv": lambda g: g.GENConv(2, 2),
    "APPNP": lambda g: g.APPNP(2, 0.1),
    "ClusterGCNConv": lambda g: g.ClusterGCNConv(2, 2),
    "PNAConv": lambda g: g.PNAConv(2, 2, ["mean", "max", "std"], ["identity"], deg=torch.tensor([0, 2, 2])),
    "SuperGATConv": lambda g: g.SuperGATConv(2, 2),
    "FiLMConv": lambda g: g.FiLMConv(2, 2),
}


def assert_laplacian_matches(f, x):
    torch.testing.assert_close(hodiff.laplacian(f)(x), hodiff.hessian_matrix(f, x).trace(), rtol=1e-8, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_torch_geometric_convolutions_match(name):
    layers = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(0)
    layer = CONVOLUTIONS[name](layers).to(D).eval()
    assert_laplacian_matches(lambda x: layer(x, EDGES).tanh().square().sum(), torch.randn(4, 2, dtype=D))


@pytest.mark.slow
def test_schnet_matches():
    layers = pytest.importorskip("torch_geometric.nn")

    def all_pairs(positions, batch):
        edges = (1 - torch.eye(len(positions))).nonzero().t()
        return edges, (positions[edges[0]] - positions[edges[1]]).norm(dim=-1)

    torch.manual_seed(0)
    sizes = {"hidden_channels": 4, "num_filters": 4, "num_interactions": 2, "num_gaussians": 5}
    model = layers.SchNet(**sizes, interaction_graph=all_pairs).to(D)
    assert_laplacian_matches(lambda x: model(torch.tensor([6, 1, 8]), x).sum(), torch.randn(3, 3, dtype=D))


@pytest.mark.slow
def test_e3nn_layers_match():
    o3 = pytest.importorskip("e3nn.o3")
    from e3nn.nn import Gate

    torch.manual_seed(0)
    irreps = o3.Irreps("2x0e+1x1o")
    product = o3.FullyConnectedTensorProduct(irreps, "1x0e+1x1o+1x2e", irreps).to(D)
    gate = Gate("1x0e", [torch.tanh], "1x0e", [torch.sigmoid], "1x1o").to(D)

    def f(x):
        features = torch.cat([x[:, :2], x], 1)
        return gate(product(features, o3.spherical_harmonics("0e+1o+2e", x, normalize=True))).square().sum()

    assert_laplacian_matches(f, torch.randn(2, 3, dtype=D))


def test_torchdiffeq_with_fixed_steps_matches():
    torchdiffeq = pytest.importorskip("torchdiffeq")
    times = torch.linspace(0, 1, 3, dtype=D)
    assert_laplacian_matches(
        lambda x: torchdiffeq.odeint(lambda t, y: -(y**3), x, times, method="rk4")[-1].sum(), torch.ones(2, dtype=D)
    )


POSITIVE = torch.tensor([0.4, 1.3, 0.7], dtype=D)
DENSITIES = {
    "Normal": lambda x: distributions.Normal(x, x.exp()).log_prob(POSITIVE),
    "of the sample": lambda x: distributions.Normal(POSITIVE, POSITIVE).log_prob(x),
    "MultivariateNormal": lambda x: distributions.MultivariateNormal(x, torch.diag(x.exp())).log_prob(POSITIVE),
    "LowRank": lambda x: distributions.LowRankMultivariateNormal(x, POSITIVE[:, None], x.exp()).log_prob(POSITIVE),
    "Gamma": lambda x: distributions.Gamma(x.exp(), x.exp()).log_prob(POSITIVE),
    "Beta": lambda x: distributions.Beta(x.exp(), x.exp()).log_prob(POSITIVE.sigmoid()),
    "Dirichlet": lambda x: distributions.Dirichlet(x.exp()).log_prob(POSITIVE.softmax(0)),
    "StudentT": lambda x: distributions.StudentT(x.exp(), x).log_prob(POSITIVE),
    "VonMises": lambda x: distributions.VonMises(x, x.exp()).log_prob(POSITIVE),
    "Weibull": lambda x: distributions.Weibull(x.exp(), x.exp()).log_prob(POSITIVE),
    "Categorical": lambda x: distributions.Categorical(logits=x).log_prob(torch.tensor(1)),
    "Bernoulli": lambda x: distributions.Bernoulli(logits=x).entropy(),
    "transformed": lambda x: distributions.LogNormal(x, x.exp()).log_prob(POSITIVE),
    "Independent": lambda x: distributions.Independent(distributions.Normal(x, x.exp()), 1).log_prob(POSITIVE),
    "mixture": lambda x: distributions.MixtureSameFamily(
        distributions.Categorical(logits=POSITIVE), distributions.Normal(x, 1.0)
    ).log_prob(POSITIVE[0]),
    "divergence": lambda x: distributions.kl_divergence(
        distributions.Normal(x, x.exp()), distributions.Normal(POSITIVE, 1.0)
    ),
    "reparametrized": lambda x: distributions.Normal(x, x.exp()).icdf(POSITIVE.sigmoid()) ** 2,
}


@pytest.mark.parametrize("name", DENSITIES)
def test_torch_distributions_match(name):
    assert_laplacian_matches(lambda x: DENSITIES[name](x).sum(), torch.tensor([0.3, -0.8, 0.5], dtype=D))


@pytest.mark.slow
def test_adaptive_torchdiffeq_is_rejected_with_a_remedy():
    solver = pytest.importorskip("torchdiffeq")
    x, t = torch.tensor([0.5, 1.0], dtype=D), torch.tensor([0.0, 1.0], dtype=D)

    def f(x):
        return solver.odeint(lambda t, y: -(y**3), x, t, method="dopri5")[-1].square().sum()

    with pytest.raises(hodiff.InputError, match=r"jet: \.data .* adaptive solvers, use hodiff\.hessian"):
        hodiff.laplacian(f)(x)


@pytest.mark.slow
def test_legacy_function_of_gpytorch_is_named():
    kernels = pytest.importorskip("gpytorch.kernels")
    kernel, x = kernels.RBFKernel().to(D), torch.ones(3, 2, dtype=D)
    with pytest.raises(hodiff.RouteError, match=r"RBFCovariance: expected an autograd\.Function with setup_context"):
        hodiff.laplacian(lambda p: kernel(p, x).to_dense().sum())(torch.zeros(1, 2, dtype=D))
