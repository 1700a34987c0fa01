"""K-FAC for losses that contain derivatives of a network by its inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils import _pytree as pytree

from hodiff.common.options import require_choice
from hodiff.corrections import Corrections
from hodiff.errors import InputError
from hodiff.optim.finite_numbers import require_finite
from hodiff.optim.local_models import put_gradients
from hodiff.optim.optimizer_states import Shapes
from hodiff.optim.settings import GRID, QUADRATIC, settings_in
from hodiff.optim.solvers.layer_uses import LayerRecorder, UsedTerm, matrix_of, split_matrices
from hodiff.optim.solvers.residual_terms import ResidualOptimizer, Term, half_square

# Kinds of terms: without and with derivatives of the network.
_KINDS = ("values", "derivatives")
# Relative difference of gradients above which parameters are used outside of the layers.
_OUTSIDE = 1e-3


class PINNKFAC(ResidualOptimizer):
    r"""K-FAC for physics-informed networks: Kronecker factors of a layer's value, slopes and Laplacian together.

    $$ f(\theta) = \sum_t \frac{1}{2 N_t} \sum_{i=1}^{N_t} \|r_t(x_{ti})\|^2 $$

    In Taylor mode a layer of weight W multiplies S vectors of each point: its input, the derivatives of the input, and
    their Laplacian. With these vectors $a_{is}$ and the gradients $g_{is}$ of the residual by their images,

    $$ A_t = \frac{1}{N_t S} \sum_{i,s} a_{is} a_{is}^\top, \qquad B_t = \frac{1}{N_t} \sum_{i,s} g_{is} g_{is}^\top,
       \qquad G_W \approx \sum_t (A_t + \mu I) \otimes (B_t + \mu I) $$

    $$ D = \alpha\, \phi - G^{-1} \nabla f, \qquad \phi = \gamma D, \qquad \theta \leftarrow \theta + \phi $$

    with factors that are running averages of decay $\beta$, first plain means. In A, a ends in 1 for values and in 0
    for derivatives, as the bias adds to values only. Vectors that do not influence the residual are left out, which
    makes the block of the last layer exact for a linear equation in which a single vector enters, as in Poisson's.
    Terms without derivatives, such as those of a boundary, share a pair of factors, as do terms with derivatives. The
    sum of both Kronecker products is inverted exactly. A step costs some gradients, and the memory of the vectors
    instead of the Jacobian.

    Args:
        model: Module whose trained parameters are all weights and biases of `torch.nn.Linear`, called as modules.
        lr: $\gamma$, a number or a tensor with one number; with a line search, the longest step.
        damping: $\mu$, but at least the rounding of each factor.
        momentum: $\alpha$; the quadratic model chooses its own.
        factor_decay: $\beta$.
        line_search_fn: "grid" takes the step of least loss among $\gamma D, \gamma D / 2, \dots$, or none, as
            `hodiff.optim.ENGD`. "quadratic" first chooses the lengths of $G^{-1} \nabla f$ and of the last step
            together, by the minimum of the loss's quadratic model with the exact Gauss-Newton matrix, damped by $\mu$;
            the grid begins at that step. None takes the full step.
        chunk_size: Number of points that are differentiated together; None for all.

    Raises:
        InputError: If an argument is invalid, a parameter belongs to another kind of layer, is complex, or a DTensor
            over several ranks.

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
        >>> optimizer = hodiff.optim.PINNKFAC(model, damping=1e-4)
        >>> losses = [optimizer.step((equation, inside), (u, ends)).item() for _ in range(20)]
        >>> losses[-1] < 1e-2 * losses[0]
        True

    Source: F. Dangel, J. Müller & M. Zeinhofer, "Kronecker-factored approximate curvature for physics-informed neural
    networks", NeurIPS 2024, section 3; J. Martens & R. Grosse, ICML 2015, section 7 for the quadratic model, and
    appendix B for the inverse of a sum of two Kronecker products.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1.0,
        damping: float = 1e-2,
        momentum: float = 0.0,
        *,
        factor_decay: float = 0.95,
        line_search_fn: str | None = QUADRATIC,
        chunk_size: int | None = None,
    ):
        require_choice("PINNKFAC", "line_search_fn", line_search_fn, (QUADRATIC, GRID), optional=True)
        super().__init__(model, settings_in(locals()), chunk_size)
        self._layers()

    # A step needs functions of one point, where torch's takes a closure.
    @torch.no_grad()
    def step(self, *terms: Term) -> Tensor:  # type: ignore[override]
        """Take one step, within `hodiff.corrected()`, and set gradients.

        Args:
            *terms: Pairs of a function of one point that returns residuals, and the points, as for `hodiff.optim.ENGD`.
                Functions differentiate the model by `hodiff.laplacian`, `hodiff.partial` or other operators in Taylor
                mode.

        Returns:
            The loss before the step.

        Raises:
            InputError: If there is no term, or one is invalid; if parameters are used outside of calls of their layers
                in Taylor mode; or if numbers are not finite. Nothing has changed then.
        """
        self.require_dtypes()
        counts, layers = self.counts(terms), self._layers()
        used = [self._used(term, count, layers) for term, count in zip(terms, counts, strict=True)]
        loss = half_square([each.residuals for each in used])
        gradients = {p: torch.stack([each.gradients[p] for each in used]).sum(0) for p in self.parameters()}
        require_finite(self.caller, "values and derivatives", [loss, *gradients.values()])
        if not any(each.uses for each in used) and float(loss):
            raise InputError(
                f"{self.caller}: step: function: expected functions that depend on the model's parameters, got none; "
                "call the model that the optimizer was created with, and look for .detach() or torch.no_grad()."
            )
        matrices = {layer: matrix_of(layer, gradients) for layer in layers}
        for layer, matrix in matrices.items():
            self._require_all_uses(layer, matrix, used)
        if self._ranks.watched:
            self._watch(list(gradients.values()), float(loss))
        averages = {layer: self._averaged(layer, used) for layer in layers}
        solved = {layer: self._natural_step(list(averages[layer].values()), matrices[layer]) for layer in layers}
        require_finite(self.caller, "directions", list(solved.values()))
        before = {p: p.clone() for p in gradients}
        if self.setting("line_search_fn") == QUADRATIC:
            direction = self._best_direction(used, matrices, solved)
        else:
            steps = dict(split_matrices(solved))
            momentum = self.setting("momentum")
            direction = [steps[p] - momentum * self._last_step(p) for p in before]
        if self.setting("line_search_fn") is None:
            self.add([-each for each in direction], list(before))
        else:
            self.search(direction, lambda: half_square(self.scaled(terms, counts)), loss)
        put_gradients(list(gradients), list(gradients.values()))
        for parameter, place in before.items():
            self.state[parameter]["last_step"] = parameter - place
        for layer, kinds in averages.items():
            state = self.state[layer.weight]
            state["averages"] = state.get("averages", 0) + 1
            for kind, (A, B) in kinds.items():
                state.update({f"A_{kind}": A, f"B_{kind}": B})
        return loss

    def _layers(self) -> list[nn.Linear]:
        """Return the layers with trained parameters; raise on parameters of other layers."""
        linear = [each for each in self.module.modules() if isinstance(each, nn.Linear)]
        layers = [each for each in linear if each.weight.requires_grad]
        own = {id(p) for layer in layers for p in layer.parameters() if p.requires_grad}
        if any(layer.bias is not None and not layer.bias.requires_grad for layer in layers):
            raise InputError(
                f"{self.caller}: model: expected weight and bias of each layer trained together, got a frozen bias; "
                "train or freeze both."
            )
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and id(parameter) not in own:
                raise InputError(
                    f"{self.caller}: model: expected trained weights of torch.nn.Linear and their biases, got {name} "
                    f"{tuple(parameter.shape)}; freeze it with requires_grad_(False), or use hodiff.optim.ENGD."
                )
        return layers

    def _used(self, term: Term, count: int, layers: Sequence[nn.Linear]) -> UsedTerm:
        """Evaluate a term, with the uses of layers and the gradients of half its squares."""
        function, points = term
        recorder, one = LayerRecorder(layers), self.of_one(function)
        leaves, spec = pytree.tree_flatten(points)
        size, parameters = self.chunk_size or count, self.parameters()
        parts: list[UsedTerm] = []
        for start in range(0, count, size):
            part = pytree.tree_unflatten([each[start : start + size] for each in leaves], spec)
            with self.refusing_randomness(), torch.enable_grad(), Corrections(lean=True, many=True):
                with recorder.recording():
                    values: Tensor = vmap(recorder.of_sample(one))(part) / math.sqrt(count)
                uses = recorder.uses(values)
                total = values.square().sum() / 2
                found = torch.autograd.grad(total, parameters, allow_unused=True) if total.requires_grad else ()
            given = dict(zip(parameters, found or [None] * len(parameters), strict=True))
            gradients = {p: torch.zeros_like(p) if g is None else g for p, g in given.items()}
            parts.append(UsedTerm(values.detach(), uses, gradients))
        return UsedTerm.joined(parts)

    def _require_all_uses(self, layer: nn.Linear, gradient: Tensor, used: Sequence[UsedTerm]) -> None:
        """Raise unless the recorded uses of a layer give its gradient."""
        found, scale = torch.zeros_like(gradient), 0.0
        for each in used:
            if layer in each.uses:
                uses = each.uses[layer]
                found += uses.weighted(each.residuals)
                scale += float(each.residuals.norm() * uses.inputs.norm() * uses.gradients.norm())
        eps = torch.finfo(gradient.dtype).eps
        if float((found - gradient).norm()) > _OUTSIDE * float(gradient.norm()) + 100 * eps * scale:
            name = next(name for name, p in self.module.named_parameters() if p is layer.weight)
            raise InputError(
                f"{self.caller}: step: function: expected a function that uses the weights of the model in calls of "
                f"its layers only, with derivatives in Taylor mode, as by hodiff.laplacian and hodiff.partial, got "
                f"another use of {name} or of its bias; call the layer instead of torch.nn.functional.linear or a "
                "product with its weight, replace torch.func.grad, torch.autograd.grad and torch.func.functional_call, "
                "or use hodiff.optim.ENGD."
            )

    def _averaged(self, layer: nn.Linear, used: Sequence[UsedTerm]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the running averages of the factors of a layer, by kinds of terms."""
        state, found = self.state.get(layer.weight, {}), {}
        weight = max(1 / (state.get("averages", 0) + 1), 1 - self.setting("factor_decay"))
        for kind in _KINDS:
            own = [u.uses[layer] for u in used if layer in u.uses and u.uses[layer].moving == (kind == _KINDS[1])]
            if not own and f"A_{kind}" not in state:
                continue
            if own:
                # The gradients are scaled by the roots of the numbers of points already.
                A = torch.stack([
                    torch.einsum("nsp,nsq->pq", u.inputs, u.inputs) / len(u.inputs.flatten(0, 1)) for u in own
                ]).mean(0)
                B = torch.stack([torch.einsum("knsp,knsq->pq", u.gradients, u.gradients) for u in own]).sum(0)
            else:
                A, B = (torch.zeros_like(state[f"{name}_{kind}"]) for name in "AB")
            if f"A_{kind}" in state:
                A, B = state[f"A_{kind}"].lerp(A, weight), state[f"B_{kind}"].lerp(B, weight)
            found[kind] = (A, B)
        return found

    def _natural_step(self, pairs: Sequence[tuple[Tensor, Tensor]], gradient: Tensor) -> Tensor:
        """Solve for the step of a layer, a matrix, by its one or two Kronecker products."""
        # Factors in float64 leave the rounding of the averages only.
        wide = torch.float32 if gradient.device.type == "mps" else torch.float64
        damping, right = self.setting("damping"), gradient.to(wide)
        damped = [tuple(_shifted(each.to(wide), damping) for each in pair) for pair in pairs]
        if not damped:
            return torch.zeros_like(gradient)
        A, B = (self._root(each) for each in damped[-1])
        if len(damped) == 1:
            found = torch.cholesky_solve(torch.cholesky_solve(right, B).T, A).T
        else:
            # In the coordinates in which the last product is the identity and the first is diagonal.
            (a, U), (b, V) = (_joint_coordinates(root, other) for root, other in zip((A, B), damped[0], strict=True))
            found = V @ ((V.T @ right @ U) / (1 + b[:, None] * a)) @ U.T
        return found.to(gradient.dtype)

    def _root(self, factor: Tensor) -> Tensor:
        root, info = torch.linalg.cholesky_ex(factor)
        if bool(info):
            raise InputError(
                f"{self.caller}: damping: expected damping with which the factors are positive definite, got "
                f"{self.setting('damping')!r}; increase it, or use a model in float64."
            )
        return root

    def _best_direction(
        self, used: Sequence[UsedTerm], gradients: dict[nn.Linear, Tensor], solved: dict[nn.Linear, Tensor]
    ) -> list[Tensor]:
        """Return minus the sum of multiples of step and last step that minimizes the damped Gauss-Newton model."""
        last = {layer: matrix_of(layer, {p: self._last_step(p) for p in layer.parameters()}) for layer in solved}
        ways = [{layer: -each for layer, each in solved.items()}]
        if any(bool(each.any()) for each in last.values()):
            ways.append(last)
        slopes = torch.stack([
            torch.stack([(way[layer] * g).sum() for layer, g in gradients.items()]).sum() for way in ways
        ])
        moved = torch.stack([torch.cat([each.along(way) for each in used]) for way in ways])
        flat = torch.stack([torch.cat([way[layer].reshape(-1) for layer in solved]) for way in ways])
        curvature = moved @ moved.T + self.setting("damping") * flat @ flat.T
        # Parallel directions have a singular matrix.
        factors = -torch.linalg.pinv(curvature.double(), hermitian=True) @ slopes.double()
        require_finite(self.caller, "lengths of steps", [factors])
        joint = {
            layer: -torch.stack([float(factor) * way[layer] for factor, way in zip(factors, ways, strict=True)]).sum(0)
            for layer in solved
        }
        steps = dict(split_matrices(joint))
        return [steps[p] for p in self.parameters()]

    def shapes_of_state(self, parameter: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Shapes:
        """See `StochasticOptimizer`; the weight of a layer has the layer's factors."""
        factors: Shapes = {}
        for layer in self._layers():
            if layer.weight is parameter:
                n, p = layer.in_features + (layer.bias is not None), layer.out_features
                factors = {f"{name}_{kind}": (m, m) for name, m in (("A", n), ("B", p)) for kind in _KINDS}
        return {**super().shapes_of_state(parameter, group, state), **factors}

    def _last_step(self, parameter: Tensor) -> Tensor:
        known = self.state.get(parameter, {}).get("last_step")
        return torch.zeros_like(parameter) if known is None else known


def _shifted(factor: Tensor, damping: float) -> Tensor:
    """Add a multiple of the identity, at least that of rounding."""
    rounding = len(factor) * torch.finfo(factor.dtype).eps * float(factor.trace())
    return factor + max(damping, rounding) * torch.eye(len(factor), dtype=factor.dtype, device=factor.device)


def _joint_coordinates(root: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues d and a matrix U with U^T R R^T U = I and U^T M U = diag(d), for a Cholesky factor R."""
    half = torch.linalg.solve_triangular(root, other, upper=False)
    values, vectors = torch.linalg.eigh(torch.linalg.solve_triangular(root, half.T, upper=False))
    return values, torch.linalg.solve_triangular(root.T, vectors, upper=True)
