"""Scientific models: graphs, differential equations, Gaussian processes, symmetries, and inner gradients."""

import torch
from models.specimen import Architecture, Built, noise
from torch import nn

MENDED = ("HD410",)
EDGES = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 4, 4, 0], [1, 0, 2, 1, 3, 2, 4, 3, 0, 4]])


class GraphNetwork(nn.Module):
    def __init__(self, layer, heads):
        super().__init__()
        options = {"heads": heads} if heads else {}
        self.first, self.second = layer(6, 4, **options), layer(4 * (heads or 1), 3)

    def forward(self, x, edges):
        return self.second(torch.tanh(self.first(x, edges)), edges)


def graph(name, heads=0):
    def build():
        import torch_geometric.nn

        return Built(GraphNetwork(getattr(torch_geometric.nn, name), heads), (noise(5, 6), EDGES))

    return build


class Flow(nn.Module):
    """The solution of a differential equation whose right-hand side is a network."""

    def __init__(self, method, **tolerances):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
        self.options = {"method": method, **tolerances}

    def field(self, t, y):
        return self.network(y) - 0.1 * y

    def forward(self, y):
        import torchdiffeq

        times = torch.linspace(0, 1, 4, dtype=y.dtype)
        return torchdiffeq.odeint(self.field, y, times, **self.options)[-1]


def runge_kutta():
    return Built(Flow("rk4"), (noise(2, 3),))


def dormand_prince():
    # The adaptive steps are chosen without gradients, so derivatives are as accurate as the tolerance.
    return Built(Flow("dopri5", rtol=1e-10, atol=1e-12), (noise(2, 3),))


def gaussian_process():
    import gpytorch

    points = torch.linspace(0, 1, 7)
    values = torch.sin(6 * points)

    class Process(gpytorch.models.ExactGP):
        def __init__(self, likelihood):
            super().__init__(points, values, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    class Evidence(nn.Module):
        """The log marginal likelihood of the data."""

        def __init__(self):
            super().__init__()
            self.process = Process(gpytorch.likelihoods.GaussianLikelihood())

        def forward(self, x):
            self.process.train()
            self.process.set_train_data(x, values.to(x.dtype), strict=False)
            evidence = gpytorch.mlls.ExactMarginalLogLikelihood(self.process.likelihood, self.process)
            return evidence(self.process(x), values.to(x.dtype))

    return Built(Evidence(), (points,))


def equivariant():
    from e3nn import o3

    class Network(nn.Module):
        """A network that is invariant to rotations of the points."""

        def __init__(self):
            super().__init__()
            self.harmonics = o3.Irreps("1x0e + 1x1o + 1x2e")
            self.embedding = nn.Linear(1, 4)
            self.product = o3.FullyConnectedTensorProduct("4x0e", self.harmonics, "3x0e + 2x1o")
            self.head = o3.Linear("3x0e + 2x1o", "1x0e")

        def forward(self, r):
            directions = o3.spherical_harmonics(self.harmonics, r, normalize=True, normalization="component")
            lengths = torch.tanh(self.embedding(r.norm(dim=-1, keepdim=True)))
            return self.head(self.product(lengths, directions)).sum()

    return Built(Network(), (noise(4, 3),))


def network(inputs, outputs=1):
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


class Residual(nn.Module):
    """The residual of Burgers' equation, with inner gradients."""

    def __init__(self):
        super().__init__()
        self.network = network(2)

    def forward(self, x):
        x = x.requires_grad_()
        u = self.network(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (curvature,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
        return slope[:, 1:] + u * slope[:, :1] - curvature[:, :1]


class FunctionalResidual(nn.Module):
    """The residual of Burgers' equation by torch.func."""

    def __init__(self):
        super().__init__()
        self.network = network(2)

    def forward(self, x):
        def u(point):
            return self.network(point)[0]

        def residual(point):
            slope, curvature = torch.func.grad(u)(point), torch.func.hessian(u)(point)
            return slope[1] + u(point) * slope[0] - curvature[0, 0]

        return torch.func.vmap(residual)(x)


class Penalized(nn.Module):
    """The loss of a Wasserstein critic with a gradient penalty."""

    def __init__(self):
        super().__init__()
        layers = nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 1)
        self.network = nn.Sequential(*layers)

    def forward(self, real, fake):
        mixed = (0.3 * real + 0.7 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.network(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        return self.network(fake).mean() - self.network(real).mean() + 10 * penalty


class Forces(nn.Module):
    """The negative gradient of an energy of distances."""

    def __init__(self):
        super().__init__()
        self.network = network(6)

    def forward(self, positions):
        positions = positions.requires_grad_()
        energy = self.network(torch.exp(-torch.pdist(positions))).sum()
        return -torch.autograd.grad(energy, positions, create_graph=True)[0]


class SpectralLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 3, dtype=torch.complex64) / 4)
        self.skip = nn.Conv1d(4, 4, 1)

    def forward(self, x):
        low = torch.einsum("bif,iof->bof", torch.fft.rfft(x)[..., :3], self.weight)
        return nn.functional.gelu(torch.fft.irfft(low, n=x.shape[-1]) + self.skip(x))


def fourier_operator():
    layers = nn.Conv1d(1, 4, 1), SpectralLayer(), SpectralLayer(), nn.Conv1d(4, 1, 1)
    return Built(nn.Sequential(*layers), (noise(2, 1, 10),))


class Couplings(nn.Module):
    """The log density of a normalizing flow of affine couplings."""

    def __init__(self):
        super().__init__()
        self.networks = nn.ModuleList(network(2, 4) for _ in range(2))

    def forward(self, x):
        a, b = x.chunk(2, 1)
        log_determinant = x.new_zeros(len(x))
        for each in self.networks:
            scale, shift = each(a).chunk(2, 1)
            scale = torch.tanh(scale)
            a, b = b * scale.exp() + shift, a
            log_determinant = log_determinant + scale.sum(1)
        return log_determinant - 0.5 * torch.cat([a, b], 1).square().sum(1)


class Autoencoder(nn.Module):
    """A variational autoencoder, which draws random numbers in every call."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x):
        mean, log_variance = torch.tanh(self.encoder(x)).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).sum()
        return (self.decoder(code) - x).square().sum() + divergence


ARCHITECTURES = [
    Architecture("GCN", graph("GCNConv"), "torch_geometric"),
    Architecture("GAT", graph("GATConv", heads=2), "torch_geometric"),
    Architecture("GraphSAGE", graph("SAGEConv"), "torch_geometric"),
    Architecture("neural ODE, rk4", runge_kutta, "torchdiffeq"),
    Architecture(
        "neural ODE, dopri5",
        dormand_prince,
        "torchdiffeq",
        verdict="not all is known",
        routes=("reverse-over-reverse",),
        warnings=("HD405",),
    ),
    # The kernel's Function returns a gradient of another shape, and saves a derivative as a constant.
    Architecture(
        "Gaussian process", gaussian_process, "gpytorch", "not all is known", measured=False, errors=("HD202", "HD405")
    ),
    Architecture("e3nn", equivariant, "e3nn"),
    Architecture("PINN", lambda: Built(Residual(), (noise(5, 2),)), warnings=MENDED, quick=True),
    Architecture("PINN by torch.func", lambda: Built(FunctionalResidual(), (noise(5, 2),))),
    Architecture("WGAN-GP", lambda: Built(Penalized(), (noise(3, 4), noise(3, 4) + 1)), warnings=MENDED, quick=True),
    Architecture("force field", lambda: Built(Forces(), (noise(4, 3),)), warnings=MENDED),
    Architecture("Fourier neural operator", fourier_operator),
    Architecture("normalizing flow", lambda: Built(Couplings(), (noise(3, 4),))),
    Architecture(
        "variational autoencoder",
        lambda: Built(Autoencoder(), (noise(3, 6),)),
        verdict="all four routes are right, but see the remarks",
        quick=True,
    ),
]
