"""One rank, run by test_estimates.py: estimates of a sharded operator equal those of the whole model in one process."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed.ranks import D, own, run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.func import functional_call

from hodiff import ConvergenceError, GaussNewtonOperator, HessianOperator, InputError
from hodiff.estimators import (
    Checkpoint,
    condition_number,
    diagonal,
    effective_dimension,
    eigsh,
    frobenius_norm,
    logdet,
    probes,
    schatten_norm,
    sharpness,
    spectral_density,
    trace,
    trace_of,
)
from hodiff.estimators.adapted_operators import view_of

generator = torch.Generator().manual_seed(1)
X = torch.randn(16, 7, generator=generator, dtype=D)
Y = torch.randint(4, (16,), generator=generator)

NUMBERS = {
    "trace": lambda A: trace(A),
    "trace, few products": lambda A: trace(A, products=30),
    "trace, xtrace": lambda A: trace(A, method="xtrace", products=24),
    "trace, xtrace with signs": lambda A: trace(A, method="xtrace", products=24, probes="rademacher"),
    "frobenius_norm, exact": lambda A: frobenius_norm(A, method="exact"),
    "logdet": lambda A: logdet(A, damping=20.0, samples=2, steps=12),
    "schatten_norm": lambda A: schatten_norm(A, 2, samples=2, steps=12),
    "trace_of": lambda A: trace_of(A, torch.tanh, samples=2, steps=12),
    "sharpness": lambda A: sharpness(A, tol=1e-9),
    "sharpness, power": lambda A: sharpness(A, method="power", tol=1e-2),
    "condition_number": lambda A: condition_number(A, damping=20.0, max_iterations=60),
    "condition_number, dense": lambda A: condition_number(A, damping=20.0),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4)).to(D)


def drawing_by_leaf(sizes: Any) -> None:
    """Let one process draw Gaussian numbers leaf by leaf, as ranks do."""

    def gaussian(n: int, generator: torch.Generator) -> Tensor:
        assert n == sum(sizes)
        return torch.cat([torch.randn(size, generator=generator, dtype=D) for size in sizes])

    def sphere(n: int, generator: torch.Generator) -> Tensor:
        vector = gaussian(n, generator)
        return vector * (n**0.5 / vector.norm())

    probes.PROBES.update(gaussian=gaussian, sphere=sphere)


def compare(A: Any, B: Any) -> None:
    """Compare all estimates of a sharded operator with those of one process."""
    drawing_by_leaf(B.domain.sizes)
    for name, estimate in NUMBERS.items():
        found, truth = estimate(A), estimate(B)
        assert found.value == pytest.approx(truth.value, rel=1e-9), name
        assert found.products == truth.products, name
        assert found.method == truth.method, name
        if hasattr(truth, "standard_error"):
            assert found.standard_error == pytest.approx(truth.standard_error, rel=1e-6, abs=1e-12), name
    for options in ({}, {"products": 24}, {"method": "exact"}):
        found, truth = diagonal(A, **options), diagonal(B, **options)
        near(joined(A, found.value), truth.value)
        near(joined(A, found.standard_error), truth.standard_error, 1e-6)
        assert found.method == truth.method
    found, truth = (spectral_density(each, method="exact") for each in (A, B))
    near(found.ritz_values, truth.ritz_values)
    ends = [eigsh(each, 1, which="LA", method="lanczos") for each in (A, B)]
    found, truth = (
        eigsh(each, 1, which="SA", method="lanczos", start=end.eigenvectors[:, 0])
        for each, end in zip((A, B), ends, strict=True)
    )
    near(found.eigenvalues, truth.eigenvalues)
    assert found.products == truth.products
    near(sharpness(A, start=eigsh(A, 1, which="LA").eigenvectors[:, 0], tol=1e-9).value, sharpness(B, tol=1e-9).value)


def joined(A: Any, vector: Tensor) -> Tensor:
    return torch.cat([each.full_tensor().flatten() for each in A.to_tree(vector).values()])


def near(found: Any, truth: Any, tol: float = 1e-9) -> None:
    torch.testing.assert_close(torch.as_tensor(found, dtype=D), torch.as_tensor(truth, dtype=D), rtol=tol, atol=tol)


def fully_sharded() -> None:
    whole, sharded = model(), model()
    for each in (sharded[0], sharded):
        fully_shard(each, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    p = {name: each.detach() for name, each in whole.named_parameters()}
    x = dict(sharded.named_parameters())
    data, group = [(own(X), own(Y))], dist.group.WORLD

    def loss(module: nn.Module) -> Any:
        return lambda p, batch: F.cross_entropy(functional_call(module, p, (batch[0],)), batch[1])

    A = HessianOperator(loss(sharded), x, data=data, process_group=group)
    compare(A, HessianOperator(loss(whole), p, data=[(X, Y)]))
    # A Gauss-Newton matrix of low rank, on which Hutch++ and XTrace are exact.
    few, classes = X[:4], Y[:4]
    C = GaussNewtonOperator(
        lambda p, inputs: functional_call(sharded, p, (inputs,)),
        F.cross_entropy,
        x,
        data=[(own(few), own(classes))],
        process_group=group,
    )
    B = GaussNewtonOperator(
        lambda p, inputs: functional_call(whole, p, (inputs,)), F.cross_entropy, p, data=[(few, classes)]
    )
    truth = B.to_dense()
    for method in ("hutch++", "xtrace"):
        near(trace(C, method=method, products=60).value, truth.trace())
    near(joined(C, diagonal(C, products=60).value), truth.diagonal())
    near(effective_dimension(C, 0.1, samples=2, steps=20).value, effective_dimension(B, 0.1, samples=2, steps=20).value)


def replicated_too() -> None:
    """A mesh of two dimensions, replicated and sharded leaves, and one that an ordinary tensor replaces."""
    shape = (2, 2) if dist.get_world_size() == 4 else (1, dist.get_world_size())
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
    g = torch.Generator().manual_seed(2)
    whole = {
        name: torch.randn(size, generator=g, dtype=D) for name, size in (("u", (5, 3)), ("v", (3, 3)), ("w", (3,)))
    }

    def f(p: Any) -> Any:
        return (p["u"] @ p["v"] + p["w"]).tanh().square().sum() + p["w"].exp().sum()

    places = {"u": [Replicate(), Shard(0)], "v": [Replicate(), Replicate()], "w": [Replicate(), Shard(0)]}
    x = {name: distribute_tensor(each, mesh, places[name]) for name, each in whole.items()}
    # A leaf on a part of the mesh.
    x["w"] = distribute_tensor(whole["w"], mesh["b"], [Shard(0)])

    def gathered(p: Any) -> Any:
        return f({name: each.full_tensor() for name, each in p.items()})

    A, B = HessianOperator(gathered, x), HessianOperator(f, whole)
    drawing_by_leaf(B.domain.sizes)
    for name in ("trace, few products", "trace, xtrace", "trace"):
        near(NUMBERS[name](A).value, NUMBERS[name](B).value)
    near(joined(A, diagonal(A, products=20).value), diagonal(B, products=20).value)
    near(joined(A, diagonal(A, method="exact").value), B.to_dense().diagonal())
    basis, triangle = (each for each in factors(A))
    near(basis @ triangle, factors(B)[0] @ factors(B)[1], 1e-12)
    options = {"which": "LA", "method": "lanczos", "restart": 6, "tol": 1e-9}
    folder = Path(sys.argv[2]).parent / "state"
    with pytest.raises(ConvergenceError):
        eigsh(A, 2, **options, max_iterations=8, checkpoint=Checkpoint(folder, every=3))
    found = eigsh(A, 2, **options, checkpoint=folder)
    near(found.eigenvalues, torch.linalg.eigvalsh(B.to_dense())[-2:])
    for refused in (lambda: A.eigsh(method="arpack"), lambda: A.solve(x, method="minres")):
        with pytest.raises(InputError, match="sharded"):
            refused()


def factors(A: Any) -> tuple[Tensor, Tensor]:
    """Factorize nearly dependent columns; return the whole orthonormal columns, after a check of them."""
    view = view_of(A, "test", sharded_too=True)
    block = probes.draw(view, "gaussian", 4, torch.Generator().manual_seed(0))
    block = block @ torch.tensor([[1, 1, 0, 0], [0, 1e-9, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1e-14]], dtype=D)
    basis, triangle = view.qr(block)
    near(view.gram(basis, basis), torch.eye(4, dtype=D), 1e-12)
    return view.whole(basis), triangle


if __name__ == "__main__":
    run(replicated_too, fully_sharded)
