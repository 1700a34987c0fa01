"""Operators and kernels of torch that have no public name, and its database of operators with sample inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, _ops
from torch._decomp import decomposition_table


def operator_database(wrapper: Callable[..., Any], seed_all: Callable[[int], None]) -> list[Any]:
    """Return the `OpInfo` entries, after replacing the functions that seed around calls and samples."""
    from torch.testing._internal import common_methods_invocations as definitions
    from torch.testing._internal import common_utils
    from torch.testing._internal.opinfo import core

    definitions.wrapper_set_seed = wrapper
    common_utils.set_rng_seed = lambda seed=common_utils.SEED: seed_all(seed)
    # Sample functions would search the source of all running code for the unittest that called them.
    common_utils.extract_test_fn = core.extract_test_fn = lambda: None
    return list(definitions.op_db)


def parameter_names(op: Any) -> tuple[str, ...]:
    """Return an operator's argument names, in order: from its signature or, for a builtin, its first overload."""
    try:
        return tuple(inspect.signature(op.op).parameters)
    except (TypeError, ValueError):
        packet = getattr(torch.ops.aten, op.aten_name or op.name, None)
    overloads = packet.overloads() if packet is not None else []
    if not overloads:
        return ()
    schema = getattr(packet, overloads[0])._schema
    return tuple("input" if each.name == "self" else each.name for each in schema.arguments)


class Signature(NamedTuple):
    """Names of the arguments of a call: those that may be positional, in order, and those that may not."""

    positional: tuple[str, ...]
    by_name: tuple[str, ...]


def signatures_of(function: Any) -> Iterator[Signature]:
    """Yield the signatures of a function or method of torch, with the names that Python has."""
    if isinstance(function, FunctionType):
        given = inspect.signature(function).parameters.values()
        if not any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in given):
            names = [each.name for each in given if each.kind is each.POSITIONAL_OR_KEYWORD]
            yield Signature(tuple(names), tuple(each.name for each in given if each.kind is each.KEYWORD_ONLY))
        return
    for schema in torch._C._jit_get_schemas_for_operator(f"aten::{getattr(function, '__name__', '')}"):
        names = [each.name for each in schema.arguments if not each.kwarg_only]
        if isinstance(function, MethodDescriptorType) and "self" in names:
            names = ["self", *(name for name in names if name != "self")]
        if not isinstance(function, OpOverloadPacket):
            names = ["input" if name == "self" else name for name in names]
        yield Signature(tuple(names), tuple(each.name for each in schema.arguments if each.kwarg_only))


# An operator for one signature, and all operators of one name.
OpOverload = _ops.OpOverload
OpOverloadPacket = _ops.OpOverloadPacket

Kernel = Callable[..., Any]

# Other names of `index_put` in graphs, out of place and in place.
INDEX_PUT_OPERATORS = ("_unsafe_index_put", "_index_put_impl_")

# Gradients for which torch has separate kernels.
softmax_gradient: Kernel = torch.ops.aten._softmax_backward_data.default
log_softmax_gradient: Kernel = torch.ops.aten._log_softmax_backward_data.default
distances_gradient: Kernel = torch.ops.aten._cdist_backward

# torch's original functions, also if a package has replaced one by a wrapper.
built_in_functions: Any = torch._VF

# `torch.cdist` with the number of the kernel's method, which the public function does not accept.
distances: Kernel = torch._VF.cdist  # type: ignore[attr-defined]
normalized_by_batches: Kernel = torch.ops.aten._native_batch_norm_legit.default

# The operator that reads the number in a tensor.
number: Kernel = torch.ops.aten._local_scalar_dense.default

# The operator that makes zeros without memory, as tangents of constants.
zeros_without_memory: Kernel = torch.ops.aten._efficientzerotensor.default

# Functions that public functions call, which a mode that corrects operators has to know.
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
    """Return the operators on lists of tensors, by the name of the operator on one tensor."""
    return {each.__name__.split("_", 2)[2]: each for each in _FOREACH}


def schema_of(operator: Any) -> Any:
    """Return an operator's schema: its name and arguments, with those that it writes to."""
    return operator._schema


def plain_name(operator: Any) -> str:
    """Return an operator's name without underscores at the ends, with a namespace if it is not torch's own."""
    namespace, _, name = operator._schema.name.partition("::")
    return name.strip("_") if namespace == "aten" else f"{namespace}::{name.strip('_')}"


def writes(operator: Any) -> bool:
    """Whether an operator writes to its arguments."""
    return isinstance(operator, OpOverload) and bool(operator._schema.is_mutable)


def arguments_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of a call by name, with defaults, and the names of the arguments that are written to."""
    declared = operator._schema.arguments
    found: dict[str, Any] = {each.name: each.default_value for each in declared if each.has_default_value()}
    found |= {each.name: value for each, value in zip(declared, args, strict=False)} | dict(kwargs)
    written = [each.name for each in declared if each.alias_info is not None and each.alias_info.is_write]
    return found, [name for name in written if found.get(name) is not None]


def decomposition_of(operator: Any) -> Kernel | None:
    """Return torch's decomposition of an operator, or None."""
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
    """Run torch's own kernels instead of oneDNN's; unlike the public switch it does not affect TF32."""
    before = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def onednn_product(a: Tensor, b: Tensor) -> Tensor:
    """Compute `a @ b` for float32 matrices on a CPU, by oneDNN, without a derivative."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return product


def operator_named(name: str) -> Any:
    """Return all overloads of one of torch's own operators by its plain name; None if this torch has none."""
    found = getattr(torch.ops.aten, name, None) or getattr(torch.ops.aten, f"_{name}", None)
    return found if isinstance(found, OpOverloadPacket) else None


def builtins_named(name: str) -> list[Any]:
    """Return the compiled functions of an operator's name, which take the operator's arguments."""
    found = [getattr(module, name, None) for module in (torch, torch._C._nn)]
    return [each for each in found if isinstance(each, BuiltinFunctionType)]


def function_of_operator(operator: Any) -> str:
    """Return the name of an operator's function, such as linalg.det for aten.linalg_det.default; "" if unknown."""
    name = operator.__name__.split(".")[0] if isinstance(operator, OpOverload) else ""
    space, _, rest = name.partition("_")
    return f"{space}.{rest}" if space in {"linalg", "special", "fft"} else name


def overloads_of(packet: Any) -> list[Any]:
    """Return the operators of one name that return their results, and do not write them into arguments."""
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return [each for each in overloads if not any(argument.is_out for argument in each._schema.arguments)]


def places_of(operator: Any) -> dict[str, Any]:
    """Return the positional arguments of an operator, with defaults; `...` means no default."""
    return {
        each.name: each.default_value if each.has_default_value() else ...
        for each in operator._schema.arguments
        if not each.kwarg_only
    }


def names_of(operator: Any) -> list[str]:
    """Return the names of an operator's arguments, including keyword arguments."""
    return [each.name for each in operator._schema.arguments]


def number_places(packet: Any) -> dict[int | str, str]:
    """Names of an operator's real-number arguments, by position and name, without those that may be tensors."""
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
