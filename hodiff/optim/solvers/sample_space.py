"""Base class of natural gradients by equations with a row for each sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap
from torch.utils import _pytree as pytree

from hodiff.common.module_state import functional_call
from hodiff.common.options import require_callable, require_int
from hodiff.common.trees import PyTree, describe
from hodiff.corrections import Corrections
from hodiff.errors import InputError
from hodiff.optim.finite_numbers import require_finite
from hodiff.optim.local_models import put_gradients
from hodiff.optim.solvers.solver_settings import SolverOptimizer
from hodiff.torch_internals.wording import Wording, says


class _OneSample(nn.Module):
    """A function of one sample that calls a module, as a module itself, for `functional_call`."""

    def __init__(self, caller: str, model: nn.Module, function: Callable[[Any], Tensor]):
        super().__init__()
        self.caller = caller
        # A tuple, as the function may be a module itself, whose parameters must not count twice.
        self.model, self._function = model, (function,)

    def forward(self, sample: Any) -> Tensor:
        found = self._function[0](sample)
        if not isinstance(found, Tensor) or not (found.is_floating_point() or found.is_complex()):
            got = describe(found) if isinstance(found, Tensor) else type(found).__name__
            raise InputError(
                f"{self.caller}: step: function: expected a function of one sample that returns a floating-point "
                f"tensor, got {got}."
            )
        if not found.numel():
            raise InputError(
                f"{self.caller}: step: function: expected a function of one sample that returns at least one number, "
                f"got {describe(found)}; leave out terms without residuals."
            )
        # A complex number is a row for each of its parts.
        return (torch.view_as_real(found.resolve_conj()) if found.is_complex() else found).reshape(-1)


class SampleSpaceOptimizer(SolverOptimizer):
    """Optimizer for functions of one sample that call a module."""

    sharded_by_group = None

    def __init__(self, model: nn.Module, defaults: dict[str, Any], chunk_size: int | None):
        if not isinstance(model, nn.Module):
            raise InputError(
                f"{self.caller}: model: expected a torch.nn.Module that the functions of one sample call, got "
                f"{type(model).__name__}; pass the model, not its parameters; "
                "make an unknown coefficient a Parameter of a module that also holds the model."
            )
        require_int(self.caller, "chunk_size", chunk_size, 1, optional=True)
        self.module, self.chunk_size = model, chunk_size
        super().__init__([p for p in model.parameters() if p.requires_grad], defaults, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "module": self.module, "chunk_size": self.chunk_size}

    def _require_function(self, function: Any, samples: PyTree) -> int:
        """Raise unless the function is callable, and samples are tensors of one length; return the length."""
        require_callable(f"{self.caller}: step", function=function)
        leaves = pytree.tree_leaves(samples)
        lengths = {len(each) if isinstance(each, Tensor) and each.dim() else 0 for each in leaves}
        if len(lengths) != 1 or 0 in lengths:
            got = ", ".join(describe(each) if isinstance(each, Tensor) else repr(each) for each in leaves)
            raise InputError(
                f"{self.caller}: step: samples: expected tensors with the samples along their first dimension, at "
                f"least one, got {got or 'no tensor'}."
            )
        return lengths.pop()

    def _named(self) -> dict[str, Tensor]:
        """Return the parameters of all groups by their names within `_OneSample`."""
        names = {id(each): f"model.{name}" for name, each in self.module.named_parameters()}
        parameters = self.parameters()
        if not parameters or any(id(each) not in names for each in parameters):
            raise InputError(
                f"{self.caller}: model: expected groups of parameters of the model, at least one that requires a "
                "gradient, got others; create the optimizer again after changes of the model."
            )
        return {names[id(each)]: each.detach() for each in parameters}

    def _values(self, function: Callable[[Any], Tensor], samples: PyTree) -> Tensor:
        """Evaluate a function at all samples, (N, k)."""
        with self.refusing_randomness(), torch.no_grad(), Corrections(lean=True):
            found: Tensor = vmap(self.of_one(function), chunk_size=self.chunk_size)(samples)
        return found

    def of_one(self, function: Callable[[Any], Tensor]) -> nn.Module:
        """Return the function as a module that returns a vector of real numbers."""
        return _OneSample(self.caller, self.module, function)

    @contextmanager
    def refusing_randomness(self) -> Iterator[None]:
        """Raise a fitting error if a function draws random numbers within the context."""
        try:
            yield
        except RuntimeError as error:
            if not says(error, Wording.RANDOM):
                raise
            raise InputError(
                f"{self.caller}: step: function: expected a function without random numbers, such as those of dropout, "
                "as values and derivatives would have different ones, got one that draws; call model.eval()."
            ) from error

    def _rows(self, function: Callable[[Any], Tensor], samples: PyTree, width: int) -> list[Tensor]:
        """Differentiate a function of `width` numbers at all samples, (N, k, n) for each parameter."""
        one, parameters = self.of_one(function), self._named()

        def of_one(parameters: dict[str, Tensor], sample: Any) -> Tensor:
            found: Tensor = functional_call(one, parameters, (sample,))
            return found[0] if width == 1 else found

        derive = grad if width == 1 else jacrev
        with torch.no_grad(), Corrections(lean=True, many=True):
            found = vmap(derive(of_one), in_dims=(None, 0), chunk_size=self.chunk_size)(parameters, samples)
        return [each.reshape(len(each), width, -1) for each in found.values()]

    def _descend(self, rows: Sequence[Tensor], right: Tensor, loss: Tensor) -> list[Tensor]:
        r"""Set gradients $J^\top r$, and find the direction; `rows` are J (N, k, n) and `right` is r (N, k).

        Returns:
            The direction, a tensor like each parameter.

        Raises:
            InputError: If a number is not finite, or the damped equations are singular.
        """
        parameters, right = self.parameters(), right.reshape(-1)
        rows = [each.flatten(0, 1) for each in rows]
        _, _, *norms = require_finite(self.caller, "values and derivatives", [loss, right, *rows])
        # Numbers are only read again where squares may have vanished.
        if not any(norms) and not any(bool(each.any()) for each in rows) and bool(right.any()):
            raise InputError(
                f"{self.caller}: step: function: expected functions that depend on the model's parameters, got "
                "derivatives that are all zero; call the model that the optimizer was created with, and look for "
                ".detach() or torch.no_grad()."
            )
        gradients = [each.T @ right for each in rows]
        if self._ranks.watched:
            self._watch(gradients, float(loss))
        put_gradients(parameters, [g.reshape(p.shape) for g, p in zip(gradients, parameters, strict=True)])
        momentum = self.setting("momentum")
        before = [self.state[p].get("direction") for p in parameters]
        # Parameters that were frozen before have no direction yet.
        kept = [torch.zeros_like(p) if d is None else d for p, d in zip(parameters, before, strict=True)]
        kept = [momentum * each.reshape(-1) for each in kept]
        if momentum:
            right = right - sum(each @ d for each, d in zip(rows, kept, strict=True))
        solved = self._solved(rows, right)
        found = [(s + d).reshape(p.shape) for s, d, p in zip(solved, kept, parameters, strict=True)]
        require_finite(self.caller, "directions", found)
        if momentum:
            for parameter, each in zip(parameters, found, strict=True):
                self.state[parameter]["direction"] = each
        return found

    def _solved(self, rows: Sequence[Tensor], right: Tensor) -> list[Tensor]:
        r"""Compute $J^\top (J J^\top + \mu I)^{-1} r$, by the smaller of the two systems of equations."""
        sizes = [each.shape[1] for each in rows]
        if sum(sizes) < len(right):
            joint = torch.cat(list(rows), 1)
            return list(self._solve(joint.T @ joint, joint.T @ right).split(sizes))
        gram = rows[0] @ rows[0].T
        for each in rows[1:]:
            gram.addmm_(each, each.T)
        solution = self._solve(gram, right)
        return [each.T @ solution for each in rows]

    def _solve(self, matrix: Tensor, right: Tensor) -> Tensor:
        # Factors in float64 leave the rounding of the products only.
        wide = torch.float32 if matrix.device.type == "mps" else torch.float64
        matrix, found = matrix.to(wide), right.to(wide)
        # SPRING and old checkpoints lack this setting.
        cutoff = self.param_groups[0].get("rcond")
        if cutoff is not None:
            # Finite derivatives may have products that overflow.
            require_finite(self.caller, "products of derivatives", [matrix])
            return _pseudo_inverse_product(matrix, found, self.setting("damping"), cutoff).to(right.dtype)
        matrix.diagonal().add_(self.setting("damping"))
        factor, info = torch.linalg.cholesky_ex(matrix)
        if bool(info):
            remedies = ["increase it"]
            if "rcond" in self.defaults:
                remedies.append("set rcond, the cutoff of a pseudo-inverse")
            if right.dtype != torch.float64:
                remedies.append("use a model in float64")
            raise InputError(
                f"{self.caller}: damping: expected damping with which the equations are positive definite in "
                f"{right.dtype}, got {self.setting('damping')!r}; {', or '.join(remedies)}."
            )
        return torch.cholesky_solve(found[:, None], factor)[:, 0].to(right.dtype)


def _pseudo_inverse_product(matrix: Tensor, right: Tensor, damping: float, cutoff: float) -> Tensor:
    """Solve the damped equations along eigenvectors of the matrix whose eigenvalues exceed the cutoff."""
    values, vectors = torch.linalg.eigh(matrix)
    inverses = torch.where(values > cutoff * values[-1], 1 / (values + damping), 0.0)
    product: Tensor = vectors @ (inverses * (vectors.T @ right))
    return product
