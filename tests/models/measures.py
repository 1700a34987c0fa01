"""Errors of hodiff's features on a model, against differences of torch's gradients and of outputs."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from models.specimen import Architecture
from torch import Tensor
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map_only

import hodiff
from hodiff.checks.subjects.double_precision import InDouble
from hodiff.checks.torch_warnings import silence_torch_warnings
from hodiff.operators.compiled import product_graphs as graphs

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Measure:
    """One feature of hodiff on one model.

    Attributes:
        feature: The name of the feature.
        outcome: An error relative to the largest element, or the message.
        seconds: The running time.
    """

    feature: str
    outcome: float | str
    seconds: float


class Case:
    """A model in float64, as a function of its parameters."""

    def __init__(self, architecture: Architecture):
        built = architecture.made()
        # If the model rounds to float32 inside, differences would show only rounding errors.
        self.exact: AbstractContextManager[Any] = InDouble() if architecture.coarse else nullcontext()
        self.model = built.model.double()
        self.inputs = tree_map_only(Tensor, _in_double, built.inputs)
        self.parameters = {
            name: _in_double(each.detach()) for name, each in self.model.named_parameters() if each.requires_grad
        }
        generator = torch.Generator().manual_seed(3)
        self.direction = {name: _random(each, generator) for name, each in self.parameters.items()}
        # Training never moves the padding row, and torch's gradient omits it.
        names = {id(each): name for name, each in self.model.named_parameters()}  # a tied weight has one of its names
        for module in self.model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                name = names.get(id(module.weight))
                if name in self.direction:  # the weight may be frozen or parametrized
                    self.direction[name][module.padding_idx] = 0

    def outputs(self, parameters: Parameters, inputs: Any = None) -> list[Tensor]:
        """Return the floating-point outputs, with the same random numbers in every call."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            # A model may write into its inputs, or make them require a gradient.
            given = tree_map_only(Tensor, Tensor.clone, self.inputs if inputs is None else inputs)
            everything = tree_leaves(functional_call(self.model, parameters, given))
        return [each.double() for each in everything if isinstance(each, Tensor) and each.is_floating_point()]

    def loss(self, parameters: Parameters) -> Tensor:
        """Compute a nonlinear scalar function of the outputs."""
        return torch.stack([(each.sin() + each.square()).mean() for each in self.outputs(parameters)]).sum()

    def gradient(self, parameters: Parameters) -> Tensor:
        """Compute the gradient by torch, with hodiff's corrections if torch raises."""
        try:
            return self._gradient(parameters)
        except RuntimeError:
            with hodiff.corrected():
                return self._gradient(parameters)

    def _gradient(self, parameters: Parameters) -> Tensor:
        leaves = [each.detach().requires_grad_() for each in parameters.values()]
        value = self.loss(dict(zip(parameters, leaves, strict=True)))
        return flat(torch.autograd.grad(value, leaves, materialize_grads=True))

    def moved(self, step: float, direction: Parameters) -> Parameters:
        """Return the parameters after a step along the direction."""
        return {name: each + step * direction[name] for name, each in self.parameters.items()}

    def difference(self, function: Callable[[Parameters], Tensor], direction: Parameters) -> Tensor:
        """Differentiate a function along a direction by central differences of two steps, in float64 throughout.

        Steps are small, to avoid kinks of relu, and are reduced as long as the two differences
        disagree: RWKV curves within 1e-7. The steps count that disagree least.
        """

        def central(h: float) -> Tensor:
            return (function(self.moved(h, direction)) - function(self.moved(-h, direction))).detach() / (2 * h)

        tried: list[tuple[float, Tensor]] = []
        with self.exact:
            for step in (1e-5, 1e-6, 1e-7, 1e-8, 1e-9):
                coarse, fine = central(step), central(step / 2)
                tried.append((error(coarse, fine), (4 * fine - coarse) / 3))
                if tried[-1][0] < 1e-4:
                    break
        return min(tried, key=lambda pair: pair[0])[1]


def flat(tree: Any) -> Tensor:
    """Flatten all numbers of a tree into a vector, with complex numbers as two real ones."""
    return torch.cat([_real(each).reshape(-1) for each in tree_leaves(tree)])


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _in_double(tensor: Tensor) -> Tensor:
    wide = {torch.complex64: torch.complex128}.get(tensor.dtype, torch.float64)
    return tensor.to(wide) if tensor.is_floating_point() or tensor.is_complex() else tensor


def _random(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a direction in proportion to a parameter."""
    draw = torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
    return draw * (tensor.abs().square().mean().sqrt() + 1e-2)


def error(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest element."""
    # If the model makes a leaf inside, the product has a graph.
    return float((got.detach() - expected).abs().max() / expected.abs().max())


def checked(architecture: Architecture) -> hodiff.Report:
    """Check the model."""
    built = architecture.made()
    return hodiff.check(built.model, built.inputs, **architecture.options)


def previewed(architecture: Architecture) -> Any:
    """Run preflight on the model, usually a user's second call."""
    built = architecture.made()
    return hodiff.preflight(built.model, *built.inputs)


def route_errors(
    architecture: Architecture, routes: Sequence[str] = (), **options: bool
) -> Iterator[tuple[str, float]]:
    """Yield the error of a product by the given routes, or by all supported routes."""
    case = Case(architecture)
    expected = case.difference(case.gradient, case.direction)
    for route in routes or architecture.routes:
        product = hodiff.hvp(case.loss, case.parameters, case.direction, route=route, **options)
        yield route, error(flat(product), expected)


def operator_error(architecture: Architecture) -> float:
    """Return the error of one column of a product with a block of vectors."""
    case = Case(architecture)
    A = hodiff.HessianOperator(case.loss, case.parameters)
    column = flat(case.direction)
    block = A @ torch.stack([torch.ones_like(column), column, column.flip(0)], dim=1)
    return error(block[:, 1], case.difference(case.gradient, case.direction))


def gauss_newton_error(architecture: Architecture) -> float:
    """Return the error of a product with J'J, against J v by differences of outputs and J' by torch's gradient."""
    case = Case(architecture)

    def squares(outputs: list[Tensor], _: Any) -> Tensor:
        return torch.stack([each.square().sum() for each in outputs]).sum() / 2

    G = hodiff.GaussNewtonOperator(case.outputs, squares, case.parameters, case.inputs, None)
    with hodiff.corrected():
        tangent = case.difference(lambda p: flat([each.detach() for each in case.outputs(p)]), case.direction)
    leaves = [each.detach().requires_grad_() for each in case.parameters.values()]
    with hodiff.corrected():
        outputs = flat(case.outputs(dict(zip(case.parameters, leaves, strict=True))))
        expected = flat(torch.autograd.grad(outputs @ tangent, leaves, materialize_grads=True))
    return error(flat(G @ case.direction), expected)


def eigenvalue_error(architecture: Architecture) -> float:
    """Return the residual of the largest eigenpair, by differences of the gradient along the eigenvector."""
    case = Case(architecture)
    A = hodiff.HessianOperator(case.loss, case.parameters)
    found = hodiff.estimators.eigsh(A, 1, tol=1e-8)
    vector, value = found.eigenvectors[:, 0], found.eigenvalues[0]
    direction = A.to_tree(vector)
    return float((case.difference(case.gradient, direction) - value * vector).norm() / value.abs())


def captured_error(architecture: Architecture) -> float | str:
    """Return the error of a compiled operator that runs its captured graphs, or the reason why it is eager."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(graphs, "compile_graph", lambda graph, *_, **__: graph))
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always", hodiff.HodiffWarning)
        case = Case(architecture)
        product = hodiff.HessianOperator(case.loss, case.parameters, compile=True) @ case.direction
        found = error(flat(product), case.difference(case.gradient, case.direction))
    said = [str(each.message) for each in caught if issubclass(each.category, hodiff.HodiffWarning)]
    return said[0] if said else found


def measured_captured(architecture: Architecture) -> Measure:
    """Time a compiled operator."""
    return _timed("captured", lambda: captured_error(architecture))


def measures(architecture: Architecture) -> Iterator[Measure]:
    """Time every feature."""
    yield _timed("check", lambda: str(checked(architecture)).splitlines()[0].partition(": ")[2])
    yield _timed("preflight", lambda: previewed(architecture).verdict.removeprefix("verdict: "))
    if not architecture.measured:
        return
    yield _timed("products", lambda: max(each for _, each in route_errors(architecture)))
    yield _timed("operator", lambda: operator_error(architecture))
    yield _timed("Gauss-Newton", lambda: gauss_newton_error(architecture))
    yield _timed("top eigenvalue", lambda: eigenvalue_error(architecture))


def _timed(feature: str, run: Callable[[], float | str]) -> Measure:
    start = time.perf_counter()
    with silence_torch_warnings():
        try:
            outcome = run()
        except Exception as raised:
            outcome = f"{type(raised).__name__}: {raised}"
    return Measure(feature, outcome, time.perf_counter() - start)
