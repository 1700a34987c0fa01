"""Products with curvature operators at one point: linearized, compiled, in blocks, and Gauss-Newton."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, jvp, vjp
from torch.utils.flop_counter import FlopCounterMode

import hodiff
from benchmarks import torch_ways
from benchmarks.objectives import NETWORKS, Objective
from benchmarks.problems import Problem
from benchmarks.race import Contestant
from benchmarks.reference import difference_product, relative_error
from benchmarks.workloads.hvp import direction, flatten

COLUMNS = 8


def problems(quick: bool) -> Iterator[Problem]:
    """Yield two problems per network, or only the problems of the first network."""
    for build in list(NETWORKS.values())[: 1 if quick else None]:
        objective = build()
        yield single(objective)
        yield blocks(objective)


def single(objective: Objective) -> Problem:
    """Return products with one vector; every operator has multiplied before, so that it is linearized."""
    x = objective.parameters()
    v = direction(x)
    vector = flatten(v)
    expected = {"hessian": difference_product(objective, vector), "gauss-newton": gauss_newton_product(objective, v)}
    operators = {
        f"{kind} {words}": operator
        for words, options in (("linearized", {}), ("linearized, compiled", {"compile": True}))
        for kind, operator in curvature(objective, x, **options).items()
    }

    def error(answer: tuple[str, Tensor]) -> float:
        kind, product = answer
        return relative_error(product, expected[kind])

    unit = Contestant("one gradient, eager", "unit", partial(torch_ways.gradient, objective, x))
    contestants = [
        Contestant("hodiff.hvp, one-shot", "hodiff", lambda: ("hessian", flatten(hodiff.hvp(objective, x, v)))),
        *(
            Contestant(name, "hodiff", partial(_tagged, name.split()[0], operator, vector))
            for name, operator in operators.items()
        ),
        Contestant(
            "torch, graph of the gradient kept", "torch", partial(_tagged, "hessian", KeptGraph(objective, x), vector)
        ),
        Contestant(
            "torch autograd.grad twice",
            "torch",
            lambda: ("hessian", flatten(torch_ways.double_backward(objective, x, v))),
        ),
    ]
    one = multiplications(unit.run)
    return Problem(
        name=objective.name,
        title=f"{objective.name}: one vector",
        contestants=[unit, *contestants],
        error=error,
        tolerance=1e-4,
        # Compiled products use the same matrix products, but the counter does not see them.
        remarks={
            each.name: f"{multiplications(each.run) / one:.2f}" for each in contestants if "compiled" not in each.name
        },
        remarks_title="multiplications",
    )


def blocks(objective: Objective) -> Problem:
    """Return products with a block of vectors, in units of as many gradients, so that ratios are per vector."""
    x = objective.parameters()
    generator = torch.Generator().manual_seed(2)
    block = torch.randn(sum(leaf.numel() for leaf in x.values()), COLUMNS, generator=generator)
    expected = difference_product(objective, block[:, -1])
    kept = KeptGraph(objective, x)

    def gradients() -> None:
        for _ in range(COLUMNS):
            torch_ways.gradient(objective, x)

    def one_by_one() -> Tensor:
        return torch.stack([kept @ column for column in block.unbind(1)], 1)

    return Problem(
        name=f"{objective.name}-block",
        title=f"{objective.name}: a block of {COLUMNS} vectors, in units of {COLUMNS} gradients",
        contestants=[
            Contestant(f"{COLUMNS} gradients, eager", "unit", gradients),
            *(
                Contestant(f"hessian {words}", "hodiff", partial(_product, operator, block))
                for words, operator in (
                    ("linearized", curvature(objective, x)["hessian"]),
                    ("linearized, compiled", curvature(objective, x, compile=True)["hessian"]),
                )
            ),
            Contestant("torch, graph of the gradient kept, one by one", "torch", one_by_one),
        ],
        error=lambda product: relative_error(product[:, -1], expected),
        tolerance=1e-4,
    )


def curvature(objective: Objective, x: dict[str, Tensor], **options: Any) -> dict[str, hodiff.operators.LinearOperator]:
    """Return the Hessian and Gauss-Newton operators of a network."""

    def model(parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
        result: Tensor = functional_call(objective.module, parameters, (inputs,))
        return result

    return {
        "hessian": hodiff.HessianOperator(objective, x, **options),
        "gauss-newton": hodiff.GaussNewtonOperator(
            model, F.cross_entropy, x, objective.inputs, objective.targets, **options
        ),
    }


def gauss_newton_product(objective: Objective, v: dict[str, Tensor]) -> Tensor:
    """Compute the float64 product with the Gauss-Newton matrix of the cross-entropy; the output Hessian is explicit."""
    precise = objective.double()
    x = precise.parameters()

    def model(parameters: dict[str, Tensor]) -> Tensor:
        # Corrections are not active here: only primitives are differentiated, once in forward and once in reverse mode.
        result: Tensor = functional_call(precise.module, parameters, (precise.inputs,))
        return result

    both: Any = jvp(model, (x,), ({name: leaf.double() for name, leaf in v.items()},))
    logits, pushed = both
    probabilities = logits.softmax(-1)
    weighted = probabilities * (pushed - (probabilities * pushed).sum(-1, keepdim=True)) / len(logits)
    pulled: Any = vjp(model, x)
    return flatten(pulled[1](weighted)[0])


def multiplications(run: Callable[[], Any]) -> int:
    """Count floating-point operations of matrix products and convolutions, which dominate these networks."""
    run()
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


class KeptGraph:
    """Hessian operator of a careful torch user: the gradient's graph, kept for all products."""

    def __init__(self, objective: Objective, x: dict[str, Tensor]):
        self._leaves = {name: leaf.detach().requires_grad_() for name, leaf in x.items()}
        self._gradient = torch.autograd.grad(objective(self._leaves), list(self._leaves.values()), create_graph=True)

    def __matmul__(self, vector: Tensor) -> Tensor:
        leaves = list(self._leaves.values())
        pieces = vector.split([leaf.numel() for leaf in leaves])
        v = [piece.view_as(leaf) for piece, leaf in zip(pieces, leaves, strict=True)]
        return torch.cat([p.flatten() for p in torch.autograd.grad(self._gradient, leaves, v, retain_graph=True)])


def _product(operator: Any, vector: Tensor) -> Any:
    return operator @ vector


def _tagged(kind: str, operator: Any, vector: Tensor) -> tuple[str, Any]:
    return kind, operator @ vector
