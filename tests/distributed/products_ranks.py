"""One rank, run by test_products.py: derivatives of sharded models equal those of the whole model in one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed.ranks import D, close, like, own, run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.func import functional_call

import hodiff

ROUTES = hodiff.ROUTES


class Tied(nn.Module):
    """Embedding and output layer share a matrix; blocks have norms, buffers, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, 5)) for _ in range(2)
        )
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.tensor([0.5, 1.0, 2.0, 1.5, 1.0]))
        self.shift = nn.Parameter(torch.zeros(5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale + self.shift
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def model() -> Tied:
    torch.manual_seed(0)
    return Tied().to(D)


generator = torch.Generator().manual_seed(1)
TOKENS = torch.randint(7, (8, 4), generator=generator)
CLASSES = torch.randint(7, (8, 4), generator=generator)


def energy(module: nn.Module) -> Any:
    return lambda p, t, c: F.cross_entropy(functional_call(module, p, (t,)).flatten(0, 1), c.flatten())


def called(module: nn.Module) -> Any:
    return lambda p, t, c: F.cross_entropy(module(t).flatten(0, 1), c.flatten())


def plain_dtensors() -> None:
    """Parameters are DTensors, and the function computes with them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    g = torch.Generator().manual_seed(2)
    whole = {
        name: torch.randn(shape, generator=g, dtype=D) for name, shape in (("a", (5, 3)), ("b", (3, 7)), ("c", (7,)))
    }
    v = {name: torch.randn(each.shape, generator=g, dtype=D) for name, each in whole.items()}
    x = torch.randn(6, 5, generator=g, dtype=D)
    places = {"a": [Shard(0)], "b": [Shard(1)], "c": [Replicate()]}
    p = {name: distribute_tensor(each, mesh, places[name]) for name, each in whole.items()}
    w = like(v, p)
    batch = distribute_tensor(x, mesh, [Replicate()])

    def f(p: Any, x: Any) -> Any:
        return ((x @ p["a"]).tanh() @ p["b"] + p["c"]).square().mean().sin()

    def gathered(p: Any, x: Any) -> Any:
        return f({name: each.full_tensor() for name, each in p.items()}, x)

    value, gradient, product = hodiff.value_grad_hvp(f, whole, v, x)
    for function, data, routes in ((f, batch, ROUTES[:1]), (gathered, x, ROUTES[:1])):
        for route in ("auto", *routes):
            close(hodiff.hvp(function, p, w, data, route=route), product)
            found = hodiff.value_grad_hvp(function, p, w, data, route=route)
            torch.testing.assert_close(found[0], value)
            close(found[1], gradient)
            close(found[2], product)
    moved = {name: each.redistribute(placements=[Replicate()]) for name, each in w.items()}
    close(hodiff.hvp(f, p, moved, batch), product)
    with pytest.raises(hodiff.InputError, match="expected a DTensor"):
        hodiff.hvp(f, p, v, batch)
    for route in ROUTES[1:]:
        with pytest.raises(hodiff.InputError, match="reverse-over-reverse"):
            hodiff.hvp(f, p, w, batch, route=route)
    A, B = hodiff.HessianOperator(f, p, batch), hodiff.HessianOperator(f, whole, x)
    close(A @ w, product)
    vectors = torch.stack([torch.cat([each.to_local().flatten() for each in d.values()]) for d in (w, p)], 1)
    columns = A.to_tree(A @ vectors)
    close(columns[0], product)
    close(columns[1], B @ whole)
    torch.testing.assert_close(A.eigsh(2, which="LA").eigenvalues, torch.linalg.eigvalsh(B.to_dense())[-2:])
    for placements in ([Shard(0)], [Replicate()]):
        c = {"c": distribute_tensor(whole["c"], mesh, placements)}
        local = c["c"].to_local()
        cubes = hodiff.HessianOperator(lambda p: (p["c"] ** 3).sum(), c)
        torch.testing.assert_close(
            cubes @ torch.stack([local, 2 * local], 1), 6 * local[:, None] ** 2 * torch.tensor([1, 2])
        )
    targets = torch.zeros(6, 7, dtype=D)
    A = hodiff.GaussNewtonOperator(lambda p, x: (x @ p["a"]).tanh() @ p["b"] + p["c"], F.mse_loss, p, batch, targets)
    B = hodiff.GaussNewtonOperator(lambda p, x: (x @ p["a"]).tanh() @ p["b"] + p["c"], F.mse_loss, whole, x, targets)
    close(A @ w, B @ v)
    close(A.to_tree(A @ vectors)[1], B @ whole)
    with pytest.raises(hodiff.InputError, match="only this rank in common"):
        hodiff.HessianOperator(f, p, data=[batch], process_group=dist.group.WORLD)
    refused_dtensors(p["c"])


def refused_dtensors(c: Any) -> None:
    """Functions that need ordinary tensors say so."""

    def cubes(c: Any) -> Any:
        return (c**3).sum()

    refusals: dict[str, Any] = {
        "hessian": lambda: hodiff.hessian(cubes)(c),
        "hessian_matrix": lambda: hodiff.hessian_matrix(cubes, c),
        "hessian_diagonal": lambda: hodiff.hessian_diagonal(cubes)(c),
        "jacobian": lambda: hodiff.jacobian(lambda c: c**3)(c),
        "hessian_pattern": lambda: hodiff.sparse.hessian_pattern(cubes, c),
        "root": lambda: hodiff.implicit.root(lambda x, c: x - c, lambda f, x, c: c)(c, c),
        "linear_solve": lambda: hodiff.implicit.linear_solve(lambda x: 2 * x, c),
        "hypergradient": lambda: hodiff.meta.hypergradient(
            lambda p, h: cubes(p), lambda p, h: (p - h).square().sum(), c, c
        ),
    }
    for name, call in refusals.items():
        with pytest.raises(hodiff.HodiffError, match=rf"(?s){name}: .*support DTensors"):
            call()


def fully_sharded() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = model()
    p = {name: each.detach() for name, each in whole.named_parameters()}
    v = {name: torch.randn(each.shape, generator=generator, dtype=D) for name, each in p.items()}
    value, gradient, product = hodiff.value_grad_hvp(energy(whole), p, v, TOKENS, CLASSES)
    sharded = model()
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    x = dict(sharded.named_parameters())
    w = like(v, x)
    data = own(TOKENS), own(CLASSES)
    for make in (energy, called):
        f = make(sharded)
        for route in ("auto", *ROUTES[:3]):
            close(hodiff.hvp(f, x, w, *data, route=route), product)
        found = hodiff.value_grad_hvp(f, x, w, *data)
        torch.testing.assert_close(found[0], value)
        close(found[1], gradient)
        close(found[2], product)
        close(hodiff.grad_and_hvp(f, x, w, *data)[1], product)
    # fully_shard's own training step runs afterwards, and has the same gradient.
    called(sharded)(x, *data).backward()
    grads = {name: each.grad for name, each in x.items() if each.grad is not None}
    close(grads, {name: gradient[name] for name in grads})
    assert set(gradient) - set(grads) == {"unused"}
    operators(sharded, x, w, whole, p, v)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of different sizes, one with ignored targets."""
    sizes = [3, 5] if count == 2 else [1, 2, 1, 4]
    targets = CLASSES.clone()
    targets[5, 1:3] = -100
    return list(zip(TOKENS.split(sizes), targets.split(sizes), strict=True))


def operators(sharded: nn.Module, x: Any, w: Any, whole: nn.Module, p: Any, v: Any) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def f(module: nn.Module) -> Any:
        return lambda p, batch: loss(functional_call(module, p, (batch[0],)), batch[1])

    def calling(module: nn.Module) -> Any:
        return (lambda p, batch: loss(module(batch[0]), batch[1])) if module is sharded else f(module)

    def outputs(module: nn.Module) -> Any:
        return lambda p, tokens: functional_call(module, p, (tokens,)).flatten(0, 1)

    def hessian(of: Any) -> Any:
        return lambda m, q, d, g: hodiff.HessianOperator(of(m), q, data=d, batch_size=counted, process_group=g)

    def with_model(kind: Any) -> Any:
        return lambda m, q, d, g: kind(outputs(m), F.cross_entropy, q, data=flat(d), process_group=g)

    def flat(pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        return [(tokens, classes.flatten()) for tokens, classes in pairs]

    def counted(batch: Any) -> int:
        return int((batch[1] != -100).sum())

    all_data = batches(4)
    mine, group = all_data[dist.get_rank() :: dist.get_world_size()], dist.group.WORLD
    second = {name: each.flip(0) for name, each in v.items()}
    block = [torch.cat([each.to_local().reshape(-1) for each in like(d, x).values()]) for d in (v, second)]
    kinds = (hodiff.GaussNewtonOperator, hodiff.FisherOperator, hodiff.EmpiricalFisherOperator)
    for make in (hessian(f), hessian(calling), *map(with_model, kinds)):
        A, B = make(sharded, x, mine, group), make(whole, p, all_data, None)
        product = B @ v
        close(A @ w, product)
        close(A @ w, product)
        columns = A.to_tree(A @ torch.stack(block, 1))
        close(columns[0], product)
        close(columns[1], B @ second)
        moved = {key: each.detach() * 1.25 for key, each in x.items()}
        close(A.at(moved) @ w, B.at({key: each * 1.25 for key, each in p.items()}) @ v)
        close(make(sharded, x, all_data, None) @ w, product)
    estimates(hessian(calling)(sharded, x, mine, group), hessian(f)(whole, p, all_data, None), w, v)


def estimates(A: Any, B: Any, w: Any, v: Any) -> None:
    """Eigenvalues, solutions and estimates of a sharded operator are those of the matrix."""
    dense = B.to_dense()
    values = torch.linalg.eigvalsh(dense)
    top = A.eigsh(3, which="LA")
    torch.testing.assert_close(top.eigenvalues, values[-3:], rtol=1e-9, atol=1e-9)
    vector = joined(A.to_tree(top.eigenvectors)[-1])
    torch.testing.assert_close(dense @ vector, values[-1] * vector, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(vector.norm(), torch.ones((), dtype=D))
    damping = 1.0 - values[0].item()
    truth = torch.linalg.solve(dense + damping * torch.eye(len(dense), dtype=D), B.domain.flatten(v))
    near(joined(A.solve(w, damping=damping, tol=1e-12).value), truth)
    near(joined(A.to_tree(A.diagonal(method="hutchinson").value)), B.diagonal(method="hutchinson").value)
    for each in (hodiff.estimators.trace, hodiff.estimators.frobenius_norm):
        one, other = (each(C, method="hutchinson", products=50) for C in (A, B))
        assert one.value == pytest.approx(other.value, rel=1e-11)
        assert one.standard_error == pytest.approx(other.standard_error, rel=1e-9)
    one, other = (hodiff.estimators.spectral_density(C, samples=2, steps=8) for C in (A, B))
    near(one.ritz_values, other.ritz_values)
    near(one.weights, other.weights)
    assert one.n == other.n
    ones = torch.ones(A.shape[1], dtype=D)
    near((A + 2 * A) @ ones, 3 * (A @ ones))
    for refused in (
        A.to_dense,
        A.to_scipy,
        A.inverse,
        lambda: A.block("shift"),
        lambda: A.to(torch.float32),
        lambda: A.eigsh(method="arpack"),
        lambda: A.solve(w, method="minres"),
        lambda: hodiff.estimators.nystrom_preconditioner(A, 2, 1.0),
        lambda: A.solve(w, method="dense"),
    ):
        with pytest.raises(hodiff.InputError, match="sharded"):
            refused()


def joined(tree: Any) -> Tensor:
    return torch.cat([each.full_tensor().flatten() for each in tree.values()])


def near(found: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-9)


if __name__ == "__main__":
    run(plain_dtensors, fully_sharded)
