"""Curvature for laplace-torch, on any model that hodiff differentiates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from laplace.curvature import GGNInterface
from laplace.utils import Kron
from torch import Tensor, nn

from hodiff.common.module_state import functional_call, untouched_buffers
from hodiff.common.options import require_choice, require_generator, require_int
from hodiff.corrections import corrected
from hodiff.derivatives import jacobian
from hodiff.doors.kronecker_factors import examples_of, factors_of_layers, nearest_kronecker, require_independent
from hodiff.errors import InputError
from hodiff.operators import (
    EmpiricalFisherOperator,
    FisherOperator,
    GaussNewtonOperator,
    HessianOperator,
    LinearOperator,
)
from hodiff.operators.kfac.columns import Loss
from hodiff.operators.kfac.kfac_options import EMPIRICAL, EXACT, MONTE_CARLO
from hodiff.operators.linearized.likelihoods import known_likelihood, likelihood_of

# Names of the curvatures, and those of K-FAC for the gradients that they average.
FISHER = {"gauss-newton": EXACT, "fisher": MONTE_CARLO, "empirical-fisher": EMPIRICAL}
CURVATURES = (*FISHER, "hessian")
# Numbers of a Jacobian that are computed together, 32 MiB in float64: small models take many examples at once.
AT_ONCE = 2**22


# `SubnetLaplace` accepts subclasses of `GGNInterface` and `EFInterface` only.
class Backend(GGNInterface):
    r"""Back end of laplace-torch: `Laplace(model, likelihood, ..., backend=hodiff.doors.laplace.Backend)`.

    With the loss $\ell$ of laplace-torch, summed over the examples (half the squared error, or cross-entropy), the
    Jacobians $J_i$ of the outputs, and $\Lambda_i = \nabla_f^2 \ell_i$:

    | structure | result for "gauss-newton" |
    |---|---|
    | "full" | $H = \sum_i J_i^\top \Lambda_i J_i$, exact, by products |
    | "diag" | the exact diagonal of H, by formulas of layers and gradients of examples |
    | "kron" | K-FAC (`hodiff.KFACOperator`) for layers that it supports |
    | "kron" of other weights | the Kronecker product nearest to their exact block |
    | "kron" of other vectors, as of `LayerNorm` | their exact block |
    | "lowrank" | the `rank` largest eigenvalues of H and their eigenvectors, by Lanczos over all data |

    Jacobians, products and factors use hodiff's corrections, so models may contain attention, recurrent layers and
    shared weights. For "kron", examples must not influence each other.

    Args:
        model: The model; with `last_layer`, a `FeatureExtractor` of laplace-torch.
        likelihood: "classification" or "regression".
        last_layer: Whether only the last layer's parameters count.
        subnetwork_indices: Indices of the parameters that count, for "full" and "diag".
        dict_key_x: Key of the inputs in batches that are dicts.
        dict_key_y: Key of the targets in batches that are dicts.
        curvature: "gauss-newton", with the Hessian of any `lossfunc`, and the Fisher matrix for laplace-torch's own;
            "fisher", an estimate of the Fisher matrix from `samples` drawn targets; "empirical-fisher", from gradients
            of the given targets, whose scale for regression is that of half the squared error, half the matrix of
            laplace-torch's own back ends; or "hessian", for "full", "diag" and "lowrank".
        samples: Number of targets that "fisher" draws for each example, unless a call says so by `mc_samples`.
        sharing: Treatment of tokens and pixels in K-FAC, "expand" or "reduce", as for `hodiff.KFACOperator`.
        rank: Number of eigenvalues of "lowrank".
        generator: Source of drawn targets; by default a new generator with seed 0.

    Raises:
        InputError: If an option is unknown; on use, if Jacobians are needed of outputs that are no matrix (examples,
            outputs), examples influence each other in "kron", or the structure does not support the curvature.

    Example:
        >>> import torch
        >>> from laplace import Laplace
        >>> from hodiff.doors.laplace import Backend
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(2, 1)
        >>> inputs, targets = torch.randn(50, 2), torch.randn(50, 1)
        >>> data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=25)
        >>> la = Laplace(model, "regression", "all", "full", backend=Backend)
        >>> la.fit(data)
        >>> torch.allclose(la.H[:2, :2], inputs.T @ inputs, atol=1e-4)
        True

    Source: Daxberger, Kristiadi, Immer, Eschenhagen, Bauer, Hennig, "Laplace redux - effortless Bayesian deep
    learning", NeurIPS 2021, section 3.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        last_layer: bool = False,
        subnetwork_indices: Tensor | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        *,
        curvature: str = "gauss-newton",
        samples: int = 1,
        sharing: str = "expand",
        rank: int = 10,
        generator: torch.Generator | None = None,
    ):
        require_choice("Backend", "curvature", curvature, CURVATURES)
        require_choice("Backend", "sharing", sharing, ("expand", "reduce"))
        require_int("Backend", "samples", samples, 1)
        require_int("Backend", "rank", rank, 1)
        require_generator("Backend", "generator", generator)
        super().__init__(model, likelihood, last_layer, subnetwork_indices, dict_key_x, dict_key_y)
        # Calls then use the buffers that the model has, of which modules in training mode update copies.
        self.buffers_dict: dict[str, Tensor] = {}
        self.curvature, self.samples, self.sharing, self.rank = curvature, samples, sharing, rank
        self.generator = generator or torch.Generator().manual_seed(0)

    def full(self, x: Any, y: Tensor, N: int | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """Compute the loss and the matrix (parameters, parameters); see `laplace.curvature.CurvatureInterface`."""
        operator, chosen = self._operator([(x, y)], self._samples_in(options)), self.subnetwork_indices
        if chosen is None:
            matrix = operator.to_dense()
        else:
            columns = torch.zeros(operator.shape[0], len(chosen), dtype=operator.dtype, device=operator.device)
            columns[chosen, torch.arange(len(chosen))] = 1
            matrix = (operator @ columns)[chosen]
        # Last, as embeddings with max_norm write to their weights, which the operator would refuse.
        return self._loss_of(x, y), self._scale * matrix

    def diag(self, x: Any, y: Tensor, N: int | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """Compute the loss and the diagonal (parameters,); see `laplace.curvature.CurvatureInterface`."""
        operator = self._operator([(x, y)], self._samples_in(options))
        exact = {"method": "exact"} if self.curvature == "hessian" else {"exact": True}
        diagonal = self._scale * operator.diagonal(**exact).value
        chosen = self.subnetwork_indices
        return self._loss_of(x, y), diagonal if chosen is None else diagonal[chosen]

    def kron(self, x: Any, y: Tensor, N: int, **options: Any) -> tuple[Tensor, Kron]:
        """Compute the loss and Kronecker factors of each parameter; see `laplace.curvature.CurvatureInterface`.

        Args:
            x: Inputs of a batch.
            y: Targets of the batch.
            N: Number of examples in all batches.
            **options: `kfac_approx` and `mc_samples`, as `sharing` and `samples` of the back end.

        Returns:
            The loss and the factors, which add up over batches.

        Raises:
            InputError: If the curvature is "hessian", or an option is unknown.
        """
        sharing = options.pop("kfac_approx", self.sharing)
        require_choice("Backend", "kfac_approx", sharing, ("expand", "reduce"))
        samples = self._samples_in(options)
        if self.curvature == "hessian":
            raise InputError(
                "Backend: curvature: expected 'gauss-newton', 'fisher' or 'empirical-fisher' for Kronecker factors, "
                "got 'hessian', which may be indefinite."
            )
        factors = self._by_layers(x, y, sharing, samples)
        others = {name: p.shape for name, p in self.params_dict.items() if name not in factors}
        if others:
            factors |= self._by_rows(x, y, others, samples)
        for each in factors.values():
            if len(each) == 2:
                # The first factor adds up over batches, and the second one is averaged.
                each[1] = each[1] * (len(y) / N)
        return self._loss_of(x, y), Kron([factors[name] for name in self.params_dict])

    def eig_lowrank(self, data_loader: Iterable[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Compute eigenvectors (parameters, k), positive eigenvalues (k,) and the loss, for `LowRankLaplace`.

        Args:
            data_loader: The batches.

        Returns:
            Eigenvectors and eigenvalues of the `rank` largest eigenvalues that are positive, and the loss.
        """
        device = next(self.model.parameters()).device
        data = [(x.to(device), y.to(device)) for x, y in data_loader]
        operator = self._operator(data, self.samples)
        found = operator.eigsh(min(self.rank, operator.shape[0]), which="LA", method="lanczos")
        kept = found.resolved & (found.eigenvalues > 0)
        loss = torch.stack([self._loss_of(x, y) for x, y in data]).sum()
        return found.eigenvectors[:, kept], self._scale * found.eigenvalues[kept], loss

    def jacobians(self, x: Any, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """Compute Jacobians (examples, outputs, parameters) and outputs; see `laplace.curvature.CurvatureInterface`."""
        if enable_backprop:
            with corrected(), untouched_buffers(self.model.modules()):
                return super().jacobians(x, enable_backprop=True)
        J, f = self._jacobians(x)
        return (J if self.subnetwork_indices is None else J[:, :, self.subnetwork_indices]), f

    functorch_jacobians = jacobians

    def selected_output_jacobians(
        self, x: Any, outputs: Tensor, enable_backprop: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute Jacobians of chosen outputs; see `laplace.curvature.CurvatureInterface`."""
        with corrected(), untouched_buffers(self.model.modules()):
            return super().selected_output_jacobians(x, outputs, enable_backprop)

    def gradients(self, x: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        """Compute gradients (examples, parameters) and the loss; see `laplace.curvature.CurvatureInterface`."""
        with corrected(), untouched_buffers(self.model.modules()):
            return super().gradients(x, y)

    @property
    def _scale(self) -> float:
        """Factor from the curvature of torch's summed loss to that of laplace-torch's."""
        return self.factor**2 if self.curvature == "empirical-fisher" else self.factor

    def _module_and_inputs(self, x: Any) -> tuple[nn.Module, Any]:
        """Return the module whose parameters count, and its inputs."""
        if not self.last_layer:
            return self.model, x
        with torch.no_grad(), untouched_buffers(self.model.modules()):
            return self.model.last_layer, self.model.forward_with_features(x)[1]

    def _outputs(self, x: Any) -> Tensor:
        with torch.no_grad(), untouched_buffers(self.model.modules()):
            f: Tensor = self.model(x)
        return f

    def _loss_of(self, x: Any, y: Tensor) -> Tensor:
        return self.factor * self.lossfunc(self._outputs(x), y)

    def _samples_in(self, options: dict[str, Any]) -> int:
        """Return the number of drawn targets; raise on options that would have no effect."""
        samples = options.pop("mc_samples", self.samples)
        if options or (samples != self.samples and self.curvature != "fisher"):
            names = ", ".join(options or ["mc_samples"])
            raise InputError(
                f"Backend: curvature: expected no options without effect on {self.curvature!r}, got {names}; pass "
                "backend_kwargs, such as {'curvature': 'fisher', 'samples': 10}."
            )
        require_int("Backend", "mc_samples", samples, 1)
        return int(samples)

    def _loss_with_columns(self, samples: int) -> Loss:
        seed = int(torch.randint(2**31, (), generator=self.generator, device=self.generator.device))
        likelihood = likelihood_of("Backend", self.lossfunc) if self.curvature == "fisher" else None
        return Loss("Backend", self._loss_for_kfac(), False, True, FISHER[self.curvature], samples, likelihood, seed)

    def _loss_for_kfac(self) -> Callable[..., Tensor]:
        """Return the loss such that K-FAC's "exact" is its Hessian, as in the Gauss-Newton matrix."""
        likelihood = known_likelihood(self.lossfunc)
        if self.curvature != "gauss-newton" or likelihood is None or likelihood.information is None:
            return self.lossfunc
        # K-FAC would use the Fisher information of this loss, as of smoothed labels; of plain functions, it knows none.
        return lambda outputs, targets: self.lossfunc(outputs, targets)

    def _point(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.params_dict.items()}

    def _operator(self, data: list[Any], samples: int) -> LinearOperator:
        module = self._model
        pairs = [(self._module_and_inputs(x)[1], y) for x, y in data]
        options: dict[str, Any] = {"data": pairs, "reduction": "sum", "batch_size": lambda pair: len(pair[1])}
        if self.curvature == "hessian":

            def loss(point: dict[str, Tensor], pair: Any) -> Tensor:
                return self.lossfunc(functional_call(module, point, (pair[0],)), pair[1])

            return HessianOperator(loss, self._point(), **options)
        if self.curvature == "fisher":
            options |= {"samples": samples, "generator": self.generator}
        kinds = {"fisher": FisherOperator, "empirical-fisher": EmpiricalFisherOperator}
        kind: Any = kinds.get(self.curvature, GaussNewtonOperator)
        operator: LinearOperator = kind(module, self.lossfunc, self._point(), **options)
        return operator

    def _jacobians(self, x: Any) -> tuple[Tensor, Tensor]:
        module, inputs = self._module_and_inputs(x)

        def outputs(point: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            with untouched_buffers(module.modules()):
                f = functional_call(module, point, (inputs,))
            return f, f.detach()

        parts, f = jacobian(outputs, has_aux=True)(self._point())
        if f.dim() != 2:
            raise InputError(
                f"Backend: model: expected outputs (examples, outputs), got shape {tuple(f.shape)}; return a matrix."
            )
        return torch.cat([parts[name].flatten(2) for name in self.params_dict], dim=2), f

    def _rows(self, x: Any, y: Tensor, samples: int) -> Iterator[Tensor]:
        r"""Yield matrices R (rows, parameters) for a few examples each; the curvature is the sum of $R^\top R$."""
        f = self._outputs(x)
        count = sum(p.numel() for p in self.params_dict.values())
        size = max(1, min(len(y), AT_ONCE // max(1, count * f[0].numel())))
        if size == len(y) > 1:
            # Compare a batch in one part, too, so that its size does not decide whether a model is refused.
            half = slice(size // 2)
            require_independent(self._outputs(examples_of(x, half, len(y))), f, half)
        columns = self._loss_with_columns(samples).columns(f, y, 0)
        # laplace-torch factorizes the blocks, which torch cannot do in 16 bits.
        dtype = torch.promote_types(f.dtype, torch.float32)
        roots = self._scale**0.5 * columns.chunk(0, len(columns)).permute(1, 2, 0).to(dtype)
        for start in range(0, len(y), size):
            part = slice(start, start + size)
            J, own = self._jacobians(examples_of(x, part, len(y)))
            require_independent(own, f, part)
            yield torch.einsum("nck,ncp->nkp", roots[part], J.to(dtype)).flatten(0, 1)

    def _by_layers(self, x: Any, y: Tensor, sharing: str, samples: int) -> dict[str, list[Tensor]]:
        """Return K-FAC factors of the parameters for which K-FAC has them."""
        module, inputs = self._module_and_inputs(x)
        options: dict[str, Any] = {"fisher": FISHER[self.curvature], "sharing": sharing}
        if self.curvature == "fisher":
            options |= {"samples": samples, "generator": self.generator}
        found = factors_of_layers(module, self._loss_for_kfac(), inputs, y, options)
        return {name: [self._scale * first, *others] for name, (first, *others) in found.items()}

    def _by_rows(self, x: Any, y: Tensor, shapes: dict[str, torch.Size], samples: int) -> dict[str, list[Tensor]]:
        """Return exact blocks of vectors, and of other parameters the nearest Kronecker products."""
        sizes = [p.numel() for p in self.params_dict.values()]
        parts = [dict(zip(self.params_dict, rows.split(sizes, 1), strict=True)) for rows in self._rows(x, y, samples)]
        found: dict[str, list[Tensor]] = {}
        for name, shape in shapes.items():
            rows = torch.cat([part[name] for part in parts])
            found[name] = (
                [rows.T @ rows]
                if len(shape) == 1
                else nearest_kronecker(rows.view(-1, shape[0], rows.shape[1] // shape[0]))
            )
        return found
