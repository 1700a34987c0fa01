"""The formulas of attention and the kernels that evaluate them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.functions.attention import attention_formulas as formulas
from hodiff.functions.attention import backends
from hodiff.functions.attention.attention_arguments import gradient_plan
from hodiff.kernels.attention.options import Options
from hodiff.rules.blockwise import WithKernel, all_batched, blockwise
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.interception import makes_last_graph
from hodiff.torch_internals.tensors import broadcast_shape

# Arguments of the formulas, in order.
_PRIMALS, _TANGENTS = ("q", "k", "v", "mask", "seed"), ("q_t", "k_t", "v_t", "mask_t")


def value(options: Options) -> WithKernel:
    """Formula and kernel of $O$."""
    return WithKernel(partial(formulas.value, options), partial(_run, "value", options, (False,) * 4, True))


def tangent(options: Options) -> WithKernel:
    """Formula and kernel of the tangent of $O$."""
    return WithKernel(partial(formulas.tangent, options), partial(_run, "tangent", options, (False,) * 4, True))


def gradient(options: Options, wanted: tuple[bool, ...]) -> WithKernel:
    """Formula and kernel of the wanted gradients of q, k, v and the mask."""
    return WithKernel(partial(formulas.gradient, options, wanted), partial(_run, "gradient", options, wanted, False))


def gradient_tangent(options: Options, wanted: tuple[bool, ...], with_output: bool) -> WithKernel:
    """Formula and kernel of the tangents of the gradients and, last, of the output if wanted."""
    formula = partial(formulas.gradient_tangent, options, wanted, with_output)
    return WithKernel(formula, partial(_run, "gradient_tangent", options, wanted, with_output))


_NAMES = {
    "value": _PRIMALS,
    "tangent": (*_PRIMALS, *_TANGENTS),
    "gradient": (*_PRIMALS, "g"),
    "gradient_tangent": (*_PRIMALS, "g", *_TANGENTS, "g_t"),
}


def _run(
    kind: str, options: Options, wanted: tuple[bool, ...], with_output: bool, *tensors: Tensor | None
) -> tuple[Tensor, ...] | None:
    """Run a kernel; return None if it does not support the tensors."""
    if torch.compiler.is_compiling() or makes_last_graph():
        # Exported programs consist of torch's operators, and active transforms differentiate those.
        if torch.compiler.is_exporting() or in_transform():
            return None
        return tuple(in_graphs(kind, list(tensors), list(wanted), with_output, *options))
    given = dict(zip(_NAMES[kind], tensors, strict=True))
    evaluate = backends.on_gpu if given["q"].is_cuda else backends.on_cpu  # type: ignore[union-attr]  # always there
    return evaluate(kind, options, wanted, with_output, given)


@torch.library.custom_op("hodiff::attention", mutates_args=())
def in_graphs(
    kind: str,
    tensors: Sequence[Tensor | None],
    wanted: Sequence[bool],
    with_output: bool,
    scale: float,
    low: int | None,
    high: int | None,
    softcap: float | None,
    dropout_p: float,
    batch: Sequence[int],
) -> list[Tensor]:
    """Evaluate a formula, given by name, as one node of a compiled graph, so that memory stays linear there."""
    options = Options(scale, low, high, softcap, dropout_p, tuple(batch))
    chosen = tuple(wanted)
    formula = {
        "value": partial(value, options),
        "tangent": partial(tangent, options),
        "gradient": partial(gradient, options, chosen),
        "gradient_tangent": partial(gradient_tangent, options, chosen, with_output),
    }[kind]()
    plan = gradient_plan(tensors, chosen)
    return list(blockwise(formula, plan._replace(outputs=(*plan.outputs, *(True,) * with_output)), *tensors))


@in_graphs.register_fake
def _(kind: str, tensors: Sequence[Any], wanted: Sequence[bool], with_output: bool, *options: Any) -> list[Tensor]:
    del kind, options
    q, k, v, mask = tensors[:4]
    wide = torch.promote_types(q.dtype, torch.float32)
    batch = broadcast_shape(*[each.shape[:-2] for each in (q, k, v, mask) if each is not None])
    found = [each.new_empty(each.shape, dtype=wide) for each, want in zip(tensors[:4], wanted, strict=True) if want]
    return found + [q.new_empty((*batch, q.shape[-2], v.shape[-1]), dtype=wide)] * with_output


@in_graphs.register_vmap
def _(info: Any, in_dims: Any, kind: str, tensors: Sequence[Any], *rest: Any) -> tuple[list[Tensor], list[int]]:
    found = in_graphs(kind, list(all_batched(info.batch_size, in_dims[1], tensors)), *rest)
    return found, [0] * len(found)
