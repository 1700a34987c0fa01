"""Curvature, per-example gradients, meta-gradients and optimizers of PyTorch libraries, and hodiff's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hodiff
from benchmarks.objectives import NETWORKS, Objective, cnn, mlp
from benchmarks.problems import Problem, Result
from benchmarks.race import Contestant
from benchmarks.report import describe, number, table
from benchmarks.workloads import taylor

OURS = "hodiff"
LOSS = nn.CrossEntropyLoss()


def problem(
    name: str, title: str, contestants: Mapping[str, Callable[[], Any]], expected: Any, tolerance: float = 1e-4
) -> Problem:
    """Return a problem whose unit is hodiff, and whose answers are compared in the largest element."""
    truth = flat(expected)

    def error(result: Any) -> float:
        return float((flat(result).double() - truth).abs().max() / truth.abs().max())

    def group(who: str) -> str:
        return "hodiff" if who.startswith(OURS) else "peer"

    listed = [Contestant(who, group(who), run) for who, run in contestants.items()]
    return Problem(name, title, listed, error, tolerance)


def flat(result: Any) -> Tensor:
    """Return all numbers of a result as one vector in float64."""
    leaves = result if isinstance(result, (list, tuple)) else result.values() if isinstance(result, dict) else [result]
    return torch.cat([torch.as_tensor(leaf).detach().flatten().double() for leaf in leaves])


def names(package: str) -> str:
    """Return a package with its version."""
    return f"{package} {version(package)}"


def split(objective: Objective, vector: Tensor) -> list[Tensor]:
    """Return a vector in the shapes of the parameters."""
    parameters = list(objective.module.parameters())
    pieces = vector.split([each.numel() for each in parameters])
    return [piece.view_as(each) for piece, each in zip(pieces, parameters, strict=True)]


def products() -> Iterator[Problem]:
    """Yield later products with Hessians and Gauss-Newton matrices: kept operators, one vector each."""
    for build in NETWORKS.values():
        yield from _products(build())


def _products(objective: Objective) -> Iterator[Problem]:
    import curvlinops
    import hessian_eigenthings as eigenthings
    from pyhessian import hessian as PyHessian
    from pyhessian.utils import hessian_vector_product

    data = [(objective.inputs, objective.targets)]
    x = objective.parameters()
    n = sum(each.numel() for each in x.values())
    vector = torch.randn(n, generator=torch.Generator().manual_seed(1))
    ours = hodiff.HessianOperator(objective, x)
    theirs = curvlinops.HessianLinearOperator(
        objective.module, LOSS, list(objective.module.parameters()), data, check_deterministic=False
    )
    things = eigenthings.HessianOperator(objective.module, data, eigenthings.supervised_loss(LOSS))
    other = PyHessian(copy.deepcopy(objective.module), LOSS, data=data[0], cuda=False)
    pieces = split(objective, vector)
    double = objective.double()
    expected = hodiff.hvp(double, double.parameters(), dict(zip(x, split(double, vector.double()), strict=True)))
    yield problem(
        f"{objective.name}: product with the Hessian",
        f"A product with the Hessian, {objective.name}",
        {
            "hodiff.HessianOperator": lambda: ours @ vector,
            names("curvlinops-for-pytorch"): lambda: theirs @ vector,
            names("hessian-eigenthings"): lambda: things.matvec(vector),
            names("PyHessian"): lambda: hessian_vector_product(other.gradsH, other.params, pieces),
        },
        expected,
    )
    gauss_newton = hodiff.GaussNewtonOperator(objective.module, F.cross_entropy, x, *data[0])
    theirs_gn = curvlinops.GGNLinearOperator(
        objective.module, LOSS, list(objective.module.parameters()), data, check_deterministic=False
    )
    things_gn = eigenthings.GGNOperator(
        objective.module, data, eigenthings.supervised_forward, eigenthings.supervised_loss_of_output(LOSS)
    )
    exact = hodiff.GaussNewtonOperator(
        double.module, F.cross_entropy, double.parameters(), double.inputs, double.targets
    )
    yield problem(
        f"{objective.name}: product with Gauss-Newton",
        f"A product with the Gauss-Newton matrix, {objective.name}",
        {
            "hodiff.GaussNewtonOperator": lambda: gauss_newton @ vector,
            names("curvlinops-for-pytorch"): lambda: theirs_gn @ vector,
            names("hessian-eigenthings"): lambda: things_gn.matvec(vector),
        },
        exact @ vector.double(),
    )


def eigenvalues() -> Iterator[Problem]:
    """Yield the largest eigenvalue of a Hessian, with the set-up of the operator."""
    import hessian_eigenthings as eigenthings
    from pyhessian import hessian as PyHessian

    objective = mlp()
    data = [(objective.inputs, objective.targets)]
    double = objective.double()
    top = hodiff.HessianOperator(double, double.parameters()).eigsh(1, which="LA", tol=1e-8).eigenvalues

    def ours(method: str) -> Tensor:
        operator = hodiff.HessianOperator(objective, objective.parameters())
        # The error of the eigenvalue is of the order of the square of the tolerance.
        return operator.eigsh(1, which="LA", tol=3e-2, method=method).eigenvalues

    def things() -> Tensor:
        operator = eigenthings.HessianOperator(objective.module, data, eigenthings.supervised_loss(LOSS))
        return eigenthings.lanczos(operator, k=1, max_iter=30, which="LA", seed=0).eigenvalues

    def other() -> Tensor:
        found, _ = PyHessian(copy.deepcopy(objective.module), LOSS, data=data[0], cuda=False).eigenvalues(tol=1e-4)
        return torch.tensor(found)

    contestants: dict[str, Callable[[], Any]] = {
        "hodiff eigsh": partial(ours, "auto"),
        'hodiff eigsh, method="lanczos"': partial(ours, "lanczos"),
        names("hessian-eigenthings"): things,
        names("PyHessian"): other,
    }
    yield problem("largest eigenvalue", "The largest eigenvalue of the Hessian to 0.5 %, mlp", contestants, top, 5e-3)


def factors() -> Iterator[Problem]:
    """Yield Kronecker factors and a product with them."""
    import curvlinops

    objective = cnn()
    data = [(objective.inputs, objective.targets)]
    x = objective.parameters()
    vector = torch.randn(sum(each.numel() for each in x.values()), generator=torch.Generator().manual_seed(1))
    double = objective.double()

    def ours(objective: Objective, vector: Tensor) -> Tensor:
        inputs, targets = objective.inputs, objective.targets
        return hodiff.KFACOperator(objective.module, F.cross_entropy, objective.parameters(), inputs, targets) @ vector

    def theirs() -> Any:
        operator = curvlinops.KFACLinearOperator(
            objective.module,
            LOSS,
            list(objective.module.parameters()),
            data,
            fisher_type="type-2",
            check_deterministic=False,
            separate_weight_and_bias=False,
        )
        return operator @ vector

    yield problem(
        "K-FAC",
        "Exact Kronecker factors of the Fisher matrix and a product, cnn",
        {"hodiff.KFACOperator": partial(ours, objective, vector), names("curvlinops-for-pytorch"): theirs},
        ours(double, vector.double()),
    )


def examples() -> Iterator[Problem]:
    """Yield gradients of examples, and exact Gauss-Newton diagonals."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad, DiagGGNExact

    objective = cnn()
    x, inputs, targets = objective.parameters(), objective.inputs, objective.targets

    def by_vmap(module: nn.Module, x: Any, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        def loss(x: Any, one: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(module, x, (one[None],)), target[None])

        found: dict[str, Tensor] = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(x, inputs, targets)
        return found

    def extended(extension: Any, attribute: str, scale: float) -> list[Tensor]:
        module, loss = extend(copy.deepcopy(objective.module)), extend(nn.CrossEntropyLoss())
        with backpack(extension):
            loss(module(inputs), targets).backward()
        return [scale * getattr(each, attribute) for each in module.parameters()]

    double = objective.double()
    yield problem(
        "gradients of examples",
        "Gradients of 32 examples, cnn",
        {
            "hodiff.per_sample": lambda: hodiff.per_sample.gradients(
                objective.module, F.cross_entropy, x, inputs, targets
            ),
            names("backpack-for-pytorch"): lambda: extended(BatchGrad(), "grad_batch", len(inputs)),
            f"{names('torch')}, vmap of grad": lambda: by_vmap(objective.module, x, inputs, targets),
        },
        by_vmap(double.module, double.parameters(), double.inputs, double.targets),
    )
    exact = hodiff.GaussNewtonOperator(
        double.module, F.cross_entropy, double.parameters(), double.inputs, double.targets
    )

    def ours() -> Tensor:
        operator = hodiff.GaussNewtonOperator(objective.module, F.cross_entropy, x, inputs, targets)
        return operator.diagonal(exact=True).value

    yield problem(
        "Gauss-Newton diagonal",
        "The exact diagonal of the Gauss-Newton matrix, cnn",
        {
            "hodiff diagonal(exact=True)": ours,
            names("backpack-for-pytorch"): lambda: extended(DiagGGNExact(), "diag_ggn_exact", 1.0),
        },
        exact.diagonal(exact=True).value,
    )


def posteriors() -> Iterator[Problem]:
    """Yield fits of a diagonal Laplace approximation, by its package's own back end and by hodiff's."""
    from laplace import DiagLaplace
    from laplace.curvature import BackPackGGN

    from hodiff.doors.laplace import Backend

    objective = cnn()
    loader = DataLoader(TensorDataset(objective.inputs, objective.targets), batch_size=16)

    def fitted(backend: Any) -> Tensor:
        posterior = DiagLaplace(copy.deepcopy(objective.module), "classification", backend=backend)
        posterior.fit(loader)
        found: Tensor = posterior.H
        return found

    own = names("laplace-torch")
    contestants = {f"hodiff, in {own}": partial(fitted, Backend), f"{own}, BackPACK": partial(fitted, BackPackGGN)}
    yield problem("Laplace", "A diagonal Laplace approximation, cnn", contestants, fitted(BackPackGGN), 1e-3)


def metas() -> Iterator[Problem]:
    """Yield gradients through inner steps of gradient descent."""
    import torchopt

    objective, steps, lr = mlp(), 5, 0.1
    inputs, targets = objective.inputs, objective.targets

    def ours(objective: Objective) -> list[Tensor]:
        x = {name: each.detach().requires_grad_() for name, each in objective.module.named_parameters()}
        inner = hodiff.meta.adapt(lambda x, _: objective(x), x, None, hodiff.meta.SGD(lr), steps)
        return list(torch.autograd.grad(objective(inner), list(x.values())))

    def theirs() -> list[Tensor]:
        module = copy.deepcopy(objective.module)
        optimizer = torchopt.MetaSGD(module, lr=lr)
        start = list(module.parameters())
        for _ in range(steps):
            optimizer.step(F.cross_entropy(module(inputs), targets))
        return list(torch.autograd.grad(F.cross_entropy(module(inputs), targets), start))

    yield problem(
        "meta-gradient",
        "A gradient through five inner steps, mlp",
        {"hodiff.meta.adapt": partial(ours, objective), names("torchopt"): theirs},
        ours(objective.double()),
    )


def laplacians() -> Iterator[Problem]:
    """Yield Laplacians of the network that torch-jet's paper measures; "jet-for-pytorch" needs Python 3.12."""
    if find_spec("jet") is None:
        return
    from jet.laplacian import laplacian

    net, exact = (taylor.network(taylor.WIDTHS, dtype) for dtype in (torch.float32, torch.float64))
    x = taylor.inputs(1, taylor.WIDTHS[0], torch.float32)[0]
    ours, theirs = hodiff.laplacian(net), laplacian(net, x)
    yield problem(
        "Laplacian",
        "The Laplacian of a network of 50 inputs at one point",
        {"hodiff.laplacian": lambda: ours(x), "torch-jet": lambda: theirs(x)[2]},
        torch.func.hessian(exact)(x.double()).squeeze(0).trace(),
    )


PARTS = (products, eigenvalues, factors, examples, posteriors, metas, laplacians)


def problems() -> Iterator[Problem]:
    """Yield all problems, one after another, as each takes memory."""
    for part in PARTS:
        yield from part()


def page(results: Sequence[Result], here: dict[str, str | int]) -> str:
    """Return a page with a table for each problem."""
    parts = [_HEADER.format(machine=describe(here))]
    for result in results:
        rows = [
            [
                row.name,
                number(row.milliseconds, ".3g") or "wrong",
                number(row.gradients, ".2f"),
                number(row.relative_error, ".1e"),
            ]
            for row in result.rows
        ]
        parts.append(f"## {result.title}\n\n{table(['', 'ms', '/ hodiff', 'relative error'], rows)}\n")
    return "\n".join(parts)


_HEADER = """# libraries: hodiff and other libraries for PyTorch

{machine}

Processor seconds of one core, medians over rounds, in each of which every contestant ran once in turn. `/ hodiff` is
the median over rounds of the ratio to hodiff: above 1, hodiff is faster. Products are those of operators that exist
already; everything else includes the set-up. There hodiff compares two evaluations to see whether a function is
deterministic, except for K-FAC, gradients of examples and the exact diagonal, whose module was compared before. The
error is that of the largest element, against float64; a contestant beyond the tolerance is wrong and not timed. `make
bench-peers` writes this page.
"""
