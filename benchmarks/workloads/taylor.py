"""Laplacians and bilaplacians of a network, compared with traces of its Hessian and a propagator by hand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import hessian, vmap

import hodiff
from benchmarks.problems import Problem
from benchmarks.race import Contestant
from benchmarks.targets import Target

PUBLISHED = """\
torch-jet was not timed. Its authors report for collapsed jets, on a GPU, 0.52 of the time of standard Taylor mode for
the Laplacian, and 0.33 of the time of nested differentiation for the bilaplacian as a Laplacian of a Laplacian, in JAX
(F. Dangel, T. Siebert, M. Zeinhofer & A. Walther, "Collapsing Taylor mode automatic differentiation", NeurIPS 2025,
<https://arxiv.org/abs/2505.13644>)."""
WIDTHS = (50, 768, 768, 512, 512, 1)
BATCHES = (1, 8, 40)
TRACE, BY_HAND, OURS = "trace of torch.func.hessian", "by hand", "hodiff.laplacian"
NESTED, BILAPLACIAN = "trace of hessian of trace of hessian", "hodiff.bilaplacian"
TARGETS = [
    Target(OURS, TRACE, 0.45),
    Target(OURS, BY_HAND, 1.15),
    Target(f"{OURS}, compiled", f"{BY_HAND}, compiled", 1.05),
]
BILAPLACIAN_TARGETS = [Target(BILAPLACIAN, NESTED, 0.3)]


def problems(quick: bool) -> Iterator[Problem]:
    """Yield tanh networks at points of fifty numbers, and of five."""
    widths = (5, 16, 16, 1) if quick else WIDTHS
    for dtype in (torch.float32, torch.float64):
        net = network(widths, dtype)
        for points in BATCHES:
            yield laplacian_problem(net, points, dtype, full=not quick)
    for widths in ((5, 16, 16, 1),) if quick else ((5, 64, 64, 1), (5, 768, 768, 512, 512, 1)):
        for points in BATCHES[:2]:
            yield _bilaplacian(network(widths, torch.float32), widths, points, full=not quick)


def network(widths: tuple[int, ...], dtype: torch.dtype) -> nn.Sequential:
    """Return linear layers with tanh between them."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for n, m in pairwise(widths):
        layers += [nn.Linear(n, m), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype).requires_grad_(False)


def by_hand(net: nn.Sequential, x: Tensor) -> Tensor:
    """Compute value, directional derivatives and Laplacian layer by layer, the least work that any program needs."""
    value, slopes, total = x, torch.eye(x.shape[1], dtype=x.dtype)[:, None].expand(-1, *x.shape), torch.zeros_like(x)
    for layer in net:
        if isinstance(layer, nn.Linear):
            value, slopes, total = layer(value), slopes @ layer.weight.mT, total @ layer.weight.mT
        else:
            value = torch.tanh(value)
            rate = 1 - value * value
            total = rate * total - 2 * value * rate * slopes.square().sum(0)
            slopes = rate * slopes
    return total


def inputs(points: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return random points with `size` coordinates, always the same."""
    return torch.randn(points, size, dtype=dtype, generator=torch.Generator().manual_seed(1))


def laplacian_problem(net: nn.Sequential, points: int, dtype: torch.dtype, *, full: bool) -> Problem:
    """Return the problem of a network's Laplacian; `full` adds compiled ways and targets."""
    # After other numbers of points, the compiler would make this number a variable, which makes code slower.
    torch.compiler.reset()
    widths = [layer.in_features for layer in net if isinstance(layer, nn.Linear)]
    x, title = inputs(points, widths[0], dtype), "-".join(map(str, [*widths, 1]))
    expected = by_hand(net.double(), x.double())
    net = net.to(dtype)

    def trace(x: Tensor) -> Tensor:
        return torch.trace(hessian(lambda y: net(y).squeeze(-1))(x))

    def ready(function: Any) -> Any:
        fast = torch.compile(function, fullgraph=True, dynamic=False)

        def call() -> Tensor:
            with torch.no_grad():
                return fast(x)

        return call

    laplacian = hodiff.laplacian(net, batched=True)
    fast = [
        Contestant(f"{BY_HAND}, compiled", "route", ready(partial(by_hand, net))),
        Contestant(f"{OURS}, compiled", "route", ready(laplacian)),
    ]
    name = str(dtype).removeprefix("torch.")
    return Problem(
        name=f"laplacian-{points}-{name}",
        title=f"Laplacian of a network {title} at {points} point{'s' * (points > 1)}, {name}",
        contestants=[
            Contestant(BY_HAND, "unit", partial(by_hand, net, x)),
            Contestant(TRACE, "torch", lambda: vmap(trace)(x)[:, None]),
            Contestant(OURS, "hodiff", partial(laplacian, x)),
            *(fast if full else []),
        ],
        error=partial(_distance, expected),
        tolerance=1e-4 if dtype == torch.float32 else 1e-10,
        targets=TARGETS if full else [],
    )


def _bilaplacian(net: nn.Sequential, widths: tuple[int, ...], points: int, *, full: bool) -> Problem:
    x = inputs(points, widths[0], torch.float32)

    def trace(f: Any) -> Any:
        return lambda x: torch.trace(hessian(f)(x))

    nested = vmap(trace(trace(lambda y: net(y).squeeze(-1))))
    expected = hodiff.laplacian(hodiff.laplacian(network(widths, torch.float64), batched=True), batched=True)(
        x.double()
    )
    return Problem(
        name=f"bilaplacian-{widths[1]}-{points}",
        title=f"Bilaplacian of a network {'-'.join(map(str, widths))} at {points} point{'s' * (points > 1)}, float32",
        contestants=[
            Contestant(NESTED, "torch", lambda: nested(x)[:, None]),
            Contestant(BILAPLACIAN, "hodiff", partial(hodiff.bilaplacian(net, batched=True), x)),
        ],
        error=partial(_distance, expected),
        tolerance=1e-3,
        targets=BILAPLACIAN_TARGETS if full else [],
    )


def _distance(expected: Tensor, found: Tensor) -> float:
    assert found.shape == expected.shape, "shapes that broadcast would be compared all with all"
    return float((found.double() - expected).norm() / expected.norm())
