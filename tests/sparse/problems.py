"""Functions with sparse Hessians, and the points at which tests evaluate them."""

import torch
from cases import rosenbrock

D = torch.float64


def broyden(x):
    """Compute CUTEst's BDEXP, with two off-diagonals on each side."""
    return ((x[:-2] + x[1:-1]) * torch.exp(-x[2:] * (x[:-2] + x[1:-1]))).sum()


def woods(x):
    """Compute CUTEst's WOODS, with blocks of four."""
    a, b, c, d = x.view(-1, 4).T
    return (
        100 * (b - a**2) ** 2
        + (1 - a) ** 2
        + 90 * (d - c**2) ** 2
        + (1 - c) ** 2
        + 10 * (b + d - 2) ** 2
        + (b - d) ** 2 / 10
    ).sum()


def arrow(x):
    """Compute CUTEst's ARWHEAD, with an arrowhead."""
    return ((x[:-1] ** 2 + x[-1] ** 2) ** 2 - 4 * x[:-1] + 3).sum()


def plate(x):
    """Compute the area of a surface over a square grid, with two triangles for each cell."""
    side = int(x.numel() ** 0.5)
    u = torch.nn.functional.pad(x.view(side, side), (1, 1, 1, 1))
    dx, dy = u[1:, :-1] - u[:-1, :-1], u[:-1, 1:] - u[:-1, :-1]
    dx2, dy2 = u[1:, 1:] - u[:-1, 1:], u[1:, 1:] - u[1:, :-1]
    return ((1 + dx**2 + dy**2).sqrt() + (1 + dx2**2 + dy2**2).sqrt()).sum() / 2


def crossing(x):
    """Compute the negative log-likelihood of a conditional random field on a chain with two labels."""
    score = x.view(-1, 2)
    alpha = score[0]
    for row in score[1:]:
        alpha = torch.logsumexp(alpha[:, None] + torch.tensor([[0.3, -0.2], [0.1, 0.4]], dtype=x.dtype), 0) + row
    return torch.logsumexp(alpha, 0) - score[:, 0].sum()


RING = torch.stack([torch.arange(12), torch.arange(1, 13) % 12])


def message_passing(x):
    """Compute the energy of a graph network with two rounds of messages between adjacent nodes of a ring."""
    weights = torch.linspace(-1, 1, 24, dtype=D).view(4, 6).sin()
    nodes = x.view(-1, 2)
    for _ in range(2):
        pairs = torch.cat([nodes[RING[0]], nodes[RING[1]]], 1)
        messages = torch.tanh(pairs @ weights) @ weights.T
        heard = torch.zeros_like(nodes).index_add(0, RING[1], messages[:, :2]).index_add(0, RING[0], messages[:, 2:])
        nodes = nodes + 0.3 * heard
    return torch.nn.functional.softplus(nodes).square().sum()


def pairs_within(positions, cutoff):
    """Return the pairs of neighbours, each pair once."""
    distance = torch.cdist(positions, positions)
    return ((distance < cutoff).triu(1)).nonzero().T


def cutoff_energy(x, i, j, cutoff=1.6):
    """Compute a Lennard-Jones potential with a smooth cutoff."""
    r = x.view(-1, 3)
    squared = (r[i] - r[j]).square().sum(-1)
    gate = (1 - squared / cutoff**2).clamp_min(0) ** 3
    return (4 * (squared**-6 - squared**-3) * gate).sum()


PROBLEMS = {
    "rosenbrock": (rosenbrock, 12),
    "broyden": (broyden, 12),
    "woods": (woods, 12),
    "arrow": (arrow, 12),
    "plate": (plate, 16),
    "random field": (crossing, 12),
    "message passing": (message_passing, 24),
}


def point(n, seed=0, dtype=D):
    return torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=D).to(dtype) + 0.2
