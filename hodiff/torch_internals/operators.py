"""Operators and kernels of torch that have no public name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, _ops

# An operator for one signature, and all of one name.
OpOverload = _ops.OpOverload
OpOverloadPacket = _ops.OpOverloadPacket

Kernel = Callable[..., Any]

# Gradients that torch computes by a kernel of their own.
softmax_gradient: Kernel = torch.ops.aten._softmax_backward_data.default
log_softmax_gradient: Kernel = torch.ops.aten._log_softmax_backward_data.default
distances_gradient: Kernel = torch.ops.aten._cdist_backward

# `torch.cdist` with the kernel's number of a way to compute, which the public function does not let through.
distances: Kernel = torch._VF.cdist  # type: ignore[attr-defined]
normalized_by_batches: Kernel = torch.ops.aten._native_batch_norm_legit.default

# What public functions call, which a mode that corrects operators has to know.
native_batch_norm: Kernel = torch._native_batch_norm_legit
batch_norm_with_update: Kernel = torch.ops.aten._batch_norm_with_update
pack_padded_sequence: Kernel = torch._pack_padded_sequence
pad_packed_sequence: Kernel = torch._pad_packed_sequence
weight_norm: Kernel = torch._weight_norm
weight_norm_kernel: Kernel = torch._weight_norm_interface
hardsigmoid: Kernel = torch._C._nn.hardsigmoid
glu: Kernel = torch._C._nn.glu
in_projections: Kernel = F._in_projection_packed  # type: ignore[attr-defined]


def schema_of(operator: Any) -> Any:
    """The name and the arguments of an operator, with those that it writes to."""
    return operator._schema


def has_onednn_products() -> bool:
    """Whether this torch has oneDNN's matrix products."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` for float32 matrices on a CPU, by oneDNN; nothing differentiates it."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return product
