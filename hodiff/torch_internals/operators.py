"""Operators and kernels of torch that have no public name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, _ops
from torch._decomp import decomposition_table

# An operator for one signature, and all of one name.
OpOverload = _ops.OpOverload
OpOverloadPacket = _ops.OpOverloadPacket

Kernel = Callable[..., Any]

# What else `index_put` is in graphs, out of place and in place.
INDEX_PUT_OPERATORS = ("_unsafe_index_put", "_index_put_impl_")

# Gradients that torch computes by a kernel of their own.
softmax_gradient: Kernel = torch.ops.aten._softmax_backward_data.default
log_softmax_gradient: Kernel = torch.ops.aten._log_softmax_backward_data.default
distances_gradient: Kernel = torch.ops.aten._cdist_backward

# torch's functions as they were, also where a package has put a wrapper in the place of one.
built_in_functions: Any = torch._VF

# `torch.cdist` with the kernel's number of a way to compute, which the public function does not let through.
distances: Kernel = torch._VF.cdist  # type: ignore[attr-defined]
normalized_by_batches: Kernel = torch.ops.aten._native_batch_norm_legit.default

# What reads the one number of a tensor.
number: Kernel = torch.ops.aten._local_scalar_dense.default

# What makes zeros that have no memory, as tangents of what does not move.
zeros_without_memory: Kernel = torch.ops.aten._efficientzerotensor.default

# What public functions call, which a mode that corrects operators has to know.
native_batch_norm: Kernel = torch._native_batch_norm_legit
batch_norm_with_update: Kernel = torch.ops.aten._batch_norm_with_update
pack_padded_sequence: Kernel = torch._pack_padded_sequence
pad_packed_sequence: Kernel = torch._pad_packed_sequence
weight_norm: Kernel = torch._weight_norm
grouped_mm: Kernel = torch._grouped_mm
safe_softmax: Kernel = torch._safe_softmax
weight_norm_kernel: Kernel = torch._weight_norm_interface
sparse_sum: Kernel = torch._sparse_sum
hardsigmoid: Kernel = torch._C._nn.hardsigmoid
glu: Kernel = torch._C._nn.glu
in_projections: Kernel = F._in_projection_packed  # type: ignore[attr-defined]

# Operators on lists of tensors.
_FOREACH: tuple[Kernel, ...] = (
    torch._foreach_abs_,
    torch._foreach_acos_,
    torch._foreach_add,
    torch._foreach_add_,
    torch._foreach_addcdiv_,
    torch._foreach_addcmul_,
    torch._foreach_asin_,
    torch._foreach_atan_,
    torch._foreach_ceil_,
    torch._foreach_clamp_max,
    torch._foreach_clamp_max_,
    torch._foreach_clamp_min,
    torch._foreach_clamp_min_,
    torch._foreach_copy_,
    torch._foreach_cos_,
    torch._foreach_cosh_,
    torch._foreach_div,
    torch._foreach_div_,
    torch._foreach_erf_,
    torch._foreach_erfc_,
    torch._foreach_exp_,
    torch._foreach_expm1_,
    torch._foreach_floor_,
    torch._foreach_frac_,
    torch._foreach_lerp_,
    torch._foreach_lgamma_,
    torch._foreach_log10_,
    torch._foreach_log1p_,
    torch._foreach_log2_,
    torch._foreach_log_,
    torch._foreach_maximum,
    torch._foreach_maximum_,
    torch._foreach_minimum,
    torch._foreach_minimum_,
    torch._foreach_mul,
    torch._foreach_mul_,
    torch._foreach_neg_,
    torch._foreach_norm,
    torch._foreach_pow,
    torch._foreach_pow_,
    torch._foreach_reciprocal_,
    torch._foreach_round_,
    torch._foreach_rsqrt_,
    torch._foreach_sigmoid,
    torch._foreach_sigmoid_,
    torch._foreach_sign_,
    torch._foreach_sin_,
    torch._foreach_sinh_,
    torch._foreach_sqrt_,
    torch._foreach_sub,
    torch._foreach_sub_,
    torch._foreach_tan_,
    torch._foreach_tanh,
    torch._foreach_tanh_,
    torch._foreach_trunc_,
    torch._foreach_zero_,
)


def foreach_by_name() -> dict[str, Kernel]:
    """The operators on lists of tensors, by what each does with one."""
    return {each.__name__.split("_", 2)[2]: each for each in _FOREACH}


def schema_of(operator: Any) -> Any:
    """The name and the arguments of an operator, with those that it writes to."""
    return operator._schema


def plain_name(operator: Any) -> str:
    """An operator's name without underscores at its ends, and with its namespace if it is none of torch's own."""
    namespace, _, name = operator._schema.name.partition("::")
    return name.strip("_") if namespace == "aten" else f"{namespace}::{name.strip('_')}"


def writes(operator: Any) -> bool:
    """Whether an operator writes to what it is given."""
    return isinstance(operator, OpOverload) and bool(operator._schema.is_mutable)


def arguments_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The arguments of a call by name, with those left to their defaults; and which are written to."""
    declared = operator._schema.arguments
    found: dict[str, Any] = {each.name: each.default_value for each in declared if each.has_default_value()}
    found |= {each.name: value for each, value in zip(declared, args, strict=False)} | dict(kwargs)
    written = [each.name for each in declared if each.alias_info is not None and each.alias_info.is_write]
    return found, [name for name in written if found.get(name) is not None]


def decomposition_of(operator: Any) -> Kernel | None:
    """What torch says an operator is made of, if it does."""
    found: Kernel | None = None if getattr(operator, "is_view", False) else decomposition_table.get(operator)
    if found is None and hasattr(operator, "prim_impl_aten"):
        found = operator.prim_impl_aten
    if found is None and isinstance(operator, OpOverload) and operator._can_decompose():
        found = operator.decompose
    return found


def has_onednn_products() -> bool:
    """Whether this torch has oneDNN's matrix products."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@contextmanager
def without_onednn() -> Iterator[None]:
    """Let torch's own kernels run in place of oneDNN's; unlike the public switch it says nothing of TF32."""
    before = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def onednn_product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` for float32 matrices on a CPU, by oneDNN; nothing differentiates it."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return product


def operator_named(name: str) -> Any:
    """All overloads of one of torch's own operators, by its plain name; None where this torch has none."""
    found = getattr(torch.ops.aten, name, None) or getattr(torch.ops.aten, f"_{name}", None)
    return found if isinstance(found, OpOverloadPacket) else None


def builtins_named(name: str) -> list[Any]:
    """The compiled functions that take what the operator of their name takes, as those in Python need not."""
    found = [getattr(module, name, None) for module in (torch, torch._C._nn)]
    return [each for each in found if isinstance(each, BuiltinFunctionType)]


def function_of_operator(operator: Any) -> str:
    """What an operator's function is called, such as linalg.det for aten.linalg_det.default; "" for what is none."""
    name = operator.__name__.split(".")[0] if isinstance(operator, OpOverload) else ""
    space, _, rest = name.partition("_")
    return f"{space}.{rest}" if space in {"linalg", "special", "fft"} else name


def overloads_of(packet: Any) -> list[Any]:
    """The operators of one name that return what they compute; the others write it into arguments."""
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return [each for each in overloads if not any(argument.is_out for argument in each._schema.arguments)]


def places_of(operator: Any) -> dict[str, Any]:
    """What an operator takes by position, with defaults; `...` stands for none."""
    return {
        each.name: each.default_value if each.has_default_value() else ...
        for each in operator._schema.arguments
        if not each.kwarg_only
    }


def names_of(operator: Any) -> list[str]:
    """What the arguments of an operator are called, those by keyword included."""
    return [each.name for each in operator._schema.arguments]


def number_places(packet: Any) -> dict[int | str, str]:
    """The names of real numbers that an operator takes, by place and by name; without those that may be tensors."""
    kinds: dict[tuple[int | str, str], set[str]] = {}
    for each in overloads_of(packet):
        for i, argument in enumerate(each._schema.arguments):
            places = (argument.name,) if argument.kwarg_only else (i, argument.name)
            for place in places:
                kinds.setdefault((place, argument.name), set()).add(str(argument.type))
    tensors = {place for (place, _), types in kinds.items() if types & {"Tensor", "Optional[Tensor]"}}
    return {
        place: name
        for (place, name), types in kinds.items()
        if place not in tensors and types & {"number", "float", "Optional[number]", "Optional[float]"}
    }
