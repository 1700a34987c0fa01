"""Values, gradients and Hessian products of torch's operator database, on a GPU against the CPU, with corrections."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import hodiff
from benchmarks.gpu.measure import HAS_GPU, Row, report, skipped

SECONDS = 80
# Float64 on both devices: what remains are orders of summation and libraries.
TOLERANCE = 1e-6


def measure(small: bool) -> None:
    """Compare as many operators as the time allows, spread over the database."""
    del small
    if not HAS_GPU:
        return skipped("operator database", "it compares a GPU with the CPU, and there is no GPU")
    from torch.testing._internal.common_methods_invocations import op_db

    stride = 7  # coprime to the number of operators, so that a cut leaves a sample of all families
    order = [op_db[place * stride % len(op_db)] for place in range(len(op_db))]
    end, compared, failed = time.monotonic() + SECONDS, 0, 0
    for operator in order if len(op_db) % stride else op_db:
        if time.monotonic() > end:
            break
        differences = list(_differences(operator))
        compared += bool(differences)
        for what, error in differences:
            if not isinstance(error, float) or error > TOLERANCE:
                failed += 1
                report(Row("operator database", f"{operator.name}, {what}", remark=f"GPU and CPU differ: {error}"))
    report(Row("operator database", f"{compared} of {len(op_db)} operators compared", remark=f"{failed} differ"))
    return None


def _differences(operator: Any) -> Iterator[tuple[str, float | str]]:
    """Yield the relative difference of each derivative of the first sample, or the exception of one device alone."""
    if torch.float64 not in operator.supported_dtypes("cpu") or not operator.supports_autograd:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            sample = next(iter(operator.sample_inputs("cpu", torch.float64, requires_grad=False)), None)
        except Exception:  # some samples need packages
            return
        if sample is None or not isinstance(sample.input, Tensor):
            return

        def derivatives(device: str) -> Any:
            moved = tree_map(
                lambda each: each.to(device) if isinstance(each, Tensor) else each,
                (sample.input, sample.args, sample.kwargs),
            )
            x, args, kwargs = moved

            def total(x: Tensor) -> Tensor:
                torch.manual_seed(0)
                found = operator.op(x, *args, **kwargs)
                leaves = [each for each in torch.utils._pytree.tree_leaves(found) if isinstance(each, Tensor)]
                return sum(((each.abs() ** 2).sum() for each in leaves), x.new_zeros(()).abs())

            found: dict[str, Any] = {}
            for name, f in {
                "value": lambda: total(x),
                "gradient": lambda: _gradient(total, x),
                "product": lambda: hodiff.hvp(total, x, torch.ones_like(x)),
            }.items():
                try:
                    found[name] = f().cpu()
                except Exception as error:
                    found[name] = type(error).__name__
            return found

        host, gpu = derivatives("cpu"), derivatives("cuda")
    for name, expected in host.items():
        found = gpu[name]
        if isinstance(expected, str) or isinstance(found, str):
            if type(expected) is not type(found):
                yield name, f"{found} on the GPU, {expected} on the CPU"
            continue
        scale = expected.abs().max().item() if expected.numel() else 0.0
        yield name, ((found - expected).abs().max().item() / max(scale, 1e-30) if expected.numel() else 0.0)


def _gradient(f: Any, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    with hodiff.corrected():
        (found,) = torch.autograd.grad(f(leaf), leaf)
    return found
