"""One rank of several, run by test_kfac.py: K-FAC of models under fully_shard, and of replicas with split data."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed.ranks import D, close, flat, like, own, run, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import hodiff

generator = torch.Generator().manual_seed(1)
X = torch.randn(8, 3, generator=generator, dtype=D)
Y = torch.randint(3, (8,), generator=generator)
KINDS = {
    "KFAC": hodiff.KFACOperator,
    "EKFAC": hodiff.EKFACOperator,
    "Shampoo": hodiff.operators.ShampooOperator,
    "KFOC": hodiff.operators.KFOCOperator,
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"fisher": "empirical", "sharing": "reduce"},
    {"bias": "separate", "norm": "diagonal"},
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv1d(1, 3, 2), nn.LayerNorm(6), nn.Linear(6, 7)
        self.last = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.norm(self.first(x[:, None]).tanh().flatten(1))).tanh())


def made(shard: Callable[[Net], Any] | None = None) -> Net:
    torch.manual_seed(0)
    model = Net().to(D)
    if shard is not None:
        shard(model)
    return model


def in_layers(model: Net) -> None:
    for layer in (model.first, model.second):
        fully_shard(layer)
    fully_shard(model)


def with_replicas(model: Net) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copy", "shard")))


def parts(rank: int | None = None) -> tuple[Tensor, Tensor]:
    return own(X, rank=rank), own(Y, rank=rank)


def one_and_many(kind: Any, shard: Any, **options: Any) -> tuple[Any, Any, dict[str, Tensor], dict[str, Any]]:
    """Return the operator of one process with all batches, that of all ranks, and their points."""
    single, many = made(), made(shard)
    p = {name: each.detach() for name, each in single.named_parameters()}
    x = dict(many.named_parameters())
    batches = [parts(rank) for rank in range(dist.get_world_size())]
    expected = kind(single, F.cross_entropy, p, data=batches, **options)
    return expected, kind(many, F.cross_entropy, x, data=[parts()], process_group=dist.group.WORLD, **options), p, x


def closed_forms_are_those_of_one_process() -> None:
    shards = [in_layers, None] if dist.get_world_size() == 2 else [in_layers, with_replicas]
    for name_of_kind, kind in KINDS.items():
        for options in OPTIONS:
            if name_of_kind in ("Shampoo", "KFOC"):
                # Their gradients are those of whole examples.
                options = {name: value for name, value in options.items() if name != "sharing"}
            for shard in shards:
                A, B, p, x = one_and_many(kind, shard, **options)
                v = {name: torch.randn(each.shape, generator=generator, dtype=D) for name, each in p.items()}
                w = like(v, x)
                close(B @ w, A @ v)
                close(B.damped(0.1) @ w, A.damped(0.1) @ v)
                close(B.inverse(damping=0.1) @ w, A.inverse(damping=0.1) @ v, 1e-11)
                block = torch.stack([flat(w), 2 * flat(w)], 1)
                torch.testing.assert_close((B @ block)[:, 1], 2 * flat(B @ w))
                for name in ("trace", "frobenius_norm"):
                    torch.testing.assert_close(getattr(B, name)().value, getattr(A, name)().value, rtol=1e-12, atol=0)
                found = B.logdet(damping=0.1).value, (B.damped(0.1) * 2.0).logdet().value
                known = A.logdet(damping=0.1).value, (A.damped(0.1) * 2.0).logdet().value
                assert found == pytest.approx(known, rel=1e-12)
                torch.testing.assert_close(flat(B.domain.unflatten(B.diagonal().value)), B.diagonal().value)
                close(B.domain.unflatten(B.diagonal().value), A.domain.unflatten(A.diagonal().value))
                if shard is in_layers:
                    solved = B.damped(1.0).solve(flat(w), tol=1e-12).value
                    close(B.domain.unflatten(solved), A.inverse(damping=1.0) @ v, 1e-9)
                    counts = torch.tensor(float(len(B.blocks)))
                    dist.all_reduce(counts)
                    assert counts == len(A.blocks)
                    moved = {name: 2 * each.detach() for name, each in x.items()}
                    close(B.at(moved) @ w, A.at({name: 2 * each for name, each in p.items()}) @ v)


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        inner = hodiff.functions.checkpoint(lambda x: self.norm(self.first(x[:, None]).tanh().flatten(1)), x)
        return checkpoint(lambda y: self.last(self.second(y).tanh()), inner, use_reentrant=False)


def checkpoints_change_no_factor() -> None:
    for kind in (hodiff.KFACOperator, hodiff.EKFACOperator):
        A, _, p, _ = one_and_many(kind, in_layers)
        many = Checkpointed().to(D)
        many.load_state_dict(p)
        in_layers(many)
        x = dict(many.named_parameters())
        B = kind(many, F.cross_entropy, x, data=[parts()], process_group=dist.group.WORLD)
        v = {name: torch.randn(each.shape, generator=generator, dtype=D) for name, each in p.items()}
        close(B @ like(v, x), A @ v)


def drawn_targets_are_those_of_numbered_batches() -> None:
    A, B, p, x = one_and_many(hodiff.KFACOperator, in_layers, fisher="monte-carlo", samples=3)
    close(B @ like(p, x), A @ p)


def factors_differ_from_those_of_one_rank() -> None:
    """The comparison above could not fail if each rank had all data."""
    _, B, p, x = one_and_many(hodiff.KFACOperator, in_layers)
    alone = hodiff.KFACOperator(made(), F.cross_entropy, p, *parts(0))
    assert not torch.allclose(whole((B @ like(p, x))["last.weight"]), (alone @ p)["last.weight"])


def influences_are_those_of_one_process() -> None:
    """Scores by one product of all ranks equal inner products with separate gradients in one process."""
    query, label = torch.randn(1, 3, generator=generator, dtype=D), torch.tensor([1])
    count, rank = dist.get_world_size(), dist.get_rank()
    for name in ("KFAC", "EKFAC"):
        A, B, p, x = one_and_many(KINDS[name], in_layers)
        single, many = made(), made(in_layers)
        x = dict(many.named_parameters())
        B = B.at(x)

        def gradient(inputs: Tensor, labels: Tensor, single: Net = single) -> dict[str, Tensor]:
            loss = F.cross_entropy(single(inputs), labels)
            return dict(zip(p, torch.autograd.grad(loss, list(single.parameters())), strict=True))

        expected = A.inverse(damping=0.1) @ gradient(query, label)
        each = [gradient(X[i : i + 1], Y[i : i + 1]) for i in range(len(X))]
        truth = torch.stack([sum((g[n] * expected[n]).sum() for n in p) for g in each])
        F.cross_entropy(many(query), label).backward()
        u = B.inverse(damping=0.1) @ {n: each.grad for n, each in x.items()}

        def weighted(point: Any, batch: Any, own: Any, many: Net = many) -> Tensor:
            logits = functional_call(many, point[0], (batch[0],))
            return point[1][own] @ F.cross_entropy(logits, batch[1], reduction="none")

        zeros, own = torch.zeros(len(X), dtype=D), slice(rank * len(X) // count, (rank + 1) * len(X) // count)
        scores = count * hodiff.hvp(weighted, (x, zeros), (u, zeros), parts(), own)[1]
        torch.testing.assert_close(scores, truth, rtol=1e-10, atol=1e-10 * float(truth.abs().max()))


def what_cannot_be_done_is_refused() -> None:
    model = made(in_layers)
    x, group = dict(model.named_parameters()), dist.group.WORLD
    with pytest.raises(hodiff.InputError, match="process_group: expected the group of the ranks of fully_shard"):
        hodiff.KFACOperator(model, F.cross_entropy, x, data=[parts()])
    with pytest.raises(hodiff.InputError, match=r"pass data=\[batch\]"):
        hodiff.KFACOperator(model, F.cross_entropy, x, *parts(), process_group=group)
    A = hodiff.KFACOperator(model, F.cross_entropy, x, data=[parts()], process_group=group)
    for refused in (A.eigh, A.to_dense, lambda: A.to(torch.float32), lambda: A.inverse(damping=1.0).to(torch.float32)):
        with pytest.raises(hodiff.InputError, match=r"on one process|expected None"):
            refused()
    single = made()
    replica = hodiff.KFACOperator(
        single, F.cross_entropy, dict(single.named_parameters()), data=[parts()], process_group=group
    )
    for copied in (A, replica):
        with pytest.raises(hodiff.InputError, match=r"on one process|expected None"):
            copy.deepcopy(copied)
    with pytest.raises(hodiff.InputError, match=r"singular|every rank"):
        A.inverse()
    with pytest.raises(hodiff.InputError, match=r"singular|every rank"):
        A.logdet()
    uneven = [parts()] * (1 + (dist.get_rank() == 0))
    with pytest.raises(hodiff.InputError, match="same number of batches"):
        hodiff.KFACOperator(model, F.cross_entropy, x, data=uneven, process_group=group).trace()

    offloaded = made(lambda model: fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False)))
    with pytest.raises(hodiff.InputError, match="got a CPUOffloadPolicy; call fully_shard without offload_policy"):
        hodiff.KFACOperator(
            offloaded, F.cross_entropy, dict(offloaded.named_parameters()), data=[parts()], process_group=group
        ).trace()

    class Outside(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) @ self.last.weight[:, :3]

    torch.manual_seed(0)
    outside = Outside().to(D)
    in_layers(outside)
    with pytest.raises(hodiff.InputError, match="only by calls of their layers"):
        hodiff.KFACOperator(
            outside, F.cross_entropy, dict(outside.named_parameters()), data=[parts()], process_group=group
        ).trace()


if __name__ == "__main__":
    run(
        closed_forms_are_those_of_one_process,
        drawn_targets_are_those_of_numbered_batches,
        checkpoints_change_no_factor,
        factors_differ_from_those_of_one_rank,
        influences_are_those_of_one_process,
        what_cannot_be_done_is_refused,
    )
