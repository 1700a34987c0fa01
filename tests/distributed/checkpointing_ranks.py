"""One rank, run by test_products.py: activation checkpointing in modules under fully_shard changes no derivative."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed.ranks import D, close, flat, like, own, run
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import hodiff

generator = torch.Generator().manual_seed(1)
TOKENS = torch.randint(7, (8, 4), generator=generator)
CLASSES = torch.randint(7, (8, 4), generator=generator)
plain = partial(checkpoint, use_reentrant=False)
Call = Callable[..., Tensor]


def stored(f: Call, *args: Any) -> Tensor:
    return f(*args)


class Block(nn.Module):
    """A part that a unit checkpoints itself, by a function that closes over the module."""

    def __init__(self, inner: Call) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(5), nn.Linear(5, 3), nn.Linear(3, 5)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(lambda h: self.out(self.into(self.norm(h)).tanh()), x)


class Model(nn.Module):
    """Blocks are called by `outer`, and call their layers by `inner`; the output layer is the embedding's matrix."""

    def __init__(self, outer: Call = stored, inner: Call = stored, head: Call = stored) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(Block(inner) for _ in range(3))
        self.outer, self.head = outer, head
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = self.outer(block, x)
        return self.head(lambda h: F.linear(h, self.embedding.weight).movedim(-1, 1), x)


def made(*calls: Call) -> Any:
    torch.manual_seed(0)
    return Model(*calls).to(D)


def by_name(module: nn.Module) -> Any:
    return lambda p, t, c: F.cross_entropy(functional_call(module, p, (t,)), c)


def by_call(module: nn.Module) -> Any:
    return lambda p, t, c: F.cross_entropy(module(t), c)


def sharded(model: Any, units: str = "blocks", **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks if units == "blocks" else ():
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh)


def plain_names(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a tree without the names of wrappers."""
    return {name.replace("_checkpoint_wrapped_module.", ""): each for name, each in tree.items()}


def shaped(tree: dict[str, Tensor], x: dict[str, Any]) -> dict[str, Any]:
    """Distribute tensors like parameters, which may have names of wrappers."""
    return dict(zip(x, like(tree, plain_names(x)).values(), strict=True))


def wrapped(model: Any) -> Any:
    apply_activation_checkpointing(model, check_fn=lambda each: isinstance(each, Block))
    return model


one = made()
P = {name: each.detach() for name, each in one.named_parameters()}
V = {name: torch.randn(each.shape, generator=generator, dtype=D) for name, each in P.items()}
EXPECTED = hodiff.hvp(by_name(one), P, V, TOKENS, CLASSES)
FORMS = {
    "calls of units": lambda: sharded(made(plain)),
    "parts of units": lambda: sharded(made(stored, plain)),
    "both, nested": lambda: sharded(made(plain, plain, plain)),
    "one unit": lambda: sharded(made(plain, stored, plain), "model"),
    "reentrant": lambda: sharded(made(partial(checkpoint, use_reentrant=True))),
    "of hodiff": lambda: sharded(made(hodiff.functions.checkpoint, stored, hodiff.functions.checkpoint)),
    "wrapped": lambda: sharded(wrapped(made())),
    "wrapped, one unit": lambda: sharded(wrapped(made()), "model"),
}


def products() -> None:
    for name in FORMS if dist.get_world_size() == 2 else ("both, nested", "wrapped"):
        many = FORMS[name]()
        x = dict(many.named_parameters())
        v, data = shaped(V, x), (own(TOKENS), own(CLASSES))
        calls = [(by_name(many), route, True) for route in hodiff.ROUTES[:3]]
        for f, route, correct in (*calls, (by_name(many), "auto", False), (by_call(many), "auto", True)):
            try:
                close(plain_names(hodiff.hvp(f, x, v, *data, route=route, correct=correct)), EXPECTED)
            except Exception as error:
                raise AssertionError((name, route, correct)) from error


def operators() -> None:
    """Operators, one vector and blocks, at two points."""
    batches = list(zip(TOKENS.chunk(2), CLASSES.chunk(2), strict=True))
    for form in ("both, nested", "wrapped"):
        many = FORMS[form]()
        x = dict(many.named_parameters())
        own_batches = [(own(t), own(c)) for t, c in batches]
        group = {"process_group": dist.group.WORLD}

        def hessian(module: nn.Module, p: Any, data: Any, **options: Any) -> Any:
            return hodiff.HessianOperator(lambda p, b: by_name(module)(p, *b), p, data=data, **options)

        def of_model(kind: Any) -> Any:
            return lambda module, p, data, **options: kind(module, F.cross_entropy, p, data=data, **options)

        kinds = [hodiff.GaussNewtonOperator, hodiff.FisherOperator, hodiff.EmpiricalFisherOperator]
        for build in (hessian, *map(of_model, kinds if form == "both, nested" else ())):
            A, B = build(one, P, batches), build(many, x, own_batches, **group)
            close(plain_names(B @ shaped(V, x)), A @ V)
            block = torch.stack([flat(shaped({n: each * s for n, each in V.items()}, x)) for s in (1, -2)], 1)
            found = B @ block
            close(plain_names(B.to_tree(found[:, 1])), {name: -2 * each for name, each in (A @ V).items()})
            if build is not hessian:
                continue
            moved = {name: each * 1.5 for name, each in P.items()}
            close(plain_names(B.at(shaped(moved, x)) @ shaped(V, x)), A.at(moved) @ V)


def mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=D)
    many = sharded(made(plain, plain), mp_policy=policy)
    x = dict(many.named_parameters())
    close(hodiff.hvp(by_name(many), x, shaped(V, x), own(TOKENS), own(CLASSES)), EXPECTED, 1e-5)


if __name__ == "__main__":
    run(products, operators, mixed_precision)
