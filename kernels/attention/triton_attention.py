r"""Attention and its derivatives to second order by Triton, in memory that is linear in both lengths.

With $P$ the weights, $\delta(t)$ the row sums of $P \circ t$ and $G$ the cotangent of $O$, two identities avoid
separate passes for row sums: $\delta(\bar P)$ is the row sum of $G \circ O$, with dropout as well, and its tangent is
the row sum of $\dot G \circ O + G \circ \dot O$. So a gradient takes the passes of `triton_output` and
`triton_gradients`, and so does its tangent. No pass adds to results of another pass, and results are the same in every
run.

Sums run in float32, or in float64 for float64. Computed numbers that are multiplied with tensors, such as weights, are
rounded to bfloat16 for bfloat16 tensors and to 11 bits for float16. `triton_tiles` multiplies float32 tensors, with
about twice the errors of plain float32.

Source: T. Dao, "FlashAttention-2", 2023, sections 3.1 and 3.2, for value and gradient; their tangents are derived in
docs/explanations/attention_second_order.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError as TritonError

from hodiff.kernels.attention.options import Options
from hodiff.kernels.attention.triton_call import Call
from hodiff.kernels.attention.triton_call import takes as takes


class Saved(NamedTuple):
    """Results of a value that save its gradient one pass.

    Attributes:
        out: The value.
        top: Greatest score of each row, zero if the row sees no key; times log2(e), unless a mask is added to scores.
        inverse: 1 over the sum of exponentials of scores minus the greatest, zero if the row sees no key.
    """

    out: Tensor
    top: Tensor
    inverse: Tensor


def value(options: Options, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None) -> Tensor:
    r"""Compute $O = P V$.

    Args:
        options: Options of attention.
        q: Tensor (..., L, E), float16, bfloat16 or float32; with Triton 3.9 also float64.
        k: Tensor (..., S, E), of as many dimensions and the same dtype; batch dimensions broadcast.
        v: Tensor (..., S, F), of as many dimensions and the same dtype; batch dimensions broadcast.
        mask: Tensor that broadcasts with (..., L, S): boolean, True where a query sees a key, or floating-point, added
            to the scores; or None.
        seed: Integer tensor that broadcasts with (..., 1, 1), below 2**32, or None without dropout.

    Returns:
        Tensor (..., L, F).

    Raises:
        InputError: If `takes` is False for the tensors.
    """
    return value_to_save(options, q, k, v, mask, seed).out


def value_to_save(options: Options, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None) -> Saved:
    """Compute `value`, and the row statistics that save `gradient` its first pass."""
    call = Call(options, q, k, v, mask, seed)
    saved = Saved(call.output(), call.row_numbers(), call.row_numbers())
    call.output_pass(out=saved.out, top=saved.top, inverse=saved.inverse)
    return saved


def tangent(
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    q_t: Tensor | None,
    k_t: Tensor | None,
    v_t: Tensor | None,
) -> Tensor:
    r"""Compute $\dot O$ for tangents of q, k and v; None is zero."""
    call = Call(options, q, k, v, mask, seed)
    out_t = call.output()
    if q_t is None and k_t is None and v_t is None:
        return out_t.zero_()
    call.output_pass(q_t=q_t, k_t=k_t, v_t=v_t, out_t=out_t)
    return out_t


def gradient(
    options: Options,
    wanted: tuple[bool, bool, bool],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    g: Tensor,
    saved: Saved | None = None,
) -> tuple[Tensor, ...]:
    r"""Compute the wanted $\bar Q, \bar K, \bar V$ of a cotangent g (..., L, F): 9 matrix products, 7 with `saved`."""
    if not any(wanted):
        return ()
    call = Call(options, q, k, v, mask, seed)
    bar = call.row_numbers() if wanted[0] or wanted[1] else None
    if saved is None:
        rows = {"top": call.row_numbers(), "inverse": call.row_numbers(), "bar": bar}
        call.output_pass(g=g, **rows)
    else:
        if bar is not None:
            call.row_products(g, saved.out, bar)
        rows = {"top": saved.top, "inverse": saved.inverse, "bar": bar}
    return call.gradients(wanted, False, g=g, **rows)


def gradient_tangent(
    options: Options,
    wanted: tuple[bool, bool, bool],
    with_output: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    g: Tensor,
    q_t: Tensor | None,
    k_t: Tensor | None,
    v_t: Tensor | None,
    g_t: Tensor | None,
) -> tuple[Tensor, ...]:
    """Tangents of `gradient` and, last, of the output if wanted: 24 matrix products, 3 less without `g_t`."""
    call = Call(options, q, k, v, mask, seed)
    out_t: tuple[Tensor, ...] = (call.output(),) if with_output else ()
    if q_t is None and k_t is None and v_t is None and g_t is None:
        inputs = zip((q, k, v), wanted, strict=True)
        return *(torch.zeros_like(each) for each, want in inputs if want), *(each.zero_() for each in out_t)
    tangents = {"q_t": q_t, "k_t": k_t, "v_t": v_t}
    # Row numbers that no pass reads are not written.
    names = {
        "top": any(wanted),
        "inverse": any(wanted),
        "mean": any(wanted) and not (q_t is None and k_t is None),
        "bar": wanted[0] or wanted[1],
        "bar_t": wanted[0] or wanted[1],
    }
    rows = {name: call.row_numbers() for name, needed in names.items() if needed}
    call.output_pass(g=g, g_t=g_t, **tangents, **rows, out_t=out_t[0] if with_output else None)
    return *call.gradients(wanted, True, g=g, g_t=g_t, **tangents, **rows), *out_t
