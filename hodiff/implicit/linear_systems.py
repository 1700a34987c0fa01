"""Linear systems of trees on plain tensors: choice of a method, solution, and diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.authoring.closures import recorded
from hodiff.authoring.rule_trees import TreeLayout
from hodiff.common.trees import PyTree
from hodiff.implicit.diagnostics import Reporter, rounding
from hodiff.implicit.linear_maps import Map, Pair
from hodiff.implicit.linear_methods import DENSE_UP_TO, METHODS, SquareSystem, default_tolerance
from hodiff.implicit.solver_call import Job, Ravel, Tensors
from hodiff.implicit.sparse_matrices import matrix_in_words_of
from hodiff.operators.linear.linear_product import multiply
from hodiff.rules.blockwise import all_batched
from hodiff.torch_internals.autograd.grad_mode import set_tangents
from hodiff.torch_internals.autograd.transforms import in_transform, outside_transforms


@dataclass(frozen=True)
class LinearOptions:
    """Options of the linear solver."""

    # Name in the table of methods, function (matvec, rhs) -> x of trees, or "auto".
    method: str | Callable[[Map, PyTree], PyTree]
    symmetric: bool
    tol: float | None
    max_iterations: int | None
    report: Reporter
    # User's map, which must not close over tensors with a derivative; None if that is known.
    given: Callable[..., Any] | None = None

    def choose(self, size: int) -> str | Callable[[Map, PyTree], PyTree]:
        """Return the method for a number of unknowns; "auto" never chooses CG, which needs more than symmetry."""
        if self.method != "auto":
            return self.method
        return "dense" if size <= DENSE_UP_TO else "minres" if self.symmetric else "gmres"


@dataclass(frozen=True)
class _Product:
    """Product with the matrix, as the operator of a `LinearProduct`: a user's solver may differentiate it."""

    product: Callable[[Tensor], Tensor]
    transposed: Callable[[], Callable[[Tensor], Tensor]]
    composed = False
    made_of_constants = True

    @property
    def T(self) -> _Product:  # noqa: N802 - the name that every matrix has
        return _Product(self.transposed(), lambda: self.product)

    def multiply(self, block: Tensor) -> Tensor:
        """Multiply the columns one by one."""
        return torch.stack([self.product(column) for column in block.T], 1)


@dataclass(frozen=True)
class LinearJob:
    """Solution of linear systems with one matrix, on plain tensors."""

    pair: Pair
    options: LinearOptions
    rhs_layout: TreeLayout
    layout: TreeLayout
    # Number of tensors of the right-hand side, which come first, and of their leading dimensions that index sides.
    sides: int
    batch: int

    @property
    def caller(self) -> str:
        """Name of the public function."""
        return self.options.report.caller

    def batched(self, in_dims: Sequence[int | None], size: int, leaves: Tensors) -> tuple[Job, Tensors] | None:
        """Batch right-hand sides with one matrix; batched matrices are solved separately."""
        if any(dim is not None for dim in in_dims[self.sides :]):
            return None
        wide = all_batched(size, in_dims[: self.sides], leaves[: self.sides])
        return replace(self, batch=self.batch + 1), [*wide, *leaves[self.sides :]]

    def run(self, leaves: Tensors) -> tuple[Tensor, ...]:
        """Solve, check the residual, and report problems."""
        sides, params = leaves[: self.sides], self.layout.fill(leaves[self.sides :])
        if not any(each.numel() for each in sides):
            return tuple(torch.zeros_like(each) for each in sides)
        outer = sides[0].shape[: self.batch]
        rows = [each.reshape(outer.numel(), *each.shape[self.batch :]) for each in sides]
        ravel = Ravel(self.rhs_layout.fill([each[0] for each in rows]))
        rhs = torch.stack([ravel.vector([each[i] for each in rows]) for i in range(len(rows[0]))])
        x = self._solve(ravel, rhs, params)
        trees = [pytree.tree_leaves(ravel.tree(each)) for each in x]
        return tuple(torch.stack(parts).reshape((*outer, *parts[0].shape)) for parts in zip(*trees, strict=True))

    def _solve(self, ravel: Ravel, rhs: Tensor, params: tuple[Any, ...]) -> Tensor:
        like = ravel.tree(rhs[0])
        if self.options.given is not None:
            evaluate(self.caller, self.pair.forward.apply, self.options.given, (like, *params), True)

        def prepared(which: str) -> Callable[[Tensor], Tensor]:
            # A user's solver may ask for the transpose inside of a transform.
            with outside_transforms() if in_transform() else nullcontext():
                product = getattr(self.pair, which).prepare(like, *params)
            return lambda v: ravel.vector(product(ravel.tree(v))).detach()

        method = self.options.choose(ravel.size)
        tol = self.options.tol
        tol = default_tolerance(method, rhs.dtype) if tol is None else tol
        product = prepared("forward")
        system = SquareSystem(
            product,
            lambda: prepared("transposed"),
            lambda: matrix_in_words_of(self.caller, self.pair.forward.matrix, like, *params),
            tol,
            self.options.max_iterations,
        )
        if isinstance(method, str):
            x = METHODS[method](system, rhs).detach()
        else:
            differentiable = _Product(product, lambda: prepared("transposed"))
            x = torch.stack([self._by_user(method, ravel, differentiable, each) for each in rhs])
        self._inspect(system, str(getattr(method, "__name__", method)), rhs, x)
        return x

    def _by_user(self, method: Callable[..., Any], ravel: Ravel, product: _Product, b: Tensor) -> Tensor:
        found = method(lambda tree: ravel.tree(multiply(product, ravel.vector(tree)[:, None])[:, 0]), ravel.tree(b))
        remedy = "return the solution with the structure of the right-hand side"
        ravel.require_same(found, f"{self.caller}: linear_solver: result", remedy)
        return ravel.vector(found).detach()

    def _inspect(self, system: SquareSystem, name: str, rhs: Tensor, x: Tensor) -> None:
        if not self.options.report.check:
            return
        size = rhs.norm(dim=1)
        # Rounding in the product itself is not a fault of the method.
        allowed = 10 * system.tol
        residual = torch.stack([(b - system.product(each)).norm() for b, each in zip(rhs, x, strict=True)])
        relative = torch.where(size > 0, residual / size, residual)
        converged = bool((relative <= allowed).all())
        if not converged and (what := _not_linear(system, rhs)):
            self.options.report(f"the product with the matrix is not linear: {what}.")
            return
        if system.trouble:
            self.options.report(f"{system.trouble[0]}; derivatives do not exist or have lost their digits.")
            return
        if not converged:
            worst = relative.nan_to_num(nan=torch.inf).max().item()
            self.options.report(
                f"the linear solver {name!r} did not converge: relative residual {worst:.1e}, expected at most "
                f"{allowed:.1e}; the Jacobian may be singular, or not as the method needs it; raise max_iterations "
                "or tol, or choose another method."
            )


def _not_linear(system: SquareSystem, rhs: Tensor) -> str:
    """Describe how the product of a system breaks linearity; return an empty string if it does not."""
    # NaN in the matrix makes NaN of 0.
    if bool(system.product(torch.zeros_like(rhs[0])).nan_to_num(nan=0.0).any()):
        return "matvec(0) is not 0; subtract this constant from matvec and from b"
    for each in rhs:
        double = 2 * system.product(each)
        if bool((system.product(2 * each) - double).norm() > rounding(rhs.dtype, 0.5) * double.norm()):
            return "matvec(2 * x) is not 2 * matvec(x); use hodiff.implicit.root for equations that are not linear"
    return ""


def evaluate(caller: str, f: Callable[..., Any], given: Any, arguments: Sequence[Any], refuse: bool) -> Any:
    """Call a user's function of constants; if `refuse`, raise on tensors with a derivative that `given` closes over."""
    if not refuse:
        return f(*arguments)
    # Forward mode is off inside a Function, and tangents would be invisible.
    with set_tangents(True):
        return recorded(caller, lambda _, *arguments: f(*arguments), (given, *arguments))
