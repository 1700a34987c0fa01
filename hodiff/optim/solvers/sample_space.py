"""Natural gradients by equations with a row for each sample: least squares, and wavefunctions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.utils import _pytree as pytree

from hodiff.common.options import require_callable, require_choice, require_int
from hodiff.common.trees import PyTree, describe
from hodiff.corrections import Corrections
from hodiff.errors import InputError
from hodiff.optim.finite_numbers import require_finite
from hodiff.optim.local_models import put_gradients
from hodiff.optim.settings import GRID, settings_in
from hodiff.optim.solvers.solver_settings import SolverOptimizer

# A function of one point, and the points.
Term = tuple[Callable[[Any], Tensor], PyTree]

# Of a line search over a grid: halvings of the shortest step, and misses in a row after which it ends.
_HALVINGS, _MISSES = 30, 5


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
        # A complex number is a row for each of its parts.
        return (torch.view_as_real(found.resolve_conj()) if found.is_complex() else found).reshape(-1)


class SampleSpaceOptimizer(SolverOptimizer):
    """Optimizer for functions of one sample that call a module."""

    sharded_by_group = None

    def __init__(self, model: nn.Module, defaults: dict[str, Any], chunk_size: int | None):
        if not isinstance(model, nn.Module):
            raise InputError(
                f"{self.caller}: model: expected a torch.nn.Module that the functions of one sample call, got "
                f"{type(model).__name__}; pass the model, not its parameters."
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
        one = _OneSample(self.caller, self.module, function)
        with torch.no_grad(), Corrections(lean=True):
            found: Tensor = vmap(one, chunk_size=self.chunk_size)(samples)
        return found

    def _rows(self, function: Callable[[Any], Tensor], samples: PyTree, width: int) -> list[Tensor]:
        """Differentiate a function of `width` numbers at all samples, (N, k, n) for each parameter."""
        one, parameters = _OneSample(self.caller, self.module, function), self._named()

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
        require_finite(self.caller, "values and derivatives", [loss, right, *rows])
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
            return list(self._cholesky(joint.T @ joint, joint.T @ right).split(sizes))
        gram = rows[0] @ rows[0].T
        for each in rows[1:]:
            gram.addmm_(each, each.T)
        solution = self._cholesky(gram, right)
        return [each.T @ solution for each in rows]

    def _cholesky(self, matrix: Tensor, right: Tensor) -> Tensor:
        # Factors in float64 leave the rounding of the products only.
        wide = torch.float32 if matrix.device.type == "mps" else torch.float64
        matrix = matrix.to(wide)
        matrix.diagonal().add_(self.setting("damping"))
        factor, info = torch.linalg.cholesky_ex(matrix)
        if bool(info):
            raise InputError(
                f"{self.caller}: damping: expected damping with which the equations are positive definite in "
                f"{right.dtype}, got {self.setting('damping')!r}; increase it, or use a model in float64."
            )
        return torch.cholesky_solve(right.to(wide)[:, None], factor)[:, 0].to(right.dtype)


class ENGD(SampleSpaceOptimizer):
    r"""Energy natural gradients: Gauss-Newton steps for residuals at points, by equations with a row for each point.

    $$ f(\theta) = \sum_t \frac{1}{2 N_t} \sum_{i=1}^{N_t} \|r_t(x_{ti})\|^2 = \tfrac12 \|r\|^2, \qquad
       J = \partial r / \partial \theta $$

    $$ \phi \leftarrow \alpha \phi + J^\top (J J^\top + \mu I)^{-1} (r - \alpha J \phi), \qquad
       \theta \leftarrow \theta - \gamma\, \phi $$

    For physics-informed networks, with a term for the equation and one for each boundary condition. The matrix has as
    many rows as there are residuals; with fewer parameters than residuals, the equivalent equations in the parameters
    are solved. Memory is that of J, a number for each residual and parameter, and of the matrix. Use float64: products
    square the condition of J, and in float32 `damping` must be larger than their rounding.

    Args:
        model: Module whose parameters are trained.
        lr: $\gamma$, a number or a tensor with one number; with a line search, the longest step.
        damping: $\mu$.
        momentum: $\alpha$; at 0 each step depends on its own points only.
        line_search_fn: "grid" takes the step of least loss among $\gamma, \gamma / 2, \dots, \gamma / 2^{30}$, or none
            if all raise it. The search ends five halvings after the best step; each costs an evaluation of the
            residuals. None takes the full step.
        chunk_size: Number of points that are differentiated together; None for all.

    Raises:
        InputError: If an argument is invalid, or a parameter complex or a DTensor over several ranks.

    Example:
        >>> import torch, hodiff
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
        >>> def u(x):
        ...     return model(x)[0]
        >>> def equation(x):  # u'' = -sin x
        ...     return hodiff.laplacian(u)(x) + x.sin()[0]
        >>> inside = 3.14159 * torch.rand(50, 1).double()
        >>> ends = torch.tensor([[0.0], [3.14159]]).double()
        >>> optimizer = hodiff.optim.ENGD(model)
        >>> losses = [optimizer.step((equation, inside), (u, ends)).item() for _ in range(30)]
        >>> losses[-1] < 1e-4 * losses[0]
        True

    Source: J. Müller & M. Zeinhofer, "Achieving high accuracy with PINNs via energy natural gradient descent", ICML
    2023, section 3; A. Guzmán-Cordero, F. Dangel, G. Goldshlager & M. Zeinhofer, "Improving energy natural gradient
    descent through Woodbury, momentum, and randomization" (2025), for the equations in sample space, and momentum.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1.0,
        damping: float = 1e-6,
        momentum: float = 0.0,
        *,
        line_search_fn: str | None = GRID,
        chunk_size: int | None = None,
    ):
        require_choice("ENGD", "line_search_fn", line_search_fn, (GRID,), optional=True)
        super().__init__(model, settings_in(locals()), chunk_size)

    @torch.no_grad()
    def step(self, *terms: Term) -> Tensor:  # type: ignore[override]
        """Take one step, within `hodiff.corrected()`, and set gradients.

        Args:
            *terms: Pairs of a function of one point that returns residuals, a tensor of any shape, and the points:
                tensors, or pytrees of them, with the points along their first dimension. The functions call the model.

        Returns:
            The loss before the step.

        Raises:
            InputError: If there is no term, or one is invalid; or if numbers are not finite. Nothing has changed then.
        """
        self.require_dtypes()
        for term in terms or (None,):
            if not (isinstance(term, tuple) and len(term) == 2):
                raise InputError(
                    f"ENGD: step: expected pairs (function, points), got {term!r}; pass step((equation, inside), "
                    "(boundary, edge))."
                )
        counts = [self._require_function(*term) for term in terms]
        values = self._scaled(terms, counts)
        loss = _half_square(values)
        # Each term's rows, as the loss is a sum of means.
        rows = [
            [each / math.sqrt(count) for each in self._rows(*term, value.shape[1])]
            for term, count, value in zip(terms, counts, values, strict=True)
        ]
        joint = [torch.cat([each.flatten(0, 1)[:, None] for each in leaf]) for leaf in zip(*rows, strict=True)]
        direction = self._descend(joint, torch.cat([each.reshape(-1) for each in values]), loss)
        if self.setting("line_search_fn") is None:
            self.add([-each for each in direction], self.parameters())
        else:
            self._search(direction, lambda: _half_square(self._scaled(terms, counts)), loss)
        return loss

    def _scaled(self, terms: Sequence[Term], counts: Sequence[int]) -> list[Tensor]:
        """Evaluate the residuals of all terms, over the roots of their numbers of points."""
        return [self._values(*term) / math.sqrt(count) for term, count in zip(terms, counts, strict=True)]

    def _search(self, direction: Sequence[Tensor], value: Callable[[], Tensor], start: Tensor) -> None:
        """Take the step of least loss among halvings of the direction, or none."""
        parameters = self.parameters()
        places, best, least, misses = [p.clone() for p in parameters], 0.0, start, 0

        def take(factor: float) -> None:
            for parameter, place in zip(parameters, places, strict=True):
                parameter.copy_(place)
            self.add([-factor * each for each in direction], parameters)

        for factor in (0.5**k for k in range(_HALVINGS + 1)):
            take(factor)
            if bool((found := value()) < least):
                best, least, misses = factor, found, 0
            elif best:
                misses += 1
            if misses == _MISSES:
                break
        take(best)


class SPRING(SampleSpaceOptimizer):
    r"""Stochastic reconfiguration with momentum, in sample space: natural gradients for wavefunctions.

    $$ \bar O_i = \frac{1}{\sqrt N} \big(\nabla_\theta \log \psi(x_i) - \text{mean}\big), \qquad
       \bar\epsilon_i = \frac{1}{\sqrt N} \big(E(x_i) - \text{mean}\big) $$

    $$ \phi \leftarrow \alpha \phi + \bar O^\top (\bar O \bar O^\top + \mu I)^{-1} (\bar\epsilon - \alpha \bar O \phi),
       \qquad \theta \leftarrow \theta - \min\Big(\gamma, \frac{\sqrt C}{\|\phi\|}\Big)\, \phi $$

    for variational Monte Carlo, with local energies $E(x_i)$ at walkers $x_i$ drawn from $|\psi|^2$. At momentum 0 this
    is stochastic reconfiguration in sample space (MinSR). A complex $\log \psi$ of real parameters has a row for its
    real and one for its imaginary part. Where parameters are fewer than walkers, the equivalent equations in the
    parameters are solved. Gradients are set to $\bar O^\top \bar\epsilon$, half that of the mean energy.

    Args:
        model: Module whose parameters are trained.
        lr: $\gamma$, a number or a tensor with one number.
        damping: $\mu$.
        momentum: $\alpha$.
        norm_constraint: C, the largest squared norm of a step; None for no bound.
        chunk_size: Number of walkers that are differentiated together; None for all.

    Raises:
        InputError: If an argument is invalid, or a parameter complex or a DTensor over several ranks.

    Example:
        >>> import torch, hodiff
        >>> class Gaussian(torch.nn.Module):  # the ground state of an oscillator, for a = 1
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.a = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        ...     def forward(self, x):
        ...         return -self.a * x.square().sum(-1) / 2
        >>> psi = Gaussian()
        >>> optimizer = hodiff.optim.SPRING(psi, lr=0.5, momentum=0.0, norm_constraint=None)
        >>> generator = torch.Generator().manual_seed(0)
        >>> for _ in range(40):
        ...     walkers = torch.randn(100, 1, generator=generator, dtype=torch.float64) / (2 * psi.a.detach()) ** 0.5
        ...     value, slope, laplacian = hodiff.taylor.value_grad_laplacian(psi, batched=True)(walkers)
        ...     energies = -(laplacian + slope.square().sum(-1)) / 2 + walkers.square().sum(-1) / 2
        ...     energy = optimizer.step(psi, walkers, energies.detach())
        >>> round(psi.a.item(), 3), round(energy.item(), 3)
        (1.0, 0.5)

    Source: G. Goldshlager, N. Abrahamsen & L. Lin, "A Kaczmarz-inspired approach to accelerate the optimization of
    neural network wavefunctions", Journal of Computational Physics 516 (2024), section 3; A. Chen & M. Heyl,
    "Empowering deep neural quantum states through efficient optimization", Nature Physics 20 (2024), for momentum 0.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-2,
        damping: float = 1e-3,
        momentum: float = 0.99,
        *,
        norm_constraint: float | None = 1e-3,
        chunk_size: int | None = None,
    ):
        super().__init__(model, settings_in(locals()), chunk_size)

    @torch.no_grad()
    def step(self, log_psi: Callable[[Any], Tensor], walkers: PyTree, energies: Tensor) -> Tensor:  # type: ignore[override]
        r"""Take one step, within `hodiff.corrected()`, and set gradients.

        Args:
            log_psi: Function of one walker that returns $\log \psi$, or $\log |\psi|$: one number, real or complex. It
                may be the model, and else calls it.
            walkers: Tensors, or pytrees of them, with N walkers along their first dimension.
            energies: Local energies (N,), real or complex; clip outliers before.

        Returns:
            The mean of the local energies.

        Raises:
            InputError: If an argument is invalid, or numbers are not finite. Nothing has changed then.
        """
        self.require_dtypes()
        count = self._require_function(log_psi, walkers)
        if not isinstance(energies, Tensor) or energies.shape != (count,):
            got = describe(energies) if isinstance(energies, Tensor) else type(energies).__name__
            raise InputError(f"SPRING: step: energies: expected a tensor of shape ({count},), got {got}.")
        values = self._values(log_psi, walkers)
        width = values.shape[1]
        if width > 2:
            raise InputError(
                f"SPRING: step: log_psi: expected a function of one walker that returns one number, got {width} "
                "numbers; return log|psi| of the walker without a batch dimension."
            )
        rows = [(each - each.mean(0)) / math.sqrt(count) for each in self._rows(log_psi, walkers, width)]
        mean = energies.mean()
        noise = energies - mean
        parts = torch.view_as_real(noise.resolve_conj()) if noise.is_complex() else noise[:, None]
        # The energies' imaginary parts have no rows if log psi is real.
        right = torch.zeros_like(values)
        right[:, : parts.shape[1]] = parts[:, :width] / math.sqrt(count)
        direction = self._descend(rows, right, mean.real)
        bound = self.setting("norm_constraint")
        norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in direction])))
        steps = [-each for each in direction]
        rate = float(self.setting("lr"))
        if bound is not None and rate * norm > math.sqrt(bound):
            steps = [each * (math.sqrt(bound) / (rate * norm)) for each in steps]
        self.add(steps, self.parameters())
        return mean.real


def _half_square(values: Sequence[Tensor]) -> Tensor:
    return torch.stack([each.square().sum() for each in values]).sum() / 2
