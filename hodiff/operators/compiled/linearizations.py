"""Compiled linearizations: graphs captured once for each form of the arguments, and compared with eager products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.derivatives.capture.refusals import CaptureError
from hodiff.derivatives.compilation import Arguments, agree, warn_of_failure
from hodiff.derivatives.graphs_by_form import GraphsByForm
from hodiff.errors import HodiffError
from hodiff.operators.compiled.graphs import Graphs
from hodiff.operators.compiled.linear_graphs import Leaves, capture
from hodiff.operators.compiled.linearization import CompiledLinearization
from hodiff.recompute.dependencies import Dependencies

Product = Callable[[Leaves, Leaves, tuple[Any, ...]], Sequence[Tensor]]


class CompiledLinearizations:
    """Linearizes one operator by compiled graphs, which are captured once for each form of what they depend on.

    Args:
        caller: The operator, for warnings.
    """

    def __init__(self, caller: str):
        self.caller = caller
        self._graphs: GraphsByForm[Graphs] = GraphsByForm(f"{caller}: f")

    # Compiled code belongs to its process, and to the functions that it was made of.
    def __getstate__(self) -> dict[str, str]:
        return {"caller": self.caller}

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def linearize(
        self,
        product: Product,
        functions: tuple[Callable[..., Any], ...],
        leaves: Leaves,
        args: tuple[Any, ...],
        eager: Callable[[], Any],
    ) -> CompiledLinearization | None:
        """The linearization by captured graphs; None where that failed or differed from eager, which is warned of."""
        arguments = Arguments((leaves, args))

        def compared() -> tuple[Leaves, Leaves]:
            generator = torch.Generator().manual_seed(0)
            vector = tuple(
                torch.randn(1, *leaf.shape, generator=generator, dtype=torch.float64).to(leaf) for leaf in leaves
            )
            return vector, eager().products(vector)

        def capture(dependencies: Dependencies, expected: tuple[Leaves, Leaves]) -> Graphs | None:
            count = len(arguments.tensors)

            def of_tensors(constants: Leaves, tangents: Leaves) -> Sequence[Tensor]:
                point, rest = arguments.filled(constants[:count])
                with dependencies.filled(constants[count:]):
                    return product(point, tangents, rest)

            return self._capture(of_tensors, (*arguments.tensors, *dependencies.tensors), *expected)

        return self._graphs.run(functions, arguments, compared, capture, _linearized)

    def _capture(
        self,
        product: Callable[[Leaves, Leaves], Sequence[Tensor]],
        constants: Leaves,
        vector: Leaves,
        expected: Leaves,
    ) -> Graphs | None:
        try:
            constants = tuple(each.detach() for each in constants)
            halves = capture(product, constants, tuple(v[0].clone() for v in vector))
            graphs = Graphs(self.caller, halves)
            residuals = graphs.residuals(constants)
            if not all(isinstance(each, Tensor) for each in residuals):
                raise CaptureError("it computes with a number that it reads from a tensor; keep it a tensor")
            found = graphs.uncompiled(residuals, vector)
        except HodiffError:
            raise
        except Exception as error:
            # Eager products work, whatever could not be traced.
            warn_of_failure(f"{self.caller}: the product", error)
            return None
        same, gap = agree(found, expected)
        if not same:
            warn_of_failure(f"{self.caller}: the product", gap)
            return None
        return graphs


def _linearized(graphs: Graphs, inputs: Leaves) -> CompiledLinearization:
    constants = tuple(each.detach() for each in inputs)
    return CompiledLinearization(graphs, graphs.residuals(constants), constants)
