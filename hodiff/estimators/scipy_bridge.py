"""Operators for SciPy's algorithms: vectors on the host, in the working dtype or in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from torch import Tensor

from hodiff.estimators.view import View
from hodiff.torch_internals.autograd.wrapped_tensors import numbers_in

Apply = Callable[[Tensor], Tensor]


def host_operator(view: View, matmat: Apply, dtype: torch.dtype, rmatmat: Apply | None = None) -> ScipyOperator:
    """Return a SciPy operator of `dtype` for products of the view's vectors."""

    def through(apply: Apply) -> Callable[[np.ndarray], np.ndarray]:
        def run(columns: np.ndarray) -> np.ndarray:
            block = torch.tensor(columns.reshape(len(columns), -1), dtype=view.dtype, device=view.device)
            return numbers_in(apply(block).to("cpu", dtype)).reshape(-1, *columns.shape[1:])

        return run

    back = None if rmatmat is None else through(rmatmat)
    forward = through(matmat)
    return ScipyOperator(
        view.shape, matvec=forward, matmat=forward, rmatvec=back, rmatmat=back, dtype=str(dtype).removeprefix("torch.")
    )
